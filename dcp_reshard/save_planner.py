"""`ReshardSavePlanner`: a save that records where the elements really are.

torch 2.13's `dcp.save` describes what a rank holds of a DTensor as one box, worked out from the
placements alone. For some uneven sizes under FSDP2 over tensor parallelism that box is not what the
rank holds, and for other strided placements no one box is. Some such saves are refused; some are
accepted, and the checkpoint is wrong: data are under the wrong offsets, or lost, because two ranks
seemed to hold the same.

Here each rank describes what it holds as `layout` sees it, box by box, one chunk for each, and
refuses by name what cannot be described. All else is `DefaultSavePlanner`'s: replicas are stored
once, plans can be cached, `dcp.async_save` works. What is written is an ordinary checkpoint.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from dcp_reshard._torch import sharing_ranks
from dcp_reshard.box import Box
from dcp_reshard.errors import LayoutError
from dcp_reshard.layout import TensorLayout, check_no_pieces, collect_tensor_layout
from dcp_reshard.values import check_object

__all__ = ["ReshardSavePlanner"]


class ReshardSavePlanner(DefaultSavePlanner):
    """Plans a save of any layout, for ``dcp.save(state, planner=ReshardSavePlanner())``.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> dcp.save(state, checkpoint_id=path, planner=ReshardSavePlanner())  # doctest: +SKIP
    """

    def __init__(
        self,
        *,
        flatten_state_dict: bool = True,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
    ) -> None:
        """Keep the options, which are those of `DefaultSavePlanner`.

        Args:
            flatten_state_dict: Whether nested dicts and lists are looked into.
            dedup_save_to_lowest_rank: Whether of several replicas the lowest rank stores its own,
                instead of the rank that has the least to write.
            enable_plan_caching: Whether plans are kept from one save to the next.
        """
        super().__init__(
            flatten_state_dict=flatten_state_dict,
            flatten_sharded_tensors=False,
            dedup_save_to_lowest_rank=dedup_save_to_lowest_rank,
            enable_plan_caching=enable_plan_caching,
        )

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Find out what this rank holds.

        Raises:
            LayoutError: A tensor cannot be described, or is a piece of another one; the message
                names it and the reason.
        """
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        values: dict[str, Any] = {}
        layouts: list[TensorLayout] = []
        for fqn, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor):
                check_object(fqn, value)
            elif sharing_ranks(value) is not None or hasattr(value, "__create_chunk_list__"):
                value = _Chunks.of(fqn, value)
                layouts.append(value.layout)
            else:
                layouts.append(collect_tensor_layout(fqn, value, writable=False))
            values[fqn] = value
        check_no_pieces(layouts)
        self.state_dict = values

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The value, or the memory of the shard, that a write item is for.

        Raises:
            LayoutError: This rank holds no such shard.
        """
        value = self.state_dict[index.fqn]
        if not isinstance(value, _Chunks):
            return super().lookup_object(index)
        return value.find(tuple(index.offset or ()))


@dataclass(frozen=True, slots=True, eq=False)
class _Chunks:
    """Stands for a sharded tensor: torch asks it for its write items, as it asks a DTensor."""

    layout: TensorLayout
    properties: TensorProperties

    @classmethod
    def of(cls, fqn: str, tensor: torch.Tensor) -> _Chunks:
        layout = collect_tensor_layout(fqn, tensor, writable=False)
        properties = TensorProperties(dtype=layout.dtype, requires_grad=tensor.requires_grad)
        return cls(layout, properties)

    # The name is torch's protocol (`_Checkpointable`), and so are the arguments.
    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        shape = torch.Size(self.layout.shape)
        items = []
        for box in self._boxes():
            offsets = torch.Size(box.offsets)
            chunk = ChunkStorageMetadata(offsets, torch.Size(box.sizes))
            data = TensorWriteData(chunk, self.properties, shape)
            items.append(
                WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data)
            )
        return items

    def _boxes(self) -> list[Box]:
        # A tensor without elements has a key, but no rank holds a box of it: each offers the whole.
        if math.prod(self.layout.shape) == 0:
            return [Box.full(self.layout.shape)]
        return [shard.box for shard in self.layout.shards]

    def find(self, offsets: tuple[int, ...]) -> torch.Tensor:
        for shard in self.layout.shards:
            if shard.box.offsets == offsets:
                return shard.tensor
        if math.prod(self.layout.shape) == 0:
            return torch.empty(self.layout.shape, dtype=self.layout.dtype)
        raise LayoutError(
            f"tensor `{self.layout.fqn}`: this rank holds no shard at {offsets!r}",
            fqn=self.layout.fqn,
        )
