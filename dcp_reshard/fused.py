"""Along the dim that tensor parallelism cuts: which indices of the global tensor does a rank hold?

A rank holds *segments* of the dim: one for a plain tensor, one per block for a fused one, in which
several matrices share a dim and each is cut by itself::

    gate|up of 4 + 4 rows, tp=2          global rows          rank 0's rows
                                         g0 g1 g2 g3          g0 g1 u0 u1
                                         u0 u1 u2 u3          rank 1's rows
                                                              g2 g3 u2 u3

So rank 0 has the segments (local 0, global 0, length 2) and (local 2, global 4, length 2).

Integers only; no tensor, no file.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dcp_reshard.sharding import chunk_bounds

__all__ = ["FusedBlocks", "Segment", "cut_dim", "join_dim"]


@dataclass(frozen=True, slots=True)
class FusedBlocks:
    """Blocks that are fused along the dim that tensor parallelism cuts, each cut by itself.

    Example:
        >>> gate_up = FusedBlocks((11008, 11008))
        >>> qkv = FusedBlocks((32 * 128, 8 * 128, 8 * 128), unit=128)
        >>> FusedBlocks((30, 10), unit=4)
        Traceback (most recent call last):
            ...
        ValueError: a block of 30 indices cannot be cut into units of 4
    """

    sizes: tuple[int, ...]
    """Indices of each block in the global tensor, in the order in which they are fused."""

    unit: int = 1
    """Indices that are never cut apart: the size of an attention head, say."""

    repeat: bool = False
    """Give a block of fewer units than ranks to the ranks in turn, a unit each, repeated (as
    key and value heads are where there are more ranks than such heads), not to the first ranks
    alone."""

    def __post_init__(self) -> None:
        """Check the numbers."""
        if self.unit < 1 or not self.sizes or any(size < 0 for size in self.sizes):
            raise ValueError(f"blocks of {self.sizes!r} indices in units of {self.unit!r}")
        for size in self.sizes:
            if size % self.unit:
                raise ValueError(
                    f"a block of {size} indices cannot be cut into units of {self.unit}"
                )

    @property
    def total(self) -> int:
        """Indices of all blocks."""
        return sum(self.sizes)


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive indices of a dim that a rank holds."""

    local: int
    """First index in what the rank holds."""

    start: int
    """First index in the global tensor."""

    length: int
    """Number of indices, at least 1."""


def cut_dim(size: int, ranks: int, rank: int, *, fused: FusedBlocks | None) -> list[Segment]:
    """What rank `rank` holds of a dim that is cut over `ranks` ranks by rule.

    Raises:
        ValueError: The blocks do not add up to the dim, or cannot be repeated over the ranks.

    Example:
        >>> cut_dim(8, 2, 1, fused=FusedBlocks((4, 4)))
        [Segment(local=0, start=2, length=2), Segment(local=2, start=6, length=2)]
    """
    if fused is None:
        fused = FusedBlocks((size,))
    if fused.total != size:
        raise ValueError(
            f"blocks of {fused.sizes!r} indices make {fused.total}, but the dim has {size}"
        )
    segments: list[Segment] = []
    local = first = 0
    for block in fused.sizes:
        start, end = _cut_block(block // fused.unit, ranks, rank, fused)
        length = (end - start) * fused.unit
        if length:
            segments.append(Segment(local, first + start * fused.unit, length))
        local += length
        first += block
    return segments


def _cut_block(units: int, ranks: int, rank: int, fused: FusedBlocks) -> tuple[int, int]:
    if not fused.repeat or units >= ranks or not units:
        return chunk_bounds(units, ranks, rank)
    if ranks % units:
        raise ValueError(f"{units} units cannot be repeated evenly over {ranks} ranks")
    unit = rank * units // ranks
    return unit, unit + 1


def join_dim(
    lengths: Sequence[int], *, fused: FusedBlocks | None
) -> tuple[int, list[list[Segment]]]:
    """The global size of a dim, and each rank's segments, from what the ranks hold of it.

    Args:
        lengths: Indices that each rank holds. Ranks may differ.
        fused: How blocks are fused; then the lengths are those that its rule gives.

    Raises:
        ValueError: A rank holds another number of indices than the rule for fused blocks says.

    Example:
        >>> join_dim([3, 2], fused=None)
        (5, [[Segment(local=0, start=0, length=3)], [Segment(local=0, start=3, length=2)]])
    """
    if fused is None:
        starts = [0, *itertools.accumulate(lengths)]
        pairs = zip(starts, lengths, strict=False)
        return starts[-1], [[Segment(0, s, n)] if n else [] for s, n in pairs]
    segments = [
        cut_dim(fused.total, len(lengths), rank, fused=fused) for rank in range(len(lengths))
    ]
    for rank, (length, own) in enumerate(zip(lengths, segments, strict=True)):
        wanted = sum(segment.length for segment in own)
        if length != wanted:
            raise ValueError(
                f"rank {rank} of {len(lengths)} holds {length} indices, but of blocks of "
                f"{fused.sizes!r} in units of {fused.unit} it should hold {wanted}"
            )
    return fused.total, segments
