"""`RankGrid`: a checkpoint of one file per tensor-parallel x data-parallel rank, as a `Catalog`.

How the catalog is read:

1. The files of the grid are found (`file_grid`).
2. Of each, the directory and the description of its contents are read (`torch_files`,
   `safetensors_files`), and flattened to keys as `dcp.save` flattens state dicts.
3. For each key it is looked up how the ranks hold it (`key_rules`).
4. The files' parts are put together (`grid_catalog`).

Reads no elements, unless copies without checksums are to be compared.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Literal

from dcp_reshard.catalog import Catalog, KeyPath, StoredObject, StoredTensor
from dcp_reshard.container import Read
from dcp_reshard.errors import CheckpointFormatError, StorageError
from dcp_reshard.file_grid import FolderFiles, GridPaths, find_paths, name_files
from dcp_reshard.fused import FusedBlocks
from dcp_reshard.grid_catalog import CompareReplicas, GridMerge, Rank
from dcp_reshard.key_rules import KeyRules, name_params
from dcp_reshard.payload import Payload
from dcp_reshard.safetensors_files import read_safetensors_file
from dcp_reshard.shard_rules import ShardDim, ShardRules
from dcp_reshard.storage import ByteSource, read_bytes
from dcp_reshard.threads import run_threads
from dcp_reshard.torch_files import flatten_values, read_torch_file

__all__ = ["RankGrid"]

_MAX_NAME_BYTES = 4096
_MAX_THREADS = 8
# Small reads of a file's directory and headers are served from blocks of this size.
_READ_AHEAD_BYTES = 4096
_FINGERPRINT_FILES = 16

Leaves = Mapping[KeyPath, object]


@dataclass(frozen=True, slots=True)
class RankGrid:
    """A checkpoint of one file per rank: a `CatalogSource`, to be read like any other checkpoint.

    Files are what `torch.save` wrote of a (nested) state dict, or ``.safetensors``. Keys are those
    that `dcp.save` would have made of that dict: ``model.layers.0.weight``.

    Example:
        >>> grid = RankGrid("step_100/model.tp{tp}.pt", {"wq.weight": 0, "wo.weight": 1})
        >>> dcp_reshard.load({"model": model.state_dict()}, grid)  # doctest: +SKIP
    """

    paths: GridPaths
    """``paths[tp][dp]``, or ``paths[tp]``, or a template with ``{tp}`` and ``{dp}``."""

    shard_dims: Mapping[str, int] = field(default_factory=dict)
    """The dim that tensor parallelism cuts, by parameter name. Others are held whole by all tp
    ranks."""

    _: KW_ONLY

    sizes: tuple[int, int] | None = None
    """Number of tp and dp ranks. If None, they are counted: then nothing tells that files of the
    last ranks are missing altogether."""

    shard_specs: Mapping[str, int | ShardDim] = field(default_factory=dict)
    """As `shard_dims`, by regular expression matched from the start of the name."""

    fused: Mapping[str, FusedBlocks] = field(default_factory=dict)
    """Blocks fused along the dim that is cut, by parameter name."""

    true_sizes: Mapping[str, int] = field(default_factory=dict)
    """Indices without padding, by parameter name, along the dim that is cut (dim 0, if none is).
    What is behind them, in a padded vocabulary say, is left out, and reported."""

    dp: Literal["split", "replicate"] = "split"
    """Whether dp ranks hold parts along dim 0 of what their tp rank holds, or all the same."""

    whole: Sequence[str] = ()
    """Regular expressions of names that every file holds whole, although `dp` is ``"split"``:
    buffers, say."""

    replicas: CompareReplicas = "recorded"
    """How what several files hold is compared: by recorded checksums where they tell
    (``"recorded"``), bit by bit where they do not (``"elements"``: reads it on this rank), or not
    at all (``"off"``)."""

    model_key: str = "model"
    """Key of the model's state dict in the files, if it is nested; names are given without it."""

    optimizer_key: str = "optimizer"
    """Key of the optimizer's state dict. State of a parameter is held like the parameter."""

    param_names: Sequence[str] | None = None
    """Names of the optimizer's parameters in the order of their numbers, as in
    ``[name for name, _ in model.named_parameters()]``. Then state that was saved under numbers, as
    `torch.optim` does, has keys with names, as `get_optimizer_state_dict` gives."""

    def __post_init__(self) -> None:
        """Check the choices."""
        for name, choices in (
            ("dp", ("split", "replicate")),
            ("replicas", ("recorded", "elements", "off")),
        ):
            if getattr(self, name) not in choices:
                wanted = " or ".join(map(repr, choices))
                raise ValueError(f"`{name}` must be {wanted}, got {getattr(self, name)!r}")

    def open(self) -> ByteSource:
        """The files of the grid.

        Raises:
            StorageError: Files of some ranks are missing.
        """
        paths = find_paths(self.paths, self.sizes)
        return FolderFiles(
            {
                name: path
                for names, row in zip(name_files(paths), paths, strict=True)
                for name, path in zip(names, row, strict=True)
            }
        )

    def read_catalog(self, source: ByteSource) -> Catalog:
        """What the files hold together.

        Raises:
            StorageError: A file is missing or could not be read.
            CheckpointFormatError: A file is not what it should be.
            LayoutError: The rules contradict each other.
        """
        names = name_files(find_paths(self.paths, self.sizes))
        files = {(t, d): name for t, row in enumerate(names) for d, name in enumerate(row)}
        missing = sorted(set(files.values()) - set(source.names()))
        if missing:
            raise StorageError(
                f"{len(missing)} of {len(files)} rank files are missing, the first is "
                f"{missing[0]!r}",
                file=missing[0],
            )
        contents = _read_files(source, list(dict.fromkeys(files.values())))
        if self.param_names is not None:
            contents = {
                name: name_params(leaves, self.param_names, optimizer_key=self.optimizer_key)
                for name, leaves in contents.items()
            }
        return self._merge(files, contents, source)

    def fingerprint(self, source: ByteSource) -> str:
        """Hash of the sizes of all files, and of the ends of some, where their checksums are."""
        names = [name for row in name_files(find_paths(self.paths, self.sizes)) for name in row]
        digest = hashlib.blake2b(digest_size=16)
        for i, name in enumerate(names):
            size = source.size(name)
            digest.update(f"{name} {size} ".encode(errors="surrogatepass"))
            if i < _FINGERPRINT_FILES:
                digest.update(read_bytes(source, name, max(0, size - _READ_AHEAD_BYTES), size))
        return digest.hexdigest()

    def __str__(self) -> str:
        """The template, or the first path."""
        if isinstance(self.paths, (str, os.PathLike)):
            return os.fspath(self.paths)
        first = find_paths(self.paths, self.sizes)[0][0]
        return f"{first} and the other rank files"

    def _merge(
        self, files: Mapping[Rank, str], contents: Mapping[str, Leaves], source: ByteSource
    ) -> Catalog:
        paths = _name_paths(contents)
        leaves = {
            name: {paths[path]: leaf for path, leaf in found.items()}
            for name, found in contents.items()
        }
        by_rank = {rank: leaves[name] for rank, name in files.items()}
        rules = KeyRules(
            ShardRules(self.shard_dims, self.shard_specs, self.fused),
            self.true_sizes,
            self.model_key,
            self.optimizer_key,
            split_dp=self.dp == "split",
            whole=self.whole,
        )
        numbers = {name: i for i, name in enumerate(contents)}
        sizes = (max(t for t, _ in files) + 1, max(d for _, d in files) + 1)
        merge = GridMerge(files, sizes, source, self.replicas, numbers)
        tensors: dict[str, StoredTensor] = {}
        objects: dict[str, StoredObject] = {}
        for fqn in paths.values():
            found = {rank: held[fqn] for rank, held in by_rank.items() if fqn in held}
            payloads = {rank: leaf for rank, leaf in found.items() if isinstance(leaf, Payload)}
            if len(payloads) == len(found):
                rule = rules.find(fqn, payloads, by_rank)
                tensors[fqn] = merge.merge_tensor(fqn, payloads, rule)
            else:
                objects[fqn] = merge.merge_object(fqn, found)
        return Catalog(
            tensors,
            objects,
            tuple(contents),
            key_paths={fqn: path for path, fqn in paths.items()},
            digest=self._digest(files, contents),
            notes=(*rules.check_used(), *merge.notes()),
        )

    def _digest(self, files: Mapping[Rank, str], contents: Mapping[str, Leaves]) -> str:
        """Hash of what the files say they hold, and of how it is understood."""
        digest = hashlib.blake2b(digest_size=16)
        # Not the paths: ranks may have mounted the files in different places. Not the specs as they
        # are: the `repr` of a class without one has an address.
        specs = {key: getattr(spec, "dim", spec) for key, spec in self.shard_specs.items()}
        parts: Iterable[object] = (replace(self, paths="", shard_specs=specs), files)
        for part in itertools.chain(parts, *(leaves.items() for leaves in contents.values())):
            digest.update(repr(part).encode(errors="surrogatepass"))
        return digest.hexdigest()


