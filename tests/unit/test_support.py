"""The support that tests lean on: what it writes is what torch writes, what it finds is real."""

from __future__ import annotations

import itertools
import math
import os
import pickle
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.coverage import find_defect
from dcp_reshard.storage import open_source, read_bytes
from tests.support.checkpoints import check_world_loads, load_world, save_state, save_world
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.sources import RecordingSource, Request
from tests.support.strategies import boxes, mesh_shapes, placements, shapes, tilings
from tests.support.tensors import (
    check_same,
    fill_with_sentinel,
    indexed_tensor,
    local_tensors,
    sentinel_like,
    snapshot,
)
from tests.support.worlds import fake_world, gloo_world, thread_world

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def make_rows(rank: int) -> dict[str, Any]:
    """Rows over all ranks, nested, with a replica, an empty shard, and values but tensors."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = {
        name: distribute_tensor(indexed_tensor(shape), mesh, [Shard(0)], src_data_rank=None)
        for name, shape in (("w", (7, 3)), ("few", (2, 2)))
    }
    return {
        "model": cut,
        "replica": distribute_tensor(indexed_tensor((5,)), mesh, [Replicate()], src_data_rank=None),
        "mine": {f"of_rank_{rank}": indexed_tensor((3,))},
        "step": 7,
        "history": [torch.tensor(1.5), "text"],
    }


def make_grid(rank: int) -> dict[str, Any]:
    """The same tensors as `make_rows`, over a mesh of 2 x n ranks."""
    del rank
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("dp", "tp"))
    cut = {
        name: distribute_tensor(
            indexed_tensor(shape), mesh, [Shard(0), Shard(1)], src_data_rank=None
        )
        for name, shape in (("w", (7, 3)), ("few", (2, 2)))
    }
    whole = [Replicate(), Replicate()]
    return {
        "model": cut,
        "replica": distribute_tensor(indexed_tensor((5,)), mesh, whole, src_data_rank=None),
        "history": [torch.tensor(1.5)],
    }


def load_stock(path: Path, state: dict[str, Any]) -> None:
    dcp.load(state, checkpoint_id=path, no_dist=True)


def save_rows(rank: int, path: str) -> None:
    save_state(path, make_rows(rank))


def comparable(path: Path) -> tuple[dict[str, bytes], Metadata]:
    """The data files, and the metadata without the ids that are drawn for each save."""
    files = {file.name: file.read_bytes() for file in sorted(path.glob("*.distcp"))}
    metadata = pickle.loads((path / ".metadata").read_bytes())
    metadata.storage_meta = None
    return files, metadata


@pytest.mark.dist
def test_save_world_writes_the_bytes_of_a_real_save(tmp_path: Path) -> None:
    """A world of one process writes the same files and metadata as three gloo ranks do."""
    save_world(tmp_path / "fake", 3, make_rows)
    gloo_world(3, save_rows, str(tmp_path / "real"))
    files, metadata = comparable(tmp_path / "fake")
    real_files, real_metadata = comparable(tmp_path / "real")
    assert files == real_files
    assert metadata == real_metadata


def test_thread_world_saves_the_same_bytes(tmp_path: Path) -> None:
    """`dcp.save` by threads with collectives writes what `save_world` writes."""
    save_world(tmp_path / "fake", 4, make_rows)
    thread_world(4, save_rows, str(tmp_path / "real"))
    assert comparable(tmp_path / "fake") == comparable(tmp_path / "real")


@pytest.mark.parametrize(("stored", "wanted"), [(1, 4), (4, 2), (3, 8), (8, 6)])
def test_stock_load_reads_what_save_world_wrote(tmp_path: Path, stored: int, wanted: int) -> None:
    """Each rank of another mesh finds every element of its shards where torch's slicing puts it."""
    save_world(tmp_path, stored, make_rows)
    check_world_loads(wanted, make_grid, lambda state: load_stock(tmp_path, state))


def test_save_world_without_collectives_writes_metadata_per_rank(tmp_path: Path) -> None:
    """`use_collectives=False` gives one metadata file per rank and no global one."""
    save_world(tmp_path, 2, make_rows, use_collectives=False)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"__0.metadata", "__1.metadata"} <= names
    assert ".metadata" not in names


def test_save_world_passes_options_to_the_writer(tmp_path: Path) -> None:
    """Options of `FileSystemWriter` take effect: one file per tensor or blob."""
    save_world(tmp_path, 2, make_rows, single_file_per_rank=False)
    assert len(list(tmp_path.glob("*.distcp"))) > 2


