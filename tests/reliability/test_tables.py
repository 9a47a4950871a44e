"""Every row of the tables of bad inputs and of faults has a test, and its number is in the id."""

from __future__ import annotations

import re
from pathlib import Path

WAITING = {
    "B42": "checkpoints of sharded safetensors files",
    "B50": "the manifest",
    "B52": "checkpoints of safetensors files",
    "F21": "object storage",
    "F27": "nothing is written",
}


# Marks, names, and ids of parameters: `conftest` makes ids of the first two.
GIVEN = r"mark\.row\((.*)\)|\bids?=(.*)|\bCase\(\s*(.*?),|def test((?:_[bf]\d\d)+)_"


def test_every_row_is_tested_or_waits() -> None:
    """Each of the 52 and 27 rows is in the id of some test, or has a reason to wait."""
    tests = "".join(path.read_text() for path in Path(__file__).parents[1].rglob("*.py"))
    found = set(re.findall(r"[BF]\d\d", str(re.findall(GIVEN, tests)).upper()))
    rows = {f"B{n:02}" for n in range(1, 53)} | {f"F{n:02}" for n in range(1, 28)}
    assert found & rows == rows - WAITING.keys()
