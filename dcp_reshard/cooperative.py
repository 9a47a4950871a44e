"""Cooperative reading: storage serves every byte once per job, and ranks send each other the rest.

Two-phase collective I/O (see `domains`) for the parts of stored chunks that a load wants:

1. The ranks add up how much of each item they want. Items wanted whole and not large are read whole
   by one rank, containers and all: in the order of files and bytes, without probing them first.
2. Of the other chunks, which are large, each is probed by one rank, and all are told where its
   elements lie.
3. The ranks agree which blocks of large records anyone needs: a bitmap, reduced.
4. What is needed is cut into domains, equal in bytes. Each rank sends every owner its requests:
   boxes of chunks, as rows of integers.
5. In rounds of bounded memory every rank reads its part of its domain and sends the pieces
   (`exchange`).

Each record's checksum is compared by the rank that reads it, or put together from the blocks that
several ranks have read (`verdict`). If anything fails on one rank it fails on all, before the next
exchange (`lockstep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dcp_reshard.catalog import Catalog, StoredObject
from dcp_reshard.direct import RecordUse, WantedPart
from dcp_reshard.domains import (
    Domains,
    IntArray,
    count_before,
    plan_domains,
    plan_rounds,
    plan_tape,
)
from dcp_reshard.errors import StorageError
from dcp_reshard.exchange import Exchange, Want, sort_messages
from dcp_reshard.item_checks import check_object_size, check_payload, item_context
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.numbering import Numbering, number_items
from dcp_reshard.options import ReaderOptions
from dcp_reshard.pieces import Pieces, Placed, Requests, TapeIndex, find_pieces, stride_order
from dcp_reshard.probe import Item, ItemBytes, probe_items
from dcp_reshard.storage import CountingSource
from dcp_reshard.template import PayloadProber
from dcp_reshard.transfer import RecordKey
from dcp_reshard.windows import WindowReader

__all__ = ["CooperativeRead"]

# Shares of an item are counted in this; wanted by half or more, it may be read whole.
_WHOLE = 1000


@dataclass(slots=True, eq=False)
class CooperativeRead:
    """One rank's part in a read of all ranks. Not frozen: it collects its results."""

    source: CountingSource
    """Where the bytes come from."""

    catalog: Catalog
    """What the checkpoint holds; equal on all ranks."""

    options: ReaderOptions
    """How to read; equal on all ranks."""

    lockstep: Lockstep
    """The ranks."""

    on_progress: Callable[[int, int], None] | None
    """Called with bytes done and bytes in all."""

    objects: dict[str, bytes] = field(default_factory=dict)
    """Items of the objects wanted, by key."""

    records: dict[RecordKey, RecordUse] = field(default_factory=dict)
    """Records of which this rank has read something."""

    chunks_read_whole: list[str] = field(default_factory=list)
    """Keys of chunks of unknown form that this rank has read."""

    bytes_direct: int = 0
    """Bytes read straight into their destination: none."""

    bytes_sent: int = 0
    """Bytes sent to other ranks."""

    bytes_received: int = 0
    """Bytes received from other ranks."""

    rounds: int = 0
    """Rounds of reading and exchanging."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds in which windows were read, and pieces exchanged."""

    def run(self, parts: Sequence[WantedPart], objects: Sequence[StoredObject]) -> None:
        """Fill the destinations of all parts, and get the items of all objects; a collective call.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say.
            DtypeMismatchError: A cast overflowed.
            PeerFailedError: Another rank failed.
        """
        step = self.lockstep
        with step.phase("listing what it needs"):
            numbering = number_items(self.catalog)
            wants = [*_tensor_wants(parts, numbering), *_object_wants(objects, numbering)]
            shares = _shares(wants, numbering)
        step.reduce_sum(shares)
        index = self._place(numbering, shares)
        needed = np.ones(index.tape.num_blocks, dtype=np.uint8)
        if index.placed:
            with step.phase("finding the blocks that it needs"):
                _mark(needed, wants, index)
            step.reduce_max(needed)
        exchange = self._plan_exchange(wants, index, needed.view(np.bool_))
        exchange.run()
        self._take_results(exchange, len(parts))

    def _place(self, numbering: Numbering, shares: npt.NDArray[np.int32]) -> TapeIndex:
        """Lay out all that is needed; a collective call."""
        step = self.lockstep
        with step.phase("looking into large chunks"):
            (needed,) = np.nonzero(shares)
            self._check_files(needed, numbering)
            large = self._find_large(needed, shares, numbering)
            unknown = [n for n in large if numbering.find_chunk(n)[0].payloads is None]
            rows = self._probe(unknown[step.rank :: step.size], numbering)
        told = [rows]
        if unknown:
            told = step.exchange_rows([rows] * step.size, what="where large chunks lie")
        with step.phase("laying out what is needed"):
            placed = {n: _known(n, numbering) for n in large if n not in set(unknown)}
            placed |= {n: p for rows in told for n, p in _placed(rows, numbering)}
            return _make_index(needed, placed, numbering, block_bytes=self.options.block_bytes)
        raise AssertionError  # a phase that ends has returned

    @property
    def _slot_bytes(self) -> int:
        """What a rank reads in a slot: so little that even if all want all of it, there is room."""
        fair = self.options.memory_budget // (2 * self.lockstep.size + 2)
        return max(self.options.block_bytes, min(fair, self.options.max_request_bytes))

    def _find_large(
        self, needed: IntArray, shares: npt.NDArray[np.int32], numbering: Numbering
    ) -> list[int]:
        """Chunks to be read in blocks; the others are read whole."""
        limit = min(self.options.shared_item_bytes, self._slot_bytes)
        lengths = numbering.lengths[needed]
        whole = (lengths <= limit) & (2 * shares[needed] >= _WHOLE)
        whole |= (lengths <= self.options.whole_item_bytes) | (needed >= numbering.num_chunks)
        return [
            int(n)
            for n, at_once in zip(needed.tolist(), whole.tolist(), strict=True)
            if not at_once or (n < numbering.num_chunks and _is_known(n, numbering))
        ]

    def _check_files(self, needed: IntArray, numbering: Numbering) -> None:
        """Check that items lie inside their files. Each file is looked at by one rank."""
        files = numbering.files[needed]
        ends = numbering.starts[needed] + numbering.lengths[needed]
        for file in np.unique(files)[self.lockstep.rank :: self.lockstep.size].tolist():
            (inside,) = np.nonzero(files == file)
            last = int(needed[inside[np.argmax(ends[inside])]])
            item, fqn = numbering.item(last), numbering.fqn(last)
            size = self.source.size(item.file)
            if item.start + item.length > size:
                raise StorageError(
                    f"file {item.file!r}: has {size} bytes, but the metadata place `{fqn}` at "
                    f"bytes {item.start} to {item.start + item.length}; the file is cut",
                    fqn=fqn,
                    file=item.file,
                    start=item.start,
                    end=item.start + item.length,
                )

    def _probe(self, numbers: Sequence[int], numbering: Numbering) -> IntArray:
        """Rows that say where the elements of these chunks lie."""
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
            self.source,
            whole_bytes=0,
            max_bytes=self.options.max_request_bytes,
            threads=self.options.num_threads,
            on_item=on_item,
        )
        table = np.zeros((len(rows), 5 + numbering.num_dims), dtype=np.int64)
        for row, values in zip(table, rows.values(), strict=True):
            row[: len(values)] = values
        return table

    def _plan_exchange(
        self, wants: Sequence[Want], index: TapeIndex, needed: npt.NDArray[np.bool_]
    ) -> Exchange:
        """Domains, requests and rounds; a collective call."""
        step = self.lockstep
        with step.phase("planning its requests"):
            domains = plan_domains(
                index.tape, needed, num_ranks=step.size, slot_bytes=self._slot_bytes
            )
            num_dims = index.numbering.num_dims
            requests = Requests.make(
                [(w.number, w.offsets, tuple(w.dest.shape)) for w in wants], num_dims=num_dims
            )
            wanted = find_pieces(requests, index, domains)
            owners = domains.owners[wanted.extents]
            table = requests.rows()
            outgoing = [
                table[np.unique(wanted.requests[owners == rank])] for rank in range(step.size)
            ]
        tables = step.exchange_rows(outgoing, what="their requests")
        with step.phase("planning rounds"):
            asked = Requests.from_rows(np.concatenate(tables))
            sources = np.repeat(np.arange(step.size), [len(rows) for rows in tables])
            given = find_pieces(asked, index, domains)
            given = given.select(np.flatnonzero(domains.owners[given.extents] == step.rank))
            loads = np.stack([_loads(given, domains), _loads(wanted, domains)])
        step.reduce_max(loads)
        with step.phase("planning messages"):
            rounds = plan_rounds(
                domains.slot_bytes, loads[0], loads[1], budget=self.options.memory_budget
            )
            num_rounds = int(rounds.max(initial=-1)) + 1
            by_extent = rounds[domains.slots]
            mine = [
                np.flatnonzero((domains.owners == step.rank) & (by_extent == i))
                for i in range(num_rounds)
            ]
            incoming, going = (
                sort_messages(
                    pieces,
                    ranks,
                    by_extent[pieces.extents],
                    num_ranks=step.size,
                    num_rounds=num_rounds,
                    own=step.rank,
                )
                for pieces, ranks in ((wanted, owners), (given, sources[given.requests]))
            )
            reader = WindowReader(self.source, index, domains, self.options)
        return Exchange(step, reader, mine, wants, incoming, asked, going, self.on_progress)

    def _take_results(self, exchange: Exchange, num_parts: int) -> None:
        self.records = exchange.reader.records
        self.chunks_read_whole = exchange.reader.read_whole
        self.rounds = len(exchange.rounds)
        for index in range(self.rounds):
            self.bytes_sent += sum(exchange.outgoing.travelling(index))
            self.bytes_received += sum(exchange.incoming.travelling(index))
        self.seconds = {
            "read in rounds": exchange.read_seconds,
            "exchange": exchange.exchange_seconds,
        }
        for want in exchange.wants[num_parts:]:
            self.objects[want.fqn] = want.dest.numpy().tobytes()


