"""Ranges in byte space: which bytes hold a box, and in how many requests to read them?

A box inside a strided array is a set of *runs* of bytes at regular steps. `plan_spans` turns it
into sub-boxes, each of which is to be read by one request over its whole *span* (first to last
byte):

1. Dims are taken from the fastest varying outwards. Two neighbours along a dim are joined into one
   span if the bytes between them (the gap) cost less than a request (`join_gap`).
2. Dims further out are walked index by index: each index is a span of its own.
3. A span longer than the limit is cut along its slowest dim.

`group_ranges` is the same question one level up: which spans of a file to fetch together.

Pure arithmetic on Python integers; reads nothing and knows no tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

__all__ = [
    "ByteRange",
    "RangeGroup",
    "Span",
    "group_ranges",
    "join_gap",
    "may_overlap",
    "plan_spans",
]


class ByteRange(NamedTuple):
    """Bytes `start` (inclusive) to `end` (exclusive) of a file."""

    start: int
    """First byte."""

    end: int
    """One past the last byte."""

    @property
    def length(self) -> int:
        """Number of bytes."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Span:
    """A sub-box, and the bytes to read for it."""

    offsets: tuple[int, ...]
    """First index of the sub-box in each dim of the array."""

    sizes: tuple[int, ...]
    """Number of indices in each dim."""

    start: int
    """First byte to read, counted from element 0 of the array."""

    length: int
    """Bytes to read, gaps included."""

    lead: int
    """Bytes before the first element; 0 if there is no gap."""

    nbytes: int
    """Bytes of the elements alone; equal to `length` if there is no gap."""


@dataclass(frozen=True, slots=True)
class RangeGroup:
    """One request, and which of the ranges asked for it serves."""

    start: int
    """First byte."""

    end: int
    """One past the last byte."""

    members: tuple[int, ...]
    """Indices of the ranges served."""


def join_gap(run: int, request_bytes: int) -> int:
    """The largest gap worth reading to join runs of `run` bytes into one request.

    A request costs about as much time as reading `request_bytes`, so a gap below that is cheaper
    read than skipped. Runs of at least `request_bytes` pay for their own request: there a gap of at
    most a quarter of the run is joined, which bounds read amplification at 1.25.

    Example:
        >>> join_gap(4096, 65536), join_gap(1 << 20, 65536)
        (65536, 262144)
    """
    return request_bytes if run < request_bytes else run // 4


