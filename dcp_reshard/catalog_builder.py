"""From the records of metadata files to a `Catalog`: checked, and turned into columns.

The records of each file are taken in turn; each chunk is matched with its storage entry. Then all
chunks of all tensors become a few arrays (`chunk_columns`, one pair per number of dims). What is
checked: see `metadata`.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_reshard.catalog import Catalog, KeyPath, KnownValue, StoredObject, StoredTensor
from dcp_reshard.chunk_columns import TensorChunks, to_columns
from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.metadata_entries import (
    BytesEntry,
    ChunkEntry,
    IndexEntry,
    MetadataEntry,
    SizeEntry,
    StorageEntry,
    TensorEntry,
)
from dcp_reshard.storage import check_file_name

__all__ = ["build_catalog"]

_MAX_DIMS = 16
_MAX_NAME_BYTES = 4096
_MAX_CHUNKS = 8_000_000
_SUPPORTED_VERSIONS = (None, "1.0.0")

_MAX_BYTE = 1 << 62

_Key = tuple[int, ...] | bytes | None
"""Offsets of a chunk, see `_chunk_key`; None for an object."""

_Places = dict[str, dict[_Key, StorageEntry]]
"""Storage entries by the key of the tensor or object, and by chunk."""


def build_catalog(entries: Iterable[MetadataEntry], *, digest: str) -> Catalog:
    """A catalog from the records of one metadata file, or of one per rank.

    Where ranks without collectives each stored the same box (replicas, objects), the lowest rank's
    copy is taken.

    Args:
        entries: Records of the files, in the order of the ranks.
        digest: Hash of the files.

    Raises:
        CheckpointFormatError: The records are inconsistent.
    """
    builder = _Builder()
    for entry in entries:
        builder.add(entry)
    return builder.build(digest)


@dataclass(slots=True)
class _Builder:
    """Collects file by file; a plain value would have to be rebuilt for each."""

    tensors: dict[str, TensorChunks] = field(default_factory=dict)
    objects: dict[str, StorageEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    key_paths: dict[str, KeyPath] = field(default_factory=dict)

    def add(self, metadata: MetadataEntry) -> None:
        if metadata.version not in _SUPPORTED_VERSIONS:
            raise CheckpointFormatError(
                f"metadata of version {_show(metadata.version)} is not supported, only '1.0.0' is"
            )
        described = _mapping(metadata.state_dict_metadata, "state_dict_metadata")
        places = self._places(_mapping(metadata.storage_data, "storage_data"))
        for fqn, entry in described.items():
            _check_name(fqn)
            if type(entry) is TensorEntry:
                self._add_tensor(fqn, entry, places.get(fqn, {}))
            elif type(entry) is BytesEntry:
                place = places.get(fqn, {}).pop(None, None)
                if place is None:
                    raise CheckpointFormatError(f"object `{fqn}`: not stored", fqn=fqn)
                self.objects.setdefault(fqn, place)
            else:
                raise CheckpointFormatError(
                    f"key `{fqn}`: described by a {type(entry).__name__}", fqn=fqn
                )
        left = {fqn: len(entries) for fqn, entries in places.items() if entries}
        if left:
            fqn = next(iter(left))
            raise CheckpointFormatError(
                f"key `{fqn}`: a storage entry that belongs to no chunk, and "
                f"{sum(left.values()) - 1} more of this kind",
                fqn=fqn,
            )
        self._add_key_paths(metadata.planner_data, described)

    def build(self, digest: str) -> Catalog:
        if sum(len(tensor.places) for tensor in self.tensors.values()) > _MAX_CHUNKS:
            raise CheckpointFormatError(f"more than {_MAX_CHUNKS} chunks")
        stored: dict[str, StoredTensor] = {}
        for ndim in sorted({len(tensor.shape) for tensor in self.tensors.values()}):
            same = {f: t for f, t in self.tensors.items() if len(t.shape) == ndim}
            stored |= to_columns(same, ndim, self.files)
        tensors = {fqn: stored[fqn] for fqn in self.tensors if fqn not in self.objects}
        objects = {}
        for fqn, place in self.objects.items():
            # As with shapes: what no rank asks for may be anything.
            known = KnownValue(refusal=_both_kinds()) if fqn in self.tensors else None
            file = self.files[place.relative_path]
            objects[fqn] = StoredObject(fqn, file, place.offset, place.length, known)
        catalog = Catalog(tensors, objects, tuple(self.files), self.key_paths, digest)
        catalog.check_disjoint()
        return catalog

    def _places(self, storage: Mapping[object, object]) -> _Places:
        places: _Places = {}
        for index, entry in storage.items():
            if (
                type(index) is not IndexEntry
                or type(entry) is not StorageEntry
                or not hasattr(index, "fqn")
                or not hasattr(entry, "length")
            ):
                raise CheckpointFormatError("storage_data does not map indices to storage entries")
            fqn, offset = index.fqn, index.offset
            if type(fqn) is not str or type(offset) not in (SizeEntry, type(None)):
                raise CheckpointFormatError(
                    f"a storage entry for the chunk of {_show(fqn)} at {_show(offset)}"
                )
            key = None if offset is None else _chunk_key(offset)
            chunks = places.get(fqn)
            if chunks is None:
                chunks = places[fqn] = {}
            if key in chunks:
                raise CheckpointFormatError(
                    f"key `{fqn}`: two storage entries for the chunk at {offset!r}"
                )
            chunks[key] = entry
            if type(entry.relative_path) is not str or entry.relative_path not in self.files:
                self.files[check_file_name(entry.relative_path)] = len(self.files)
            first, length = entry.offset, entry.length
            if (
                type(first) is not int
                or type(length) is not int
                or not 0 <= first < _MAX_BYTE
                or not 0 < length < _MAX_BYTE
            ):
                raise CheckpointFormatError(
                    f"key `{fqn}`: offset {_show(first)} and length {_show(length)} in file "
                    f"{entry.relative_path!r} are not a range of bytes",
                    file=entry.relative_path,
                )
            if entry.transform_descriptors:
                raise CheckpointFormatError(
                    f"key `{fqn}`: stored through stream transforms "
                    f"{_show(entry.transform_descriptors)}, which are not supported",
                    file=entry.relative_path,
                )
        return places

    def _add_tensor(
        self,
        fqn: str,
        entry: TensorEntry,
        places: dict[_Key, StorageEntry],
    ) -> None:
        shape = getattr(entry, "size", None)
        dtype = getattr(getattr(entry, "properties", None), "dtype", None)
        if (
            type(shape) is not SizeEntry
            or len(shape) > _MAX_DIMS
            or not isinstance(dtype, torch.dtype)
        ):
            raise CheckpointFormatError(
                f"tensor `{fqn}`: shape {_show(shape)} or dtype {_show(dtype)} is not understood; "
                f"up to {_MAX_DIMS} dims are",
                fqn=fqn,
            )
        tensor = self.tensors.get(fqn)
        again = tensor is not None
        if tensor is None:
            tensor = self.tensors[fqn] = TensorChunks(tuple(shape), dtype)
        if (tensor.shape, tensor.dtype) != (shape, dtype):
            # Loading it is an error, not loading from the checkpoint: others may not depend on it.
            tensor.defect = (
                f"one rank has stored shape {tensor.shape!r} of {tensor.dtype} under this key, "
                f"another {tuple(shape)!r} of {dtype}; a value that depends on the rank needs a "
                f"key that does"
            )
            places.clear()
            return
        if type(entry.chunks) is not list:
            raise CheckpointFormatError(f"tensor `{fqn}`: its chunks are not a list", fqn=fqn)
        if again and not tensor.boxes:
            tensor.boxes = set(map(_box_key, tensor.offsets, tensor.sizes))
        for chunk in entry.chunks:
            offsets, sizes = getattr(chunk, "offsets", None), getattr(chunk, "sizes", None)
            if type(chunk) is not ChunkEntry or type(offsets) is not SizeEntry:
                raise CheckpointFormatError(
                    f"tensor `{fqn}`: a {type(chunk).__name__} at {_show(offsets)} is not a chunk",
                    fqn=fqn,
                )
            if type(sizes) is not SizeEntry or not len(offsets) == len(sizes) == len(shape):
                raise CheckpointFormatError(
                    f"tensor `{fqn}`: a chunk at {offsets!r} of {_show(sizes)} in a tensor of "
                    f"{len(shape)} dims",
                    fqn=fqn,
                )
            place = places.pop(_chunk_key(offsets), None)
            if place is None and 0 in sizes:
                # torch 2.2 and earlier describe the empty shard of each rank that has one, all of
                # them with the same offsets, and store one.
                continue
            if place is None:
                raise CheckpointFormatError(
                    f"tensor `{fqn}`: the chunk at {offsets!r} is described but not stored", fqn=fqn
                )
            if again:
                # Boxes without elements are all kept: not all such records are empty, see `repair`.
                if 0 not in sizes and _box_key(offsets, sizes) in tensor.boxes:
                    continue
                tensor.boxes.add(_box_key(offsets, sizes))
            tensor.offsets.append(offsets)
            tensor.sizes.append(sizes)
            tensor.places.append(place)

    def _add_key_paths(self, planner_data: object, described: Mapping[str, object]) -> None:
        # Other planners keep other things here; only paths of this checkpoint's own keys are taken.
        if not isinstance(planner_data, dict):
            return
        for fqn, path in planner_data.items():
            if (
                type(path) is tuple
                and path
                and fqn in described
                and all(type(part) in (str, int) for part in path)
            ):
                self.key_paths.setdefault(fqn, path)


def _both_kinds() -> CheckpointFormatError:
    return CheckpointFormatError(
        "one rank has stored a tensor under this key, another a value that is not a tensor; a "
        "value that depends on the rank needs a key that does"
    )


def _chunk_key(offsets: SizeEntry) -> _Key:
    # Any number of tuples of three integers with one hash can be made up, which turns a dict of
    # them into a list. The hash of bytes is another one in each process.
    return tuple(offsets) if len(offsets) < 3 else array("q", offsets).tobytes()


def _box_key(offsets: Sequence[int], sizes: Sequence[int]) -> bytes:
    return array("q", (*offsets, *sizes)).tobytes()


def _show(value: object) -> str:
    """A value that may be anything, however deep: `repr` would recurse."""
    return f"{reprlib.repr(value):.100}"


def _mapping(value: object, name: str) -> dict[Any, object]:
    if type(value) is not dict:
        raise CheckpointFormatError(f"{name} is a {type(value).__name__}, not a dict")
    return value


def _check_name(fqn: object) -> None:
    if type(fqn) is not str or len(fqn.encode(errors="surrogatepass")) > _MAX_NAME_BYTES:
        raise CheckpointFormatError(
            f"key {fqn!r:.100} is not a string of up to {_MAX_NAME_BYTES} bytes"
        )
    if "\0" in fqn:
        raise CheckpointFormatError(f"key {fqn!r:.100} has a NUL character")
