"""ShardedTensors, which FSDP1 makes: specs, grids, several shards or none on a rank, nesting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed._shard import sharded_tensor as st_api
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import dcp_reshard
from dcp_reshard import LayoutError, ReshardLoadPlanner
from dcp_reshard.box import Box
from dcp_reshard.layout import collect_tensor_layout
from tests.support.checkpoints import check_world_loads, save_state, save_world
from tests.support.failures import catch_failure
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.strategies import shapes, tilings
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world

State = dict[str, Any]
FULL = indexed_tensor((9, 7))
WORLD = 4


def our_load(path: Path) -> Callable[[State], object]:
    return lambda state: dcp_reshard.load(state, path, no_dist=True)


def of_spec(spec: ChunkShardingSpec | EnumerableShardingSpec) -> ShardedTensor:
    """The current rank's ShardedTensor as torch builds it from a spec, filled with its parts."""
    made: ShardedTensor = st_api.empty(spec, *FULL.size())
    for shard in made.local_shards():
        box = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        shard.tensor.copy_(FULL[box.slices()])
    return made


def chunk_spec(dim: int, ranks: Sequence[int]) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])


def enumerable(boxes: Sequence[tuple[tuple[int, int], tuple[int, int], int]]) -> Any:
    return EnumerableShardingSpec(
        [ShardMetadata(list(o), list(s), f"rank:{rank}/cpu") for o, s, rank in boxes]
    )


# Row and column of each box, rows and columns in it, its rank.
GRID = [((0, 0), (5, 3), 0), ((0, 3), (5, 4), 1), ((5, 0), (4, 3), 2), ((5, 3), (4, 4), 3)]
SEVERAL = [((0, 0), (3, 7), 2), ((3, 0), (2, 7), 0), ((5, 0), (1, 7), 2), ((6, 0), (3, 7), 2)]
BRICKS = [
    ((0, 0), (4, 2), 3),
    ((0, 2), (4, 5), 1),
    ((4, 0), (1, 7), 3),
    ((5, 0), (4, 5), 0),
    ((5, 5), (4, 2), 1),
]

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "rows": lambda: of_spec(chunk_spec(0, range(4))),
    "columns": lambda: of_spec(chunk_spec(1, range(4))),
    "rows_backwards": lambda: of_spec(chunk_spec(0, [3, 2, 1, 0])),
    "two_of_four": lambda: of_spec(chunk_spec(-1, [2, 1])),
    "grid": lambda: of_spec(enumerable(GRID)),
    "several_on_one": lambda: of_spec(enumerable(SEVERAL)),
    "bricks": lambda: of_spec(enumerable(BRICKS)),
    "fsdp1": lambda: sharded_tensor(FULL, row_boxes(FULL.shape, WORLD)),
    "plain": FULL.clone,
}


