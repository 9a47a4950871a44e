"""Runs of indices against lists of indices, cut by `torch.chunk` as the definition says."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.box import Box
from dcp_reshard.sharding import (
    Cut,
    Run,
    apply_cuts,
    chunk_bounds,
    cut_order,
    held_runs,
    plan_shard_boxes,
)
from tests.support.strategies import shapes


def part(held: torch.Tensor, parts: int, index: int) -> torch.Tensor:
    """Part `index` of `torch.chunk`, which gives fewer parts if there are not enough elements."""
    chunks = held.chunk(parts)
    return chunks[index] if index < len(chunks) else held[:0]


def cut_lists(size: int, cuts: Sequence[Cut]) -> list[int]:
    """Indices held after these cuts: cut into pieces, cut each piece, take this part of each."""
    held = torch.arange(size)
    for cut in cuts:
        pieces = held.chunk(cut.split_factor)
        held = torch.cat([part(piece, cut.num_shards, cut.index) for piece in pieces])
    return held.tolist()


def expand(runs: Sequence[Run]) -> list[int]:
    """Indices of runs; checks that these are in as few pieces as possible."""
    for before, after in itertools.pairwise(runs):
        assert before.start + before.length != after.start
    assert all(run.length >= 1 for run in runs)
    return [i for run in runs for i in range(run.start, run.start + run.length)]


def ranks(sizes: Sequence[int]) -> itertools.product[tuple[int, ...]]:
    """Coordinates of all ranks of a mesh."""
    return itertools.product(*map(range, sizes))


@pytest.mark.parametrize("tp", range(1, 7))
@pytest.mark.parametrize("dp", range(1, 7))
def test_fsdp2_over_tp_cuts_tp_first(dp: int, tp: int) -> None:
    """Every rank of every mesh has the rows of `torch.chunk` over tp and then over dp.

    torch 2.13's own offsets are wrong in 45 of these 1080 cases.
    """
    for size, (d, t) in itertools.product(range(1, 31), ranks((dp, tp))):
        runs = held_runs(size, [Cut(0, dp, d, split_factor=tp), Cut(0, tp, t)])
        assert expand(runs) == part(part(torch.arange(size), tp, t), dp, d).tolist()
        assert len(runs) <= 1


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (2, 3, 2), (2, 1, 3), (1, 2, 4)], ids=str)
@pytest.mark.parametrize("tp_dim", [0, 1])
def test_fsdp2_over_ep_over_tp_cuts_from_right_to_left(
    sizes: tuple[int, int, int], tp_dim: int
) -> None:
    """With a third axis, dim 0 is cut over tp (if at all), over ep, and over fsdp at last."""
    fsdp, ep, tp = sizes
    inner = tp if tp_dim == 0 else 1
    for size, (f, e, t) in itertools.product((1, 5, 7, 12, 23), ranks(sizes)):
        cuts = [Cut(0, fsdp, f, split_factor=ep * inner), Cut(0, ep, e, split_factor=inner)]
        held = torch.arange(size)
        if tp_dim == 0:
            cuts.append(Cut(0, tp, t))
            held = part(held, tp, t)
        held = part(part(held, ep, e), fsdp, f)
        assert expand(held_runs(size, cuts)) == held.tolist()


@st.composite
def written_in_mesh_order(draw: st.DrawFn) -> tuple[list[Cut], list[Cut]]:
    """Plain cuts in any order, and the same as DTensor placements are written: in mesh order.

    The split factor of each is the number of shards that the axes to its right had made before it.
    """
    order: list[Cut] = []
    written: list[Cut] = []
    for _ in range(draw(st.integers(1, 4))):
        shards = draw(st.integers(1, 4))
        cut = Cut(0, shards, draw(st.integers(0, shards - 1)))
        position = draw(st.integers(0, len(order)))
        factor = math.prod(c.num_shards for c in order[:position])
        written.insert(0, Cut(0, cut.num_shards, cut.index, factor))
        order.insert(position, cut)
    return written, order


@hypothesis.given(st.integers(0, 40), written_in_mesh_order())
def test_any_order_of_cuts_is_found_again(size: int, cuts: tuple[list[Cut], list[Cut]]) -> None:
    """Split factors that tell which axes cut first are read as such, whatever the order was."""
    written, order = cuts
    assert expand(held_runs(size, written)) == cut_lists(size, order)
    assert all(cut.split_factor == 1 for cut in cut_order(written))


@st.composite
def any_cuts(draw: st.DrawFn) -> list[Cut]:
    """Strided cuts whose split factors need not have a meaning."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=3))
    return [Cut(0, n, draw(st.integers(0, n - 1)), factor) for n, factor in sizes]


