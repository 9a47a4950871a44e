"""Checksums of parts against zlib's checksum of the whole."""

from __future__ import annotations

import itertools
import zlib

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.crc import CrcPart, combine_crc, crc32, join_parts, merge_parts

checksums = st.integers(0, 0xFFFFFFFF)


def part(data: bytes, start: int, end: int) -> CrcPart:
    return CrcPart(start, end, zlib.crc32(data[start:end]))


@st.composite
def cut_data(draw: st.DrawFn) -> tuple[bytes, list[CrcPart]]:
    """Bytes, and parts of them: some that follow one another, some that overlap, some twice."""
    data = draw(st.binary(max_size=24))
    bounds = st.integers(0, len(data))
    cuts = sorted({0, len(data), *draw(st.lists(bounds, max_size=4))})
    parts = [part(data, a, b) for a, b in itertools.pairwise(cuts)]
    if draw(st.booleans()) and parts:
        parts.pop(draw(st.integers(0, len(parts) - 1)))
    for start, end in draw(st.lists(st.tuples(bounds, bounds), max_size=5)):
        parts.append(part(data, min(start, end), max(start, end)))
    return data, draw(st.permutations(parts + parts[:1]))


def connected(parts: list[CrcPart], *, start: int, end: int) -> bool:
    """Whether parts lead from one place to another, in either direction."""
    reached = {start}
    for _ in parts:
        reached |= {p.end for p in parts if p.start in reached}
        reached |= {p.start for p in parts if p.end in reached}
    return end in reached


def confirmed(parts: list[CrcPart], length: int) -> bool:
    """Whether all parts are on circles with the stored checksum: none is a bridge."""
    lines = [p for p in set(parts) if p.end > p.start]
    whole = CrcPart(0, length, -1)
    return bool(connected(lines, start=0, end=length)) and all(
        connected([p for p in [*lines, whole] if p is not line], start=0, end=place)
        for line in lines
        for place in (line.start, line.end)
    )


@hypothesis.given(st.binary(), st.binary())
def test_crc_of_two_strings_is_combined_from_both(first: bytes, second: bytes) -> None:
    """Combined checksums are those of zlib, empty strings included."""
    combined = combine_crc(crc32(first), crc32(second), len(second))
    assert combined == zlib.crc32(first + second)


@hypothesis.given(checksums, checksums, checksums, st.integers(0, 1 << 60), st.integers(0, 1 << 60))
def test_combining_is_associative(a: int, b: int, c: int, b_length: int, c_length: int) -> None:
    """Parts of any length, terabytes too, may be put together in any grouping."""
    left = combine_crc(combine_crc(a, b, b_length), c, c_length)
    assert left == combine_crc(a, combine_crc(b, c, c_length), b_length + c_length)


def test_crc_of_six_gibibytes_of_zeros() -> None:
    """Lengths beyond 32 bits count in full; the value is that of zlib over so many bytes."""
    crc, length = zlib.crc32(bytes(3 << 10)), 3 << 10
    while length < 6 << 30:
        crc, length = combine_crc(crc, crc, length), 2 * length
    assert (length, crc) == (6 << 30, 0xC64E0E30)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.complex128], ids=str)
def test_crc32_reads_the_memory_of_tensors(dtype: torch.dtype) -> None:
    """Bytes of a tensor count, whatever they stand for, without a copy."""
    tensor = torch.arange(100, dtype=torch.float32).to(dtype)
    memory = memoryview(tensor.view(torch.uint8).numpy())
    assert crc32(memory) == zlib.crc32(memory.tobytes())


@hypothesis.given(cut_data())
def test_the_whole_is_known_if_every_part_is_confirmed(cut: tuple[bytes, list[CrcPart]]) -> None:
    """Parts overlap in any way; a gap is not passed over, nor a part that no other speaks of."""
    data, parts = cut
    expected = zlib.crc32(data) if confirmed(parts, len(data)) else None
    assert join_parts(parts, len(data)) == (expected, None)


