"""Options are checked where they are made, and the buffers that follow from them fit the budget."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import time
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from dcp_reshard.options import ReaderOptions, RetryPolicy

MIB = 2**20


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"verify": "always"}, "`verify` must be 'available', 'required' or 'off', got 'always'"),
        ({"verify": True}, "`verify` must be .* got True"),
        ({"threads": 0}, "`threads` must be at least 1, got 0"),
        ({"threads": -1}, "`threads` must be at least 1, got -1"),
        ({"request_bytes": -1}, "`request_bytes` must not be negative, got -1"),
        ({"whole_item_bytes": -1}, "`whole_item_bytes` must not be negative, got -1"),
        ({"shared_item_bytes": -1}, "`shared_item_bytes` must not be negative, got -1"),
        ({"auto_bytes": -1}, "`auto_bytes` must not be negative, got -1"),
        ({"block_bytes": 0}, "`block_bytes` must be a multiple of 64, got 0"),
        ({"block_bytes": 100}, "`block_bytes` must be a multiple of 64, got 100"),
        ({"auto_ratio": 0.5}, "`auto_ratio` must be at least 1, got 0.5"),
        ({"auto_ratio": math.nan}, "`auto_ratio` must be at least 1, got nan"),
        ({"threads": 4, "memory_budget": 8 * 64 * 1024 - 1}, "must be at least 524288 for 4 thr"),
        ({"memory_budget": 0}, "`memory_budget` must be at least"),
        ({"memory_budget": -1}, "`memory_budget` must be at least"),
        ({"memory_budget": 2**63}, "`memory_budget` must be at most 4611686018427387904, got 92"),
        ({"auto_bytes": 10**20}, "`auto_bytes` must be at most 4611686018427387904, got 10000"),
        ({"auto_ratio": math.inf}, "`auto_ratio` must be at most 4294967296.0, got inf"),
    ],
)
def test_values_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    """The message names the option, what it may be, and what was given."""
    with pytest.raises(ValueError, match=message):
        ReaderOptions(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tries": 0}, "`tries` must be at least 1, got 0"),
        ({"backoff": -0.1}, "`backoff` must not be negative, got -0.1"),
        ({"max_backoff": -1.0}, "`max_backoff` must not be negative"),
        ({"deadline": -1.0}, "`deadline` must not be negative"),
        ({"deadline": math.nan}, "`deadline` must not be negative, got nan"),
    ],
)
def test_retries_that_make_no_sense_are_refused(fields: dict[str, Any], message: str) -> None:
    """Times are not negative, and there is a first try."""
    with pytest.raises(ValueError, match=message):
        RetryPolicy(**fields)


@hypothesis.given(st.integers(1, 64), st.integers(0, 1 << 40))
def test_buffers_fit_the_budget(threads: int, budget: int) -> None:
    """Two buffers of the largest request for each thread are within the budget, if it is enough."""
    least = 2 * threads * 64 * 1024
    if budget < least:
        with pytest.raises(ValueError, match=f"at least {least}"):
            ReaderOptions(threads=threads, memory_budget=budget)
        return
    options = ReaderOptions(threads=threads, memory_budget=budget)
    assert 2 * threads * options.max_request_bytes <= budget
    assert 64 * 1024 <= options.max_request_bytes <= 8 * MIB


def test_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums are compared where there are some, in 256 MiB, on a thread per CPU up to 8."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    options = ReaderOptions()
    assert options.verify == "available"
    assert options.memory_budget == 256 * MIB
    assert options.num_threads == min(8, os.cpu_count() or 1)
    assert ReaderOptions(threads=3).num_threads == 3
    assert options.keep_plan_local
    assert not options.allow_unsafe_pickle
    assert (options.retry.tries, options.retry.clock) == (5, time.monotonic)


@pytest.mark.parametrize(("ranks", "threads"), [("1", 8), ("4", 4), ("16", 1), ("64", 1), ("x", 8)])
def test_ranks_of_one_host_share_its_cpus(
    ranks: str, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher says how many ranks there are; each has one to eight threads."""
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    assert ReaderOptions().num_threads == threads


@pytest.mark.parametrize("cls", [ReaderOptions, RetryPolicy])
def test_options_are_values(cls: type) -> None:
    """They cannot be changed, are equal by their fields, survive pickling, and need keywords."""
    options = cls()
    assert pickle.loads(pickle.dumps(options)) == options == cls()
    name = dataclasses.fields(cls)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(options, name, getattr(options, name))
    with pytest.raises(TypeError, match="positional"):
        cls(1)
