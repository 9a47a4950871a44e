"""`ReshardLoadPlanner`: the adapter between `dcp.load` and the plan.

It turns a `ReadPlan` into torch's `LoadPlan`. Each read item says where its part lies in the
*global* tensor (the displaced index of torch's `_ReaderWithOffset`), and the planner resolves that
back to a view of local memory, for any nesting and any number of boxes per tensor.

Until all ranks have planned, and have seen that the values which are not tensors fit, nothing of
the caller's state dict is touched. A reader other than ours gives the values only when it gives the
tensors.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from dcp_reshard._torch import (
    DTensor,
    ShardedTensor,
    default_device,
    empty_dtensor_like,
    empty_sharded_tensor_like,
    flatten_state_dict,
    flatten_state_dict_2_3,
)
from dcp_reshard.box import Box
from dcp_reshard.catalog import Catalog
from dcp_reshard.copying import copy_all
from dcp_reshard.deferred import read_now
from dcp_reshard.destination import before_writing
from dcp_reshard.errors import CheckpointFormatError, LayoutError, PlanError
from dcp_reshard.garbage import paused_gc
from dcp_reshard.layout import LocalShard, TensorLayout, collect_layout
from dcp_reshard.objects import load_data
from dcp_reshard.plan import PlanOptions, ReadPlan, Want, plan_reads
from dcp_reshard.portable import portable
from dcp_reshard.rank_values import AskedFor, collect_asked_for, warn_of_shared_values
from dcp_reshard.read_items import Planned, PlannedLoad, make_read_items
from dcp_reshard.shard_orders import warn_of_shard_orders
from dcp_reshard.stored_keys import check_restored, find_old_objects, match_wrapped
from dcp_reshard.template_load import TemplateLoad
from dcp_reshard.torch_metadata import catalog_of, reader_of
from dcp_reshard.values import (
    Taken,
    check_object,
    is_number,
    merge_object,
    number_as_tensor,
    set_value,
    to_number,
)

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

    checks_objects = True
    """Tells the reader that `check_value` and `load_bytes` run nothing unless they were told to."""

    def __init__(
        self,
        *,
        options: PlanOptions | None = None,
        allowed_classes: Sequence[type] = (),
        allow_unsafe_pickle: bool = False,
        flatten_state_dict: bool = True,
    ) -> None:
        """Keep the options.

        Args:
            options: How to treat what does not match.
            allowed_classes: Classes that values which are not tensors may be instances of, beside
                numbers, strings, tensors and containers of these.
            allow_unsafe_pickle: Unpickle values that are not tensors whatever they are. This runs
                any code that the checkpoint contains.
            flatten_state_dict: Whether nested dicts and lists are looked into, as `dcp.save` does.
        """
        super().__init__(flatten_state_dict=flatten_state_dict)
        self.options = options or PlanOptions()
        self.allowed_classes = tuple(allowed_classes)
        self.allow_unsafe_pickle = allow_unsafe_pickle
        self.plan = None
        self._layouts: dict[str, TensorLayout] = {}
        self._from_numbers: dict[str, TensorLayout] = {}
        self._to_numbers: dict[str, TensorLayout] = {}
        self._keys: dict[str, str] = {}
        self._renamed: dict[str, str] = {}
        self._reader: StorageReader | None = None
        self._templates = TemplateLoad([])
        self._taken: dict[str, Taken] = {}
        self._known: list[tuple[dict[str, Any], str, Taken]] = []
        self._materialised: list[str] = []

    @before_writing
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
        self._taken, self._known, self._materialised = {}, [], []
        self._catalog = catalog_of(metadata)
        self._reader = reader_of(metadata)
        if self.flatten_state_dict:
            self.state_dict, self.mappings = self._flatten(state_dict, self._catalog)
        else:
            self.state_dict = dict(state_dict)
            self.mappings = {key: (key,) for key in state_dict}
        keys = {fqn: self.options.stored_key(fqn) for fqn in self.state_dict}
        self._renamed = match_wrapped(keys, self._catalog)
        self._keys = keys | self._renamed

    @before_writing
    @paused_gc()
    def create_local_plan(self) -> LoadPlan:
        """Plan this rank's reads.

        Raises:
            LayoutError: A tensor of the state dict cannot be described.
            PlanError: The checkpoint and the state dict do not fit.
            ChunkCoverageError: The checkpoint does not hold all of a tensor.

        Warns:
            ShardOrderWarning: Tensors have an order of shards that stock's saves get wrong.
        """
        self._plan_templates()
        layouts = collect_layout(self.state_dict)
        self._from_numbers = {
            fqn: layout for fqn, layout in layouts.items() if self._is_stored_as_number(layout)
        }
        self._to_numbers = self._layouts_of_numbers()
        layouts |= self._to_numbers
        wants = {
            fqn: Want(layout.shape, layout.dtype, tuple(shard.box for shard in layout.shards))
            for fqn, layout in layouts.items()
            if fqn not in self._from_numbers
        }
        objects = [fqn for fqn in self.state_dict if fqn not in wants]
        for fqn in objects:
            if fqn not in layouts:
                check_object(fqn, self.state_dict[fqn])
        if self.options.on_missing == "keep":
            check_restored(self.mappings, self._keys, list(wants), self._catalog)
        plan = plan_reads(
            self._catalog,
            wants,
            objects=objects,
            options=replace(self.options, rename=self._keys),
            read=self._templates.read(),
        )
        plan = replace(
            plan,
            missing=(*plan.missing, *self._templates.unknown),
            renamed=tuple(self._renamed.items()),
            hyper_parameters=self._templates.changes(),
        )
        planned = {tensor.fqn for tensor in plan.tensors}
        self._layouts = {fqn: layout for fqn, layout in layouts.items() if fqn in planned}
        self._materialise_meta_tensors()
        lossy = self.options.dtype_policy == "cast"
        self._known = list(self._templates.convert(lossy=lossy))
        self.plan = plan
        if self.is_coordinator:
            in_parts = [tensor.fqn for tensor in plan.tensors if len(tensor.stored.chunks) > 1]
            warn_of_shard_orders(self.state_dict, in_parts)
        asked_for = collect_asked_for(self.state_dict)
        if type(self) is not ReshardLoadPlanner:
            # A subclass may do something else with the items, or when it is asked for memory.
            return LoadPlan(make_read_items(plan), planner_data=asked_for)
        told = self._layouts if self._templates.compares else self._to_numbers
        made_of = Planned(plan, self._layouts, self, told=told)
        return PlannedLoad.of(made_of, planner_data=asked_for)

    @before_writing
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Look at what all ranks ask for, on the coordinator. No plan is changed.

        Warns:
            RankValueWarning: Ranks under different meshes get one rank's copy of a plain tensor.
        """
        asked = [plan.planner_data for plan in global_plan]
        # A rank that has a metadata file of its own gets its own copies.
        shared = len(asked) > len(self._catalog.read_from)
        # The ranks may have other planners.
        if shared and all(isinstance(one, AskedFor) for one in asked):
            warn_of_shared_values(asked, self.state_dict)
        return global_plan

    @before_writing
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Set what is known already, unless the reader is ours, and asks for it in its time."""
        if self._reader is None:
            self.commit_plan()
        return central_plan

    @property
    def value_keys(self) -> Set[str]:
        """Keys of tensors that `check_value` is to be given before anything is written."""
        return self._to_numbers.keys()

    @portable
    def check_value(self, read_item: ReadItem, value: io.BytesIO | torch.Tensor) -> None:
        """Check that the state dict can take a value that is no tensor on one of the two sides.

        Nothing is written: that is left to `load_bytes` and `commit_tensor`.

        Raises:
            UnsafeCheckpointError: The value is of a class that is not allowed.
            PlanError: The state dict cannot take the value.
        """
        fqn = read_item.dest_index.fqn
        if isinstance(value, torch.Tensor):
            self._templates.check(self.mappings[fqn], value)
            self._taken[fqn] = Taken(to_number(fqn, value, self.state_dict[fqn]))
            return
        loaded = self._load_object(fqn, value)
        self._templates.check(self.mappings[fqn], loaded)
        mine, layout = self.state_dict[fqn], self._from_numbers.get(fqn)
        if layout is None:
            self._taken[fqn] = merge_object(fqn, mine, loaded)
            return
        lossy = self.options.dtype_policy == "cast"
        dests = [shard.tensor for shard in layout.shards]
        copies = [number_as_tensor(fqn, dest, loaded, lossy=lossy) for dest in dests]
        self._taken[fqn] = Taken(mine, copies)

    @portable
    def commit_plan(self) -> None:
        """Set what is known from planning: hyper-parameters of groups, memory for meta tensors."""
        for group, name, taken in self._known:
            copy_all(taken.copies)
            group[name] = taken.value
        for fqn in self._materialised:
            self._set(fqn, self.state_dict[fqn])

    @portable
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Set a value that is not a tensor, read as data only.

        Raises:
            UnsafeCheckpointError: The value is of a class that is not allowed.
            PlanError: A tensor of the state dict cannot take the value.
        """
        self._take(read_item, value)

    def _take(self, read_item: ReadItem, value: io.BytesIO | torch.Tensor) -> None:
        fqn = read_item.dest_index.fqn
        if fqn not in self._taken:  # other readers do not ask before
            self.check_value(read_item, value)
        taken = self._taken.pop(fqn)
        copy_all(taken.copies)
        self._set(fqn, taken.value)

    def _load_object(self, fqn: str, value: io.BytesIO) -> object:
        if self.allow_unsafe_pickle:
            return torch.load(value, map_location="cpu", weights_only=False)
        try:
            return load_data(memoryview(value.read()), allowed_classes=self.allowed_classes)
        except CheckpointFormatError as error:
            raise type(error)(f"object `{fqn}`: {error}", fqn=fqn) from error

    @portable
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take note that a part has been read: a number takes its value from it now.

        Raises:
            PlanError: A number of the type that the state dict has cannot have this value.
        """
        fqn = read_item.dest_index.fqn
        if fqn in self._to_numbers:
            self._take(read_item, tensor)
        else:
            self._templates.check(self.mappings[fqn], tensor)

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
            # torch 2.3 and earlier stored a dict or list without tensors as one object.
            old_values, old_paths = flatten_state_dict_2_3(state_dict)
        except ValueError as error:
            fqn = str(error).removeprefix("duplicated flatten key ")
            raise PlanError(
                f"two values of the state dict have one name: `{fqn}`", fqn=fqn
            ) from error
        keys = {fqn: self.options.stored_key(fqn) for fqn in (*values, *old_values)}
        for fqn, parts in find_old_objects(paths, old_paths, keys, catalog).items():
            for part in parts:
                del values[part], paths[part]
            values[fqn], paths[fqn] = old_values[fqn], old_paths[fqn]
        return values, paths

    def _plan_templates(self) -> None:
        """Plan the parameter groups of optimizers, and take them out of what is left to load."""
        nested = self.original_state_dict if self.flatten_state_dict else {}
        self._templates = TemplateLoad.of(nested, self.options)
        if self._reader is None:
            self._templates.compare(self.mappings, self._keys, self._catalog, self.state_dict)
            return
        for fqn in self._templates.plan(
            self.mappings, self._keys, self._catalog, options=self.options, read=self._read
        ):
            del self.state_dict[fqn], self._keys[fqn]
            self._renamed.pop(fqn, None)

    def _read(self, values: dict[str, Any]) -> None:
        """Fill values of the checkpoint, by key, on this rank alone."""
        assert self._reader is not None
        assert self.metadata is not None
        planner = ReshardLoadPlanner(
            allowed_classes=self.allowed_classes,
            allow_unsafe_pickle=self.allow_unsafe_pickle,
            flatten_state_dict=False,
        )
        read_now(values, storage_reader=self._reader, planner=planner, metadata=self.metadata)

    def _is_stored_as_number(self, layout: TensorLayout) -> bool:
        stored = self._keys[layout.fqn] in self._catalog.objects
        return stored and math.prod(layout.shape) == 1

    def _layouts_of_numbers(self) -> dict[str, TensorLayout]:
        """Memory of their own for numbers that are stored as tensors of one element."""
        layouts: dict[str, TensorLayout] = {}
        for fqn, value in self.state_dict.items():
            if not is_number(value):
                continue
            stored = self._catalog.tensors.get(self._keys[fqn])
            if stored is not None and math.prod(stored.shape) == 1:
                shard = LocalShard(
                    Box.full(stored.shape), torch.empty(stored.shape, dtype=stored.dtype)
                )
                layouts[fqn] = TensorLayout(fqn, stored.shape, stored.dtype, (shard,))
        return layouts

    def _set(self, fqn: str, value: object) -> None:
        self.state_dict[fqn] = value
        set_value(self.original_state_dict, self.mappings[fqn], value)

    def _materialise_meta_tensors(self) -> None:
        # A tensor under several keys (tied parameters) stays one tensor.
        made: dict[int, torch.Tensor] = {}
        for layouts in (self._layouts, self._from_numbers):
            for fqn in layouts:
                tensor = self.state_dict[fqn]
                if isinstance(tensor, torch.Tensor) and _is_meta(tensor):
                    real = made.setdefault(id(tensor), _materialise(tensor))
                    self.state_dict[fqn] = real
                    self._materialised.append(fqn)
                    layouts |= collect_layout({fqn: real})


def _materialise(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        device = default_device(tensor.device_mesh.device_type)
        return empty_dtensor_like(tensor, dtype=tensor.dtype, device=device)
    if isinstance(tensor, ShardedTensor):
        return empty_sharded_tensor_like(tensor, dtype=tensor.dtype, device=default_device())
    return torch.empty_like(tensor, device=default_device())


def _is_meta(tensor: torch.Tensor | TensorLayout) -> bool:
    # torch 2.13 guesses the device of a ShardedTensor that has no shard on this rank, and asks for
    # a CUDA device where the group is not gloo's; without CUDA that raises.
    if isinstance(tensor, ShardedTensor):
        return any(_is_meta(shard.tensor) for shard in tensor.local_shards())
    return not isinstance(tensor, TensorLayout) and tensor.device.type == "meta"
