"""What a checkpoint holds, and where: the `Catalog`, whatever kind of files it was read from.

For each tensor a `StoredTensor` has its shape, its dtype and, as columns, the box, file, byte
offset and byte length of each chunk. A catalog of a million chunks is a few arrays a tensor, not a
million objects.

Says nothing of how a catalog is read (`metadata`), nor of where the elements lie inside an item
(`payload`).
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.coverage import find_defect
from dcp_reshard.errors import CheckpointFormatError, ChunkCoverageError
from dcp_reshard.payload import Payload
from dcp_reshard.storage import ByteSource

__all__ = ["Catalog", "CatalogSource", "KeyPath", "KnownValue", "StoredObject", "StoredTensor"]

KeyPath = tuple[str | int, ...]
"""Keys and list indices that lead to a value of a nested state dict."""


class CatalogSource(Protocol):
    """A checkpoint of some format: its files, and what they hold."""

    def open(self) -> ByteSource:
        """The files."""
        ...

    def read_catalog(self, source: ByteSource) -> Catalog:
        """What they hold."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """One global tensor of the checkpoint; row i of the columns is chunk i."""

    fqn: str
    """Key in the checkpoint."""

    shape: tuple[int, ...]
    """Global shape."""

    dtype: torch.dtype
    """dtype according to the metadata."""

    chunks: BoxArray
    """Box of each chunk, in global coordinates."""

    files: npt.NDArray[np.int32]
    """Index into `Catalog.files`."""

    starts: npt.NDArray[np.int64]
    """First byte of the chunk's item in its file."""

    lengths: npt.NDArray[np.int64]
    """Bytes of the item."""

    payloads: tuple[Payload, ...] | None = None
    """Where the elements of each chunk lie, if that is known without probing the items."""

    defect: str = ""
    """Why the tensor cannot be loaded from these chunks, if it is known that it cannot."""

    repaired: bool = False
    """Whether the chunks are other boxes than those that the metadata say, which were wrong."""

    def find_chunk(self, offsets: tuple[int, ...], hint: int | None = None) -> int | None:
        """Number of the chunk that starts at these offsets, or None.

        Args:
            offsets: First index of the chunk in each dim.
            hint: The number that it probably has.
        """
        if (
            hint is not None
            and hint < len(self.chunks)
            and tuple(self.chunks.offsets[hint].tolist()) == offsets
        ):
            return hint
        if len(offsets) != self.chunks.offsets.shape[1]:
            return None
        (found,) = np.nonzero(
            (self.chunks.offsets == np.array(offsets, dtype=np.int64)).all(axis=1)
        )
        return int(found[0]) if len(found) else None

    def check_usable(self) -> None:
        """Check that nothing is known of the chunks that makes them useless.

        Raises:
            ChunkCoverageError: Something is.
        """
        if self.defect:
            raise ChunkCoverageError(f"tensor `{self.fqn}`: {self.defect}", fqn=self.fqn)

    def check_coverage(self) -> None:
        """Check that the chunks tile the tensor.

        Raises:
            ChunkCoverageError: Part of the tensor is stored by no chunk, or by several.
        """
        self.check_usable()
        try:
            defect = find_defect(self.chunks, Box.full(self.shape))
        except CheckpointFormatError as error:
            raise CheckpointFormatError(f"tensor `{self.fqn}`: {error}", fqn=self.fqn) from error
        if defect is None:
            return
        kind = "no chunk" if defect.count == 0 else f"{defect.count} chunks"
        raise ChunkCoverageError(
            f"tensor `{self.fqn}`: the checkpoint stores region {defect.box} of shape "
            f"{self.shape!r} in "
            f"{kind}; the checkpoint itself is wrong, nothing was loaded",
            fqn=self.fqn,
        )


