"""What a read is asked for, and what it knows of the records afterwards; of either kind of read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dcp_reshard.catalog import StoredObject, StoredTensor
from dcp_reshard.crc import CrcPart

__all__ = ["ReadList", "RecordUse", "WantedPart"]


@dataclass(frozen=True, slots=True, eq=False)
class WantedPart:
    """Part of a stored chunk, and the memory that it goes to."""

    fqn: str
    """Key in the state dict."""

    stored: StoredTensor
    """The tensor in the checkpoint."""

    chunk: int
    """Number of the chunk."""

    offsets: tuple[int, ...]
    """First index of the part in each dim of the chunk."""

    dest: torch.Tensor
    """The destination; its shape is that of the part."""

    def select(self, chunk: torch.Tensor) -> torch.Tensor:
        """The part of a chunk that is at hand, as a view."""
        if self.dest.shape == chunk.shape:
            return chunk  # by far the most frequent case, and a view costs as much as the copy
        index = tuple(slice(o, o + s) for o, s in zip(self.offsets, self.dest.shape, strict=True))
        return chunk[index]


class ReadList(NamedTuple):
    """What a rank wants of the checkpoint."""

    tensors: list[WantedPart]
    """Parts that go straight to their destination."""

    values: list[WantedPart]
    """Tensors that are looked at before anything is written: they go to memory of their own."""

    objects: list[StoredObject]
    """Objects; these are looked at, too."""


@dataclass(slots=True, eq=False)
class RecordUse:
    """A record of which something was read, and the checksums of what was."""

    fqn: str
    """Key of the tensor."""

    length: int
    """Bytes of the record."""

    crc: int
    """The recorded checksum; 0 if the writer computed none."""

    parts: list[CrcPart] = field(default_factory=list)
    """Checksums of the bytes read."""
