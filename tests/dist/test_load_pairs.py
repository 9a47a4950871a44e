"""A dozen pairs of layouts, saved and loaded by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dcp_reshard
from dcp_reshard import ReshardLoadPlanner, ReshardStorageReader
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

# Mesh shape, and the placements of a matrix (vectors take those that they have a dim for).
Layout = tuple[tuple[int, ...], tuple[Placement, ...]]
FSDP_1: Layout = ((1,), (Shard(0),))
FSDP_2: Layout = ((2,), (Shard(0),))
FSDP_3: Layout = ((3,), (Shard(0),))
FSDP_4: Layout = ((4,), (Shard(0),))
COLUMNS_2: Layout = ((2,), (Shard(1),))
COLUMNS_4: Layout = ((4,), (Shard(1),))
GRID: Layout = ((2, 2), (Shard(0), Shard(1)))
HSDP: Layout = ((2, 2), (Replicate(), Shard(0)))
REPLICATED: Layout = ((2,), (Replicate(),))
PAIRS = {
    "fsdp1-fsdp4": (FSDP_1, FSDP_4),
    "fsdp4-fsdp1": (FSDP_4, FSDP_1),
    "fsdp4-fsdp3": (FSDP_4, FSDP_3),
    "fsdp2-fsdp3": (FSDP_2, FSDP_3),
    "fsdp4-hsdp": (FSDP_4, HSDP),
    "hsdp-fsdp3": (HSDP, FSDP_3),
    "fsdp4-columns4": (FSDP_4, COLUMNS_4),
    "columns2-fsdp3": (COLUMNS_2, FSDP_3),
    "fsdp3-grid": (FSDP_3, GRID),
    "grid-columns2": (GRID, COLUMNS_2),
    "grid-replicated": (GRID, REPLICATED),
    "replicated-hsdp": (REPLICATED, HSDP),
}
SHAPES = [(257, 130), (3, 7), (64, 64), (130,), (2,)]


def make_state(layout: Layout) -> dict[str, Any]:
    mesh_shape, placements = layout
    mesh = init_device_mesh("cpu", mesh_shape)
    state: dict[str, Any] = {"step": 7, "lr": torch.tensor(0.5), "nested": {"betas": (0.9, 0.95)}}
    for i, shape in enumerate(SHAPES):
        fitting = [
            p if not isinstance(p, Shard) or p.dim < len(shape) else Replicate() for p in placements
        ]
        full = indexed_tensor(shape, torch.float32 if i % 2 else torch.bfloat16)
        state[f"layers.{i}"] = distribute_tensor(full, mesh, fitting, src_data_rank=None)
    return state


def save(rank: int, path: str, layout: Layout) -> None:
    dcp.save(make_state(layout), checkpoint_id=path)


def load(rank: int, path: str, layout: Layout) -> tuple[int, int]:
    state = make_state(layout)
    wanted = snapshot(state)
    fill_with_sentinel(state)
    state["step"], state["nested"]["betas"] = None, None
    reader = ReshardStorageReader(path)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    check_same(snapshot(state), wanted, where=f"rank {rank}")
    assert (state["step"], state["nested"]["betas"]) == (7, (0.9, 0.95))
    return reader.stats.records_verified, reader.stats.records_unverified


@pytest.mark.parametrize("pair", PAIRS)
def test_every_rank_gets_its_part_of_what_other_ranks_saved(pair: str, tmp_path: Path) -> None:
    """What ranks saved under one mesh, ranks of another mesh load bit for bit."""
    source, dest = PAIRS[pair]
    gloo_world(torch.Size(source[0]).numel(), save, str(tmp_path), source)
    gloo_world(torch.Size(dest[0]).numel(), load, str(tmp_path), dest)


def test_parts_read_by_several_ranks_are_verified_together(tmp_path: Path) -> None:
    """Where rows are resharded to rows, every record of the checkpoint is verified."""
    gloo_world(4, save, str(tmp_path), FSDP_4)
    counts = gloo_world(3, load, str(tmp_path), FSDP_3)
    assert [unverified for _, unverified in counts] == [0, 0, 0]


def flip(path: Path, marker: bytes) -> None:
    """Flip a bit of the only place in the checkpoint where `marker` stands."""
    for file in path.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        at = data.find(marker)
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("the marker is not in the checkpoint")


def load_damaged(rank: int, path: str) -> str:
    state = make_state(FSDP_3)
    try:
        dcp_reshard.load(state, path)
    except BaseException as error:  # `CheckpointException` is one
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_a_bit_flipped_in_a_record_that_ranks_share_is_an_error_on_every_rank(
    tmp_path: Path,
) -> None:
    """No rank can see the flip by itself, and all are told which tensor it is in."""
    gloo_world(2, save, str(tmp_path), FSDP_2)
    row = indexed_tensor((257, 130), torch.bfloat16)[100].view(torch.uint8).numpy().tobytes()
    flip(tmp_path, row)
    for message in gloo_world(3, load_damaged, str(tmp_path)):
        assert "CorruptRecordError" in message
        assert "`layers.0`" in message


def load_in_a_subgroup(rank: int, path: str) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    state = {"w": torch.full((257, 130), -1.0)}
    dcp_reshard.load(state, path, process_group=group)
    assert torch.equal(state["w"], indexed_tensor((257, 130)))


def test_a_subgroup_loads_by_itself(tmp_path: Path) -> None:
    """Ranks outside of the process group take no part, and are not waited for."""
    dcp.save({"w": indexed_tensor((257, 130))}, checkpoint_id=tmp_path)
    gloo_world(3, load_in_a_subgroup, str(tmp_path))


def load_with_other_group(rank: int, path: str) -> str:
    group = dist.new_group([0, 1])
    state = {"w": torch.zeros(257, 130)}
    reader = ReshardStorageReader(path, process_group=group)
    try:
        dcp.load(state, storage_reader=reader)
    except BaseException as error:
        return str(error)
    return "loaded"


def test_a_reader_with_another_group_than_the_load_is_refused(tmp_path: Path) -> None:
    """A process group that is not the one that loads would make ranks wait for each other."""
    dcp.save({"w": indexed_tensor((257, 130))}, checkpoint_id=tmp_path)
    for message in gloo_world(3, load_with_other_group, str(tmp_path)):
        assert "3 ranks take part in the load, but the reader's process group has 2" in message


def load_different(rank: int, path: str) -> list[str]:
    state = {"w": torch.zeros(257, 130), f"only{rank}": torch.zeros(2)}
    messages = []
    for reader in (
        ReshardStorageReader(f"{path}/{rank}"),
        ReshardStorageReader(
            f"{path}/0", options=dcp_reshard.ReaderOptions(require_same_keys=True)
        ),
    ):
        try:
            dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
            messages.append("loaded")
        except BaseException as error:
            messages.append(str(error))
    return messages


@pytest.mark.row("B38")
def test_ranks_that_see_different_checkpoints_or_keys_are_told(tmp_path: Path) -> None:
    """Two checkpoints behind one path are an error on all ranks; so are keys, if asked for."""
    for rank in range(2):
        saved = {"w": torch.ones(257, 130), "only0": torch.ones(2), "only1": torch.ones(2)}
        dcp.save(saved, checkpoint_id=tmp_path / str(rank))
    for metadata, keys in gloo_world(2, load_different, str(tmp_path)):
        assert (
            "ranks differ in the metadata of the checkpoint: ranks 0 one; ranks 1 one" in metadata
        )
        assert "ranks differ in the keys asked for" in keys


def test_a_stateful_value_loads_itself(tmp_path: Path) -> None:
    """`dcp_reshard.load` treats a `Stateful` value as `dcp.load` does."""
    gloo_world(2, save_stateful, str(tmp_path))
    assert gloo_world(3, load_stateful, str(tmp_path)) == [(5, True)] * 3


class Counter:
    """A value that saves and loads itself."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.weight = torch.full((4,), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.weight}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict["count"]
        self.weight = state_dict["weight"]


def save_stateful(rank: int, path: str) -> None:
    dcp.save({"counter": Counter(5)}, checkpoint_id=path)


def load_stateful(rank: int, path: str) -> tuple[int, bool]:
    counter = Counter(0)
    state = {"counter": counter}
    dcp_reshard.load(state, path)
    assert state["counter"] is counter
    return counter.count, bool((counter.weight == 5).all())
