"""Stored bytes into destination memory: what to ask of the storage, how to get it in place.

`plan_requests` cuts the parts of all chunks into spans and groups these into requests.
`Transfer.run` performs the requests on a few threads. A request fills a list of buffers with
consecutive bytes:

* the destination itself, where the span has no gap and the destination's memory is in the same
  order and of the same dtype (*direct*: no other copy is made);
* else a slice of a staging buffer, from which `copy_` scatters into the destination, casts, or
  moves to a device (on a stream of its own, from pinned memory, while the next request is read);
* a small junk buffer for the bytes between two spans that one request serves.

Parts that take elements out of the same bytes (columns, every other one of which this rank has)
have equal spans. These are read once, and all copied from.

Staging buffers are a fixed pool: memory beyond the destination is bounded by their number and size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from dcp_reshard.copying import copy_elements
from dcp_reshard.crc import CrcPart, crc32
from dcp_reshard.payload import Payload
from dcp_reshard.ranges import ByteRange, Span, group_ranges, plan_spans
from dcp_reshard.storage import CountingSource
from dcp_reshard.threads import run_threads

__all__ = ["ChunkPart", "RecordKey", "Request", "Transfer", "plan_requests"]

_ALIGNMENT = 64
_JUNK_BYTES = 4096

RecordKey = tuple[str, int]
"""File, and first byte of the record in it."""


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPart:
    """Part of a stored chunk, and the memory that it is copied to."""

    fqn: str
    """Key in the state dict."""

    file: str
    """File of the chunk."""

    item_start: int
    """First byte of the chunk's item in the file."""

    payload: Payload
    """Where the chunk's elements lie in the item."""

    offsets: tuple[int, ...]
    """First index of the part in each dim of the chunk."""

    dest: torch.Tensor
    """The destination; its shape is that of the part."""

    @property
    def base(self) -> int:
        """Byte of the chunk's element 0 in the file."""
        return self.item_start + self.payload.start

    @property
    def record_key(self) -> RecordKey:
        """The record that the part lies in."""
        return self.file, self.item_start + self.payload.record.start


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    part: ChunkPart
    span: Span

    @property
    def range(self) -> ByteRange:
        start = self.part.base + self.span.start
        return ByteRange(start, start + self.span.length)

    @property
    def dest(self) -> torch.Tensor:
        index = tuple(
            slice(o - p, o - p + s)
            for o, p, s in zip(self.span.offsets, self.part.offsets, self.span.sizes, strict=True)
        )
        return self.part.dest[index]


