"""The container of a stored chunk: which records does it have, and where?

`torch.save` writes a zip archive of uncompressed records. `read_directory` reads the end record,
the directory, and the local header of every record, and refuses whatever `torch.save` would not
have written: compressed, encrypted, overlapping or out-of-order records, gaps, comments, two
records of one name, headers that disagree. It guesses nothing: two zip readers that disagree about
a file are how a checked file becomes another one. The format is that of PKWARE's APPNOTE.TXT,
restricted to stored entries.

Does no I/O of its own: bytes come from the `read` function it is given.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass

from dcp_reshard.errors import CheckpointFormatError, CorruptRecordError

__all__ = ["Read", "Record", "read_directory", "read_record"]

Read = Callable[[int, int], bytes]
"""Bytes `start` to `end` of the item, counted from its own start; both inside the item."""

_MAX_RECORDS = 16
_MAX_DIRECTORY_BYTES = 64 * 1024
_MAX_ENTRY_BYTES = 512
_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_CRC_AT = 16
_HUGE = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Record:
    """One entry of the container."""

    name: str
    """Name without the archive's folder, e.g. ``data/0``."""

    start: int
    """First byte of the contents, counted from the start of the item."""

    length: int
    """Bytes of the contents."""

    crc: int
    """CRC-32 of the contents as recorded; 0 if the writer had checksums off."""

    crc_at: int
    """First byte of the recorded checksum, counted from the start of the item."""


def read_directory(length: int, read: Read, *, max_records: int = _MAX_RECORDS) -> list[Record]:
    """All records of a container, checked against their local headers.

    Args:
        length: Bytes of the container.
        read: Gives bytes of it.
        max_records: A container with more is refused.

    Raises:
        CheckpointFormatError: The container is not what `torch.save` writes.
    """
    if length < _END.size or (length >= 4 and read(0, 4) != b"PK\x03\x04"):
        raise CheckpointFormatError(
            "not a zip container as torch.save writes since version 1.6; the legacy format and tar "
            "files are not supported"
        )
    count, start, size = _read_end(length, read, max_records)
    directory = read(start, start + size)
    records: list[Record] = []
    position = 0
    previous_end = 0
    for _ in range(count):
        if position + _ENTRY.size > size:
            raise CheckpointFormatError("the container's directory is shorter than its entries")
        record, next_position, end = _read_entry(directory, position, start, read, previous_end)
        records.append(record)
        position, previous_end = next_position, end
    if position != size:
        raise CheckpointFormatError(f"the container's directory has {size - position} stray bytes")
    if previous_end != start:
        raise CheckpointFormatError(f"{start - previous_end} stray bytes before the directory")
    names = [record.name for record in records]
    if len(set(names)) != len(names):
        raise CheckpointFormatError(f"the container has two records of one name: {names!r}")
    return records


def _read_end(length: int, read: Read, max_records: int) -> tuple[int, int, int]:
    """Number of records, and start and size of the directory."""
    end_start = length - _END.size
    magic, disk, disk0, here, count, size, start, comment = _END.unpack(read(end_start, length))
    if magic != b"PK\x05\x06" or comment:
        raise CheckpointFormatError("the container does not end with an end record without comment")
    end = end_start
    locator_start = end_start - _LOCATOR.size
    if locator_start >= _END64.size and read(locator_start, locator_start + 4) == b"PK\x06\x07":
        _, _, end64, disks = _LOCATOR.unpack(read(locator_start, end_start))
        if end64 != locator_start - _END64.size or disks != 1:
            raise CheckpointFormatError("the container's zip64 locator is wrong")
        fields = _END64.unpack(read(end64, locator_start))
        magic, _, _, _, disk, disk0, here, count64, size64, start64 = fields
        for short, long, huge in (
            (count, count64, 0xFFFF),
            (size, size64, _HUGE),
            (start, start64, _HUGE),
        ):
            if magic != b"PK\x06\x06" or short not in (long, huge):
                raise CheckpointFormatError("the container's two end records disagree")
        count, size, start, end = count64, size64, start64, end64
    if disk or disk0 or here != count or not 0 < count <= max_records or start + size != end:
        raise CheckpointFormatError("the container's directory is not where its end record says")
    if size > _MAX_DIRECTORY_BYTES + count * _MAX_ENTRY_BYTES:
        raise CheckpointFormatError(f"the container's directory has {size} bytes")
    return count, start, size


