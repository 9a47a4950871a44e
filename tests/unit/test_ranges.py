"""Byte ranges against brute force: an array of bytes in which each element's bytes are marked."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dcp_reshard.box import Box
from dcp_reshard.ranges import (
    ByteRange,
    RangeGroup,
    Span,
    group_ranges,
    join_gap,
    may_overlap,
    plan_spans,
)
from tests.support.strategies import boxes, shapes

NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class Array:
    """A strided array, and a box of it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    extent: int
    box: Box

    def starts(self, box: Box) -> list[int]:
        """First byte of each element of a box."""
        indices = itertools.product(*map(range, box.offsets, box.ends))
        return [sum(i * st for i, st in zip(ix, self.strides, strict=True)) for ix in indices]

    def mark(self, box: Box) -> np.ndarray:
        """How often each byte of the array belongs to an element of a box."""
        counts = np.zeros(self.extent, dtype=int)
        for start in self.starts(box):
            counts[start : start + self.itemsize] += 1
        return counts

    def plan(self, *, request_bytes: int = 0, max_bytes: int = NO_LIMIT) -> list[Span]:
        return list(
            plan_spans(
                self.box.offsets,
                self.box.sizes,
                strides=self.strides,
                itemsize=self.itemsize,
                extent=self.extent,
                request_bytes=request_bytes,
                max_bytes=max_bytes,
            )
        )


@st.composite
def arrays(draw: st.DrawFn, *, max_padding: int = 5) -> Array:
    """Arrays in any order of dims, with padding between the rows of any dim."""
    shape = draw(shapes(max_side=6))
    itemsize = draw(st.sampled_from([1, 2, 3, 8]))
    strides = [0] * len(shape)
    reach = itemsize
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = reach + draw(st.integers(0, max_padding))
        reach += strides[dim] * max(shape[dim] - 1, 0)
    extent = reach + draw(st.integers(0, max_padding))
    return Array(shape, tuple(strides), itemsize, extent, draw(boxes(shape)))