def test_load_world_returns_the_state_of_each_rank(tmp_path: Path) -> None:
    """The shards of the ranks, put together, are the tensor that was saved."""
    save_world(tmp_path, 2, make_rows)
    states = load_world(
        4, lambda rank: make_rows(rank) | {"mine": {}}, lambda s: load_stock(tmp_path, s)
    )
    rows = torch.cat([state["model"]["w"].to_local() for state in states])
    assert torch.equal(rows, indexed_tensor((7, 3)))


def test_check_world_loads_notices_a_load_that_does_nothing() -> None:
    """Every element that a load leaves alone is reported."""
    with pytest.raises(
        AssertionError, match=r"rank 0 of 2: `model.w`, shape \(4, 3\): 12 elements"
    ):
        check_world_loads(2, make_grid, lambda state: None)


def test_check_world_loads_notices_a_swap() -> None:
    """Two elements in each other's place are reported, with both values."""

    def swap(state: dict[str, Any]) -> None:
        fresh = snapshot(make_grid(0))
        for name, tensor in local_tensors(state):
            tensor.copy_(fresh[name])
        local = state["model"]["w"].to_local()
        local[0, 1], local[1, 0] = fresh["model.w"][1, 0], fresh["model.w"][0, 1]

    found = r"flat index \[1, 3\]: found \[3.0, 1.0\], wanted \[1.0, 3.0\]"
    with pytest.raises(AssertionError, match=f"`model.w`.*2 elements differ.*{found}"):
        check_world_loads(2, make_grid, swap)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_indexed_tensor_and_sentinel_differ_everywhere(dtype: torch.dtype) -> None:
    """Each element differs from the sentinel as bits, and neighbours differ from each other."""
    tensor = indexed_tensor((16, 32), dtype)
    assert (tensor.dtype, tuple(tensor.shape)) == (dtype, (16, 32))
    state = {"nested": [tensor.clone()]}
    before = snapshot(state)
    fill_with_sentinel(state)
    with pytest.raises(AssertionError, match="512 elements differ"):
        check_same(snapshot(state), before)
    assert not torch.isnan(tensor.to(torch.complex128)).any()
    rows = {bytes(row.contiguous().view(torch.uint8).numpy()) for row in tensor}
    assert len(rows) == 16


def test_sentinel_like_keeps_layout() -> None:
    """The sentinel has the strides of its model, so filling in place is not a special case."""
    tensor = indexed_tensor((4, 6)).t()
    assert sentinel_like(tensor).shape == (6, 4)
    assert (sentinel_like(tensor) == -1).all()


def test_fake_world_gives_each_rank_its_own_shards() -> None:
    """Nothing that torch caches for one pretended rank leaks into the next."""
    offsets = []
    for rank in range(6):
        with fake_world(rank, 6):
            cut = make_grid(rank)["model"]["w"]
            offsets.append(tuple(cut.__create_chunk_list__()[0].offsets))
    assert offsets == list(itertools.product((0, 4), (0, 1, 2)))


def count_ranks(rank: int) -> tuple[int, list[int], bool]:
    total = torch.ones(())
    dist.all_reduce(total)
    seen = [0] * dist.get_world_size()
    dist.all_gather_object(seen, rank)
    return int(total), seen, torch.get_num_threads() == 1


@pytest.mark.dist
def test_gloo_world_is_a_working_world() -> None:
    """Ranks are separate, can talk, use one thread each, and their results come back in order."""
    assert gloo_world(3, count_ranks) == [(3, [0, 1, 2], True)] * 3


def test_thread_world_is_a_working_world() -> None:
    """Threads as ranks can talk, and their results come back in order."""
    assert thread_world(3, count_ranks) == [(3, [0, 1, 2], True)] * 3
    assert not dist.is_initialized()


def fail_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise KeyError("only here")
    dist.barrier()


@pytest.mark.dist
def test_gloo_world_raises_what_ranks_raised() -> None:
    """The error of a rank arrives with its type and traceback; its peers do not hang."""
    with pytest.raises(ExceptionGroup, match="of 3 ranks failed") as info:
        gloo_world(3, fail_on_rank_1)
    [error] = info.value.subgroup(KeyError).exceptions
    assert error.args == ("only here",)
    assert "in fail_on_rank_1" in "".join(error.__notes__)


def test_thread_world_raises_what_a_rank_raised() -> None:
    """The error of a thread arrives; its peers are released from their barrier."""
    with pytest.raises(KeyError, match="only here") as info:
        thread_world(3, fail_on_rank_1)
    assert info.value.__notes__ == ["(rank 1 of 3)"]


def warn_or_die(rank: int) -> None:
    # A rank that dies while its peer is still connecting gives the peer another error.
    if rank == 0:
        dist.recv(torch.zeros(1), 1)
        os._exit(3)
    dist.send(torch.zeros(1), 0)
    warnings.warn("a warning of a rank", stacklevel=1)