def _tensor_wants(parts: Sequence[WantedPart], numbering: Numbering) -> list[Want]:
    return [
        Want(
            part.fqn,
            numbering.number(part.stored.fqn, part.chunk),
            part.offsets,
            part.stored.dtype,
            part.dest,
        )
        for part in parts
    ]


def _object_wants(objects: Sequence[StoredObject], numbering: Numbering) -> list[Want]:
    wants = []
    for stored in objects:
        number = numbering.number(stored.fqn)
        with item_context("object", stored.fqn, numbering.item(number)):
            check_object_size(stored.length)
        dest = torch.empty(stored.length, dtype=torch.uint8)
        wants.append(Want(stored.fqn, number, (0,), torch.uint8, dest))
    return wants


def _shares(wants: Sequence[Want], numbering: Numbering) -> npt.NDArray[np.int32]:
    """How much of each item this rank wants, in parts of `_WHOLE`, rounded up."""
    numbers = np.fromiter((w.number for w in wants), np.int64, len(wants))
    wanted = np.fromiter((w.dest.numel() for w in wants), np.int64, len(wants))
    shares = np.zeros(len(numbering.numels), dtype=np.int32)
    np.add.at(shares, numbers, -(-wanted * _WHOLE // numbering.numels[numbers]))
    return shares


def _loads(pieces: Pieces, domains: Domains) -> IntArray:
    """Bytes of the pieces of each slot."""
    loads = np.zeros(len(domains.slot_bytes), dtype=np.int64)
    np.add.at(loads, domains.slots[pieces.extents], pieces.nbytes)
    return loads


def _is_known(number: int, numbering: Numbering) -> bool:
    return numbering.find_chunk(number)[0].payloads is not None


def _known(number: int, numbering: Numbering) -> Placed:
    """Where the elements of a chunk are that need not be probed."""
    stored, chunk = numbering.find_chunk(number)
    assert stored.payloads is not None
    payload = stored.payloads[chunk]
    record = payload.record
    start = int(numbering.starts[number]) + record.start
    return Placed(start, record.length, record.crc, payload.start - record.start, payload.strides)


def _placed(rows: IntArray, numbering: Numbering) -> list[tuple[int, Placed]]:
    placed = []
    for number, start, length, crc, base, *strides in rows.tolist():
        ndim = numbering.ndim(number)
        placed.append((number, Placed(start, length, crc, base, tuple(strides[:ndim]))))
    return placed


def _make_index(
    needed: IntArray, placed: dict[int, Placed], numbering: Numbering, *, block_bytes: int
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


def _mark(marks: npt.NDArray[np.uint8], wants: Sequence[Want], index: TapeIndex) -> None:
    """Mark the blocks that hold elements this rank wants; those of items read whole stay marked."""
    tape = index.tape
    units = np.repeat(np.arange(len(tape.atomic)), np.diff(tape.first_blocks))
    marks[~tape.atomic[units]] = 0
    for want in wants:
        chunk = index.placed.get(want.number)
        if chunk is None:
            continue
        unit = int(index.units_of(np.array([want.number]))[0])
        order = stride_order(chunk.strides)
        base = int(tape.positions[unit]) + chunk.base
        base += sum(o * st for o, st in zip(want.offsets, chunk.strides, strict=True))
        starts = tape.block_starts(unit)
        counts = count_before(
            np.append(starts, starts[-1] + tape.block_bytes),
            base=base,
            sizes=[want.dest.shape[d] for d in order],
            strides=[chunk.strides[d] for d in order],
        )
        first = int(tape.first_blocks[unit])
        marks[first : first + len(starts)] |= (counts[1:] > counts[:-1]).astype(np.uint8)
