"""Probing many items in few reads: payloads of large items, contents of small ones.

An item is what one stored chunk or object occupies in a file. Of a large one the two ends are read,
where its container says what is inside; a small one is read whole, so that it needs no second
request. Ends and small items that lie close to each other in the file are fetched together.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from dcp_reshard.payload import PROBE_BYTES
from dcp_reshard.ranges import ByteRange, group_ranges
from dcp_reshard.storage import CountingSource
from dcp_reshard.threads import run_threads

__all__ = ["Item", "ItemBytes", "probe_groups", "probe_items"]

_MAX_GAP = 4096


class Item(NamedTuple):
    """Bytes of one stored chunk or object."""

    file: str
    """Name of the file."""

    start: int
    """First byte."""

    length: int
    """Number of bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class ItemBytes:
    """Bytes of an item that have been read; others are read when asked for."""

    item: Item
    """Which item."""

    parts: tuple[tuple[int, memoryview], ...]
    """Start, counted from the start of the item, and contents."""

    source: CountingSource
    """Where to get the rest."""

    def read(self, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of the item."""
        known = self.view(start, end)
        if known is not None:
            return bytes(known)
        buffer = bytearray(end - start)
        self.source.read_into(self.item.file, self.item.start + start, [memoryview(buffer)])
        return bytes(buffer)

    def view(self, start: int, end: int) -> memoryview | None:
        """Bytes `start` to `end` of the item, if they have been read."""
        for first, contents in self.parts:
            if first <= start and end <= first + len(contents):
                return contents[start - first : end - first]
        return None

    def read_again(self) -> ItemBytes | None:
        """The same bytes, read once more; None if they are as they were."""
        parts = [(first, memoryview(bytearray(len(contents)))) for first, contents in self.parts]
        for first, contents in parts:
            self.source.read_into(self.item.file, self.item.start + first, [contents])
        return (
            None if parts == list(self.parts) else ItemBytes(self.item, tuple(parts), self.source)
        )

    @property
    def whole(self) -> memoryview | None:
        """The whole item, if it has been read."""
        first, contents = self.parts[0]
        return contents if first == 0 and len(contents) == self.item.length else None


@dataclass(slots=True, eq=False)
class _Ends:
    """Ends of large items that wait for their other end."""

    waiting: dict[Item, tuple[int, memoryview]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def match(
        self, item: Item, part: tuple[int, memoryview]
    ) -> tuple[tuple[int, memoryview], ...] | None:
        with self.lock:
            other = self.waiting.pop(item, None)
            if other is None:
                # A copy: a view would keep the buffer of the whole group alive.
                self.waiting[item] = (part[0], memoryview(bytes(part[1])))
                return None
            return tuple(sorted((other, part), key=lambda p: p[0]))


def probe_items(
    items: Iterable[Item],
    source: CountingSource,
    *,
    whole_bytes: int,
    max_bytes: int,
    threads: int,
    on_item: Callable[[ItemBytes], None],
) -> None:
    """As `probe_groups`, for a function of one item."""

    def on_group(group: Sequence[ItemBytes]) -> None:
        for item in group:
            on_item(item)

    probe_groups(
        items,
        source,
        whole_bytes=whole_bytes,
        max_bytes=max_bytes,
        threads=threads,
        on_group=on_group,
    )


def probe_groups(
    items: Iterable[Item],
    source: CountingSource,
    *,
    whole_bytes: int,
    max_bytes: int,
    threads: int,
    on_group: Callable[[Sequence[ItemBytes]], None],
) -> None:
    """Read the ends of large items and all of small ones.

    Args:
        items: What to probe; each once.
        source: Where the bytes come from.
        whole_bytes: Items up to this length are read whole.
        max_bytes: Largest request (unless one item is longer, and to be read whole).
        threads: Threads that read.
        on_group: Called with the items of which one request brought the last bytes, by several
            threads at once. The bytes are its to use until it returns.

    Raises:
        StorageError: Bytes could not be read.
    """
    by_file: dict[str, list[Item]] = {}
    for item in items:
        by_file.setdefault(item.file, []).append(item)
    ends = _Ends()

    def read_group(group: tuple[str, int, int, Sequence[tuple[Item, int, int]]]) -> None:
        file, start, end, members = group
        buffer = memoryview(bytearray(end - start))
        source.read_into(file, start, [buffer])
        complete: list[ItemBytes] = []
        for item, first, last in members:
            offset = item.start + first - start
            part = (first, buffer[offset : offset + last - first])
            parts = (part,) if last - first == item.length else ends.match(item, part)
            if parts is not None:
                complete.append(ItemBytes(item, parts, source))
        on_group(complete)

    run_threads(
        read_group,
        _groups(by_file, whole_bytes, max_bytes),
        threads=threads,
        on_result=lambda _: None,
    )


def _groups(
    by_file: dict[str, list[Item]], whole_bytes: int, max_bytes: int
) -> Iterator[tuple[str, int, int, Sequence[tuple[Item, int, int]]]]:
    for file, items in sorted(by_file.items()):
        wanted: list[tuple[Item, int, int]] = []
        for item in items:
            if item.length <= max(whole_bytes, 2 * PROBE_BYTES):
                wanted.append((item, 0, item.length))
            else:
                wanted.append((item, 0, PROBE_BYTES))
                wanted.append((item, item.length - PROBE_BYTES, item.length))
        ranges = [ByteRange(item.start + a, item.start + b) for item, a, b in wanted]
        for group in group_ranges(ranges, max_gap=_MAX_GAP, max_bytes=max_bytes):
            yield file, group.start, group.end, [wanted[i] for i in group.members]
