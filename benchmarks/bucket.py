"""A storage of limited bandwidth for all ranks of a job, made of a local folder and of waiting.

All ranks draw from one token bucket, a number in a file that each of them maps into memory: the
time at which the storage will have served everything asked of it so far. A request takes its place
in that queue, is read from the local folder, and is answered when its last byte has been served,
plus the latency. So what the ranks read together never exceeds the bandwidth, whatever they do;
latencies of requests made at one time overlap.

What it does not model: a storage that serves some ranks or some patterns better than others, and
caches of any kind.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import struct
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch.distributed.checkpoint.filesystem import FileSystem

from dcp_reshard.catalog import Catalog
from dcp_reshard.metadata import DcpCheckpoint
from dcp_reshard.storage import ByteSource, LocalSource

__all__ = ["Bucket", "ThrottledCheckpoint", "ThrottledFileSystem", "ThrottledSource"]

_TIME = struct.Struct("=d")
# A long read takes its place in the queue slice by slice, so that those of others get theirs.
_SLICE_BYTES = 1 << 20


class Bucket:
    """The queue of the storage, shared by processes of one host.

    Attributes:
        bytes_served: Bytes that this process has got.
        requests: Requests that this process has made.
    """

    def __init__(self, path: str | Path, *, bytes_per_second: float, latency: float) -> None:
        """Open the queue.

        Args:
            path: A file for it, the same on all ranks; made if it is not there.
            bytes_per_second: Bandwidth, for all processes together.
            latency: Seconds that every request takes beside.
        """
        self.bytes_served = 0
        self.requests = 0
        self._rate = bytes_per_second
        self._latency = latency
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        with self._exclusive():
            os.ftruncate(self._file, _TIME.size)
        self._memory = mmap.mmap(self._file, _TIME.size)

    def close(self) -> None:
        """Give the file back."""
        self._memory.close()
        os.close(self._file)

    def serve(self, nbytes: int) -> None:
        """Wait until the storage has served a request of so many bytes."""
        left = nbytes
        while True:
            done = self._take(min(left, _SLICE_BYTES))
            left -= _SLICE_BYTES
            if left <= 0:
                break
            _sleep_until(done)
        _sleep_until(done + self._latency)
        with self._lock:
            self.bytes_served += nbytes
            self.requests += 1

    def _take(self, nbytes: int) -> float:
        """The time at which these bytes will have been served."""
        with self._exclusive():
            (free,) = _TIME.unpack(self._memory[:])
            # The monotonic clock is that of the host, so all processes mean the same time.
            done: float = max(free, time.monotonic()) + nbytes / self._rate
            self._memory[:] = _TIME.pack(done)
        return done

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        # A file lock holds off other processes, but not other threads of this one.
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


class ThrottledSource:
    """A `ByteSource` behind a bucket.

    It does not show what it is made of: the reader would take it for the local folder that it is.
    """

    def __init__(self, inner: ByteSource, bucket: Bucket) -> None:
        """Take the files, and the bucket."""
        self._inner = inner
        self._bucket = bucket

    def names(self) -> list[str]:
        """Names of the files."""
        return self._inner.names()

    def size(self, name: str) -> int:
        """Size of a file."""
        return self._inner.size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, at the speed of the storage."""
        self._inner.read_into(name, offset, buffers)
        self._bucket.serve(sum(buffer.nbytes for buffer in buffers))

    def close(self) -> None:
        """Close the files."""
        self._inner.close()


class ThrottledCheckpoint:
    """A folder that `dcp.save` wrote, behind a bucket, as a `CatalogSource`."""

    def __init__(self, path: str | Path, bucket: Bucket) -> None:
        """Take the folder, and the bucket."""
        self._checkpoint = DcpCheckpoint(path)
        self._path = path
        self._bucket = bucket

    def open(self) -> ByteSource:
        """The files."""
        return ThrottledSource(LocalSource(self._path), self._bucket)

    def read_catalog(self, source: ByteSource) -> Catalog:
        """What they hold."""
        return self._checkpoint.read_catalog(source)


class _ThrottledFile(io.RawIOBase):
    """A file for stock's reader, behind a bucket."""

    def __init__(self, path: str | os.PathLike[str], bucket: Bucket) -> None:
        self._file = io.FileIO(os.fspath(path))
        self._bucket = bucket

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer) or 0
        self._bucket.serve(count)
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class ThrottledFileSystem(FileSystem):
    """The file system of torch's `FileSystemReader` behind a bucket, with `open`'s buffering."""

    def __init__(self, bucket: Bucket) -> None:
        """Take the bucket."""
        self._bucket = bucket

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file to read."""
        assert mode == "rb"
        with io.BufferedReader(cast("Any", _ThrottledFile(path, self._bucket))) as stream:
            yield cast("io.IOBase", stream)
