"""A `ReadPlan` as torch's `LoadPlan`: its read items are made if someone looks at them.

Each item says where its part lies in the *global* tensor: its destination is named by the offsets
of a box that this rank holds (the displaced index of torch's `_ReaderWithOffset`), its source by
the offsets of a stored chunk, and both offsets of the part are counted from there.

Between our planner and our reader the items would be made, asked back for memory one by one, and
thrown away. So a `PlannedLoad` carries what they are made of: a reader that knows it takes parts
with their memory, unless anyone has seen the items, and may have changed them, or stands between
planner and reader.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_reshard.box import Box
from dcp_reshard.layout import TensorLayout
from dcp_reshard.parts import WantedPart
from dcp_reshard.plan import ReadPlan, TensorPlan

__all__ = ["Planned", "PlannedLoad", "count_items", "find_planned", "make_read_items"]


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """What the read items of a plan are made of."""

    plan: ReadPlan
    """The plan."""

    layouts: Mapping[str, TensorLayout]
    """Memory for each tensor of it."""

    planner: LoadPlanner
    """Gives just this memory for the items."""

    told: Collection[str]
    """Keys of the tensors that the planner is to be told of once they have been read."""

    @property
    def keys(self) -> set[str]:
        """Keys of the state dict of which anything is read."""
        return {tensor.fqn for tensor in self.plan.tensors if tensor.parts}.union(
            fqn for fqn, _ in self.plan.objects
        )

    @property
    def num_items(self) -> int:
        """Number of read items."""
        return len(self.plan.objects) + sum(len(tensor.parts) for tensor in self.plan.tensors)

    def object_items(self) -> list[ReadItem]:
        """The items of the objects."""
        return [_object_item(fqn, key) for fqn, key in self.plan.objects]

    def parts(self) -> Iterator[tuple[ReadItem | None, WantedPart]]:
        """The parts of all tensors; with its item, if the planner is to be told of it."""
        for tensor in self.plan.tensors:
            parts = _wanted_parts(tensor, self.layouts[tensor.fqn])
            if tensor.fqn in self.told:
                yield from zip(_tensor_items(tensor), parts, strict=True)
            else:
                for part in parts:
                    yield None, part


class PlannedLoad(LoadPlan):
    """A `LoadPlan` whose items are made when they are asked for. A copy of it is a plain one."""

    planned: Planned | None = None
    """What they are made of; None if the plan was given others."""

    @classmethod
    def of(cls, planned: Planned, *, planner_data: object) -> PlannedLoad:
        """The plan that consists of all that was planned."""
        load = object.__new__(cls)
        # Not by `__init__`, which needs the items.
        vars(load).update(planned=planned, storage_data=None, planner_data=planner_data)
        return load

    # An attribute of the instance, also one that `dataclasses.replace` has set, goes before it.
    @cached_property
    def items(self) -> list[ReadItem]:  # type: ignore[override]
        """The read items."""
        return [] if self.planned is None else make_read_items(self.planned.plan)

    def __reduce__(self) -> tuple[Any, ...]:
        """Only what torch knows of goes to another process."""
        return LoadPlan, (self.items, self.storage_data, self.planner_data)


def find_planned(plan: LoadPlan) -> Planned | None:
    """What the items of a plan are made of; None if someone has seen them, or made them."""
    if not isinstance(plan, PlannedLoad) or "items" in vars(plan):
        return None
    return plan.planned


def count_items(plan: LoadPlan) -> int:
    """Number of read items of a plan; makes none."""
    planned = find_planned(plan)
    return len(plan.items) if planned is None else planned.num_items


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


def _tensor_items(tensor: TensorPlan) -> Iterable[ReadItem]:
    chunks, key = tensor.stored.chunks, tensor.stored.fqn
    for part in tensor.parts:
        shard: Box = tensor.want.boxes[part.shard]
        chunk_offsets = tuple(chunks.offsets[part.chunk].tolist())
        yield ReadItem(
            type=LoadItemType.TENSOR,
            dest_index=MetadataIndex(tensor.fqn, shard.offsets, part.shard),
            dest_offsets=torch.Size(_from(shard.offsets, part.region)),
            storage_index=MetadataIndex(key, chunk_offsets, part.chunk),
            storage_offsets=torch.Size(_from(chunk_offsets, part.region)),
            lengths=torch.Size(part.region.sizes),
        )


def _wanted_parts(tensor: TensorPlan, layout: TensorLayout) -> Iterable[WantedPart]:
    stored = tensor.stored
    for part in tensor.parts:
        shard, region = layout.shards[part.shard], part.region
        dest = shard.tensor
        if region != shard.box:
            dest = dest[region.relative_to(shard.box.offsets).slices()]
        # The only chunk of a tensor starts where the tensor does.
        offsets = region.offsets
        if len(stored.chunks) > 1:
            offsets = _from(tuple(stored.chunks.offsets[part.chunk].tolist()), region)
        yield WantedPart(tensor.fqn, stored, part.chunk, offsets, dest)


def _from(origin: tuple[int, ...], region: Box) -> tuple[int, ...]:
    """Where a region starts, counted from `origin`."""
    return tuple(map(operator.sub, region.offsets, origin))
