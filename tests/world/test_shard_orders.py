"""DTensors whose dims were cut in an order that stock ignores: what is right, and the warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_reshard
from dcp_reshard import ReshardSavePlanner, ShardOrderWarning
from tests.support.checkpoints import check_world_loads, save_state, save_world
from tests.support.strided import chunk, fsdp_over_tp
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world

State = dict[str, Any]
FULL = indexed_tensor((8, 3))


def ordered(rank: int) -> State:
    """Plain shards of rows, over the second axis first."""
    mesh = init_device_mesh("cpu", (2, 2))
    row, column = mesh.get_coordinate() or (0, 0)
    meta = TensorMeta(FULL.shape, FULL.stride(), FULL.dtype)
    order = (ShardOrderEntry(0, (1, 0)),)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order)
    local = chunk(chunk(FULL, 2, column, 0), 2, row, 0).clone()
    return {"w": DTensor(local, spec, requires_grad=False)}


THREE = indexed_tensor((9, 2))


def three_axes(rank: int) -> State:
    """FSDP over expert and tensor parallelism of one dim, in a size whose records look right."""
    mesh = init_device_mesh("cpu", (2, 2, 3))
    local = THREE
    for axis in (1, 2, 0):
        local = chunk(local, mesh.size(axis), mesh.get_local_rank(axis), 0)
    placements = [_StridedShard(0, split_factor=6), Shard(0), Shard(0)]
    shape, stride = THREE.shape, THREE.stride()
    local = local.clone()
    made = DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
    return {"w": made}


def plain(rank: int) -> State:
    mesh = init_device_mesh("cpu", (2, 2))
    return {"w": distribute_tensor(FULL, mesh, [Shard(0), Shard(0)], src_data_rank=None)}


@pytest.mark.parametrize("make", [ordered, plain])
@pytest.mark.filterwarnings("ignore::dcp_reshard.ShardOrderWarning")
def test_what_we_save_is_right_either_way(tmp_path: Path, make: Any) -> None:
    """`ReshardSavePlanner` records the rows that ranks hold; stock's plain shards are right."""
    save_world(tmp_path / "ours", 4, make, planner=ReshardSavePlanner)
    save_world(tmp_path / "stock", 4, plain)
    for path in (tmp_path / "ours", tmp_path / "stock"):
        for dest in (ordered, plain):
            check_world_loads(4, dest, lambda s, p=path: dcp_reshard.load(s, p, no_dist=True))


@pytest.mark.parametrize(("make", "size"), [(ordered, 4), (three_axes, 12)])
def test_what_stock_has_saved_is_warned_of(tmp_path: Path, make: Any, size: int) -> None:
    """Stock's own resume is right, ours exchanges rows: the first rank says so, by name."""
    save_world(tmp_path, size, make)
    check_world_loads(
        size, make, lambda state: dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    )
    said: list[str] = []

    def load(state: State) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dcp_reshard.load(state, tmp_path, no_dist=True)
        said.extend(str(w.message) for w in caught if w.category is ShardOrderWarning)

    with pytest.raises(AssertionError, match=f"rank . of {size}"):
        check_world_loads(size, make, load)
    assert said
    assert "(`w`)" in said[0]
    assert "with stock dcp.load" in said[0]


def strided(rank: int) -> State:
    return {"w": fsdp_over_tp(FULL, init_device_mesh("cpu", (2, 2)))}


def test_what_needs_no_warning(tmp_path: Path) -> None:
    """A tensor stored in one piece is right, and FSDP2 over tensor parallelism is in placements."""
    save_state(tmp_path / "whole", {"w": FULL})
    save_world(tmp_path / "parts", 4, plain)
    for path, make in ((tmp_path / "whole", ordered), (tmp_path / "parts", strided)):
        with fake_world(0, 4):
            dcp_reshard.load(make(0), path, no_dist=True)
