"""CRC-32 of parts, put together: what is the checksum of a record whose parts were read separately?

CRC-32 is linear over polynomials modulo P: the checksum of A followed by B is crc(A) * x**(8 *
len(B)) + crc(B). So parts that different requests or different ranks have read are verified
together, and no byte is read twice. The multiplication is that of zlib's `crc32_combine` (M.
Adler).

It can be undone, too: of the checksums of A, of B, and of A followed by B any two give the third.
So parts that overlap are held against each other wherever they make a circle: places in the record
are points, parts are lines between them, and the stored checksum is one more line, from the first
byte to the last. A part that is on no circle with that line is confirmed by nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

__all__ = ["CrcPart", "Joined", "combine_crc", "crc32", "join_parts", "merge_parts"]

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000
# x is a generator: its powers are all polynomials but 0.
_ORDER = 2**32 - 1


def _load_crc32() -> Callable[..., int]:
    # ISA-L computes the same checksum three times as fast as zlib.
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    crc: Any = isal_zlib.crc32
    return crc  # type: ignore[no-any-return]


crc32: Callable[..., int] = _load_crc32()
"""CRC-32 of a buffer, by ISA-L if the extra ``isal`` is installed, else by zlib."""


@dataclass(frozen=True, slots=True, order=True)
class CrcPart:
    """The checksum of bytes `start` to `end` of a record."""

    start: int
    """First byte."""

    end: int
    """One past the last byte."""

    crc: int
    """CRC-32 of these bytes."""


def _multiply(a: int, b: int) -> int:
    """Product of two polynomials modulo P, in the reflected bit order of CRC-32."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = (b >> 1) ^ _POLYNOMIAL if b & 1 else b >> 1
        bit >>= 1
    return product


def _powers() -> tuple[int, ...]:
    powers = [_ONE >> 1]
    while len(powers) < 32:
        powers.append(_multiply(powers[-1], powers[-1]))
    return tuple(powers)


_POWERS = _powers()
"""x ** (2 ** k) modulo P."""


def combine_crc(first: int, second: int, second_length: int) -> int:
    """CRC-32 of two byte strings, one after the other.

    Args:
        first: CRC-32 of the first.
        second: CRC-32 of the second.
        second_length: Bytes of the second.

    Example:
        >>> combine_crc(crc32(b"resh"), crc32(b"ard"), 3) == crc32(b"reshard")
        True
    """
    return _shift(first, second_length) ^ second


def _shift(crc: int, nbytes: int) -> int:
    """The part of a checksum that bytes have in one that ends `nbytes` later (or before)."""
    exponent = 8 * nbytes % _ORDER
    factor = _ONE
    power = 0
    while exponent:
        if exponent & 1:
            factor = _multiply(_POWERS[power], factor)
        exponent >>= 1
        power += 1
    return _multiply(factor, crc)


def merge_parts(parts: Iterable[CrcPart]) -> list[CrcPart]:
    """The same parts with neighbours joined and duplicates dropped, in the order of their bytes."""
    merged: list[CrcPart] = []
    for part in sorted(set(parts)):
        if merged and merged[-1].end == part.start:
            before = merged.pop()
            crc = combine_crc(before.crc, part.crc, part.end - part.start)
            part = CrcPart(before.start, part.end, crc)
        merged.append(part)
    return merged


class Joined(NamedTuple):
    """What parts of a record say together."""

    crc: int | None
    """The checksum of all of it; None if some part of it is missing, or is confirmed by nothing."""

    conflict: tuple[CrcPart, int] | None
    """A part, and the checksum that others give to its bytes, if they contradict each other."""


def join_parts(parts: Iterable[CrcPart], length: int) -> Joined:
    """The checksum of bytes 0 to `length`, if it follows from the parts and would find each wrong.

    Parts may repeat and overlap in any way.

    Example:
        >>> parts = [CrcPart(0, 4, crc32(b"resh")), CrcPart(4, 7, crc32(b"ard"))]
        >>> join_parts(parts, 7) == (crc32(b"reshard"), None), join_parts(parts, 8)
        (True, Joined(crc=None, conflict=None))
        >>> join_parts([*parts, CrcPart(2, 7, crc32(b"shard"))], 7)  # no other ends at byte 2
        Joined(crc=None, conflict=None)
        >>> wrong = CrcPart(0, 7, crc32(b"rezhard"))
        >>> join_parts([*parts, wrong], 7).conflict == (wrong, crc32(b"reshard"))
        True
    """
    lines = sorted({part for part in parts if part.end > part.start})
    crc = position = 0
    for line in lines:
        if line.start != position:
            return _join_overlapping(lines, length)
        crc = combine_crc(crc, line.crc, line.end - position) if crc else line.crc
        position = line.end
    # By far the most frequent case: one after the other.
    return Joined(crc if position == length else None, None)


def _join_overlapping(lines: list[CrcPart], length: int) -> Joined:
    walk = _Walk(lines, length)
    walk.run(0)
    all_found = length in walk.number and len(walk.number) == len(walk.lines_at)
    for line in lines:
        if line.start not in walk.number:
            walk.run(line.start)
    crc = walk.prefix[length] if all_found and not walk.has_bridge else None
    return Joined(crc, walk.conflict)


@dataclass(slots=True, eq=False)
class _Walk:
    """Depth first along the parts: what is the checksum up to each place, and what is on no circle?

    The latter by R. Tarjan: a line is on none if nothing behind it leads to before it.
    """

    lines: list[CrcPart]
    length: int
    lines_at: dict[int, list[int]] = field(default_factory=dict)
    number: dict[int, int] = field(default_factory=dict)
    """In which order places were reached."""
    lowest: dict[int, int] = field(default_factory=dict)
    """The first of these that a place is on a circle with."""
    prefix: dict[int, int] = field(default_factory=dict)
    """The checksum up to each place."""
    has_bridge: bool = False
    conflict: tuple[CrcPart, int] | None = None

    def __post_init__(self) -> None:
        self.lines_at[0] = []
        for index, line in enumerate(self.lines):
            self.lines_at.setdefault(line.start, []).append(index)
            self.lines_at.setdefault(line.end, []).append(index)

    def run(self, root: int) -> None:
        self._reach(root, 0)
        path = [(root, -1, iter(self.lines_at[root]))]
        while path:
            place, came_by, rest = path[-1]
            line = next((i for i in rest if i != came_by), None)
            if line is not None:
                path += self._follow(place, line)
                continue
            path.pop()
            if path:
                before = path[-1][0]
                self.lowest[before] = min(self.lowest[before], self.lowest[place])
                self.has_bridge |= self.lowest[place] > self.number[before]

    def _reach(self, place: int, prefix: int) -> None:
        self.number[place] = self.lowest[place] = len(self.number)
        self.prefix[place] = prefix
        if place == self.length:
            # The stored checksum leads from here to byte 0, which all of this began at.
            self.lowest[place] = 0

    def _follow(self, place: int, index: int) -> Iterator[tuple[int, int, Iterator[int]]]:
        line = self.lines[index]
        length = line.end - line.start
        other = line.end if place == line.start else line.start
        if other not in self.number:
            if place == line.start:
                prefix = _shift(self.prefix[place], length) ^ line.crc
            else:
                prefix = _shift(self.prefix[place] ^ line.crc, -length)
            self._reach(other, prefix)
            yield other, index, iter(self.lines_at[other])
            return
        self.lowest[place] = min(self.lowest[place], self.number[other])
        crc = self.prefix[line.end] ^ _shift(self.prefix[line.start], length)
        if crc != line.crc and self.conflict is None:
            self.conflict = line, crc
