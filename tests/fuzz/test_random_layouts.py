"""A few of the random trials, always the same ones; `random_layouts` runs for longer."""

from __future__ import annotations

import pytest

from tests.fuzz.random_layouts import run_trial

TRIALS = 60


@pytest.mark.filterwarnings("ignore::dcp_reshard.ShardOrderWarning")
@pytest.mark.parametrize("first", range(0, TRIALS, 20))
def test_what_random_layouts_load_is_right_or_refused(first: int) -> None:
    """Of what was saved under any layout, a load under any other gives each rank its own elements.

    But where stock has recorded a tensor elsewhere than it is, an error is right as well; and if no
    size shows it, so are wrong elements.
    """
    outcomes = [run_trial(seed) for seed in range(first, first + 20)]
    assert outcomes.count("right") > 12
