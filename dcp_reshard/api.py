"""`load`: one call, one report."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn, TypeGuard

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.stateful import Stateful

from dcp_reshard._torch import load_state_dict
from dcp_reshard.catalog import CatalogSource
from dcp_reshard.deferred import DeferredPlanner
from dcp_reshard.options import ReaderOptions
from dcp_reshard.outcome import own_errors
from dcp_reshard.plan import DtypePolicy, PlanOptions, ReadPlan, Rename
from dcp_reshard.planner import ReshardLoadPlanner
from dcp_reshard.progress import progress_bar
from dcp_reshard.reader import ReshardStorageReader
from dcp_reshard.report import LoadReport

__all__ = ["load", "make_report"]


def load(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | CatalogSource,
    *,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    strict: bool = True,
    dtype_policy: DtypePolicy = "exact",
    rename: Rename | None = None,
    groups: Mapping[str, int | str | None] | None = None,
    keep_hyper_parameters: Collection[str] = (),
    allowed_classes: Sequence[type] = (),
    allow_unsafe_pickle: bool = False,
    mode: str = "auto",
    options: ReaderOptions | None = None,
    progress: bool = False,
) -> LoadReport:
    """Load a checkpoint into a state dict of any layout, in place, and say what was done.

    To be called by all ranks of the process group. Values that are `Stateful` are loaded as
    `dcp.load` loads them: their `state_dict()` is filled, then given to their `load_state_dict()`.

    Args:
        state_dict: What to fill: tensors (plain, `DTensor`, `ShardedTensor`) in place, other values
            by replacement; nested dicts and lists of these.
        checkpoint_id: Folder of a checkpoint that `dcp.save` wrote, or a `CatalogSource`.
        process_group: The ranks that load together; the default group if None.
        no_dist: Load in this process alone, without any collective call.
        strict: Whether a key that the checkpoint lacks is an error. Otherwise its value is kept,
            and the report names it.
        dtype_policy: ``"exact"``, ``"widen"`` or ``"cast"``; see `PlanOptions`.
        rename: Gives the key in the checkpoint for a key of the state dict.
        groups: Which saved parameter group is meant, where an optimizer has other groups now; see
            `PlanOptions`.
        keep_hyper_parameters: Names of hyper-parameters that keep their value.
        allowed_classes: Classes that values which are not tensors may be instances of, beside plain
            data.
        allow_unsafe_pickle: Unpickle values that are not tensors whatever they are. This runs any
            code that the checkpoint contains.
        mode: See `ReshardStorageReader`.
        options: Memory, threads, verification.
        progress: Show a progress bar on rank 0.

    Returns:
        What this rank read, what was cast, which keys did not match.

    Raises:
        ReshardError: The load failed in a single process.
        torch.distributed.checkpoint.api.CheckpointException: The load failed on some rank; raised
            on all, with every failing rank's error.
        PeerFailedError: A rank has died, or has not answered within the timeout of the process
            group.
        KeyboardInterrupt: This rank was interrupted (`SystemExit` likewise); the others get the
            `CheckpointException`.

    Example:
        >>> report = load({"w": w}, path, no_dist=True)  # doctest: +SKIP
        >>> print(report)  # doctest: +SKIP
    """
    grouped = dist.is_available() and dist.is_initialized()
    alone = no_dist or not grouped
    # Also of a rank that loads alone: its report says whose it is, and one bar is enough.
    rank = dist.get_rank(process_group) if grouped else 0
    started = time.perf_counter()
    planner = ReshardLoadPlanner(
        options=PlanOptions(
            on_missing="error" if strict else "keep",
            dtype_policy=dtype_policy,
            rename=rename,
            groups=groups,
            keep_hyper_parameters=keep_hyper_parameters,
        ),
        allowed_classes=allowed_classes,
        allow_unsafe_pickle=allow_unsafe_pickle,
    )
    with progress_bar(show=progress and rank == 0) as on_progress:
        reader = ReshardStorageReader(
            checkpoint_id,
            mode=mode,
            process_group=None if alone else (process_group or dist.group.WORLD),
            options=options,
            on_progress=on_progress,
        )
        values: dict[str, Any] = {}
        used: LoadPlanner = planner
        try:
            # Sorted as `dcp.load` sorts them: `state_dict()` of a value may make collective calls.
            # Unlike there, not all keys need to be of one type.
            for key, value in sorted(state_dict.items(), key=lambda item: str(item[0])):
                values[key] = value.state_dict() if _is_stateful(value) else value
        except BaseException as error:
            if alone:
                raise
            # A rank that left here would leave the others waiting.
            used = DeferredPlanner(_raise(error))
        with own_errors(
            group=reader.process_group,
            waiting_for=lambda: f"all ranks to {reader.waiting_for}",
            destination=reader.destination,
        ):
            load_state_dict(
                values,
                storage_reader=reader,
                planner=used,
                process_group=process_group,
                no_dist=alone,
            )
    for key, loaded in values.items():
        value = state_dict[key]
        if _is_stateful(value):
            value.load_state_dict(loaded)
        else:
            state_dict[key] = loaded
    reader.stats.seconds["total"] = time.perf_counter() - started
    assert planner.plan is not None
    return make_report(planner.plan, reader, rank=rank)


def _raise(error: BaseException) -> Callable[[Metadata], NoReturn]:
    def plan(_: Metadata) -> NoReturn:
        raise error

    return plan


def make_report(plan: ReadPlan, reader: ReshardStorageReader, *, rank: int) -> LoadReport:
    """The report of a load that is done."""
    stats = reader.stats
    return LoadReport(
        checkpoint=reader.checkpoint_id,
        rank=rank,
        tensors=sum(bool(tensor.parts) for tensor in plan.tensors),
        objects=len(plan.objects) + len(plan.read),
        bytes_wanted=plan.bytes_wanted,
        bytes_read=stats.bytes_read,
        bytes_direct=stats.bytes_direct,
        requests=stats.requests,
        retries=stats.retries,
        rereads=stats.rereads,
        chunks_read=stats.chunks_read,
        chunks_read_whole=stats.chunks_read_whole,
        records_verified=stats.records_verified,
        records_unverified=stats.records_unverified,
        cooperation=stats.cooperation,
        notes=stats.notes,
        casts=tuple((c.fqn, str(c.stored), str(c.wanted)) for c in plan.casts),
        repaired=tuple(tensor.fqn for tensor in plan.tensors if tensor.stored.repaired),
        missing=plan.missing,
        unexpected=plan.unexpected,
        renamed=plan.renamed,
        hyper_parameters=plan.hyper_parameters,
        seconds=dict(stats.seconds),
    )


def _is_stateful(value: object) -> TypeGuard[Stateful]:
    # A tensor is none, and asking the protocol takes longer than planning the tensor's load.
    return not isinstance(value, torch.Tensor) and isinstance(value, Stateful)
