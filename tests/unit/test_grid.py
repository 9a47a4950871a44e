"""Grids of ranks: what all ranks hold together is the tensor, each element once."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.coverage import find_defect
from dcp_reshard.errors import LayoutError
from dcp_reshard.fused import FusedBlocks, cut_dim, join_dim
from dcp_reshard.grid import plan_grid, plan_target
from dcp_reshard.shard_rules import ShardRules


def _shape(rows: int, rest: list[int], other: dict[int, int]) -> tuple[int, ...]:
    return (rows, *(other.get(i, rest[i]) for i in range(1, len(rest))))


@hypothesis.given(st.data())
def test_ranks_of_any_grid_hold_each_element_once(data: st.DataObject) -> None:
    """Whatever ranks stored, the boxes of the stored and of any other grid tile the tensor."""
    ndim = data.draw(st.integers(1, 3))
    dim = data.draw(st.integers(0, ndim - 1))
    rest = data.draw(st.lists(st.integers(0, 5), min_size=ndim, max_size=ndim))
    tp, dp = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    sizes = st.lists(st.integers(0, 4), min_size=dp, max_size=dp)
    rows = data.draw(sizes)
    shapes = []
    for _ in range(tp):
        width = data.draw(st.integers(0, 5))
        own = data.draw(sizes) if dim == 0 else rows
        shapes.append([_shape(n, rest, {dim: width} if dim else {}) for n in own])
    grid = plan_grid(shapes, dim=dim, fused=None)
    boxes = [part.box for row in grid.splits for held in row for part in held.boxes]
    assert find_defect(BoxArray.from_boxes(boxes, ndim=ndim), Box.full(grid.shape)) is None
    others = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    targets = [
        plan_target(grid, dim=dim, fused=None, tp=(others[0], t), dp=(others[1], d))
        for t in range(others[0])
        for d in range(others[1])
    ]
    boxes = [part.box for held in targets for part in held.boxes]
    assert find_defect(BoxArray.from_boxes(boxes, ndim=ndim), Box.full(grid.shape)) is None
    for held in targets:
        assert sum(part.box.numel for part in held.boxes) == Box.full(held.shape).numel


@hypothesis.given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 5)
)
def test_fused_blocks_join_to_what_was_cut(units: list[int], unit: int, ranks: int) -> None:
    """Segments of all ranks hold each index once, and lie in a rank's shard without a gap."""
    fused = FusedBlocks(tuple(n * unit for n in units), unit=unit)
    segments = [cut_dim(fused.total, ranks, rank, fused=fused) for rank in range(ranks)]
    held = sorted(i for own in segments for s in own for i in range(s.start, s.start + s.length))
    assert held == list(range(fused.total))
    for own in segments:
        ends = [0, *(s.local + s.length for s in own)]
        assert [s.local for s in own] == ends[:-1]
    lengths = [sum(s.length for s in own) for own in segments]
    assert join_dim(lengths, fused=fused) == (fused.total, segments)


@pytest.mark.parametrize(
    ("sizes", "unit", "message"),
    [
        ((), 1, "blocks of"),
        ((4, -1), 1, "blocks of"),
        ((4,), 0, "in units of 0"),
        ((4, 3), 2, "a block of 3 indices cannot be cut into units of 2"),
    ],
)
def test_blocks_that_cannot_be(sizes: tuple[int, ...], unit: int, message: str) -> None:
    """No blocks, negative ones, and blocks that are not whole units are refused."""
    with pytest.raises(ValueError, match=message):
        FusedBlocks(sizes, unit=unit)


def test_blocks_of_another_total() -> None:
    """Blocks that do not add up to the dim are refused."""
    with pytest.raises(ValueError, match="make 6, but the dim has 7"):
        cut_dim(7, 2, 0, fused=FusedBlocks((3, 3)))


def test_rules_that_disagree_are_named() -> None:
    """Two patterns that give a key different dims are an error; the same dim twice is none."""
    rules = ShardRules({}, {r"a\..*": 0, r".*\.w": 1, r"b": 0, r"b\.": 0})
    assert rules.find_dim("b.x") == 0
    assert rules.find_dim("c.w") == 1
    with pytest.raises(LayoutError, match=r"`a\.w`: .* dim 0 \(pattern .* and dim 1 \(pattern"):
        rules.find_dim("a.w")
