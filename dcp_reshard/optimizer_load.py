"""`load_optimizer`: a live optimizer, exactly as it was saved, in one call.

The optimizer is not stepped, and not touched until all ranks have succeeded. In the order in which
things happen, all of them inside the steps whose errors `dcp.load` brings to every rank:

1. The checkpoint's keys say which parameters it knows, and which of them have state.
2. Its parameter groups are read. They are few and small; every rank reads them.
3. Parameters are matched by name, groups by their parameters.
4. Memory for the state is made, laid out like the parameters (`optimizer_memory`), and filled.
5. State and hyper-parameters are set directly. `Optimizer.load_state_dict` would match parameters
   by position and cast fp32 moments of bf16 parameters to bf16.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata

from dcp_reshard._torch import load_state_dict
from dcp_reshard.api import make_report
from dcp_reshard.catalog import Catalog, CatalogSource
from dcp_reshard.deferred import DeferredPlanner, read_now
from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.nearest_names import shorten
from dcp_reshard.optimizer_groups import GroupPlan, LiveGroup, check_needed_state, plan_groups
from dcp_reshard.optimizer_keys import StateKey, StoredOptimizer, find_stored_optimizer
from dcp_reshard.optimizer_match import match_params
from dcp_reshard.optimizer_options import OptimizerOptions
from dcp_reshard.optimizer_params import LiveParam, Original, collect_live_params
from dcp_reshard.optimizer_state import StatePlan
from dcp_reshard.options import ReaderOptions
from dcp_reshard.outcome import own_errors
from dcp_reshard.plan import PlanOptions
from dcp_reshard.planner import ReshardLoadPlanner
from dcp_reshard.progress import progress_bar
from dcp_reshard.reader import ReshardStorageReader
from dcp_reshard.report import LoadReport, OptimizerReport
from dcp_reshard.saved_groups import SavedGroups, group_memory, make_saved_groups
from dcp_reshard.torch_metadata import catalog_of

__all__ = ["load_optimizer"]


def load_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_id: str | os.PathLike[str] | CatalogSource,
    *,
    optimizer_key: str = "optimizer",
    optimizer_options: OptimizerOptions | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allowed_classes: Sequence[type] = (),
    mode: str = "auto",
    options: ReaderOptions | None = None,
    progress: bool = False,
) -> LoadReport:
    """Restore an optimizer to what it was when it was saved, whatever the model's layout is now.

    To be called by all ranks of the process group, once the model is in its final form (wrapped,
    sharded, in real memory). The parameters may be plain, `DTensor` (FSDP2, TP, HSDP), or in FSDP1
    modules, or some of each. The optimizer may have been saved by `get_optimizer_state_dict`,
    nested or flattened, by `FSDP.optim_state_dict`, or, see `OptimizerOptions.by_position`, by its
    own `state_dict`.

    Args:
        model: The model, whose parameters' names say which state is whose.
        optimizer: The optimizer to restore.
        checkpoint_id: Folder of a checkpoint that `dcp.save` wrote, or a `CatalogSource`.
        optimizer_key: Where the optimizer's state dict is in the saved one; dots lead into nested
            dicts.
        optimizer_options: What to do where optimizer and checkpoint differ.
        process_group: The ranks that load together; the default group if None.
        no_dist: Load in this process alone, without any collective call.
        allowed_classes: Classes that hyper-parameters may be instances of, beside plain data.
        mode: See `ReshardStorageReader`.
        options: Memory, threads, verification.
        progress: Show a progress bar on rank 0.

    Returns:
        What was read, and in `LoadReport.optimizer` what became of each parameter.

    Raises:
        OptimizerStateError: The checkpoint's optimizer cannot be matched to this one, in a single
            process. The optimizer is as it was, here and below.
        ReshardError: The load failed in a single process.
        torch.distributed.checkpoint.api.CheckpointException: The load failed on some rank; raised
            on all, with every failing rank's error.
        PeerFailedError: A rank has died, or has not answered in time.

    Example:
        >>> model = FSDP(model)  # doctest: +SKIP
        >>> optimizer = torch.optim.AdamW(model.parameters())  # doctest: +SKIP
        >>> print(load_optimizer(model, optimizer, path).optimizer)  # doctest: +SKIP
    """
    grouped = dist.is_available() and dist.is_initialized()
    alone = no_dist or not grouped
    rank = dist.get_rank(process_group) if grouped else 0
    started = time.perf_counter()
    with progress_bar(show=progress and rank == 0) as on_progress:
        reader = ReshardStorageReader(
            checkpoint_id,
            mode=mode,
            process_group=None if alone else (process_group or dist.group.WORLD),
            options=options,
            on_progress=on_progress,
        )
        load = _OptimizerLoad(
            model,
            optimizer,
            optimizer_key,
            optimizer_options or OptimizerOptions(),
            tuple(allowed_classes),
            reader,
        )
        planner = DeferredPlanner(load.plan)
        with own_errors(
            group=reader.process_group,
            waiting_for=lambda: f"all ranks to {reader.waiting_for}",
            destination=reader.destination,
        ):
            load_state_dict(
                {},
                storage_reader=reader,
                planner=planner,
                process_group=process_group,
                no_dist=alone,
            )
    load.commit()
    reader.stats.seconds["total"] = time.perf_counter() - started
    assert isinstance(planner.planner, ReshardLoadPlanner)
    assert planner.planner.plan is not None
    report = make_report(planner.planner.plan, reader, rank=rank)
    return replace(
        report,
        optimizer=load.report,
        unexpected=load.unexpected,
        objects=report.objects + load.group_values,
    )


@dataclass(slots=True, eq=False)
class _OptimizerLoad:
    """One load: what was decided when the metadata had been read, until it is carried out."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    optimizer_key: str
    options: OptimizerOptions
    allowed_classes: tuple[type, ...]
    reader: ReshardStorageReader
    report: OptimizerReport = field(default_factory=OptimizerReport)
    unexpected: tuple[str, ...] = ()
    group_values: int = 0
    _known: list[LiveParam] = field(default_factory=list)
    _group_plans: list[GroupPlan] = field(default_factory=list)
    _state: StatePlan | None = None

    def plan(self, metadata: Metadata) -> tuple[dict[str, Any], ReshardLoadPlanner]:
        """Decide everything; change nothing."""
        catalog = catalog_of(metadata)
        stored = find_stored_optimizer(catalog, self.optimizer_key)
        saved = self._read_groups(stored, catalog, metadata)
        groups = collect_live_params(self.model, self.optimizer)
        by_param: dict[str, list[StateKey]] = {}
        for key in stored.state:
            by_param.setdefault(saved.names.get(key.param, key.param), []).append(key)
        match = match_params(groups, saved, list(by_param), self.options)
        self.report = OptimizerReport(new=match.new, extra=match.unused, renamed=match.renamed)
        self.unexpected = tuple(k.key for name in match.unused for k in by_param.get(name, ()))
        live_groups = [
            LiveGroup(tuple(match.names[o] for live in group for o in live.originals), values)
            for group, values in zip(groups, self.optimizer.param_groups, strict=True)
        ]
        self._group_plans = plan_groups(
            live_groups,
            saved,
            mapping=self.options.groups or {},
            keep=self.options.keep_hyper_parameters,
        )
        self._plan_state(catalog, groups, match.names, by_param)
        assert self._state is not None
        casts = self.options.state_dtype != "stored" or self.options.make_state is not None
        planner = ReshardLoadPlanner(
            options=PlanOptions(
                dtype_policy="cast" if casts else "exact", rename=self._state.stored_keys
            ),
            allowed_classes=self.allowed_classes,
            flatten_state_dict=False,
        )
        return self._state.wanted, planner

    def commit(self) -> None:
        """Set state and hyper-parameters."""
        assert self._state is not None
        states = [(live.param, self._state.state_of(live)) for live in self._known]
        for param, state in states:
            self.optimizer.state.pop(param, None)
            if state:
                self.optimizer.state[param] = state
        for group, plan in zip(self.optimizer.param_groups, self._group_plans, strict=True):
            for name, value in plan.values.items():
                _set_hyper_parameter(group, name, value)
        # As `Optimizer.load_state_dict` ends: fills in what older versions did not have.
        self.optimizer.__setstate__(
            {"state": self.optimizer.state, "param_groups": self.optimizer.param_groups}
        )

    def _read_groups(
        self, stored: StoredOptimizer, catalog: Catalog, metadata: Metadata
    ) -> SavedGroups:
        values = group_memory(stored, catalog)
        planner = ReshardLoadPlanner(allowed_classes=self.allowed_classes, flatten_state_dict=False)
        read_now(values, storage_reader=self.reader, planner=planner, metadata=metadata)
        self.group_values = len(values)
        return make_saved_groups(stored, values)

    def _plan_state(
        self,
        catalog: Catalog,
        groups: Sequence[Sequence[LiveParam]],
        match: Mapping[Original, str | None],
        by_param: Mapping[str, Sequence[StateKey]],
    ) -> None:
        self._state = plan = StatePlan(catalog, self.options)
        restored: list[str] = []
        without: list[str] = []
        frozen: list[str] = []
        for live_group, group, changes in zip(
            groups, self.optimizer.param_groups, self._group_plans, strict=True
        ):
            final = {**group, **changes.values}
            bare: list[LiveParam] = []
            for live in live_group:
                if all(match[original] is None for original in live.originals):
                    continue
                self._known.append(live)
                stored = [by_param.get(match[o] or "", ()) for o in live.originals]
                names = [o.name for o, keys in zip(live.originals, stored, strict=True) if keys]
                without += [
                    o.name for o, keys in zip(live.originals, stored, strict=True) if not keys
                ]
                if not live.param.requires_grad:
                    frozen += names
                    if self.options.on_frozen == "skip":
                        continue
                restored += names
                if not names:
                    bare.append(live)
                    continue
                paths = {key.path for keys in stored for key in keys}
                check_needed_state(self.optimizer, changes, final, paths, name=names[0])
                plan.add(live, stored, group=final)
            if self.options.on_no_state == "zeros":
                self._add_zeros(bare, live_group)
        if without and self.options.on_no_state == "error":
            raise OptimizerStateError(
                f"{len(without)} parameters have no state in the checkpoint: {shorten(without)}",
                fqn=without[0],
            )
        self.report = replace(
            self.report,
            restored=tuple(restored),
            without_state=tuple(without),
            frozen=tuple(frozen),
            hyper_parameters=tuple(c for p in self._group_plans for c in p.changes),
        )

    def _add_zeros(self, bare: Sequence[LiveParam], group: Sequence[LiveParam]) -> None:
        assert self._state is not None
        like = [live for live in group if self._state.has_state(live)]
        for live in bare if like else ():
            if live.is_held and live.param.requires_grad:
                self._state.add_zeros(live, like[0])


def _set_hyper_parameter(group: dict[str, Any], name: str, value: object) -> None:
    old = group.get(name)
    if (
        isinstance(old, torch.Tensor)
        and isinstance(value, torch.Tensor)
        and (old.shape, old.dtype) == (value.shape, value.dtype)
    ):
        # A compiled or captured step has a hold of this tensor.
        with torch.no_grad():
            old.copy_(value)
        return
    group[name] = copy.deepcopy(value)
