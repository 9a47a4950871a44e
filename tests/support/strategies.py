"""Hypothesis strategies for the shapes of this field, small and full of edge cases.

Sides are drawn from 0 upwards, so empty tensors, 0-d tensors, and dims smaller than a mesh axis all
occur; a test that cannot take one of these says so with a bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcp_reshard.box import Box

__all__ = ["boxes", "mesh_shapes", "placements", "shapes", "tilings"]


def shapes(
    *, min_dims: int = 0, max_dims: int = 3, min_side: int = 0, max_side: int = 9
) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of tensors."""
    sides = st.integers(min_side, max_side)
    return st.lists(sides, min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: Sequence[int], *, min_size: int = 0) -> Box:
    """Boxes inside a tensor of this shape, of at least `min_size` in each dim."""
    sizes = tuple(draw(st.integers(min(min_size, side), side)) for side in shape)
    offsets = tuple(
        draw(st.integers(0, side - size)) for side, size in zip(shape, sizes, strict=True)
    )
    return Box(offsets, sizes)


@st.composite
def tilings(draw: st.DrawFn, shape: Sequence[int], *, max_cuts: int = 8) -> list[Box]:
    """Boxes that cover a tensor of this shape exactly once, in any order; none of them is empty.

    Made by cutting a box in two, again and again, so chunks need not form a grid::

        +---+------+
        |   |      |
        |   +---+--+
        |   |   |  |
        +---+---+--+
    """
    tiles = [Box.full(shape)] if math.prod(shape) else []
    for _ in range(draw(st.integers(0, max_cuts))):
        wide = [(i, d) for i, t in enumerate(tiles) for d, size in enumerate(t.sizes) if size > 1]
        if not wide:
            break
        index, dim = draw(st.sampled_from(wide))
        tile = tiles.pop(index)
        first = draw(st.integers(1, tile.sizes[dim] - 1))
        tiles += [
            _resize(tile, dim, 0, first),
            _resize(tile, dim, first, tile.sizes[dim] - first),
        ]
    return draw(st.permutations(tiles))


def _resize(box: Box, dim: int, start: int, size: int) -> Box:
    offsets, sizes = list(box.offsets), list(box.sizes)
    offsets[dim] += start
    sizes[dim] = size
    return Box(tuple(offsets), tuple(sizes))


def mesh_shapes(*, max_axes: int = 3, max_ranks: int = 12) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of device meshes of 1 to `max_axes` axes."""
    sizes = st.lists(st.integers(1, max_ranks), min_size=1, max_size=max_axes).map(tuple)
    return sizes.filter(lambda shape: math.prod(shape) <= max_ranks)


@st.composite
def placements(
    draw: st.DrawFn, mesh_shape: Sequence[int], ndim: int, *, strided: bool = False
) -> list[Placement]:
    """One placement per mesh axis, for a tensor of `ndim` dims.

    Args:
        draw: Given by Hypothesis.
        mesh_shape: Sizes of the mesh axes.
        ndim: Dims of the tensor; a 0-d tensor can only be replicated.
        strided: Mark a shard of a dim that axes to the right cut as well as FSDP2 does: as a
            `_StridedShard`, whose split factor is the number of pieces that those axes make.
    """
    dims = [draw(st.integers(-1, ndim - 1)) for _ in mesh_shape]
    chosen: list[Placement] = []
    for axis, dim in enumerate(dims):
        right = [mesh_shape[a] for a in range(axis + 1, len(dims)) if dims[a] == dim]
        if dim < 0:
            chosen.append(Replicate())
        elif strided and math.prod(right) > 1:
            chosen.append(_StridedShard(dim, split_factor=math.prod(right)))
        else:
            chosen.append(Shard(dim))
    return chosen
