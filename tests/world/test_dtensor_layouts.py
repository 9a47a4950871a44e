"""All of DTensor but strided placements: axes, meshes, and what is refused by name."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_reshard
from dcp_reshard import LayoutError, ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.layout import collect_tensor_layout
from tests.support.checkpoints import check_world_loads, save_state, save_world
from tests.support.failures import catch_failure
from tests.support.strategies import mesh_shapes, placements, shapes
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world

State = dict[str, Any]


def our_load(path: Path) -> Callable[[State], object]:
    return lambda state: dcp_reshard.load(state, path, no_dist=True)


@given(st.data())
@settings(max_examples=60)
def test_plain_placements_on_any_mesh(data: st.DataObject) -> None:
    """1 to 3 axes, each dim cut by any of them, dims counted from the end: as torch cuts them."""
    shape = data.draw(shapes(max_side=7), label="shape")
    mesh_shape = data.draw(mesh_shapes(), label="mesh")
    chosen = data.draw(placements(mesh_shape, len(shape)), label="placements")
    from_end = [
        Shard(p.dim - len(shape)) if isinstance(p, Shard) and data.draw(st.booleans()) else p
        for p in chosen
    ]
    full = indexed_tensor(shape, torch.int64)
    size = math.prod(mesh_shape)
    for rank in range(size):
        with fake_world(rank, size):
            mesh = init_device_mesh("cpu", mesh_shape)
            dtensor = distribute_tensor(full, mesh, from_end, src_data_rank=None)
            layout = collect_tensor_layout("w", dtensor)
            local = dtensor.to_local()
            assert len(layout.shards) == (local.numel() > 0)
            for shard in layout.shards:
                assert torch.equal(shard.tensor, full[shard.box.slices()])
                assert shard.tensor.shape == local.shape


def grid_state(mesh_shape: tuple[int, ...], chosen: list[Any]) -> Callable[[int], State]:
    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", mesh_shape)
        return {
            str(shape): distribute_tensor(indexed_tensor(shape), mesh, chosen, src_data_rank=None)
            for shape in [(7, 5, 3), (2, 3, 11), (12, 4, 4), (1, 1, 1), (3, 0, 5)]
        }

    return make


GRIDS: dict[str, tuple[tuple[int, ...], list[Any]]] = {
    "same_dim_twice": ((2, 3), [Shard(0), Shard(0)]),
    "same_dim_thrice": ((2, 2, 2), [Shard(0), Shard(0), Shard(0)]),
    "last_dim_first": ((2, 2), [Shard(-1), Shard(-2)]),
    "hsdp": ((2, 3), [Replicate(), Shard(0)]),
    "hsdp_last": ((3, 2), [Shard(1), Replicate()]),
    "three_dims": ((2, 2, 2), [Shard(2), Shard(0), Shard(1)]),
    "two_of_three": ((2, 2, 2), [Shard(0), Replicate(), Shard(0)]),
}


@pytest.mark.parametrize("dest", GRIDS)
@pytest.mark.parametrize("source", GRIDS)
def test_grids_load_from_each_other(tmp_path: Path, source: str, dest: str) -> None:
    """What stock saves under one grid of ranks is loaded under another."""
    save_world(tmp_path, math.prod(GRIDS[source][0]), grid_state(*GRIDS[source]))
    check_world_loads(math.prod(GRIDS[dest][0]), grid_state(*GRIDS[dest]), our_load(tmp_path))


def on_sub_meshes(rank: int) -> State:
    """Six ranks: one tensor on all, one on the even ones, one on two, one on each pair alone."""
    everyone = init_device_mesh("cpu", (6,))
    even = DeviceMesh("cpu", torch.tensor([0, 2, 4]))
    square = DeviceMesh("cpu", torch.tensor([[5, 1], [3, 2]]))
    full = indexed_tensor((7, 4))
    return {
        "all": distribute_tensor(full, everyone, [Shard(0)], src_data_rank=None),
        "even": distribute_tensor(full + 1, even, [Shard(0)], src_data_rank=None),
        "square": distribute_tensor(full + 2, square, [Shard(1), Shard(0)], src_data_rank=None),
    }


def test_sub_meshes_that_leave_ranks_out(tmp_path: Path) -> None:
    """A rank outside of a tensor's mesh loads nothing of it; the others get their parts."""
    save_world(tmp_path / "subs", 6, on_sub_meshes)
    full = indexed_tensor((7, 4))
    save_state(tmp_path / "whole", {"all": full, "even": full + 1, "square": full + 2})
    for path in (tmp_path / "subs", tmp_path / "whole"):
        for rank in range(6):
            with fake_world(rank, 6):
                state = on_sub_meshes(rank)
                wanted = snapshot(state)
                fill_with_sentinel({key: state[key] for key in state if in_mesh(state[key])})
                report = dcp_reshard.load(state, path, no_dist=True)
                check_same(snapshot(state), wanted, where=f"rank {rank}")
                inside = [value for value in state.values() if in_mesh(value)]
                assert report.bytes_wanted == 4 * sum(v.to_local().numel() for v in inside)
    check_world_loads(
        1,
        lambda _: {"all": full, "even": full + 1, "square": full + 2},
        our_load(tmp_path / "subs"),
    )