@hypothesis.given(cut_data(), st.data())
def test_any_wrong_part_is_found(cut: tuple[bytes, list[CrcPart]], draw: st.DataObject) -> None:
    """If all bytes count as verified, no part could have been wrong without being noticed."""
    data, parts = cut
    lines = sorted({p for p in parts if p.end > p.start})
    hypothesis.assume(lines and join_parts(lines, len(data)).crc is not None)
    line = draw.draw(st.sampled_from(lines))
    lines[lines.index(line)] = CrcPart(line.start, line.end, line.crc ^ draw.draw(checksums) or 1)
    hypothesis.assume(line not in lines)
    crc, conflict = join_parts(lines, len(data))
    assert conflict is not None or crc != zlib.crc32(data)


@hypothesis.given(cut_data())
def test_merging_parts_changes_nothing_but_their_number(cut: tuple[bytes, list[CrcPart]]) -> None:
    """Merged parts are in order, tell the truth, and cover the same bytes."""
    data, parts = cut
    merged = merge_parts(parts)
    assert merged == sorted(merged)
    assert all(part(data, p.start, p.end) == p for p in merged)
    assert {i for p in merged for i in range(p.start, p.end)} == {
        i for p in parts for i in range(p.start, p.end)
    }
    assert len(set(merged)) == len(merged) <= len(parts)


def test_merging_joins_all_that_follow_one_another() -> None:
    """A record read in a thousand pieces, in any order, is one part in the end."""
    data = bytes(i * i % 251 for i in range(4000))
    parts = [part(data, 4 * (i * 7 % 1000), 4 * (i * 7 % 1000) + 4) for i in range(1000)]
    assert merge_parts(parts) == [part(data, 0, 4000)]
    assert join_parts(parts, 4000) == (zlib.crc32(data), None)


@pytest.mark.parametrize(
    ("parts", "length", "found"),
    [
        ([], 0, True),
        ([(0, 0)], 0, True),
        ([], 4, False),
        ([(0, 4), (4, 6)], 8, False),
        ([(0, 4), (5, 8)], 8, False),
        ([(1, 8)], 8, False),
        ([(0, 9)], 8, False),
        ([(0, 0), (0, 8), (8, 8)], 8, True),
        ([(0, 5), (0, 3), (3, 8), (5, 8)], 8, True),
        ([(0, 5), (0, 3), (3, 8), (5, 7)], 8, False),
        ([(0, 8), (2, 5)], 8, False),
        ([(0, 8), (2, 8)], 8, False),
        ([(0, 8), (2, 5), (2, 5)], 8, False),
        ([(0, 6), (2, 6), (2, 8)], 8, True),
        ([(0, 4), (2, 6), (4, 8)], 8, False),
    ],
)
def test_every_byte_is_needed_and_confirmed(
    parts: list[tuple[int, int]], length: int, *, found: bool
) -> None:
    """Nothing missing at the start, in the middle, or at the end; nothing beyond; no loose end."""
    data = b"0123456789"
    crc, conflict = join_parts([part(data, a, b) for a, b in parts], length)
    assert conflict is None
    assert crc == (zlib.crc32(data[:length]) if found else None)


def test_a_wrong_part_changes_the_result() -> None:
    """One flipped bit in one part changes the result."""
    data = b"resharding"
    good, bad = part(data, 0, 4), part(b"resi", 0, 4)
    rest = part(data, 4, 10)
    assert join_parts([good, rest], 10).crc == zlib.crc32(data)
    assert join_parts([bad, rest], 10).crc not in (None, zlib.crc32(data))


@pytest.mark.parametrize("length", [10, 20])
@pytest.mark.parametrize(
    "others",
    [[(3, 7)], [(3, 5), (5, 7)], [(0, 3), (0, 7)], [(3, 9), (7, 9)]],
    ids=["same", "two", "before", "behind"],
)
def test_parts_that_contradict_each_other(others: list[tuple[int, int]], length: int) -> None:
    """Overlaps of any shape are compared, whether or not all of the record was read."""
    data = b"resharding"
    bad = part(b"resharxing", 3, 7)
    _, conflict = join_parts([bad, *(part(data, a, b) for a, b in others)], length)
    assert conflict is not None


def test_each_part_is_visited_once() -> None:
    """Two thousand forks are no 2**2000 ways to try, and no recursion two thousand calls deep."""
    data = bytes(i * i % 251 for i in range(2001))
    parts = [part(data, i, min(i + step, 2001)) for i in range(2000) for step in (1, 2)]
    assert join_parts(parts, 3000) == (None, None)
    assert join_parts(parts, 2001) == (zlib.crc32(data), None)
