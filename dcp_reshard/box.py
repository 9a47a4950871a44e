"""Rectangles in index space: which part of a global tensor is this, and do these parts tile it?

A box is a half-open rectangle of element indices, kept in the coordinates of the global tensor (no
re-zeroing after a cut). One box is a `Box`; the chunks of a tensor are a `BoxArray`, two integer
matrices, so that a box is intersected with a hundred thousand chunks in one vectorised step.

Coverage is proven by counting (`find_defect`):

1. Every box edge becomes a coordinate; between neighbouring coordinates lie cells that no edge
cuts.
2. A difference array over these cells, summed along each dim, holds how many boxes cover each cell.
3. A cell with a count of 0 is a hole, one with 2 or more an overlap; the first such cell is
   returned.

With many dims a difference array has too many corners, and the boxes are added one by one. Where
there are too many cells, the region is halved; and where halving cuts through most boxes, they are
compared with each other instead: boxes tile a region if they are as large together and disjoint.

Knows nothing of bytes, files or torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Box", "BoxArray", "Defect", "find_defect"]

IntMatrix = npt.NDArray[np.int64]

# Cells counted at once by `find_defect`; a region with more is halved first, which bounds memory
# (8 bytes a cell) whatever the chunks look like.
_MAX_CELLS = 1 << 21
_MAX_PAIRS = 1 << 32
_PAIRS_AT_ONCE = 1 << 20
# Difference arrays are for the usual few dims: a box of d dims has 2**d corners.
_MAX_CORNER_DIMS = 4


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open rectangle of element indices.

    A box of no dims (of a 0-d tensor) has one element.

    Example:
        >>> Box((0, 4), (2, 4)).intersect(Box((1, 0), (5, 6)))
        Box(offsets=(1, 4), sizes=(1, 2))
    """

    offsets: tuple[int, ...]
    """First index in each dim."""

    sizes: tuple[int, ...]
    """Number of indices in each dim."""

    @classmethod
    def full(cls, shape: Sequence[int]) -> Box:
        """The box of a whole tensor of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.sizes)

    @property
    def ends(self) -> tuple[int, ...]:
        """One past the last index in each dim."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    @property
    def is_empty(self) -> bool:
        """Whether the box has no element."""
        return 0 in self.sizes

    def intersect(self, other: Box) -> Box | None:
        """The box common to both, or None if they share no element.

        Raises:
            ValueError: The boxes differ in the number of dims.
        """
        starts = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = tuple(min(a, b) for a, b in zip(self.ends, other.ends, strict=True))
        if any(e <= s for s, e in zip(starts, ends, strict=True)):
            return None
        return Box(starts, tuple(e - s for s, e in zip(starts, ends, strict=True)))

    def contains(self, other: Box) -> bool:
        """Whether every edge of `other` lies inside this box."""
        return all(
            o <= p and q <= e
            for o, e, p, q in zip(self.offsets, self.ends, other.offsets, other.ends, strict=True)
        )

    def relative_to(self, origin: Sequence[int]) -> Box:
        """The same rectangle, counted from `origin`."""
        return Box(tuple(a - b for a, b in zip(self.offsets, origin, strict=True)), self.sizes)

    def translate(self, by: Sequence[int]) -> Box:
        """The same rectangle, moved by `by`."""
        return Box(tuple(a + b for a, b in zip(self.offsets, by, strict=True)), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """Slices that select this box from an array whose first index is 0 in each dim."""
        return tuple(slice(o, e) for o, e in zip(self.offsets, self.ends, strict=True))

    def __str__(self) -> str:
        """Index notation, e.g. ``[0:2, 4:8]``."""
        return (
            "[" + ", ".join(f"{o}:{e}" for o, e in zip(self.offsets, self.ends, strict=True)) + "]"
        )


@dataclass(frozen=True, slots=True, eq=False)
class BoxArray:
    """Boxes of equal number of dims, as columns.

    Example:
        >>> chunks = BoxArray.from_boxes([Box((0,), (4,)), Box((4,), (4,))], ndim=1)
        >>> index, parts = chunks.intersect(Box((3,), (2,)))
        >>> index.tolist(), parts.offsets.tolist(), parts.sizes.tolist()
        ([0, 1], [[3], [4]], [[1], [1]])
    """

    offsets: IntMatrix
    """First index of box i in dim d at ``[i, d]``."""

    sizes: IntMatrix
    """Number of indices of box i in dim d at ``[i, d]``."""

    @classmethod
    def from_boxes(cls, boxes: Iterable[Box], *, ndim: int) -> BoxArray:
        """Columns of these boxes.

        Raises:
            OverflowError: A bound does not fit into 64 bits.
        """
        boxes = list(boxes)
        shape = (len(boxes), ndim)
        return cls(
            np.array([b.offsets for b in boxes], dtype=np.int64).reshape(shape),
            np.array([b.sizes for b in boxes], dtype=np.int64).reshape(shape),
        )

    def __len__(self) -> int:
        """Number of boxes."""
        return len(self.offsets)

    def __getitem__(self, index: int) -> Box:
        """Box number `index`."""
        return Box(tuple(self.offsets[index].tolist()), tuple(self.sizes[index].tolist()))

    @property
    def ends(self) -> IntMatrix:
        """One past the last index of box i in dim d at ``[i, d]``."""
        return self.offsets + self.sizes

    def intersect(self, box: Box) -> tuple[IntMatrix, BoxArray]:
        """The non-empty overlaps with `box`: indices of the boxes concerned, and the overlaps."""
        starts = np.maximum(self.offsets, np.array(box.offsets, dtype=np.int64))
        sizes = np.minimum(self.ends, np.array(box.ends, dtype=np.int64)) - starts
        (index,) = np.nonzero((sizes > 0).all(axis=1))
        return index, BoxArray(starts[index], sizes[index])


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
        ValueError: There are very many boxes, and they are too irregular to be looked at.

    Example:
        >>> halves = BoxArray.from_boxes([Box((0,), (4,)), Box((5,), (3,))], ndim=1)
        >>> find_defect(halves, Box((0,), (8,)))
        Defect(box=Box(offsets=(4,), sizes=(1,)), count=0)
    """
    if within.is_empty or (len(boxes) == 1 and boxes[0] == within) or _are_slices(boxes, within):
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
        offsets = (*within.offsets[:dim], start, *within.offsets[dim + 1 :])
        sizes = (*within.sizes[:dim], end - start, *within.sizes[dim + 1 :])
        halves.append(Box(offsets, sizes))
    parts = [boxes.intersect(half)[1] for half in halves]
    # A cut through many boxes makes more of them, and so does the next one: a few hundred boxes of
    # many dims, each cut at places of its own, would become billions.
    multiplies = 4 * sum(map(len, parts)) > 5 * len(boxes)
    if multiplies and _tile(boxes, within):
        return None
    for part, half in zip(parts, halves, strict=True):
        if multiplies and _tile(part, half):
            continue
        defect = find_defect(part, half)
        if defect is not None:
            return defect
    return None


def _tile(parts: BoxArray, within: Box) -> bool:
    """Whether parts of a region tile it: they are as large as it together, and none overlap."""
    if math.prod(within.sizes) >= 1 << 62:
        volume = sum(map(math.prod, parts.sizes.tolist()))
    else:
        volume = int(parts.sizes.prod(axis=1).sum()) if _fits(parts, within) else -1
    return volume == within.numel and not _any_overlap(parts)


def _fits(parts: BoxArray, within: Box) -> bool:
    # So many parts, each of at most the region's size, that their sum may overflow.
    return len(parts) * within.numel < 1 << 62 or not _any_overlap(parts)


def _any_overlap(boxes: BoxArray) -> bool:
    """Whether two of the boxes share an element; compares those that meet along one dim.

    Raises:
        ValueError: There are too many pairs that do.
    """
    starts, ends = boxes.offsets, boxes.ends
    orders = [np.argsort(starts[:, d], kind="stable") for d in range(starts.shape[1])]
    reach = [
        np.searchsorted(starts[order, d], ends[order, d]) - np.arange(1, len(order) + 1)
        for d, order in enumerate(orders)
    ]
    totals = [int(r.sum()) for r in reach]
    dim = min(range(len(totals)), key=totals.__getitem__)
    if totals[dim] > _MAX_PAIRS:
        raise ValueError(f"{len(boxes)} boxes are too irregular to be compared with each other")
    starts, ends, counts = starts[orders[dim]], ends[orders[dim]], reach[dim]
    # Dims that tell most pairs apart first.
    others = sorted((d for d in range(len(totals)) if d != dim), key=totals.__getitem__)
    first = 0
    while first < len(counts):
        last = (
            first
            + 1
            + int(np.searchsorted(np.cumsum(counts[first + 1 :]) + counts[first], _PAIRS_AT_ONCE))
        )
        one = np.repeat(np.arange(first, last), counts[first:last])
        begin = np.repeat(np.cumsum(counts[first:last]) - counts[first:last], counts[first:last])
        other = one + 1 + np.arange(len(one)) - begin
        for d in others:
            meet = (starts[one, d] < ends[other, d]) & (starts[other, d] < ends[one, d])
            one, other = one[meet], other[meet]
        if len(one):
            return True
        first = last
    return False
