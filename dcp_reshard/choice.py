"""``mode="auto"``: does every rank read for itself, or each byte once for all? All decide alike.

1. On a disk of the host's own: each for itself. The host's page cache serves its ranks, and other
   hosts have their own copy.
2. On storage that hosts share and the operating system caches (NFS, Lustre, ...), for the ranks of
   one host: each for itself, for the same reason.
3. On shared storage with several hosts, and on any other source (an object store, say, which
   nothing caches): the ranks add up what they would read, each for itself. On shared storage a host
   reads nothing twice. If that is at least `auto_ratio` times what is needed, and at least
   `auto_bytes` more, they read cooperatively.

The first two are decided by the coordinator, with the plans, which costs nothing; the third takes
two collective calls.

An exchange costs a few collective calls and the copies of what is exchanged, so where little is to
be saved reading for oneself is the faster.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Literal

import numpy as np

from dcp_reshard.catalog import StoredObject
from dcp_reshard.domains import IntArray
from dcp_reshard.options import ReaderOptions
from dcp_reshard.parts import WantedPart
from dcp_reshard.ranges import plan_spans
from dcp_reshard.storage import ByteSource, LocalSource

__all__ = [
    "Choice",
    "Storage",
    "choose_by_bytes",
    "choose_by_place",
    "estimate_bytes",
    "find_place",
]

_UNLIMITED = 1 << 62
_LOCAL_FILE_SYSTEMS = frozenset(
    (
        *("apfs", "bcachefs", "btrfs", "erofs", "exfat", "ext2", "ext3", "ext4", "f2fs", "hfs"),
        *("jfs", "overlay", "ramfs", "reiserfs", "rootfs", "squashfs", "tmpfs", "vfat", "xfs"),
        "zfs",
    )
)


class Storage(IntEnum):
    """Who keeps what has been read from it."""

    LOCAL = 0
    """The host, which alone has it."""

    SHARED = 1
    """Each host that has read it."""

    REMOTE = 2
    """Nobody."""


@dataclass(frozen=True, slots=True)
class Choice:
    """How the ranks read, and why."""

    mode: Literal["direct", "cooperative"]
    """The mode."""

    reason: str
    """Why."""


def find_place(source: ByteSource) -> tuple[int, int]:
    """A number of this host, and the kind of storage, as a number too."""
    host = hashlib.blake2b(digest_size=7)
    host.update(socket.gethostname().encode())
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if boot_id.exists():
        host.update(boot_id.read_bytes())
    return int.from_bytes(host.digest(), "little"), int(_find_storage(source))


def _find_storage(source: ByteSource) -> Storage:
    while not isinstance(source, LocalSource):
        inner = getattr(source, "source", None)
        if inner is None:
            return Storage.REMOTE
        source = inner
    mounts = Path("/proc/self/mounts")
    if not mounts.exists():
        return Storage.LOCAL
    kind = _file_system(os.path.realpath(source.root), mounts.read_text(errors="replace"))
    return Storage.LOCAL if kind in _LOCAL_FILE_SYSTEMS else Storage.SHARED


def _file_system(path: str, mounts: str) -> str:
    """The type of the file system that a path is on, from a table like ``/proc/self/mounts``."""
    best, kind = "", ""
    for line in mounts.splitlines():
        _, point, its_kind, *_ = [*line.split(" "), "", "", ""]
        point = point.replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        # The last of several mounts on one point is the one to be seen.
        if inside and len(point) >= len(best):
            best, kind = point, its_kind
    return kind


def choose_by_place(places: IntArray) -> Choice | None:
    """The choice, if it does not depend on what is to be read.

    Args:
        places: What `find_place` says, a row for each rank.
    """
    hosts, storage = len(np.unique(places[:, 0])), Storage(int(places[:, 1].max()))
    if storage == Storage.LOCAL:
        return Choice("direct", f"the files are on a disk of the host ({_count(places)})")
    if storage == Storage.SHARED and hosts == 1:
        return Choice("direct", f"the host caches what its ranks read ({_count(places)})")
    return None


def _count(places: IntArray) -> str:
    return f"{len(places)} ranks on {len(np.unique(places[:, 0]))} hosts"


def choose_by_bytes(
    places: IntArray, wanted: IntArray, *, unique_bytes: int, options: ReaderOptions
) -> Choice:
    """The choice by what is to be read.

    Args:
        places: What `find_place` says, a row for each rank.
        wanted: What each rank would read for itself.
        unique_bytes: What is needed by any rank.
        options: From where on to read cooperatively.
    """
    _, which = np.unique(places[:, 0], return_inverse=True)
    by_host = np.bincount(which.reshape(-1), weights=wanted)
    storage = Storage(int(places[:, 1].max()))
    shared = storage == Storage.SHARED
    total = int(np.minimum(by_host, unique_bytes).sum() if shared else by_host.sum())
    saved = total - unique_bytes
    pays = total >= options.auto_ratio * unique_bytes and saved >= options.auto_bytes
    return Choice(
        "cooperative" if pays else "direct",
        f"{_count(places)} would read {total} bytes from {storage.name.lower()} storage, each for "
        f"itself, of which {unique_bytes} are needed once",
    )


def estimate_bytes(
    parts: Sequence[WantedPart], objects: Sequence[StoredObject], options: ReaderOptions
) -> int:
    """What this rank would read for itself, if chunks are stored row by row."""
    total = sum(stored.length for stored in objects)
    for part in parts:
        sizes = tuple(part.stored.chunks.sizes[part.chunk].tolist())
        itemsize = part.stored.dtype.itemsize
        if tuple(part.dest.shape)[1:] == sizes[1:]:
            total += part.dest.numel() * itemsize
            continue
        strides = [itemsize]
        for size in sizes[:0:-1]:
            strides.append(strides[-1] * size)
        spans = plan_spans(
            part.offsets,
            tuple(part.dest.shape),
            strides=strides[::-1],
            itemsize=itemsize,
            extent=strides[-1] * sizes[0],
            request_bytes=options.request_bytes,
            max_bytes=_UNLIMITED,
        )
        total += sum(span.length for span in spans)
    return total
