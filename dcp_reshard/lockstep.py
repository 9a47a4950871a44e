"""Ranks in lockstep: local work and collective calls in turn, and no rank left waiting for another.

A rank that fails between two collective calls leaves the others waiting in the second one, until a
timeout. So the work between calls is done in phases::

    with lockstep.phase("planning") as told:  # this rank alone: may fail
        rows = plan()
        told.counts = [len(part) for part in rows]
    rows = lockstep.exchange_rows(rows, told) # all ranks are here, or none

On leaving a phase each rank tells every other whether it has failed. If one has, all raise: that
rank its own error, the others a `PeerFailedError` that names it. Every rank hears from every other,
so that all notice at once if one is dead.

Whatever may fail belongs into a phase: memory for what is sent and received, too, on a device that
may be full. The messages in which ranks tell each other that they have failed lie in memory that is
there from the beginning.

Interrupts from the keyboard strike inside phases only, and are held back elsewhere
(`held_interrupts`): one that struck between a collective call and the next line would leave it
unknown whether the call was made.
"""

from __future__ import annotations

import io
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from dcp_reshard.collectives import collective_device
from dcp_reshard.domains import IntArray
from dcp_reshard.errors import PeerFailedError

__all__ = ["Facts", "Lockstep"]

IntegerArray = npt.NDArray[np.integer[Any]]
Value = TypeVar("Value")

# A row for each rank: whether the phase has failed, a count, and facts.
_FACTS = slice(2, 12)


@dataclass(slots=True)
class Facts:
    """Numbers that ranks tell each other at the end of a phase."""

    own: tuple[int, ...] = ()
    """For all ranks, as many on each, at most 10; to be set during the phase."""

    counts: Sequence[int] = ()
    """One for each rank; to be set during the phase."""

    array: IntegerArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """Of one shape on all ranks, to be reduced after the phase; to be set during it."""

    tensor: torch.Tensor = field(init=False)
    """The array, where collective calls want it."""

    all: IntArray = field(default_factory=lambda: np.zeros((0, 0), dtype=np.int64))
    """Row r is what rank r has told all; filled when the phase is over."""

    counts_in: Sequence[int] = ()
    """What each rank has told this one; filled when the phase is over."""


