"""Metadata pickles that would take all memory, or the process: refused within bounds."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.unpickle import unpickle_metadata


@pytest.mark.parametrize(
    "bomb",
    [
        b"Nr\xff\xff\xff\x7f",  # a memo of 16 GiB
        b"Nr\x00\x10\x00\x00",
        b"X\xff\xff\xff\x7f",
        b"\x8c\xff",
        b"\x8a\xff" + b"\x7f" * 255,
        b"\x95" + (1 << 62).to_bytes(8, "little") + b"N",
        b"\x95" + b"\xff" * 8 + b"N",
        b"j\xff\xff\xff\x7f",
        b"]" * 100_000,
        b"(" * 100_000,
        b"](" * 50_000 + b"e" * 50_000,
        b"N\x85" + b"\x85\x94" * 20_000,
    ],
    ids=lambda bomb: repr(bomb[:8]),
)
def test_lengths_and_depths_cost_what_the_file_is_long(bomb: bytes) -> None:
    """Memory is bounded by the file, not by numbers in it."""
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointFormatError):
            unpickle_metadata(b"\x80\x04" + bomb + b".", file=".metadata")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


# In a thread, whose stack is small: a few thousand levels are too many for it.
NESTED = """
import threading

from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.unpickle import unpickle_metadata

n = 10_000
layout = b"ctorch.serialization\\n_get_layout\\n"
ordered = b"ccollections\\nOrderedDict\\n"
properties = b"ctorch.distributed.checkpoint.metadata\\nTensorProperties\\n)\\x81"
state = b"(ctorch\\nint8\\nh\\x00NNNtq\\x00b"
bodies = (
    b"})" + b"\\x85" * n + b"Ns",
    b"})" + b"\\x85\\x94" * n + b"Ns",
    b"})" + b"\\x85q\\x00" * n + b"Ns",
    b"})" + b"\\x85r\\0\\0\\0\\0" * n + b"Ns",
    b"})" + b"N\\x86" * n + b"Ns",
    b"})" + b"NN\\x87" * n + b"Ns",
    b"}" + b"(" * n + b"t" * n + b"Ns",
    b")q\\x00" + b"h\\x00\\x85q\\x00" * n + b"}h\\x00Ns",
    b")q\\x00" + (layout + b"h\\x00\\x85q\\x00R") * n + b"}h\\x00Ns",
    b")q\\x00" + (ordered + b"h\\x00\\x85q\\x00R") * n + b"}h\\x00Ns",
    b")q\\x00" + (properties + state) * n + b"}h\\x00Ns",
)


def read_all():
    for body in bodies:
        try:
            unpickle_metadata(b"\\x80\\x04" + body + b".", file="f")
        except CheckpointFormatError as error:
            print(error)


threading.stack_size(256 * 1024)
thread = threading.Thread(target=read_all)
thread.start()
thread.join()
"""


@pytest.mark.dist
def test_nested_tuples_as_keys_do_not_end_the_process() -> None:
    """Python hashes tuples in tuples by recursion without a limit; none is ever hashed."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", NESTED], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 11
