"""The table of bad inputs: each row loads right, or fails with an error that says what is wrong.

Rows that are tested where the module concerned is tested are listed in `ELSEWHERE`, rows that wait
for what they are about in `WAITING`.
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

ROOT = Path(__file__).parents[2]
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


# Rows that are tested where the module is that they are about.
ELSEWHERE = {
    "B02": ["unit/test_unpickle.py::test_every_cut_file_is_refused"],
    "B03": [
        "unit/test_unpickle.py::test_every_flipped_bit_is_an_error_of_ours_or_harmless",
        "world/test_corruption.py::test_no_flip_in_the_metadata_loads_wrongly",
    ],
    "B05": [
        "unit/test_unpickle_hostile.py::test_records_take_their_fields_and_nothing_else",
        "unit/test_unpickle_hostile.py::test_misuse_of_what_is_allowed_is_an_error",
    ],
    "B13": ["reliability/test_bad_states.py::test_b13_empty_chunks_are_fine"],
    "B20": ["reliability/test_bad_states.py::test_b20_a_file_cut_at_any_length"],
    "B22": [
        "world/test_corruption.py::test_a_flipped_bit_in_a_tensor_is_found",
        "unit/test_payload_damage.py::test_every_flipped_bit_is_noticed_or_does_not_matter",
    ],
    "B23": ["world/test_corruption.py::test_no_flip_in_a_container_loads_wrongly"],
    "B25": [
        "world/test_verification.py::test_files_without_checksums_load_unverified",
        "world/test_verification.py::test_required_checksums_that_were_not_stored",
    ],
    "B26": [
        "unit/test_container.py::test_what_torch_does_not_write_is_refused",
        "unit/test_container.py::test_gaps_are_refused",
        "unit/test_container.py::test_duplicate_names_are_refused",
    ],
    "B29": ["unit/test_payload_damage.py::test_descriptions_that_cannot_be_true_are_refused"],
    "B32": ["world/test_dtypes.py::test_casts_need_the_policy_that_allows_them"],
    "B33": ["reliability/test_bad_states.py::test_states_that_do_not_fit"],
    "B34": ["reliability/test_bad_states.py::test_states_that_do_not_fit"],
    "B38": [
        "reliability/test_bad_states.py::test_states_that_do_not_fit",
        "dist/test_load_pairs.py::test_ranks_that_see_different_checkpoints_or_keys_are_told",
    ],
    "B39": [
        "world/test_containers.py::test_two_keys_of_one_name_are_refused",
        "reliability/test_bad_states.py::test_b39_names_of_every_kind",
    ],
    "B41": ["unit/test_safetensors_files.py::"],
    "B43": ["reliability/test_bad_states.py::test_b43_files_of_two_saves"],
    "B44": ["reliability/test_bad_states.py::test_b44_metadata_per_rank"],
    "B45": ["reliability/test_bad_states.py::test_b45_a_tensor_of_a_trillion_elements"],
    "B46": ["world/test_layout_product.py::"],
    "B47": ["world/test_dtypes.py::test_every_bit_pattern_comes_back"],
    "B48": ["world/test_dtypes.py::test_every_bit_pattern_comes_back"],
    "B49": [
        "world/test_dest_memory.py::test_meta_tensors_are_replaced",
        "world/test_dest_memory.py::test_elements_that_share_memory_are_refused",
    ],
    "B51": [
        "unit/test_unpickle_hostile.py::test_paths_of_any_system_are_strings",
        "unit/test_unpickle_hostile.py::test_fields_that_older_versions_lack_are_optional",
    ],
}

# Rows that wait for what they are about.
WAITING = {
    "B42": "checkpoints of sharded safetensors files",
    "B50": "the manifest",
    "B52": "checkpoints of safetensors files",
}


def test_every_row_is_tested_or_waits() -> None:
    """Each of the 52 rows has a case here, a test elsewhere that is there, or a reason to wait."""
    rows = {case.row for case in CASES} | ELSEWHERE.keys() | WAITING.keys()
    assert rows == {f"B{number:02}" for number in range(1, 53)}
    for tests in ELSEWHERE.values():
        for test in tests:
            file, _, name = test.partition("::")
            assert f"def {name}" in (ROOT / "tests" / file).read_text(), test
