"""Direct reading: this rank reads what it needs, whatever other ranks read.

1. The files concerned are opened; all items must lie inside them.
2. Every chunk's item is probed (`probe`). Its record must have the shape and the dtype that the
   metadata say. Contents of small items are at hand then, and wait.
3. Once all items are known to be sound, the small ones are copied, chunks of unknown form are
   loaded whole, and the large ones are read by range (`transfer`).

Checksums of everything read are kept per record, for the verdict that follows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dcp_reshard.catalog import Catalog, StoredObject
from dcp_reshard.container import Record
from dcp_reshard.copying import copy_elements
from dcp_reshard.crc import CrcPart, crc32
from dcp_reshard.errors import CheckpointFormatError, CorruptRecordError, StorageError
from dcp_reshard.item_checks import (
    check_object_size,
    check_payload,
    check_records_of,
    item_context,
    load_unknown,
)
from dcp_reshard.options import ReaderOptions
from dcp_reshard.parts import Findings, RecordUse, WantedPart
from dcp_reshard.payload import Payload
from dcp_reshard.probe import Item, ItemBytes, probe_groups
from dcp_reshard.small_chunks import SmallChunk, SmallChunks
from dcp_reshard.storage import CountingSource
from dcp_reshard.template import PayloadProber
from dcp_reshard.transfer import ChunkPart, Transfer, plan_requests

__all__ = ["DirectRead"]

# Small chunks are handed on in batches, as most of what one costs is cost of the call.
_BATCH_BYTES = 64 * 2**10


@dataclass(slots=True, eq=False)
class DirectRead:
    """One rank's read. Not frozen: it collects its results."""

    source: CountingSource
    """Where the bytes come from."""

    catalog: Catalog
    """What the checkpoint holds."""

    options: ReaderOptions
    """How to read."""

    on_progress: Callable[[int, int], None] | None
    """Called with bytes done and bytes in all."""

    found: Findings = field(default_factory=Findings)
    """What was read, in all runs."""

    _prober: PayloadProber = field(default_factory=PayloadProber, init=False)
    _small: SmallChunks = field(init=False)
    _large: list[ChunkPart] = field(default_factory=list, init=False)
    _unknown: list[tuple[Item, list[WantedPart]]] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def __post_init__(self) -> None:
        """Bound what small chunks may take, beside the half of the budget that requests may."""
        # Contents are put into rows, and these may be copied once more: three times in all.
        self._small = SmallChunks(self.options.memory_budget // 8)

    def run(self, parts: Sequence[WantedPart], objects: Sequence[StoredObject] = ()) -> None:
        """Read all parts into their destinations, and the items of all objects.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say.
            DtypeMismatchError: A cast overflowed.
        """
        self._large, self._unknown = [], []
        chunks: dict[Item, list[WantedPart]] = {}
        known: list[WantedPart] = []
        for part in parts:
            if part.stored.payloads is not None:
                known.append(part)
            else:
                chunks.setdefault(self._item(part), []).append(part)
        object_items = {Item(self.catalog.files[o.file], o.start, o.length): o.fqn for o in objects}
        self._check_files(chunks, object_items)
        for part in known:
            assert part.stored.payloads is not None
            payload = part.stored.payloads[part.chunk]
            self._add_chunk_part(part, self._item(part), payload, payload.record.crc)

        def take(item: ItemBytes) -> None:
            if item.item in object_items:
                self._take_object(object_items[item.item], item)
            else:
                self._probe_chunk(chunks[item.item], item)

        def on_item(item: ItemBytes) -> None:
            try:
                take(item)
            except CheckpointFormatError:
                # Storage may give wrong bytes once.
                again = item.read_again()
                if again is None:
                    raise
                with self._lock:
                    self.found.rereads += 1
                take(again)

        probe_groups(
            [*chunks, *object_items],
            self.source,
            whole_bytes=self.options.whole_item_bytes,
            max_bytes=self.options.max_request_bytes,
            threads=self.options.num_threads,
            on_group=lambda group: self._take_group(group, chunks, on_item),
        )
        self._small.copy()
        for item, wanted in self._unknown:
            self._load_whole(item, wanted)
        self._transfer(self._large)

    def _take_group(
        self,
        group: Sequence[ItemBytes],
        chunks: Mapping[Item, list[WantedPart]],
        on_item: Callable[[ItemBytes], None],
    ) -> None:
        """Take the items of one request: the first of each form by itself, the others like it."""
        for first, *others in self._prober.sort_alike(group):
            on_item(first)
            alike = self._prober.match_alike(others)
            if alike is None:
                for item in others:
                    on_item(item)
                continue
            payload, crcs = alike
            small: list[SmallChunk] = []
            for item, crc in zip(others, crcs, strict=True):
                wanted = chunks.get(item.item)
                if crc is None or wanted is None:
                    on_item(item)
                    continue
                try:
                    small += self._take_chunk(wanted, item, payload, crc)
                except CheckpointFormatError:
                    on_item(item)  # reads it again, or says where it is
                if len(small) * item.item.length > _BATCH_BYTES:
                    self._small.add(payload, small)
                    small = []
            self._small.add(payload, small)

    def _item(self, part: WantedPart) -> Item:
        stored, i = part.stored, part.chunk
        name = self.catalog.files[int(stored.files[i])]
        return Item(name, int(stored.starts[i]), int(stored.lengths[i]))

    def _check_files(self, chunks: dict[Item, list[WantedPart]], objects: dict[Item, str]) -> None:
        last: dict[str, Item] = {}
        for item in (*chunks, *objects):
            if item.file not in last or item.start > last[item.file].start:
                last[item.file] = item
        for name, item in last.items():
            size = self.source.size(name)
            if item.start + item.length > size:
                fqn = objects[item] if item in objects else chunks[item][0].fqn
                raise StorageError(
                    f"file {name!r}: has {size} bytes, but the metadata place `{fqn}` at bytes "
                    f"{item.start} to {item.start + item.length}; the file is cut",
                    fqn=fqn,
                    file=name,
                    start=item.start,
                    end=item.start + item.length,
                )

    def _take_object(self, fqn: str, item: ItemBytes) -> None:
        with item_context("object", fqn, item.item):
            check_object_size(item.item.length)
            contents = item.read(0, item.item.length)
            if self.options.verify != "off":
                for record in check_records_of(memoryview(contents)):
                    self._note_record(fqn, item.item, record, record.crc, checked=True)
        with self._lock:
            self.found.objects[fqn] = contents

    def _probe_chunk(self, wanted: list[WantedPart], item: ItemBytes) -> None:
        with item_context("tensor", wanted[0].fqn, item.item):
            payload = self._prober.probe(item)
            if payload is None:
                with self._lock:
                    self._unknown.append((item.item, wanted))
                return
            small = self._take_chunk(wanted, item, payload, payload.record.crc)
        self._small.add(payload, small)

    def _take_chunk(
        self, wanted: list[WantedPart], item: ItemBytes, payload: Payload, crc: int
    ) -> Sequence[SmallChunk]:
        """Check a chunk; it is given back if it is a small one, and noted if it is to be read."""
        first, record, whole = wanted[0], payload.record, item.whole
        sizes = tuple(first.stored.chunks.sizes[first.chunk].tolist())
        check_payload(payload, sizes, first.stored.dtype)
        if whole is None:
            for part in wanted:
                self._add_chunk_part(part, item.item, payload, crc)
            return ()
        contents = bytes(whole[record.start : record.start + record.length])
        if self.options.verify == "off" or crc == 0:
            self._note_record(first.fqn, item.item, record, crc)
        elif (found := crc32(contents)) == crc:
            self.found.compared.add((item.item.file, item.item.start + record.start))
        else:
            raise CorruptRecordError(
                f"record `{record.name}`: CRC-32 is {found:#010x}, recorded was {crc:#010x}"
            )
        return (SmallChunk(contents, wanted),)

    def _chunk_part(self, part: WantedPart, item: Item, payload: Payload) -> ChunkPart:
        return ChunkPart(part.fqn, item.file, item.start, payload, part.offsets, part.dest)

    def _add_chunk_part(self, part: WantedPart, item: Item, payload: Payload, crc: int) -> None:
        self._note_record(part.fqn, item, payload.record, crc)
        with self._lock:
            self._large.append(self._chunk_part(part, item, payload))

    def _note_record(
        self, fqn: str, item: Item, record: Record, crc: int, *, checked: bool = False
    ) -> None:
        key = (item.file, item.start + record.start)
        with self._lock:
            use = self.found.records.setdefault(key, RecordUse(fqn, record.length, crc))
        if checked:
            use.parts.append(CrcPart(0, record.length, crc))

    def _load_whole(self, item: Item, wanted: list[WantedPart]) -> None:
        stored = wanted[0].stored
        contents = memoryview(bytearray(item.length))
        self.source.read_into(item.file, item.start, [contents])
        with item_context("tensor", wanted[0].fqn, item):
            if self.options.verify != "off":
                for record in check_records_of(contents):
                    self._note_record(wanted[0].fqn, item, record, record.crc, checked=True)
            sizes = tuple(stored.chunks.sizes[wanted[0].chunk].tolist())
            value = load_unknown(contents, sizes, stored.dtype)
        self.found.chunks_read_whole.append(stored.fqn)
        for part in wanted:
            copy_elements(part.fqn, part.dest, part.select(value))

    def _transfer(self, parts: Sequence[ChunkPart]) -> None:
        requests = plan_requests(
            parts,
            request_bytes=self.options.request_bytes,
            max_bytes=self.options.max_request_bytes,
        )
        total = sum(request.end - request.start for request in requests)
        done = 0

        def on_bytes(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            if self.on_progress is not None:
                self.on_progress(done, total)

        transfer = Transfer(
            self.source,
            threads=self.options.num_threads,
            max_bytes=self.options.max_request_bytes,
            checksums=self.options.verify != "off",
        )
        transfer.run(requests, on_bytes=on_bytes)
        self.found.bytes_direct += transfer.bytes_direct
        for key, crc_parts in transfer.crc_parts.items():
            self.found.records[key].parts += crc_parts