@pytest.mark.dist
def test_gloo_world_reports_warnings_and_deaths() -> None:
    """A warning is an error in a rank too, and a rank that dies silently is named."""
    with pytest.raises(ExceptionGroup) as info:
        gloo_world(2, warn_or_die)
    assert sorted(map(str, info.value.exceptions)) == ["a warning of a rank", "rank 0 died"]


def wait_for_ever(rank: int, release: threading.Event | None = None) -> None:
    if rank == 0:
        print("about to wait")
        (release or threading.Event()).wait(20.0)


@pytest.mark.dist
def test_gloo_world_kills_a_rank_that_hangs() -> None:
    """After the time limit the rank is gone; the error shows where it stood and what it printed."""
    start = time.monotonic()
    with pytest.raises(ExceptionGroup) as info:
        gloo_world(2, wait_for_ever, timeout=2.0)
    assert time.monotonic() - start < 15.0
    [error] = info.value.subgroup(TimeoutError).exceptions
    notes = "".join(error.__notes__)
    assert "about to wait" in notes
    assert "in wait_for_ever" in notes


def test_thread_world_reports_a_rank_that_hangs() -> None:
    """After the time limit the error shows where the thread stands."""
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"ranks \[0\] of 2") as info:
        thread_world(2, wait_for_ever, release, timeout=0.3)
    release.set()
    assert "in wait_for_ever" in "".join(info.value.__notes__)


def test_recording_source_keeps_ranges_and_fails_on_demand(tmp_path: Path) -> None:
    """Requests are kept in order with their ranges; the one chosen fails, later ones do not."""
    (tmp_path / "file").write_bytes(bytes(range(100)))
    source = RecordingSource(open_source(tmp_path), fail_at=1)
    assert read_bytes(source, "file", 10, 13) == bytes((10, 11, 12))
    with pytest.raises(OSError, match="told to fail"):
        read_bytes(source, "file", 0, 1)
    assert read_bytes(source, "file", 99, 100) == b"c"
    assert source.requests == [
        Request("file", 10, 3),
        Request("file", 0, 1),
        Request("file", 99, 1),
    ]
    assert source.bytes_requested == 5
    assert (source.names(), source.size("file")) == (["file"], 100)
    source.close()
    assert source.closed


@hypothesis.given(st.data())
def test_strategies_draw_what_they_say(data: st.DataObject) -> None:
    """Boxes lie inside their shape, tilings tile it, and placements fit mesh and tensor."""
    shape = data.draw(shapes())
    assert Box.full(shape).contains(data.draw(boxes(shape)))
    tiles = data.draw(tilings(shape))
    assert find_defect(BoxArray.from_boxes(tiles, ndim=len(shape)), Box.full(shape)) is None
    mesh = data.draw(mesh_shapes())
    assert 1 <= math.prod(mesh) <= 12
    drawn = data.draw(placements(mesh, len(shape), strided=True))
    assert len(drawn) == len(mesh)
    assert all(isinstance(p, Replicate) or 0 <= p.dim < len(shape) for p in drawn)


def make_sharded(rank: int) -> dict[str, Any]:
    """A ShardedTensor of row shards, the last ranks without one."""
    del rank
    full = indexed_tensor((5, 3))
    return {"w": sharded_tensor(full, row_boxes(full.shape, dist.get_world_size()))}


@pytest.mark.parametrize(("stored", "wanted"), [(1, 3), (4, 2)])
def test_sharded_tensors_go_through_stock_save_and_load(
    tmp_path: Path, stored: int, wanted: int
) -> None:
    """ShardedTensors cut by hand are what torch's own save and load expect.

    No rank that loads is without a shard: torch 2.13 asks it for its CUDA device, on CPU too.
    """
    save_world(tmp_path, stored, make_sharded)
    check_world_loads(wanted, make_sharded, lambda state: load_stock(tmp_path, state))


def test_sharded_tensors_can_be_nested() -> None:
    """An inner ShardedTensor is found, with its own part of the outer one's shard."""
    full = indexed_tensor((4, 6))

    def cut_columns(box: Box) -> torch.Tensor:
        part = full[box.slices()]
        halves = [(Box((0, 0), (2, 3)), 0), (Box((0, 3), (2, 3)), 1)]
        return sharded_tensor(part, halves)

    with fake_world(1, 2):
        nested = sharded_tensor(full, row_boxes((4, 6), 2), make_local=cut_columns)
        assert [(n, t.tolist()) for n, t in local_tensors({"w": nested})] == [
            ("w[0][0]", full[2:, 3:].tolist())
        ]
