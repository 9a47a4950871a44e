"""What does a ``.metadata`` pickle say, without running anything that it names?

A pickle is a program. Two gates stand before it:

1. `check_opcodes` walks over all opcodes of the file and allows only those that writing a DCP
   `Metadata` needs, with lengths and memo indices inside the file. It comes first because the C
   unpickler allocates by lengths and memo indices before any hook of ours is called. Runs of
   opcodes of fixed length are matched by one regular expression, so that this costs a fraction of
   the unpickling.
2. An unpickler whose `find_class` knows only the names below. Each stands for an inert record
   of this module with the expected fields and nothing else; torch's own classes are not built.

Tuples need care of their own, as keys of dicts. Python hashes a tuple by a recursion in C that
knows no limit: with a few hundred thousand of them inside one another, the process is gone. And the
hash is known, so that any number of tuples of integers can be made up that share one: a dict of
them takes quadratic time. So `check_opcodes` tells where tuples are built of anything but one or
two small integers or arguments of a call; an opcode is put in behind each, by which the unpickler
shows us the tuple, none may be in another, and what it becomes has no hash.

Any other name, field, or opcode is an error.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
import reprlib
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, ClassVar

import torch

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.garbage import paused_gc

__all__ = [
    "BytesEntry",
    "ChunkEntry",
    "IndexEntry",
    "MetadataEntry",
    "SizeEntry",
    "StorageEntry",
    "StorageMetaEntry",
    "TensorEntry",
    "TupleEntry",
    "check_opcodes",
    "unpickle_metadata",
]

MAX_METADATA_BYTES = 1 << 30
"""Larger files are refused: some 7 million chunks fit into this."""

_MAX_PATH_PARTS = 256

# Opcodes without argument: MARK, NONE, REDUCE, APPEND(S), BUILD, EMPTY_*, SETITEM(S), NEWOBJ,
# NEWTRUE, NEWFALSE, MEMOIZE, STACK_GLOBAL.
_PLAIN = rb"(NRaeb}\])su\x81\x88\x89\x94\x93"
_TUPLE_OPCODES = b"t\x85\x86\x87"
_INT = rb"(?:K.|M..|J.{4})"
_FLAT_TUPLES = (
    # One or two integers, and arguments: what is called checks these itself.
    rb"%b(?:\x85|%b\x86)|[t\x85-\x87](?:\x94|q.)?R" % ((_INT,) * 2)
)
# Byte offsets from 2 GiB on.
_LONGS = rb"\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_SHORT_STRINGS = b"|".join(b"\\x8c" + re.escape(bytes([n])) + b".{%d}" % n for n in range(64))
_FIXED = re.compile(
    # BININT1, BINGET, BINPUT | BININT2 | BININT, LONG_BINGET | BINFLOAT | FRAME | SHORT_BINUNICODE.
    # Bounded repetition: the matcher keeps a backtracking point per step.
    rb"(?:%b|[%b]+|[Khq].|M..|[Jj].{4}|[G\x95].{8}|%b|%b){1,4096}"
    % (_FLAT_TUPLES, _PLAIN, _LONGS, _SHORT_STRINGS),
    re.DOTALL,
)
# Opcode -> bytes of its little-endian length field: SHORT_BINUNICODE, BINUNICODE, LONG1.
_COUNTED = {0x8C: 1, 0x58: 4, 0x8A: 1}
_LONG_BINPUT = 0x72
# MEMOIZE, BINPUT, LONG_BINPUT.
_MEMO_BYTES = {b"\x94": 1, b"q": 2, b"r": 5}
_STOP = 0x2E
_GLOBAL = 0x63
# Of longer ones, thousands with one hash can be made up. 2**63 has 9 bytes.
_MAX_LONG_BYTES = 9


def check_opcodes(data: bytes, *, file: str) -> list[int]:
    """Check that a pickle consists of allowed opcodes only, ends with STOP, and stays in bounds.

    Returns:
        Where opcodes end that build a tuple of anything but one or two small integers, or arguments
        of a call.

    Raises:
        UnsafeCheckpointError: An opcode that writing metadata does not need.
        CheckpointFormatError: The pickle is cut, or has bytes after its end.
    """
    if len(data) < 3 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise CheckpointFormatError(
            f"file {file!r}: does not start like a pickle of protocol 2 to 5 ({data[:2]!r})",
            file=file,
        )
    tuples: list[int] = []
    position = 2
    while position < len(data):
        match = _FIXED.match(data, position)
        if match is not None:
            position = match.end()
            continue
        op = data[position]
        start = position
        if op in _COUNTED:
            first = position + 1 + _COUNTED[op]
            length = int.from_bytes(data[position + 1 : first], "little")
            position = first + length
            if op == 0x8A and length > _MAX_LONG_BYTES:
                raise _refuse(file, start, f"an integer of {length} bytes")
        elif op == _LONG_BINPUT:
            position += 5
            # A memo index is at most the number of opcodes before it; the unpickler allocates up to
            # it.
            if int.from_bytes(data[start + 1 : position], "little") > start:
                raise _refuse(file, start, "a memo index beyond the file's own size")
        elif op == _GLOBAL:
            end = data.find(b"\n", data.find(b"\n", position) + 1)
            position = end + 1 if end > position else len(data) + 1
        elif op in _TUPLE_OPCODES:
            position += 1
            if not _is_called(data, position):
                tuples.append(position)
        elif op == _STOP:
            if position + 1 < len(data):
                raise CheckpointFormatError(
                    f"file {file!r}: {len(data) - position - 1} stray bytes after the pickle",
                    file=file,
                    start=position + 1,
                )
            return tuples
        else:
            raise _refuse(file, start, f"opcode {bytes([op])!r}")
        if position > len(data):
            raise CheckpointFormatError(
                f"file {file!r}: cut inside the opcode at byte {start}", file=file, start=start
            )
    raise CheckpointFormatError(
        f"file {file!r}: the pickle ends at byte {len(data)} without STOP", file=file
    )


def _is_called(data: bytes, position: int) -> bool:
    """Whether the tuple built before `position` is at once used as the arguments of a call."""
    memo_bytes = _MEMO_BYTES.get(data[position : position + 1], 0)
    return data[position + memo_bytes : position + memo_bytes + 1] == b"R"


def _refuse(file: str, start: int, what: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"file {file!r}: {what} at byte {start} is not needed for checkpoint metadata, and refused",
        file=file,
        start=start,
    )


class _Entry:
    """Base of the records: takes exactly its fields, once."""

    __slots__ = ()
    _fields: ClassVar[frozenset[str]] = frozenset()
    _optional: ClassVar[frozenset[str]] = frozenset()

    def __setstate__(self, state: object) -> None:
        names: tuple[str, ...] = type(self).__slots__
        again = bool(names) and hasattr(self, names[0])
        if type(state) is dict and state.keys() == self._fields and not again:
            # Three times per chunk; the checks below only tell what is wrong.
            for name in names:
                setattr(self, name, state[name])
            return
        if type(state) is not dict:
            raise CheckpointFormatError(
                f"{type(self).__name__}: state of type {type(state).__name__}"
            )
        if again:
            raise CheckpointFormatError(f"{type(self).__name__}: state is set twice")
        for name in names:
            if name not in state and name not in self._optional:
                raise CheckpointFormatError(f"{type(self).__name__}: field {name!r} is missing")
            setattr(self, name, state.get(name))
        if len(state) > len(names) or not state.keys() <= set(names):
            odd = sorted(map(repr, state.keys() - set(names)))
            raise CheckpointFormatError(f"{type(self).__name__}: unknown fields {odd}")


class MetadataEntry(_Entry):
    """Stands for `Metadata`."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data", "storage_meta", "version")
    _fields = frozenset(__slots__)
    _optional = frozenset({"planner_data", "storage_meta", "version"})

    planner_data: Any
    state_dict_metadata: Any
    storage_data: Any
    storage_meta: Any
    version: Any