@hypothesis.given(st.integers(0, 40), any_cuts())
def test_strided_cuts_follow_the_definition(size: int, cuts: list[Cut]) -> None:
    """Runs are the indices of the definition, in this order, in as few pieces as possible."""
    runs = apply_cuts(size, cuts)
    assert expand(runs) == cut_lists(size, cuts)
    if cut_order(cuts) == cuts:
        assert held_runs(size, cuts) == runs


@hypothesis.given(
    st.integers(0, 30), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5)), max_size=3)
)
def test_every_index_has_one_rank(size: int, axes: list[tuple[int, int]]) -> None:
    """The ranks of a mesh hold each index once, whatever the split factors are."""
    held: list[int] = []
    for coordinate in ranks([n for n, _ in axes]):
        cuts = [Cut(0, n, i, factor) for (n, factor), i in zip(axes, coordinate, strict=True)]
        held += expand(held_runs(size, cuts))
    assert sorted(held) == list(range(size))


@pytest.mark.parametrize(
    ("cuts", "held"),
    [
        # Shard(0), _StridedShard(0, split_factor=2): no axis to the right; by definition.
        ([Cut(0, 2, 0), Cut(0, 2, 0, 2)], [0, 2]),
        ([Cut(0, 2, 0), Cut(0, 2, 1, 2)], [1, 3]),
        ([Cut(0, 2, 1), Cut(0, 2, 1, 2)], [5, 7]),
        # A factor that the axis to the right explains, and one that it does not.
        ([Cut(0, 2, 1, 2), Cut(0, 2, 0)], [2, 3]),
        ([Cut(0, 2, 1, 4), Cut(0, 2, 0)], [1, 3]),
        # One that is not explained: then the other is taken by definition, too.
        ([Cut(0, 2, 1, 4), Cut(0, 2, 0, 2), Cut(0, 2, 0)], [1]),
        ([Cut(0, 2, 0, 2), Cut(0, 2, 1), Cut(0, 2, 0, 8)], [4, 5]),
    ],
)
def test_strided_cuts_of_eight_rows(cuts: list[Cut], held: list[int]) -> None:
    """Small cases that can be counted on fingers."""
    assert expand(held_runs(8, cuts)) == held


def test_cut_order_puts_explained_cuts_behind_what_explains_them() -> None:
    """Axes of one shard do not matter, and the factor of a cut in its place is 1."""
    tp, one = Cut(0, 4, 3), Cut(0, 1, 0)
    assert cut_order([Cut(0, 2, 1, 4), one, tp]) == [one, tp, Cut(0, 2, 1)]
    assert cut_order([Cut(0, 2, 1), tp]) == [Cut(0, 2, 1), tp]
    unexplained = [Cut(0, 2, 1, 3), tp]
    assert cut_order(unexplained) == unexplained
    assert cut_order([]) == []


@hypothesis.given(shapes(max_dims=3, max_side=7), st.data())
def test_shard_boxes_put_together_are_the_local_tensor(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Boxes taken from the global tensor fill the local one: no gap, no overlap, right places."""
    cuts: list[Cut] = []
    for cut in data.draw(any_cuts()) if shape else []:
        dim = data.draw(st.integers(0, len(shape) - 1))
        cuts.append(Cut(dim, cut.num_shards, cut.index, cut.split_factor))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    wanted = whole
    for dim, size in enumerate(shape):
        wanted = wanted.index_select(
            dim, torch.tensor(cut_lists(size, [c for c in cuts if c.dim == dim]), dtype=torch.long)
        )
    local_shape, boxes = plan_shard_boxes(tuple(shape), tuple(cuts))
    assert local_shape == tuple(wanted.shape)
    found = torch.full(local_shape, -1)
    for shard in boxes:
        assert not shard.box.is_empty
        view = found[Box(shard.local_offsets, shard.box.sizes).slices()]
        assert (view == -1).all()
        view.copy_(whole[shard.box.slices()])
    assert torch.equal(found, wanted)


@hypothesis.given(st.integers(0, 60), st.integers(1, 12))
def test_chunk_bounds_are_those_of_torch(length: int, parts: int) -> None:
    """Each part is that of `torch.chunk`; parts that torch leaves out are empty, at the end."""
    found = [chunk_bounds(length, parts, i) for i in range(parts)]
    expected = [part(torch.arange(length), parts, i).tolist() for i in range(parts)]
    assert [list(range(*bounds)) for bounds in found] == expected
    assert all(0 <= start <= end <= length for start, end in found)
