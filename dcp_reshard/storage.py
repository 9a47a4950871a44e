"""Where bytes come from: named files of one checkpoint, read by range. No tensors, no formats.

`ByteSource` is the seam: a place that knows the sizes of its files and fills buffers from them. The
reader depends on these four methods alone, so a test, an object store, or a bandwidth-limited
wrapper can stand in.

`LocalSource` reads a folder and trusts nothing in it: names are bare file names, links are not
followed, only regular files are opened, and every file must keep the size, the modification time
and the inode it had when it was opened.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from dcp_reshard.errors import StorageError, UnsafeCheckpointError

__all__ = [
    "ByteSource",
    "CountingSource",
    "LocalSource",
    "check_file_name",
    "open_source",
    "read_bytes",
]

_MAX_NAME_BYTES = 255
# `IOV_MAX` on Linux: more buffers in one `preadv` are refused with EINVAL.
_MAX_BUFFERS = 1024


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


def check_file_name(name: object) -> str:
    r"""Return a name that is a bare file name, and nothing else.

    Refused are folders, parents, absolute and drive paths, URLs, backslashes and control
    characters: names come from the checkpoint, and none may lead out of its folder.

    Raises:
        UnsafeCheckpointError: The name is anything else.

    Example:
        >>> check_file_name("__0_0.distcp")
        '__0_0.distcp'
    """
    if not isinstance(name, str):
        raise UnsafeCheckpointError(f"file name {name!r:.100} is not a string")
    if (
        name in ("", ".", "..")
        or any(c in name for c in "/\\:")
        or not name.isprintable()
        or len(name.encode(errors="surrogatepass")) > _MAX_NAME_BYTES
    ):
        raise UnsafeCheckpointError(
            f"file name {name!r:.100} is not a bare name inside the checkpoint's folder"
        )
    return name


@dataclass(slots=True)
class _OpenFile:
    fd: int
    size: int
    identity: tuple[int, ...]
    users: int = 0


def _identity(info: os.stat_result) -> tuple[int, ...]:
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns)


@dataclass(slots=True)
class LocalSource:
    """Files of one folder of the local (or a mounted) file system.

    Not frozen: it owns open files.
    """

    root: str | os.PathLike[str]
    """The folder."""

    max_open_files: int = 64
    """Files kept open at once."""

    _files: OrderedDict[str, _OpenFile] = field(default_factory=OrderedDict, init=False, repr=False)
    _seen: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def names(self) -> list[str]:
        """Names of the entries of the folder, sorted."""
        try:
            return sorted(entry.name for entry in Path(self.root).iterdir())
        except OSError as error:
            raise StorageError(f"folder {os.fspath(self.root)!r}: {error.strerror}") from error

    def size(self, name: str) -> int:
        """Size of a file in bytes, opening it."""
        with self._open(name) as file:
            return file.size

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes that start at `offset`, in as few calls as possible."""
        todo = [b for b in buffers if b.nbytes]
        with self._open(name) as file:
            position = offset
            while todo:
                count = self._pread(file, name, todo[:_MAX_BUFFERS], position)
                if count == 0:
                    wanted = sum(b.nbytes for b in buffers)
                    raise StorageError(
                        f"file {name!r}: ends at byte {position}, {wanted} bytes from byte "
                        f"{offset} "
                        f"were to be read",
                        file=name,
                        start=offset,
                        end=offset + wanted,
                    )
                position += count
                while todo and count >= todo[0].nbytes:
                    count -= todo.pop(0).nbytes
                if count:
                    todo[0] = todo[0][count:]

    def close(self) -> None:
        """Close all files, and check that none changed since it was first opened."""
        with self._lock:
            files, self._files = self._files, OrderedDict()
            seen = dict(self._seen)
        for file in files.values():
            os.close(file.fd)
        for name, identity in seen.items():
            try:
                now = _identity((Path(self.root) / name).lstat())
            except FileNotFoundError:
                continue  # what was open stayed readable: nothing that was read is in doubt
            except OSError as error:
                raise self._error(name, error) from error
            if now != identity:
                raise StorageError(
                    f"file {name!r}: changed during the load (device, inode, size, mtime in ns "
                    f"{identity!r} when opened, {now!r} now)",
                    file=name,
                )

    @contextmanager
    def _open(self, name: str) -> Iterator[_OpenFile]:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self._open_regular(name)
            self._files.move_to_end(name)
            file.users += 1
            for old in [n for n, f in self._files.items() if not f.users]:
                if len(self._files) <= self.max_open_files:
                    break
                os.close(self._files.pop(old).fd)
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1

    def _open_regular(self, name: str) -> _OpenFile:
        path = Path(self.root) / check_file_name(name)
        # O_NONBLOCK: opening a FIFO for reading would wait for a writer. O_NOFOLLOW: a link would
        # lead out of the folder.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            fd = os.open(path, flags)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnsafeCheckpointError(
                    f"file {name!r}: is a symbolic link, and links are not followed", file=name
                ) from error
            raise self._error(name, error) from error
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise StorageError(f"file {name!r}: is not a regular file", file=name)
            identity = _identity(info)
            if self._seen.setdefault(name, identity) != identity:
                raise StorageError(f"file {name!r}: was replaced during the load", file=name)
        except BaseException:
            os.close(fd)
            raise
        return _OpenFile(fd, info.st_size, identity)

    def _pread(self, file: _OpenFile, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(file.fd, buffers, offset)
        except OSError as error:
            raise self._error(name, error, offset) from error

    def _error(self, name: str, error: OSError, offset: int | None = None) -> StorageError:
        where = "" if offset is None else f" at byte {offset}"
        return StorageError(
            f"file {name!r} of {os.fspath(self.root)!r}{where}: {error.strerror}",
            file=name,
            start=offset,
        )


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
