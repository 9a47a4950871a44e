"""Files of a folder that is not trusted: opened safely, and held to what they were at first.

Names are bare file names, links are not followed, only regular files are opened. The folder is
opened once, and files by name inside of it: where a link such as ``latest`` is switched to another
checkpoint in between, this rank goes on in the first one, or fails. Every file must keep the inode,
the size and the modification time that it had when it was first opened.

A hard link is a file like any other: nothing tells it from what it is linked to, and tools that
keep several versions of a folder make them.
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

from dcp_reshard.errors import StorageError, UnsafeCheckpointError

__all__ = ["LocalSource", "check_file_name"]

_MAX_NAME_BYTES = 255
# `IOV_MAX` on Linux: more buffers in one `preadv` are refused with EINVAL.
_MAX_BUFFERS = 1024


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
    if type(name) is not str:
        raise UnsafeCheckpointError(f"a file name of type {type(name).__name__}, not a string")
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
    users: int = 0
    stale: bool = False
    """Not to be given to anyone else; closed by its last user."""


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

    _root_fd: int | None = field(default=None, init=False, repr=False)
    _root_seen: tuple[int, int] | None = field(default=None, init=False, repr=False)
    _files: OrderedDict[str, _OpenFile] = field(default_factory=OrderedDict, init=False, repr=False)
    _seen: dict[str, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False)
    _lock: threading.RLock = field(default_factory=threading.RLock, init=False, repr=False)

    def names(self) -> list[str]:
        """Names of the entries of the folder, sorted."""
        with self._lock:
            try:
                return sorted(os.listdir(self._open_root()))
            except OSError as error:
                raise self._root_error(error) from error

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
                count = self._read(file, name, todo[:_MAX_BUFFERS], position)
                if count == 0:
                    self._set_aside(name, file)
                    wanted = sum(b.nbytes for b in buffers)
                    # The cause tells a retry what happened: a file server may do this once.
                    raise StorageError(
                        f"file {name!r}: ends at byte {position}, {wanted} bytes from byte "
                        f"{offset} were to be read",
                        file=name,
                        start=offset,
                        end=offset + wanted,
                    ) from EOFError(f"no byte at {position}")
                position += count
                while todo and count >= todo[0].nbytes:
                    count -= todo.pop(0).nbytes
                if count:
                    todo[0] = todo[0][count:]

    def close(self) -> None:
        """Close all files, and check that none changed since it was first opened."""
        with self._lock:
            try:
                for name, identity in self._seen.items():
                    self._check_unchanged(name, identity)
            finally:
                files, self._files = self._files, OrderedDict()
                root, self._root_fd = self._root_fd, None
                for file in files.values():
                    os.close(file.fd)
                if root is not None:
                    os.close(root)

    def _check_unchanged(self, name: str, identity: tuple[int, ...]) -> None:
        try:
            now = _identity(os.stat(name, dir_fd=self._open_root(), follow_symlinks=False))
        except StorageError:
            raise
        except FileNotFoundError:
            return  # what was open stayed readable: nothing that was read is in doubt
        except OSError as error:
            raise self._error(name, error) from error
        if now != identity:
            raise StorageError(
                f"file {name!r}: changed during the load (device, inode, size, mtime in ns "
                f"{identity!r} when opened, {now!r} now)",
                file=name,
            )

    def _open_root(self) -> int:
        if self._root_fd is None:
            fd = os.open(self.root, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
            info = os.fstat(fd)
            seen = (info.st_dev, info.st_ino)
            self._root_seen = self._root_seen or seen
            if self._root_seen != seen:
                os.close(fd)
                raise StorageError(
                    f"folder {os.fspath(self.root)!r}: is another one than at the start of the load"
                )
            self._root_fd = fd
        return self._root_fd

    @contextmanager
    def _open(self, name: str) -> Iterator[_OpenFile]:
        with self._lock:
            file = self._files.get(name)
            if file is None:
                file = self._files[name] = self._open_regular(check_file_name(name))
            self._files.move_to_end(name)
            file.users += 1
            self._close_idle(keep=self.max_open_files)
        try:
            yield file
        finally:
            with self._lock:
                file.users -= 1
                if file.stale and not file.users:
                    os.close(file.fd)

    def _close_idle(self, *, keep: int) -> None:
        for name in [n for n, f in self._files.items() if not f.users]:
            if len(self._files) <= keep:
                break
            os.close(self._files.pop(name).fd)

    def _set_aside(self, name: str, file: _OpenFile) -> None:
        """Open the file anew when it is asked for again: a stale handle stays stale."""
        with self._lock:
            file.stale = True
            if self._files.get(name) is file:
                del self._files[name]

    def _open_regular(self, name: str) -> _OpenFile:
        try:
            root = self._open_root()
        except OSError as error:
            raise self._root_error(error) from error
        try:
            fd = self._open_at(root, name)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise UnsafeCheckpointError(
                    f"file {name!r}: is a symbolic link, and links are not followed", file=name
                ) from error
            raise self._error(name, error) from error
        try:
            info = self._stat_open(name, fd)
            if not stat.S_ISREG(info.st_mode):
                raise StorageError(f"file {name!r}: is not a regular file", file=name)
            identity = _identity(info)
            if self._seen.setdefault(name, identity) != identity:
                raise StorageError(f"file {name!r}: was replaced during the load", file=name)
        except BaseException:
            os.close(fd)
            raise
        return _OpenFile(fd, info.st_size)

    def _stat_open(self, name: str, fd: int) -> os.stat_result:
        try:
            return os.fstat(fd)
        except OSError as error:
            raise self._error(name, error) from error

    def _open_at(self, root: int, name: str) -> int:
        # O_NONBLOCK: opening a FIFO for reading would wait for a writer. O_NOFOLLOW: a link would
        # lead out of the folder.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            return os.open(name, flags, dir_fd=root)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._files:
                raise
        # Out of descriptors: those kept for later are given up first.
        self._close_idle(keep=0)
        return os.open(name, flags, dir_fd=root)

    def _read(self, file: _OpenFile, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        try:
            return os.preadv(file.fd, buffers, offset)
        except OSError as error:
            self._set_aside(name, file)
            raise self._error(name, error, offset) from error

    def _error(self, name: str, error: OSError, offset: int | None = None) -> StorageError:
        where = "" if offset is None else f" at byte {offset}"
        return StorageError(
            f"file {name!r} of {os.fspath(self.root)!r}{where}: {_describe(error)}",
            file=name,
            start=offset,
        )

    def _root_error(self, error: OSError) -> StorageError:
        if isinstance(error, StorageError):
            return error
        return StorageError(f"folder {os.fspath(self.root)!r}: {_describe(error)}")


def _describe(error: OSError) -> str:
    code = errno.errorcode.get(error.errno or 0, type(error).__name__)
    return f"{error.strerror or error} ({code})"
