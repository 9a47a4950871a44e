"""Inert records that stand for the classes of a metadata pickle: their fields, and nothing else."""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar

import torch

from dcp_reshard.errors import CheckpointFormatError

__all__ = [
    "BytesEntry",
    "ChunkEntry",
    "Entry",
    "IndexEntry",
    "MetadataEntry",
    "PropertiesEntry",
    "SizeEntry",
    "StorageEntry",
    "StorageMetaEntry",
    "TensorEntry",
    "make_size",
]

# Few bytes refer to a list of any length, again and again.
_MAX_SIZE_LENGTH = 64


class Entry:
    """Base of the records: takes exactly its fields, once."""

    __slots__ = ()
    _fields: ClassVar[frozenset[str]] = frozenset()
    _optional: ClassVar[frozenset[str]] = frozenset()

    def __setstate__(self, state: object) -> None:
        """Take the fields out of a dict."""
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


class MetadataEntry(Entry):
    """Stands for `Metadata`."""

    __slots__ = ("planner_data", "state_dict_metadata", "storage_data", "storage_meta", "version")
    _fields = frozenset(__slots__)
    _optional = frozenset({"planner_data", "storage_meta", "version"})

    planner_data: Any
    state_dict_metadata: Any
    storage_data: Any
    storage_meta: Any
    version: Any


class TensorEntry(Entry):
    """Stands for `TensorStorageMetadata`."""

    __slots__ = ("chunks", "properties", "size")
    _fields = frozenset(__slots__)

    chunks: Any
    properties: Any
    size: Any


class BytesEntry(Entry):
    """Stands for `BytesStorageMetadata`."""

    __slots__ = ()


class ChunkEntry(Entry):
    """Stands for `ChunkStorageMetadata`."""

    __slots__ = ("offsets", "sizes")
    _fields = frozenset(__slots__)

    offsets: Any
    sizes: Any


class IndexEntry(Entry):
    """Stands for `MetadataIndex`; told apart by identity, so duplicates stay visible."""

    __slots__ = ("fqn", "index", "offset")
    _fields = frozenset(__slots__)
    _optional = frozenset({"offset", "index"})

    fqn: Any
    index: Any
    offset: Any


class StorageEntry(Entry):
    """Stands for `_StorageInfo`."""

    __slots__ = ("length", "offset", "relative_path", "transform_descriptors")
    _fields = frozenset(__slots__)
    _optional = frozenset({"transform_descriptors"})

    length: Any
    offset: Any
    relative_path: Any
    transform_descriptors: Any


class StorageMetaEntry(Entry):
    """Stands for `StorageMeta`."""

    __slots__ = ("checkpoint_id", "load_id", "modules", "save_id")
    _fields = frozenset(__slots__)
    _optional = frozenset(__slots__)

    checkpoint_id: Any
    load_id: Any
    modules: Any
    save_id: Any


class PropertiesEntry:
    """Stands for `TensorProperties`, whose state is a tuple; keeps the dtype."""

    __slots__ = ("dtype",)

    def __setstate__(self, state: object) -> None:
        """Take the dtype out of a tuple of five."""
        if hasattr(self, "dtype"):
            raise CheckpointFormatError("TensorProperties: state is set twice")
        if type(state) is not tuple or len(state) != 5 or not isinstance(state[0], torch.dtype):
            raise CheckpointFormatError(
                f"TensorProperties: state {reprlib.repr(state)} is not understood"
            )
        self.dtype: torch.dtype = state[0]


class SizeEntry(tuple[int, ...]):
    """Stands for `torch.Size`: integers from 0 to 2**63-1, checked."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]


def make_size(values: object) -> SizeEntry:
    """A size of these values.

    Raises:
        CheckpointFormatError: They are none.
    """
    if type(values) is not tuple and type(values) is not list:
        raise CheckpointFormatError(f"a size of type {type(values).__name__}")
    if len(values) > _MAX_SIZE_LENGTH:
        raise CheckpointFormatError(f"a size of {len(values)} numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise CheckpointFormatError(
                f"a size with a {type(value).__name__}, not an integer from 0 to 2**63-1"
            )
    return SizeEntry(values)
