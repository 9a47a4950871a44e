"""The arithmetic of cooperative reading: tape, blocks, domains, slots, rounds, pieces."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import Catalog, StoredObject, StoredTensor
from dcp_reshard.domains import Domains, Tape, plan_domains, plan_rounds, plan_tape
from dcp_reshard.elements import count_before, split_range
from dcp_reshard.numbering import number_items
from dcp_reshard.pieces import Placed, PlacedTable, Requests, TapeIndex, find_pieces, stride_order
from dcp_reshard.placing import WHOLE, count_shares, mark_blocks
from tests.support.strategies import boxes, shapes

BLOCK = 64


def ints(*values: int) -> Any:
    return np.array(values, dtype=np.int64)


@st.composite
def units(draw: st.DrawFn) -> list[tuple[int, int, int, bool]]:
    """File, start, length and whether atomic, of parts of files that do not overlap."""
    parts: list[tuple[int, int, int, bool]] = []
    for file in range(draw(st.integers(1, 3))):
        position = 0
        for _ in range(draw(st.integers(0, 4))):
            position += draw(st.integers(0, 100))
            length = draw(st.integers(1, 400))
            parts.append((file, position, length, draw(st.booleans())))
            position += length
    return draw(st.permutations(parts))


def make_tape(parts: list[tuple[int, int, int, bool]]) -> tuple[Tape, Any]:
    files, starts, lengths = (ints(*(part[i] for part in parts)) for i in range(3))
    atomic = np.array([part[3] for part in parts], dtype=np.bool_)
    return plan_tape(files, starts, lengths, atomic, block_bytes=BLOCK)


@given(units())
def test_blocks_tile_the_units_in_the_order_of_files(parts: Any) -> None:
    """Each byte of each part is in one block, and a position of the tape leads back to it."""
    tape, numbers = make_tape(parts)
    starts, lengths = tape.blocks()
    assert tape.num_blocks == len(starts)
    assert (starts[1:] == starts[:-1] + lengths[:-1]).all()
    assert lengths.sum() == sum(part[2] for part in parts)
    places = list(zip(tape.files.tolist(), tape.starts.tolist(), strict=True))
    assert places == sorted(places)
    for (file, start, length, atomic), unit in zip(parts, numbers.tolist(), strict=True):
        assert (tape.files[unit], tape.starts[unit], tape.lengths[unit]) == (file, start, length)
        first, last = tape.first_blocks[unit : unit + 2].tolist()
        assert last - first == (1 if atomic else math.ceil(length / BLOCK))
        assert tape.find_unit(int(tape.positions[unit])) == unit
        assert tape.find_unit(int(tape.positions[unit]) + length - 1) == unit
        assert tape.block_starts(unit).tolist() == starts[first:last].tolist()


def test_equal_parts_of_files_are_one_unit() -> None:
    """Tensors that share a record cost one read of it."""
    tape, numbers = make_tape([(0, 10, 100, False), (0, 0, 5, True), (0, 10, 100, False)])
    assert numbers.tolist() == [1, 0, 1]
    assert tape.lengths.tolist() == [5, 100]


def test_blocks_grow_where_there_would_be_too_many() -> None:
    """A million blocks, more or less, whatever the size of the checkpoint."""
    tape, _ = plan_tape(
        ints(0, 0), ints(0, 1 << 40), ints(1 << 40, 7), np.zeros(2, dtype=np.bool_), block_bytes=64
    )
    assert tape.block_bytes == 1 << 20
    assert tape.num_blocks == (1 << 20) + 1


@given(units(), st.integers(1, 5), st.integers(1, 300), st.randoms(use_true_random=False))
def test_domains_share_out_the_blocks_needed(
    parts: Any, num_ranks: int, slot_bytes: int, random: Any
) -> None:
    """Every block needed is read by one rank in one slot; shares differ by a block at most."""
    tape, _ = make_tape(parts)
    needed = np.array([random.random() < 0.7 for _ in range(tape.num_blocks)], dtype=np.bool_)
    domains = plan_domains(tape, needed, num_ranks=num_ranks, slot_bytes=slot_bytes)
    starts, lengths = tape.blocks()
    wanted = {
        byte
        for start, length in zip(starts[needed].tolist(), lengths[needed].tolist(), strict=True)
        for byte in range(start, start + length)
    }
    read = [
        byte
        for start, length in zip(domains.starts.tolist(), domains.lengths.tolist(), strict=True)
        for byte in range(start, start + length)
    ]
    assert sorted(read) == sorted(wanted)
    assert (np.diff(domains.owners) >= 0).all()
    by_rank = np.bincount(domains.owners, weights=domains.lengths, minlength=num_ranks)
    longest = lengths[needed].max(initial=0)
    assert abs(by_rank - len(wanted) / num_ranks).max(initial=0) <= longest
    for rank, slot in set(zip(domains.owners.tolist(), domains.slots.tolist(), strict=True)):
        mine = (domains.owners == rank) & (domains.slots == slot)
        size = int(domains.lengths[mine].sum())
        assert size <= domains.slot_bytes[slot]
        assert size <= slot_bytes or len(set(starts) & set(range_of(domains, mine))) == 1


def range_of(domains: Domains, mine: Any) -> range:
    first = int(domains.starts[mine][0])
    return range(first, first + int(domains.lengths[mine].sum()))


@given(
    st.lists(st.tuples(*[st.integers(0, 50)] * 3), max_size=20),
    st.integers(1, 200),
    st.integers(1, 100),
)
def test_rounds_stay_in_the_budget(
    loads: list[tuple[int, int, int]], budget: int, limit: int
) -> None:
    """Slots of one round need no more than the budget, unless a round is a single slot."""
    read, sent, received = (ints(*(load[i] for load in loads)) for i in range(3))
    rounds = plan_rounds(read, sent, received, budget=budget, read_limit=limit)
    assert (np.diff(rounds) >= 0).all()
    assert sorted(set(rounds.tolist())) == list(range(int(rounds.max(initial=-1)) + 1))
    for index in set(rounds.tolist()):
        slots = np.flatnonzero(rounds == index)
        need = (2 * read + sent + received)[slots].sum()
        assert (need <= budget and read[slots].sum() <= limit) or len(slots) == 1
        if index:
            # No slot waits for a later round without need.
            before = np.flatnonzero(rounds == index - 1)
            grown = [*before, slots[0]]
            need = (2 * read + sent + received)[grown].sum()
            assert need > budget or read[grown].sum() > limit


@st.composite
def strided_boxes(draw: st.DrawFn) -> tuple[Box, tuple[int, ...], tuple[int, ...]]:
    """A box, the shape that it is in, and strides of that in any order of dims, with gaps."""
    shape = draw(shapes(max_dims=3, min_side=1, max_side=5))
    strides = [0] * len(shape)
    reach = 4
    for dim in draw(st.permutations(range(len(shape)))):
        strides[dim] = reach + 4 * draw(st.integers(0, 2))
        reach = strides[dim] * shape[dim]
    return draw(boxes(shape, min_size=1)), shape, tuple(strides)


def positions_of(box: Box, strides: tuple[int, ...]) -> list[int]:
    return [
        sum((o + i) * stride for o, i, stride in zip(box.offsets, index, strides, strict=True))
        for index in itertools.product(*(range(size) for size in box.sizes))
    ]


@given(strided_boxes(), st.integers(0, 50))
def test_counting_elements_before_a_place(strided: Any, base: int) -> None:
    """The count is that of the positions below, one by one."""
    box, _, strides = strided
    positions = [base + p for p in positions_of(Box((0,) * box.ndim, box.sizes), strides)]
    order = stride_order(strides)
    places = ints(*range(-3, max(positions) + 6))
    counts = count_before(
        places,
        base=base,
        sizes=[box.sizes[d] for d in order],
        strides=[strides[d] for d in order],
    )
    assert counts.tolist() == [sum(p < place for p in positions) for place in places.tolist()]


@given(shapes(max_dims=4, min_side=1, max_side=4), st.data())
def test_boxes_of_a_range_of_elements(shape: tuple[int, ...], data: Any) -> None:
    """Their elements, one box after the other, are those of the range in row-major order."""
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    last = data.draw(st.integers(first, numel))
    index = np.arange(numel).reshape(shape)
    found: list[int] = []
    for offsets, sizes in split_range(shape, first, last):
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        found += index[box].flatten().tolist()
    assert found == list(range(first, last))


def make_catalog(shape: tuple[int, ...], item_bytes: int) -> Catalog:
    """One tensor in one chunk, and one object behind it."""
    stored = StoredTensor(
        "w",
        shape,
        torch.float32,
        BoxArray.from_boxes([Box.full(shape)], ndim=len(shape)),
        np.zeros(1, dtype=np.int32),
        ints(16),
        ints(item_bytes),
    )
    return Catalog({"w": stored}, {"o": StoredObject("o", 0, 16 + item_bytes, 40)}, ("file",))


def table_of(placed: Placed) -> PlacedTable:
    """The table of item 0 alone."""
    row = ints(placed.start, placed.length, placed.crc, placed.base, *placed.strides)
    return PlacedTable(ints(0), row[None], ints(len(placed.strides)))


@given(strided_boxes(), st.data())
def test_pieces_of_a_box_are_found_where_it_was_marked(strided: Any, data: Any) -> None:
    """The pieces are all elements of the box, each in the extent that holds its bytes."""
    box, shape, strides = strided
    record = max(positions_of(Box.full(shape), strides)) + 4 + data.draw(st.integers(0, 90))
    base = 4 * data.draw(st.integers(0, 3))
    numbering = number_items(make_catalog(shape, 100 + base + record))
    tape, numbers = plan_tape(
        ints(0, 0),
        ints(50, 116 + base + record),
        ints(base + record, 40),
        np.array([False, True]),
        block_bytes=BLOCK,
    )
    placed = Placed(50, base + record, 0, base, strides)
    index = TapeIndex(numbering, tape, ints(0, 1), numbers, table_of(placed))
    requests = Requests.make([(0, box.offsets, box.sizes), (1, (0,), (40,))], num_dims=3)
    marks = mark_blocks(requests, index)
    domains = plan_domains(
        tape, marks.astype(np.bool_), num_ranks=data.draw(st.integers(1, 4)), slot_bytes=BLOCK
    )
    assert marks[-1]
    pieces = find_pieces(requests, index, domains)
    order = stride_order(strides)
    wanted = sorted(base + p for p in positions_of(box, strides))
    found: list[int] = []
    for extent, request, first, last in zip(
        *(c.tolist() for c in (pieces.extents, pieces.requests, pieces.first, pieces.last)),
        strict=True,
    ):
        start = int(domains.starts[extent])
        inside = range(start, start + int(domains.lengths[extent]))
        if request == 1:
            assert (first, last) == (0, 40)
            assert int(tape.positions[1]) in inside
            assert int(tape.positions[1]) + 39 in inside
            continue
        for offsets, sizes in split_range([box.sizes[d] for d in order], first, last):
            part = Box(
                tuple(box.offsets[d] + offsets[order.index(d)] for d in range(box.ndim)),
                tuple(sizes[order.index(d)] for d in range(box.ndim)),
            )
            own = sorted(base + p for p in positions_of(part, strides))
            assert own[0] in inside
            assert own[-1] + 3 in inside
            found += own
    assert found == wanted
    touched = {position // BLOCK for position in wanted}
    assert touched == set(np.flatnonzero(marks[:-1]).tolist())


def test_pieces_of_several_requests_are_in_the_order_of_requests() -> None:
    """Both sides of an exchange rely on it."""
    numbering = number_items(make_catalog((64,), 500))
    tape, numbers = plan_tape(ints(0), ints(100), ints(256), np.array([False]), block_bytes=BLOCK)
    placed = table_of(Placed(100, 256, 0, 0, (4,)))
    index = TapeIndex(numbering, tape, ints(0), numbers, placed)
    requests = Requests.make([(0, (20,), (30,)), (0, (0,), (64,)), (0, (20,), (1,))], num_dims=1)
    domains = plan_domains(tape, np.ones(4, dtype=np.bool_), num_ranks=4, slot_bytes=BLOCK)
    pieces = find_pieces(requests, index, domains)
    assert pieces.requests.tolist() == [0, 0, 0, 1, 1, 1, 1, 2]
    assert pieces.extents.tolist() == [1, 2, 3, 0, 1, 2, 3, 1]
    # In messages a piece starts at a multiple of 16 bytes.
    assert pieces.nbytes.tolist() == [48, 64, 16, 64, 64, 64, 64, 16]
    again = Requests.from_rows(requests.rows())
    assert find_pieces(again, index, domains).first.tolist() == pieces.first.tolist()


@pytest.mark.parametrize(
    ("sizes", "share"), [((1, 1), 1), ((50, 80), WHOLE // 2), ((100, 80), WHOLE)]
)
def test_shares_of_a_chunk_are_rounded_up(sizes: tuple[int, int], share: int) -> None:
    """One wanted element makes an item needed."""
    numbering = number_items(make_catalog((100, 80), 40000))
    requests = Requests.make([(0, (0, 0), sizes)], num_dims=2)
    assert count_shares(requests, numbering).tolist() == [share, 0]


def test_items_are_numbered_by_key() -> None:
    """Chunks of tensors in the order of their keys, then objects; the numbers lead back."""
    chunks = BoxArray.from_boxes([Box((0,), (2,)), Box((2,), (3,))], ndim=1)
    none = BoxArray.from_boxes([], ndim=1)
    two, zero = np.zeros(2, dtype=np.int32), np.zeros(0, dtype=np.int32)
    tensors = {
        "z": StoredTensor("z", (5,), torch.int16, chunks, two, ints(10, 20), ints(8, 9)),
        "empty": StoredTensor("empty", (0,), torch.int8, none, zero, ints(), ints()),
        "a": StoredTensor("a", (5,), torch.float64, chunks, two, ints(30, 40), ints(6, 7)),
    }
    numbering = number_items(Catalog(tensors, {"o": StoredObject("o", 0, 50, 5)}, ("file",)))
    assert [numbering.number("a", 1), numbering.number("z"), numbering.number("o")] == [1, 2, 4]
    assert [numbering.fqn(n) for n in range(5)] == ["a", "a", "z", "z", "o"]
    assert numbering.find_chunk(3) == (tensors["z"], 1)
    assert numbering.find_object(3) is None
    assert numbering.numels.tolist() == [2, 3, 2, 3, 5]
    assert numbering.itemsizes(ints(0, 1, 2, 3, 4)).tolist() == [8, 8, 2, 2, 1]
    assert (numbering.item(3).start, numbering.item(3).length) == (20, 9)
