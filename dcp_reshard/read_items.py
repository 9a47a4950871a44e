"""A `ReadPlan` as torch's read items.

Each item says where its part lies in the *global* tensor: its destination is named by the offsets
of a box that this rank holds (the displaced index of torch's `_ReaderWithOffset`), its source by
the offsets of a stored chunk, and both offsets of the part are counted from there.
"""

from __future__ import annotations

import operator

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from dcp_reshard.box import Box
from dcp_reshard.plan import ReadPlan, TensorPlan

__all__ = ["make_read_items"]


def make_read_items(plan: ReadPlan) -> list[ReadItem]:
    """The items of a plan, objects first."""
    items = [_object_item(fqn, key) for fqn, key in plan.objects]
    for tensor in plan.tensors:
        items += _tensor_items(tensor)
    return items


def _object_item(fqn: str, key: str) -> ReadItem:
    none = torch.Size((0,))
    return ReadItem(
        type=LoadItemType.BYTE_IO,
        dest_index=MetadataIndex(fqn),
        dest_offsets=none,
        storage_index=MetadataIndex(key),
        storage_offsets=none,
        lengths=none,
    )


def _tensor_items(tensor: TensorPlan) -> list[ReadItem]:
    chunks, key = tensor.stored.chunks, tensor.stored.fqn
    items = []
    for part in tensor.parts:
        shard: Box = tensor.want.boxes[part.shard]
        chunk_offsets = tuple(chunks.offsets[part.chunk].tolist())
        items.append(
            ReadItem(
                type=LoadItemType.TENSOR,
                dest_index=MetadataIndex(tensor.fqn, shard.offsets, part.shard),
                dest_offsets=_from(shard.offsets, part.region),
                storage_index=MetadataIndex(key, chunk_offsets, part.chunk),
                storage_offsets=_from(chunk_offsets, part.region),
                lengths=torch.Size(part.region.sizes),
            )
        )
    return items


def _from(origin: tuple[int, ...], region: Box) -> torch.Size:
    """Where a region starts, counted from `origin`."""
    return torch.Size(map(operator.sub, region.offsets, origin))
