"""What does a ``.metadata`` pickle say, without running anything that it names?

A pickle is a program. Two gates stand before it: `opcodes`, and an unpickler whose `find_class`
knows only the names below. Each stands for an inert record with the expected fields and nothing
else (`metadata_entries`); torch's own classes are not built. A tuple becomes a record as well,
which has no hash, and none may be in another (see `opcodes`).

Any other name, field, or opcode is an error.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any

import torch

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.garbage import paused_gc
from dcp_reshard.metadata_entries import (
    BytesEntry,
    ChunkEntry,
    IndexEntry,
    MetadataEntry,
    PropertiesEntry,
    SizeEntry,
    StorageEntry,
    StorageMetaEntry,
    TensorEntry,
    TupleEntry,
)
from dcp_reshard.opcodes import check_opcodes, show_tuples

__all__ = ["unpickle_metadata"]

MAX_METADATA_BYTES = 1 << 30
"""Larger files are refused: some 7 million chunks fit into this."""

_MAX_PATH_PARTS = 256


class _Function:
    """A callable of the pickle; has no attribute that a BUILD opcode could set."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def __call__(self, *args: object) -> object:
        return self._function(*args)

    def __setstate__(self, state: object) -> None:
        raise CheckpointFormatError("a function cannot be given state")


def _ignored(argument: object) -> None:
    """Stand for a value that the catalog does not keep."""
    if type(argument) is not str and type(argument) is not int:
        raise CheckpointFormatError(f"an argument of type {type(argument).__name__}")


_MEMORY_FORMAT = _Function(_ignored)


def _memory_format(*arguments: object) -> None:
    """Stand for `getattr`, which no pickle gets: only for naming a member of one enum."""
    if len(arguments) != 2 or arguments[0] is not _MEMORY_FORMAT or type(arguments[1]) is not str:
        raise UnsafeCheckpointError(
            "the metadata names `builtins.getattr`, which is allowed for a memory format only; "
            "nothing was imported or run"
        )


def _empty_dict() -> dict[object, object]:
    return {}


def _size(values: object) -> SizeEntry:
    if type(values) is TupleEntry:
        values = values.parts
    elif type(values) is not tuple and type(values) is not list:
        raise CheckpointFormatError(f"a size of type {type(values).__name__}")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise CheckpointFormatError(
                f"a size with a {type(value).__name__}, not an integer from 0 to 2**63-1"
            )
    return SizeEntry(values)


def _path(*parts: object) -> str:
    if len(parts) > _MAX_PATH_PARTS or not all(type(part) is str for part in parts):
        raise CheckpointFormatError("a path that does not consist of a few strings")
    return str(PurePosixPath(*map(str, parts)))


_METADATA = "torch.distributed.checkpoint.metadata"
_NAMES: dict[tuple[str, str], object] = {
    (_METADATA, "Metadata"): MetadataEntry,
    (_METADATA, "TensorStorageMetadata"): TensorEntry,
    (_METADATA, "BytesStorageMetadata"): BytesEntry,
    (_METADATA, "ChunkStorageMetadata"): ChunkEntry,
    (_METADATA, "TensorProperties"): PropertiesEntry,
    (_METADATA, "MetadataIndex"): IndexEntry,
    (_METADATA, "StorageMeta"): StorageMetaEntry,
    (_METADATA, "_MEM_FORMAT_ENCODING"): _MEMORY_FORMAT,
    # Python 3.11.0 to 3.11.3 pickles a member of an enum as `getattr(enum, name)`.
    ("builtins", "getattr"): _Function(_memory_format),
    ("__builtin__", "getattr"): _Function(_memory_format),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageEntry,
    ("torch.serialization", "_get_layout"): _Function(_ignored),
    ("torch", "Size"): _Function(_size),
    ("collections", "OrderedDict"): _Function(_empty_dict),
    # Python 3.13 pickles paths under `pathlib._local`. A path of the other system is a string here.
    **{
        (module, name): _Function(_path)
        for module in ("pathlib", "pathlib._local")
        for name in (
            "PosixPath",
            "WindowsPath",
            "PurePosixPath",
            "PureWindowsPath",
            "Path",
            "PurePath",
        )
    },
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _NAMES.get((module, name))
        if known is not None:
            return known
        # Not `getattr`: torch imports some of its modules when they are asked for.
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        raise UnsafeCheckpointError(
            f"the metadata names `{module}.{name}`, which is not a class that checkpoints need; "
            f"nothing was imported or run"
        )

    def persistent_load(self, pid: object) -> object:
        """Look at a tuple; `show_tuples` put in the opcode, `check_opcodes` lets no other pass."""
        if type(pid) is not tuple or any(type(part) in (tuple, TupleEntry) for part in pid):
            raise UnsafeCheckpointError("tuples in tuples are not needed for metadata: refused")
        return TupleEntry(pid)


def unpickle_metadata(data: bytes, *, file: str) -> MetadataEntry:
    """The metadata as inert records.

    Args:
        data: Contents of a ``.metadata`` file.
        file: Its name, for messages.

    Raises:
        UnsafeCheckpointError: The pickle names something that is not allowed.
        CheckpointFormatError: The pickle is broken, too large, or has other fields than expected.
    """
    if len(data) > MAX_METADATA_BYTES:
        raise CheckpointFormatError(
            f"file {file!r}: {len(data)} bytes of metadata, allowed are {MAX_METADATA_BYTES}",
            file=file,
        )
    stream = io.BytesIO(show_tuples(data, check_opcodes(data, file=file)))
    try:
        with paused_gc():
            value = _Unpickler(stream).load()
    except CheckpointFormatError as error:
        raise type(error)(f"file {file!r}: {error}", file=file) from error
    except Exception as error:
        # The C unpickler and the calls it makes raise what they like on bad input (UnpicklingError,
        # EOFError, TypeError, IndexError, UnicodeDecodeError, ...): all of it means a broken file.
        raise CheckpointFormatError(
            f"file {file!r}: not readable as checkpoint metadata ({type(error).__name__}: {error})",
            file=file,
        ) from error
    if type(value) is not MetadataEntry or not hasattr(value, "state_dict_metadata"):
        raise CheckpointFormatError(
            f"file {file!r}: holds a {type(value).__name__}, not checkpoint metadata", file=file
        )
    return value
