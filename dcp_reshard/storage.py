"""Where bytes come from: named files of one checkpoint, read by range. No tensors, no formats.

`ByteSource` is the seam: a place that knows the sizes of its files and fills buffers from them. The
reader depends on these four methods alone, so a test, an object store, or a bandwidth-limited
wrapper can stand in. `LocalSource` (of `local_files`) reads a folder.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from dcp_reshard.errors import StorageError
from dcp_reshard.local_files import LocalSource, check_file_name

__all__ = [
    "ByteSource",
    "CountingSource",
    "LocalSource",
    "check_file_name",
    "open_source",
    "read_bytes",
]


class ByteSource(Protocol):
    """Files of one checkpoint.

    Four methods, because these are all the questions that a load asks. Names are strings without a
    folder: what they mean is the source's own business. `read_into` may be called by several
    threads at once.
    """

    def names(self) -> list[str]:
        """Names of the files there are, sorted."""
        ...

    def size(self, name: str) -> int:
        """Size of a file in bytes.

        Raises:
            StorageError: There is no such file, or it is not a regular one.
            UnsafeCheckpointError: The name leads out of the checkpoint.
        """
        ...

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, one after the other, with the bytes that start at `offset`.

        Raises:
            StorageError: The bytes could not be read, all of them; the buffers are then undefined.
        """
        ...

    def close(self) -> None:
        """Release what is held open, and check that no file changed since it was first opened.

        The source stays usable: what is asked for again is opened again.

        Raises:
            StorageError: A file was replaced or written to during the load.
        """
        ...


@dataclass(slots=True, eq=False)
class CountingSource:
    """Another source, and how much it was asked for."""

    source: ByteSource
    """Where the bytes come from."""

    requests: int = 0
    """Calls of `read_into`."""

    bytes_read: int = 0
    """Bytes of these."""

    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def names(self) -> list[str]:
        """Names of the files there are, sorted."""
        return self.source.names()

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        return self.source.size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes that start at `offset`, and count them."""
        self.source.read_into(name, offset, buffers)
        with self._lock:
            self.requests += 1
            self.bytes_read += sum(buffer.nbytes for buffer in buffers)

    def close(self) -> None:
        """Release what is held open, and check that no file changed."""
        self.source.close()


def read_bytes(source: ByteSource, name: str, start: int, end: int) -> bytes:
    """Bytes `start` to `end` of a file, as a new object.

    Raises:
        StorageError: They could not be read, all of them.
    """
    buffer = bytearray(end - start)
    source.read_into(name, start, [memoryview(buffer)])
    return bytes(buffer)


def open_source(checkpoint: str | os.PathLike[str]) -> ByteSource:
    """The source for a checkpoint's path.

    Raises:
        StorageError: The path is a URL of a kind that is not supported.
    """
    if "://" in os.fspath(checkpoint):
        raise StorageError(
            f"checkpoint {os.fspath(checkpoint)!r}: only folders of a local or mounted file "
            f"system are "
            f"supported, not URLs"
        )
    return LocalSource(checkpoint)
