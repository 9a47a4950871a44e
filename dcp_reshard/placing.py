"""Where is what a job needs? The items that any rank wants, laid out on the tape.

1. Items of which half or more is wanted, and which are not large, are to be read whole by one
   rank, containers and all.
2. Each of the other chunks is probed by one rank, and all are told where its elements lie. Those
   of a form that only torch can read are to be read whole, whatever their size.
3. `mark_blocks` says which blocks of large records a rank wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dcp_reshard.domains import IntArray, plan_tape
from dcp_reshard.elements import count_before
from dcp_reshard.errors import CheckpointFormatError, StorageError
from dcp_reshard.item_checks import check_payload, item_context
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.numbering import Numbering
from dcp_reshard.options import ReaderOptions
from dcp_reshard.payload import Payload
from dcp_reshard.pieces import PlacedTable, Requests, TapeIndex, stride_order
from dcp_reshard.probe import Item, ItemBytes, probe_items
from dcp_reshard.storage import CountingSource
from dcp_reshard.template import PayloadProber

__all__ = [
    "WHOLE",
    "Limits",
    "Shares",
    "count_shares",
    "find_items",
    "make_index",
    "mark_blocks",
]

Shares = npt.NDArray[np.int32]
"""How much of each item is wanted, in parts of `WHOLE`; summed over ranks, replicas count again."""

WHOLE = 1000


def count_shares(requests: Requests, numbering: Numbering) -> Shares:
    """How much of each item this rank wants, rounded up."""
    shares = np.zeros(len(numbering.numels), dtype=np.int32)
    numbers = requests.numbers
    np.add.at(shares, numbers, -(-requests.numels * WHOLE // numbering.numels[numbers]))
    return shares


class Limits(NamedTuple):
    """Numbers that all ranks must use alike: the least of what their options say."""

    block_bytes: int
    """Bytes of a block."""

    shared_item_bytes: int
    """Chunks up to this size are read whole, if half of them is wanted."""

    whole_item_bytes: int
    """Chunks up to this size are read whole."""

    memory_budget: int
    """Bytes of buffers."""

    round_bytes: int
    """Bytes that a rank reads in a round."""

    @classmethod
    def from_options(cls, options: ReaderOptions) -> Limits:
        """What this rank's options say."""
        return cls(
            options.block_bytes,
            options.shared_item_bytes,
            options.whole_item_bytes,
            options.memory_budget,
            options.max_request_bytes,
        )

    def slot_bytes(self, num_ranks: int) -> int:
        """What a rank reads at once: so little that there is room even if all want all of it."""
        fair = self.memory_budget // (2 * num_ranks + 2)
        return max(self.block_bytes, min(fair, self.round_bytes))


def find_items(
    shares: Shares,
    numbering: Numbering,
    *,
    source: CountingSource,
    options: ReaderOptions,
    limits: Limits,
    lockstep: Lockstep,
) -> tuple[IntArray, list[IntArray]]:
    """Find out where all that is needed lies; a collective call.

    Args:
        shares: How much of each item all ranks want.
        numbering: Numbers of the items.
        source: Where the bytes come from.
        options: How this rank reads.
        limits: What all ranks do alike.
        lockstep: The ranks.

    Returns:
        Numbers of the items that anyone needs, and tables with a row for each of those that are to
        be read in blocks, as `PlacedTable.from_rows` takes them.

    Raises:
        StorageError: Bytes could not be read, or a file is cut.
        CheckpointFormatError: A chunk is not what the metadata say.
        PeerFailedError: Another rank failed.
    """
    with lockstep.phase("looking into large chunks") as told:
        (needed,) = np.nonzero(shares)
        _check_files(needed, numbering, source, lockstep)
        known, unknown = _find_large(needed, shares, numbering, limits, lockstep.size)
        found = [_known_row(number, numbering) for number in known.tolist()]
        mine = unknown[lockstep.rank :: lockstep.size].tolist()
        rows = _table(_probe(mine, numbering, source, options), numbering)
        outgoing = [rows] * lockstep.size
        told.counts = [len(rows) for rows in outgoing]
        tables = [_table(found, numbering)]
    if len(unknown):
        tables += lockstep.exchange_rows(outgoing, told, what="where large chunks lie")
    return needed, tables


def _find_large(
    needed: IntArray,
    shares: Shares,
    numbering: Numbering,
    limits: Limits,
    num_ranks: int,
) -> tuple[IntArray, IntArray]:
    """Chunks to be read in blocks: those whose elements need not be looked for, and others."""
    chunks = needed[needed < numbering.num_chunks]
    has_payloads = np.array([t.payloads is not None for t in numbering.tensors] + [False])
    # Where the elements are known without a container, there is nothing to be read with them.
    known = has_payloads[numbering.tensor_indices(chunks)]
    limit = min(limits.shared_item_bytes, limits.slot_bytes(num_ranks))
    lengths = numbering.lengths[chunks]
    whole = (lengths <= limit) & (2 * shares[chunks] >= WHOLE)
    whole |= lengths <= limits.whole_item_bytes
    return chunks[known], chunks[~known & ~whole]


