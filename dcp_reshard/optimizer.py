"""Optimizer state straight from a checkpoint, laid out like the model that it belongs to.

No optimizer step is taken and no template is needed: what there is to load follows from the
recorded key paths of the checkpoint, and where it goes from the parameters alone. For each stored
value below the optimizer's key:

1. Its path says which parameter it belongs to (`optimizer_keys`), in the nested form that
   `get_optimizer_state_dict` gives, and in the flattened one.
2. The parameter is found in the model by name, whatever wrappers are around either (`param_names`).
3. Memory is made, laid out like the parameter (`optimizer_memory`), and the planner is asked to
   fill it.

State of parameters that the model does not have is left out. `optimizer_load` does the whole round
for a live optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from dcp_reshard._torch import flatten_state_dict, load_state_dict, set_element
from dcp_reshard.catalog import Catalog, KeyPath
from dcp_reshard.deferred import DeferredPlanner, read_now
from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.nearest_names import describe_nearest, shorten
from dcp_reshard.optimizer_keys import (
    StateKey,
    StoredOptimizer,
    find_stored_optimizer,
    groups_path,
    rename_param,
)
from dcp_reshard.optimizer_memory import check_shapes, make_memory
from dcp_reshard.optimizer_options import OptimizerOptions
from dcp_reshard.outcome import own_errors
from dcp_reshard.param_names import canonical_name, match_names
from dcp_reshard.plan import PlanOptions
from dcp_reshard.planner import ReshardLoadPlanner
from dcp_reshard.report import OptimizerReport
from dcp_reshard.saved_groups import (
    NOT_HYPER_PARAMETERS,
    SavedGroup,
    SavedGroups,
    make_saved_groups,
)
from dcp_reshard.torch_metadata import catalog_of

__all__ = ["load_sharded_optimizer_state_dict"]


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
    *,
    options: OptimizerOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    on_report: Callable[[OptimizerReport], None] | None = None,
) -> dict[str, Any]:
    """Load the optimizer state of a checkpoint for a model that may be sharded in another way.

    Takes the arguments of torch's function of this name, and any model: parameters may be `DTensor`
    (FSDP2, TP, HSDP), `ShardedTensor` (FSDP1), or plain. To be called by all ranks.

    Args:
        model_state_dict: The state dict of the model. What is returned has its names.
        optimizer_key: Key under which the optimizer was saved; dots lead into nested dicts.
        storage_reader: Reads the checkpoint.
        planner: Plans the load; `ReshardLoadPlanner()` if None. It is asked for the keys of the
            checkpoint, so a `rename` of its own must leave these alone.
        options: What to do where the model and the checkpoint differ.
        process_group: The ranks that load together; that of the reader, or the default group, if
            None.
        no_dist: Load in this process alone, without any collective call.
        on_report: Called with what was restored and what was not, by name.

    Returns:
        The optimizer's state dict below its key, nested as it was saved: ready for
        `set_optimizer_state_dict`, or for FSDP1's `optim_state_dict_to_load`. Where names of the
        checkpoint differ from those of the model, it has the model's.

    Raises:
        OptimizerStateError: The checkpoint has nothing below the key, or no state of any parameter
            of the model.
        ReshardError: The load failed in a single process.
        torch.distributed.checkpoint.api.CheckpointException: The load failed on some rank (with one
            of these, say); raised on all.
        PeerFailedError: A rank has died, or has not answered in time.

    Example:
        >>> osd = load_sharded_optimizer_state_dict(
        ...     model.state_dict(), "optimizer", ReshardStorageReader(path)
        ... )  # doctest: +SKIP
        >>> set_optimizer_state_dict(model, optimizer, osd["optimizer"])  # doctest: +SKIP
    """
    values, _ = flatten_state_dict(model_state_dict)
    params = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
    load = _Load(params, optimizer_key, options or OptimizerOptions(), storage_reader, planner)
    alone = no_dist or not (dist.is_available() and dist.is_initialized())
    group = process_group or getattr(storage_reader, "process_group", None)
    with own_errors(
        group=None if alone else (group or dist.group.WORLD),
        waiting_for=lambda: f"all ranks to {getattr(storage_reader, 'waiting_for', 'go on')}",
        destination=getattr(storage_reader, "destination", None),
    ):
        load_state_dict(
            {},
            storage_reader=storage_reader,
            planner=DeferredPlanner(load.plan, share_equal=planner is None),
            process_group=group,
            no_dist=alone,
        )
    state = load.finish()
    if on_report is not None:
        on_report(load.report)
    return state


@dataclass(slots=True, eq=False)
class _Load:
    """One load: what was decided when the metadata had been read."""

    params: Mapping[str, torch.Tensor]
    optimizer_key: str
    options: OptimizerOptions
    reader: StorageReader
    planner: LoadPlanner | None
    report: OptimizerReport = field(default_factory=OptimizerReport)
    _names: dict[str, str] = field(default_factory=dict)
    """Name in the model by name in the checkpoint."""
    _state: dict[str, Any] = field(default_factory=dict)
    _paths: dict[str, KeyPath] = field(default_factory=dict)
    _saved: SavedGroups = field(default_factory=lambda: SavedGroups(()))
    _groups_at: KeyPath | None = None

    def plan(self, metadata: Metadata) -> tuple[dict[str, Any], LoadPlanner]:
        """Decide what to load, and make memory for it."""
        catalog = catalog_of(metadata)
        stored = find_stored_optimizer(catalog, self.optimizer_key)
        self._saved = self._read_names(stored, metadata)
        self._groups_at = groups_path(catalog, self.optimizer_key, stored)
        by_param: dict[str, list[StateKey]] = {}
        for key in stored.state:
            by_param.setdefault(self._saved.names.get(key.param, key.param), []).append(key)
        self._match([*by_param, *self._saved.params()], with_state=by_param)
        for stored_name, name in self._names.items():
            keys, param = by_param.get(stored_name, ()), self.params[name]
            if self.options.make_state is None:
                check_shapes(name, tuple(param.size()), keys, catalog)
            for key in keys:
                tensor = catalog.tensors.get(key.key)
                # The planner replaces a value that is no tensor; until then it is a placeholder.
                memory = None
                if tensor is not None:
                    memory = make_memory(
                        key.path, tensor, param, name=name, group={}, options=self.options
                    )
                self._want(catalog, key.key, memory, renamed=(key.param, name))
        for group in stored.groups:
            tensor = catalog.tensors.get(group.key)
            memory = torch.empty(tensor.shape, dtype=tensor.dtype) if tensor is not None else None
            if not isinstance(group.group, str):
                self._want(catalog, group.key, memory)
            elif group.group in self._names:
                renamed = (group.group, self._names[group.group])
                self._want(catalog, group.key, memory, renamed=renamed)
        casts = self.options.state_dtype != "stored" or self.options.make_state is not None
        default = PlanOptions(dtype_policy="cast" if casts else "exact")
        return self._state, self.planner or ReshardLoadPlanner(options=default)

    def finish(self) -> dict[str, Any]:
        """What was loaded, nested as it was saved, with the model's names."""
        root: dict[str, Any] = {}
        for key, path in self._paths.items():
            set_element(root, path, self._state[key])
        if self._groups_at is not None and not self._saved.numbered:
            groups: Any = root
            for part in self._groups_at:
                groups = groups[part]
            for group, saved in zip(groups, self._saved.groups, strict=True):
                group["params"] = [self._names[n] for n in saved.params if n in self._names]
                if "param_names" in group:
                    group["param_names"] = list(group["params"])
            if not self.report.restored:
                # torch 2.13 takes a dict without state for a flattened one, and a state without
                # names for one by number, whose groups it sets by their position.
                state = (*self._groups_at[:-1], "state")
                set_element(root, state, {name: {} for name in self._names.values()})
        return root

    def _read_names(self, stored: StoredOptimizer, metadata: Metadata) -> SavedGroups:
        """The groups with the names of their parameters, and without hyper-parameters."""
        if stored.flattened:
            names = dict.fromkeys(str(key.group) for key in stored.groups)
            return SavedGroups(tuple(SavedGroup((n,), {}) for n in names), flattened=True)
        lists = [k for k in stored.groups if not k.path or k.path[0] in NOT_HYPER_PARAMETERS]
        values: dict[str, Any] = {key.key: None for key in lists}
        planner = ReshardLoadPlanner(
            allowed_classes=getattr(self.planner, "allowed_classes", ()), flatten_state_dict=False
        )
        read_now(values, storage_reader=self.reader, planner=planner, metadata=metadata)
        return make_saved_groups(replace(stored, groups=tuple(lists)), values)

    def _want(
        self,
        catalog: Catalog,
        key: str,
        memory: torch.Tensor | None,
        *,
        renamed: tuple[str, str] | None = None,
    ) -> None:
        path = catalog.key_path(key)
        if renamed is not None:
            path = rename_param(path, self.optimizer_key, *renamed)
        self._state[key], self._paths[key] = memory, path

    def _match(self, stored: Sequence[str], *, with_state: Collection[str]) -> None:
        names = list(self.params)
        found = match_names([(name,) for name in names], stored, rename=self.options.rename)
        pairs = [(s, name) for s, name in zip(found.stored, names, strict=True) if s is not None]
        self._names = dict(pairs)
        restored = tuple(name for s, name in pairs if s in with_state)
        if stored and not (restored if with_state else pairs):
            raise OptimizerStateError(
                "nothing to restore: no parameter of the model has state in the checkpoint; "
                + describe_nearest(names, with_state or stored)
            )
        if len(pairs) != len(self._names):
            twice = [name for s, name in pairs if self._names[s] != name]
            raise OptimizerStateError(
                f"`rename` gives {shorten(twice)} names in the checkpoint that other parameters "
                f"have as well; state can be loaded twice only by `load_optimizer`"
            )
        if found.unused and self.options.on_extra == "error":
            raise OptimizerStateError(
                f"{len(found.unused)} parameters of the checkpoint are not in the model: "
                f"{shorten(found.unused)}",
                fqn=found.unused[0],
            )
        self.report = OptimizerReport(
            restored=restored,
            without_state=tuple(name for s, name in pairs if s not in with_state),
            new=tuple(n for s, n in zip(found.stored, names, strict=True) if s is None),
            extra=found.unused,
            renamed=tuple((n, s) for s, n in pairs if canonical_name(n) != canonical_name(s)),
        )
