"""A `Catalog` as torch's `Metadata`, and back.

torch's planners and readers expect `Metadata`: an object for every chunk, gigabytes for a large
job. Ours is lazy: `to_torch_metadata` gives a real `Metadata` whose two dicts are views that make
an entry when it is asked for. `catalog_of` takes the catalog out of such a `Metadata` again, or
makes one from what a stock reader has read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import StorageReader

from dcp_reshard._torch import storage_info
from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import Catalog, StoredObject, StoredTensor

__all__ = ["broken_metadata", "catalog_of", "reader_of", "to_torch_metadata"]


def to_torch_metadata(
    catalog: Catalog,
    *,
    storage_meta: StorageMeta | None = None,
    reader: StorageReader | None = None,
) -> Metadata:
    """The catalog as torch's `Metadata`; entries are made when they are asked for.

    Args:
        catalog: What the checkpoint holds.
        storage_meta: What torch wants to know of the storage.
        reader: Reads values of the checkpoint for a planner that needs them to make its plan.
    """
    return Metadata(
        state_dict_metadata=cast("dict[str, STORAGE_TYPES]", _StateDictView(catalog, reader)),
        planner_data=dict(catalog.key_paths) or None,
        storage_data=_StorageView(catalog),
        storage_meta=storage_meta,
        version="1.0.0",
    )


def reader_of(metadata: Metadata) -> StorageReader | None:
    """The reader of a `Metadata`, if it can read while a load is planned."""
    view: object = metadata.state_dict_metadata
    return view.reader if isinstance(view, _StateDictView) else None


def broken_metadata(error: BaseException) -> Metadata:
    """Metadata that could not be read: raises the error when it is looked into.

    torch 2.13 swallows what `read_metadata` raises, logs "Global metadata is not found" whatever it
    was, and fails with an `AssertionError`. Raised a step later, the error reaches all ranks as it
    is.
    """
    return Metadata(state_dict_metadata=cast("dict[str, STORAGE_TYPES]", _BrokenView(error)))


def catalog_of(metadata: Metadata) -> Catalog:
    """The catalog behind a `Metadata`; made from its entries if another reader produced it.

    In the latter case files and byte ranges are not known, and left at zero.

    Raises:
        Exception: What went wrong when the metadata were read.
    """
    view: object = metadata.state_dict_metadata
    if isinstance(view, _StateDictView):
        return view.catalog
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            shape = tuple(entry.size)
            boxes = [Box(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
            unknown = np.zeros(len(boxes), np.int64)
            tensors[fqn] = StoredTensor(
                fqn,
                shape,
                entry.properties.dtype,
                BoxArray.from_boxes(boxes, ndim=len(shape)),
                unknown.astype(np.int32),
                unknown,
                unknown,
            )
        else:
            objects[fqn] = StoredObject(fqn, 0, 0, 0)
    paths = metadata.planner_data if isinstance(metadata.planner_data, dict) else {}
    return Catalog(tensors, objects, (), paths)


@dataclass(frozen=True, slots=True, eq=False)
class _StateDictView(Mapping[str, Any]):
    """`Metadata.state_dict_metadata`, made on demand."""

    catalog: Catalog
    reader: StorageReader | None = None

    def __getitem__(self, fqn: str) -> STORAGE_TYPES:
        if fqn in self.catalog.objects:
            return BytesStorageMetadata()
        stored = self.catalog.tensors[fqn]
        offsets, sizes = stored.chunks.offsets.tolist(), stored.chunks.sizes.tolist()
        chunks = [
            ChunkStorageMetadata(torch.Size(o), torch.Size(s))
            for o, s in zip(offsets, sizes, strict=True)
        ]
        return TensorStorageMetadata(
            TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks
        )

    def __contains__(self, fqn: object) -> bool:
        return fqn in self.catalog

    def __iter__(self) -> Iterator[str]:
        yield from self.catalog.tensors
        yield from self.catalog.objects

    def __len__(self) -> int:
        return len(self.catalog.tensors) + len(self.catalog.objects)


@dataclass(frozen=True, slots=True, eq=False)
class _BrokenView(Mapping[str, Any]):
    error: BaseException

    def __getitem__(self, fqn: str) -> STORAGE_TYPES:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        raise self.error

    def __len__(self) -> int:
        raise self.error


@dataclass(frozen=True, slots=True, eq=False)
class _StorageView(Mapping[MetadataIndex, Any]):
    """`Metadata.storage_data`, made on demand."""

    catalog: Catalog

    def __getitem__(self, index: MetadataIndex) -> object:
        files = self.catalog.files
        stored_object = self.catalog.objects.get(index.fqn)
        if stored_object is not None:
            return storage_info(
                files[stored_object.file], stored_object.start, stored_object.length
            )
        stored = self.catalog.tensors[index.fqn]
        chunk = stored.find_chunk(tuple(index.offset or ()), index.index)
        if chunk is None:
            raise KeyError(index)
        return storage_info(
            files[int(stored.files[chunk])], int(stored.starts[chunk]), int(stored.lengths[chunk])
        )

    def __iter__(self) -> Iterator[MetadataIndex]:
        for fqn, stored in self.catalog.tensors.items():
            for i, offsets in enumerate(stored.chunks.offsets.tolist()):
                yield MetadataIndex(fqn, offsets, i)
        for fqn in self.catalog.objects:
            yield MetadataIndex(fqn)

    def __len__(self) -> int:
        return len(self.catalog.objects) + sum(len(t.chunks) for t in self.catalog.tensors.values())