def _check_files(
    needed: IntArray, numbering: Numbering, source: CountingSource, lockstep: Lockstep
) -> None:
    """Check that items lie inside their files. Each file is looked at by one rank."""
    files = numbering.files[needed]
    ends = numbering.starts[needed] + numbering.lengths[needed]
    last = np.zeros(len(numbering.catalog.files), dtype=np.int64)
    np.maximum.at(last, files, ends)
    for file in np.flatnonzero(last)[lockstep.rank :: lockstep.size].tolist():
        name = numbering.catalog.files[file]
        size = source.size(name)
        if last[file] > size:
            item_number = int(needed[(files == file) & (ends == last[file])][0])
            item, fqn = numbering.item(item_number), numbering.fqn(item_number)
            raise StorageError(
                f"file {name!r}: has {size} bytes, but the metadata place `{fqn}` at bytes "
                f"{item.start} to {item.start + item.length}; the file is cut",
                fqn=fqn,
                file=name,
                start=item.start,
                end=item.start + item.length,
            )


def _probe(
    numbers: Sequence[int], numbering: Numbering, source: CountingSource, options: ReaderOptions
) -> list[tuple[int, ...]]:
    """Where the elements of these chunks lie; nothing of one of unknown form."""
    rows: list[tuple[int, ...]] = []
    by_item: dict[Item, int] = {numbering.item(n): n for n in numbers}
    prober = PayloadProber()

    def take(item: ItemBytes) -> None:
        number = by_item[item.item]
        stored, chunk = numbering.find_chunk(number)
        with item_context("tensor", stored.fqn, item.item):
            payload = prober.probe(item)
            if payload is None:
                return
            check_payload(payload, tuple(stored.chunks.sizes[chunk].tolist()), stored.dtype)
        rows.append(_row(number, payload, numbering))

    def on_item(item: ItemBytes) -> None:
        try:
            take(item)
        except CheckpointFormatError:
            # Storage may give wrong bytes once.
            again = item.read_again()
            if again is None:
                raise
            take(again)

    probe_items(
        by_item,
        source,
        whole_bytes=0,
        max_bytes=options.max_request_bytes,
        threads=options.num_threads,
        on_item=on_item,
    )
    return rows


def _known_row(number: int, numbering: Numbering) -> tuple[int, ...]:
    stored, chunk = numbering.find_chunk(number)
    assert stored.payloads is not None
    return _row(number, stored.payloads[chunk], numbering)


def _row(number: int, payload: Payload, numbering: Numbering) -> tuple[int, ...]:
    record = payload.record
    start = int(numbering.starts[number]) + record.start
    base = payload.start - record.start
    return (number, start, record.length, record.crc, base, *payload.strides)


def _table(rows: Sequence[tuple[int, ...]], numbering: Numbering) -> IntArray:
    table = np.zeros((len(rows), 5 + numbering.most_dims), dtype=np.int64)
    for values, row in zip(table, rows, strict=True):
        values[: len(row)] = row
    return table


def make_index(
    needed: IntArray, rows: IntArray, numbering: Numbering, *, block_bytes: int
) -> TapeIndex:
    """Lay out what `find_items` has found."""
    placed = PlacedTable.from_rows(rows, numbering)
    starts, lengths = numbering.starts[needed], numbering.lengths[needed]
    atomic = np.ones(len(needed), dtype=np.bool_)
    where = np.searchsorted(needed, placed.numbers)
    starts[where], lengths[where], atomic[where] = placed.rows[:, 0], placed.rows[:, 1], False
    tape, units = plan_tape(
        numbering.files[needed], starts, lengths, atomic, block_bytes=block_bytes
    )
    return TapeIndex(numbering, tape, needed, units, placed)


def mark_blocks(requests: Requests, index: TapeIndex) -> npt.NDArray[np.uint8]:
    """Which blocks hold elements that this rank wants; those of items read whole are all marked."""
    tape = index.tape
    marks = np.repeat(tape.atomic, np.diff(tape.first_blocks)).astype(np.uint8)
    units = index.units_of(requests.numbers)
    for row in np.flatnonzero(~tape.atomic[units]).tolist():
        chunk = index.place(int(requests.numbers[row]))
        offsets, sizes = requests.box(row, len(chunk.strides))
        unit = int(units[row])
        order = stride_order(chunk.strides)
        base = int(tape.positions[unit]) + chunk.base
        base += sum(o * st for o, st in zip(offsets, chunk.strides, strict=True))
        starts = tape.block_starts(unit)
        counts = count_before(
            np.append(starts, starts[-1] + tape.block_bytes),
            base=base,
            sizes=[sizes[d] for d in order],
            strides=[chunk.strides[d] for d in order],
        )
        first = int(tape.first_blocks[unit])
        marks[first : first + len(starts)] |= (counts[1:] > counts[:-1]).astype(np.uint8)
    return marks
