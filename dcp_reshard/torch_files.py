"""What is in a file that `torch.save` wrote of a nested dict, and where are its tensors' elements?

The file is one container (`container`) with a record ``data.pkl`` for the dicts and a record for
the elements of each tensor. The pickle is interpreted as data (`pickle_data`): tensors become
`Payload`, numbers, strings and containers what they are, and whatever would need code to be run
becomes `NotData`, with its name, so that the rest of the file can be loaded without it.

Reads the directory, the records' headers and ``data.pkl``; no elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_reshard.container import Read, Record, read_directory
from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.payload import Payload, find_dtype, find_tensor, read_pickle
from dcp_reshard.pickle_data import Call, Global, Persistent, interpret_pickle
from dcp_reshard.pickle_extent import check_extent

__all__ = ["NotData", "flatten_values", "read_torch_file"]

_MAX_RECORDS = 1 << 18
_MAX_PICKLE_BYTES = 64 * 2**20
_MAX_DEPTH = 64
_MAX_VALUES = 8_000_000


@dataclass(frozen=True, slots=True)
class NotData:
    """A value that is not data, or a tensor that is not dense; it is not loaded."""

    kind: str
    """What it is: the name of its class or function."""


def read_torch_file(length: int, read: Read) -> dict[str, object]:
    """The nested dict that a file holds.

    Args:
        length: Bytes of the file.
        read: Gives bytes of it.

    Returns:
        Dicts, lists, tuples, numbers, strings, bytes, None, dtypes; `Payload` for a tensor, with
        bytes counted from the start of the file; `NotData` for anything else.

    Raises:
        CheckpointFormatError: The container or its pickle is not what `torch.save` writes of a
            dict.
        CorruptRecordError: ``data.pkl`` does not have its recorded checksum.
    """
    directory = read_directory(length, read, max_records=_MAX_RECORDS)
    records = {record.name: record for record in directory}
    pickle = read_pickle(records, read, max_bytes=_MAX_PICKLE_BYTES)
    if pickle is None:
        raise CheckpointFormatError(f"`data.pkl` has more than {_MAX_PICKLE_BYTES} bytes")
    value = interpret_pickle(pickle)
    check_extent(value, max_depth=_MAX_DEPTH, max_values=_MAX_VALUES)
    if not isinstance(value, dict):
        raise CheckpointFormatError(f"the file holds a {_kind(value)}, not a dict of tensors")
    return {str(key): _convert(child, records) for key, child in value.items()}


def _convert(value: object, records: Mapping[str, Record]) -> object:
    match value:
        case dict():
            return {key: _convert(child, records) for key, child in value.items()}
        case list():
            return [_convert(child, records) for child in value]
        case tuple():
            return tuple(_convert(child, records) for child in value)
        case Call("torch Size", (tuple() | list() as sizes,)):
            return tuple(_convert(size, records) for size in sizes)
        case Call("_codecs encode", (str() as text, "latin1")):
            # How pickle writes bytes in protocol 2.
            return text.encode("latin1")
        case Call():
            payload = find_tensor(value, records)
            return NotData(_kind(value)) if payload is None else payload
        case Global():
            return find_dtype(value.name) or NotData(_kind(value))
        case Persistent():
            return NotData("storage without a tensor")
        case _:
            return value


def _kind(value: object) -> str:
    match value:
        case Call():
            return value.function.replace(" ", ".")
        case Global():
            return value.name.replace(" ", ".")
        case _:
            return type(value).__name__


def flatten_values(values: Mapping[str, object]) -> dict[tuple[str | int, ...], object]:
    """The leaves of a nested dict by key path, as `dcp.save` flattens state dicts.

    Dicts are looked into, and lists that hold dicts or tensors; another list, and any tuple, is one
    value. A value that holds a tensor or a `NotData` somewhere inside is `NotData`.

    Example:
        >>> flatten_values({"a": {"b": [1, 2]}, "groups": [{"lr": 0.5}]})
        {('a', 'b'): [1, 2], ('groups', 0, 'lr'): 0.5}

    Raises:
        CheckpointFormatError: Two values have one key path: those of keys 0 and "0", say.
    """
    leaves: dict[tuple[str | int, ...], object] = {}

    def visit(path: tuple[str | int, ...], value: object) -> None:
        if isinstance(value, dict):
            for key, child in value.items():
                visit((*path, str(key)), child)
        elif isinstance(value, list) and not _is_leaf(value):
            for i, child in enumerate(value):
                visit((*path, i), child)
        elif path in leaves:
            raise CheckpointFormatError(f"two values have the key path {path!r:.200}")
        else:
            leaves[path] = _as_data(value)

    visit((), dict(values))
    return leaves


def _is_leaf(values: Sequence[object]) -> bool:
    return not any(
        isinstance(value, (dict, Payload)) or (isinstance(value, list) and not _is_leaf(value))
        for value in values
    )


def _as_data(value: object) -> object:
    odd = None if isinstance(value, Payload) else _find_odd(value)
    return value if odd is None else NotData(odd)


def _find_odd(value: object) -> str | None:
    """What there is in a value that is not data."""
    children: Iterable[object] = ()
    match value:
        case NotData():
            return value.kind
        case Payload():
            return "tensor in a tuple"
        case dict():
            children = value.values()
        case list() | tuple():
            children = value
    return next((odd for child in children if (odd := _find_odd(child)) is not None), None)