@dataclass(frozen=True, slots=True, eq=False)
class _Read:
    """Bytes of one record, and the pieces that are in them; mostly one."""

    record_key: RecordKey
    range: ByteRange
    pieces: tuple[_Piece, ...]

    @property
    def length(self) -> int:
        return self.range.end - self.range.start


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Consecutive bytes of one file, and the reads they fill, in the order of their bytes."""

    file: str
    start: int
    end: int
    reads: tuple[_Read, ...]


def plan_requests(
    parts: Iterable[ChunkPart], *, request_bytes: int, max_bytes: int
) -> list[Request]:
    """Requests that read all parts, in the order of files and bytes.

    Args:
        parts: What to read.
        request_bytes: What a request costs, in bytes that could be read in the same time.
        max_bytes: No request is longer, unless one element is.
    """
    by_file: dict[str, dict[tuple[RecordKey, ByteRange], list[_Piece]]] = {}
    for part in parts:
        spans = plan_spans(
            part.offsets,
            tuple(part.dest.shape),
            strides=part.payload.strides,
            itemsize=part.payload.dtype.itemsize,
            extent=part.payload.extent,
            request_bytes=request_bytes,
            max_bytes=max_bytes,
        )
        found = by_file.setdefault(part.file, {})
        for piece in (_Piece(part, span) for span in spans):
            found.setdefault((part.record_key, piece.range), []).append(piece)
    requests = []
    for file, found in sorted(by_file.items()):
        reads = [_Read(*place, tuple(pieces)) for place, pieces in found.items()]
        groups = group_ranges([r.range for r in reads], max_gap=_JUNK_BYTES, max_bytes=max_bytes)
        requests += [
            Request(file, group.start, group.end, tuple(reads[i] for i in group.members))
            for group in groups
        ]
    return requests


@dataclass(slots=True, eq=False)
class _Staging:
    """One buffer of the pool; made when it is first needed."""

    size: int
    pinned: bool
    memory: torch.Tensor | None = None
    copied: torch.cuda.Event | None = None

    def take(self, nbytes: int) -> torch.Tensor:
        if self.copied is not None:
            self.copied.synchronize()  # copies from this buffer may still be under way
            self.copied = None
        if self.memory is None or self.memory.numel() < nbytes:
            self.memory = torch.empty(
                max(self.size, nbytes), dtype=torch.uint8, pin_memory=self.pinned
            )
        return self.memory


@dataclass(slots=True, eq=False)
class Transfer:
    """Performs requests on threads. Not frozen: it collects checksums on the way."""

    source: CountingSource
    """Where the bytes come from."""

    threads: int
    """Threads that read."""

    max_bytes: int
    """Size of a staging buffer."""

    checksums: bool
    """Whether the checksum of every span read is computed."""

    crc_parts: dict[RecordKey, list[CrcPart]] = field(default_factory=dict)
    """Checksums computed, by record."""

    bytes_direct: int = 0
    """Bytes read straight into their destination."""

    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def run(self, requests: Sequence[Request], *, on_bytes: Callable[[int], None]) -> None:
        """Perform all requests; on the first error the rest is dropped and the error raised.

        Args:
            requests: What to read.
            on_bytes: Called in this thread with the number of bytes that have just been read.

        Raises:
            StorageError: Bytes could not be read.
            DtypeMismatchError: A cast overflowed.
        """
        cuda = any(
            piece.part.dest.is_cuda
            for request in requests
            for read in request.reads
            for piece in read.pieces
        )
        pool: SimpleQueue[_Staging] = SimpleQueue()
        for _ in range(self.threads * (2 if cuda else 1)):
            pool.put(_Staging(self.max_bytes, pinned=cuda))
        stream = _side_stream() if cuda else None
        with _awaited(stream):
            run_threads(
                lambda request: self._perform(request, pool, stream),
                requests,
                threads=self.threads,
                on_result=on_bytes,
            )

    def _perform(
        self, request: Request, pool: SimpleQueue[_Staging], stream: torch.cuda.Stream | None
    ) -> int:
        staging = pool.get()
        try:
            self._read_and_copy(request, staging, stream)
        finally:
            pool.put(staging)
        return request.end - request.start

    def _read_and_copy(
        self, request: Request, staging: _Staging, stream: torch.cuda.Stream | None
    ) -> None:
        direct = [_direct_memory(read) for read in request.reads]
        staged = [
            0 if memory is not None else _align(read.length)
            for memory, read in zip(direct, request.reads, strict=True)
        ]
        buffer = staging.take(sum(staged)) if any(staged) else torch.empty(0, dtype=torch.uint8)
        view = _memory(buffer)
        junk = memoryview(bytearray(_JUNK_BYTES)) if len(request.reads) > 1 else memoryview(b"")
        buffers: list[memoryview] = []
        filled: list[memoryview] = []
        position, used = request.start, 0
        for read, memory, size in zip(request.reads, direct, staged, strict=True):
            if read.range.start > position:
                buffers.append(junk[: read.range.start - position])
            target = view[used : used + read.length] if memory is None else memory
            buffers.append(target)
            filled.append(target)
            used += size
            position = read.range.end
        self.source.read_into(request.file, request.start, buffers)
        if self.checksums:
            self._add_checksums(request, filled)
        direct_bytes = sum(memory.nbytes for memory in direct if memory is not None)
        with self._lock:
            self.bytes_direct += direct_bytes
        used = 0
        for read, memory, size in zip(request.reads, direct, staged, strict=True):
            if memory is None:
                for piece in read.pieces:
                    _copy_piece(piece, buffer[used : used + size], stream)
                used += size
        if stream is not None and used:
            staging.copied = stream.record_event()

    def _add_checksums(self, request: Request, filled: Sequence[memoryview]) -> None:
        for read, buffer in zip(request.reads, filled, strict=True):
            start = read.range.start - read.record_key[1]
            part = CrcPart(start, start + read.length, crc32(buffer))
            with self._lock:
                self.crc_parts.setdefault(read.record_key, []).append(part)


def _align(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _memory(tensor: torch.Tensor) -> memoryview:
    array: Any = tensor.numpy()
    return memoryview(array)


def _direct_memory(read: _Read) -> memoryview | None:
    """The destination's own bytes for the read; None unless they are one block in its order."""
    if len(read.pieces) != 1:
        return None
    [piece] = read.pieces
    dest, payload, span = piece.part.dest, piece.part.payload, piece.span
    if (
        not dest.is_cpu
        or dest.dtype != payload.dtype
        or span.nbytes != span.length
        or dest.is_conj()
        or dest.is_neg()
    ):
        return None
    dest = piece.dest
    for size, stride, stored in zip(dest.shape, dest.stride(), payload.strides, strict=True):
        if size > 1 and stride * dest.itemsize != stored:
            return None
    flat = torch.as_strided(dest, (dest.numel(),), (1,), dest.storage_offset())
    return _memory(flat.view(torch.uint8))


def _side_stream() -> torch.cuda.Stream:
    """A stream for copies, behind what the current one has still to do to the destinations."""
    stream: torch.cuda.Stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    return stream


@contextmanager
def _awaited(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Wait for the copies of a stream at the end.

    Also after a failure: copies under way write to memory that is the caller's again, from buffers
    that are about to be freed.
    """
    try:
        yield
    finally:
        if stream is not None:
            stream.synchronize()


def _copy_piece(piece: _Piece, buffer: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
    payload = piece.part.payload
    strides = tuple(s // payload.dtype.itemsize for s in payload.strides)
    whole = piece.span.length // payload.dtype.itemsize * payload.dtype.itemsize
    elements = buffer[:whole].view(payload.dtype)
    # `as_strided` counts from the start of the storage, not of the view.
    offset = elements.storage_offset() + piece.span.lead // payload.dtype.itemsize
    source = torch.as_strided(elements, piece.span.sizes, strides, offset)
    if stream is None or piece.part.dest.device != stream.device:
        copy_elements(piece.part.fqn, piece.dest, source)
        return
    with torch.cuda.stream(stream):
        copy_elements(piece.part.fqn, piece.dest, source, non_blocking=True)
