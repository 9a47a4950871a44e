"""Where is what a job needs? The items that any rank wants, laid out on the tape.

1. Items of which half or more is wanted, and which are not large, are to be read whole by one
   rank, containers and all.
2. Each of the other chunks is probed by one rank, and all are told where its elements lie. Those
   of a form that only torch can read are to be read whole, whatever their size.
3. `mark_blocks` says which blocks of large records a rank wants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dcp_reshard.domains import IntArray, plan_tape
from dcp_reshard.elements import count_before
from dcp_reshard.errors import StorageError
from dcp_reshard.item_checks import check_payload, item_context
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.numbering import Numbering
from dcp_reshard.options import ReaderOptions
from dcp_reshard.pieces import Placed, Requests, TapeIndex, stride_order
from dcp_reshard.probe import Item, ItemBytes, probe_items
from dcp_reshard.storage import CountingSource
from dcp_reshard.template import PayloadProber

__all__ = ["WHOLE", "Shares", "count_shares", "mark_blocks", "place_items", "slot_bytes"]

Shares = npt.NDArray[np.int32]
"""How much of each item is wanted, in parts of `WHOLE`; summed over ranks, replicas count again."""

WHOLE = 1000


def count_shares(requests: Requests, numbering: Numbering) -> Shares:
    """How much of each item this rank wants, rounded up."""
    shares = np.zeros(len(numbering.numels), dtype=np.int32)
    numbers = requests.numbers
    np.add.at(shares, numbers, -(-requests.numels * WHOLE // numbering.numels[numbers]))
    return shares


def slot_bytes(options: ReaderOptions, num_ranks: int) -> int:
    """What a rank reads at once: so little that there is room even if all ranks want all of it."""
    fair = options.memory_budget // (2 * num_ranks + 2)
    return max(options.block_bytes, min(fair, options.max_request_bytes))


def place_items(
    shares: Shares,
    numbering: Numbering,
    *,
    source: CountingSource,
    options: ReaderOptions,
    lockstep: Lockstep,
) -> TapeIndex:
    """Lay out all that is needed; a collective call.

    Args:
        shares: How much of each item all ranks want.
        numbering: Numbers of the items.
        source: Where the bytes come from.
        options: How to read.
        lockstep: The ranks.

    Raises:
        StorageError: Bytes could not be read, or a file is cut.
        CheckpointFormatError: A chunk is not what the metadata say.
        PeerFailedError: Another rank failed.
    """
    with lockstep.phase("looking into large chunks") as told:
        (needed,) = np.nonzero(shares)
        _check_files(needed, numbering, source, lockstep)
        large = _find_large(needed, shares, numbering, options, lockstep.size)
        placed = {n: known for n in large if (known := _known(n, numbering)) is not None}
        unknown = [n for n in large if n not in placed]
        rows = _probe(unknown[lockstep.rank :: lockstep.size], numbering, source, options)
        told.counts = [len(rows)] * lockstep.size
    if unknown:
        outgoing = [rows] * lockstep.size
        tables = lockstep.exchange_rows(outgoing, told, what="where large chunks lie")
        placed |= _placed(np.concatenate(tables), numbering)
    return _make_index(needed, placed, numbering, block_bytes=options.block_bytes)


def _find_large(
    needed: IntArray,
    shares: Shares,
    numbering: Numbering,
    options: ReaderOptions,
    num_ranks: int,
) -> list[int]:
    """Chunks to be read in blocks; the other items are read whole."""
    limit = min(options.shared_item_bytes, slot_bytes(options, num_ranks))
    lengths = numbering.lengths[needed]
    whole = (lengths <= limit) & (2 * shares[needed] >= WHOLE)
    whole |= lengths <= options.whole_item_bytes
    # Where the elements are known without a container, there is nothing to be read with them.
    known = np.array([t.payloads is not None for t in numbering.tensors] + [False])
    whole &= ~known[numbering.tensor_indices(needed)]
    large: list[int] = needed[~whole & (needed < numbering.num_chunks)].tolist()
    return large


def _check_files(
    needed: IntArray, numbering: Numbering, source: CountingSource, lockstep: Lockstep
) -> None:
    """Check that items lie inside their files. Each file is looked at by one rank."""
    files = numbering.files[needed]
    ends = numbering.starts[needed] + numbering.lengths[needed]
    for file in np.unique(files)[lockstep.rank :: lockstep.size].tolist():
        (inside,) = np.nonzero(files == file)
        last = int(needed[inside[np.argmax(ends[inside])]])
        item, fqn = numbering.item(last), numbering.fqn(last)
        size = source.size(item.file)
        if item.start + item.length > size:
            raise StorageError(
                f"file {item.file!r}: has {size} bytes, but the metadata place `{fqn}` at bytes "
                f"{item.start} to {item.start + item.length}; the file is cut",
                fqn=fqn,
                file=item.file,
                start=item.start,
                end=item.start + item.length,
            )


def _probe(
    numbers: Sequence[int], numbering: Numbering, source: CountingSource, options: ReaderOptions
) -> IntArray:
    """Rows that say where the elements of these chunks lie; none for one of unknown form."""
    rows: dict[int, Sequence[int]] = {}
    by_item: dict[Item, int] = {numbering.item(n): n for n in numbers}
    prober = PayloadProber()

    def on_item(item: ItemBytes) -> None:
        number = by_item[item.item]
        stored, chunk = numbering.find_chunk(number)
        with item_context("tensor", stored.fqn, item.item):
            payload = prober.probe(item)
            if payload is None:
                return
            check_payload(payload, tuple(stored.chunks.sizes[chunk].tolist()), stored.dtype)
        record = payload.record
        start = item.item.start + record.start
        base = payload.start - record.start
        rows[number] = (number, start, record.length, record.crc, base, *payload.strides)

    probe_items(
        by_item,
        source,
        whole_bytes=0,
        max_bytes=options.max_request_bytes,
        threads=options.num_threads,
        on_item=on_item,
    )
    table = np.zeros((len(rows), 5 + numbering.num_dims), dtype=np.int64)
    for row, values in zip(table, rows.values(), strict=True):
        row[: len(values)] = values
    return table


def _placed(rows: IntArray, numbering: Numbering) -> dict[int, Placed]:
    """What the rows of `_probe` say."""
    placed: dict[int, Placed] = {}
    for number, start, length, crc, base, *strides in rows.tolist():
        ndim = numbering.ndim(number)
        placed[number] = Placed(start, length, crc, base, tuple(strides[:ndim]))
    return placed


def _known(number: int, numbering: Numbering) -> Placed | None:
    """Where the elements of a chunk lie, if it need not be probed."""
    stored, chunk = numbering.find_chunk(number)
    if stored.payloads is None:
        return None
    payload = stored.payloads[chunk]
    record = payload.record
    start = int(numbering.starts[number]) + record.start
    return Placed(start, record.length, record.crc, payload.start - record.start, payload.strides)


def _make_index(
    needed: IntArray, placed: Mapping[int, Placed], numbering: Numbering, *, block_bytes: int
) -> TapeIndex:
    starts, lengths = numbering.starts[needed], numbering.lengths[needed]
    atomic = np.ones(len(needed), dtype=np.bool_)
    for row in np.flatnonzero(np.isin(needed, list(placed))).tolist():
        chunk = placed[int(needed[row])]
        starts[row], lengths[row], atomic[row] = chunk.start, chunk.length, False
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
        chunk = index.placed[int(requests.numbers[row])]
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
