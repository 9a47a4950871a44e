"""Ranges of flattened tensors as boxes, against numpy's own flattening."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_reshard.flat_range import flat_range_boxes
from tests.support.strategies import shapes


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(shapes(max_dims=4, max_side=5))
    start = draw(st.integers(0, math.prod(shape)))
    return shape, start, draw(st.integers(start, math.prod(shape)))


@given(ranges())
def test_boxes_hold_the_elements_of_the_range_in_order(
    case: tuple[tuple[int, ...], int, int],
) -> None:
    """Read one box after the other, the boxes give the range, and nothing else."""
    shape, start, end = case
    whole = np.arange(math.prod(shape)).reshape(shape)
    boxes = flat_range_boxes(shape, start, end)
    found = [element for box in boxes for element in whole[box.slices()].flatten().tolist()]
    assert found == list(range(start, end))
    assert all(box.numel for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (3, 2), (0, 7)])
def test_a_range_that_is_not_in_the_tensor_is_refused(start: int, end: int) -> None:
    """Elements before the first, after the last, and ranges that end before they start."""
    with pytest.raises(ValueError, match=r"are not in a tensor of shape \(2, 3\)"):
        flat_range_boxes((2, 3), start, end)
