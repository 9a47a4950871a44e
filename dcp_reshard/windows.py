"""What a rank has read for the whole job in one round: the bytes of any box in it, as views.

A window is made by `window_reader`; here is how to find things in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from dcp_reshard.domains import IntArray
from dcp_reshard.elements import split_range
from dcp_reshard.payload import Payload
from dcp_reshard.pieces import TapeIndex, stride_order

__all__ = ["Window"]


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Bytes that have been read, and what is in them."""

    memory: torch.Tensor
    """The extents, one after the other."""

    index: TapeIndex
    """Where items are on the tape."""

    starts: IntArray
    """Position of each extent on the tape."""

    offsets: IntArray
    """Where in the memory it starts."""

    payloads: dict[int, Payload] = field(default_factory=dict)
    """Where the elements of chunks that were read whole lie in their items."""

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """Chunks of a form that only torch can read."""

    def offset(self, position: int) -> int:
        """Where in the memory a position of the tape is."""
        extent = int(np.searchsorted(self.starts, position, side="right")) - 1
        return int(self.offsets[extent] + position - self.starts[extent])

    def views(
        self, number: int, offsets: Sequence[int], sizes: Sequence[int], first: int, last: int
    ) -> Iterator[torch.Tensor]:
        """The bytes of elements `first` to `last` of a box, in pieces that follow one another.

        Args:
            number: The item.
            offsets: First index of the box in each dim of the chunk.
            sizes: Number of indices in each dim.
            first: First element, counted in the order of falling strides.
            last: One past the last element.

        Yields:
            Bytes whose last dim is the bytes of one element.
        """
        if number in self.values:
            box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
            value = self.values[number][box].resolve_conj().resolve_neg().contiguous()
            yield value.reshape(-1, 1).view(torch.uint8).to(self.memory.device)
            return
        base = int(self.index.tape.positions[self.index.unit(number)])
        placed = self.index.placed.find(number)
        if placed is None:
            yield self._view_whole(number, offsets, sizes, base)
            return
        order = stride_order(placed.strides)
        strides = tuple(placed.strides[d] for d in order)
        base += placed.base + sum(offsets[d] * st for d, st in zip(order, strides, strict=True))
        itemsize = self.index.numbering.itemsize(number)
        for inner, counts in split_range([sizes[d] for d in order], first, last):
            start = base + sum(o * st for o, st in zip(inner, strides, strict=True))
            yield self._view(start, (*counts, itemsize), (*strides, 1))

    def _view_whole(
        self, number: int, offsets: Sequence[int], sizes: Sequence[int], base: int
    ) -> torch.Tensor:
        payload = self.payloads.get(number)
        if payload is None:  # an object
            return self._view(base, (*sizes, 1), (1, 1))
        base += payload.start
        base += sum(o * st for o, st in zip(offsets, payload.strides, strict=True))
        return self._view(base, (*sizes, payload.dtype.itemsize), (*payload.strides, 1))

    def _view(self, position: int, sizes: Sequence[int], strides: Sequence[int]) -> torch.Tensor:
        return torch.as_strided(self.memory, sizes, strides, self.offset(position))
