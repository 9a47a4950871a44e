"""When are checksums compared, by whom, and what is said where they cannot be?"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import (
    CorruptRecordError,
    InconsistentRanksError,
    LayoutError,
    PeerFailedError,
    ReaderOptions,
    ReshardLoadPlanner,
    ReshardStorageReader,
)
from dcp_reshard.options import Verify
from tests.support.checkpoints import save_state, save_world
from tests.support.failures import catch_failure, catch_failures, find_failures
from tests.support.tensors import check_same, indexed_tensor, snapshot
from tests.support.worlds import fake_world, thread_world

DATA = "__0_0.distcp"
REQUIRED = ReaderOptions(verify="required")
STORED = {"large": indexed_tensor((300, 64)), "small": indexed_tensor((6, 5)), "lr": 0.5}


def make_dest() -> dict[str, Any]:
    return {"large": torch.full((300, 64), -1.0), "small": torch.full((6, 5), -1.0), "lr": 0.0}


def flip_last_element(path: Path) -> None:
    """Change the last element of `large`."""
    contents = bytearray((path / DATA).read_bytes())
    elements = STORED["large"].numpy().tobytes()
    contents[contents.index(elements) + len(elements) - 1] ^= 0x10
    (path / DATA).write_bytes(contents)


@contextmanager
def no_checksums() -> Iterator[None]:
    """`torch.save` stores no checksums meanwhile."""
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(True)


@pytest.mark.row("B25")
@pytest.mark.parametrize("verify", ["available", "off"])
def test_files_without_checksums_load_unverified(tmp_path: Path, verify: Any) -> None:
    """They load like any other, and the report says that nothing was compared."""
    with no_checksums():
        save_state(tmp_path, STORED)
    state = make_dest()
    report = dcp_reshard.load(state, tmp_path, options=ReaderOptions(verify=verify))
    check_same(snapshot(state), snapshot(STORED))
    assert state["lr"] == 0.5
    assert report.records_verified == 0
    assert report.records_unverified >= 2


@pytest.mark.row("B25")
@pytest.mark.parametrize("key", STORED)
def test_required_checksums_that_were_not_stored(tmp_path: Path, key: str) -> None:
    """``"required"`` refuses tensors and objects without one, and names the key and the reason."""
    with no_checksums():
        save_state(tmp_path, STORED)
    state = {key: make_dest()[key]}
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, options=REQUIRED))
    assert isinstance(error, CorruptRecordError)
    assert "none was stored" in str(error)
    assert (error.fqn, error.file) == (key, DATA)


@pytest.mark.parametrize("checksums", [nullcontext, no_checksums], ids=["with", "without"])
def test_required_checksums_of_what_is_read_whole(tmp_path: Path, checksums: Any) -> None:
    """A chunk that goes through `torch.load` is held to ``"required"`` like the others."""
    with checksums():
        save_state(tmp_path, {"lazy": indexed_tensor((5, 8), torch.complex64).conj()})
    state = {"lazy": torch.zeros(5, 8, dtype=torch.complex64)}
    load = partial(dcp_reshard.load, state, tmp_path, options=REQUIRED)
    if checksums is nullcontext:
        report = load()
        assert report.chunks_read_whole == ("lazy",)
        assert report.records_verified > 0
        assert report.records_unverified == 0
    else:
        error = catch_failure(load)
        assert isinstance(error, CorruptRecordError)
        assert error.fqn == "lazy"


def test_required_checksums_need_the_whole_record(tmp_path: Path) -> None:
    """A rank that loads its part alone cannot verify it, and ``"required"`` says so."""
    save_state(tmp_path, STORED)
    with fake_world(1, 2):
        state = make_rows()
        error = catch_failure(
            lambda: dcp_reshard.load(state, tmp_path, no_dist=True, options=REQUIRED)
        )
    assert isinstance(error, CorruptRecordError)
    assert "only part of it was read" in str(error)
    assert error.fqn == "large"


def make_rows() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    large = torch.full((300, 64), -1.0)
    return {"large": distribute_tensor(large, mesh, [Shard(0)], src_data_rank=None)}


def load_rows(rank: int, path: Path, verify: Any) -> dict[int, BaseException]:
    load = partial(dcp_reshard.load, make_rows(), path, options=ReaderOptions(verify=verify))
    if verify == "off":
        load()
        return {}
    return catch_failures(load)


@pytest.mark.parametrize("verify", ["available", "required"])
def test_ranks_that_read_parts_verify_together(tmp_path: Path, verify: str) -> None:
    """A flip in the part of one of three ranks fails the load on all of them, naming the tensor."""
    save_state(tmp_path, STORED)
    flip_last_element(tmp_path)
    for failures in thread_world(3, load_rows, tmp_path, verify):
        assert failures
        for error in failures.values():
            assert isinstance(error, CorruptRecordError)
            assert (error.fqn, error.file) == ("large", DATA)
            assert "undefined" in str(error)
    # It was the checksum that told: without it, nothing is noticed.
    assert thread_world(3, load_rows, tmp_path, "off") == [{}] * 3


def load_another(rank: int, paths: list[Path], way: str) -> dict[int, BaseException]:
    state = make_dest()
    reader = ReshardStorageReader(paths[rank % 2])
    if way == "dcp.load":
        load = partial(dcp.load, state, storage_reader=reader, planner=ReshardLoadPlanner())
    else:
        load = partial(dcp_reshard.load, state, paths[rank % 2])
    failures = catch_failures(load)
    check_same(snapshot(state), snapshot(make_dest()))
    return failures


@pytest.mark.parametrize("way", ["dcp.load", "dcp_reshard.load"])
def test_ranks_that_see_different_checkpoints(tmp_path: Path, way: str) -> None:
    """Two saves of one training, one on some nodes and one on others, are not mixed up."""
    paths = [tmp_path / "first", tmp_path / "second"]
    for step, path in enumerate(paths):
        save_state(path, {"large": STORED["large"] + step, "small": STORED["small"], "lr": step})
    for failures in thread_world(4, load_another, paths, way):
        for error in failures.values():
            assert isinstance(error, InconsistentRanksError)
            assert "ranks 0, 2 one; ranks 1, 3 one" in str(error)


def make_rows_of_two(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {"large": distribute_tensor(STORED["large"], mesh, [Shard(0)], src_data_rank=None)}


@pytest.mark.parametrize("verify", ["available", "required"])
def test_one_rank_that_finds_damage_in_its_own_record(tmp_path: Path, verify: str) -> None:
    """A rank that read a whole record and finds it damaged does not leave the others waiting."""
    save_world(tmp_path, 2, make_rows_of_two)
    contents = bytearray((tmp_path / DATA).read_bytes())
    contents[len(contents) // 2] ^= 0x10
    (tmp_path / DATA).write_bytes(contents)
    for failures in thread_world(2, load_rows, tmp_path, verify, timeout=20):
        assert failures.keys() == {0}
        assert isinstance(failures[0], CorruptRecordError)
        assert failures[0].file == DATA


def load_hybrid(rank: int, paths: list[Path]) -> dict[int, BaseException]:
    mesh = init_device_mesh("cpu", (2, 2))
    cut = [Replicate(), Shard(0)]
    large = distribute_tensor(torch.zeros(300, 64), mesh, cut, src_data_rank=None)
    return catch_failures(partial(dcp_reshard.load, {"large": large}, paths[rank]))


@pytest.mark.parametrize("bad", range(4))
def test_a_replica_that_reads_other_bytes_is_found(tmp_path: Path, bad: int) -> None:
    """Of two ranks that read the same rows one gets other bytes; the other's do not cover it up."""
    good, other = tmp_path / "good", tmp_path / "other"
    save_state(good, STORED)
    shutil.copytree(good, other)
    contents = bytearray((other / DATA).read_bytes())
    elements = STORED["large"].numpy().tobytes()
    first = contents.index(elements)
    for row in (100, 200):
        contents[first + row * 256] ^= 0x10
    (other / DATA).write_bytes(contents)
    paths = [other if rank == bad else good for rank in range(4)]
    for failures in thread_world(4, load_hybrid, paths, timeout=20):
        assert all(isinstance(error, CorruptRecordError) for error in failures.values())


