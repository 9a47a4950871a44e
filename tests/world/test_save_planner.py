"""`ReshardSavePlanner`: what it records is where the elements are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_reshard
from dcp_reshard import LayoutError, ReshardSavePlanner
from dcp_reshard.box import Box, BoxArray
from dcp_reshard.coverage import find_defect
from tests.support.checkpoints import check_world_loads, save_world
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.strided import COMBINATIONS, fsdp_over_tp
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import gloo_world

State = dict[str, Any]


def stock_load(path: Path) -> Callable[[State], None]:
    return lambda state: dcp.load(state, checkpoint_id=path, no_dist=True)


def our_load(path: Path) -> Callable[[State], object]:
    return lambda state: dcp_reshard.load(state, path, no_dist=True)


MESHES = sorted({(dp, tp) for _, dp, tp in COMBINATIONS if dp * tp > 1})


@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_all_sizes_of_fsdp_over_tensor_parallelism(
    tmp_path: Path, mesh_shape: tuple[int, int]
) -> None:
    """All 1080 combinations are recorded as boxes that tile, and stock loads them as they were."""
    size = mesh_shape[0] * mesh_shape[1]
    rows = range(1, 31)

    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", mesh_shape)
        return {str(n): fsdp_over_tp(indexed_tensor((n, 2)), mesh) for n in rows}

    metadata = save_world(tmp_path, size, make, planner=ReshardSavePlanner)
    for n in rows:
        entry = metadata.state_dict_metadata[str(n)]
        assert isinstance(entry, TensorStorageMetadata)
        boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        assert find_defect(BoxArray.from_boxes(boxes, ndim=2), Box((0, 0), (n, 2))) is None
    check_world_loads(
        1, lambda _: {str(n): indexed_tensor((n, 2)) for n in rows}, stock_load(tmp_path)
    )


# Index sets of a rank that are several boxes, and that only definition gives.
SCATTERED: dict[str, tuple[tuple[int, ...], list[Any], tuple[int, ...]]] = {
    "4_on_2_factor_2": ((2,), [_StridedShard(0, split_factor=2)], (4, 3)),
    "10_on_3_factor_2": ((3,), [_StridedShard(0, split_factor=2)], (10,)),
    "nested": ((2, 2), [Shard(0), _StridedShard(0, split_factor=2)], (13, 2)),
    "both_dims": (
        (2, 2),
        [_StridedShard(0, split_factor=3), _StridedShard(1, split_factor=2)],
        (7, 9),
    ),
}


@pytest.mark.parametrize("name", SCATTERED)
def test_several_chunks_for_one_local_tensor(tmp_path: Path, name: str) -> None:
    """Index sets that are no single box are stored box by box, and loaded whole by stock."""
    mesh_shape, placements, shape = SCATTERED[name]
    full = indexed_tensor(shape)
    size = torch.Size(mesh_shape).numel()

    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", mesh_shape)
        return {"w": distribute_tensor(full, mesh, placements, src_data_rank=None)}

    metadata = save_world(tmp_path, size, make, planner=ReshardSavePlanner)
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    assert len(entry.chunks) > size
    check_world_loads(1, lambda _: {"w": full}, stock_load(tmp_path))
    check_world_loads(size, make, our_load(tmp_path))

    def make_rows(rank: int) -> State:
        mesh = init_device_mesh("cpu", (3,))
        return {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}

    check_world_loads(3, make_rows, stock_load(tmp_path))


def test_a_view_of_a_sharded_tensor(tmp_path: Path) -> None:
    """A column-sharded DTensor after `flatten()`, which stock refuses to save, comes back."""
    full = indexed_tensor((5, 8))

    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", (4,))
        return {"w": distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None).flatten()}

    with pytest.raises(ValueError, match="overlapping chunks"):
        save_world(tmp_path / "stock", 4, make)
    save_world(tmp_path, 4, make, planner=ReshardSavePlanner)
    check_world_loads(1, lambda _: {"w": full.flatten()}, stock_load(tmp_path))
    check_world_loads(4, make, our_load(tmp_path))


def everything(rank: int, size: int) -> State:
    """All kinds of values that a state dict of four ranks may have."""
    mesh = init_device_mesh("cpu", (2, 2))
    full = indexed_tensor((7, 3))

    return {
        "hsdp": distribute_tensor(full, mesh, [Replicate(), Shard(0)], src_data_rank=None),
        "whole": distribute_tensor(full, mesh, [Replicate(), Replicate()], src_data_rank=None),
        "scalar": distribute_tensor(
            torch.tensor(3.5), mesh, [Replicate(), Replicate()], src_data_rank=None
        ),
        "no_rows": distribute_tensor(
            full[:0].clone(), mesh, [Shard(0), Shard(1)], src_data_rank=None
        ),
        "no_columns": distribute_tensor(
            full[:, :0].clone(), mesh, [Shard(0), Replicate()], src_data_rank=None
        ),
        "sharded": sharded_tensor(full, row_boxes((7, 3), size)),
        "plain": full + 1,
        "expanded": torch.tensor([2.0]).expand(4),
        "objects": {"list": [1, 2], "tuple": (1, torch.tensor([5])), "text": "a"},
        "tensors": [full + 2, full + 3],
    }


def test_every_other_value_is_stored_as_stock_stores_it(tmp_path: Path) -> None:
    """Where stock is right, the metadata are the same, but for chunks without elements."""
    for name, planner in (("stock", dcp.DefaultSavePlanner), ("ours", ReshardSavePlanner)):
        save_world(tmp_path / name, 4, lambda rank: everything(rank, 4), planner=planner)
    stock, ours = (
        dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("stock", "ours")
    )
    assert ours.planner_data == stock.planner_data
    assert ours.state_dict_metadata.keys() == stock.state_dict_metadata.keys()
    for key, entry in stock.state_dict_metadata.items():
        other = ours.state_dict_metadata[key]
        assert type(other) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert isinstance(other, TensorStorageMetadata)
            assert (other.size, other.properties.dtype) == (entry.size, entry.properties.dtype)
            if entry.size.numel():
                assert chunks_of(other) == chunks_of(entry), key

    def make(rank: int) -> State:
        state = everything(rank, 4)
        state["expanded"] = state["expanded"].clone()
        return state

    check_world_loads(4, make, our_load(tmp_path / "ours"))
    check_world_loads(4, make, stock_load(tmp_path / "ours"))


def chunks_of(entry: TensorStorageMetadata) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    chunks = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks}
    return {chunk for chunk in chunks if 0 not in chunk[1]}


def test_nested_sharded_tensors_are_stored_where_they_lie(tmp_path: Path) -> None:
    """Tensor parallelism inside data parallelism: outer and inner offsets are added."""
    full = indexed_tensor((8, 6))

    def make(rank: int) -> State:
        # Four ranks: columns in halves over (0, 1) and (2, 3), rows in halves over the pairs.
        boxes = [(Box((4 * (r // 2), 3 * (r % 2)), (4, 3)), r) for r in range(4)]

        def inner(box: Box) -> torch.Tensor:
            part = full[box.slices()]
            return sharded_tensor(part, [(Box((0, 0), (4, 3)), rank)])

        return {"w": sharded_tensor(full, boxes, make_local=inner)}

    save_world(tmp_path, 4, make, planner=ReshardSavePlanner)
    check_world_loads(1, lambda _: {"w": full}, stock_load(tmp_path))


def bad_local(rank: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(
        torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=(7, 2), stride=(2, 1)
    )


def partial(rank: int) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)


def shards_in_tuple(rank: int) -> tuple[torch.Tensor, ...]:
    mesh = init_device_mesh("cpu", (2,))
    return (distribute_tensor(torch.zeros(3), mesh, [Shard(0)], src_data_rank=None),)


@pytest.mark.parametrize(
    ("make", "words"),
    [(bad_local, "(3, 2)"), (partial, "Partial"), (shards_in_tuple, "inside a tuple")],
)
def test_what_cannot_be_described_is_not_saved(
    tmp_path: Path, make: Callable[[int], Any], words: str
) -> None:
    """A local tensor of another shape, partial sums, and shards in a tuple are refused by name."""
    with pytest.raises(LayoutError, match=r"`layer\.w") as caught:
        save_world(
            tmp_path, 2, lambda rank: {"layer": {"w": make(rank)}}, planner=ReshardSavePlanner
        )
    assert words in str(caught.value)
    assert not list(tmp_path.glob("*.distcp"))


def test_replicas_can_be_saved_by_the_lowest_rank(tmp_path: Path) -> None:
    """The option of stock's planner works: of two replicas, the first one's files have all."""

    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", (2, 2))
        names = "abcdefgh"
        return {n: fsdp_over_tp(indexed_tensor((7,)), mesh) for n in names[:2]} | {
            n: distribute_tensor(
                indexed_tensor((6,)), mesh, [Replicate(), Shard(0)], src_data_rank=None
            )
            for n in names[2:]
        }

    metadata = save_world(
        tmp_path,
        4,
        make,
        planner=lambda: ReshardSavePlanner(dedup_save_to_lowest_rank=True),
    )
    files = {
        place.relative_path
        for index, place in metadata.storage_data.items()
        if index.fqn in "cdefgh"
    }
    assert files == {"__0_0.distcp", "__1_0.distcp"}


def save_twice(rank: int, path: Path) -> list[bool]:
    mesh = init_device_mesh("cpu", (2, 2))
    usable = []
    for step in range(2):
        state = {"w": fsdp_over_tp(indexed_tensor((5, 2)) + step, mesh), "step": step}
        planner = ReshardSavePlanner(enable_plan_caching=True)
        dcp.save(state, checkpoint_id=path / str(step), planner=planner)
        usable.append(planner.plan.usable)
        # What the coordinator gets of a plan that has not changed is nothing.
        planner.set_up_planner(state)
        usable.append(planner.create_local_plan().usable)
    return usable


@pytest.mark.dist
def test_cached_plans_store_new_values(tmp_path: Path) -> None:
    """A second save with the plan of the first stores what the tensors hold then."""
    assert gloo_world(4, save_twice, tmp_path) == [[True, False, True, False]] * 4
    for step in range(2):
        state = {"w": torch.zeros(5, 2), "step": -1}
        dcp.load(state, checkpoint_id=tmp_path / str(step), no_dist=True)
        assert torch.equal(state["w"], indexed_tensor((5, 2)) + step)
        assert state["step"] == step


def test_asynchronous_save(tmp_path: Path) -> None:
    """`dcp.async_save` stores what the tensors held when it was called."""
    full = indexed_tensor((9, 4))
    state = {"w": full.clone(), "list": [full + 1]}
    future = dcp.async_save(state, checkpoint_id=tmp_path, planner=ReshardSavePlanner())
    future.result()
    fill_with_sentinel(state)
    loaded = {"w": torch.zeros(9, 4), "list": [torch.zeros(9, 4)]}
    dcp_reshard.load(loaded, tmp_path, no_dist=True)
    check_same(snapshot(loaded), {"w": full, "list.0": full + 1})
