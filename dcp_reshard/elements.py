"""Elements of a strided array in the order of their bytes: how many lie before a place, and which?

Where the reading of one rank ends and that of the next begins, a box of a chunk is cut. What lies
before the cut is a number of elements (`count_before`), and such a range of elements is a few boxes
again (`split_range`). Both sides of an exchange do this arithmetic alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dcp_reshard.domains import IntArray

__all__ = ["count_before", "split_range"]


def count_before(
    positions: IntArray, *, base: int, sizes: Sequence[int], strides: Sequence[int]
) -> IntArray:
    """How many elements of a strided array start before each of these positions.

    Args:
        positions: Any positions.
        base: Position of the first element.
        sizes: Number of indices in each dim; dims in the order of falling strides.
        strides: Positions from one index to the next. Elements must not overlap, and those of one
            index must end before those of the next begin.

    Example:
        >>> count_before(np.array([0, 100, 104, 105, 120, 1000]), base=100, sizes=(2, 3),
        ...              strides=(20, 4)).tolist()
        [0, 0, 1, 2, 3, 6]
    """
    rest = positions - base
    count = np.zeros_like(rest)
    inner = math.prod(sizes)
    dims = [(n, st) for n, st in zip(sizes, strides, strict=True) if n > 1]
    if not dims:
        return np.where(rest > 0, inner, 0)
    for size, stride in dims[:-1]:
        inner //= size
        index = np.clip(rest // stride, 0, size - 1)
        count += index * inner
        rest = rest - index * stride
    size, stride = dims[-1]
    return count + np.clip(-(-rest // stride), 0, size)


def split_range(
    sizes: Sequence[int], first: int, last: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes, as offsets and sizes, that together are elements `first` to `last` of an array.

    Elements count in row-major order, and so do the boxes: the elements of one follow those of the
    box before it.

    Example:
        >>> split_range((4, 3), 2, 11)
        [((0, 2), (1, 1)), ((1, 0), (2, 3)), ((3, 0), (1, 2))]
    """
    if first >= last:
        return []
    if not sizes:
        return [((), ())]
    inner = math.prod(sizes[1:])
    low, head = divmod(first, inner)
    high, tail = divmod(last, inner)
    if low == high:
        return _at(low, split_range(sizes[1:], head, tail))
    boxes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    if head:
        boxes += _at(low, split_range(sizes[1:], head, inner))
        low += 1
    if low < high:
        boxes.append(((low, *(0 for _ in sizes[1:])), (high - low, *sizes[1:])))
    return boxes + _at(high, split_range(sizes[1:], 0, tail))


def _at(
    index: int, boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return [((index, *offsets), (1, *sizes)) for offsets, sizes in boxes]
