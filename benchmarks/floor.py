"""The physical floor of a load: the same byte ranges, by bare `preadv` into ready memory.

1. `Recorder` stands between the reader and a checkpoint in a load that is not timed, and keeps each
   request: file, offset, and the memory to fill.
2. `make_floor` makes of this a function that does these reads and nothing else, on as many threads
   as the reader has. What went straight into a destination goes there again; what went into a
   buffer of the reader's goes into one per thread, which is there already.

No planning, no parsing, no copies, no collectives: nobody can load these ranges faster. The gap to
it is what is left to gain.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from dcp_reshard.catalog import Catalog
from dcp_reshard.metadata import DcpCheckpoint
from dcp_reshard.storage import ByteSource

__all__ = ["Recorder", "make_floor"]

# Linux takes no more in one call.
_MAX_BUFFERS = 1024


@dataclass(frozen=True, slots=True)
class _Read:
    """One request."""

    name: str
    offset: int
    buffers: tuple[memoryview | int, ...]
    """Memory of destinations; or the length, where it was a buffer."""


@dataclass(slots=True)
class Recorder:
    """A checkpoint that keeps what is asked of it: a `CatalogSource`, and its own `ByteSource`."""

    checkpoint: DcpCheckpoint
    """The checkpoint."""

    dests: Sequence[torch.Tensor]
    """The memory to be loaded into."""

    source: ByteSource = field(init=False)
    """Its files. By this name the reader finds out where they are."""

    reads: list[_Read] = field(default_factory=list, init=False)
    """What was asked for."""

    _spans: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        """Note where destinations are."""
        self.source = self.checkpoint.open()
        self._spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in self.dests)

    def open(self) -> ByteSource:
        """This."""
        return self

    def read_catalog(self, source: ByteSource) -> Catalog:
        """The catalog of the checkpoint."""
        return self.checkpoint.read_catalog(source)

    def names(self) -> list[str]:
        """Names of its files."""
        return self.source.names()

    def size(self, name: str) -> int:
        """Size of a file."""
        return self.source.size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Read, and keep the request."""
        self.source.read_into(name, offset, buffers)
        kept = tuple(b if self._in_dest(b) else b.nbytes for b in buffers if b.nbytes)
        self.reads.append(_Read(name, offset, kept))

    def close(self) -> None:
        """Close its files."""
        self.source.close()

    def _in_dest(self, buffer: memoryview) -> bool:
        address = np.frombuffer(buffer, np.uint8).ctypes.data
        at = bisect_right(self._spans, (address, 1 << 63)) - 1
        return at >= 0 and address + buffer.nbytes <= self._spans[at][1]


def make_floor(
    path: str, reads: Sequence[_Read], *, threads: int
) -> Callable[[], Mapping[str, float]]:
    """A function that does the recorded reads again; it returns no phases."""
    largest = max((b for r in reads for b in r.buffers if isinstance(b, int)), default=0)
    # From one allocation per thread, filled with zeros, so that its pages are there.
    scratch = [memoryview(bytearray(largest)) for _ in range(threads)]
    jobs = [
        [
            (read.name, offset, [b if isinstance(b, memoryview) else memory[:b] for b in part])
            for read in reads
            for offset, part in _calls(read)
        ]
        for memory in scratch
    ]
    count = len(jobs[0])

    def run() -> Mapping[str, float]:
        names = {read.name for read in reads}
        files = {name: os.open(Path(path, name), os.O_RDONLY) for name in names}
        todo = iter(range(count))  # one step of it is atomic
        failed: list[BaseException] = []
        workers = [
            threading.Thread(target=_work, args=(jobs[t], todo, files, failed))
            for t in range(1, threads)
        ]
        for worker in workers:
            worker.start()
        _work(jobs[0], todo, files, failed)
        for worker in workers:
            worker.join()
        for descriptor in files.values():
            os.close(descriptor)
        if failed:
            raise failed[0]
        return {}

    return run


def _calls(read: _Read) -> Iterator[tuple[int, tuple[memoryview | int, ...]]]:
    offset = read.offset
    for first in range(0, len(read.buffers), _MAX_BUFFERS):
        part = read.buffers[first : first + _MAX_BUFFERS]
        yield offset, part
        offset += sum(b if isinstance(b, int) else b.nbytes for b in part)


def _work(
    jobs: Sequence[tuple[str, int, list[memoryview]]],
    todo: Iterator[int],
    files: Mapping[str, int],
    failed: list[BaseException],
) -> None:
    try:
        for i in todo:
            name, offset, buffers = jobs[i]
            if os.preadv(files[name], buffers, offset) != sum(b.nbytes for b in buffers):
                raise EOFError(f"file {name!r}: a read at byte {offset} came back short")
    except BaseException as error:
        failed.append(error)
