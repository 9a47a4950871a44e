"""What a read is asked for, and what it has found; of either kind of read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from dcp_reshard.catalog import StoredObject, StoredTensor
from dcp_reshard.crc import CrcPart
from dcp_reshard.transfer import RecordKey

__all__ = ["Findings", "ReadList", "RecordUse", "WantedPart"]


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


@dataclass(slots=True, eq=False)
class Findings:
    """What a rank has read, and how. Not frozen: it is filled on the way."""

    objects: dict[str, bytes] = field(default_factory=dict)
    """Items of the objects wanted, by key."""

    records: dict[RecordKey, RecordUse] = field(default_factory=dict)
    """Records of which this rank has read something, and that are still to be compared."""

    compared: set[RecordKey] = field(default_factory=set)
    """Other records, which had their checksum when they were read."""

    chunks_read_whole: list[str] = field(default_factory=list)
    """Keys of chunks of unknown form."""

    bytes_direct: int = 0
    """Bytes read straight into their destination."""

    rereads: int = 0
    """Items and records read a second time because they were not as they should be."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of the read, if there are several."""

    def add(self, more: Findings) -> None:
        """Add those of another read of this rank."""
        self.objects |= more.objects
        self.records |= more.records
        self.compared |= more.compared
        self.chunks_read_whole += more.chunks_read_whole
        self.bytes_direct += more.bytes_direct
        self.rereads += more.rereads
        for what, seconds in more.seconds.items():
            self.seconds[what] = self.seconds.get(what, 0.0) + seconds