def in_mesh(dtensor: DTensor) -> bool:
    return dtensor.device_mesh.get_coordinate() is not None


def experts(dp: int, ep: int, dim: int) -> Callable[[int], State]:
    """Dense weights over all ranks; experts over `ep` of them, FSDP over the rest along `dim`."""
    weight, dense = indexed_tensor((6, 5, 4)), indexed_tensor((11, 3))

    def make(rank: int) -> State:
        flat = init_device_mesh("cpu", (dp * ep,))
        grid = init_device_mesh("cpu", (dp, ep))
        row, column = divmod(rank, ep)
        local = weight.chunk(ep)[column].chunk(dp, dim)
        part = local[row] if row < len(local) else local[0].narrow(dim, 0, 0)
        cut = _StridedShard(0, split_factor=ep) if dim == 0 and ep > 1 else Shard(dim)
        return {
            "dense": distribute_tensor(dense, flat, [Shard(0)], src_data_rank=None),
            "experts": DTensor.from_local(
                part.clone(),
                grid,
                [cut, Shard(0)],
                run_check=False,
                shape=weight.shape,
                stride=weight.stride(),
            ),
        }

    return make


EXPERTS = [(2, 3, 0), (4, 2, 0), (2, 2, 1), (4, 1, 1), (1, 6, 0), (3, 2, 2)]


@pytest.mark.parametrize("dest", EXPERTS, ids=str)
@pytest.mark.parametrize("source", EXPERTS, ids=str)
def test_expert_parallel_meshes(
    tmp_path: Path, source: tuple[int, int, int], dest: tuple[int, int, int]
) -> None:
    """Parameters on different meshes in one state dict, with other numbers of expert ranks."""
    save_world(tmp_path, source[0] * source[1], experts(*source))
    check_world_loads(dest[0] * dest[1], experts(*dest), our_load(tmp_path))


def test_fully_shard_along_columns_and_over_replicas(tmp_path: Path) -> None:
    """`shard_placement_fn` on dim 1, HSDP, and tensor parallelism below: as `fully_shard` cuts."""
    full = {"0.weight": indexed_tensor((6, 8)), "0.bias": indexed_tensor((6,)) + 0.5}
    save_state(tmp_path, {"model": full})
    for rank, (_, dp, tp) in enumerate(itertools.product(range(2), range(2), range(2))):
        with fake_world(rank, 8):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "dp", "tp"))
            model = torch.nn.Sequential(torch.nn.Linear(8, 6))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
            fully_shard(
                model,
                mesh=mesh["replicate", "dp"],
                shard_placement_fn=lambda param: Shard(param.ndim - 1),
            )
            state = {"model": model.state_dict()}
            fill_with_sentinel(state)
            dcp_reshard.load(state, tmp_path, no_dist=True)
            weight, bias = model[0].weight, model[0].bias
            assert isinstance(weight, DTensor)
            assert isinstance(bias, DTensor)
            assert list(weight.placements) == [Replicate(), Shard(1), Shard(0)]
            wanted = full["0.weight"].chunk(2)[tp].chunk(2, 1)[dp]
            assert torch.equal(weight.to_local(), wanted)
            assert torch.equal(bias.to_local(), full["0.bias"].chunk(2)[tp].chunk(2)[dp])


