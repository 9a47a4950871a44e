"""What do the chunks hold whose boxes torch has recorded wrongly?

torch 2.13 works out the box of a rank from the placements from left to right (`sharding` has the
right order). For some uneven sizes of a dim that FSDP2 and the axes to its right cut, it so
records another offset and length than the rank's part has::

    7 rows, dp=3 x tp=2     rank (dp, tp):   0,0   0,1   1,0   1,1   2,0   2,1
    rows held, and stored                    0 1   4     2 3   5     none  6
    rows recorded                            0 1   4     2 3   5     6     none

Where a rank seems to hold nothing, the offset recorded is the length of the dim. Several such ranks
look alike, and `dcp.save` keeps what one of them holds, so data may be lost.

Given the pairs (offset, length) recorded along a dim, the length that each record really has, and
the rank that wrote it, `find_true_runs` looks for layouts that would have been recorded so: FSDP
over one axis, or over two (expert and tensor parallelism), of any sizes, in any larger mesh whose
ranks count up along these axes in order. Up to 30 rows and 6 x 6 ranks, all layouts with one axis
that are recorded wrongly, and whose data are all there, are found, and each gives one answer.

What no one can see afterwards: with two axes there are layouts (9 rows over 2 x 2 x 3 ranks) whose
records all have the recorded lengths, but lie elsewhere.

Pure: integers in, integers out.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from dcp_reshard.sharding import Run, chunk_bounds

__all__ = ["find_true_runs", "recorded_and_held"]

# More shards of one dim than this over one axis of tensor or expert parallelism are not looked for.
_MAX_AXIS = 256
_MAX_INNER_AXIS = 32
_MAX_RANKS = 1 << 14
# Ranks of all layouts together; a second of work.
_MAX_RANKS_TRIED = 1 << 16

Axes = tuple[int, ...]
"""Sizes of the axes that cut the dim, FSDP's first."""


def find_true_runs(
    size: int,
    recorded: Sequence[Run],
    stored: Sequence[int],
    writers: Sequence[int],
    *,
    limit: int = 2,
) -> list[tuple[Run, ...]]:
    """The ways in which the records of one dim can be understood so that they fill it.

    Args:
        size: Length of the dim.
        recorded: What was recorded for each record.
        stored: Number of indices that each record really has.
        writers: Rank that wrote each record.
        limit: No more answers than this are looked for.

    Returns:
        Different answers, each with the run that each record holds (of length 0, at `size`, for one
        without elements, and for a replica). None also if there are too many layouts to look at.

    Example:
        >>> recorded = [Run(0, 2), Run(4, 1), Run(2, 2), Run(5, 1), Run(6, 1), Run(7, 0)]
        >>> [answer] = find_true_runs(7, recorded, [2, 1, 2, 1, 0, 1], range(6))
        >>> answer[4:]
        (Run(start=7, length=0), Run(start=6, length=1))
    """
    answers: list[tuple[Run, ...]] = []
    first = next((i for i, run in enumerate(recorded) if run.start == 0 and stored[i]), None)
    if first is None:
        return answers
    known = frozenset(recorded)
    count = sum(run.length > 0 for run in known)
    records = list(zip(recorded, stored, writers, strict=True))
    left = _MAX_RANKS_TRIED
    for axes in _layouts(size, stored[first], count, max(writers)):
        if _first_recorded_length(size, axes) != recorded[first].length:
            continue
        ranks: list[tuple[Run, Run]] = []
        for coordinate in itertools.product(*map(range, axes)):
            left -= 1
            ranks.append(recorded_and_held(size, axes, coordinate))
            if ranks[-1][0] not in known or left < 0:
                break
        else:
            # Other axes may be inside of these, and their replicas outside.
            for stride in range(1, max(writers) + 2):
                left -= 1
                answer = _explain(size, ranks, stride, records)
                if answer is not None and answer not in answers:
                    answers.append(answer)
        if left < 0:
            return []
        if len(answers) >= limit:
            break
    return answers


