"""Cuts of a tensor dim: which of its indices does a rank hold after mesh axes have cut it?

Indices are held as *runs* (start, length), never as a list of indices. A plain cut over n ranks
gives each `ceil(len / n)` consecutive indices of what was held before, the last ones fewer or none,
as `torch.chunk` does. A *strided* cut with split factor k cuts what was held into k pieces first,
cuts each piece over the axis, and takes this rank's part of every piece.

Order is what this module is about. FSDP2 over tensor parallelism cuts a dim over tp first and over
dp second, but writes the placements in mesh order, dp before tp, with `_StridedShard(dim,
split_factor=k)` on dp, where k is the number of shards that the axes to its right make of the same
dim::

    13 rows, dp=3 x tp=2, [_StridedShard(0, split_factor=2), Shard(0)]
    tp first:  0 1 2 3 4 5 6        | 7 8 9 10 11 12
    then dp:   0 1 2 | 3 4 5 | 6    | 7 8 | 9 10 | 11 12

`cut_order` restores that order. Evaluating the placements left to right instead, as torch 2.13's
`compute_local_shape_and_global_offset` does, cuts the concatenated pieces once more, and can give
other rows where sizes are uneven. It is right only where no order of plain cuts is meant (views
make such placements, too); what a rank then holds can be many runs.

Integers only; no tensor, no mesh.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_reshard.box import Box

__all__ = [
    "Cut",
    "Run",
    "ShardBox",
    "apply_cuts",
    "chunk_bounds",
    "cut_order",
    "held_runs",
    "plan_shard_boxes",
]


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh axis cutting one tensor dim, as seen by one rank."""

    dim: int
    """The tensor dim, not negative."""

    num_shards: int
    """Size of the mesh axis."""

    index: int
    """Coordinate of the rank on that axis."""

    split_factor: int = 1
    """Pieces that the dim is in already; 1 for a plain shard."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive indices of a dim."""

    start: int
    """First index."""

    length: int
    """Number of indices, at least 1."""


@dataclass(frozen=True, slots=True)
class ShardBox:
    """A box that a rank holds, in both coordinates."""

    box: Box
    """Where it lies in the global tensor."""

    local_offsets: tuple[int, ...]
    """Where it starts in the rank's local tensor."""


def cut_order(cuts: Sequence[Cut]) -> list[Cut]:
    """The cuts of one dim in the order in which they were made.

    Args:
        cuts: The cuts in the order of the mesh axes.

    Returns:
        The cuts to be applied one after the other. A strided cut whose split factor is explained by
        cuts to its right comes after these, with its split factor back at 1. If one of them is not
        explained, no order of plain cuts is meant: all stay as and where they are.
    """
    order: list[Cut] = []
    for cut in reversed(cuts):
        position = _position_after(order, cut.split_factor)
        if position is None:
            return list(cuts)
        order.insert(position, Cut(cut.dim, cut.num_shards, cut.index))
    return order


def _position_after(order: Sequence[Cut], shards: int) -> int | None:
    """How many of the first cuts of `order` make exactly this number of shards, if any do."""
    products = itertools.accumulate((cut.num_shards for cut in order), operator.mul, initial=1)
    return next((i for i, product in enumerate(products) if product == shards), None)


def _pick(held: Sequence[Run], start: int, end: int) -> list[Run]:
    """Positions `start` to `end` of the indices held."""
    picked: list[Run] = []
    position = 0
    for run in held:
        low, high = max(start - position, 0), min(end - position, run.length)
        position += run.length
        if low < high:
            picked.append(Run(run.start + low, high - low))
    return picked


def chunk_bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and end of part `index` when `length` positions are cut as `torch.chunk` does.

    Example:
        >>> [chunk_bounds(5, 4, i) for i in range(4)]
        [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    step = -(-length // parts)
    return min(index * step, length), min((index + 1) * step, length)


def _apply(held: Sequence[Run], cut: Cut) -> list[Run]:
    total = sum(run.length for run in held)
    picked: list[Run] = []
    for piece in range(cut.split_factor):
        first, last = chunk_bounds(total, cut.split_factor, piece)
        if first == last:
            break
        low, high = chunk_bounds(last - first, cut.num_shards, cut.index)
        for run in _pick(held, first + low, first + high):
            if picked and picked[-1].start + picked[-1].length == run.start:
                before = picked.pop()
                picked.append(Run(before.start, before.length + run.length))
            else:
                picked.append(run)
    return picked


def held_runs(size: int, cuts: Sequence[Cut]) -> list[Run]:
    """Runs of a dim of `size` indices that are held after its cuts, given in mesh order.

    Example:
        >>> held_runs(13, [Cut(0, 3, 1, split_factor=2), Cut(0, 2, 0)])
        [Run(start=3, length=3)]
        >>> held_runs(4, [Cut(0, 2, 1, split_factor=2)])
        [Run(start=1, length=1), Run(start=3, length=1)]
    """
    return apply_cuts(size, cut_order(cuts))


def apply_cuts(size: int, cuts: Sequence[Cut]) -> list[Run]:
    """Runs of a dim of `size` indices that are held after its cuts, made one after the other.

    Example:
        >>> apply_cuts(13, [Cut(0, 3, 2, split_factor=2), Cut(0, 2, 0)])
        [Run(start=6, length=1), Run(start=11, length=1)]
    """
    held = [Run(0, size)] if size else []
    for cut in cuts:
        held = _apply(held, cut)
    return held


# A model has thousands of tensors of few shapes, all cut alike.
@functools.lru_cache(maxsize=4096)
def plan_shard_boxes(
    shape: tuple[int, ...], cuts: tuple[Cut, ...]
) -> tuple[tuple[int, ...], tuple[ShardBox, ...]]:
    """What a rank holds of a tensor after these cuts.

    Args:
        shape: Global shape.
        cuts: One per sharding mesh axis; those of one dim in the order in which they were made.

    Returns:
        The shape of the local tensor, and the boxes that make it up; no box if it is empty.

    Example:
        >>> plan_shard_boxes((4, 6), (Cut(1, 4, 3),))
        ((4, 0), ())
        >>> shape, [shard] = plan_shard_boxes((4, 6), (Cut(1, 4, 1),))
        >>> shape, str(shard.box), shard.local_offsets
        ((4, 2), '[0:4, 2:4]', (0, 0))
    """
    runs = [
        apply_cuts(size, [cut for cut in cuts if cut.dim == dim]) for dim, size in enumerate(shape)
    ]
    local_shape = tuple(sum(run.length for run in dim_runs) for dim_runs in runs)
    starts = [[0, *itertools.accumulate(run.length for run in dim_runs)][:-1] for dim_runs in runs]
    boxes = tuple(
        ShardBox(Box(tuple(r.start for r in pick), tuple(r.length for r in pick)), local)
        for pick, local in zip(itertools.product(*runs), itertools.product(*starts), strict=True)
    )
    return local_shape, boxes
