"""Save under one random layout, load under another, compare: for as long as one likes.

::

    python -m tests.fuzz.random_layouts --seconds 600 --seed 1

A trial draws a few tensors, a world that saves them with stock `dcp.save` or `ReshardSavePlanner`
(with one metadata file, or one per rank), and a world that loads them, by our reader or stock's.
Every rank's local tensors are compared with what torch's own cutting of the whole tensor gives.
What is not right, and not one of the outcomes that the docs allow, is a finding: it is printed with
the seed of its trial, which ``--seed`` and ``--trials 1`` repeat.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import logging
import random
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint._sharded_tensor_utils import _flatten_sharded_tensors
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner_helpers import _create_write_items
from torch.distributed.checkpoint.utils import find_tensor_shard
from torch.distributed.tensor import DTensor

import dcp_reshard
from dcp_reshard import (
    CheckpointFormatError,
    ReshardLoadPlanner,
    ReshardSavePlanner,
    ReshardStorageReader,
)
from dcp_reshard.box import Box
from tests.fuzz.layouts import DTYPES, Layout, World, draw_layout, draw_shape, draw_world
from tests.support.checkpoints import save_world
from tests.support.failures import find_failures
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world

__all__ = ["run_trial"]


@dataclass(frozen=True, slots=True)
class Trial:
    """What is saved by whom, and loaded by whom."""

    tensors: dict[str, torch.Tensor]
    source: World
    dest: World
    stored: dict[str, Layout]
    wanted: dict[str, Layout]
    planner: type
    use_collectives: bool
    call: str
    containers: tuple[type, type]
    meta: bool

    def __str__(self) -> str:
        lines = [
            f"{self.source.mesh_shape} -> {self.dest.mesh_shape}, {self.planner.__name__}, "
            f"collectives {self.use_collectives}, {self.call}, "
            f"in {[kind.__name__ for kind in self.containers]}, meta {self.meta}"
        ]
        for name, full in self.tensors.items():
            lines.append(
                f"  {name}: {tuple(full.shape)} {full.dtype}: {self.stored[name].text} -> "
                f"{self.wanted[name].text}"
            )
        return "\n".join(lines)


def draw_trial(rng: random.Random) -> Trial:
    """A trial; equal for equal states of `rng`."""
    source, dest = draw_world(rng), draw_world(rng)
    tensors, stored, wanted = {}, {}, {}
    for number in range(rng.randint(1, 4)):
        name = f"layers.{number}.w"
        shape = draw_shape(rng)
        tensors[name] = indexed_tensor(shape, rng.choice(DTYPES))
        stored[name] = draw_layout(rng, source, shape)
        wanted[name] = draw_layout(rng, dest, shape)
    planner = rng.choice((dcp.DefaultSavePlanner, ReshardSavePlanner))
    use_collectives = rng.random() < 0.8
    calls = ["load", "load", "dcp.load"]
    if use_collectives and planner is ReshardSavePlanner:
        calls += ["dcp.load of stock's reader"]
    call = rng.choice(calls)
    containers = (rng.choice((str, int, list)), rng.choice((str, int, list)))
    meta = rng.random() < 0.2
    return Trial(
        tensors, source, dest, stored, wanted, planner, use_collectives, call, containers, meta
    )


def run_trial(seed: int) -> str:
    """The outcome of one trial.

    Raises:
        AssertionError: A finding; the message has the trial.
    """
    trial = draw_trial(random.Random(seed))  # noqa: S311
    with tempfile.TemporaryDirectory(prefix="fuzz_") as folder:
        try:
            return _run(trial, Path(folder))
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}\n{trial}") from error


def _run(trial: Trial, path: Path) -> str:
    def make(layouts: dict[str, Layout]) -> dict[str, Any]:
        container = trial.containers[layouts is trial.wanted]
        tensors = [layouts[name].make(full) for name, full in trial.tensors.items()]
        return _contained([{"w": tensor} for tensor in tensors], container)

    try:
        save_world(
            path,
            trial.source.size,
            lambda rank: make(trial.stored),
            planner=trial.planner,
            use_collectives=trial.use_collectives,
        )
    except (ValueError, CheckpointException):
        # Stock's own check of a plan; what only we can store, it cannot.
        if trial.planner is not dcp.DefaultSavePlanner:
            raise
        return "stock refuses to save"
    wrong, silent = set(), set()
    if trial.planner is dcp.DefaultSavePlanner:
        wrong, silent = _recorded_wrongly(trial)
    refused = False
    differ: dict[str, AssertionError] = {}
    for rank in range(trial.dest.size):
        with fake_world(rank, trial.dest.size):
            state = make(trial.wanted)
            wanted = snapshot(state)
            fill_with_sentinel(state)
            if trial.meta:
                for value in _values(state):
                    value["w"] = _without_memory(value["w"])
            failures = find_failures(lambda state=state: _load(trial, state, path))
            for failure in failures.values():
                assert isinstance(failure, CheckpointFormatError), failure
                assert failure.fqn in wrong, failure
                refused = True
            if failures:
                continue
            found = snapshot(state)
            for name in trial.tensors:
                try:
                    check_same(_of(name, found), _of(name, wanted), where=f"rank {rank}")
                except AssertionError as error:
                    differ.setdefault(name, error)
    if refused:
        # An error on one rank of a load is raised on all, so what others have read does not count.
        return "refused: recorded wrongly by stock"
    for name, error in differ.items():
        if name not in silent:
            raise error
        kind = trial.stored[name].text.split()[0]
        return f"wrong: {kind} recorded wrongly by stock, and no size shows it"
    return "right, although recorded wrongly by stock" if wrong else "right"


def _contained(values: list[dict[str, torch.Tensor]], kind: type) -> dict[str, Any]:
    """The values under the keys `layers.0` and so on, which containers of several kinds have."""
    if kind is list:
        return {"layers": values}
    if kind is int:
        return {"layers": dict(enumerate(values))}
    return {f"layers.{number}": value for number, value in enumerate(values)}


def _values(state: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    inner = state.get("layers", state)
    return inner if isinstance(inner, list) else list(inner.values())


def _without_memory(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ShardedTensor):
        return tensor
    if isinstance(tensor, DTensor):
        return DTensor(tensor.to_local().to("meta"), tensor._spec, requires_grad=False)
    return tensor.to("meta")


def _of(name: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key.partition("[")[0] == name}


def _recorded_wrongly(trial: Trial) -> tuple[set[str], set[str]]:
    """Tensors that stock records elsewhere than they are; those of them in which no size tells."""
    wrong: set[str] = set()
    other_shape: set[str] = set()
    for rank in range(trial.source.size):
        with fake_world(rank, trial.source.size):
            for name, full in trial.tensors.items():
                index = torch.arange(full.numel()).reshape(full.shape)
                # Without those of which this rank has no shard.
                flat = _flatten_sharded_tensors({name: trial.stored[name].make(index)})
                value = flat.get(name)
                if value is None:
                    continue
                if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
                    continue
                for item in _create_write_items(name, value):
                    chunk = item.tensor_data.chunk
                    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
                    held = find_tensor_shard(value, item.index).detach()
                    if held.numel() == 0 and box.is_empty:
                        continue
                    if tuple(held.shape) != box.sizes:
                        other_shape.add(name)
                        wrong.add(name)
                    elif not torch.equal(held, index[box.slices()]):
                        wrong.add(name)
    return wrong, wrong - other_shape


def _load(trial: Trial, state: dict[str, Any], path: Path) -> None:
    if trial.call == "load":
        dcp_reshard.load(state, path, no_dist=True)
        return
    reader = ReshardStorageReader if trial.call == "dcp.load" else dcp.FileSystemReader
    dcp.load(state, storage_reader=reader(path), planner=ReshardLoadPlanner(), no_dist=True)


def main() -> None:
    """Try for a while, and say what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0, help="number of the first trial")
    parser.add_argument("--trials", type=int, default=None)
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    deadline = time.monotonic() + options.seconds
    outcomes: collections.Counter[str] = collections.Counter()
    for seed in itertools.count(options.seed):
        done = sum(outcomes.values())
        if time.monotonic() > deadline or done == options.trials:
            break
        try:
            outcomes[run_trial(seed)] += 1
        except AssertionError as error:
            outcomes["FINDING"] += 1
            print(error, flush=True)
    for outcome, count in outcomes.most_common():
        print(f"{count:7} {outcome}")


if __name__ == "__main__":
    main()