def runs_and_gaps(marked: np.ndarray) -> tuple[list[int], list[int]]:
    """Lengths of the runs of marked bytes, and of the gaps between them."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], marked > 0, [0])).astype(int)))
    starts, ends = edges[::2], edges[1::2]
    return (ends - starts).tolist(), (starts[1:] - ends[:-1]).tolist()


@hypothesis.given(arrays(), st.integers(0, 40), st.integers(1, 200))
def test_spans_hold_each_element_once(array: Array, request_bytes: int, max_bytes: int) -> None:
    """The spans' elements are those of the box, each once, and lie in the span's bytes."""
    spans = array.plan(request_bytes=request_bytes, max_bytes=max_bytes)
    counts = np.zeros(array.extent, dtype=int)
    for span in spans:
        sub = Box(span.offsets, span.sizes)
        marked = array.mark(sub)
        counts += marked
        first = array.starts(sub)[0]
        assert span.start + span.lead == first
        assert span.nbytes == sub.numel * array.itemsize
        assert (span.nbytes == span.length) == bool(marked[span.start :][: span.length].all())
        assert marked.sum() == marked[span.start : span.start + span.length].sum()
        assert 0 <= span.start <= span.start + span.length <= array.extent
    assert (counts == array.mark(array.box)).all()


@hypothesis.given(arrays(), st.integers(0, 40), st.integers(1, 200))
def test_spans_stay_within_the_limit(array: Array, request_bytes: int, max_bytes: int) -> None:
    """No span is longer than the limit, unless it is a single element."""
    for span in array.plan(request_bytes=request_bytes, max_bytes=max_bytes):
        assert span.length <= max_bytes or math.prod(span.sizes) == 1


def test_long_spans_are_cut_into_as_many_rows_as_fit() -> None:
    """Ten rows of four bytes, at most fourteen at once, are four spans of up to three rows."""
    array = Array((10, 4), (4, 1), 1, 40, Box.full((10, 4)))
    spans = array.plan(max_bytes=14)
    assert [(s.start, s.length) for s in spans] == [(0, 12), (12, 12), (24, 12), (36, 4)]


@hypothesis.given(arrays(), st.integers(0, 40))
def test_long_runs_are_read_with_a_quarter_more_at_most(array: Array, request_bytes: int) -> None:
    """Where runs are long, amplification is at most 1.25; where they are short, gaps are small."""
    runs, _ = runs_and_gaps(array.mark(array.box))
    for span in array.plan(request_bytes=request_bytes):
        marked = array.mark(Box(span.offsets, span.sizes))
        _, gaps = runs_and_gaps(marked)
        if min(runs) >= request_bytes:
            assert span.length <= 1.25 * span.nbytes
        assert max(gaps, default=0) <= max(request_bytes, max(runs) // 4)


@hypothesis.given(arrays(), st.integers(0, 40))
def test_short_runs_with_small_gaps_are_one_span(array: Array, request_bytes: int) -> None:
    """Runs shorter than a request is worth are never requested one by one if gaps are as short."""
    runs, gaps = runs_and_gaps(array.mark(array.box))
    hypothesis.assume(runs)
    hypothesis.assume(max(runs) < request_bytes and max(gaps, default=0) <= request_bytes)
    assert len(array.plan(request_bytes=request_bytes)) == 1


@hypothesis.given(arrays(max_padding=0))
def test_runs_far_apart_are_the_spans(array: Array) -> None:
    """Where no gap is worth reading, the spans are the runs, in the order of their bytes."""
    runs, gaps = runs_and_gaps(array.mark(array.box))
    hypothesis.assume(not gaps or min(gaps) > max(runs) // 4)
    spans = array.plan(request_bytes=0)
    assert [span.length for span in spans] == runs
    assert [span.start for span in spans] == sorted(span.start for span in spans)


@hypothesis.given(arrays(), st.integers(1, 40))
def test_spans_with_gaps_are_whole_rows(array: Array, request_bytes: int) -> None:
    """A span with a gap starts and ends on rows of its widest dim, or at the end of the array."""
    for span in array.plan(request_bytes=request_bytes):
        if span.length == span.nbytes:
            assert span.lead == 0
            continue
        row = max(st for st, s in zip(array.strides, span.sizes, strict=True) if s > 1)
        outer = sum(o * st for o, st in zip(span.offsets, array.strides, strict=True) if st > row)
        end = span.start + span.length
        assert (span.start - outer) % row == 0
        assert (end - outer) % row == 0 or end == array.extent
        assert span.lead < row


def test_a_run_that_a_gap_has_cut_does_not_count_as_long() -> None:
    """Rows with gaps are not one long run because the next block starts where they end.

    ::

        ####.####.########.####.####...####.####.########.####.####     strides 31, 14, 5, 1
    """
    shape = (2, 2, 3, 4)
    array = Array(shape, (31, 14, 5, 1), 1, 59, Box.full(shape))
    assert [span.length for span in array.plan(request_bytes=4)] == [28, 28]


@pytest.mark.parametrize(
    ("run", "request_bytes", "gap"),
    [(1, 64, 64), (63, 64, 64), (64, 64, 16), (1024, 64, 256), (7, 0, 1), (0, 0, 0)],
)
def test_join_gap(run: int, request_bytes: int, gap: int) -> None:
    """Short runs are joined over a request's worth, long ones over a quarter of their length."""
    assert join_gap(run, request_bytes) == gap


@pytest.mark.parametrize(
    ("sizes", "strides", "spans"),
    [
        ((), (), [(0, 8)]),
        ((0, 4), (32, 8), []),
        ((4, 0), (32, 8), []),
        ((1, 4), (0, 8), [(0, 32)]),
        ((3, 4), (32, 8), [(0, 96)]),
        ((4, 3), (8, 32), [(0, 96)]),
    ],
)
def test_spans_of_arrays_without_gaps(
    sizes: tuple[int, ...], strides: tuple[int, ...], spans: list[tuple[int, int]]
) -> None:
    """Scalars, empty boxes, dims of one index with no stride, and any order of dims."""
    array = Array(sizes, strides, 8, 96, Box((0,) * len(sizes), sizes))
    assert [(span.start, span.length) for span in array.plan()] == spans


