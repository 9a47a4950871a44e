"""The rounds of a cooperative read: read a window, send its pieces, put those received into place.

In round k a rank

1. waits for its window k, which another thread has read, and has window k + 1 read meanwhile;
2. puts the pieces that others want of it into one buffer, in the order of ranks;
3. agrees with all ranks that all have come this far;
4. exchanges: one `all_to_all_single` with uneven splits, whose sizes all ranks know;
5. copies what it has received into the destinations, casts and moves to devices included.

Pieces that a rank wants of its own window do not travel: they are copied into place in step 2, or
with those received where that takes a cast or a device. Buffers are as large as the largest round
needs, and are used in every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from dcp_reshard.copying import copy_elements
from dcp_reshard.domains import IntArray
from dcp_reshard.elements import split_range
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.messages import Messages, Place
from dcp_reshard.pieces import Requests, stride_order
from dcp_reshard.window_reader import WindowReader
from dcp_reshard.windows import Window

__all__ = ["Exchange", "Want"]


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A box of a stored item, and the memory that it goes to."""

    fqn: str
    """Key in the state dict."""

    number: int
    """Number of the item."""

    offsets: tuple[int, ...]
    """First index of the box in each dim of the chunk."""

    dtype: torch.dtype
    """Stored dtype."""

    dest: torch.Tensor
    """The destination; its shape is that of the box."""


