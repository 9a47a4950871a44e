"""What ranks want of each other: boxes of stored chunks, cut where one rank's reading ends.

A `Request` table says which boxes of which chunks a rank wants, as rows of integers. Cut at the
extents of the domains (`find_pieces`), each row becomes pieces: elements `first` to `last` of the
box, in the order in which the chunk's bytes are stored. The rank that reads an extent and the rank
that wants the row compute the same pieces from the same row: nothing else has to be agreed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dcp_reshard.domains import Domains, IntArray, Tape
from dcp_reshard.elements import count_before
from dcp_reshard.numbering import Numbering

__all__ = [
    "Pieces",
    "Placed",
    "PlacedTable",
    "Requests",
    "TapeIndex",
    "find_pieces",
    "stride_order",
]

# Pieces start at multiples of this in a message: no dtype needs more, to be looked at in place.
_ALIGNMENT = 16


@dataclass(frozen=True, slots=True)
class Placed:
    """Where the elements of a chunk lie, if that is known before its bytes are read."""

    start: int
    """First byte of the chunk's record in the file."""

    length: int
    """Bytes of the record."""

    crc: int
    """Its recorded checksum; 0 if the writer computed none."""

    base: int
    """Byte of element 0 in the record."""

    strides: tuple[int, ...]
    """Bytes from one index to the next, in each dim."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTable:
    """Where the elements of many chunks lie: a row of integers for each."""

    numbers: IntArray
    """Numbers of the chunks, in rising order."""

    rows: IntArray
    """Start, length, checksum, base, and strides; 0 in dims beyond those."""

    ndims: IntArray
    """Dims of each chunk."""

    @classmethod
    def from_rows(cls, rows: IntArray, numbering: Numbering) -> PlacedTable:
        """The table of rows that begin with a number, in any order."""
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        return cls(rows[:, 0], rows[:, 1:], numbering.ndims(rows[:, 0]))

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.numbers)

    def find(self, number: int) -> Placed | None:
        """Where the elements of a chunk lie, or None if it is not in the table."""
        row = int(np.searchsorted(self.numbers, number))
        if row == len(self.numbers) or self.numbers[row] != number:
            return None
        start, length, crc, base, *strides = self.rows[row].tolist()
        return Placed(start, length, crc, base, tuple(strides[: self.ndims[row]]))


@dataclass(frozen=True, slots=True, eq=False)
class TapeIndex:
    """Which items are where on the tape."""

    numbering: Numbering
    """Numbers of the items."""

    tape: Tape
    """The units."""

    numbers: IntArray
    """Items that anyone needs, in rising order."""

    units: IntArray
    """The unit of each of these."""

    placed: PlacedTable
    """Chunks that are read in blocks. Each of the other items is one atomic unit."""

    def place(self, number: int) -> Placed:
        """Where the elements of a chunk lie that is read in blocks."""
        placed = self.placed.find(number)
        assert placed is not None
        return placed

    def unit(self, number: int) -> int:
        """The unit of an item."""
        return int(self.units[np.searchsorted(self.numbers, number)])

    def units_of(self, numbers: IntArray) -> IntArray:
        """The units of these items."""
        return self.units[np.searchsorted(self.numbers, numbers)]


@dataclass(frozen=True, slots=True, eq=False)
class Requests:
    """Boxes of chunks; row i of a column is request i. An object is a box of one dim."""

    numbers: IntArray
    """Number of the item."""

    offsets: IntArray
    """First index in each dim of the chunk; 0 in dims beyond those."""

    sizes: IntArray
    """Number of indices in each dim; 1 in dims beyond those."""

    @classmethod
    def make(
        cls, rows: Sequence[tuple[int, Sequence[int], Sequence[int]]], *, num_dims: int
    ) -> Requests:
        """Columns of rows of number, offsets and sizes."""
        zeros, ones = (0,) * num_dims, (1,) * num_dims
        padded = [
            (number, *offsets, *zeros[len(offsets) :], *sizes, *ones[len(sizes) :])
            for number, offsets, sizes in rows
        ]
        return cls.from_rows(np.array(padded, dtype=np.int64).reshape(-1, 1 + 2 * num_dims))

    @classmethod
    def from_rows(cls, table: IntArray) -> Requests:
        """Take apart what `rows` has put together."""
        num_dims = table.shape[1] // 2
        return cls(table[:, 0], table[:, 1 : 1 + num_dims], table[:, 1 + num_dims :])

    def rows(self) -> IntArray:
        """All columns side by side, to be sent."""
        return np.concatenate((self.numbers[:, None], self.offsets, self.sizes), axis=1)

    @property
    def numels(self) -> IntArray:
        """Elements of each box."""
        numels: IntArray = self.sizes.prod(axis=1)
        return numels

    def box(self, index: int, ndim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of a request."""
        return (
            tuple(self.offsets[index, :ndim].tolist()),
            tuple(self.sizes[index, :ndim].tolist()),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Requests, cut; row i of a column is piece i."""

    extents: IntArray
    """The extent that the piece is read with."""

    requests: IntArray
    """The request that it is part of."""

    first: IntArray
    """First element."""

    last: IntArray
    """One past the last element."""

    nbytes: IntArray
    """Bytes in a message, padding included."""

    def select(self, index: IntArray) -> Pieces:
        """These pieces, in this order."""
        return Pieces(
            self.extents[index],
            self.requests[index],
            self.first[index],
            self.last[index],
            self.nbytes[index],
        )


def stride_order(strides: Sequence[int]) -> list[int]:
    """Dims in the order of falling strides: that in which bytes follow each other."""
    return sorted(range(len(strides)), key=lambda dim: -strides[dim])


def find_pieces(requests: Requests, index: TapeIndex, domains: Domains) -> Pieces:
    """Cut requests at the extents, in the order of the requests."""
    units = index.units_of(requests.numbers)
    atomic = index.tape.atomic[units]
    (whole,) = np.nonzero(atomic)
    extents = [domains.find_extents(index.tape.positions[units[whole]])]
    rows = [whole]
    first = [np.zeros(len(whole), dtype=np.int64)]
    last = [requests.numels[whole]]
    for row in np.flatnonzero(~atomic).tolist():
        chunk = index.place(int(requests.numbers[row]))
        base = int(index.tape.positions[units[row]])
        touched, starts, ends = _cut(*requests.box(row, len(chunk.strides)), chunk, base, domains)
        extents.append(touched)
        rows.append(np.full(len(touched), row, dtype=np.int64))
        first.append(starts)
        last.append(ends)
    itemsizes = index.numbering.itemsizes(requests.numbers)
    columns = [np.concatenate(column) for column in (extents, rows, first, last)]
    order = np.lexsort((columns[0], columns[1]))
    where, which, starts, ends = (column[order] for column in columns)
    nbytes = (ends - starts) * itemsizes[which]
    return Pieces(where, which, starts, ends, -(-nbytes // _ALIGNMENT) * _ALIGNMENT)


def _cut(
    offsets: Sequence[int], sizes: Sequence[int], chunk: Placed, position: int, domains: Domains
) -> tuple[IntArray, IntArray, IntArray]:
    """Extents that hold elements of a box, and the first and last element in each."""
    order = stride_order(chunk.strides)
    strides = [chunk.strides[d] for d in order]
    sizes = [sizes[d] for d in order]
    base = position + chunk.base
    base += sum(o * st for o, st in zip(offsets, chunk.strides, strict=True))
    final = base + sum((s - 1) * st for s, st in zip(sizes, strides, strict=True))
    low, high = domains.find_extents(np.array([base, final])).tolist()
    # Blocks start at whole elements, so no element lies in two extents.
    cuts = count_before(domains.starts[low + 1 : high + 1], base=base, sizes=sizes, strides=strides)
    bounds = np.concatenate(([0], cuts, [np.prod(sizes, dtype=np.int64)]))
    (some,) = np.nonzero(bounds[1:] > bounds[:-1])
    return low + some, bounds[:-1][some], bounds[1:][some]
