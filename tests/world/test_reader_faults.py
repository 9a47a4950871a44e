"""What a load leaves behind when reading fails part of the way, and how much memory it takes."""

from __future__ import annotations

import contextlib
import os
import shutil
import tracemalloc
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_reshard
from dcp_reshard import (
    Catalog,
    ReaderOptions,
    ReshardLoadPlanner,
    ReshardStorageReader,
    RetryPolicy,
    StorageError,
)
from dcp_reshard.metadata import read_catalog
from dcp_reshard.storage import ByteSource, LocalSource
from tests.support.checkpoints import save_state
from tests.support.failures import catch_failure
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot

State = dict[str, torch.Tensor]


def address_of(buffer: memoryview) -> int:
    return torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()


class WatchedCheckpoint:
    """A checkpoint that notes the memory it is read into, and can damage its files on the way.

    Attributes:
        calls: File and buffers, as (address, length), of each `read_into`.
    """

    def __init__(self, path: Path, *, cut_at: int | None = None) -> None:
        """Take the folder, and the number of the call during which the file asked for is cut."""
        self.calls: list[tuple[str, list[tuple[int, int]]]] = []
        self._path = path
        self._cut_at = cut_at
        self._source = LocalSource(path)

    def open(self) -> ByteSource:
        return self

    def read_catalog(self, source: ByteSource) -> Catalog:
        return read_catalog(source)

    def names(self) -> list[str]:
        return self._source.names()

    def size(self, name: str) -> int:
        return self._source.size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        if len(self.calls) == self._cut_at:
            os.truncate(self._path / name, offset + sum(b.nbytes for b in buffers) // 2)
        self.calls.append((name, [(address_of(b), b.nbytes) for b in buffers if b.nbytes]))
        self._source.read_into(name, offset, buffers)

    def close(self) -> None:
        self._source.close()


def memory_beside(calls: list[tuple[str, list[tuple[int, int]]]], dest: torch.Tensor) -> int:
    """Bytes of all memory that was read into, without the destination."""
    inside = range(dest.data_ptr(), dest.data_ptr() + dest.nbytes)
    spans = sorted({(a, a + n) for _, parts in calls for a, n in parts if a not in inside})
    total, last = 0, 0
    for start, end in spans:
        total += max(0, end - max(start, last))
        last = max(last, end)
    return total


@pytest.mark.parametrize("budget", [2 * 2**20, 16 * 2**20])
@pytest.mark.parametrize("way", ["direct", "transposed", "cast"])
def test_memory_for_a_large_chunk_stays_in_the_budget(
    tmp_path: Path, way: str, budget: int
) -> None:
    """A chunk of 64 MiB goes through buffers of the budget, whatever has to be done to it."""
    full = torch.arange(4096 * 4096, dtype=torch.int32).view(torch.float32).view(4096, 4096)
    save_state(tmp_path, {"w": full})
    dest = torch.zeros(4096, 4096, dtype=torch.float64 if way == "cast" else torch.float32)
    if way == "transposed":
        dest = dest.t()
    checkpoint = WatchedCheckpoint(tmp_path)
    options = ReaderOptions(memory_budget=budget, threads=2)
    dcp_reshard.load({"w": dest}, checkpoint, no_dist=True, options=options, dtype_policy="widen")
    assert torch.equal(dest[1000:1010], full[1000:1010].to(dest.dtype))
    beside = memory_beside(checkpoint.calls, dest)
    assert beside <= budget
    # Most of the chunk was read into its place, or else really through such buffers.
    assert (beside < 2**16) == (way == "direct")
    longest = max(sum(n for _, n in parts) for _, parts in checkpoint.calls)
    assert longest <= options.max_request_bytes


def test_memory_for_many_small_chunks_stays_in_the_budget(tmp_path: Path) -> None:
    """Small chunks are read whole and wait for the others, but not all 12 MiB of them at once."""
    count, budget = 1000, 2**20
    full = {f"t{i:04}": indexed_tensor((3000,)) + i for i in range(count)}
    save_state(tmp_path, full)
    state = {name: torch.zeros(3000) for name in full}
    reader = ReshardStorageReader(tmp_path, options=ReaderOptions(memory_budget=budget, threads=1))
    planner = ReshardLoadPlanner()
    metadata = reader.read_metadata()
    planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    (plan,) = reader.prepare_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    tracemalloc.start()
    reader.read_data(plan, planner).wait()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    check_same(snapshot(state), full)
    # What the load knows of a thousand chunks is about as much as the budget.
    assert peak < 3 * budget


def make_checkpoint(path: Path) -> State:
    """Small and large tensors, in one file, read by several calls."""
    state = {
        "a_small": indexed_tensor((30, 5)),
        "large": indexed_tensor((300, 200)),
        "m_small": indexed_tensor((7,)),
        "turned": indexed_tensor((200, 100), torch.float64),
        "z_small": indexed_tensor((3,), torch.int16),
    }
    save_state(path, state)
    return state


def make_dest(full: State) -> State:
    state = {name: tensor.clone() for name, tensor in full.items()}
    state["turned"] = state["turned"].t().contiguous().t()
    fill_with_sentinel(state)
    return state


def open_files(folder: Path) -> set[str]:
    """The data files of this folder that the process has open."""
    targets = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # what the listing itself had open
            targets.add(str(entry.readlink()))
    return {t for t in targets if t.endswith(".distcp") and t.startswith(str(folder))}


def test_a_file_cut_during_any_call_fails_the_load(tmp_path: Path) -> None:
    """Until all containers are known to be sound nothing is written, and no file is left open."""
    full = make_checkpoint(tmp_path / "whole")
    options = ReaderOptions(threads=1, memory_budget=256 * 2**10, retry=RetryPolicy(tries=1))
    checkpoint = WatchedCheckpoint(tmp_path / "whole")
    state = make_dest(full)
    dcp_reshard.load(state, checkpoint, no_dist=True, options=options)
    check_same(snapshot(state), full)
    calls = checkpoint.calls
    dest = state["large"]
    inside = range(dest.data_ptr(), dest.data_ptr() + dest.nbytes)
    first_write = next(
        i for i, (_, parts) in enumerate(calls) if any(a in inside for a, _ in parts)
    )
    assert 2 < first_write < len(calls) - 1, "the test needs calls of all kinds"

    for number, (name, _) in enumerate(calls):
        damaged = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", damaged)
        state = make_dest(full)
        before = snapshot(state)
        checkpoint = WatchedCheckpoint(damaged, cut_at=number)
        load = partial(dcp_reshard.load, state, checkpoint, no_dist=True, options=options)
        error = catch_failure(load)
        assert isinstance(error, StorageError), number
        assert error.file == name
        assert name in str(error)
        assert len(checkpoint.calls) == number + 1, "it went on after the error"
        if number < first_write:
            check_same(snapshot(state), before, where=f"call {number}")
        assert open_files(tmp_path) == set()


def test_a_file_that_changes_during_the_load_is_noticed(tmp_path: Path) -> None:
    """A data file that is written to between two calls fails a load that could read all of it."""
    full = make_checkpoint(tmp_path)
    data = tmp_path / "__0_0.distcp"

    class Overwritten(WatchedCheckpoint):
        def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
            super().read_into(name, offset, buffers)
            if name == data.name:
                os.utime(data, ns=(0, len(self.calls)))

    error = catch_failure(
        lambda: dcp_reshard.load(make_dest(full), Overwritten(tmp_path), no_dist=True)
    )
    assert isinstance(error, StorageError)
    assert "changed during the load" in str(error)
    assert open_files(tmp_path) == set()


@pytest.mark.parametrize("missing", [".metadata", "__0_0.distcp"])
def test_missing_files_are_named(tmp_path: Path, missing: str) -> None:
    """A file that is not there is named, and nothing is written."""
    full = make_checkpoint(tmp_path)
    (tmp_path / missing).unlink()
    state = make_dest(full)
    before = snapshot(state)
    options = ReaderOptions(retry=RetryPolicy(tries=1))
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True, options=options))
    assert isinstance(error, StorageError)
    assert error.file == missing
    assert missing in str(error)
    check_same(snapshot(state), before)


def test_a_failed_load_can_be_repeated(tmp_path: Path) -> None:
    """The same reader loads once the file is whole again."""
    full = make_checkpoint(tmp_path)
    data = tmp_path / "__0_0.distcp"
    contents = data.read_bytes()
    data.write_bytes(contents[:-100])
    reader = ReshardStorageReader(tmp_path)
    state = make_dest(full)

    def load() -> None:
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), no_dist=True)

    error = catch_failure(load)
    assert isinstance(error, StorageError)
    assert "the file is cut" in str(error)
    data.write_bytes(contents)
    load()
    check_same(snapshot(state), full)
