"""A grid of tensor-parallel x data-parallel ranks: which boxes of a tensor does each rank hold?

Tensor parallelism (tp) cuts a tensor along one dim, data parallelism (dp) cuts what is left along
dim 0::

    tp=2 cuts dim 1, dp=2 cuts dim 0     tp=2 and dp=2 cut dim 0
    +-----------+-----------+            +-----------------------+
    | tp0, dp0  | tp1, dp0  |            | tp0, dp0              |
    +-----------+-----------+            | tp0, dp1              |
    | tp0, dp1  | tp1, dp1  |            | tp1, dp0              |
    +-----------+-----------+            | tp1, dp1              |
                                         +-----------------------+

`plan_grid` says what the ranks hold that stored a tensor, from the shapes of their splits;
`plan_target` says it for a rank of a grid of another size, by rule.

Integers only; no tensor, no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dcp_reshard.box import Box
from dcp_reshard.fused import FusedBlocks, Segment, cut_dim, join_dim
from dcp_reshard.sharding import ShardBox, chunk_bounds

__all__ = ["Grid", "Held", "plan_grid", "plan_target"]


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor."""

    shape: tuple[int, ...]
    """Shape of its split."""

    boxes: tuple[ShardBox, ...]
    """The boxes that make it up, none of them empty, in the order in which they lie in it."""


@dataclass(frozen=True, slots=True)
class Grid:
    """What all ranks hold of a tensor."""

    shape: tuple[int, ...]
    """Global shape."""

    segments: tuple[tuple[Segment, ...], ...]
    """Segments of each tp rank along the dim that tp cuts; empty if it cuts none."""

    splits: tuple[tuple[Held, ...], ...]
    """What tp rank t and dp rank d hold, at ``[t][d]``."""


def plan_grid(
    shapes: Sequence[Sequence[tuple[int, ...]]], *, dim: int | None, fused: FusedBlocks | None
) -> Grid:
    """What each rank holds, from the shapes of all splits.

    Args:
        shapes: Shape of the split of tp rank t and dp rank d at ``[t][d]``. Ranks may differ along
            the dims that are cut.
        dim: The dim that tp cuts; None if all tp ranks hold the same.
        fused: How blocks are fused along it.

    Raises:
        ValueError: The shapes do not fit together.

    Example:
        >>> grid = plan_grid([[(1, 4), (1, 4)], [(1, 3), (1, 3)]], dim=1, fused=None)
        >>> grid.shape, str(grid.splits[1][1].boxes[0].box)
        ((2, 7), '[1:2, 4:7]')
    """
    first = shapes[0][0]
    if dim is not None and dim >= len(first):
        raise ValueError(f"to be cut along dim {dim}, but it has {len(first)} dims")
    # What tp ranks hold: the splits of their dp ranks joined along dim 0.
    joined: list[tuple[int, ...]] = []
    for t, row in enumerate(shapes):
        for d, shape in enumerate(row):
            _check_alike(
                shape, row[0], {0}, f"tp rank {t}, dp rank {d}", f"dp rank 0 of tp rank {t}"
            )
        joined.append((sum(shape[0] for shape in row), *row[0][1:]) if first else ())
        _check_alike(joined[t], joined[0], {dim}, f"tp rank {t}", "tp rank 0")
    whole = list(joined[0])
    segments: list[list[Segment]] = [[] for _ in shapes]
    if dim is not None:
        whole[dim], segments = join_dim([shape[dim] for shape in joined], fused=fused)
    splits = []
    for row, own in zip(shapes, segments, strict=True):
        ends = [0, *itertools.accumulate(shape[0] if shape else 0 for shape in row)]
        splits.append(
            tuple(
                Held(shape, tuple(_plan_boxes(whole, dim, own, (start, end))))
                for shape, start, end in zip(row, ends, ends[1:], strict=False)
            )
        )
    return Grid(tuple(whole), tuple(map(tuple, segments)), tuple(splits))


def plan_target(
    grid: Grid,
    *,
    dim: int | None,
    fused: FusedBlocks | None,
    tp: tuple[int, int],
    dp: tuple[int, int],
) -> Held:
    """What a rank of a grid of another size is to hold.

    With as many tp ranks as before, each holds what the same rank held.

    Args:
        grid: What is stored.
        dim: The dim that tp cuts; None if all tp ranks hold the same.
        fused: How blocks are fused along it.
        tp: Number of tp ranks, and which one of them.
        dp: The same of dp ranks, which cut dim 0 of what a tp rank holds.

    Raises:
        ValueError: Blocks cannot be repeated over that many ranks.
    """
    shape = list(grid.shape)
    segments: tuple[Segment, ...] = ()
    if dim is not None:
        if tp[0] == len(grid.segments):
            segments = grid.segments[tp[1]]
        else:
            segments = tuple(cut_dim(shape[dim], *tp, fused=fused))
        shape[dim] = sum(segment.length for segment in segments)
    rows = chunk_bounds(shape[0], *dp) if shape else (0, 0)
    boxes = tuple(_plan_boxes(grid.shape, dim, segments, rows))
    return Held((rows[1] - rows[0], *shape[1:]) if shape else (), boxes)


def _check_alike(
    shape: tuple[int, ...], other: tuple[int, ...], free: set[int | None], one: str, two: str
) -> None:
    if len(shape) == len(other) and all(
        a == b for i, (a, b) in enumerate(zip(shape, other, strict=True)) if i not in free
    ):
        return
    raise ValueError(f"{one} holds shape {shape!r}, but {two} {other!r}")


def _plan_boxes(
    shape: Sequence[int], dim: int | None, segments: Iterable[Segment], rows: tuple[int, int]
) -> Iterator[ShardBox]:
    """Boxes of the split that has rows `rows` of a tp shard with these segments of dim `dim`."""
    if not shape:
        yield ShardBox(Box((), ()), ())
        return
    if dim is None:
        dim, segments = 0, [Segment(0, 0, shape[0])]
    offsets, sizes, local = [0] * len(shape), list(shape), [0] * len(shape)
    offsets[0], sizes[0] = rows[0], rows[1] - rows[0]
    for segment in _clip(segments, rows) if dim == 0 else segments:
        offsets[dim], sizes[dim], local[dim] = segment.start, segment.length, segment.local
        if 0 not in sizes:
            yield ShardBox(Box(tuple(offsets), tuple(sizes)), tuple(local))


def _clip(segments: Iterable[Segment], rows: tuple[int, int]) -> Iterator[Segment]:
    """The part of the segments that lies in local indices `rows`, counted from there."""
    for segment in segments:
        low = max(segment.local, rows[0])
        high = min(segment.local + segment.length, rows[1])
        if low < high:
            yield Segment(low - rows[0], segment.start + low - segment.local, high - low)
