"""Every stored item has a number, the same on all ranks, so that ranks can name items in arrays.

Chunks are numbered tensor by tensor, in the order of their keys, then the objects. Ranks of one
load have compared the digests of their catalogs, so they number alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dcp_reshard.catalog import Catalog, StoredObject, StoredTensor
from dcp_reshard.domains import IntArray
from dcp_reshard.probe import Item

__all__ = ["Numbering", "number_items"]


@dataclass(frozen=True, slots=True, eq=False)
class Numbering:
    """The items of a catalog as columns; row i is item number i."""

    catalog: Catalog
    """What the checkpoint holds."""

    tensors: tuple[StoredTensor, ...]
    """Tensors in the order of their keys."""

    objects: tuple[StoredObject, ...]
    """Objects in the order of their keys, without those that need no reading."""

    first: IntArray
    """Number of the first chunk of each tensor, and of the first object."""

    by_key: Mapping[str, int]
    """The first number of each key."""

    files: IntArray
    """Index into `Catalog.files`."""

    starts: IntArray
    """First byte of the item in its file."""

    lengths: IntArray
    """Bytes of the item."""

    numels: IntArray
    """Elements of the chunk; bytes of the object."""

    element_bytes: IntArray
    """Bytes of an element of each tensor; 1 for what comes after them."""

    num_dims: IntArray
    """Dims of each tensor; 1 for what comes after them."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks; objects have numbers from here."""
        return int(self.first[-1])

    @property
    def most_dims(self) -> int:
        """Dims of the item that has most of them; an object has one."""
        return int(self.num_dims.max())

    def number(self, fqn: str, chunk: int = 0) -> int:
        """The number of a chunk, or of an object."""
        return self.by_key[fqn] + chunk

    def find_object(self, number: int) -> StoredObject | None:
        """The object of this number; None if it is a chunk's."""
        chunks = self.num_chunks
        return self.objects[number - chunks] if number >= chunks else None

    def find_chunk(self, number: int) -> tuple[StoredTensor, int]:
        """The tensor and the chunk of this number."""
        index = int(np.searchsorted(self.first, number, side="right")) - 1
        return self.tensors[index], number - int(self.first[index])

    def item(self, number: int) -> Item:
        """Where the item is."""
        name = self.catalog.files[int(self.files[number])]
        return Item(name, int(self.starts[number]), int(self.lengths[number]))

    def fqn(self, number: int) -> str:
        """The key of an item."""
        stored = self.find_object(number)
        return stored.fqn if stored is not None else self.find_chunk(number)[0].fqn

    def ndim(self, number: int) -> int:
        """Dims of an item."""
        return int(self.num_dims[np.searchsorted(self.first, number, side="right") - 1])

    def ndims(self, numbers: IntArray) -> IntArray:
        """Dims of each of these items."""
        ndims: IntArray = self.num_dims[self.tensor_indices(numbers)]
        return ndims

    def itemsizes(self, numbers: IntArray) -> IntArray:
        """Bytes of an element of each of these items."""
        itemsizes: IntArray = self.element_bytes[self.tensor_indices(numbers)]
        return itemsizes

    def itemsize(self, number: int) -> int:
        """Bytes of an element of this item."""
        index = np.searchsorted(self.first, number, side="right") - 1
        return int(self.element_bytes[index])

    def tensor_indices(self, numbers: IntArray) -> IntArray:
        """Which of the tensors each of these items belongs to; one past the last for objects."""
        return np.searchsorted(self.first, numbers, side="right") - 1


def number_items(catalog: Catalog) -> Numbering:
    """The numbers of all items of a catalog."""
    tensors = tuple(t for _, t in sorted(catalog.tensors.items()))
    objects = tuple(o for _, o in sorted(catalog.objects.items()) if o.known is None)
    first = np.cumsum([0, *(len(t.chunks) for t in tensors)])
    by_key = dict(zip((t.fqn for t in tensors), first.tolist(), strict=False))
    by_key |= {o.fqn: int(first[-1]) + i for i, o in enumerate(objects)}
    return Numbering(
        catalog,
        tensors,
        objects,
        first,
        by_key,
        _column([*(t.files for t in tensors), [o.file for o in objects]]),
        _column([*(t.starts for t in tensors), [o.start for o in objects]]),
        _column([*(t.lengths for t in tensors), [o.length for o in objects]]),
        _column([*(t.chunks.sizes.prod(axis=1) for t in tensors), [o.length for o in objects]]),
        np.array([*(t.dtype.itemsize for t in tensors), 1], dtype=np.int64),
        np.array([*(len(t.shape) for t in tensors), 1], dtype=np.int64),
    )


def _column(parts: Sequence[Any]) -> IntArray:
    return np.concatenate(parts).astype(np.int64)