@dataclass(slots=True, eq=False)
class Lockstep:
    """The ranks of a load. Not frozen: it remembers an interrupt that is held back."""

    group: dist.ProcessGroup | None
    """The ranks; the default group if None. All must be there."""

    on_wait: Callable[[str], None]
    """Told what all ranks have to do for this one to go on."""

    _interrupted: bool = field(default=False, init=False)
    _strikes: bool = field(default=False, init=False)
    _rows: torch.Tensor = field(init=False)
    _sent: torch.Tensor = field(init=False)
    _received: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        """Take the memory in which ranks tell each other that they have failed."""
        self._rows = torch.zeros((self.size, _FACTS.stop), dtype=torch.int64)
        self._sent = torch.zeros_like(self._rows, device=self.device)
        self._received = torch.zeros_like(self._sent)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank(self.group)

    @property
    def device(self) -> torch.device:
        """Where tensors have to be for a collective call."""
        return collective_device(self.group)

    @contextmanager
    def phase(self, what: str) -> Iterator[Facts]:
        """Work that this rank does alone, and then the agreement that all ranks have done theirs.

        The body must make no collective call. Leaving it is one.

        Args:
            what: What is done, for the errors.

        Raises:
            BaseException: What the body raised.
            PeerFailedError: The phase failed on another rank, or a rank cannot be reached.
        """
        told, rows = Facts(), self._rows.numpy()
        error: BaseException | None = None
        try:
            # Two `try`: an interrupt that strikes in the inner `finally` is caught by the outer.
            try:
                self._strikes = True
                self._raise_interrupt()
                yield told
            finally:
                self._strikes = False
            self._raise_interrupt()
            facts = slice(_FACTS.start, _FACTS.start + len(told.own))
            rows[:, 0], rows[:, 1], rows[:, facts] = 0, told.counts or 0, told.own
            told.tensor = torch.from_numpy(told.array).to(self.device)
        except BaseException as caught:
            error = caught
            rows[:, 0] = 1
        try:
            self._tell(what)
        except PeerFailedError:
            if error is not None:
                raise error  # noqa: B904  the cause, not what follows from it
            raise
        if error is not None:
            raise error
        failed = np.flatnonzero(rows[:, 0]).tolist()
        if failed:
            ranks = f"rank {failed[0]}" if len(failed) == 1 else f"ranks {failed}"
            raise PeerFailedError(f"{ranks} of the load failed while {what}; see the error there")
        told.counts_in, told.all = rows[:, 1].tolist(), rows[:, facts].copy()

    def _tell(self, what: str) -> None:
        """Send a row to each rank, and put that of each in its place; a collective call."""
        with self._waiting(f"end {what}"):
            self._sent.copy_(self._rows)
            dist.all_to_all_single(self._received, self._sent, group=self.group)
            self._rows.copy_(self._received)

    def reduce_sum(self, told: Facts) -> None:
        """Add up the array of the phase before over all ranks, in place; a collective call."""
        self._reduce(told, dist.ReduceOp.SUM)

    def reduce_max(self, told: Facts) -> None:
        """Take the maximum of each element of it over all ranks; a collective call."""
        self._reduce(told, dist.ReduceOp.MAX)

    def _reduce(self, told: Facts, op: dist.ReduceOp.RedOpType) -> None:
        if not told.array.size:
            return  # on all ranks alike
        with self._waiting("say which bytes they need"):
            dist.all_reduce(told.tensor, op=op, group=self.group)
            torch.from_numpy(told.array).copy_(told.tensor)

    def compute_once(self, compute: Callable[[], Value], *, what: str) -> Value:
        """What the first rank computes, on all ranks; a collective call.

        Args:
            compute: Called on the first rank only. What it returns is pickled.
            what: What it does, for the errors.

        Raises:
            BaseException: What `compute` raised, on the first rank.
            PeerFailedError: Another rank failed.
        """
        pickled = io.BytesIO()
        with self.phase(what) as told:
            if self.rank == 0:
                pickle.dump(compute(), pickled)
            told.own = (pickled.tell(),)
        with self.phase(f"making room for the outcome of {what}"):
            message = torch.empty(int(told.all[0, 0]), dtype=torch.uint8, device=self.device)
            if self.rank == 0:
                message.copy_(torch.frombuffer(pickled.getbuffer(), dtype=torch.uint8))
        with self._waiting(f"receive the outcome of {what}"):
            dist.broadcast(message, group_src=0, group=self.group)
        contents: Any = message.cpu().numpy()
        value: Value = pickle.loads(contents)  # noqa: S301  of a peer, not of a file
        return value

    def exchange_rows(
        self, outgoing: Sequence[IntArray], told: Facts, *, what: str
    ) -> list[IntArray]:
        """Send rows of numbers to each rank, and return those from each; a collective call.

        Args:
            outgoing: Rows for each rank, all of one width.
            told: Their counts, from the phase before.
            what: What is exchanged, for the errors.
        """
        with self.phase(f"making room for {what}"):
            splits_in, splits_out = list(told.counts_in), list(told.counts)
            flat = torch.from_numpy(np.concatenate(outgoing)).to(self.device)
            received = flat.new_empty((sum(told.counts_in), flat.shape[1]))
            rows: IntArray = np.empty(tuple(received.shape), dtype=np.int64)
        with self._waiting(f"send {what}"):
            dist.all_to_all_single(received, flat, splits_in, splits_out, group=self.group)
            torch.from_numpy(rows).copy_(received)
        return np.split(rows, np.cumsum(told.counts_in)[:-1])

    def exchange_bytes(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        splits_in: list[int],
        splits_out: list[int],
        *,
        what: str,
    ) -> None:
        """Send consecutive parts of a buffer to the ranks, and fill another; a collective call."""
        with self._waiting(f"send {what}"):
            dist.all_to_all_single(received, sent, splits_in, splits_out, group=self.group)
            if received.is_cuda:
                # Buffers are used again, and an error should be raised here.
                torch.cuda.current_stream(received.device).synchronize()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        self.on_wait(what)
        try:
            yield
        except RuntimeError as error:
            # gloo: a peer's connection is closed, or the group's timeout is over. NCCL: the latter.
            raise PeerFailedError(
                f"a rank of the load has died or cannot be reached; this rank waited for all ranks "
                f"to {what} ({type(error).__name__}: {error})"
            ) from error

    @contextmanager
    def held_interrupts(self) -> Iterator[None]:
        """Hold back an interrupt from the keyboard until the next phase; a second strikes at once.

        Python's own handler is replaced meanwhile; one that the program has set is left alone.
        """
        main = threading.current_thread() is threading.main_thread()
        if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return

        def hold(number: int, frame: FrameType | None) -> None:
            if self._strikes or self._interrupted:
                signal.default_int_handler(number, frame)
            self._interrupted = True

        signal.signal(signal.SIGINT, hold)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._raise_interrupt()

    def _raise_interrupt(self) -> None:
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt
