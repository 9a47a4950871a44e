"""Plain tensors in the memory of a shard: a rank's piece of something, though they seem whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

import dcp_reshard
from dcp_reshard import LayoutError, ReshardSavePlanner
from tests.support.checkpoints import check_world_loads, save_state, save_world
from tests.support.failures import catch_failure
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world

State = dict[str, Any]
FULL = indexed_tensor((8, 3))


def local_of_dtensor(rank: int) -> State:
    mesh = init_device_mesh("cpu", (2,))
    shard = distribute_tensor(FULL, mesh, [Shard(0)], src_data_rank=None)
    return {"a": FULL[:4].clone(), "w": shard, "z": shard.to_local()}


def row_of_sharded_tensor(rank: int) -> State:
    shard = sharded_tensor(FULL, row_boxes((8, 3), 2))
    return {"w": shard, "z": shard.local_shards()[0].tensor.detach()[2]}


@pytest.mark.parametrize("make", [local_of_dtensor, row_of_sharded_tensor])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_piece_is_refused_before_anything_is_written(
    tmp_path: Path, make: Callable[[int], State], rank: int
) -> None:
    """The piece is named, with the tensor that it is a piece of, on every rank; likewise saving."""
    save_world(tmp_path, 2, make)
    with fake_world(rank, 2):
        state = make(rank)
        state["first"] = torch.zeros(())
        load = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True, strict=False))
        planner = ReshardSavePlanner()
        save = catch_failure(lambda: planner.set_up_planner(state, None, is_coordinator=False))
        for error in (load, save):
            assert isinstance(error, LayoutError)
            assert error.fqn == "z"
            assert "shard of `w`" in str(error)


def beside_each_other(rank: int) -> State:
    """A shard, what lies behind it in one memory, and columns of which another has the rest."""
    memory = torch.empty(40)
    mesh = init_device_mesh("cpu", (2,))
    wide = memory[16:].view(4, 6)
    parts = FULL.chunk(2)[rank]
    state: State = {
        "shard": rows(memory[:12].view(4, 3).copy_(parts), mesh),
        "behind": memory[12:16].copy_(torch.arange(4.0)),
        "columns": rows(wide[:, :3].copy_(parts), mesh),
        "other columns": wide[:, 3:].copy_(indexed_tensor((4, 3))),
    }
    replica = distribute_tensor(FULL.clone(), mesh, [Replicate()], src_data_rank=None)
    return state | {"replica": replica, "same": replica.to_local()}


def rows(local: torch.Tensor, mesh: Any) -> torch.Tensor:
    return DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=FULL.shape, stride=FULL.stride()
    )


def test_tensors_beside_a_shard_are_no_pieces(tmp_path: Path) -> None:
    """Tensors that share no element, and the local tensor of a replica, are loaded."""
    save_world(tmp_path, 2, beside_each_other, planner=ReshardSavePlanner)
    check_world_loads(
        2, beside_each_other, lambda state: dcp_reshard.load(state, tmp_path, no_dist=True)
    )


def test_meta_tensors_are_no_pieces(tmp_path: Path) -> None:
    """Tensors without memory share none."""
    save_state(tmp_path, {"w": FULL, "b": FULL[0].clone()})
    with fake_world(1, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.empty(4, 3, device="meta")
        state = {"w": rows(local, mesh), "b": torch.empty(3, device="meta")}
        dcp.load(
            state,
            storage_reader=dcp_reshard.ReshardStorageReader(tmp_path),
            planner=dcp_reshard.ReshardLoadPlanner(),
            no_dist=True,
        )
        assert torch.equal(state["w"].to_local(), FULL[4:])
        assert torch.equal(state["b"], FULL[0])
