"""Strided placements: what a rank holds follows the order in which the cuts were made."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dcp_reshard
from dcp_reshard import LayoutError
from dcp_reshard.layout import collect_tensor_layout
from dcp_reshard.sharding import Cut, held_runs
from tests.support.checkpoints import save_state
from tests.support.failures import find_failures
from tests.support.strided import COMBINATIONS, chunk, fsdp_over_tp, held_by, strided_placements
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world

MESHES = sorted({(dp, tp) for _, dp, tp in COMBINATIONS})
KNOWN_BAD = [(13, 3, 2), (7, 3, 2), (9, 4, 2), (11, 3, 3)]


def check_holds(dtensor: DTensor, full: torch.Tensor) -> None:
    """Check that the layout of a DTensor says of each local element which one of `full` it is."""
    layout = collect_tensor_layout("w", dtensor)
    local = dtensor.to_local()
    assert sum(shard.tensor.numel() for shard in layout.shards) == local.numel()
    for shard in layout.shards:
        assert torch.equal(shard.tensor, full[shard.box.slices()]), shard.box
        assert shard.tensor.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()


def test_all_sizes_of_fsdp_over_tensor_parallelism() -> None:
    """In all 1080 combinations a rank holds one run: its part of its part, in the order of cuts."""
    assert len(COMBINATIONS) == 1080
    for rows, dp, tp in COMBINATIONS:
        for i, j in itertools.product(range(dp), range(tp)):
            wanted = held_by(torch.arange(rows), (dp, i), (tp, j)).tolist()
            runs = held_runs(rows, [Cut(0, dp, i, split_factor=tp), Cut(0, tp, j)])
            found = [n for run in runs for n in range(run.start, run.start + run.length)]
            assert found == wanted, (rows, dp, tp, i, j)
            assert len(runs) <= 1


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a single process: tensors of 1 to 30 rows, named by their number."""
    path = tmp_path_factory.mktemp("whole")
    save_state(path, {str(n): indexed_tensor((n, 2)) for n in range(1, 31)})
    return path


@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_all_sizes_are_loaded(stored: Path, mesh_shape: tuple[int, int]) -> None:
    """Each rank of each mesh gets its own rows of tensors of 1 to 30 rows."""
    size = math.prod(mesh_shape)
    for rank in range(size):
        with fake_world(rank, size):
            mesh = init_device_mesh("cpu", mesh_shape)
            state = {str(n): fsdp_over_tp(indexed_tensor((n, 2)), mesh) for n in range(1, 31)}
            wanted = snapshot(state)
            fill_with_sentinel(state)
            dcp_reshard.load(state, stored, no_dist=True)
            check_same(snapshot(state), wanted, where=f"rank {rank} of {mesh_shape}")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(("rows", "dp", "tp"), KNOWN_BAD)
def test_what_fully_shard_makes(stored: Path, rows: int, dp: int, tp: int, replicas: int) -> None:
    """The parameters of `fully_shard` over `parallelize_module` are cut as these tests cut them."""
    full = indexed_tensor((rows, 2))
    shape = (dp, tp) if replicas == 1 else (replicas, dp, tp)
    names = ("dp", "tp") if replicas == 1 else ("replicate", "dp", "tp")
    for rank, coordinate in enumerate(itertools.product(*map(range, shape))):
        with fake_world(rank, math.prod(shape)):
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
            model = torch.nn.Sequential(torch.nn.Linear(2, rows, bias=False))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()}, src_data_rank=None)
            fully_shard(model, mesh=mesh[names[:-1]])
            weight = model[0].weight
            assert isinstance(weight, DTensor)
            expected = [*[Replicate()] * (replicas - 1), *strided_placements(tp)]
            assert list(weight.placements) == expected
            state = {str(rows): weight, "exp_avg": torch.zeros_like(weight)}
            dcp_reshard.load(state, stored, no_dist=True, rename={"exp_avg": str(rows)})
            part = held_by(full, (dp, coordinate[-2]), (tp, coordinate[-1]))
            for value in state.values():
                assert torch.equal(value.to_local().detach(), part), (rank, value)


ORDERS: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
    (shape, order)
    for shape in [(3, 2), (2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 1, 3)]
    for order in itertools.permutations(range(len(shape)))
]


def ordered_placements(shape: Sequence[int], order: Sequence[int]) -> list[Placement]:
    """Placements that say that axes cut dim 0 in this order."""
    result: list[Placement] = [Shard(0)] * len(shape)
    for number, axis in enumerate(order):
        pieces = math.prod(shape[before] for before in order[:number] if before > axis)
        if pieces > 1:
            result[axis] = _StridedShard(0, split_factor=pieces)
    return result


@pytest.mark.parametrize("rows", [1, 5, 9, 13, 21, 29])
@pytest.mark.parametrize(("shape", "order"), ORDERS)
def test_axes_that_cut_one_dim_in_any_order(
    shape: tuple[int, ...], order: tuple[int, ...], rows: int
) -> None:
    """Two and three axes may cut a dim in any order (FSDP over expert and tensor parallelism)."""
    full = indexed_tensor((rows, 3), torch.int64)
    for rank, coordinate in enumerate(itertools.product(*map(range, shape))):
        local = full
        for axis in order:
            local = chunk(local, shape[axis], coordinate[axis])
        with fake_world(rank, math.prod(shape)):
            mesh = init_device_mesh("cpu", shape)
            strided = DTensor.from_local(
                local.clone(),
                mesh,
                ordered_placements(shape, order),
                run_check=False,
                shape=full.shape,
                stride=full.stride(),
            )
            check_holds(strided, full)
            # torch's own way to say the same, which state dicts may have as well.
            spec = DTensorSpec(
                mesh,
                (Shard(0),) * len(shape),
                TensorMeta(full.shape, full.stride(), full.dtype),
                shard_order=(ShardOrderEntry(0, order),),
            )
            check_holds(DTensor(local.clone(), spec, requires_grad=False), full)


