"""The read of one rank, as part of its job's: chosen, agreed on, and reported.

Alone, a rank reads for itself. Together with others it first agrees that all of them know what they
want; then they choose how to read (`choice`), and read: each for itself (`direct`), or each byte
once for all (`cooperative`). In both ways values that are not tensors come first, and are checked:
nothing is written before all ranks have agreed that theirs fit. Then the checksums are compared
(`verdict`); what is not as it was stored is read once more, in the same way, by all ranks that want
it. If any of that fails on one rank, all are told.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from dcp_reshard.catalog import Catalog
from dcp_reshard.choice import (
    Choice,
    choose_by_bytes,
    estimate_bytes,
    find_place,
)
from dcp_reshard.cooperative import CooperativeRead
from dcp_reshard.destination import Destination
from dcp_reshard.direct import DirectRead
from dcp_reshard.domains import IntArray
from dcp_reshard.errors import PeerFailedError
from dcp_reshard.lockstep import Facts, Lockstep
from dcp_reshard.options import ReaderOptions
from dcp_reshard.outcome import leave_note
from dcp_reshard.parts import Findings, ReadList, WantedPart
from dcp_reshard.report import Cooperation
from dcp_reshard.storage import CountingSource
from dcp_reshard.transfer import RecordKey
from dcp_reshard.verdict import Verdict, check_records

__all__ = ["JobRead", "ReadResult"]

logger = logging.getLogger(__name__)

_Phase = Callable[[str], AbstractContextManager[Facts]]
_Resolve = Callable[[], tuple[ReadList, ReadList]]


@dataclass(frozen=True, slots=True, eq=False)
class ReadResult:
    """What a rank has read."""

    found: Findings
    """Objects, records and counters."""

    cooperation: Cooperation
    """How the ranks have read."""

    verdict: Verdict
    """Whether the bytes are those that were stored."""

    verify_seconds: float
    """Time in which checksums were exchanged and compared."""


@dataclass(frozen=True, slots=True, eq=False)
class JobRead:
    """How a rank reads."""

    choice: Choice | None
    """How the ranks read; None if that depends on what all of them want."""

    source: CountingSource
    """Where the bytes come from."""

    catalog: Catalog
    """What the checkpoint holds."""

    options: ReaderOptions
    """How to read."""

    lockstep: Lockstep | None
    """The ranks that read together; None if this one reads alone."""

    on_progress: Callable[[int, int], None] | None
    """Called with bytes done and bytes in all."""

    check_values: Callable[[Mapping[str, bytes]], None]
    """Called when all values are at hand, with items of objects by key. May fail."""

    destination: Destination
    """Told before anything is written."""

    def run(self, resolve: _Resolve) -> ReadResult:
        """Read, and compare checksums; a collective call, unless this rank reads alone.

        Args:
            resolve: Tells what this rank wants, and what only it can want where that is: this it
                reads directly, however the ranks read the rest. May fail.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say, or has the wrong checksum.
            DtypeMismatchError: A cast overflowed.
            PeerFailedError: Another rank failed.
        """
        if self.lockstep is None:
            return self._run(resolve)
        try:
            with self.lockstep.held_interrupts():
                return self._run(resolve)
        except PeerFailedError as error:
            if error.__cause__ is not None:  # a collective call has failed
                leave_note()
            raise

    def _run(self, resolve: _Resolve) -> ReadResult:
        wanted: list[tuple[ReadList, ReadList]] = []

        def resolve_once() -> tuple[ReadList, ReadList]:
            wanted.append(resolve())
            return wanted[0]

        found, cooperation = self._read(resolve_once, self.choice)
        verdict, seconds = self._check(found)
        if verdict.damaged:
            # Storage may give wrong bytes once.
            select = partial(_select, catalog=self.catalog, records=verdict.damaged)
            again, more = self._read(
                lambda: (select(wanted[0][0]), select(wanted[0][1])),
                Choice(cooperation.mode, "records are damaged, or were read wrongly"),
            )
            second, more_seconds = self._check(again)
            found.rereads += len(verdict.errors)
            found.add(again)
            cooperation, seconds = cooperation.plus(more), seconds + more_seconds
            verdict = replace(
                second,
                verified=verdict.verified + second.verified,
                unverified=verdict.unverified + second.unverified,
            )
        if verdict.errors:
            raise next(iter(verdict.errors.values()))
        return ReadResult(found, cooperation, verdict, seconds)

    def _check(self, found: Findings) -> tuple[Verdict, float]:
        started = time.perf_counter()
        verdict = check_records(
            found.records, self.catalog, verify=self.options.verify, lockstep=self.lockstep
        )
        verdict = replace(verdict, verified=verdict.verified + len(found.compared))
        return verdict, time.perf_counter() - started

    def _read(self, resolve: _Resolve, choice: Choice | None) -> tuple[Findings, Cooperation]:
        if self.lockstep is None:
            return self._read_directly(_alone, resolve, "this rank reads alone")
        return self._read_together(self.lockstep, resolve, choice)

    def _read_together(
        self, lockstep: Lockstep, resolve: _Resolve, choice: Choice | None
    ) -> tuple[Findings, Cooperation]:
        if choice is not None and choice.mode == "direct":
            return self._read_directly(lockstep.phase, resolve, choice.reason)
        read = CooperativeRead(self.source, self.catalog, self.options, lockstep)
        with lockstep.phase("finding out what it wants") as told:
            wanted, own = resolve()
            survey = read.list_wants(told, wanted.tensors)
            if choice is None:
                percent, least = round(100 * self.options.auto_ratio), self.options.auto_bytes
                nbytes = estimate_bytes(wanted.tensors, (), self.options)
                told.own += (percent, least, nbytes, *find_place(self.source))
        survey = read.add_up(survey, told)
        if choice is None:
            choice = self._choose(told.all[:, len(survey.limits) :], survey.unique_bytes)
        if choice.mode == "direct":
            return self._read_directly(lockstep.phase, lambda: (wanted, own), choice.reason)
        apart = DirectRead(self.source, self.catalog, self.options, None)
        with self._closed_after_failure():
            with lockstep.phase("listing its values") as told:
                logger.info("reading in mode %r: %s", choice.mode, choice.reason)
                values = read.list_wants(told, wanted.values, wanted.objects)
            read.run(read.add_up(values, told))
            with lockstep.phase("checking the values that are not tensors"):
                read.take_results()
                apart.run(own.values, own.objects)
                self.check_values(read.found.objects | apart.found.objects)
            self.destination.touched = True
            read.run(survey, on_progress=self.on_progress)
            with lockstep.phase("closing its files") as told:
                read.take_results()
                apart.run(own.tensors)
                self.source.close()
                told.own = (self.source.bytes_read,)
        read.found.add(apart.found)
        return read.found, Cooperation(
            mode="cooperative",
            reason=choice.reason,
            bytes_sent=read.bytes_sent,
            bytes_received=read.bytes_received,
            rounds=read.rounds,
            buffer_bytes=read.buffer_bytes,
            imbalance=_imbalance(told.all[:, 0]),
        )

    def _choose(self, told: IntArray, unique_bytes: int) -> Choice:
        # Alike on all ranks, although their options may differ.
        percent, least = told[:, :2].max(axis=0).tolist()
        options = replace(self.options, auto_ratio=percent / 100, auto_bytes=least)
        return choose_by_bytes(told[:, 3:], told[:, 2], unique_bytes=unique_bytes, options=options)

    def _read_directly(
        self, phase: _Phase, resolve: _Resolve, reason: str
    ) -> tuple[Findings, Cooperation]:
        read = DirectRead(self.source, self.catalog, self.options, self.on_progress)
        with self._closed_after_failure():
            with phase("reading the values that are not tensors"):
                logger.info("reading in mode 'direct': %s", reason)
                wanted, own = resolve()
                read.run(wanted.values + own.values, wanted.objects + own.objects)
                self.check_values(read.found.objects)
            self.destination.touched = True
            with phase("reading its parts") as told:
                read.run(wanted.tensors + own.tensors)
                self.source.close()
                told.own = (self.source.bytes_read,)
        imbalance = _imbalance(told.all[:, 0])
        return read.found, Cooperation(mode="direct", reason=reason, imbalance=imbalance)

    @contextmanager
    def _closed_after_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            # A job that tries again must not run out of descriptors. That a file has changed
            # explains most other errors, so it may take their place.
            self.source.close()
            raise


@contextmanager
def _alone(_: str) -> Iterator[Facts]:
    """A phase of a rank that reads alone."""
    told = Facts()
    yield told
    told.all = np.array([told.own], dtype=np.int64)


def _select(wanted: ReadList, *, catalog: Catalog, records: Set[RecordKey]) -> ReadList:
    """The parts of chunks of which a record is among these."""
    starts: dict[str, list[int]] = {}
    for file, start in sorted(records):
        starts.setdefault(file, []).append(start)

    def is_among(part: WantedPart) -> bool:
        stored, chunk = part.stored, part.chunk
        start, end = int(stored.starts[chunk]), int(stored.starts[chunk] + stored.lengths[chunk])
        of_file = starts.get(catalog.files[int(stored.files[chunk])], [])
        following = bisect_left(of_file, start)
        return following < len(of_file) and of_file[following] < end

    return ReadList(
        [part for part in wanted.tensors if is_among(part)],
        [part for part in wanted.values if is_among(part)],
        [],
    )


def _imbalance(bytes_read: IntArray) -> float:
    mean = float(bytes_read.mean())
    return float(bytes_read.max()) / mean if mean else 1.0