def load_halves_and_thirds(rank: int, paths: list[Path], verify: Verify, absent: int = -1) -> Any:
    """Two ranks hold a half each, three others a third each, of one tensor."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4])]
    cut = [Shard(0)]
    large = distribute_tensor(torch.zeros(300, 64), meshes[rank > 1], cut, src_data_rank=None)
    state = {} if rank == absent else {"large": large}
    reports = []
    options = ReaderOptions(verify=verify)
    failures = find_failures(
        lambda: reports.append(dcp_reshard.load(state, paths[rank], options=options))
    )
    return failures or (reports[0].records_verified, reports[0].records_unverified)


def spoil_rows(path: Path, other: Path) -> None:
    shutil.copytree(path, other)
    contents = bytearray((other / DATA).read_bytes())
    first = contents.index(STORED["large"].numpy().tobytes())
    for row in range(25, 300, 50):
        contents[first + row * 256] ^= 0x10
    (other / DATA).write_bytes(contents)


@pytest.mark.parametrize("bad", range(-1, 5))
def test_parts_that_overlap_are_held_against_each_other(tmp_path: Path, bad: int) -> None:
    """Halves are a chain from end to end, and so are thirds: neither speaks for the other."""
    good, other = tmp_path / "good", tmp_path / "other"
    save_state(good, STORED)
    spoil_rows(good, other)
    paths = [other if rank == bad else good for rank in range(5)]
    found = thread_world(5, load_halves_and_thirds, paths, "required", timeout=20)
    if bad < 0:
        assert sum(verified for verified, _ in found) == 1
        assert sum(unverified for _, unverified in found) == 0
        return
    for failures in found:
        assert all(isinstance(error, CorruptRecordError) for error in failures.values())


def test_a_part_that_nothing_confirms_leaves_its_record_unverified(tmp_path: Path) -> None:
    """Of thirds of which one is missing nobody knows whether they are right; the halves are."""
    save_state(tmp_path, STORED)
    paths = [tmp_path] * 5
    found = thread_world(5, load_halves_and_thirds, paths, "available", 3, timeout=20)
    assert sum(verified for verified, _ in found) == 0
    assert sum(unverified for _, unverified in found) == 1
    for failures in thread_world(5, load_halves_and_thirds, paths, "required", 3, timeout=20):
        texts = [str(error) for error in failures.values()]
        assert any("nothing confirms a part that overlaps others" in text for text in texts)


class FailingPlanner(ReshardLoadPlanner):
    """Finds no memory for a tensor that has been planned."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        raise LayoutError("no memory", fqn=read_item.dest_index.fqn)


def load_with_failing_planner(rank: int, path: Path) -> dict[int, BaseException]:
    planner = FailingPlanner() if rank == 1 else ReshardLoadPlanner()
    reader = ReshardStorageReader(path)
    return catch_failures(partial(dcp.load, make_rows(), storage_reader=reader, planner=planner))


def test_one_rank_that_fails_before_it_reads(tmp_path: Path) -> None:
    """No rank waits for the checksums of one whose planner fails on the way to the read."""
    save_state(tmp_path, STORED)
    for failures in thread_world(3, load_with_failing_planner, tmp_path, timeout=20):
        assert isinstance(failures[1], LayoutError)
        assert all(isinstance(failures[rank], PeerFailedError) for rank in (0, 2))
