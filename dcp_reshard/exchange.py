"""The rounds of a cooperative read: read a window, send its pieces, put those received into place.

In round k a rank

1. waits for its window k, which another thread has read, and has window k + 1 read meanwhile;
2. puts the pieces that others want of it into one buffer, in the order of ranks;
3. agrees with all ranks that all have come this far;
4. exchanges: one `all_to_all_single` with uneven splits, whose sizes all ranks know;
5. copies what it has received into the destinations, casts and moves to devices included.

Pieces that a rank wants of its own window do not travel. Buffers are as large as the largest round
needs, and are used in every round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from dcp_reshard.domains import IntArray
from dcp_reshard.elements import split_range
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.pieces import Pieces, Placed, Requests, stride_order
from dcp_reshard.transfer import copy_elements
from dcp_reshard.windows import Window, WindowReader

__all__ = ["Exchange", "Messages", "Want", "sort_messages"]


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


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Pieces in the order in which they travel: by round, then by rank, the own ones last."""

    pieces: Pieces
    """The pieces."""

    bounds: IntArray
    """First piece of each round; one entry more than rounds."""

    splits: IntArray
    """Bytes of the pieces of round k and rank r at ``[k, r]``, own ones included."""

    own: int
    """This rank."""

    def travelling(self, index: int) -> list[int]:
        """Bytes to or from each rank in a round; own ones do not travel."""
        splits = self.splits[index].copy()
        splits[self.own] = 0
        return [int(n) for n in splits]

    def places(self, index: int) -> list[tuple[int, int, int, int, int]]:
        """Request, first and last element, start and bytes in the message of each piece."""
        part = slice(self.bounds[index], self.bounds[index + 1])
        nbytes = self.pieces.nbytes[part]
        columns = (
            self.pieces.requests[part],
            self.pieces.first[part],
            self.pieces.last[part],
            np.cumsum(nbytes) - nbytes,
            nbytes,
        )
        return list(zip(*(column.tolist() for column in columns), strict=True))


def sort_messages(
    pieces: Pieces, ranks: IntArray, rounds: IntArray, *, num_ranks: int, num_rounds: int, own: int
) -> Messages:
    """Put pieces into the order of their messages.

    Args:
        pieces: The pieces.
        ranks: The other side of each piece.
        rounds: The round of each piece.
        num_ranks: Number of ranks.
        num_rounds: Number of rounds.
        own: This rank.
    """
    order = np.lexsort((pieces.requests, pieces.extents, ranks, ranks == own, rounds))
    splits = np.zeros((num_rounds, num_ranks), dtype=np.int64)
    np.add.at(splits, (rounds, ranks), pieces.nbytes)
    bounds = np.searchsorted(rounds[order], np.arange(num_rounds + 1))
    return Messages(pieces.select(order), bounds, splits, own)


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

    on_progress: Callable[[int, int], None] | None
    """Called with bytes of pieces put into place, and in all."""

    read_seconds: float = 0.0
    """Time in which windows were read."""

    exchange_seconds: float = 0.0
    """Time in which pieces were exchanged, waiting for other ranks included."""

    buffer_bytes: int = 0
    """Bytes of all buffers."""

    _windows: tuple[torch.Tensor, ...] = field(default=(), init=False)
    _send: torch.Tensor = field(init=False)
    _receive: torch.Tensor = field(init=False)
    _done: int = field(default=0, init=False)

    def run(self) -> None:
        """Do all rounds.

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
                        self._scatter(index - 1)
                    window = pending.result()
                    if index + 1 < count:
                        pending = pool.submit(self._read, index + 1)
                    self._gather(index, window)
                started = time.perf_counter()
                received, sent = self.incoming.travelling(index), self.outgoing.travelling(index)
                self.lockstep.exchange_bytes(
                    self._receive[: sum(received)],
                    self._send[: sum(sent)],
                    received,
                    sent,
                    what=f"the bytes of round {index + 1} of {count}",
                )
                self.exchange_seconds += time.perf_counter() - started
            with self.lockstep.phase("copying what it has received"):
                if count:
                    self._scatter(count - 1)

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
        for request, first, last, start, _ in self.outgoing.places(index):
            number = int(self.requests.numbers[request])
            offsets, sizes = self.requests.box(request, self.reader.index.numbering.ndim(number))
            position = start
            for view in window.views(number, offsets, sizes, first, last):
                self._send[position : position + view.numel()].view(view.shape).copy_(view)
                position += view.numel()

    def _scatter(self, index: int) -> None:
        travelling = sum(self.incoming.travelling(index))
        sent = sum(self.outgoing.travelling(index))
        total = int(self.incoming.splits.sum())
        for request, first, last, start, nbytes in self.incoming.places(index):
            # The own pieces come last, in both buffers; they have stayed in the one that is sent.
            if start < travelling:
                message = self._receive[start : start + nbytes]
            else:
                at = start - travelling + sent
                message = self._send[at : at + nbytes]
            want = self.wants[request]
            _scatter_piece(want, self.reader.index.placed.get(want.number), message, first, last)
            self._done += nbytes
        if self._receive.is_cuda or any(want.dest.is_cuda for want in self.wants):
            # The copies must have ended before the buffers are used again.
            torch.cuda.synchronize()
        if self.on_progress is not None and total:
            self.on_progress(self._done, total)


def _scatter_piece(
    want: Want, placed: Placed | None, message: torch.Tensor, first: int, last: int
) -> None:
    elements = message[: (last - first) * want.dtype.itemsize].view(want.dtype)
    dest = want.dest
    if placed is not None:
        dest = dest.permute(stride_order(placed.strides))
    done = 0
    for offsets, sizes in split_range(dest.shape, first, last):
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        part = dest[box]
        copy_elements(want.fqn, part, elements[done : done + part.numel()].view(sizes))
        done += part.numel()
