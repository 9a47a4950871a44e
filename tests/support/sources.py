"""A byte source that remembers what it was asked for, and fails on demand; a checkpoint of such."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dcp_reshard.catalog import Catalog
from dcp_reshard.metadata import METADATA_FILE, read_catalog
from dcp_reshard.storage import ByteSource, LocalSource

__all__ = ["InterceptedCheckpoint", "RecordingCheckpoint", "RecordingSource", "Request"]


class Request(NamedTuple):
    """One call of `read_into`."""

    name: str
    offset: int
    length: int


class RecordingSource:
    """Passes everything on to another source and keeps the requests, in the order of their arrival.

    Attributes:
        requests: What was asked for, failed requests included.
        closed: Whether `close` was called.
    """

    def __init__(
        self,
        inner: ByteSource,
        *,
        fail_at: int | None = None,
        error: Exception | None = None,
    ) -> None:
        """Wrap `inner`.

        Args:
            inner: Where the bytes come from.
            fail_at: Number of the request, from 0, that fails.
            error: What it fails with, by default an `OSError`.
        """
        self.requests: list[Request] = []
        self.closed = False
        self._inner = inner
        self._fail_at = fail_at
        self._error = error or OSError(5, "told to fail")
        self._lock = threading.Lock()

    @property
    def bytes_requested(self) -> int:
        """Sum of the lengths of all requests."""
        return sum(request.length for request in self.requests)

    def names(self) -> list[str]:
        """Names of the files there are."""
        return self._inner.names()

    def size(self, name: str) -> int:
        """Size of a file."""
        return self._inner.size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers, and remember that."""
        length = sum(buffer.nbytes for buffer in buffers)
        with self._lock:
            number = len(self.requests)
            self.requests.append(Request(name, offset, length))
        if number == self._fail_at:
            raise self._error
        self._inner.read_into(name, offset, buffers)

    def close(self) -> None:
        """Close the other source."""
        self.closed = True
        self._inner.close()


class RecordingCheckpoint:
    """A folder that `dcp.save` wrote, as a `CatalogSource` whose source remembers.

    Attributes:
        source: What the reader opened last.
    """

    source: RecordingSource

    def __init__(self, path: str | Path, **options: Any) -> None:
        """Take the folder, and options for the `RecordingSource`."""
        self._path = Path(path)
        self._options = options

    def open(self) -> ByteSource:
        """The files of the folder."""
        self.source = RecordingSource(LocalSource(self._path), **self._options)
        return self.source

    def read_catalog(self, source: ByteSource) -> Catalog:
        """What they hold."""
        return read_catalog(source)

    @property
    def data_requests(self) -> list[Request]:
        """What was asked of data files."""
        return [request for request in self.source.requests if request.name != METADATA_FILE]

    @property
    def data_bytes(self) -> int:
        """Bytes asked of data files."""
        return sum(request.length for request in self.data_requests)


class InterceptedCheckpoint(RecordingCheckpoint):
    """A checkpoint that is its own source, for subclasses to do something else in a method."""

    def open(self) -> ByteSource:
        """This object; what it is asked for it passes on."""
        super().open()
        return self  # type: ignore[return-value]

    def names(self) -> list[str]:
        """Names of the files there are."""
        return self.source.names()

    def size(self, name: str) -> int:
        """Size of a file."""
        return self.source.size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers."""
        self.source.read_into(name, offset, buffers)

    def close(self) -> None:
        """Close the source."""
        self.source.close()
