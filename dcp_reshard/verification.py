"""One pass over the files of a checkpoint: see `verify`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from dcp_reshard.catalog import Catalog
from dcp_reshard.container import Record, read_directory
from dcp_reshard.crc import CrcPart, crc32, join_parts
from dcp_reshard.errors import CheckpointFormatError, CorruptRecordError, ReshardError, StorageError
from dcp_reshard.item_checks import check_object_size, check_payload, item_context, load_unknown
from dcp_reshard.objects import MAX_OBJECT_BYTES, MAX_OBJECT_RECORDS, check_data_only
from dcp_reshard.options import ReaderOptions
from dcp_reshard.payload import find_payload
from dcp_reshard.probe import Item, ItemBytes, probe_items
from dcp_reshard.storage import CountingSource
from dcp_reshard.threads import run_threads
from dcp_reshard.verify_report import Problem

__all__ = ["Verification"]


@dataclass(frozen=True, slots=True, eq=False)
class _StoredItem:
    """What is stored in one item: a chunk of a tensor, or an object."""

    item: Item
    fqn: str
    chunk: int | None

    @property
    def kind(self) -> str:
        return "object" if self.chunk is None else "tensor"


@dataclass(slots=True, eq=False)
class _LargeRecord:
    """A record that is read in blocks."""

    entry: _StoredItem
    record: Record
    missing: int
    parts: list[CrcPart] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Verification:
    """One pass over a checkpoint. Not frozen: it collects what it finds."""

    source: CountingSource
    """Where the bytes come from."""

    catalog: Catalog
    """What the checkpoint should hold."""

    options: ReaderOptions
    """Memory, threads, and what counts."""

    on_progress: Callable[[int, int], None] | None
    """Called with bytes done and bytes in all."""

    allowed_classes: Sequence[type] = ()
    """Classes whose instances objects may hold."""

    problems: list[Problem] = field(default_factory=list)
    """What is wrong."""

    notes: list[str] = field(default_factory=list)
    """What is unusual."""

    verified: int = 0
    """Records that have their checksum."""

    unverified: int = 0
    """Records without a checksum."""

    _large: list[_LargeRecord] = field(default_factory=list, init=False)
    _done: int = field(default=0, init=False)
    _total: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def check_coverage(self) -> None:
        """Check that the chunks of each tensor tile it."""
        for stored in self.catalog.tensors.values():
            try:
                stored.check_coverage()
            except CheckpointFormatError as error:
                self.add("coverage", error)

    def check_files(self) -> None:
        """Check all items of all files, file by file."""
        by_file: dict[str, list[_StoredItem]] = {name: [] for name in self.catalog.files}
        for entry in self._entries():
            by_file[entry.item.file].append(entry)
            self._total += entry.item.length
        for name, entries in sorted(by_file.items()):
            entries.sort(key=lambda entry: entry.item.start)
            done = self._done + sum(entry.item.length for entry in entries)
            try:
                self._check_file(name, entries)
            except StorageError as error:
                self.add("file", error)
            self._advance(done - self._done)
        known = {*self.catalog.files, *self.catalog.read_from}
        strange = [name for name in self.source.names() if name not in known]
        if strange:
            self.notes.append(f"{len(strange)} files that no key is in: {', '.join(strange[:5])}")

    def _entries(self) -> Iterator[_StoredItem]:
        files = self.catalog.files
        for fqn, stored in self.catalog.tensors.items():
            places = zip(
                stored.files.tolist(), stored.starts.tolist(), stored.lengths.tolist(), strict=True
            )
            for chunk, (file, start, length) in enumerate(places):
                yield _StoredItem(Item(files[file], start, length), fqn, chunk)
        for fqn, value in self.catalog.objects.items():
            if value.known is None:
                yield _StoredItem(Item(files[value.file], value.start, value.length), fqn, None)

    def _check_file(self, name: str, entries: Sequence[_StoredItem]) -> None:
        size = self.source.size(name)
        inside: dict[Item, _StoredItem] = {}
        for entry in entries:
            end = entry.item.start + entry.item.length
            if end > size:
                self.add(
                    "file",
                    StorageError(
                        f"file {name!r}: has {size} bytes, but the metadata place `{entry.fqn}` at "
                        f"bytes {entry.item.start} to {end}; the file is cut",
                        fqn=entry.fqn,
                        file=name,
                        start=entry.item.start,
                        end=end,
                    ),
                )
                continue
            inside[entry.item] = entry
        last = max((entry.item.start + entry.item.length for entry in entries), default=0)
        # What belongs to no item is suspicious only where items are all that there should be.
        if size > last and not any(self._is_known(entry) for entry in entries):
            self.notes.append(f"file {name!r}: {size - last} bytes after the last item")
        probe_items(
            inside,
            self.source,
            whole_bytes=self.options.whole_item_bytes,
            max_bytes=self.options.max_request_bytes,
            threads=self.options.num_threads,
            on_item=lambda item: self._check_item(inside[item.item], item),
        )
        self._check_large()

    def _is_known(self, entry: _StoredItem) -> bool:
        stored = self.catalog.tensors.get(entry.fqn)
        return stored is not None and stored.payloads is not None

    def _check_item(self, entry: _StoredItem, item: ItemBytes) -> None:
        with self._collected("item", entry):
            for record in self._read_records(entry, item):
                contents = item.view(record.start, record.start + record.length)
                if contents is not None:
                    self._compare(entry, record, partial(crc32, contents))
                    continue
                with self._lock:
                    self._large.append(_LargeRecord(entry, record, record.length))

    def _read_records(self, entry: _StoredItem, item: ItemBytes) -> list[Record]:
        """The records of an item, once its contents are known to be what the metadata say."""
        length = item.item.length
        if entry.chunk is None:
            check_object_size(length)
            contents = memoryview(item.read(0, length))
            check_data_only(contents, allowed_classes=self.allowed_classes)
            return read_directory(length, item.read, max_records=MAX_OBJECT_RECORDS)
        stored = self.catalog.tensors[entry.fqn]
        sizes = tuple(stored.chunks.sizes[entry.chunk].tolist())
        if stored.payloads is not None:
            check_payload(stored.payloads[entry.chunk], sizes, stored.dtype)
            return [stored.payloads[entry.chunk].record]
        records = read_directory(length, item.read)
        payload = find_payload(records, item.read)
        if payload is not None:
            check_payload(payload, sizes, stored.dtype)
        elif length <= MAX_OBJECT_BYTES:
            load_unknown(memoryview(item.read(0, length)), sizes, stored.dtype)
        else:
            with self._lock:
                self.notes.append(f"tensor `{entry.fqn}`: not a dense tensor, shape not checked")
        return records

    def _compare(
        self, entry: _StoredItem, record: Record, find_checksum: Callable[[], int | None]
    ) -> None:
        """Compare a record with its checksum, or note that it has none to be compared with."""
        if self._has_crc(record):
            found = find_checksum()
            if found == record.crc:
                with self._lock:
                    self.verified += 1
                return
            what = f"CRC-32 is {found or 0:#010x}, recorded was {record.crc:#010x}"
        else:
            with self._lock:
                self.unverified += 1
            if self.options.verify != "required":
                return
            what = "no checksum was stored"
        with self._collected("checksum", entry):
            raise CorruptRecordError(f"record `{record.name}`: {what}")

    def _has_crc(self, record: Record) -> bool:
        # `torch.serialization.set_crc32_options(False)` stores 0; that of no bytes is 0 as well.
        return self.options.verify != "off" and (record.crc != 0 or record.length == 0)

    def _check_large(self) -> None:
        """Read the records noted as large, in blocks, and compare them."""
        large, self._large = self._large, []
        for one in large:
            if not self._has_crc(one.record):
                self._compare(one.entry, one.record, lambda: None)
        wanted = sorted(
            (one for one in large if self._has_crc(one.record)),
            key=lambda one: one.entry.item.start + one.record.start,
        )
        size = self.options.max_request_bytes
        buffers: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(self.options.num_threads):
            buffers.put(bytearray())

        def read_block(block: tuple[_LargeRecord, int, int]) -> tuple[_LargeRecord, CrcPart]:
            one, start, end = block
            buffer = buffers.get()
            try:
                buffer = buffer or bytearray(size)
                view = memoryview(buffer)[: end - start]
                item = one.entry.item
                self.source.read_into(item.file, item.start + one.record.start + start, [view])
                return one, CrcPart(start, end, crc32(view))
            finally:
                buffers.put(buffer)

        run_threads(
            read_block,
            (
                (one, start, min(start + size, one.record.length))
                for one in wanted
                for start in range(0, one.record.length, size)
            ),
            threads=self.options.num_threads,
            on_result=self._take_block,
        )

    def _take_block(self, result: tuple[_LargeRecord, CrcPart]) -> None:
        one, part = result
        one.parts.append(part)
        one.missing -= part.end - part.start
        self._advance(part.end - part.start)
        if not one.missing:
            self._compare(
                one.entry, one.record, lambda: join_parts(one.parts, one.record.length).crc
            )

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        if self.on_progress is not None:
            self.on_progress(self._done, self._total)

    @contextmanager
    def _collected(self, kind: str, entry: _StoredItem) -> Iterator[None]:
        """What is raised inside becomes a problem, with the item that it is about."""
        try:
            with item_context(entry.kind, entry.fqn, entry.item):
                yield
        except CheckpointFormatError as error:
            self.add(kind, error)

    def add(self, kind: str, error: ReshardError) -> None:
        """Note a problem."""
        with self._lock:
            self.problems.append(
                Problem(kind, str(error), error.fqn, error.file, error.start, error.end)
            )
