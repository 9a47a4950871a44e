"""`ReshardLoadPlanner`: the adapter between `dcp.load` and the plan.

It turns a `ReadPlan` into torch's `LoadPlan`. Each read item says where its part lies in the
*global* tensor (the displaced index of torch's `_ReaderWithOffset`), and the planner resolves that
back to a view of local memory, for any nesting and any number of boxes per tensor.

Until the plan of this rank has succeeded, the caller's state dict is not touched.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from dcp_reshard._torch import (
    DTensor,
    ShardedTensor,
    default_device,
    empty_dtensor_like,
    empty_sharded_tensor_like,
    flatten_state_dict,
    flatten_state_dict_2_3,
    set_element,
)
from dcp_reshard.box import Box
from dcp_reshard.catalog import Catalog
from dcp_reshard.errors import LayoutError, PlanError, UnsafeCheckpointError
from dcp_reshard.garbage import paused_gc
from dcp_reshard.layout import TensorLayout, collect_layout
from dcp_reshard.plan import PlanOptions, ReadPlan, TensorPlan, Want, plan_reads
from dcp_reshard.torch_metadata import catalog_of

__all__ = ["ReshardLoadPlanner"]


class ReshardLoadPlanner(DefaultLoadPlanner):
    """Plans a load into any layout, and proves its coverage before anything is written.

    Works with any `StorageReader`; with `ReshardStorageReader` only the byte ranges needed are
    read.

    Attributes:
        plan: The plan of the latest load on this rank; None before.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> planner = ReshardLoadPlanner(options=PlanOptions(on_missing="keep"))
        >>> dcp.load(state, checkpoint_id=path, planner=planner)  # doctest: +SKIP
    """

    plan: ReadPlan | None

    def __init__(
        self,
        *,
        options: PlanOptions | None = None,
        allowed_classes: Sequence[type] = (),
        flatten_state_dict: bool = True,
    ) -> None:
        """Keep the options.

        Args:
            options: How to treat what does not match.
            allowed_classes: Classes that values which are not tensors may be instances of, beside
                numbers, strings, tensors and containers of these.
            flatten_state_dict: Whether nested dicts and lists are looked into, as `dcp.save` does.
        """
        super().__init__(flatten_state_dict=flatten_state_dict)
        self.options = options or PlanOptions()
        self.allowed_classes = tuple(allowed_classes)
        self.plan = None
        self._layouts: dict[str, TensorLayout] = {}

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take note of what is to be loaded. Unlike torch's planner, this replaces nothing in it.

        Raises:
            PlanError: There is no metadata, or two values have the same flattened key.
        """
        if metadata is None:
            raise PlanError("the storage reader gave no metadata")
        self.original_state_dict = state_dict
        self.metadata = metadata
        self.is_coordinator = is_coordinator
        self.plan = None
        self._catalog = catalog_of(metadata)
        if self.flatten_state_dict:
            self.state_dict, self.mappings = self._flatten(state_dict, self._catalog)
        else:
            self.state_dict = dict(state_dict)
            self.mappings = {key: (key,) for key in state_dict}

    @paused_gc()
    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads.

        Raises:
            LayoutError: A tensor of the state dict cannot be described.
            PlanError: The checkpoint and the state dict do not fit.
            ChunkCoverageError: The checkpoint does not hold all of a tensor.
        """
        layouts = collect_layout(self.state_dict)
        wants = {
            fqn: Want(layout.shape, layout.dtype, tuple(shard.box for shard in layout.shards))
            for fqn, layout in layouts.items()
        }
        objects = [fqn for fqn in self.state_dict if fqn not in layouts]
        plan = plan_reads(self._catalog, wants, objects=objects, options=self.options)
        planned = {tensor.fqn for tensor in plan.tensors}
        self._layouts = {fqn: layout for fqn, layout in layouts.items() if fqn in planned}
        self._materialise_meta_tensors()
        self.plan = plan
        items = [_object_item(fqn, key) for fqn, key in plan.objects]
        for tensor in plan.tensors:
            items += _tensor_items(tensor)
        return LoadPlan(items)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value that is not a tensor, read as data only.

        Raises:
            UnsafeCheckpointError: The value is of a class that is not allowed.
        """
        fqn = read_item.dest_index.fqn
        try:
            with torch.serialization.safe_globals(list(self.allowed_classes)):
                loaded = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(
                f"object `{fqn}`: not plain data, and nothing else is loaded from a checkpoint "
                f"unless its "
                f"class is listed in `allowed_classes` ({str(error)[:500]})",
                fqn=fqn,
            ) from error
        self.state_dict[fqn] = loaded
        set_element(self.original_state_dict, self.mappings[fqn], loaded)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The local memory for a box of a global tensor.

        Args:
            index: Key, and offsets of the box in the global tensor.

        Raises:
            LayoutError: This rank holds no such box.
        """
        layout = self._layouts.get(index.fqn)
        offsets = tuple(index.offset or ())
        shards = layout.shards if layout is not None else ()
        if index.index is not None and index.index < len(shards):
            shard = shards[index.index]
            if shard.box.offsets == offsets:
                return shard.tensor
        for shard in shards:
            if shard.box.offsets == offsets:
                return shard.tensor
        raise LayoutError(
            f"tensor `{index.fqn}`: this rank holds no shard at {offsets!r}", fqn=index.fqn
        )

    def _flatten(
        self, state_dict: dict[str, Any], catalog: Catalog
    ) -> tuple[dict[str, Any], dict[str, tuple[str | int, ...]]]:
        try:
            values, paths = flatten_state_dict(state_dict)
            if all(self.options.stored_key(fqn) in catalog for fqn in values):
                return values, paths
            # torch 2.3 and earlier stored a dict without tensors as one object. If that form finds
            # keys which today's does not, the checkpoint is that old.
            old_values, old_paths = flatten_state_dict_2_3(state_dict)
        except ValueError as error:
            raise PlanError(f"two values of the state dict have one name: {error}") from error
        if any(
            self.options.stored_key(fqn) in catalog for fqn in old_values.keys() - values.keys()
        ):
            return old_values, old_paths
        return values, paths

    def _materialise_meta_tensors(self) -> None:
        for fqn in self._layouts:
            tensor = self.state_dict[fqn]
            if not _is_meta(tensor):
                continue
            real: torch.Tensor
            if isinstance(tensor, DTensor):
                device = default_device(tensor.device_mesh.device_type)
                real = empty_dtensor_like(tensor, dtype=tensor.dtype, device=device)
            elif isinstance(tensor, ShardedTensor):
                real = empty_sharded_tensor_like(
                    tensor, dtype=tensor.dtype, device=default_device()
                )
            else:
                real = torch.empty_like(tensor, device=default_device())
            self.state_dict[fqn] = real
            set_element(self.original_state_dict, self.mappings[fqn], real)
            self._layouts |= collect_layout({fqn: real})


def _is_meta(tensor: torch.Tensor | TensorLayout) -> bool:
    # torch 2.13 guesses the device of a ShardedTensor that has no shard on this rank, and asks for
    # a CUDA device where the group is not gloo's; without CUDA that raises.
    if isinstance(tensor, ShardedTensor):
        return any(_is_meta(shard.tensor) for shard in tensor.local_shards())
    return not isinstance(tensor, TensorLayout) and tensor.device.type == "meta"


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
                dest_offsets=torch.Size(part.region.relative_to(shard.offsets).offsets),
                storage_index=MetadataIndex(key, chunk_offsets, part.chunk),
                storage_offsets=torch.Size(part.region.relative_to(chunk_offsets).offsets),
                lengths=torch.Size(part.region.sizes),
            )
        )
    return items