@pytest.mark.parametrize(
    ("shape", "strides", "overlap"),
    [
        ((4, 2), (1, 4), False),
        ((4, 2), (1, 3), True),
        ((2, 4), (3, 1), True),
        ((3, 3, 2), (2, 6, 18), False),
        ((3, 3, 2), (2, 6, 16), True),
        ((1, 2), (0, 1), False),
        ((2,), (0,), True),
        ((), (), False),
    ],
)
def test_strides_that_may_overlap(
    shape: tuple[int, ...], strides: tuple[int, ...], *, overlap: bool
) -> None:
    """One element of the next row in the place of the last of this one is enough."""
    assert may_overlap(shape, strides) is overlap


@hypothesis.given(shapes(max_side=5), st.data())
def test_arrays_that_may_not_overlap_do_not(shape: tuple[int, ...], data: st.DataObject) -> None:
    """Strides called safe put no two elements in one place, and all dense orders are called so."""
    strides = data.draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    array = Array(shape, tuple(strides), 1, 1 + 30 * sum(shape), Box.full(shape))
    overlaps = array.mark(array.box).max(initial=0) > 1
    assert may_overlap(shape, strides) or not overlaps
    dense = data.draw(arrays())
    units = [st // dense.itemsize for st in dense.strides]
    if all(st % dense.itemsize == 0 for st in dense.strides):
        assert not may_overlap(dense.shape, units)


byte_ranges = st.builds(
    lambda start, length: ByteRange(start, start + length), st.integers(0, 60), st.integers(0, 12)
)


@hypothesis.given(st.lists(byte_ranges, max_size=12), st.integers(0, 8), st.integers(1, 40))
def test_groups_serve_each_range_once_and_read_no_byte_for_two(
    ranges: list[ByteRange], max_gap: int, max_bytes: int
) -> None:
    """Every range is in one group and inside its bytes; the ranges of a group do not overlap."""
    groups = group_ranges(ranges, max_gap=max_gap, max_bytes=max_bytes)
    assert sorted(m for group in groups for m in group.members) == list(range(len(ranges)))
    for group in groups:
        members = [ranges[m] for m in group.members]
        assert (group.start, group.end) == (members[0].start, members[-1].end)
        for before, after in itertools.pairwise(members):
            assert 0 <= after.start - before.end <= max_gap
        assert group.end - group.start <= max_bytes or len(members) == 1
    assert [group.start for group in groups] == sorted(group.start for group in groups)


@hypothesis.given(st.lists(byte_ranges, max_size=12), st.integers(0, 8), st.integers(1, 40))
def test_neighbouring_groups_could_not_be_one(
    ranges: list[ByteRange], max_gap: int, max_bytes: int
) -> None:
    """Two groups are apart only for a wide gap, an overlap, or the limit on bytes."""
    groups = group_ranges(ranges, max_gap=max_gap, max_bytes=max_bytes)
    for before, after in itertools.pairwise(groups):
        first = ranges[after.members[0]]
        joined = first.end - before.start
        assert not 0 <= first.start - before.end <= max_gap or joined > max_bytes


def test_overlapping_ranges_are_read_apart() -> None:
    """Replicas of one range are two requests, each with a buffer of its own."""
    ranges = [ByteRange(0, 4), ByteRange(0, 4), ByteRange(4, 6)]
    assert group_ranges(ranges, max_gap=9, max_bytes=99) == [
        RangeGroup(0, 4, (0,)),
        RangeGroup(0, 6, (1, 2)),
    ]
    assert ByteRange(3, 9).length == 6