def _name_paths(contents: Mapping[str, Leaves]) -> dict[KeyPath, str]:
    """The key of each key path of all files."""
    paths: dict[KeyPath, str] = {}
    seen: dict[str, KeyPath] = {}
    for name, leaves in contents.items():
        for path in leaves:
            fqn = paths.setdefault(path, ".".join(map(str, path)))
            if seen.setdefault(fqn, path) != path:
                raise CheckpointFormatError(
                    f"file {name!r}: key `{fqn}` stands for {seen[fqn]!r} and for {path!r}",
                    file=name,
                    fqn=fqn,
                )
            if "\0" in fqn or len(fqn.encode(errors="surrogatepass")) > _MAX_NAME_BYTES:
                raise CheckpointFormatError(
                    f"file {name!r}: key {fqn!r:.100} has a NUL, or more than {_MAX_NAME_BYTES} "
                    f"bytes",
                    file=name,
                )
    return paths


def _read_files(source: ByteSource, names: Sequence[str]) -> dict[str, Leaves]:
    """What each file holds."""
    found: dict[str, Leaves] = {}

    def read_one(name: str) -> tuple[str, Leaves]:
        try:
            return name, _read_file(source, name)
        except CheckpointFormatError as error:
            raise type(error)(f"file {name!r}: {error}", file=name) from error

    def keep(result: tuple[str, Leaves]) -> None:
        found[result[0]] = result[1]

    run_threads(read_one, names, threads=min(_MAX_THREADS, len(names)), on_result=keep)
    return {name: found[name] for name in names}


def _read_file(source: ByteSource, name: str) -> Leaves:
    size = source.size(name)
    read = _ahead(source, name, size)
    if name.endswith(".safetensors"):
        payloads = read_safetensors_file(size, read)
        return {(key,): payload for key, payload in payloads.items()}
    return flatten_values(read_torch_file(size, read))


def _ahead(source: ByteSource, name: str, size: int) -> Read:
    """Reads of a file, small ones in blocks: headers of small records are close to each other."""
    start, block = 0, b""

    def read(first: int, last: int) -> bytes:
        nonlocal start, block
        if not start <= first <= last <= start + len(block):
            start = first
            block = read_bytes(source, name, first, min(size, max(last, first + _READ_AHEAD_BYTES)))
        return block[first - start : last - start]

    return read
