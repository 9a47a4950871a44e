"""Rectangles in index space: which part of a global tensor is this?

A box is a half-open rectangle of element indices, kept in the coordinates of the global tensor (no
re-zeroing after a cut). One box is a `Box`; the chunks of a tensor are a `BoxArray`, two integer
matrices, so that a box is intersected with a hundred thousand chunks in one vectorised step.

Knows nothing of bytes, files or torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

__all__ = ["Box", "BoxArray"]

IntMatrix = npt.NDArray[np.int64]


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
        return _full(tuple(shape))

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
        # Not `all` of a generator, nor `ends`: this is asked for every tensor, several times.
        for start, size, first, length in zip(
            self.offsets, self.sizes, other.offsets, other.sizes, strict=True
        ):
            if first < start or first + length > start + size:
                return False
        return True

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


@lru_cache(maxsize=256)
def _full(shape: tuple[int, ...]) -> Box:
    # It is asked for five times for every tensor, and thousands of tensors have few shapes.
    return Box((0,) * len(shape), shape)


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
        """The non-empty overlaps with `box`: indices of the boxes concerned, and the overlaps.

        Raises:
            ValueError: The boxes differ in the number of dims.
        """
        if len(box.offsets) != self.offsets.shape[1]:
            raise ValueError(
                f"boxes of {self.offsets.shape[1]} dims, and one of {len(box.offsets)}"
            )
        starts = np.maximum(self.offsets, np.array(box.offsets, dtype=np.int64))
        sizes = np.minimum(self.ends, np.array(box.ends, dtype=np.int64)) - starts
        (index,) = np.nonzero((sizes > 0).all(axis=1))
        return index, BoxArray(starts[index], sizes[index])