@dataclass(frozen=True, slots=True, eq=False)
class KnownValue:
    """A value that came with the catalog, and needs no reading."""

    value: object = None
    """The value: plain data."""

    refusal: CheckpointFormatError | None = None
    """Why there is none to be had, if so."""

    def contents(self, fqn: str) -> bytes:
        """The value as an item, which is what planners take.

        Args:
            fqn: Key of the value.

        Raises:
            CheckpointFormatError: There is none to be had.
        """
        if self.refusal is not None:
            raise type(self.refusal)(f"object `{fqn}`: {self.refusal}", fqn=fqn)
        buffer = io.BytesIO()
        torch.save(self.value, buffer)
        return buffer.getvalue()


@dataclass(frozen=True, slots=True)
class StoredObject:
    """One value of the checkpoint that is not a tensor."""

    fqn: str
    """Key in the checkpoint."""

    file: int
    """Index into `Catalog.files`."""

    start: int
    """First byte of the item in its file."""

    length: int
    """Bytes of the item."""

    known: KnownValue | None = None
    """The value, if it came with the catalog; then there is no item."""


@dataclass(frozen=True, slots=True, eq=False)
class Catalog:
    """All that a checkpoint says it holds."""

    tensors: Mapping[str, StoredTensor]
    """Tensors by key."""

    objects: Mapping[str, StoredObject]
    """Other values by key."""

    files: tuple[str, ...]
    """Names of the data files."""

    key_paths: Mapping[str, KeyPath] = field(default_factory=dict)
    """Path of each key in the nested state dict that was saved; empty if it was not recorded."""

    digest: str = ""
    """Hash of the metadata read; equal on all ranks that see the same checkpoint."""

    read_from: tuple[str, ...] = ()
    """Names of the files that it was read from."""

    notes: tuple[str, ...] = ()
    """What whoever loads from the checkpoint should know of how its files were understood."""

    def __contains__(self, fqn: object) -> bool:
        """Whether the checkpoint has this key."""
        return fqn in self.tensors or fqn in self.objects

    @property
    def keys(self) -> list[str]:
        """All keys, sorted."""
        return sorted([*self.tensors, *self.objects])

    def check_disjoint(self) -> None:
        """Check that no two items share bytes of a file.

        Raises:
            CheckpointFormatError: Two do.
        """
        tensors, objects = list(self.tensors.values()), list(self.objects.values())
        # With a dtype: an empty list is one of floating-point numbers, which cannot count bytes.
        items = np.array([(o.file, o.start, o.length) for o in objects], np.int64).reshape(-1, 3)
        files = np.concatenate([*(t.files for t in tensors), items[:, 0]])
        starts = np.concatenate([*(t.starts for t in tensors), items[:, 1]])
        lengths = np.concatenate([*(t.lengths for t in tensors), items[:, 2]])
        order = np.lexsort((starts, files))
        files, starts, lengths = files[order], starts[order], lengths[order]
        bad = np.flatnonzero((files[1:] == files[:-1]) & (starts[:-1] + lengths[:-1] > starts[1:]))
        if len(bad):
            i = int(bad[0])
            name = self.files[int(files[i])]
            raise CheckpointFormatError(
                f"file {name!r}: two items share bytes, one at {int(starts[i])} of length "
                f"{int(lengths[i])}, one at {int(starts[i + 1])}",
                file=name,
                start=int(starts[i + 1]),
            )

    def find_key(self, file: str, byte: int) -> str | None:
        """The key whose item occupies this byte of a file, or None."""
        number = self.files.index(file) if file in self.files else -1
        for fqn, stored in self.tensors.items():
            inside = (stored.starts <= byte) & (byte < stored.starts + stored.lengths)
            if bool((inside & (stored.files == number)).any()):
                return fqn
        for fqn, item in self.objects.items():
            if item.file == number and item.start <= byte < item.start + item.length:
                return fqn
        return None

    def key_path(self, fqn: str) -> KeyPath:
        """The recorded path of a key; the key itself, as one part, if none was recorded."""
        return self.key_paths.get(fqn, (fqn,))
