"""Do these boxes tile a region of index space, and if not, where not?

Coverage is proven by counting (`find_defect`):

1. Every box edge becomes a coordinate; between neighbouring coordinates lie cells that no edge
cuts.
2. A difference array over these cells, summed along each dim, holds how many boxes cover each cell.
3. A cell with a count of 0 is a hole, one with 2 or more an overlap; the first such cell is
   returned.

With many dims a difference array has too many corners, and the boxes are added one by one. Where
there are too many cells, the region is halved; and where halving cuts through most boxes, they are
compared with each other instead: boxes tile a region if they are as large together and disjoint.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from dcp_reshard.box import Box, BoxArray, IntMatrix
from dcp_reshard.errors import CheckpointFormatError

__all__ = ["Defect", "find_defect"]

# Cells counted at once by `find_defect`; a region with more is halved first, which bounds memory
# (8 bytes a cell) whatever the chunks look like.
_MAX_CELLS = 1 << 21
_MAX_PAIRS = 1 << 32
_PAIRS_AT_ONCE = 1 << 20
# Difference arrays are for the usual few dims: a box of d dims has 2**d corners.
_MAX_CORNER_DIMS = 4


@dataclass(frozen=True, slots=True)
class Defect:
    """A region that is not covered exactly once."""

    box: Box
    """The region: no box of the set has an edge inside it."""

    count: int
    """How many boxes cover it: 0 for a hole, 2 or more for an overlap."""


def find_defect(boxes: BoxArray, within: Box) -> Defect | None:
    """The first region of `within` not covered exactly once, or None if the boxes tile it.

    Args:
        boxes: Any boxes; parts outside of `within` are ignored.
        within: The region to be tiled. An empty region is tiled by anything.

    Raises:
        CheckpointFormatError: There are very many boxes, too irregular to be looked at.

    Example:
        >>> halves = BoxArray.from_boxes([Box((0,), (4,)), Box((5,), (3,))], ndim=1)
        >>> find_defect(halves, Box((0,), (8,)))
        Defect(box=Box(offsets=(4,), sizes=(1,)), count=0)
    """
    if within.is_empty or _is_alone(boxes, within) or _are_slices(boxes, within):
        return None
    _, parts = boxes.intersect(within)
    starts, ends = parts.offsets, parts.ends
    edges = [
        np.unique(np.concatenate((starts[:, d], ends[:, d], (within.offsets[d], within.ends[d]))))
        for d in range(within.ndim)
    ]
    cells = [len(e) - 1 for e in edges]
    if math.prod(cells) > _MAX_CELLS:
        return _find_defect_in_halves(parts, within, edges)

    if math.prod(cells) == 1:
        return None if len(parts) == 1 else Defect(within, len(parts))
    # Dims that no edge cuts have one cell, and are left out.
    cut = [d for d in range(within.ndim) if cells[d] > 1]
    first = [np.searchsorted(edges[d], starts[:, d]) for d in cut]
    last = [np.searchsorted(edges[d], ends[:, d]) for d in cut]
    count_cells = _count_by_corners if len(cut) <= _MAX_CORNER_DIMS else _count_one_by_one
    counts = count_cells(first, last, [cells[d] for d in cut])
    wrong = np.flatnonzero(counts.reshape(-1) != 1)
    if not len(wrong):
        return None
    where = np.unravel_index(wrong[0], counts.shape)
    cell = dict(zip(cut, (int(w) for w in where), strict=True))
    low = tuple(int(edges[d][cell.get(d, 0)]) for d in range(within.ndim))
    high = tuple(int(edges[d][cell.get(d, 0) + 1]) for d in range(within.ndim))
    sizes = tuple(h - o for o, h in zip(low, high, strict=True))
    return Defect(Box(low, sizes), int(counts.reshape(-1)[wrong[0]]))


def _is_alone(boxes: BoxArray, within: Box) -> bool:
    """Whether there is one box, the region itself: most small tensors are stored like that."""
    if len(boxes) != 1:
        return False
    # Lists, as a comparison of arrays takes longer than all the rest.
    offsets, sizes = boxes.offsets[0].tolist(), boxes.sizes[0].tolist()
    return (tuple(offsets), tuple(sizes)) == (within.offsets, within.sizes)


def _are_slices(boxes: BoxArray, within: Box) -> bool:
    """Whether the boxes cut the region along one dim and follow one another, as most chunks do."""
    differs = (boxes.sizes != within.sizes).any(axis=0) | (boxes.offsets != within.offsets).any(
        axis=0
    )
    (cut,) = np.nonzero(differs)
    if len(cut) != 1 or not len(boxes):
        return False
    dim = int(cut[0])
    starts = boxes.offsets[:, dim]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    ends = starts + boxes.sizes[order, dim]
    return bool(
        starts[0] == within.offsets[dim]
        and ends[-1] == within.ends[dim]
        and (starts[1:] == ends[:-1]).all()
    )


def _count_by_corners(first: list[IntMatrix], last: list[IntMatrix], cells: list[int]) -> IntMatrix:
    """How many boxes cover each cell, by a difference array."""
    counts = np.zeros([n + 1 for n in cells], dtype=np.int64)
    for corner in itertools.product((0, 1), repeat=len(cells)):
        index = tuple(last[i] if end else first[i] for i, end in enumerate(corner))
        np.add.at(counts, index, (-1) ** sum(corner))
    for axis in range(len(cells)):
        np.cumsum(counts, axis=axis, out=counts)
    return counts[(slice(None, -1),) * len(cells)]


def _count_one_by_one(first: list[IntMatrix], last: list[IntMatrix], cells: list[int]) -> IntMatrix:
    """As `_count_by_corners`, but stops at an overlap; then other cells may count too few, never 0.

    A box of d dims has 2**d corners. Boxes that tile a region are added in the time that the region
    takes; once more cells were added than there are, one of them was added twice.
    """
    counts = np.zeros(cells, dtype=np.int64)
    added = 0
    for low, high in zip(np.stack(first, 1).tolist(), np.stack(last, 1).tolist(), strict=True):
        covered = counts[tuple(map(slice, low, high))]
        covered += 1
        added += covered.size
        if added > counts.size:
            return np.maximum(counts, 1)
    return counts


def _find_defect_in_halves(boxes: BoxArray, within: Box, edges: list[IntMatrix]) -> Defect | None:
    # Not the dim of most edges: where these differ from row to row, a part of the rows has few.
    dim = min((d for d in range(within.ndim) if len(edges[d]) > 2), key=lambda d: len(edges[d]))
    middle = int(edges[dim][len(edges[dim]) // 2])
    halves = []
    for start, end in ((within.offsets[dim], middle), (middle, within.ends[dim])):
        halves.append(_resize(within, dim, start, end))
    parts = [boxes.intersect(half)[1] for half in halves]
    if 4 * sum(map(len, parts)) > 5 * len(boxes):
        # A cut through many boxes makes more of them, and so would the next one: a few hundred
        # boxes of many dims, each cut at places of its own, would become billions.
        return _find_defect_by_pairs(boxes, within)
    for part, half in zip(parts, halves, strict=True):
        defect = find_defect(part, half)
        if defect is not None:
            return defect
    return None


def _find_defect_by_pairs(parts: BoxArray, within: Box) -> Defect | None:
    """A region, not the first one, that the parts do not cover once.

    Parts of a region tile it if no two overlap and they are as large as it together.
    """
    pair = _find_overlap(parts)
    if pair is not None:
        shared = parts[pair[0]].intersect(parts[pair[1]])
        assert shared is not None
        return _first_cell(parts, shared)
    if _volume(parts, within) == within.numel:
        return None
    # A hole is in a half that is not filled, however often the region is halved.
    while len(parts):
        starts, ends = parts.offsets, parts.ends
        inner = [
            np.unique(np.concatenate((starts[starts[:, d] > low, d], ends[ends[:, d] < high, d])))
            for d, (low, high) in enumerate(zip(within.offsets, within.ends, strict=True))
        ]
        dim = max(range(within.ndim), key=lambda d: len(inner[d]))
        middle = int(inner[dim][len(inner[dim]) // 2])
        first = _resize(within, dim, within.offsets[dim], middle)
        of_first = parts.intersect(first)[1]
        if _volume(of_first, first) < first.numel:
            within, parts = first, of_first
        else:
            within = _resize(within, dim, middle, within.ends[dim])
            parts = parts.intersect(within)[1]
    return Defect(within, 0)


def _first_cell(boxes: BoxArray, within: Box) -> Defect:
    """The part of a region from its first element to the next edge of a box in each dim."""
    starts, ends = boxes.offsets, boxes.ends
    high = []
    for d, low in enumerate(within.offsets):
        edges = np.concatenate((starts[:, d], ends[:, d], [within.ends[d]]))
        high.append(int(edges[edges > low].min()))
    sizes = tuple(h - low for h, low in zip(high, within.offsets, strict=True))
    cell = Box(within.offsets, sizes)
    return Defect(cell, len(boxes.intersect(cell)[1]))


def _resize(box: Box, dim: int, start: int, end: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim], sizes[dim] = start, end - start
    return Box(tuple(offsets), tuple(sizes))


def _volume(parts: BoxArray, within: Box) -> int:
    """Elements of disjoint parts of a region; no more than it has."""
    sizes = parts.sizes if within.numel < 1 << 62 else parts.sizes.astype(object)
    return int(sizes.prod(axis=1).sum())


def _find_overlap(boxes: BoxArray) -> tuple[int, int] | None:
    """Two boxes that share an element; compares those that meet along one dim.

    Raises:
        CheckpointFormatError: There are too many pairs that do.
    """
    starts, ends = boxes.offsets, boxes.ends
    orders = [np.argsort(starts[:, d], kind="stable") for d in range(starts.shape[1])]
    # How many of those that start later start before this one ends.
    reach = [
        np.searchsorted(starts[order, d], ends[order, d]) - np.arange(1, len(order) + 1)
        for d, order in enumerate(orders)
    ]
    totals = [int(counts.sum()) for counts in reach]
    dim = min(range(len(totals)), key=totals.__getitem__)
    if totals[dim] > _MAX_PAIRS:
        raise CheckpointFormatError(
            f"{len(boxes)} chunks are too irregular to be compared with each other"
        )
    order, counts = orders[dim], reach[dim]
    # Dims that tell most pairs apart come first.
    others = sorted((d for d in range(len(totals)) if d != dim), key=totals.__getitem__)
    before = np.cumsum(counts) - counts
    first = 0
    while first < len(counts):
        last = max(first + 1, int(np.searchsorted(before, before[first] + _PAIRS_AT_ONCE)))
        one = np.repeat(np.arange(first, last), counts[first:last])
        other = one + 1 + np.arange(len(one)) - (before[one] - before[first])
        one, other = order[one], order[other]
        for d in others:
            meet = (starts[one, d] < ends[other, d]) & (starts[other, d] < ends[one, d])
            one, other = one[meet], other[meet]
        if len(one):
            return int(one[0]), int(other[0])
        first = last
    return None
