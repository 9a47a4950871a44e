"""Settings for all tests, and the rule that no test leaves a process group behind."""

from __future__ import annotations

import re
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

# The same examples in every run: a failure in one run must be there in the next. No deadline: two
# workers share two cores with whatever else runs.
hypothesis.settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    max_examples=60,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("repeatable")

# Threads of two xdist workers on two cores only get into each other's way.
torch.set_num_threads(1)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that is about a row of the tables of bad inputs and faults has its number in its id.

    It is given by the mark `row`, or by the name: ``test_b43_files_of_two_saves[B43]``.
    """
    marker = metafunc.definition.get_closest_marker("row")
    named = re.match(r"test((_[bf]\d\d)+)_", metafunc.definition.originalname)
    rows = marker.args[0] if marker else named[1][1:].replace("_", "-").upper() if named else ""
    if rows:
        metafunc.fixturenames.append("row")
        metafunc.parametrize("row", [rows])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, there is none"))


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    """A group left behind by one test would silently be used by the next."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
        pytest.fail("the test left a process group behind")
