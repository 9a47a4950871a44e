"""Inert records that stand for the classes of a metadata pickle: their fields, and nothing else."""

from __future__ import annotations

import reprlib
from typing import Any, ClassVar

import torch

from dcp_reshard.errors import CheckpointFormatError

__all__ = [
    "BytesEntry",
    "ChunkEntry",
    "IndexEntry",
    "MetadataEntry",
    "PropertiesEntry",
    "SizeEntry",
    "StorageEntry",
    "StorageMetaEntry",
    "TensorEntry",
    "TupleEntry",
]


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


class PropertiesEntry:
    """Stands for `TensorProperties`, whose state is a tuple; keeps the dtype."""

    __slots__ = ("dtype",)

    def __setstate__(self, state: object) -> None:
        """Take the dtype out of a tuple of five."""
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
