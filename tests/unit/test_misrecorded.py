"""Layouts that torch records wrongly: which they are, and what their records can mean."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dcp_reshard import misrecorded
from dcp_reshard.misrecorded import find_true_runs
from dcp_reshard.sharding import Cut, Run, apply_cuts
from tests.support.strided import COMBINATIONS, recorded_and_held, wrong_layouts

Pairs = list[tuple[Run, Run]]


def what_stock_may_keep(pairs: Pairs) -> list[tuple[int, ...]]:
    """`dcp.save` keeps one of the ranks that seem to hold the same: all choices, without equals."""
    ranks: dict[Run, dict[Run, int]] = {}
    for rank, (recorded, held) in enumerate(pairs):
        ranks.setdefault(recorded, {}).setdefault(held, rank)
    return list(itertools.product(*(list(found.values()) for found in ranks.values())))


def understand(rows: int, pairs: Pairs, ranks: Sequence[int], **options: int) -> Any:
    """What is found if the records of these ranks are there; and what they hold in truth."""
    recorded = [pairs[rank][0] for rank in ranks]
    held = [pairs[rank][1] for rank in ranks]
    found = find_true_runs(rows, recorded, [run.length for run in held], ranks, **options)
    complete = {run for _, run in pairs if run.length} <= set(held)
    return found, tuple(held), complete


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
    outcomes = {True: 0, False: 0}
    for (rows, _, _), pairs in wrong_layouts().items():
        for ranks in what_stock_may_keep(pairs):
            found, true, complete = understand(rows, pairs, ranks)
            assert found == ([true] if complete else [])
            outcomes[complete] += 1
    assert outcomes == {True: 36, False: 47}


@pytest.mark.parametrize(("stride", "copies"), [(1, 1), (2, 1), (1, 3), (3, 2)])
def test_records_of_every_rank_are_enough(stride: int, copies: int) -> None:
    """Without collectives nothing is lost, in whatever larger mesh; replicas are passed over."""
    for (rows, _, _), pairs in wrong_layouts().items():
        size = len(pairs)
        recorded = [recorded for recorded, _ in pairs] * copies
        held = [held for _, held in pairs]
        writers = [stride * (copy * size + rank) for copy in range(copies) for rank in range(size)]
        lengths = [run.length for run in held] * copies
        [found] = find_true_runs(rows, recorded, lengths, writers)
        assert list(found[:size]) == held
        assert all(run.length == 0 for run in found[size:])


AXES = list(itertools.product(range(2, 5), range(2, 4), range(2, 4)))


@pytest.mark.parametrize("axes", AXES)
def test_two_inner_axes_are_never_understood_wrongly(axes: tuple[int, int, int]) -> None:
    """FSDP over expert and tensor parallelism of one dim: the true answer is found, or none is."""
    for rows in range(1, 24):
        pairs = recorded_and_held(rows, axes)
        if all(recorded == held for recorded, held in pairs):
            continue
        for ranks in what_stock_may_keep(pairs)[:20]:
            found, true, complete = understand(rows, pairs, ranks, limit=5)
            assert found == ([true] if complete else [])


def test_other_layouts_that_look_the_same_are_not_taken_for_these() -> None:
    """7 rows in the order of axes 1, 0 of a 2 x 3 mesh: equal records, but of other ranks."""
    fsdp = recorded_and_held(7, (3, 2))
    other = []
    for i, j in itertools.product(range(2), range(3)):
        recorded = apply_cuts(7, [Cut(0, 2, i), Cut(0, 3, j)])
        held = apply_cuts(7, [Cut(0, 3, j), Cut(0, 2, i)])
        other.append((recorded[0] if recorded else Run(7, 0), held[0] if held else Run(7, 0)))
    seen = sorted((r.start, r.length, h.length) for r, h in fsdp)
    assert seen == sorted((r.start, r.length, h.length) for r, h in other)
    assert understand(7, fsdp, range(6))[0] == [tuple(held for _, held in fsdp)]
    assert understand(7, other, range(6))[0] == []


def test_right_records_are_understood_as_they_are() -> None:
    """Where torch records what is there, that is among the answers."""
    for rows, dp, tp in COMBINATIONS[::7]:
        pairs = recorded_and_held(rows, (dp, tp))
        if 1 < tp < rows and dp > 1 and (rows, dp, tp) not in wrong_layouts():
            found, true, _ = understand(rows, pairs, what_stock_may_keep(pairs)[0])
            assert true in found


def test_nonsense_has_no_answer() -> None:
    """Records of no layout, and too many to think about, are not explained."""
    half = 1 << 39
    assert find_true_runs(7, [Run(0, 3), Run(3, 4)], [2, 5], [0, 1]) == []
    assert find_true_runs(7, [Run(1, 3), Run(4, 3)], [3, 3], [0, 1]) == []
    assert find_true_runs(2 * half, [Run(0, half), Run(half, half)], [1, 1], [0, 1]) == []
    many = [Run(i, 1) for i in range(600)]
    assert find_true_runs(600, many, [1] * 599 + [2], range(600)) == []
