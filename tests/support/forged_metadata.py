"""A small `Metadata` to be changed by hand, and its catalog."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_reshard.catalog import Catalog
from dcp_reshard.catalog_builder import build_catalog
from dcp_reshard.unpickle import unpickle_metadata

__all__ = [
    "DEEP",
    "ELSEWHERE",
    "Change",
    "add_index",
    "build",
    "chunk",
    "drop_index",
    "make_metadata",
    "set_fields",
    "size",
    "tensor",
]

Change = Callable[[Metadata], object]
"""Changes metadata in place."""

DEEP = "DEEP"
"""Stands for lists in lists, more than can be shown or pickled from Python."""

ELSEWHERE = _StorageInfo("g", 0, 1)
"""A place in a file of its own."""


def size(*values: int) -> torch.Size:
    """A shape, or offsets."""
    return torch.Size(values)


def chunk(offset: int, rows: int) -> ChunkStorageMetadata:
    """Some rows of a tensor of three columns."""
    return ChunkStorageMetadata(size(offset, 0), size(rows, 3))


def tensor(shape: torch.Size, *chunks: ChunkStorageMetadata) -> TensorStorageMetadata:
    """A tensor of these chunks."""
    return TensorStorageMetadata(TensorProperties(torch.float32), shape, list(chunks))


def make_metadata() -> Metadata:
    """Tensor `w` of 4 x 3 in two chunks, and object `n`, one behind the other in a file."""
    return Metadata(
        {"w": tensor(size(4, 3), chunk(0, 2), chunk(2, 2)), "n": BytesStorageMetadata()},
        {"w": ("w",), "n": ("n",)},
        {
            MetadataIndex("w", size(0, 0), 0): _StorageInfo("f", 0, 100),
            MetadataIndex("w", size(2, 0), 1): _StorageInfo("f", 100, 50),
            MetadataIndex("n"): _StorageInfo("f", 150, 7),
        },
        None,
        "1.0.0",
    )


def build(metadata: Metadata) -> Catalog:
    """The catalog of a file with these metadata."""
    nested = b"]" * 50_000 + b"a" * 49_999
    data = pickle.dumps(metadata).replace(b"\x8c\x04DEEP", nested)
    return build_catalog([unpickle_metadata(data, file="f")], digest="")


def set_fields(what: str, **fields: Any) -> Change:
    """Give fields of `metadata`, of `tensor` w, or of the first of its others, any values."""

    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["w"]
        index, info = next(iter(metadata.storage_data.items()))
        values = {"tensor": entry, "chunk": entry.chunks[0], "index": index, "info": info}
        vars(values.get(what, metadata)).update(fields)

    return change


def add_index(fqn: str, offset: torch.Size | None, info: _StorageInfo) -> Change:
    """Add a storage entry, be there one of this key or not."""

    def change(metadata: Metadata) -> None:
        index = MetadataIndex(f"{fqn} to be", offset)
        metadata.storage_data[index] = info
        vars(index)["fqn"] = fqn

    return change


def drop_index(number: int) -> Change:
    """Remove a storage entry."""
    return lambda metadata: metadata.storage_data.pop(list(metadata.storage_data)[number])
