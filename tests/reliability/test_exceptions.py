"""The table of faults, third part: exceptions of every class, at every hook of a load."""

from __future__ import annotations

import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_reshard
from dcp_reshard import ReaderOptions, ReshardStorageReader
from tests.support.checkpoints import save_state
from tests.support.failing import HOOKS, Failing
from tests.support.failures import find_failures
from tests.support.faults import EXCEPTIONS, patient
from tests.support.tensors import indexed_tensor


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    tensors = {"large": indexed_tensor((300, 64)), "small": indexed_tensor((6, 5))}
    save_state(path, {**tensors, "note": "text"})
    return path


def make_dest() -> dict[str, Any]:
    # Its strides are not those stored: read through a buffer.
    return {"large": torch.zeros(64, 300).t(), "small": torch.zeros(6, 5), "note": None}


def load_failing(failing: Failing) -> None:
    reader = ReshardStorageReader(failing, options=patient(), on_progress=failing.on_progress)
    dcp.load(make_dest(), storage_reader=reader, planner=failing.planner(), no_dist=True)


def raiser(make: Callable[[], BaseException]) -> Callable[[], object]:
    def fail() -> None:
        raise make()

    return fail


@pytest.mark.parametrize("kind", EXCEPTIONS)
@pytest.mark.parametrize("hook", HOOKS)
def test_f15_any_exception_at_any_hook(good: Path, hook: str, kind: str) -> None:
    """What is raised can be sent to any rank, in a few kilobytes, with its class and its text."""
    error_class = type(EXCEPTIONS[kind]()).__name__
    for at in (0, 1):
        failing = Failing(good, hook, at, raiser(EXCEPTIONS[kind]))
        failures = find_failures(lambda failing=failing: load_failing(failing))
        if failing.calls <= at:
            continue  # the load makes fewer such calls
        [(_, failure)] = failures.items()
        pickled = pickle.dumps(failure)
        assert len(pickled) < 2**18
        again = pickle.loads(pickled)
        assert (type(again), str(again)) == (type(failure), str(failure))
        assert error_class in f"{type(failure).__name__} {failure}" or kind == "os"
        if kind not in ("no text", "bytes", "interrupt", "generator exit"):
            assert "told to fail" in str(failure)


@pytest.mark.parametrize("threads", [1, 3])
def test_f16_an_interrupt_stops_the_load(good: Path, threads: int) -> None:
    """Ctrl-C at any read comes out as a `KeyboardInterrupt`, and no thread is left."""
    for at in range(3):
        failing = Failing(good, "read_into", at, lambda: signal.raise_signal(signal.SIGINT))
        before = set(threading.enumerate())
        with pytest.raises(KeyboardInterrupt):
            dcp_reshard.load(
                make_dest(), failing, no_dist=True, options=ReaderOptions(threads=threads)
            )
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive()
