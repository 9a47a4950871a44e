"""Tilings without any regularity, which would take for ever if they were cut into cells."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dcp_reshard import coverage
from dcp_reshard.box import Box, BoxArray
from dcp_reshard.coverage import find_defect

SIDE = 1 << 20


def irregular_tiles(ndim: int, count: int) -> list[Box]:
    """Boxes made by cutting one of them in two, at any place along any dim, again and again."""
    generator = random.Random(ndim)  # noqa: S311
    tiles = [Box.full((SIDE,) * ndim)]
    while len(tiles) < count:
        at, dim = generator.randrange(len(tiles)), generator.randrange(ndim)
        tile = tiles[at]
        if tile.sizes[dim] < 2:
            continue
        size = generator.randrange(1, tile.sizes[dim])
        rest = list(tile.sizes)
        first, offsets = list(tile.sizes), list(tile.offsets)
        first[dim], rest[dim] = size, tile.sizes[dim] - size
        offsets[dim] += size
        tiles[at] = Box(tile.offsets, tuple(first))
        tiles.append(Box(tuple(offsets), tuple(rest)))
    return tiles


@pytest.mark.parametrize("ndim", [2, 3, 5, 8, 16])
def test_irregular_tilings(ndim: int) -> None:
    """2000 of them are proven in seconds; a box that is missing or there twice is found."""
    tiles = irregular_tiles(ndim, 2000)
    within = Box.full((SIDE,) * ndim)
    assert find_defect(BoxArray.from_boxes(tiles, ndim=ndim), within) is None
    for at in (0, 999, 1999):
        hole = find_defect(BoxArray.from_boxes(tiles[:at] + tiles[at + 1 :], ndim=ndim), within)
        assert hole is not None
        assert hole.count == 0
        assert tiles[at].contains(hole.box)
        twice = find_defect(BoxArray.from_boxes([*tiles, tiles[at]], ndim=ndim), within)
        assert twice is not None
        assert twice.count == 2
        assert tiles[at].contains(twice.box)


def test_one_element_off() -> None:
    """A box that is one element too wide, or not wide enough, is found."""
    tiles = irregular_tiles(8, 1000)
    within = Box.full((SIDE,) * 8)
    at = next(i for i, t in enumerate(tiles) if t.offsets[0] > 0 and t.sizes[0] > 1)
    tile = tiles[at]
    for start, size, count in ((1, -1, 0), (-1, 1, 2)):
        moved = Box(
            (tile.offsets[0] + start, *tile.offsets[1:]), (tile.sizes[0] + size, *tile.sizes[1:])
        )
        boxes = BoxArray.from_boxes([*tiles[:at], moved, *tiles[at + 1 :]], ndim=8)
        defect = find_defect(boxes, within)
        assert defect is not None
        assert defect.count == count
        assert np.prod(defect.box.sizes[:1]) == 1


def test_too_many_pairs_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes that cannot be looked at in reasonable time are not looked at."""
    monkeypatch.setattr(coverage, "_MAX_PAIRS", 100)
    boxes = BoxArray.from_boxes(irregular_tiles(8, 1000), ndim=8)
    with pytest.raises(ValueError, match="too irregular"):
        find_defect(boxes, Box.full((SIDE,) * 8))
