"""Cooperative reading: storage serves every byte once per job, and ranks send each other the rest.

Two-phase collective I/O (see `domains`) for the parts of stored chunks that a load wants:

1. The ranks add up how much of each item they want, and lay out what anyone needs (`placing`):
   small items whole, large ones in blocks.
2. They agree which blocks of large records anyone needs: a bitmap, reduced.
3. What is needed is cut into domains, equal in bytes. Each rank sends every owner its requests:
   boxes of chunks, as rows of integers.
4. In rounds of bounded memory every rank reads its part of its domain and sends the pieces
   (`exchange`).

Each record's checksum is compared by the rank that reads it, or put together from the blocks that
several ranks have read (`verdict`). If anything fails on one rank it fails on all, before the next
exchange (`lockstep`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from dcp_reshard.catalog import Catalog, StoredObject
from dcp_reshard.domains import Domains, IntArray, plan_domains, plan_rounds
from dcp_reshard.exchange import Exchange, Want
from dcp_reshard.item_checks import check_object_size, item_context
from dcp_reshard.lockstep import Facts, Lockstep
from dcp_reshard.messages import sort_messages
from dcp_reshard.numbering import Numbering, number_items
from dcp_reshard.options import ReaderOptions
from dcp_reshard.parts import Findings, WantedPart
from dcp_reshard.pieces import Pieces, Requests, TapeIndex, find_pieces
from dcp_reshard.placing import (
    WHOLE,
    Limits,
    count_shares,
    find_items,
    make_index,
    mark_blocks,
)
from dcp_reshard.storage import CountingSource
from dcp_reshard.window_reader import WindowReader

__all__ = ["CooperativeRead", "Survey"]

_LEAST_ROUNDS = 8
_LEAST_ROUND_BYTES = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class Survey:
    """What all ranks want."""

    wants: Sequence[Want]
    """What this rank wants, objects last."""

    requests: Requests
    """The same, as columns."""

    numbering: Numbering
    """Numbers of the items."""

    shares: npt.NDArray[np.int32]
    """How much of each item all ranks want together."""

    limits: Limits
    """What all ranks do alike, although their options may differ."""

    @property
    def unique_bytes(self) -> int:
        """Bytes that anyone wants, each counted once; an upper bound where replicas want parts."""
        shares = np.minimum(self.shares, WHOLE).astype(np.float64) / WHOLE
        return int(np.sum(shares * self.numbering.lengths))


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

    found: Findings = field(default_factory=Findings)
    """What was read, in all runs whose results were taken."""

    bytes_sent: int = 0
    """Bytes sent to other ranks."""

    bytes_received: int = 0
    """Bytes received from other ranks."""

    rounds: int = 0
    """Rounds of reading and exchanging."""

    buffer_bytes: int = 0
    """Bytes of the buffers that windows were read into, and pieces sent from and received in."""

    _numbering: Numbering | None = field(default=None, init=False)
    _exchange: Exchange | None = field(default=None, init=False)

    def list_wants(
        self, told: Facts, parts: Sequence[WantedPart], objects: Sequence[StoredObject] = ()
    ) -> Survey:
        """What this rank wants; to be added up over all ranks after the phase (`add_up`).

        Raises:
            CheckpointFormatError: An object is unreasonably large.
        """
        told.own = limits = Limits.from_options(self.options)
        numbering = self._numbering = self._numbering or number_items(self.catalog)
        wants = [*_tensor_wants(parts, numbering), *_object_wants(objects, numbering)]
        requests = Requests.make(
            [(w.number, w.offsets, tuple(w.dest.shape)) for w in wants],
            num_dims=numbering.most_dims,
        )
        told.array = shares = count_shares(requests, numbering)
        return Survey(wants, requests, numbering, shares, limits)

    def add_up(self, survey: Survey, told: Facts) -> Survey:
        """What all ranks want; a collective call.

        Args:
            survey: What this rank has listed.
            told: What all ranks have told each other at the end of that phase.
        """
        self.lockstep.reduce_sum(told)
        limits = told.all[:, : len(survey.limits)].min(axis=0)
        return replace(survey, limits=Limits(*limits.tolist()))

    def run(self, survey: Survey, *, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Fill the destinations of all parts, and get the items of all objects; a collective call.

        What was read is in `found`, and in the counters, once `take_results` has been called.

        Args:
            survey: What all ranks want.
            on_progress: Called with bytes done and bytes in all.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say.
            DtypeMismatchError: A cast overflowed.
            PeerFailedError: Another rank failed.
        """
        self._exchange = None
        if not survey.shares.any():  # on all ranks alike
            return
        step, numbering, limits = self.lockstep, survey.numbering, survey.limits
        needed, tables = find_items(
            survey.shares,
            numbering,
            source=self.source,
            options=self.options,
            limits=limits,
            lockstep=step,
        )
        with step.phase("finding the blocks that it needs") as told:
            rows = np.concatenate(tables)
            index = make_index(needed, rows, numbering, block_bytes=limits.block_bytes)
            told.array = marks = mark_blocks(survey.requests, index)
        if len(index.placed):
            step.reduce_max(told)
        self._exchange = self._plan_exchange(survey, index, marks.view(np.bool_))
        self._exchange.run(on_progress)

    def _plan_exchange(
        self, survey: Survey, index: TapeIndex, needed: npt.NDArray[np.bool_]
    ) -> Exchange:
        """Domains, requests and rounds; a collective call."""
        step = self.lockstep
        with step.phase("planning its requests") as told:
            # Several rounds even for little, so that reading and exchanging overlap.
            part = int(index.tape.lengths.sum()) // (_LEAST_ROUNDS * step.size)
            most = min(max(part, _LEAST_ROUND_BYTES), survey.limits.round_bytes)
            slot = min(survey.limits.slot_bytes(step.size), most)
            domains = plan_domains(index.tape, needed, num_ranks=step.size, slot_bytes=slot)
            wanted = find_pieces(survey.requests, index, domains)
            owners = domains.owners[wanted.extents]
            table = survey.requests.rows()
            outgoing = [
                table[np.unique(wanted.requests[owners == rank])] for rank in range(step.size)
            ]
            told.counts = [len(rows) for rows in outgoing]
        tables = step.exchange_rows(outgoing, told, what="their requests")
        with step.phase("planning rounds") as told:
            asked = Requests.from_rows(np.concatenate(tables))
            sources = np.repeat(np.arange(step.size), [len(rows) for rows in tables])
            given = find_pieces(asked, index, domains)
            given = given.select(np.flatnonzero(domains.owners[given.extents] == step.rank))
            told.array = loads = np.stack([_loads(given, domains), _loads(wanted, domains)])
        step.reduce_max(told)
        with step.phase("planning messages"):
            rounds = plan_rounds(
                domains.slot_bytes,
                loads[0],
                loads[1],
                budget=survey.limits.memory_budget,
                read_limit=most,
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
        return Exchange(step, reader, mine, survey.wants, incoming, asked, going)

    def take_results(self) -> None:
        """Add to the fields what the latest `run` has read and counted."""
        exchange = self._exchange
        if exchange is None:
            return
        rounds = range(len(exchange.rounds))
        self.rounds += len(rounds)
        self.buffer_bytes = max(self.buffer_bytes, exchange.buffer_bytes)
        self.bytes_sent += sum(sum(exchange.outgoing.travelling(i)) for i in rounds)
        self.bytes_received += sum(sum(exchange.incoming.travelling(i)) for i in rounds)
        found = exchange.reader.found
        found.seconds = {
            "read in rounds": exchange.read_seconds,
            "exchange": exchange.exchange_seconds,
        }
        for want in exchange.wants:
            if want.number >= exchange.reader.index.numbering.num_chunks:
                found.objects[want.fqn] = want.dest.numpy().tobytes()
        self.found.add(found)


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


def _loads(pieces: Pieces, domains: Domains) -> IntArray:
    """Bytes of the pieces of each slot."""
    loads = np.zeros(len(domains.slot_bytes), dtype=np.int64)
    np.add.at(loads, domains.slots[pieces.extents], pieces.nbytes)
    return loads
