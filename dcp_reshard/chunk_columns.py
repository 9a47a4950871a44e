"""Chunks of all tensors as columns: checked in one step, and cut into those of each tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from dcp_reshard.box import BoxArray
from dcp_reshard.catalog import StoredTensor
from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.metadata_entries import SizeEntry, StorageEntry

__all__ = ["TensorChunks", "to_columns"]


@dataclass(slots=True)
class TensorChunks:
    """The chunks of one tensor. Not frozen: files of metadata are read one after the other."""

    shape: tuple[int, ...]
    """Global shape."""

    dtype: torch.dtype
    """dtype of all chunks."""

    offsets: list[SizeEntry] = field(default_factory=list)
    """First index of each chunk in each dim."""

    sizes: list[SizeEntry] = field(default_factory=list)
    """Shape of each chunk."""

    places: list[StorageEntry] = field(default_factory=list)
    """Where each chunk is stored."""

    boxes: set[bytes] = field(default_factory=set)
    """The boxes of the chunks, once there is more than one file."""

    defect: str = ""
    """Why the tensor cannot be loaded, if it cannot."""


def _column(rows: Iterable[list[SizeEntry]]) -> npt.NDArray[np.int64]:
    chain = itertools.chain.from_iterable
    return np.fromiter(chain(chain(rows)), np.int64)


def to_columns(
    tensors: Mapping[str, TensorChunks], ndim: int, numbers: Mapping[str, int]
) -> dict[str, StoredTensor]:
    """Columns of all tensors of one number of dims, checked at once, and cut into tensors.

    Args:
        tensors: The chunks of each tensor, by key.
        ndim: Dims of each of these tensors.
        numbers: The number of each file, by name.

    Raises:
        CheckpointFormatError: A chunk lies outside of its tensor.
    """
    counts = [len(tensor.places) for tensor in tensors.values()]
    places = [place for tensor in tensors.values() for place in tensor.places]
    size = (len(places), ndim)
    offsets = _column(t.offsets for t in tensors.values()).reshape(size)
    sizes = _column(t.sizes for t in tensors.values()).reshape(size)
    files = np.array([numbers[place.relative_path] for place in places], np.int32)
    starts = np.array([place.offset for place in places], np.int64)
    lengths = np.array([place.length for place in places], np.int64)
    shapes = np.array([t.shape for t in tensors.values()], dtype=np.int64).reshape(
        len(tensors), ndim
    )
    limits = np.repeat(shapes, counts, axis=0)
    outside = np.flatnonzero(((offsets > limits) | (sizes > limits - offsets)).any(axis=1))
    if len(outside):
        row = int(outside[0])
        number = int(np.searchsorted(np.cumsum(counts), row, side="right"))
        fqn, tensor = list(tensors.items())[number]
        raise CheckpointFormatError(
            f"tensor `{fqn}`: the chunk at {tuple(offsets[row].tolist())!r} of "
            f"{tuple(sizes[row].tolist())!r} lies outside of shape {tensor.shape!r}",
            fqn=fqn,
        )
    stored: dict[str, StoredTensor] = {}
    first = 0
    for (fqn, tensor), count in zip(tensors.items(), counts, strict=True):
        rows = slice(first, first + count)
        boxes = BoxArray(offsets[rows], sizes[rows])
        stored[fqn] = StoredTensor(
            fqn,
            tensor.shape,
            tensor.dtype,
            boxes,
            files[rows],
            starts[rows],
            lengths[rows],
            defect=tensor.defect,
        )
        first += count
    return stored