def from_local(local: torch.Tensor, chosen: list[Any], shape: tuple[int, ...]) -> DTensor:
    """A DTensor whose local tensor nobody has compared with its placements."""
    mesh = init_device_mesh("cpu", (2, 2))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, chosen, run_check=False, shape=shape, stride=stride)


def cut_along(dim: int) -> DTensor:
    """A spec that no function of torch makes, for a dim that is not there."""
    mesh = init_device_mesh("cpu", (2, 2))
    meta = TensorMeta(torch.Size((4, 4)), (4, 1), torch.float32)
    spec = DTensorSpec(mesh, (Shard(dim), Replicate()), meta)
    return DTensor(torch.zeros(2, 4), spec, requires_grad=False)


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "partial": (
        lambda: from_local(torch.zeros(4, 4), [Partial(), Replicate()], (4, 4)),
        "placement Partial(sum) on mesh axis 0 is not a shard or a replica",
    ),
    "partial_average": (
        lambda: from_local(torch.zeros(2, 4), [Shard(0), Partial("avg")], (4, 4)),
        "placement Partial(avg) on mesh axis 1 is not a shard or a replica",
    ),
    "too_many_rows": (
        lambda: from_local(torch.zeros(3, 4), [Shard(0), Replicate()], (4, 4)),
        "the local tensor has shape (3, 4), but placements (Shard(dim=0), Replicate()) on a mesh "
        "of shape (2, 2) give this rank (2, 4)",
    ),
    "transposed": (
        lambda: from_local(torch.zeros(4, 2), [Shard(0), Replicate()], (4, 4)),
        "the local tensor has shape (4, 2)",
    ),
    "empty": (
        lambda: from_local(torch.zeros(0, 4), [Shard(0), Replicate()], (4, 4)),
        "the local tensor has shape (0, 4)",
    ),
    "not_empty": (
        lambda: from_local(torch.zeros(1, 4), [Shard(0), Shard(1)], (4, 0)),
        "the local tensor has shape (1, 4)",
    ),
    "whole_where_cut": (
        lambda: from_local(torch.zeros(4, 4), [Shard(0), Shard(1)], (4, 4)),
        "the local tensor has shape (4, 4)",
    ),
    "other_number_of_dims": (
        lambda: from_local(torch.zeros(8), [Shard(0), Replicate()], (4, 4)),
        "the local tensor has shape (8,)",
    ),
    "no_such_dim": (lambda: cut_along(2), "cuts a dim that a tensor of shape (4, 4) does not have"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_right_is_refused_by_name(tmp_path: Path, name: str) -> None:
    """Partial sums, and local tensors that do not follow from their placements, are not filled."""
    make, words = REFUSED[name]
    stored = torch.zeros((4, 0) if name == "not_empty" else (4, 4))
    save_state(tmp_path, {"fine": indexed_tensor((5,)), "layer": {"w": stored}})
    with fake_world(0, 4):
        state = {"fine": torch.zeros(5), "layer": {"w": make()}}
        error = catch_failure(
            lambda: dcp.load(
                state,
                storage_reader=ReshardStorageReader(tmp_path),
                planner=ReshardLoadPlanner(),
                no_dist=True,
            )
        )
    assert isinstance(error, LayoutError)
    assert error.fqn == "layer.w"
    assert "tensor `layer.w`" in str(error)
    assert words in str(error)
    assert not state["fine"].any()
