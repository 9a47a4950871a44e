"""The table of bad inputs: each row loads right, or fails with an error that says what is wrong.

Other rows are tested where the module concerned is tested, with the mark `row`; `test_tables` knows
which rows wait.
"""

from __future__ import annotations

import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import dcp_reshard
from dcp_reshard import (
    ReaderOptions,
    RetryPolicy,
    StorageError,
)
from tests.support.bad_checkpoints import METADATA_CASES, Case, make_state, save_good
from tests.support.bad_files import FILE_CASES
from tests.support.failures import catch_failure
from tests.support.tensors import check_same, fill_with_sentinel, snapshot

CASES = [*METADATA_CASES, *FILE_CASES]
ONCE = RetryPolicy(tries=1)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to be damaged, in a folder where code from a checkpoint would leave its mark."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(good, tmp_path / "checkpoint")


def make_dest() -> dict[str, Any]:
    state = make_state()
    fill_with_sentinel(state)
    return state | {"note": None, "opt": {"lr": None}}


def load(state: dict[str, Any], path: Path, **options: Any) -> dcp_reshard.LoadReport:
    return dcp_reshard.load(
        state, path, no_dist=True, options=ReaderOptions(**{"retry": ONCE} | options)
    )


def check_loaded(state: dict[str, Any]) -> None:
    wanted = make_state()
    check_same(snapshot(state), snapshot(wanted))
    assert (state["note"], state["opt"]) == (wanted["note"], wanted["opt"])


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}-{case.name}")
def test_bad_checkpoint(case: Case, path: Path, tmp_path: Path) -> None:
    """The load is right or fails as the table says, with nothing written, and runs no code."""
    case.damage(path)
    state = make_dest()
    if case.error is None:
        load(state, path, **case.options)
        check_loaded(state)
    else:
        before = snapshot(state)
        error = catch_failure(lambda: load(state, path, **case.options))
        assert isinstance(error, case.error), repr(error)
        assert re.search(case.match, str(error), re.DOTALL), str(error)
        assert type(pickle.loads(pickle.dumps(error))) is type(error)
        if case.row not in ("B24", "B28", "B36"):  # contents are looked at one by one
            check_same(snapshot(state), before)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}-{case.name}")
def test_verify_says_the_same(case: Case, path: Path, tmp_path: Path) -> None:
    """`verify` finds what makes a load fail, without running anything, and nothing else."""
    case.damage(path)
    options = ReaderOptions(retry=ONCE)
    if case.row == "B01":
        with pytest.raises(StorageError, match=case.match):
            dcp_reshard.verify(path, options=options)
        return
    report = dcp_reshard.verify(path, options=options)
    assert report.ok == (case.error is None), str(report)
    assert report.save_identity == "unproven"
    assert not (tmp_path / "was_run").exists()
