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
from collections.abc import Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from dcp_reshard.copying import copy_all
from dcp_reshard.deferred import read_now
from dcp_reshard.destination import before_writing
from dcp_reshard.errors import CheckpointFormatError, LayoutError, PlanError
from dcp_reshard.garbage import paused_gc
from dcp_reshard.layout import TensorLayout, collect_layout
from dcp_reshard.meta_tensors import make_real
from dcp_reshard.objects import load_data
from dcp_reshard.plan import PlanOptions, ReadPlan, Want, plan_reads
from dcp_reshard.portable import portable
from dcp_reshard.rank_values import AskedFor, collect_asked_for, warn_of_shared_values
from dcp_reshard.read_items import Planned, PlannedLoad, make_read_items
from dcp_reshard.shard_orders import warn_of_shard_orders
from dcp_reshard.stored_keys import check_restored, flatten_as_stored, match_wrapped
from dcp_reshard.template_load import TemplateLoad
from dcp_reshard.torch_metadata import catalog_of, reader_of
from dcp_reshard.value_load import ValueLoad
from dcp_reshard.values import Taken, check_object, set_value

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
        self._keys: dict[str, str] = {}
        self._renamed: dict[str, str] = {}
        self._reader: StorageReader | None = None
        self._templates = TemplateLoad([])
        self._values = ValueLoad({}, {}, lossy=False)
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
        self._known, self._materialised = [], []
        self._catalog = catalog_of(metadata)
        self._reader = reader_of(metadata)
        if self.flatten_state_dict:
            self.state_dict, self.mappings = flatten_as_stored(
                state_dict, self._catalog, self.options.stored_key
            )
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
        lossy = self.options.dtype_policy == "cast"
        self._values = ValueLoad.of(
            self.state_dict, layouts, self._keys, self._catalog, lossy=lossy
        )
        layouts |= self._values.to_numbers
        wants = {
            fqn: Want(layout.shape, layout.dtype, tuple(shard.box for shard in layout.shards))
            for fqn, layout in layouts.items()
            if fqn not in self._values.from_numbers
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
        self._known = list(self._templates.convert(lossy=lossy))
        self.plan = plan
        if self.is_coordinator:
            in_parts = [tensor.fqn for tensor in plan.tensors if len(tensor.stored.chunks) > 1]
            warn_of_shard_orders(self.state_dict, in_parts)
        asked_for = collect_asked_for(self.state_dict)
        if type(self) is not ReshardLoadPlanner:
            # A subclass may do something else with the items, or when it is asked for memory.
            return LoadPlan(make_read_items(plan), planner_data=asked_for)
        told = self._layouts if self._templates.compares else self._values.to_numbers
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
        return self._values.to_numbers.keys()

    @portable
    def check_value(self, read_item: ReadItem, value: io.BytesIO | torch.Tensor) -> None:
        """Check that the state dict can take a value that is no tensor on one of the two sides.

        Nothing is written: that is left to `load_bytes` and `commit_tensor`.

        Raises:
            UnsafeCheckpointError: The value is of a class that is not allowed.
            PlanError: The state dict cannot take the value.
        """
        fqn = read_item.dest_index.fqn
        loaded = value if isinstance(value, torch.Tensor) else self._load_object(fqn, value)
        self._templates.check(self.mappings[fqn], loaded)
        self._values.check(fqn, self.state_dict[fqn], loaded)

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
        if not self._values.has_checked(fqn):  # other readers do not ask before
            self.check_value(read_item, value)
        self._set(fqn, self._values.take(fqn))

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
        if fqn in self._values.to_numbers:
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

    def _set(self, fqn: str, value: object) -> None:
        self.state_dict[fqn] = value
        set_value(self.original_state_dict, self.mappings[fqn], value)

    def _materialise_meta_tensors(self) -> None:
        filled = (self._layouts, self._values.from_numbers)
        real = make_real({fqn: self.state_dict[fqn] for layouts in filled for fqn in layouts})
        self.state_dict |= real
        self._materialised = list(real)
        for layouts in filled:
            layouts |= collect_layout({fqn: t for fqn, t in real.items() if fqn in layouts})
