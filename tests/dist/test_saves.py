"""What `ReshardSavePlanner` writes in a job that saves again and again, loaded by stock and by us."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import ReshardSavePlanner
from tests.support.strided import fsdp_over_tp
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

# Rows of the tensors in each save, and whether there is one tensor more: a plan kept from the save
# before holds for the second alone.
SAVES = [(5, False), (5, False), (7, False), (7, True), (13, True), (5, False)]


def state_of(number: int, mesh_shape: tuple[int, ...]) -> dict[str, Any]:
    rows, more = SAVES[number]
    mesh = init_device_mesh("cpu", mesh_shape)
    full = indexed_tensor((rows, 3)) + number
    copies = [Replicate()] * (len(mesh_shape) - 1)
    state: dict[str, Any] = {
        "hsdp": distribute_tensor(full, mesh, [*copies, Shard(0)], src_data_rank=None),
        "columns": distribute_tensor(full, mesh, [*copies, Shard(1)], src_data_rank=None),
        "plain": full + 0.25,
        "list": [full[0].clone(), {"step": number}],
    }
    if len(mesh_shape) == 2:
        state["hsdp"] = fsdp_over_tp(full, mesh)
    if more:
        state["more"] = distribute_tensor(full + 0.5, mesh, [*copies, Shard(0)], src_data_rank=None)
    return state


def save_all(rank: int, root: Path, mesh_shape: tuple[int, ...], way: str) -> None:
    kept = ReshardSavePlanner(enable_plan_caching=True)
    group = dist.new_group(backend="gloo")
    for number in range(len(SAVES)):
        state = state_of(number, mesh_shape)
        path = root / str(number)
        if way == "save":
            dcp.save(state, checkpoint_id=path, planner=kept)
            continue
        planner = ReshardSavePlanner(enable_plan_caching=True)
        future = dcp.async_save(state, checkpoint_id=path, planner=planner, process_group=group)
        fill_with_sentinel(state)
        future.result()


def load_all(rank: int, root: Path, mesh_shape: tuple[int, ...]) -> None:
    for load in (dcp.load, dcp_reshard.load):
        for number in range(len(SAVES)):
            state = state_of(number, mesh_shape)
            wanted = snapshot(state)
            fill_with_sentinel(state)
            state["list"][1]["step"] = -1
            load(state, checkpoint_id=root / str(number))
            check_same(snapshot(state), wanted, where=f"rank {rank}, save {number}")
            assert state["list"][1] == {"step": number}


@pytest.mark.parametrize("way", ["save", "async_save"])
@pytest.mark.parametrize("source", [(4,), (2, 2)], ids=str)
def test_saves_with_kept_plans(tmp_path: Path, source: tuple[int, ...], way: str) -> None:
    """Values, shapes and keys change from save to save: each is stored as it was, for any mesh."""
    gloo_world(4, save_all, tmp_path, source, way)
    for dest in ((3,), (4,), (2, 2)):
        gloo_world(torch.Size(dest).numel(), load_all, tmp_path, dest)
