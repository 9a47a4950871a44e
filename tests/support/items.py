"""What `torch.save` writes for one value, and containers that it would never write."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import torch

__all__ = ["EndsSink", "directory_places", "patch", "reader", "saved_bytes", "write_container"]

_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_END = struct.Struct("<4s4H2LH")
_FLAGS = 0x0808


def saved_bytes(value: object) -> bytes:
    """The bytes of an item that holds this value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def reader(data: bytes) -> Callable[[int, int], bytes]:
    """A `Read` over these bytes, which nothing beyond them may be asked of."""

    def read(start: int, end: int) -> bytes:
        assert 0 <= start <= end <= len(data), f"bytes {start} to {end} of {len(data)}"
        return data[start:end]

    return read


def patch(data: bytes, at: int, new: bytes) -> bytes:
    """The bytes with some overwritten; a place below 0 counts from the end."""
    at = at + len(data) if at < 0 else at
    assert 0 <= at <= len(data) - len(new)
    return data[:at] + new + data[at + len(new) :]


def write_container(
    records: Iterable[tuple[str, bytes]], *, gaps: dict[int, int] | None = None
) -> bytes:
    """A container as `torch.save` lays it out.

    Args:
        records: Names without the folder, and contents.
        gaps: Bytes of zeros before some of the records, by number, or before the directory.
    """
    gaps = gaps or {}
    data = bytearray()
    directory = bytearray()
    count = 0
    for number, (name, contents) in enumerate(records):
        data += bytes(gaps.get(number, 0))
        raw = f"archive/{name}".encode()
        start = len(data)
        padding = -(start + _LOCAL.size + len(raw) + 4) % 64
        extra = b"FB" + struct.pack("<H", padding) + b"Z" * padding
        crc, size = zlib.crc32(contents), len(contents)
        data += _LOCAL.pack(b"PK\x03\x04", 0, _FLAGS, 0, 0, 0, 0, 0, 0, len(raw), len(extra))
        data += raw + extra + contents + b"PK\x07\x08" + struct.pack("<3L", crc, size, size)
        directory += _ENTRY.pack(
            b"PK\x01\x02", 0, 0, _FLAGS, 0, 0, 0, crc, size, size, len(raw), 0, 0, 0, 0, 0, start
        )
        directory += raw
        count += 1
    data += bytes(gaps.get(count, 0))
    end = _END.pack(b"PK\x05\x06", 0, 0, count, count, len(directory), len(data), 0)
    return bytes(data + directory + end)


def directory_places(data: bytes) -> list[tuple[int, int]]:
    """Where the local header and the directory entry of each record start."""
    *_, count, _, entry, _ = _END.unpack(data[-_END.size :])
    places = []
    for _ in range(count):
        fields = _ENTRY.unpack_from(data, entry)
        places.append((fields[-1], entry))
        entry += _ENTRY.size + sum(fields[10:13])
    return places


class EndsSink:
    """A file to write gigabytes to, which keeps both ends and counts what is between.

    Attributes:
        length: Bytes written.
    """

    def __init__(self, keep: int) -> None:
        """Keep this many bytes at each end."""
        self.length = 0
        self._keep = keep
        self._head = self._tail = b""

    def write(self, data: Any) -> int:
        """Take bytes, as a file would."""
        view = memoryview(data).cast("B")
        self._head += bytes(view[: self._keep - len(self._head)])
        self._tail = (self._tail + bytes(view[-self._keep :]))[-self._keep :]
        self.length += view.nbytes
        return view.nbytes

    def flush(self) -> None:
        """Do nothing, as there is no file."""

    def read(self, start: int, end: int) -> bytes:
        """A `Read` over what was kept."""
        if end <= len(self._head):
            return self._head[start:end]
        first = self.length - len(self._tail)
        assert first <= start <= end <= self.length, f"bytes {start} to {end} were not kept"
        return self._tail[start - first : end - first]