@pytest.mark.parametrize("dest", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_specs_load_from_each_other(tmp_path: Path, source: str, dest: str) -> None:
    """What stock saves of one spec is loaded into another; ranks without a shard load nothing."""
    save_world(tmp_path, WORLD, lambda _: {"w": LAYOUTS[source]()})
    check_world_loads(WORLD, lambda _: {"w": LAYOUTS[dest]()}, our_load(tmp_path))


@given(st.data())
@settings(max_examples=60)
def test_any_tiling_on_any_ranks(data: st.DataObject) -> None:
    """Any boxes on any ranks, any number for each: the layout has them where the metadata say."""
    shape = data.draw(shapes(min_dims=1, min_side=1), label="shape")
    full = indexed_tensor(shape, torch.int64)
    boxes = [(box, data.draw(st.integers(0, 2))) for box in data.draw(tilings(shape))]
    seen = torch.zeros_like(full)
    for rank in range(3):
        with fake_world(rank, 3):
            layout = collect_tensor_layout("w", sharded_tensor(full, boxes))
        assert [shard.box for shard in layout.shards] == [box for box, r in boxes if r == rank]
        for shard in layout.shards:
            assert torch.equal(shard.tensor, full[shard.box.slices()])
            seen[shard.box.slices()] += 1
    assert bool((seen == 1).all())


def nested_in_sharded(box: Box) -> torch.Tensor:
    """The inner ShardedTensor of a part of `FULL`: columns over two ranks, uneven, as FSDP1 has."""
    part = FULL[box.slices()]
    rank = dist.get_rank()
    first = rank - rank % 2
    boxes = [(Box((0, 0), (box.sizes[0], 4)), first), (Box((0, 4), (box.sizes[0], 3)), first + 1)]
    return sharded_tensor(part, boxes)


def nested_in_dtensor(box: Box) -> torch.Tensor:
    """The inner DTensor of a part of `FULL`: columns over tensor parallelism."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    part = FULL[box.slices()]
    local = part.chunk(2, 1)[mesh.get_local_rank()].clone()
    return DTensor.from_local(
        local, mesh, [Shard(1)], run_check=False, shape=part.shape, stride=(box.sizes[1], 1)
    )


def nested(make_local: Callable[[Box], torch.Tensor]) -> torch.Tensor:
    """Rows over data parallelism (ranks 0 and 1, ranks 2 and 3), columns over the ranks of each."""
    column = dist.get_rank() % 2
    boxes = [(Box((0, 0), (5, 7)), column), (Box((5, 0), (4, 7)), 2 + column)]
    return sharded_tensor(FULL, boxes, make_local=make_local)


@pytest.mark.parametrize("make_local", [nested_in_sharded, nested_in_dtensor])
def test_nested(tmp_path: Path, make_local: Callable[[Box], torch.Tensor]) -> None:
    """Outer and inner offsets are added: the displaced index of tensor parallelism inside FSDP1."""
    save_state(tmp_path, {"w": FULL})
    for rank in range(WORLD):
        with fake_world(rank, WORLD):
            value = nested(make_local)
            assert isinstance(value, ShardedTensor)
            layout = collect_tensor_layout("w", value)
            row, column = divmod(rank, 2)
            ((_, inner),) = [(s, s.tensor) for s in value.local_shards()]
            local = innermost(inner)
            local.fill_(-1)
            dcp_reshard.load({"w": value}, tmp_path, no_dist=True)
            box = Box((5 * row, 4 * column), (5 - row, 4 - column))
            assert [shard.box for shard in layout.shards] == [box]
            assert torch.equal(local, FULL[box.slices()])


def innermost(value: torch.Tensor) -> torch.Tensor:
    if isinstance(value, ShardedTensor):
        return innermost(value.local_shards()[0].tensor)
    return value.to_local() if isinstance(value, DTensor) else value


def test_nested_saved_by_stock(tmp_path: Path) -> None:
    """Stock stores a ShardedTensor inside another with the sum of the offsets, and we read it."""
    save_world(tmp_path, WORLD, lambda _: {"w": nested(nested_in_sharded)})
    check_world_loads(1, lambda _: {"w": FULL.clone()}, our_load(tmp_path))
    check_world_loads(WORLD, lambda _: {"w": LAYOUTS["bricks"]()}, our_load(tmp_path))


def test_stock_reader_with_our_planner(tmp_path: Path) -> None:
    """Displaced indices are resolved for stock's reader as well."""
    save_world(tmp_path, WORLD, lambda _: {"w": LAYOUTS["bricks"]()})

    def load(state: State) -> None:
        reader = dcp.FileSystemReader(tmp_path)
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), no_dist=True)

    for dest in LAYOUTS.values():
        check_world_loads(WORLD, lambda _, dest=dest: {"w": dest()}, load)


def test_meta_shards_are_replaced(tmp_path: Path) -> None:
    """A ShardedTensor without memory becomes one with memory, of the same shards."""
    save_state(tmp_path, {"w": FULL})
    for rank in range(WORLD):
        with fake_world(rank, WORLD):
            boxes = [(Box(o, s), r) for o, s, r in SEVERAL]
            meta = sharded_tensor(FULL, boxes)
            for shard in meta.local_shards():
                shard.tensor = shard.tensor.to("meta")
            state = {"w": meta}
            dcp_reshard.load(state, tmp_path, no_dist=True)
            shards = state["w"].local_shards()
            mine = [box for box, r in boxes if r == rank]
            assert [tuple(s.metadata.shard_offsets) for s in shards] == [b.offsets for b in mine]
            for shard, box in zip(shards, mine, strict=True):
                assert torch.equal(shard.tensor, FULL[box.slices()])


def test_shards_of_another_size_than_said_are_refused(tmp_path: Path) -> None:
    """A local shard whose tensor was replaced by one of another shape is not filled."""
    save_state(tmp_path, {"fine": FULL, "w": FULL})
    with fake_world(1, WORLD):
        value = LAYOUTS["rows"]()
        assert isinstance(value, ShardedTensor)
        value.local_shards()[0].tensor = torch.zeros(2, 7)
        state = {"fine": torch.zeros_like(FULL), "w": value}
        error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert isinstance(error, LayoutError)
    assert "tensor `w`: the local tensor has shape (2, 7), but the ShardedTensor's" in str(error)
    assert not state["fine"].any()
