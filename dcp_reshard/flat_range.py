"""A range of a flattened tensor as boxes of the tensor.

FSDP1 cuts the concatenation of flattened parameters anywhere, in the middle of a row too. A range
of row-major elements is a few boxes: what is left of the first row, whole rows, the start of the
last row, and the same again inside those rows for each further dim::

    rows of 4, elements 3 to 13    0 1 2 [3]
                                  [4 5 6  7]
                                  [8 9 10 11]
                                  [12] 13 14 15

Integers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dcp_reshard.box import Box

__all__ = ["flat_range_boxes"]


def flat_range_boxes(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The boxes that hold elements `start` to `end` (exclusive) in row-major order.

    The elements of the boxes, one box after the other, are those of the range in order.

    Args:
        shape: Shape of the tensor.
        start: First element.
        end: One past the last element, at most the number of elements.

    Returns:
        At most ``2 * len(shape) - 1`` boxes, none of them empty.

    Raises:
        ValueError: The tensor does not have these elements.

    Example:
        >>> [str(box) for box in flat_range_boxes((4, 4), 3, 13)]
        ['[0:1, 3:4]', '[1:3, 0:4]', '[3:4, 0:1]']
    """
    if not 0 <= start <= end <= math.prod(shape):
        raise ValueError(f"elements {start} to {end} are not in a tensor of shape {shape!r}")
    return [] if start == end else _boxes(tuple(shape), start, end)


def _boxes(shape: tuple[int, ...], start: int, end: int) -> list[Box]:
    if not shape:
        return [Box((), ())]
    rest = shape[1:]
    row = math.prod(rest)
    first, last = -(-start // row), end // row
    if first > last:
        # Both ends are inside one row.
        return [_in_row(last, box) for box in _boxes(rest, start - last * row, end - last * row)]
    found: list[Box] = []
    if start < first * row:
        found += [_in_row(first - 1, box) for box in _boxes(rest, start % row, row)]
    if first < last:
        found.append(Box((first, *(0 for _ in rest)), (last - first, *rest)))
    if last * row < end:
        found += [_in_row(last, box) for box in _boxes(rest, 0, end - last * row)]
    return found


def _in_row(index: int, box: Box) -> Box:
    return Box((index, *box.offsets), (1, *box.sizes))
