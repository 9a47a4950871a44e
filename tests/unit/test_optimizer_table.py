"""The table in README.md and the tests that stand behind it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
TABLE = TESTS.parent / "README.md"
PAGE = TESTS.parent / "docs" / "optimizer.md"


def rows_of_tests() -> set[int]:
    """Numbers after "Row" or "Rows" at the start of a test's docstring."""
    found: set[int] = set()
    for path in TESTS.rglob("test_*.py"):
        if path == Path(__file__):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                match = re.match(r"Rows? ([\d, and]+):", ast.get_docstring(node) or "")
                found |= {int(number) for number in re.findall(r"\d+", match[1] if match else "")}
    return found


def test_every_row_is_a_test_and_every_test_a_row() -> None:
    """The numbers in the first column are those that tests name, without a gap."""
    if not TABLE.exists():
        pytest.skip("the documentation is not here")
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", TABLE.read_text(), re.MULTILINE)]
    assert rows == list(range(1, len(rows) + 1))
    assert rows_of_tests() == set(rows)


def test_examples_compile() -> None:
    """Python in the page is Python."""
    if not PAGE.exists():
        pytest.skip("the documentation is not here")
    for block in re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE):
        compile(block, "optimizer.md", "exec")
