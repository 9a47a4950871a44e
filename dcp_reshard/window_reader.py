"""Reading a window of a rank's domain, for the whole job, in one round.

1. The window's extents are read into one buffer, one after the other, in few requests in the order
   of files and bytes. A request also fetches small gaps between units (the containers of large
   chunks, which have been read already), and drops them.
2. Blocks of large records are summed up for the verdict; items that were read whole are parsed,
   checked against the metadata, and compared with their checksums.

Sends nothing: that is `cooperative`'s.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcp_reshard.container import Record
from dcp_reshard.crc import CrcPart, crc32
from dcp_reshard.domains import Domains, IntArray
from dcp_reshard.errors import CheckpointFormatError, CorruptRecordError
from dcp_reshard.item_checks import (
    check_object_size,
    check_payload,
    check_records_of,
    item_context,
    load_unknown,
)
from dcp_reshard.options import ReaderOptions
from dcp_reshard.parts import Findings, RecordUse
from dcp_reshard.pieces import TapeIndex
from dcp_reshard.probe import Item, ItemBytes
from dcp_reshard.storage import CountingSource
from dcp_reshard.template import PayloadProber
from dcp_reshard.threads import run_threads
from dcp_reshard.windows import Window

__all__ = ["WindowReader"]

_MAX_GAP = 4096


@dataclass(frozen=True, slots=True)
class _Part:
    """Bytes of one unit, and where they go in the buffer."""

    unit: int
    file: int
    start: int
    end: int
    at: int


@dataclass(slots=True, eq=False)
class WindowReader:
    """Reads the windows of one rank. Not frozen: it collects checksums on the way."""

    source: CountingSource
    """Where the bytes come from."""

    index: TapeIndex
    """Where items are on the tape."""

    domains: Domains
    """Which rank reads what."""

    options: ReaderOptions
    """Threads, requests, verification."""

    found: Findings = field(default_factory=Findings)
    """What was read, in all windows."""

    _prober: PayloadProber = field(default_factory=PayloadProber, init=False)
    _numbers: Mapping[int, list[int]] = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        """Find the items of each unit: several, if tensors share a record."""
        numbers: dict[int, list[int]] = {}
        for number, unit in zip(
            self.index.numbers.tolist(), self.index.units.tolist(), strict=True
        ):
            numbers.setdefault(unit, []).append(number)
        self._numbers = numbers

    def read(self, extents: IntArray, buffer: torch.Tensor) -> Window:
        """Read extents into a buffer, and check what is in them.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say.
        """
        starts, lengths = self.domains.starts[extents], self.domains.lengths[extents]
        window = Window(buffer, self.index, starts, np.cumsum(lengths) - lengths)
        array: Any = buffer.numpy()
        memory = memoryview(array)
        parts = list(self._parts(window, lengths))
        run_threads(
            lambda group: self._read_group(group, memory),
            self._groups(parts),
            threads=self.options.num_threads,
            on_result=lambda _: None,
        )
        atomic = self.index.tape.atomic
        run_threads(
            lambda part: self._parse(part, memory, window),
            [part for part in parts if atomic[part.unit]],
            threads=self.options.num_threads,
            on_result=lambda _: None,
        )
        return window

    def _parts(self, window: Window, lengths: IntArray) -> Iterator[_Part]:
        tape = self.index.tape
        for start, length, at in zip(
            window.starts.tolist(), lengths.tolist(), window.offsets.tolist(), strict=True
        ):
            unit = tape.find_unit(start)
            position, end = start, start + length
            while position < end:
                inside = position - int(tape.positions[unit])
                count = min(int(tape.lengths[unit]) - inside, end - position)
                first = int(tape.starts[unit]) + inside
                yield _Part(
                    unit, int(tape.files[unit]), first, first + count, at + position - start
                )
                position += count
                unit += 1

    def _groups(self, parts: Sequence[_Part]) -> Iterator[list[_Part]]:
        """Parts to be read by one request each, long ones cut."""
        limit = self.options.max_request_bytes
        group: list[_Part] = []
        for whole in parts:
            for start in range(whole.start, whole.end, limit):
                end = min(start + limit, whole.end)
                part = _Part(whole.unit, whole.file, start, end, whole.at + start - whole.start)
                if group and (
                    part.file != group[-1].file
                    or not 0 <= part.start - group[-1].end <= _MAX_GAP
                    or part.end - group[0].start > limit
                ):
                    yield group
                    group = []
                group.append(part)
        if group:
            yield group

    def _read_group(self, group: Sequence[_Part], memory: memoryview) -> None:
        junk = memoryview(bytearray(_MAX_GAP)) if len(group) > 1 else memoryview(b"")
        buffers: list[memoryview] = []
        position = group[0].start
        for part in group:
            if part.start > position:
                buffers.append(junk[: part.start - position])
            buffers.append(memory[part.at : part.at + part.end - part.start])
            position = part.end
        file = self.index.numbering.catalog.files[group[0].file]
        self.source.read_into(file, group[0].start, buffers)
        for part in group:
            if not self.index.tape.atomic[part.unit]:
                self._sum_up(file, part, memory[part.at : part.at + part.end - part.start])

    def _sum_up(self, file: str, part: _Part, contents: memoryview) -> None:
        number = self._numbers[part.unit][0]
        chunk = self.index.place(number)
        fqn = self.index.numbering.fqn(number)
        crc = crc32(contents) if self.options.verify != "off" else None
        with self._lock:
            use = self.found.records.setdefault(
                (file, chunk.start), RecordUse(fqn, chunk.length, chunk.crc)
            )
            if crc is not None:
                use.parts.append(CrcPart(part.start - chunk.start, part.end - chunk.start, crc))

    def _parse(self, part: _Part, memory: memoryview, window: Window) -> None:
        contents = memory[part.at : part.at + part.end - part.start]
        for number in self._numbers[part.unit]:
            item = self.index.numbering.item(number)
            try:
                self._take(number, item, contents, window)
            except CheckpointFormatError:
                # Storage may give wrong bytes once.
                again = ItemBytes(item, ((0, contents),), self.source).read_again()
                if again is None:
                    raise
                contents[:] = again.parts[0][1]
                with self._lock:
                    self.found.rereads += 1
                self._take(number, item, contents, window)

    def _take(self, number: int, item: Item, contents: memoryview, window: Window) -> None:
        stored = self.index.numbering.find_object(number)
        if stored is None:
            self._take_chunk(number, item, contents, window)
            return
        with item_context("object", stored.fqn, item):
            check_object_size(item.length)
            if self.options.verify != "off":
                for record in check_records_of(contents):
                    self._note(stored.fqn, item, record, record.crc)

    def _take_chunk(self, number: int, item: Item, contents: memoryview, window: Window) -> None:
        stored, chunk = self.index.numbering.find_chunk(number)
        sizes = tuple(stored.chunks.sizes[chunk].tolist())
        with item_context("tensor", stored.fqn, item):
            payload = self._prober.probe(ItemBytes(item, ((0, contents),), self.source))
            if payload is None:
                if self.options.verify != "off":
                    for record in check_records_of(contents):
                        self._note(stored.fqn, item, record, record.crc)
                window.values[number] = load_unknown(contents, sizes, stored.dtype)
                with self._lock:
                    self.found.chunks_read_whole.append(stored.fqn)
                return
            check_payload(payload, sizes, stored.dtype)
            record = payload.record
            crc: int | None = None
            if self.options.verify != "off" and record.crc:
                crc = crc32(contents[record.start : record.start + record.length])
                if crc != record.crc:
                    raise CorruptRecordError(
                        f"record `{record.name}`: CRC-32 is {crc:#010x}, recorded was "
                        f"{record.crc:#010x}"
                    )
            self._note(stored.fqn, item, record, crc)
            window.payloads[number] = payload

    def _note(self, fqn: str, item: Item, record: Record, crc: int | None) -> None:
        parts = [] if crc is None else [CrcPart(0, record.length, crc)]
        with self._lock:
            self.found.records[item.file, item.start + record.start] = RecordUse(
                fqn, record.length, record.crc, parts
            )
