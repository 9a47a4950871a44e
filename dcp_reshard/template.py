"""Payloads of items that differ from one already probed only in contents and checksums.

A checkpoint has thousands of chunks of few shapes, and `torch.save` writes all chunks of one shape
alike, byte for byte, but for the elements, a serialization id, and the checksums of these two.
Parsing each anew is most of what a small tensor costs.

So the bytes that the parser looked at are kept, without the checksums that it only passes on. An
item of the same length in which all of them are equal has the same payload, but for its record's
checksum: the parser would see nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dcp_reshard.container import Record, read_directory
from dcp_reshard.payload import Payload, find_payload
from dcp_reshard.probe import ItemBytes

__all__ = ["PayloadProber"]

_KEY_BYTES = 256
_MAX_TEMPLATES = 4096
_CRC_BYTES = 4
_DESCRIPTOR_BYTES = 24
_JOINED_BYTES = 128


@dataclass(frozen=True, slots=True, eq=False)
class _Template:
    payload: Payload
    seen: tuple[tuple[int, int, bytes], ...]

    def match_all(self, items: Sequence[ItemBytes]) -> list[int | None]:
        """The checksum of the record of each item; None for one that does not match.

        All items are of the template's length, and the same bytes of each have been read.
        """
        starts = [start for start, _ in items[0].parts]
        tables = [
            np.frombuffer(b"".join([item.parts[i][1] for item in items]), np.uint8)
            for i in range(len(starts))
        ]
        tables = [table.reshape(len(items), -1) for table in tables]

        def columns(start: int, end: int) -> npt.NDArray[np.uint8] | None:
            for first, table in zip(starts, tables, strict=True):
                if first <= start and end <= first + table.shape[1]:
                    return table[:, start - first : end - first]
            return None

        equal = np.ones(len(items), dtype=np.bool_)
        for start, end, expected in self.seen:
            found = columns(start, end)
            if found is None:
                return [None] * len(items)
            equal &= (found == np.frombuffer(expected, np.uint8)).all(axis=1)
        crc_at = self.payload.record.crc_at
        crcs = columns(crc_at, crc_at + _CRC_BYTES)
        if crcs is None:
            return [None] * len(items)
        values = np.ascontiguousarray(crcs).view("<u4")[:, 0].tolist()
        return [v if same else None for v, same in zip(values, equal.tolist(), strict=True)]

    def match(self, item: ItemBytes) -> Payload | None:
        for start, end, expected in self.seen:
            found = item.view(start, end)
            if found is None or found != expected:
                return None
        record = self.payload.record
        crc = item.read(record.crc_at, record.crc_at + _CRC_BYTES)
        return replace(self.payload, record=replace(record, crc=int.from_bytes(crc, "little")))


@dataclass(slots=True, eq=False)
class PayloadProber:
    """Probes items, and remembers what they look like. Several threads may use it at once."""

    _templates: dict[tuple[int, bytes], _Template] = field(default_factory=dict, init=False)

    def sort_alike(self, items: Iterable[ItemBytes]) -> list[list[ItemBytes]]:
        """The items, sorted out: those of one list begin alike, and are equally long."""
        alike: dict[tuple[int, bytes], list[ItemBytes]] = {}
        for item in items:
            alike.setdefault(_key(item), []).append(item)
        return list(alike.values())

    def match_alike(
        self, items: Sequence[ItemBytes]
    ) -> tuple[Payload, Sequence[int | None]] | None:
        """What `probe` would find of each of some items alike, all at once.

        Returns:
            A payload, which is that of each item but for the checksum of its record, and the
            checksums; None instead of one for an item that has to be probed by itself, and
            instead of it all where nothing like these has been probed yet.
        """
        template = self._templates.get(_key(items[0])) if items else None
        return None if template is None else (template.payload, template.match_all(items))

    def probe(self, item: ItemBytes) -> Payload | None:
        """Find the elements of an item of which the ends have been read.

        Returns:
            Where the elements are, or None if the item is not one dense tensor.

        Raises:
            CheckpointFormatError: The item is not what `torch.save` writes.
            CorruptRecordError: A record that describes the tensor does not have its checksum.
        """
        key = _key(item)
        template = self._templates.get(key)
        payload = template.match(item) if template is not None else None
        if payload is not None:
            return payload
        seen: list[tuple[int, int]] = []

        def read(start: int, end: int) -> bytes:
            seen.append((start, end))
            return item.read(start, end)

        records = read_directory(item.item.length, read)
        described = len(seen)
        payload = find_payload(records, read)
        if payload is not None and len(self._templates) < _MAX_TEMPLATES:
            # Contents that were looked at have been compared with their checksums; of the other
            # records neither contents nor checksums count.
            used = {start for start, _ in seen[described:]}
            others = [record for record in records if record.start not in used]
            pieces = [(a, b, item.read(a, b)) for a, b in _pieces(seen, others)]
            self._templates[key] = _Template(payload, tuple(pieces))
        return payload


def _key(item: ItemBytes) -> tuple[int, bytes]:
    # The first part starts at byte 0, and is longer than this unless the item is not.
    return item.item.length, bytes(item.parts[0][1][:_KEY_BYTES])


def _pieces(seen: Iterable[tuple[int, int]], others: Iterable[Record]) -> list[tuple[int, int]]:
    """The ranges seen, without the checksums of the other records.

    Ranges that lie close together are joined over what is between them (padding, descriptors),
    unless that holds contents that may differ.
    """
    holes = [(r.crc_at, r.crc_at + _CRC_BYTES) for r in others]
    holes += [(r.start, r.start + r.length + _DESCRIPTOR_BYTES) for r in others]
    pieces: list[tuple[int, int]] = []
    for start, end in sorted(seen):
        last = pieces[-1][1] if pieces else 0
        between = [h for h in holes if h[0] < start and h[1] > last]
        if pieces and start - last <= _JOINED_BYTES and not between:
            pieces[-1] = (pieces[-1][0], max(end, last))
        else:
            pieces.append((start, end))
    for low, high in sorted(holes):
        for i, (start, end) in enumerate(pieces):
            if start < high and low < end:
                pieces[i : i + 1] = [(start, low), (high, end)]
                break
    return [(start, end) for start, end in pieces if start < end]