def _read_entry(
    directory: bytes, position: int, limit: int, read: Read, expected: int
) -> tuple[Record, int, int]:
    """A directory entry's record, and where the next entry and the next record start."""
    fields = _ENTRY.unpack_from(directory, position)
    magic, _, _, flags, method, _, _, crc, packed, length, n_name, n_extra, n_comment, disk, *_ = (
        fields
    )
    start = fields[-1]
    name_start = position + _ENTRY.size
    extra_start = name_start + n_name
    next_position = extra_start + n_extra + n_comment
    if magic != b"PK\x01\x02" or next_position > len(directory):
        raise CheckpointFormatError("the container's directory has a broken entry")
    raw_name = directory[name_start:extra_start]
    packed, length, start = _widen(
        directory[extra_start : extra_start + n_extra], (length, packed, start)
    )
    # Bit 3: sizes follow the contents; bit 11: the name is UTF-8. Nothing else is written by torch.
    if method or packed != length or flags & ~0x0808 or disk or n_comment:
        raise CheckpointFormatError(f"record {raw_name!r:.100} is compressed, encrypted or split")
    if start != expected:
        raise CheckpointFormatError(
            f"record {raw_name!r:.100} starts at byte {start}, expected {expected}"
        )
    local_end = start + _LOCAL.size
    if local_end > limit:
        raise CheckpointFormatError(f"record {raw_name!r:.100} lies outside of the container")
    local = _LOCAL.unpack(read(start, local_end))
    contents = local_end + local[9] + local[10]
    if (
        local[0] != b"PK\x03\x04"
        or local[2] != flags
        or local[3] != method
        or local[9] != n_name
        or contents + length > limit
        or read(local_end, local_end + n_name) != raw_name
        or local[6] not in (0, crc)
        or local[7] not in (0, length, _HUGE)
        or local[8] not in (0, length, _HUGE)
    ):
        raise CheckpointFormatError(f"record {raw_name!r:.100}: its two headers disagree")
    end = contents + length
    if flags & 0x0008:
        # The descriptor behind the contents has the width that the directory entry needs.
        end += 16 if max(length, start) < _HUGE else 24
    try:
        _, _, name = raw_name.decode().partition("/")
    except UnicodeDecodeError:
        raise CheckpointFormatError(f"record name {raw_name!r:.100} is not UTF-8") from None
    return Record(name, contents, length, crc, limit + position + _CRC_AT), next_position, end


def _widen(extra: bytes, fields: tuple[int, int, int]) -> tuple[int, int, int]:
    """Packed size, size and start; from the zip64 field where the short ones are full."""
    wide = b""
    position = 0
    while position + 4 <= len(extra):
        tag, size = struct.unpack_from("<2H", extra, position)
        if tag == 1:
            wide = extra[position + 4 : position + 4 + size]
        position += 4 + size
    values = []
    for value in fields:
        if value == _HUGE:
            if len(wide) < 8:
                raise CheckpointFormatError("a record's zip64 sizes are missing")
            value = int.from_bytes(wide[:8], "little")
            wide = wide[8:]
        values.append(value)
    length, packed, start = values
    return packed, length, start


def read_record(record: Record, read: Read) -> bytes:
    """The contents of a record, compared with its checksum.

    Raises:
        CorruptRecordError: They differ.
    """
    data = read(record.start, record.start + record.length)
    if record.crc and zlib.crc32(data) != record.crc:
        raise CorruptRecordError(
            f"record `{record.name}`: CRC-32 is {zlib.crc32(data):#010x}, recorded was "
            f"{record.crc:#010x}"
        )
    return data