@st.composite
def strided_tensors(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], list[Placement]]:
    """Shape, mesh shape and placements, strided ones with any split factor among them."""
    mesh_shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    shape = draw(st.lists(st.integers(1, 13), min_size=1, max_size=2).map(tuple))
    dims = st.integers(0, len(shape) - 1)
    plain: st.SearchStrategy[Placement] = st.one_of(st.just(Replicate()), dims.map(Shard))
    strided = st.builds(lambda d, f: _StridedShard(d, split_factor=f), dims, st.integers(2, 6))
    placements = [draw(st.one_of(plain, strided)) for _ in mesh_shape]
    return shape, mesh_shape, placements


def means_an_order(placements: Sequence[Placement], mesh: DeviceMesh) -> bool:
    convert = DTensorSpec._maybe_convert_StridedShard_to_shard_order
    return convert(tuple(placements), mesh) is not None


@given(strided_tensors(), st.data())
def test_random_strided_placements_against_the_definition(
    drawn: tuple[tuple[int, ...], tuple[int, ...], list[Placement]], data: st.DataObject
) -> None:
    """Placements that mean no order of cuts are taken as `distribute_tensor` takes them.

    It cuts by definition, from left to right. Where an order is meant, that is another layout for
    some uneven sizes: then the local tensor is refused, or is the same by chance.
    """
    shape, mesh_shape, placements = drawn
    full = indexed_tensor(shape, torch.int64)
    size = math.prod(mesh_shape)
    rank = data.draw(st.integers(0, size - 1), label="rank")
    with fake_world(rank, size):
        mesh = init_device_mesh("cpu", mesh_shape)
        dtensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
        if not means_an_order(placements, mesh):
            check_holds(dtensor, full)
            return
        for failure in find_failures(lambda: collect_tensor_layout("w", dtensor)).values():
            assert isinstance(failure, LayoutError)
            assert "the local tensor has shape" in str(failure)


def load_into(state: dict[str, Any], path: Path) -> None:
    wanted = snapshot(state)
    fill_with_sentinel(state)
    dcp_reshard.load(state, path, no_dist=True)
    check_same(snapshot(state), wanted)


@pytest.mark.parametrize(
    ("mesh_shape", "placements", "held"),
    [
        ((2,), [_StridedShard(0, split_factor=2)], [[0, 2], [1, 3]]),
        (
            (2, 2),
            [Shard(0), _StridedShard(0, split_factor=2)],
            [[0, 2], [1, 3], [4, 6], [5, 7]],
        ),
        ((2,), [_StridedShard(0, split_factor=3)], [[0, 1, 4, 5, 8], [2, 3, 6, 7, 9]]),
    ],
)
def test_several_boxes_for_one_local_tensor(
    tmp_path: Path, mesh_shape: tuple[int, ...], placements: list[Any], held: list[list[int]]
) -> None:
    """Index sets that are no run are filled box by box."""
    full = indexed_tensor((sum(map(len, held)), 3))
    save_state(tmp_path, {"w": full})
    for rank, rows in enumerate(held):
        with fake_world(rank, len(held)):
            mesh = init_device_mesh("cpu", mesh_shape)
            dtensor = distribute_tensor(full, mesh, placements, src_data_rank=None)
            assert torch.equal(dtensor.to_local(), full[rows])
            load_into({"w": dtensor}, tmp_path)


@pytest.mark.parametrize(
    ("shape", "mesh_shape", "placements"),
    [
        ((4, 8), (4,), [Shard(1)]),
        ((3, 7), (2,), [Shard(1)]),
        ((2, 3), (2, 2), [Shard(1), Shard(0)]),
        ((4, 8), (2, 2), [Shard(0), Shard(1)]),
        ((4, 8), (2, 2), [Shard(1), Shard(1)]),
    ],
)
def test_views_of_sharded_tensors(
    tmp_path: Path, shape: tuple[int, ...], mesh_shape: tuple[int, ...], placements: list[Any]
) -> None:
    """`flatten()` of columns makes strided placements that are meant by definition."""
    full = indexed_tensor(shape)
    save_state(tmp_path, {"w": full.flatten()})
    size = math.prod(mesh_shape)
    for rank in range(size):
        with fake_world(rank, size):
            mesh = init_device_mesh("cpu", mesh_shape)
            view = distribute_tensor(full, mesh, placements, src_data_rank=None).flatten()
            assert any(isinstance(p, _StridedShard) for p in view.placements)
            check_holds(view, full.flatten())
            load_into({"w": view}, tmp_path)


def test_left_to_right_cuts_of_an_order_are_refused(tmp_path: Path) -> None:
    """What `distribute_tensor` of torch 2.13 makes of uneven strided rows is not what they mean."""
    full = indexed_tensor((13,))
    save_state(tmp_path, {"fine": full, "layers.0.w": full})
    refused = []
    for rank in range(6):
        with fake_world(rank, 6):
            mesh = init_device_mesh("cpu", (3, 2))
            wrong = distribute_tensor(full, mesh, strided_placements(2), src_data_rank=None)
            state = {"fine": torch.zeros(13), "layers.0.w": wrong}
            failures = find_failures(
                lambda state=state: dcp_reshard.load(state, tmp_path, no_dist=True)
            )
            for failure in failures.values():
                refused.append(rank)
                assert "tensor `layers.0.w`: the local tensor has shape" in str(failure)
                assert not state["fine"].any()
    assert refused == [4, 5]
