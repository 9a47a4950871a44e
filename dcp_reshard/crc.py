"""CRC-32 of parts, put together: what is the checksum of a record whose parts were read separately?

CRC-32 is linear over polynomials modulo P: the checksum of A followed by B is crc(A) * x**(8 *
len(B)) + crc(B). So parts that different requests or different ranks have read are verified
together, and no byte is read twice. The multiplication is that of zlib's `crc32_combine` (M.
Adler).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["CrcPart", "combine_crc", "crc32", "find_crc", "merge_parts"]

_POLYNOMIAL = 0xEDB88320
_ONE = 0x80000000


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
    while len(powers) < 67:
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
    factor = _ONE
    power = 3
    while second_length:
        if second_length & 1:
            factor = _multiply(_POWERS[power], factor)
        second_length >>= 1
        power += 1
    return _multiply(factor, first) ^ second


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


def find_crc(parts: Iterable[CrcPart], length: int) -> int | None:
    """The checksum of bytes 0 to `length`, if some of the parts follow one another from end to end.

    Parts may repeat and overlap (replicas). Where two parts start at one byte, the longer is tried
    first.

    Example:
        >>> parts = [CrcPart(0, 4, crc32(b"resh")), CrcPart(4, 7, crc32(b"ard"))]
        >>> find_crc(parts, 7) == crc32(b"reshard"), find_crc(parts, 8)
        (True, None)
    """
    following: dict[int, list[CrcPart]] = {}
    for part in sorted(set(parts)):
        if part.end > part.start:
            following.setdefault(part.start, []).append(part)
    chain: list[CrcPart] = []
    position = 0
    # Depth first; a part that leads to no chain is popped for good, so each is visited once.
    while position != length:
        choices = following.get(position)
        if choices:
            chain.append(choices.pop())
        elif chain:
            chain.pop()
        else:
            return None
        position = chain[-1].end if chain else 0
    if not chain:
        return 0
    crc = chain[0].crc
    for part in chain[1:]:
        crc = combine_crc(crc, part.crc, part.end - part.start)
    return crc
