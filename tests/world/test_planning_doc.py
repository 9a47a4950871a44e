"""The example of docs/planning.md, run as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.checkpoints import save_state
from tests.support.tensors import indexed_tensor

DOC = Path(__file__).parents[2] / "docs/planning.md"


def test_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It plans two rows of a matrix that was saved in one chunk, and prints that."""
    save_state(tmp_path, {"w": indexed_tensor((8, 4))})
    [block] = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)
    exec(block, {"path": tmp_path})  # noqa: S102
    assert capsys.readouterr().out == "32\nchunk 0 region [2:4, 0:4]\n"
