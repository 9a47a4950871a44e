"""The read of one rank, as part of its job's: chosen, agreed on, and reported.

Alone, a rank reads for itself. Together with others it first agrees that all of them know what they
want; then they choose how to read (`choice`), and read: each for itself (`direct`), or each byte
once for all (`cooperative`). Then the checksums are compared (`verdict`). If any of that fails on
one rank, all are told.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dcp_reshard.catalog import Catalog, StoredObject
from dcp_reshard.choice import (
    Choice,
    choose_by_bytes,
    choose_by_place,
    estimate_bytes,
    find_place,
)
from dcp_reshard.cooperative import CooperativeRead, Survey
from dcp_reshard.direct import DirectRead
from dcp_reshard.domains import IntArray
from dcp_reshard.errors import PeerFailedError
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.options import ReaderOptions
from dcp_reshard.outcome import leave_note
from dcp_reshard.parts import WantedPart
from dcp_reshard.report import Cooperation
from dcp_reshard.storage import CountingSource
from dcp_reshard.verdict import Verdict, check_records

__all__ = ["JobRead", "ReadResult"]

logger = logging.getLogger(__name__)

_Resolve = Callable[[], tuple[Sequence[WantedPart], Sequence[StoredObject]]]


@dataclass(frozen=True, slots=True, eq=False)
class ReadResult:
    """What a rank has read."""

    read: DirectRead | CooperativeRead
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

    mode: str
    """``"direct"``, ``"cooperative"`` or ``"auto"``."""

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

    def run(self, resolve: _Resolve, *, own: _Resolve) -> ReadResult:
        """Read, and compare checksums; a collective call, unless this rank reads alone.

        Args:
            resolve: Gives the parts and objects that this rank wants. May fail.
            own: Called after it, gives those that only this rank can want where they are: these it
                reads directly, however the ranks read the others.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say, or has the wrong checksum.
            DtypeMismatchError: A cast overflowed.
            PeerFailedError: Another rank failed.
        """
        apart = DirectRead(self.source, self.catalog, self.options, None)

        def resolve_all() -> tuple[Sequence[WantedPart], Sequence[StoredObject]]:
            parts, objects = resolve()
            if any(own()):
                # Here, where the others are told of a failure.
                self._read_and_close(apart, *own())
            return parts, objects

        if self.lockstep is None:
            direct = DirectRead(self.source, self.catalog, self.options, self.on_progress)
            self._read_and_close(direct, *resolve_all())
            cooperation = Cooperation(mode="direct", reason="this rank reads alone")
            return self._check(direct, apart, cooperation)
        try:
            with self.lockstep.held_interrupts():
                read, cooperation = self._run_together(self.lockstep, resolve_all)
                return self._check(read, apart, cooperation)
        except PeerFailedError as error:
            if error.__cause__ is not None:  # a collective call has failed
                leave_note()
            raise

    def _check(
        self, read: DirectRead | CooperativeRead, apart: DirectRead, cooperation: Cooperation
    ) -> ReadResult:
        started = time.perf_counter()
        read.objects |= apart.objects
        read.records |= apart.records
        read.chunks_read_whole += apart.chunks_read_whole
        read.bytes_direct += apart.bytes_direct
        read.rereads += apart.rereads
        verdict = check_records(
            read.records, self.catalog, verify=self.options.verify, lockstep=self.lockstep
        )
        return ReadResult(read, cooperation, verdict, time.perf_counter() - started)

    def _run_together(
        self,
        lockstep: Lockstep,
        resolve: _Resolve,
    ) -> tuple[DirectRead | CooperativeRead, Cooperation]:
        if self.mode == "direct":
            return self._read_directly(lockstep, resolve, "asked for")
        with lockstep.phase("finding out what it wants") as told:
            parts, objects = resolve()
            told.own = find_place(self.source)
        read = CooperativeRead(self.source, self.catalog, self.options, lockstep, self.on_progress)
        choice = choose_by_place(told.all)
        if self.mode == "cooperative":
            choice = Choice("cooperative", "asked for")
        survey = None
        if choice is None or choice.mode == "cooperative":
            survey = read.survey(parts, objects)
        if choice is None:
            assert survey is not None
            choice = self._choose(lockstep, told.all, parts, objects, survey)
        logger.info("reading in mode %r: %s", choice.mode, choice.reason)
        if choice.mode == "direct" or survey is None:
            return self._read_directly(lockstep, lambda: (parts, objects), choice.reason)
        try:
            read.run(survey)
        except BaseException:
            self.source.close()
            raise
        with lockstep.phase("closing its files") as told:
            read.take_results()
            self.source.close()
            told.own = (self.source.bytes_read,)
        return read, Cooperation(
            mode="cooperative",
            reason=choice.reason,
            bytes_sent=read.bytes_sent,
            bytes_received=read.bytes_received,
            rounds=read.rounds,
            buffer_bytes=read.buffer_bytes,
            imbalance=_imbalance(told.all[:, 0]),
        )

    def _choose(
        self,
        lockstep: Lockstep,
        places: IntArray,
        parts: Sequence[WantedPart],
        objects: Sequence[StoredObject],
        survey: Survey,
    ) -> Choice:
        with lockstep.phase("estimating what it would read") as told:
            percent, unique_bytes = round(100 * self.options.auto_ratio), survey.unique_bytes
            wanted = estimate_bytes(parts, objects, self.options)
            told.own = (wanted, percent, self.options.auto_bytes)
        # Alike on all ranks, although their options may differ.
        _, percent, least = told.all.max(axis=0).tolist()
        options = replace(self.options, auto_ratio=percent / 100, auto_bytes=least)
        return choose_by_bytes(places, told.all[:, 0], unique_bytes=unique_bytes, options=options)

    def _read_directly(
        self,
        lockstep: Lockstep,
        resolve: _Resolve,
        reason: str,
    ) -> tuple[DirectRead, Cooperation]:
        read = DirectRead(self.source, self.catalog, self.options, self.on_progress)
        with lockstep.phase("reading its parts") as told:
            self._read_and_close(read, *resolve())
            told.own = (self.source.bytes_read,)
        imbalance = _imbalance(told.all[:, 0])
        return read, Cooperation(mode="direct", reason=reason, imbalance=imbalance)

    def _read_and_close(
        self, read: DirectRead, parts: Sequence[WantedPart], objects: Sequence[StoredObject]
    ) -> None:
        try:
            read.run(parts, objects)
        finally:
            # Also after a failure: a job that tries again must not run out of descriptors. That a
            # file has changed explains most other errors, so it may take their place.
            self.source.close()


def _imbalance(bytes_read: IntArray) -> float:
    mean = float(bytes_read.mean())
    return float(bytes_read.max()) / mean if mean else 1.0