def may_overlap(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the strides may put two elements in one place.

    Some arrays that do not overlap are taken to: those in which the elements of one dim lie in the
    gaps of another. Nothing that slicing, permuting and reshaping give is of that kind.

    Example:
        >>> may_overlap((4, 3), (3, 1)), may_overlap((4, 3), (1, 1)), may_overlap((4, 3), (0, 1))
        (False, True, True)
    """
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride < reach:
                return True
            reach = stride * (size - 1) + reach
    return False


def plan_spans(
    offsets: Sequence[int],
    sizes: Sequence[int],
    *,
    strides: Sequence[int],
    itemsize: int,
    extent: int,
    request_bytes: int,
    max_bytes: int,
) -> Iterator[Span]:
    """Spans that together read the box, each element in exactly one of them.

    A span with gaps is widened to whole rows: what it reads then is the same for all ranks that
    want other columns of these rows, and one such rank alone can tell the checksum of all of them.

    Args:
        offsets: First index of the box in each dim.
        sizes: Number of indices of the box in each dim; a box without elements gives no span.
        strides: Bytes from one index to the next in each dim, not negative, in any order. Elements
            must not overlap.
        itemsize: Bytes of one element.
        extent: Bytes of the array, counted from element 0: nothing beyond is read.
        request_bytes: What a request costs, in bytes that could be read in the same time.
        max_bytes: No span is longer, unless one element is.

    Yields:
        Spans in the order of the array's bytes, as far as the dims walked allow.

    Example:
        >>> columns = plan_spans((0, 2), (3, 2), strides=(16, 4), itemsize=4, extent=48,
        ...                      request_bytes=4, max_bytes=1024)
        >>> [(s.start, s.length) for s in columns]
        [(8, 8), (24, 8), (40, 8)]
        >>> joined = plan_spans((0, 2), (3, 2), strides=(16, 4), itemsize=4, extent=48,
        ...                     request_bytes=16, max_bytes=1024)
        >>> [(s.start, s.length, s.lead) for s in joined]
        [(0, 48, 8)]
    """
    if 0 in sizes:
        return
    ndim = len(sizes)
    by_stride = sorted(range(ndim), key=lambda d: (strides[d], sizes[d] > 1))
    walked: list[int] = []
    length = itemsize
    run = itemsize
    for dim in by_stride:
        gap = strides[dim] - length
        if sizes[dim] == 1:
            continue
        if walked or gap > join_gap(run, request_bytes):
            walked.append(dim)
            continue
        joined = length + strides[dim] * (sizes[dim] - 1)
        if gap == 0 and run == length:
            run = joined
        length = joined
    walked.reverse()

    base = list(offsets)
    inner = [1 if d in walked else s for d, s in enumerate(sizes)]
    for index in itertools.product(*(range(sizes[d]) for d in walked)):
        for dim, i in zip(walked, index, strict=True):
            base[dim] = offsets[dim] + i
        yield from _cut_span(base, inner, strides, itemsize, extent, max_bytes)


def _cut_span(
    offsets: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    extent: int,
    max_bytes: int,
) -> Iterator[Span]:
    span = _make_span(offsets, sizes, strides, itemsize, extent)
    widest = max(
        (d for d in range(len(sizes)) if sizes[d] > 1), key=lambda d: strides[d], default=-1
    )
    if span.length <= max_bytes or widest < 0:
        yield span
        return
    # One index less is one stride less: this many fit, at least one.
    over = -(-(span.length - max_bytes) // strides[widest])
    rows = max(1, sizes[widest] - over)
    for first in range(0, sizes[widest], rows):
        part_offsets, part_sizes = list(offsets), list(sizes)
        part_offsets[widest] += first
        part_sizes[widest] = min(rows, sizes[widest] - first)
        yield from _cut_span(part_offsets, part_sizes, strides, itemsize, extent, max_bytes)


def _make_span(
    offsets: Sequence[int],
    sizes: Sequence[int],
    strides: Sequence[int],
    itemsize: int,
    extent: int,
) -> Span:
    first = sum(o * st for o, st in zip(offsets, strides, strict=True))
    last = first + sum((s - 1) * st for s, st in zip(sizes, strides, strict=True)) + itemsize
    nbytes = itemsize * math.prod(sizes)
    start, end = first, last
    if nbytes != last - first:
        row = max(st for st, s in zip(strides, sizes, strict=True) if s > 1)
        # Rows are counted from where the dims further out lead to: there may be padding in between.
        base = sum(o * st for o, st in zip(offsets, strides, strict=True) if st > row)
        start = base + (first - base) // row * row
        end = min(base - (base - last) // row * row, extent)
    return Span(tuple(offsets), tuple(sizes), start, end - start, first - start, nbytes)


def group_ranges(ranges: Sequence[ByteRange], *, max_gap: int, max_bytes: int) -> list[RangeGroup]:
    """Groups of ranges to be fetched by one request each, in the order of their bytes.

    Ranges that overlap are never in one group, so that each group can be read straight into one
    buffer per range.

    Args:
        ranges: Ranges of one file, in any order.
        max_gap: Ranges further apart than this are not joined.
        max_bytes: A group is not grown beyond this (a single longer range is a group of its own).

    Example:
        >>> ranges = [ByteRange(8, 9), ByteRange(0, 4), ByteRange(5, 6)]
        >>> for group in group_ranges(ranges, max_gap=1, max_bytes=99):
        ...     print(group)
        RangeGroup(start=0, end=6, members=(1, 2))
        RangeGroup(start=8, end=9, members=(0,))
    """
    groups: list[RangeGroup] = []
    members: list[int] = []
    start = end = 0
    for index in sorted(range(len(ranges)), key=lambda i: ranges[i].start):
        item = ranges[index]
        if members and (not 0 <= item.start - end <= max_gap or item.end - start > max_bytes):
            groups.append(RangeGroup(start, end, tuple(members)))
            members = []
        if not members:
            start = item.start
        end = item.end
        members.append(index)
    if members:
        groups.append(RangeGroup(start, end, tuple(members)))
    return groups
