"""Checkpoints whose data files have something wrong; see `bad_checkpoints`."""

from __future__ import annotations

import io
import os
import pickle
import socket
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dcp_reshard import (
    CheckpointFormatError,
    CorruptRecordError,
    StorageError,
    UnsafeCheckpointError,
)
from tests.support.bad_checkpoints import MARKER, SECOND, Case, find_place
from tests.support.items import saved_bytes, write_container
from tests.support.tensors import indexed_tensor

__all__ = ["FILE_CASES", "object_item", "replace_item"]


def replace_item(path: Path, fqn: str, item: bytes) -> None:
    """Put another item in place of an object, or of the first chunk of a tensor."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    place = find_place(metadata, fqn)
    with (path / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), len(item)
        file.write(item)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def object_item(data: bytes, *records: tuple[str, bytes]) -> bytes:
    """An item whose pickle is this."""
    return write_container([("data.pkl", data), ("byteorder", b"little"), *records])


def _item(fqn: str, make: Callable[[], bytes]) -> Callable[[Path], object]:
    return lambda path: replace_item(path, fqn, make())


def _tensor(value: object) -> Callable[[Path], object]:
    return _item("v", lambda: saved_bytes(value))


def _link(to: Callable[[Path], str | Path]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        (path / SECOND).rename(path / "moved")
        (path / SECOND).symlink_to(to(path))

    return damage


def _instead(make: Callable[[Path], object]) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        (path / SECOND).unlink()
        make(path / SECOND)

    return damage


def _make_socket(path: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.close()


def _append(name: str) -> Callable[[Path], object]:
    return lambda path: (path / name).write_bytes((path / name).read_bytes() + b"more")


def _zero(path: Path) -> None:
    """A block of zeros in the middle of `v`'s elements, as a lost write leaves."""
    elements = indexed_tensor((5,), torch.int64).numpy().tobytes()
    for file in path.glob("*.distcp"):
        data = file.read_bytes()
        file.write_bytes(data.replace(elements, elements[:8] + bytes(24) + elements[32:]))


def _shift(path: Path) -> None:
    data = (path / SECOND).read_bytes()
    (path / SECOND).write_bytes(bytes(16) + data[:-16])


def _legacy() -> bytes:
    buffer = io.BytesIO()
    torch.save(indexed_tensor((5,)), buffer, _use_new_zipfile_serialization=False)
    return buffer.getvalue()


def _tar() -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("storages"))
    return buffer.getvalue()


def _big_endian() -> bytes:
    return saved_bytes(indexed_tensor((5,), torch.int64)).replace(b"little", b"big!!!")


def _deep(levels: int) -> bytes:
    return b"\x80\x02" + b"]" * levels + b"a" * (levels - 1) + b"."


def _laughs() -> bytes:
    """A list of ten lists, each of which is the same list of ten lists, ...: 10**30 values."""
    data = b"\x80\x02(]q\x00"
    for level in range(30):
        data += b"](" + (b"h" + bytes([level])) * 10 + b"eq" + bytes([level + 1])
    return data + b"t."


def _deep_key(levels: int) -> bytes:
    """A dict whose key is a tuple in a tuple in a tuple, ...: hashing it overflows the stack."""
    return b"\x80\x02})" + b"\x85" * levels + b"Ns."


class Unknown:
    """A class that no one has allowed."""


class Runs:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, (f"touch {MARKER}",)


_Format, _Unsafe, _Corrupt = CheckpointFormatError, UnsafeCheckpointError, CorruptRecordError
_SYSTEM_CALL = b"\x80\x02c__builtin__\nbytearray\nJ\xff\xff\xff\x7f\x85R."
_BYTES = b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00idna2\x86R."

FILE_CASES = [
    Case("B18", "inside", _link(lambda path: path / "moved"), _Unsafe, "symbolic link"),
    Case("B18", "outside", _link(lambda path: path.parent / "file"), _Unsafe, "symbolic link"),
    Case("B18", "loop", _link(lambda path: path / SECOND), _Unsafe, "symbolic link"),
    Case("B18", "dangling", _link(lambda path: path / "nothing"), _Unsafe, "symbolic link"),
    Case("B18", "hard link", lambda path: os.link(path / SECOND, path / "linked")),
    Case("B19", "fifo", _instead(os.mkfifo), StorageError, "not a regular file"),
    Case("B19", "folder", _instead(Path.mkdir), StorageError, SECOND),
    Case("B19", "socket", _instead(_make_socket), StorageError, SECOND),
    Case("B20", "missing", lambda path: (path / SECOND).unlink(), StorageError, SECOND),
    Case(
        "B20", "empty", lambda path: os.truncate(path / SECOND, 0), StorageError, "the file is cut"
    ),
    Case("B21", "appended", _append(SECOND)),
    Case("B24", "zeros", _zero, _Corrupt, "`v`"),
    Case("B24", "shifted", _shift, _Format, SECOND),
    Case("B27", "legacy", _item("v", _legacy), _Format, "legacy format"),
    Case("B27", "tar", _item("v", _tar), _Format, "tar"),
    Case("B28", "dict", _tensor({"x": 1}), _Format, "holds a dict"),
    Case("B28", "sparse", _tensor(torch.eye(5).to_sparse()), _Format, "sparse"),
    Case("B28", "meta", _tensor(torch.ones(5, dtype=torch.int64, device="meta")), _Format, "meta"),
    Case(
        "B28",
        "parameter",
        _tensor(torch.nn.Parameter(indexed_tensor((5,), torch.int64), requires_grad=False)),
    ),
    Case("B28", "view", _tensor(torch.arange(-3, 40)[3:8])),
    Case("B30", "shorter", _tensor(indexed_tensor((4,), torch.int64)), _Format, r"\(4,\).*\(5,\)"),
    Case("B30", "longer", _tensor(indexed_tensor((6,), torch.int64)), _Format, r"\(6,\).*\(5,\)"),
    Case("B31", "dtype", _tensor(indexed_tensor((5,))), _Format, "float32.*int64"),
    Case("B35", "big-endian", _item("v", _big_endian), _Format, "byte order|CRC"),
    Case("B36", "class", _item("note", lambda: saved_bytes(Unknown())), _Unsafe, "Unknown"),
    Case("B36", "code", _item("note", lambda: saved_bytes(Runs())), _Unsafe, "system"),
    Case("B36", "deep", _item("note", lambda: object_item(_deep(10**6))), _Unsafe, "deeper"),
    Case("B36", "laughs", _item("note", lambda: object_item(_laughs())), _Unsafe, "values"),
    Case("B36", "deep key", _item("note", lambda: object_item(_deep_key(10**6))), _Unsafe, "key"),
    Case("B36", "2 GiB", _item("note", lambda: object_item(_SYSTEM_CALL)), _Unsafe, "bytearray"),
    Case("B36", "codec", _item("note", lambda: object_item(_BYTES)), _Unsafe, "encode"),
    Case("B36", "length", _item("note", lambda: saved_bytes("x" * (65 << 20))), _Format, "allowed"),
]
