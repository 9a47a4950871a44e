"""Checkpoints as stock `dcp.save` writes them, of any number of ranks, and loads by every rank.

A round trip in a test is four lines::

    save_world(path, 4, make_state)          # make_state(rank) under `fake_world(rank, 4)`
    check_world_loads(                       # for each of 2 ranks: fill, load, compare
        2, make_other_state, lambda state: dcp_reshard.load(state, path, no_dist=True)
    )

where `make_state` builds DTensors from `indexed_tensor`, cut by `distribute_tensor(...,
src_data_rank=None)`: torch's slicing of the tensor at hand is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import _stateful_to_state_dict
from torch.distributed.checkpoint.storage import WriteResult

from tests.support.tensors import check_same, fill_with_sentinel, snapshot
from tests.support.worlds import fake_world

__all__ = ["check_world_loads", "load_world", "save_state", "save_world"]

State = dict[str, Any]


def _writer(path: str | Path, options: dict[str, Any]) -> dcp.FileSystemWriter:
    # Not synced to disk by default: the bytes are the same, and a test does not survive a crash.
    return dcp.FileSystemWriter(path, **{"sync_files": False} | options)


def save_state(path: str | Path, state: State, **options: Any) -> Metadata:
    """Stock `dcp.save` by the ranks of the current (gloo, threaded) world, or this process alone.

    `options` are those of `FileSystemWriter`.
    """
    return dcp.save(state, storage_writer=_writer(path, options))


def save_world(
    path: str | Path,
    size: int,
    make_state: Callable[[int], State],
    *,
    planner: Callable[[], dcp.SavePlanner] = dcp.DefaultSavePlanner,
    use_collectives: bool = True,
    **options: Any,
) -> Metadata:
    """Write what `dcp.save` of `size` ranks writes, byte for byte, from this process alone.

    ``make_state(rank)`` is called under ``fake_world(rank, size)``. Then the steps of torch's
    `_save_state_dict` are taken, with each collective replaced by a loop over the ranks. The
    states of all ranks are in memory at once.

    Args:
        path: Folder to write.
        size: Number of ranks.
        make_state: The state dict of a rank.
        planner: Makes the planner of a rank.
        use_collectives: As in `dcp.save`: False writes one metadata file per rank.
        options: Of `FileSystemWriter`.

    Returns:
        The metadata written; of rank 0 if there is one per rank.
    """
    if not use_collectives:
        # Rank 0 last: its metadata file is how torch knows that a checkpoint is there already.
        for rank in reversed(range(size)):
            with fake_world(rank, size):
                metadata = dcp.save(
                    make_state(rank),
                    storage_writer=_writer(path, options),
                    planner=planner(),
                    use_collectives=False,
                )
        return metadata

    planners, writers, plans = [], [], []
    for rank in range(size):
        planners.append(planner())
        writers.append(_writer(path, options))
        with fake_world(rank, size):
            planners[rank].set_up_planner(
                state_dict=_stateful_to_state_dict(make_state(rank)),
                storage_meta=writers[rank].storage_meta(),
                is_coordinator=rank == 0,
            )
            writers[rank].set_up_storage_writer(rank == 0, rank=rank, use_collectives=True)
            plans.append(writers[rank].prepare_local_plan(planners[rank].create_local_plan()))
    plans, metadata = planners[0].create_global_plan(plans)
    plans = writers[0].prepare_global_plan(plans)
    results: list[list[WriteResult]] = []
    for rank in range(size):
        with fake_world(rank, size):
            plan = planners[rank].finish_plan(plans[rank])
            results.append(writers[rank].write_data(plan, planners[rank]).wait())
    writers[0].finish(metadata, results)
    return metadata


def load_world(
    size: int, make_state: Callable[[int], State], load_one: Callable[[State], object]
) -> list[State]:
    """The states of `size` ranks after ``load_one(make_state(rank))``, each run under `fake_world`.

    `load_one` must not communicate: ``dcp.load(state, checkpoint_id=path, no_dist=True)``, say.
    """
    states = []
    for rank in range(size):
        with fake_world(rank, size):
            state = make_state(rank)
            load_one(state)
            states.append(state)
    return states


def check_world_loads(
    size: int, make_state: Callable[[int], State], load_one: Callable[[State], object]
) -> None:
    """Check that a load brings back what `make_state` made, bit for bit, on every rank.

    The tensors of the state are filled with a sentinel before the load. Values other than tensors
    are not looked at.

    Raises:
        AssertionError: An element differs; the message names rank, tensor and elements.
    """
    for rank in range(size):
        with fake_world(rank, size):
            state = make_state(rank)
            wanted = snapshot(state)
            fill_with_sentinel(state)
            load_one(state)
            check_same(snapshot(state), wanted, where=f"rank {dist.get_rank()} of {size}")
