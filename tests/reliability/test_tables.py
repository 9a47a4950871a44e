"""Every row of the table of faults has a test. For the table of bad inputs, see there."""

from __future__ import annotations

from pathlib import Path

TESTED = {
    "F01": "test_f01_an_error_that_passes",
    "F02": "test_f02_an_error_that_stays",
    "F03": "test_f03_short_reads",
    "F04": "test_f04_f26_signals_and_closed_streams",
    "F05": "test_f05_a_file_that_ends_early",
    "F06": "test_f06_f07_wrong_bytes",
    "F07": "test_f06_f07_wrong_bytes",
    "F08": "test_f08_a_file_that_changes_after_it_was_opened",
    "F09": "test_f09_f10_a_rank_that_sees_another_folder",
    "F10": "test_f10_a_file_that_is_not_there_yet",
    "F11": "test_f11_f12_a_rank_that_is_killed",
    "F12": "test_f11_f12_a_rank_that_is_killed",
    "F13": "test_f13_a_rank_that_is_stopped",
    "F14": "test_f14_slow_storage",
    "F15": "test_f15_any_exception_of_one_rank_reaches_all",
    "F16": "test_f16_an_interrupt_of_one_rank",
    "F17": "test_f17_no_memory",
    "F18": "test_f18_few_descriptors",
    "F19": "test_f19_the_wall_clock_may_jump",
    "F20": "test_f20_a_fork_in_between",
    "F22": "test_f22_a_copy_that_fails",
    "F23": "test_f23_a_process_group_that_is_gone",
    "F24": "test_f24_two_loads_at_once_in_any_context",
    "F25": "test_f25_crash_states_of_the_stock_writer",
    "F26": "test_f04_f26_signals_and_closed_streams",
}
WAITING = {"F21": "object storage", "F27": "nothing is written"}


def test_every_row_is_tested_or_waits() -> None:
    """Each of the 27 rows has a test that is there, or a reason to wait."""
    assert TESTED.keys() | WAITING.keys() == {f"F{number:02}" for number in range(1, 28)}
    tests = Path(__file__).parents[1]
    files = [*(tests / "reliability").glob("*.py"), *(tests / "dist").glob("*.py")]
    text = "".join(file.read_text() for file in files)
    for name in TESTED.values():
        assert f"def {name}(" in text, name