@dataclass(slots=True, eq=False)
class Exchange:
    """All rounds of one rank. Not frozen: it counts what it does."""

    lockstep: Lockstep
    """The ranks."""

    reader: WindowReader
    """Reads this rank's windows."""

    rounds: Sequence[IntArray]
    """Extents that this rank reads, by round."""

    wants: Sequence[Want]
    """What this rank wants."""

    incoming: Messages
    """Pieces of these."""

    requests: Requests
    """What ranks want of this one."""

    outgoing: Messages
    """Pieces of these."""

    read_seconds: float = 0.0
    """Time in which windows were read."""

    exchange_seconds: float = 0.0
    """Time in which pieces were exchanged, waiting for other ranks included."""

    buffer_bytes: int = 0
    """Bytes of all buffers."""

    _windows: tuple[torch.Tensor, ...] = field(default=(), init=False)
    _send: torch.Tensor = field(init=False)
    _receive: torch.Tensor = field(init=False)
    _own: list[tuple[Place, torch.Tensor]] = field(default_factory=list, init=False)
    _done: int = field(default=0, init=False)

    def run(self, on_progress: Callable[[int, int], None] | None) -> None:
        """Do all rounds.

        Args:
            on_progress: Called with bytes of pieces put into place, and in all.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say.
            DtypeMismatchError: A cast overflowed.
            PeerFailedError: Another rank failed.
        """
        count = len(self.rounds)
        pending: Future[Window] | None = None
        with ThreadPoolExecutor(1, thread_name_prefix="dcp_reshard_window") as pool:
            for index in range(count):
                with self.lockstep.phase(f"reading round {index + 1} of {count}"):
                    if pending is None:
                        self._make_buffers()
                        pending = pool.submit(self._read, index)
                    else:
                        self._scatter(index - 1, on_progress)
                    window = pending.result()
                    if index + 1 < count:
                        pending = pool.submit(self._read, index + 1)
                    self._gather(index, window)
                    splits_in = self.incoming.travelling(index)
                    splits_out = self.outgoing.travelling(index)
                    received, sent = self._receive[: sum(splits_in)], self._send[: sum(splits_out)]
                    what = f"the bytes of round {index + 1} of {count}"
                started = time.perf_counter()
                self.lockstep.exchange_bytes(received, sent, splits_in, splits_out, what=what)
                self.exchange_seconds += time.perf_counter() - started
            with self.lockstep.phase("copying what it has received"):
                if count:
                    self._scatter(count - 1, on_progress)

    def _make_buffers(self) -> None:
        device = self.lockstep.device
        lengths = self.reader.domains.lengths
        largest = max(int(lengths[extents].sum()) for extents in self.rounds)
        self._windows = tuple(
            torch.empty(largest, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(min(2, len(self.rounds)))
        )
        self._send = torch.empty(
            int(self.outgoing.splits.sum(axis=1).max()), dtype=torch.uint8, device=device
        )
        travelling = max(sum(self.incoming.travelling(i)) for i in range(len(self.rounds)))
        self._receive = torch.empty(travelling, dtype=torch.uint8, device=device)
        buffers = (*self._windows, self._send, self._receive)
        self.buffer_bytes = sum(buffer.nbytes for buffer in buffers)

    def _read(self, index: int) -> Window:
        started = time.perf_counter()
        window = self.reader.read(self.rounds[index], self._windows[index % 2])
        self.read_seconds += time.perf_counter() - started
        return window

    def _gather(self, index: int, window: Window) -> None:
        device = self.lockstep.device
        if window.memory.device != device:
            window = replace(window, memory=window.memory.to(device))
        sent = sum(self.outgoing.travelling(index))
        received = sum(self.incoming.travelling(index))
        # The own pieces come last on both sides, and in the same order.
        own = iter([place for place in self.incoming.places(index) if place.start >= received])
        for place in self.outgoing.places(index):
            number = int(self.requests.numbers[place.request])
            box = self.requests.box(place.request, self.reader.index.numbering.ndim(number))
            views = list(window.views(number, *box, place.first, place.last))
            wanted = next(own) if place.start >= sent else None
            if wanted is not None and self._copy_bytes(wanted, views):
                self._done += wanted.nbytes
                continue
            position = place.start
            for view in views:
                self._send[position : position + view.numel()].view(view.shape).copy_(view)
                position += view.numel()
            if wanted is not None:
                self._own.append((wanted, self._send[place.start : place.start + place.nbytes]))

    def _scatter(self, index: int, on_progress: Callable[[int, int], None] | None) -> None:
        total = int(self.incoming.splits.sum())
        received = sum(self.incoming.travelling(index))
        pieces = [
            (place, self._receive[place.start : place.start + place.nbytes])
            for place in self.incoming.places(index)
            if place.start < received
        ]
        own, self._own = self._own, []
        for place, message in (*pieces, *own):
            want = self.wants[place.request]
            elements = message[: (place.last - place.first) * want.dtype.itemsize].view(want.dtype)
            done = 0
            for part in self._parts(place):
                source = elements[done : done + part.numel()].view(part.shape)
                copy_elements(want.fqn, part, source)
                done += part.numel()
            self._done += place.nbytes
        if self._receive.is_cuda or any(want.dest.is_cuda for want in self.wants):
            # The copies must have ended before the buffers are used again.
            torch.cuda.synchronize()
        if on_progress is not None and total:
            on_progress(self._done, total)

    def _copy_bytes(self, place: Place, views: Sequence[torch.Tensor]) -> bool:
        """Copy the bytes of a piece into place, if that is all there is to do."""
        want, parts = self.wants[place.request], self._parts(place)
        pairs = list(zip(parts, views, strict=False))
        if (
            want.dest.dtype != want.dtype
            or len(parts) != len(views)
            or not all(_is_plain(part, view) for part, view in pairs)
        ):
            return False
        for part, view in pairs:
            part.view(torch.uint8).copy_(view.flatten(-2))
        return True

    def _parts(self, place: Place) -> list[torch.Tensor]:
        """The memory that a piece goes to, dims in the order in which the chunk is stored."""
        want = self.wants[place.request]
        placed = self.reader.index.placed.find(want.number)
        dest = want.dest
        if placed is not None:  # else it is sent row by row
            dest = dest.permute(stride_order(placed.strides))
        return [
            dest[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
            for offsets, sizes in split_range(dest.shape, place.first, place.last)
        ]


def _is_plain(part: torch.Tensor, view: torch.Tensor) -> bool:
    return (
        (*part.shape, part.itemsize) == view.shape
        and part.ndim > 0
        and part.stride(-1) == 1
        and part.device == view.device
        and not (part.is_conj() or part.is_neg() or part.is_inference())
    )
