"""Rectangles against sets of indices: what a box holds is what numpy selects with its slices."""

from __future__ import annotations

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from dcp_reshard import coverage as coverage_module
from dcp_reshard.box import Box, BoxArray
from dcp_reshard.coverage import Defect, find_defect
from tests.support.strategies import boxes, shapes, tilings


def indices(box: Box) -> set[tuple[int, ...]]:
    """All indices of a box, by the definition."""
    return set(itertools.product(*map(range, box.offsets, box.ends)))


def count_boxes(parts: list[Box], within: Box) -> np.ndarray:
    """How many boxes cover each element of `within`, by counting one by one."""
    counts = np.zeros(within.ends, dtype=int)
    for part in parts:
        counts[part.slices()] += 1
    return counts[within.slices()]


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Box], Box]:
    """Boxes inside a tensor, mostly a tiling with a few boxes lost or added, and a region of it."""
    shape = draw(shapes(max_side=6))
    parts = draw(tilings(shape, max_cuts=6))
    for _ in range(draw(st.integers(0, 2))):
        if parts and draw(st.booleans()):
            parts.pop(draw(st.integers(0, len(parts) - 1)))
        else:
            parts.append(draw(boxes(shape)))
    return parts, draw(st.one_of(st.just(Box.full(shape)), boxes(shape)))


@hypothesis.given(st.data())
def test_operations_on_two_boxes_are_those_on_sets_of_indices(data: st.DataObject) -> None:
    """Overlap, containment, size and emptiness agree with the sets of indices."""
    shape = data.draw(shapes())
    a, b = data.draw(boxes(shape)), data.draw(boxes(shape))
    common = indices(a) & indices(b)
    found = a.intersect(b)
    assert (found is None) == (not common)
    assert found is None or indices(found) == common
    assert found == b.intersect(a)
    assert a.numel == len(indices(a))
    assert a.is_empty == (not indices(a))
    assert not a.contains(b) or indices(b) <= indices(a)
    assert b.is_empty or a.contains(b) == (indices(b) <= indices(a))
    assert a.ndim == len(shape)


@hypothesis.given(st.data())
def test_slices_select_the_box_and_moves_are_inverse(data: st.DataObject) -> None:
    """A box cuts its own elements out of an array; moved there and back it is the same."""
    shape = data.draw(shapes())
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    box = data.draw(boxes(shape))
    assert array[box.slices()].shape == box.sizes
    if not box.is_empty:
        assert array[box.slices()].flat[0] == array[box.offsets]
    origin = data.draw(boxes(shape)).offsets
    moved = box.relative_to(origin)
    assert moved.translate(origin) == box
    assert moved.offsets == tuple(np.subtract(box.offsets, origin).tolist())


@pytest.mark.parametrize(
    ("outer", "inner", "inside"),
    [
        (Box((0,), (4,)), Box((4,), (0,)), True),
        (Box((0,), (4,)), Box((5,), (0,)), False),
        (Box((0,), (4,)), Box((-1,), (2,)), False),
        (Box((2,), (0,)), Box((2,), (1,)), False),
        (Box((0, 0), (2, 9)), Box((0, 3), (3, 1)), False),
        (Box((), ()), Box((), ()), True),
    ],
)
def test_contains_looks_at_the_edges_of_empty_boxes_too(
    outer: Box, inner: Box, *, inside: bool
) -> None:
    """An empty box may lie on the far edge, but not beyond it."""
    assert outer.contains(inner) is inside


def test_boxes_of_different_dims_are_refused() -> None:
    """Comparing boxes of different tensors is a mistake, not an empty overlap."""
    flat, square = Box((0,), (4,)), Box((0, 0), (4, 4))
    for operation in (square.intersect, square.contains):
        with pytest.raises(ValueError, match="zip"):
            operation(flat)


def test_a_box_of_a_0d_tensor_has_one_element() -> None:
    """No dims means one element, not none."""
    scalar = Box.full(())
    assert (scalar.numel, scalar.is_empty, scalar.slices()) == (1, False, ())
    assert scalar.intersect(scalar) == scalar
    assert str(scalar) == "[]"


def test_str_is_index_notation() -> None:
    """Messages show boxes as one would write them in code."""
    assert str(Box((0, 4), (2, 4))) == "[0:2, 4:8]"


@hypothesis.given(st.data())
def test_box_array_intersects_like_its_boxes_one_by_one(data: st.DataObject) -> None:
    """The vectorised overlap gives the pairwise overlaps, in order, without the empty ones."""
    shape = data.draw(shapes())
    parts = data.draw(st.lists(boxes(shape), max_size=12))
    wanted = data.draw(boxes(shape))
    array = BoxArray.from_boxes(parts, ndim=len(shape))
    assert [array[i] for i in range(len(array))] == parts
    index, overlaps = array.intersect(wanted)
    pairs = [(i, part.intersect(wanted)) for i, part in enumerate(parts)]
    expected = [(i, overlap) for i, overlap in pairs if overlap is not None]
    assert [(int(i), overlaps[n]) for n, i in enumerate(index)] == expected


def test_box_array_keeps_64_bit_bounds() -> None:
    """Offsets of tensors of 2**40 elements and more are exact, larger ones than 64 bits refused."""
    far = Box(((1 << 62) - 7,), (1 << 61,))
    assert BoxArray.from_boxes([far], ndim=1)[0] == far
    assert BoxArray.from_boxes([far], ndim=1).ends.tolist() == [[(3 << 61) - 7]]
    with pytest.raises(OverflowError):
        BoxArray.from_boxes([Box((1 << 63,), (1,))], ndim=1)


@pytest.mark.parametrize(
    ("max_cells", "max_corner_dims"), [(1 << 21, 4), (4, 4), (1, 4), (1 << 21, 0), (4, 0)]
)
@hypothesis.given(scene=scenes())
def test_find_defect_agrees_with_counting(
    max_cells: int, max_corner_dims: int, scene: tuple[list[Box], Box]
) -> None:
    """A defect is found if and only if some element is not covered once, and it is a real one.

    With few cells at once, the region is halved and halved again; with few dims of corners, boxes
    are added one by one, and not all that overlap need be counted.
    """
    parts, within = scene
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coverage_module, "_MAX_CELLS", max_cells)
        patch.setattr(coverage_module, "_MAX_CORNER_DIMS", max_corner_dims)
        defect = find_defect(BoxArray.from_boxes(parts, ndim=within.ndim), within)
    assert (defect is None) == bool((count_boxes(parts, within) == 1).all())
    if defect is not None:
        assert not defect.box.is_empty
        assert within.contains(defect.box)
        [count] = set(count_boxes(parts, defect.box).flat)
        exact = max_corner_dims or defect.count == 0
        assert defect.count == count if exact else 2 <= defect.count <= count


@hypothesis.given(scenes())
def test_find_defect_reports_the_first(scene: tuple[list[Box], Box]) -> None:
    """The defect starts at the first element, in the order of indices, not covered once."""
    parts, within = scene
    defect = find_defect(BoxArray.from_boxes(parts, ndim=within.ndim), within)
    wrong = np.argwhere(count_boxes(parts, within) != 1)
    if defect is not None:
        assert defect.box.offsets == tuple(int(w) for w in wrong[0] + within.offsets)


@pytest.mark.parametrize(
    ("parts", "within", "defect"),
    [
        ([], Box((), ()), Defect(Box((), ()), 0)),
        ([Box((), ())], Box((), ()), None),
        ([Box((), ())] * 3, Box((), ()), Defect(Box((), ()), 3)),
        ([], Box((0,), (0,)), None),
        ([], Box((2,), (5,)), Defect(Box((2,), (5,)), 0)),
        ([Box((0,), (9,))] * 2, Box((2,), (5,)), Defect(Box((2,), (5,)), 2)),
        ([Box((0,), (0,)), Box((0,), (4,))], Box((0,), (4,)), None),
    ],
    ids=str,
)
def test_find_defect_in_corner_cases(parts: list[Box], within: Box, defect: Defect | None) -> None:
    """0-d tensors, empty regions, regions in one piece, and empty chunks are counted right."""
    assert find_defect(BoxArray.from_boxes(parts, ndim=within.ndim), within) == defect


def test_find_defect_in_a_huge_tensor() -> None:
    """The work depends on the number of boxes, not on the 2**80 elements; no bound overflows."""
    side = 1 << 40
    quarters = [
        Box((i * side, j * side), (side, side)) for i, j in itertools.product((0, 1), repeat=2)
    ]
    whole = Box.full((2 * side, 2 * side))
    assert find_defect(BoxArray.from_boxes(quarters, ndim=2), whole) is None
    last = quarters.pop()
    smaller = Box(last.offsets, (side, side - 1))
    found = find_defect(BoxArray.from_boxes([*quarters, smaller], ndim=2), whole)
    assert found == Defect(Box((side, 2 * side - 1), (side, 1)), 0)


@pytest.mark.parametrize("lost", [None, 0, 7, 16])
def test_find_defect_in_many_dims(lost: int | None) -> None:
    """Slabs that peel a tensor of 16 dims, dim by dim, make 2**16 cells of 2**16 corners each."""
    ndim = 16
    slabs = [
        Box((1,) * d + (0,) * (ndim - d), (1,) * (d + 1) + (2,) * (ndim - d - 1))
        for d in range(ndim)
    ]
    slabs.append(Box((1,) * ndim, (1,) * ndim))
    kept = [slab for i, slab in enumerate(slabs) if i != lost]
    found = find_defect(BoxArray.from_boxes(kept, ndim=ndim), Box.full((2,) * ndim))
    assert (found is None) == (lost is None)
    if found is not None and lost is not None:
        assert found.count == 0
        assert slabs[lost].contains(found.box)


def test_find_defect_where_every_row_is_cut_at_places_of_its_own() -> None:
    """Thousands of boxes whose edges make 24**6 cells are counted slab by slab."""
    n, side = 24, 1000
    columns = itertools.product(range(n), repeat=2)
    tiles = [
        Box((x, y * side + x, z * side * n + x * n + y), (1, side, side * n))
        for x, y in columns
        for z in range(n)
    ]
    within = Box((0, n, n * n), (n, side * (n - 1), side * n * (n - 1)))
    assert find_defect(BoxArray.from_boxes(tiles, ndim=3), within) is None
    lost = tiles.pop(len(tiles) // 2)
    found = find_defect(BoxArray.from_boxes(tiles, ndim=3), within)
    assert found is not None
    assert lost.contains(found.box)


def test_boxes_of_other_dims_do_not_intersect_boxes() -> None:
    """A matrix of boxes refuses a box of another number of dims, as a box does."""
    boxes = BoxArray.from_boxes([Box((0, 0), (2, 2))], ndim=2)
    with pytest.raises(ValueError, match="boxes of 2 dims, and one of 1"):
        boxes.intersect(Box((0,), (2,)))
