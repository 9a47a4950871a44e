"""What does a ``.metadata`` pickle say, without running anything that it names?

A pickle is a program. It is run by a machine of our own (`metadata_machine`), that knows only the
names below. Each stands for an inert record with the expected fields and nothing else
(`metadata_entries`), or for a function that checks what it gets; torch's own classes are not built.

Any other name, field, or opcode is an error.
"""

from __future__ import annotations

from pathlib import PurePosixPath

import torch

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.garbage import paused_gc
from dcp_reshard.metadata_entries import (
    BytesEntry,
    ChunkEntry,
    IndexEntry,
    MetadataEntry,
    PropertiesEntry,
    StorageEntry,
    StorageMetaEntry,
    TensorEntry,
    make_size,
)
from dcp_reshard.metadata_machine import run_metadata

__all__ = ["find_class", "unpickle_metadata"]

MAX_METADATA_BYTES = 1 << 30
"""Larger files are refused: some 7 million chunks fit into this."""

_MAX_PATH_PARTS = 256


def _ignored(argument: object) -> None:
    """Stand for a value that the catalog does not keep."""
    if type(argument) is not str and type(argument) is not int:
        raise CheckpointFormatError(f"an argument of type {type(argument).__name__}")


def _memory_format(argument: object) -> None:
    _ignored(argument)


def _member(*arguments: object) -> None:
    """Stand for `getattr`, which no pickle gets: only for naming a member of one enum."""
    if len(arguments) != 2 or arguments[0] is not _memory_format or type(arguments[1]) is not str:
        raise UnsafeCheckpointError(
            "the metadata names `builtins.getattr`, which is allowed for a memory format only; "
            "nothing was imported or run"
        )


def _empty_dict() -> dict[object, object]:
    return {}


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
    (_METADATA, "_MEM_FORMAT_ENCODING"): _memory_format,
    # Python 3.11.0 to 3.11.3 pickles a member of an enum as `getattr(enum, name)`.
    ("builtins", "getattr"): _member,
    ("__builtin__", "getattr"): _member,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): StorageEntry,
    ("torch.serialization", "_get_layout"): _ignored,
    ("torch", "Size"): make_size,
    ("collections", "OrderedDict"): _empty_dict,
    # Python 3.13 pickles paths under `pathlib._local`. A path of the other system is a string here.
    **{
        (module, name): _path
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


def find_class(module: str, name: str) -> object:
    """What stands for a name.

    Raises:
        UnsafeCheckpointError: Nothing does.
    """
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
    try:
        with paused_gc():
            value = run_metadata(data, find_class)
    except CheckpointFormatError as error:
        raise type(error)(f"file {file!r}: {error}", file=file, start=error.start) from error
    except Exception as error:
        # Names that are not UTF-8, calls of another number of arguments.
        raise CheckpointFormatError(
            f"file {file!r}: not readable as checkpoint metadata ({type(error).__name__}: {error})",
            file=file,
        ) from error
    if type(value) is not MetadataEntry or not hasattr(value, "state_dict_metadata"):
        raise CheckpointFormatError(
            f"file {file!r}: holds a {type(value).__name__}, not checkpoint metadata", file=file
        )
    return value