def _layouts(size: int, first: int, count: int, last_writer: int) -> Iterator[Axes]:
    """Layouts under which the first rank holds the first so many indices, of that many records."""
    inner_axes: list[tuple[int, ...]] = [(n,) for n in range(2, min(size, _MAX_AXIS) + 1)]
    inner_axes += itertools.product(range(2, min(size, _MAX_INNER_AXIS) + 1), repeat=2)
    for inner in inner_axes:
        piece, shards = size, math.prod(inner)
        # Pieces of one index are not cut any further, and recorded as they are.
        if shards >= size:
            continue
        for axis in inner:
            piece = -(-piece // axis)
        # Each shard of a piece is recorded for some rank.
        if -(-piece // first) > count:
            continue
        # ceil(piece / dp) == first. More ranks than indices hold nothing, but count.
        last = -(-piece // (first - 1)) - 1 if first > 1 else max(piece, last_writer // shards) + 1
        least = max(2, -(-piece // first), -(-count // shards))
        for dp in range(least, min(last, _MAX_RANKS // shards) + 1):
            yield dp, *inner


def _first_recorded_length(size: int, axes: Axes) -> int:
    """The length that torch records for the first rank, in a few steps."""
    dp, *inner = axes
    shards = math.prod(inner)
    piece = -(-size // shards)
    whole, rest = divmod(size, piece)
    length = whole * -(-piece // dp) + -(-rest // dp)
    for axis in inner:
        length = -(-length // axis)
    return length


def recorded_and_held(size: int, axes: Axes, coordinate: Sequence[int]) -> tuple[Run, Run]:
    """What torch 2.13 records of a dim for a rank, and what the rank holds.

    Example:
        >>> recorded_and_held(7, (3, 2), (2, 0))
        (Run(start=6, length=1), Run(start=7, length=0))
    """
    dp, number = axes[0], coordinate[0]
    shards = math.prod(axes[1:])
    # As it was made: the inner axes cut first, FSDP cuts their part.
    start, end = _nested_chunk(size, axes[1:], coordinate[1:])
    first, last = chunk_bounds(end - start, dp, number)
    held = Run(start + first, last - first) if first < last else Run(size, 0)
    # As it is recorded: the dim is cut into as many pieces as there are inner shards, FSDP takes a
    # part of each, and the inner axes cut all these parts, put together. Only the last piece that
    # is there may be shorter.
    piece = -(-size // shards)
    whole, rest = divmod(size, piece)
    low, high = chunk_bounds(piece, dp, number)
    rest_low, rest_high = chunk_bounds(rest, dp, number)
    in_whole = whole * (high - low)
    total = in_whole + rest_high - rest_low
    position, stop = _nested_chunk(total, axes[1:], coordinate[1:])
    if position == stop:
        return Run(size, 0), held
    if position < in_whole:
        index, offset = divmod(position, high - low)
        return Run(index * piece + low + offset, stop - position), held
    return Run(whole * piece + rest_low + position - in_whole, stop - position), held


def _nested_chunk(size: int, axes: Axes, coordinate: Sequence[int]) -> tuple[int, int]:
    start, end = 0, size
    for axis, number in zip(axes, coordinate, strict=True):
        first, last = chunk_bounds(end - start, axis, number)
        start, end = start + first, start + last
    return start, end


def _explain(
    size: int,
    ranks: Sequence[tuple[Run, Run]],
    stride: int,
    records: Sequence[tuple[Run, int, int]],
) -> tuple[Run, ...] | None:
    """What each record holds; None if it would not be this one, or if something is missing.

    Args:
        size: Length of the dim.
        ranks: What is recorded for each rank of a layout, and what it holds.
        stride: Distance of two neighbours in `ranks`, in the whole mesh.
        records: What was recorded, the true length, the rank that wrote it.
    """
    answer: list[Run] = []
    seen: set[Run] = set()
    for box, length, writer in records:
        expected, held = ranks[writer // stride % len(ranks)]
        if expected != box or held.length != length:
            return None
        answer.append(Run(size, 0) if held in seen else held)
        seen.add(held)
    return None if {held for _, held in ranks if held.length} - seen else tuple(answer)
