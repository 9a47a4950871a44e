"""The table of bad inputs, loaded by three ranks in real processes: all are told, and of the same."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

import dcp_reshard
from dcp_reshard import ReaderOptions, ReshardError
from tests.reliability.test_bad_inputs import CASES, ONCE, check_loaded, make_dest
from tests.support.bad_checkpoints import save_good
from tests.support.failures import find_failures
from tests.support.tensors import snapshot
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist
PARTS = 4


class Outcome(NamedTuple):
    """What one rank has seen of one load."""

    failures: dict[int, BaseException]
    changed: bool


def load_all(rank: int, root: Path, mode: str, part: int) -> list[Outcome]:
    outcomes = []
    for number, case in list(enumerate(CASES))[part::PARTS]:
        state, path = make_dest(), root / str(number) / "checkpoint"
        before = snapshot(state)
        options = ReaderOptions(**{"retry": ONCE} | case.options)
        failures = find_failures(
            lambda state=state, path=path, options=options: dcp_reshard.load(
                state, path, mode=mode, options=options
            )
        )
        if not failures:
            check_loaded(state)
        after = snapshot(state)
        changed = any(not bool((after[key] == before[key]).all()) for key in before)
        outcomes.append(Outcome(failures, changed))
    return outcomes


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_every_rank_is_told_of_a_bad_checkpoint(tmp_path: Path, mode: str, part: int) -> None:
    """Each loads right or fails on all ranks, none hangs, and an untouched destination is one."""
    good = save_good(tmp_path / "good")
    for number, case in list(enumerate(CASES))[part::PARTS]:
        case.damage(shutil.copytree(good, tmp_path / str(number) / "checkpoint"))
    ranks = gloo_world(3, load_all, tmp_path, mode, part)
    for case, *outcomes in zip(CASES[part::PARTS], *ranks, strict=True):
        for failures, changed in outcomes:
            where = f"{case.row}-{case.name}: {failures}"
            assert bool(failures) == (case.error is not None), where
            if case.error is None:
                continue
            assert any(
                isinstance(error, case.error) and re.search(case.match, str(error), re.DOTALL)
                for error in failures.values()
            ), where
            [state] = {e.destination for e in failures.values() if isinstance(e, ReshardError)}
            assert state == "undefined now" or (state == "untouched" and not changed), where