class TensorEntry(_Entry):
    """Stands for `TensorStorageMetadata`."""

    __slots__ = ("chunks", "properties", "size")
    _fields = frozenset(__slots__)

    chunks: Any
    properties: Any
    size: Any


class BytesEntry(_Entry):
    """Stands for `BytesStorageMetadata`."""

    __slots__ = ()


class ChunkEntry(_Entry):
    """Stands for `ChunkStorageMetadata`."""

    __slots__ = ("offsets", "sizes")
    _fields = frozenset(__slots__)

    offsets: Any
    sizes: Any


class IndexEntry(_Entry):
    """Stands for `MetadataIndex`; told apart by identity, so duplicates stay visible."""

    __slots__ = ("fqn", "index", "offset")
    _fields = frozenset(__slots__)
    _optional = frozenset({"offset", "index"})

    fqn: Any
    index: Any
    offset: Any


class StorageEntry(_Entry):
    """Stands for `_StorageInfo`."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    _fields = frozenset(__slots__)
    _optional = frozenset({"transform_descriptors"})

    length: Any
    offset: Any
    relative_path: Any
    transform_descriptors: Any


class StorageMetaEntry(_Entry):
    """Stands for `StorageMeta`."""

    __slots__ = ("checkpoint_id", "load_id", "modules", "save_id")
    _fields = frozenset(__slots__)
    _optional = frozenset(__slots__)

    checkpoint_id: Any
    load_id: Any
    modules: Any
    save_id: Any


class _Properties:
    """Stands for `TensorProperties`, whose state is a tuple; keeps the dtype."""

    __slots__ = ("dtype",)

    def __setstate__(self, state: object) -> None:
        if hasattr(self, "dtype"):
            raise CheckpointFormatError("TensorProperties: state is set twice")
        parts = state.parts if type(state) is TupleEntry else state
        if type(parts) is not tuple or len(parts) != 5 or not isinstance(parts[0], torch.dtype):
            raise CheckpointFormatError(
                f"TensorProperties: state {reprlib.repr(parts)} is not understood"
            )
        self.dtype: torch.dtype = parts[0]


class TupleEntry:
    """Stands for a tuple, of which no part is a tuple."""

    __slots__ = ("parts",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts

    def __setstate__(self, state: object) -> None:
        """Refuse what the tuple would not have."""
        raise CheckpointFormatError("a tuple cannot be given state")


class SizeEntry(tuple[int, ...]):
    """Stands for `torch.Size`: integers from 0 to 2**63-1, checked."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


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
    (_METADATA, "TensorProperties"): _Properties,
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
        """Look at a tuple; `_show_tuples` put in the opcode, `check_opcodes` lets no other pass."""
        if type(pid) is not tuple or any(type(part) in (tuple, TupleEntry) for part in pid):
            raise UnsafeCheckpointError("tuples in tuples are not needed for metadata: refused")
        return TupleEntry(pid)


def _show_tuples(data: bytes, tuples: list[int]) -> bytes:
    """The pickle with an opcode behind each of these tuples that has `persistent_load` called.

    All of it is one frame: the pickle's own frames are too short now, and it may have none.
    """
    bounds = [2, *tuples, len(data)]
    body = b"Q".join([data[start:end] for start, end in itertools.pairwise(bounds)])
    return data[:2] + b"\x95" + len(body).to_bytes(8, "little") + body


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
    stream = io.BytesIO(_show_tuples(data, check_opcodes(data, file=file)))
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
