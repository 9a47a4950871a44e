"""Layouts that torch records wrongly: which they are, and what their records can mean."""

from __future__ import annotations

import itertools
import math

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_reshard import misrecorded
from dcp_reshard.misrecorded import find_true_runs
from dcp_reshard.sharding import Run
from tests.support.strided import COMBINATIONS, recorded_and_held, wrong_layouts


def what_stock_may_keep(pairs: list[tuple[Run, Run]]) -> list[dict[Run, Run]]:
    """`dcp.save` keeps one of the ranks that seem to hold the same: all choices, by its record."""
    held: dict[Run, list[Run]] = {}
    for recorded, run in pairs:
        held.setdefault(recorded, []).append(run)
    choices = [list(dict.fromkeys(runs)) for runs in held.values()]
    return [dict(zip(held, kept, strict=True)) for kept in itertools.product(*choices)]


@pytest.mark.parametrize("axes", [(3, 2), (2, 5), (4, 4), (2, 2, 2), (3, 2, 3), (2, 4, 3)], ids=str)
def test_what_torch_records(axes: tuple[int, ...]) -> None:
    """The short way to what is recorded and held, and torch's own, agree with cuts one by one."""
    for rows in range(1, 60):
        pairs = recorded_and_held(rows, axes)
        for coordinate, pair in zip(itertools.product(*map(range, axes)), pairs, strict=True):
            assert misrecorded.recorded_and_held(rows, axes, coordinate) == pair
            placements = [_StridedShard(0, split_factor=math.prod(axes[1:]))]
            placements += [Shard(0)] * (len(axes) - 1)
            sizes, offsets = _compute_local_shape_and_global_offset(
                (rows,), axes, coordinate, placements
            )
            assert (offsets[0], sizes[0]) == (pair[0].start, pair[0].length)


def test_all_sizes_that_are_recorded_wrongly() -> None:
    """Of the 45 in 1080, each outcome of a save has one answer, the true one, or has lost data."""
    assert len(wrong_layouts()) == 45
    outcomes = {"complete": 0, "lost": 0}
    for (rows, _, _), pairs in wrong_layouts().items():
        everything = {held for _, held in pairs if held.length}
        for kept in what_stock_may_keep(pairs):
            stored = [run.length for run in kept.values()]
            found = find_true_runs(rows, list(kept), stored)
            complete = everything <= set(kept.values())
            assert found == ([tuple(kept.values())] if complete else [])
            outcomes["complete" if complete else "lost"] += 1
    assert outcomes == {"complete": 36, "lost": 47}


@pytest.mark.parametrize("copies", [1, 2])
def test_records_of_every_rank_are_enough(copies: int) -> None:
    """If each rank's record is there (no collectives), nothing is lost; replicas do not matter."""
    for (rows, _, _), pairs in wrong_layouts().items():
        recorded = [pair[0] for pair in pairs] * copies
        held = [pair[1] for pair in pairs]
        [found] = find_true_runs(rows, recorded, [run.length for run in held] * copies)
        assert list(found[: len(held)]) == held
        assert all(run.length == 0 for run in found[len(held) :] if run.start == rows)


AXES = list(itertools.product(range(2, 5), range(2, 4), range(2, 4)))


@pytest.mark.parametrize("axes", AXES)
def test_two_inner_axes_are_never_understood_wrongly(axes: tuple[int, int, int]) -> None:
    """FSDP over expert and tensor parallelism of one dim: the true answer is there, or none is."""
    for rows in range(1, 20):
        pairs = recorded_and_held(rows, axes)
        if all(recorded == held for recorded, held in pairs):
            continue
        everything = {held for _, held in pairs if held.length}
        for kept in what_stock_may_keep(pairs)[:20]:
            true = tuple(kept.values())
            found = find_true_runs(rows, list(kept), [run.length for run in true], limit=5)
            complete = everything <= set(true)
            assert true in found if complete else not found


def test_right_records_are_understood_as_they_are() -> None:
    """Where torch records what is there, that is among the answers."""
    for rows, dp, tp in COMBINATIONS[::7]:
        pairs = recorded_and_held(rows, (dp, tp))
        if 1 < tp < rows and dp > 1 and (rows, dp, tp) not in wrong_layouts():
            recorded = list(dict.fromkeys(pair[0] for pair in pairs))
            found = find_true_runs(rows, recorded, [run.length for run in recorded])
            assert tuple(recorded) in found


def test_nonsense_has_no_answer() -> None:
    """Records of no layout, and too many to think about, are not explained."""
    assert find_true_runs(7, [Run(0, 3), Run(3, 4)], [2, 5]) == []
    assert find_true_runs(7, [Run(1, 3), Run(4, 3)], [3, 3]) == []
    assert find_true_runs(1 << 40, [Run(0, 1 << 39), Run(1 << 39, 1 << 39)], [1, 1]) == []
    many = [Run(i, 1) for i in range(600)]
    assert find_true_runs(600, many, [1] * 599 + [2]) == []
