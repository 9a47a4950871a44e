"""A chunk of 2 GiB through a budget of 64 MiB: memory follows the budget, not the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dcp_reshard import Catalog, ReaderOptions, ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.box import BoxArray
from dcp_reshard.catalog import StoredTensor
from dcp_reshard.storage import ByteSource
from tests.support.worlds import fake_world

ROWS, COLUMNS = 32768, 16384
BUDGET = 64 * 2**20
_ENDS = 4096


@dataclass(slots=True)
class Ends:
    """What `torch.save` writes to this is dropped, but for its first and last bytes."""

    first: bytes = b""
    last: bytes = b""
    length: int = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data).cast("B")
        if len(self.first) < _ENDS:
            self.first += bytes(view[: _ENDS - len(self.first)])
        self.last = (self.last + bytes(view[-_ENDS:]))[-_ENDS:]
        self.length += len(view)
        return len(view)

    def flush(self) -> None:
        pass


@dataclass(slots=True)
class HugeFile:
    """A file of one 2 GiB chunk that is nowhere: elements are made when they are read.

    A `ByteSource` and a `CatalogSource`. Element i is i as an int32; its bytes start at `payload`.
    """

    ends: Ends
    payload: int
    largest: int = 0
    requests: list[int] = field(default_factory=list)

    def open(self) -> ByteSource:
        return self

    def read_catalog(self, source: ByteSource) -> Catalog:
        sizes = np.array([[ROWS, COLUMNS]])
        stored = StoredTensor(
            "w",
            (ROWS, COLUMNS),
            torch.int32,
            BoxArray(np.zeros_like(sizes), sizes),
            np.zeros(1, np.int32),
            np.zeros(1, np.int64),
            np.array([self.ends.length]),
        )
        return Catalog({"w": stored}, {}, ("huge.distcp",))

    def names(self) -> list[str]:
        return ["huge.distcp"]

    def size(self, name: str) -> int:
        return self.ends.length

    def close(self) -> None:
        pass

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.requests.append(sum(buffer.nbytes for buffer in buffers))
        for buffer in buffers:
            self._fill(buffer, offset)
            offset += buffer.nbytes

    def _fill(self, buffer: memoryview, offset: int) -> None:
        end = offset + buffer.nbytes
        if end <= _ENDS:
            buffer[:] = self.ends.first[offset:end]
        elif offset >= self.ends.length - _ENDS:
            at = offset - (self.ends.length - _ENDS)
            buffer[:] = self.ends.last[at : at + buffer.nbytes]
        else:
            first = (offset - self.payload) // 4
            whole = np.arange(first, first + buffer.nbytes // 4 + 2, dtype=np.int32)
            at = (offset - self.payload) % 4
            buffer[:] = memoryview(whole).cast("B")[at : at + buffer.nbytes]


def vm(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "columns"])
def test_a_chunk_of_2_gib_needs_no_more_than_the_budget(dim: int) -> None:
    """A rank of 64 takes its rows, or its columns, through requests and buffers of the budget."""
    ends = Ends()
    crc = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)  # or it would read all of it
    try:
        # Never touched: the kernel gives no memory for it.
        torch.save(torch.empty(ROWS, COLUMNS, dtype=torch.int32), ends)
    finally:
        torch.serialization.set_crc32_options(crc)
    payload = ends.first.index(b"Z", ends.first.index(b"data/0"))
    payload = -(-payload // 64) * 64
    source = HugeFile(ends, payload)
    rank, size = 5, 64
    with fake_world(rank, size):
        shape = [ROWS, COLUMNS]
        shape[dim] //= size
        local = torch.full(shape, -1, dtype=torch.int32)
        mesh = init_device_mesh("cpu", (size,))
        state = {"w": DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)}
        reader = ReshardStorageReader(
            source, options=ReaderOptions(memory_budget=BUDGET, threads=2, verify="off")
        )
        Path("/proc/self/clear_refs").write_text("5")
        before = vm("VmRSS")
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), no_dist=True)
    assert vm("VmHWM") - before <= BUDGET
    assert max(source.requests) <= BUDGET // 4
    start = rank * shape[dim] * (COLUMNS if dim == 0 else 1)
    wanted = start + torch.arange(shape[0])[:, None] * COLUMNS + torch.arange(shape[1])
    assert torch.equal(local.long(), wanted)
