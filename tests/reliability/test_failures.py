"""The table of faults, second part: what can go wrong inside of the loading process."""

from __future__ import annotations

import builtins
import itertools
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_reshard
from dcp_reshard import ReaderOptions, ReshardError, StorageError, copying, direct, transfer
from tests.support.checkpoints import save_state, save_world
from tests.support.failing import Failing
from tests.support.failures import catch_failure, find_failures
from tests.support.faults import patient
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot

TENSORS = {
    "large": indexed_tensor((300, 64)),
    "small": indexed_tensor((6, 5)),
    "turned": indexed_tensor((64, 200), torch.float64),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    save_state(path, {**TENSORS, "note": "text"})
    return path


def make_dest() -> dict[str, Any]:
    state: dict[str, Any] = {name: t.clone() for name, t in TENSORS.items()}
    state["turned"] = state["turned"].t().contiguous().t()
    fill_with_sentinel(state)
    return state | {"note": None}


def check_loaded(state: dict[str, Any]) -> None:
    check_same(snapshot(state), TENSORS)
    assert state["note"] == "text"


def test_f17_no_memory(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocation that fails, whichever, fails the load; until data are read nothing changes."""
    count = itertools.count()
    fail_at = -1

    def allocate(*args: Any) -> bytearray:
        if next(count) == fail_at:
            raise MemoryError
        return builtins.bytearray(*args)

    for module in ("storage", "probe", "direct", "transfer"):
        monkeypatch.setattr(f"dcp_reshard.{module}.bytearray", allocate, raising=False)
    options = patient()
    dcp_reshard.load(make_dest(), good, no_dist=True, options=options)
    total = next(count)
    assert total > 4
    for fail_at in range(total):
        count = itertools.count()
        state = make_dest()
        before = snapshot(state)
        with pytest.raises(MemoryError):
            dcp_reshard.load(state, good, no_dist=True, options=options)
        if fail_at < 3:
            check_same(snapshot(state), before)


@contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """Allow this process a few more descriptors than it has, and use up none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))  # noqa: PTH208
    # Below the highest one there may be free ones.
    used = [os.dup(0)]
    while used[-1] < highest:
        used.append(os.dup(0))
    os.close(used.pop())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in used:
            os.close(descriptor)


def test_f18_few_descriptors(tmp_path: Path) -> None:
    """With fewer descriptors than files, files are closed to open others."""
    save_world(tmp_path, 20, lambda rank: {f"t{rank}": indexed_tensor((50,)) + rank})
    state = {f"t{rank}": torch.zeros(50) for rank in range(20)}
    with few_descriptors(6):
        dcp_reshard.load(state, tmp_path, no_dist=True, options=patient())
    assert all(bool((state[f"t{r}"] == indexed_tensor((50,)) + r).all()) for r in range(20))
    with few_descriptors(1):
        error = catch_failure(
            lambda: dcp_reshard.load(state, tmp_path, no_dist=True, options=patient())
        )
    assert isinstance(error, StorageError)
    assert "EMFILE" in str(error)


def test_f18_no_threads(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that cannot be started is an error, and no load that hangs."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        dcp_reshard.load(make_dest(), good, no_dist=True, options=ReaderOptions(threads=3))


def test_f20_a_fork_in_between(good: Path) -> None:
    """A process forked in the middle of a load, by a data loader say, does not disturb it."""
    children = []

    def fork() -> None:
        child = os.fork()
        if not child:
            os._exit(0)
        children.append(child)

    for at in range(3):
        state = make_dest()
        dcp_reshard.load(state, Failing(good, "read_into", at, fork), no_dist=True)
        check_loaded(state)
    for child in children:
        assert os.waitpid(child, 0)[1] == 0


def test_f22_a_copy_that_fails(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A destination that cannot be written to, as after a device error, fails the load."""
    count = itertools.count()
    fail_at = -1

    def failing(real: Callable[..., None]) -> Callable[..., None]:
        def copy(*args: Any, **kwargs: Any) -> None:
            if next(count) == fail_at:
                raise RuntimeError("device-side assert triggered")
            real(*args, **kwargs)

        return copy

    for module in (direct, transfer):
        monkeypatch.setattr(module, "copy_elements", failing(copying.copy_elements))
    monkeypatch.setattr(copying, "copy_together", failing(copying.copy_together))
    dcp_reshard.load(make_dest(), good, no_dist=True, options=patient())
    total = next(count)
    assert total > 1
    for fail_at in range(total):  # noqa: B007  `copy` looks at it
        count = itertools.count()
        with pytest.raises(RuntimeError, match="device-side assert"):
            dcp_reshard.load(make_dest(), good, no_dist=True, options=patient())


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "no grad": torch.no_grad,
    "inference": torch.inference_mode,
    "grad": torch.enable_grad,
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_f24_two_loads_at_once_in_any_context(good: Path, context: str) -> None:
    """Loads in several threads do not touch each other, and leave torch's list of classes alone."""
    before = set(torch.serialization.get_safe_globals())
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(5):
                state = make_dest()
                with CONTEXTS[context]():
                    dcp_reshard.load(state, good, no_dist=True, allowed_classes=[ReshardError])
                check_loaded(state)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert set(torch.serialization.get_safe_globals()) == before


STATES = ["absent", "empty", "half", "zeros", "whole"]


def test_f25_crash_states_of_the_stock_writer(tmp_path: Path) -> None:
    """Whatever of a save a crash leaves, a load is right or refuses it.

    The writer syncs nothing by default: any of its files may be absent, empty, cut, or have blocks
    of zeros, also if the metadata, which come last, are there.
    """
    save_world(tmp_path / "whole", 2, lambda rank: {f"t{rank}": indexed_tensor((100,)) + rank})
    files = [".metadata", "__0_0.distcp", "__1_0.distcp"]
    contents = {name: (tmp_path / "whole" / name).read_bytes() for name in files}
    right = 0
    for number, states in enumerate(itertools.product(STATES, repeat=3)):
        path = tmp_path / str(number)
        path.mkdir()
        for name, kind in zip(files, states, strict=True):
            data = contents[name]
            parts = {"empty": b"", "half": data[: len(data) // 2], "zeros": bytes(len(data))}
            if kind != "absent":
                (path / name).write_bytes(parts.get(kind, data))
        if states[0] == "half":
            (path / ".metadata").rename(path / ".metadata.tmp")
        state = {f"t{rank}": torch.full((100,), -1.0) for rank in range(2)}
        failures = find_failures(
            lambda state=state, path=path: dcp_reshard.load(
                state, path, no_dist=True, options=patient()
            )
        )
        if not failures:
            assert all(bool((state[f"t{r}"] == indexed_tensor((100,)) + r).all()) for r in (0, 1))
            right += 1
        shutil.rmtree(path)
    assert right == 1


SIGNALS = """
import os, signal, sys, torch, dcp_reshard
hits = []
signal.signal(signal.SIGALRM, lambda *_: hits.append(1))
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
for _ in range(30):
    state = {"large": torch.zeros(300, 64), "note": None}
    dcp_reshard.load(state, sys.argv[1], no_dist=True, progress=True)
    assert state["large"][299, 63] == 300 * 64 - 1
signal.setitimer(signal.ITIMER_REAL, 0)
os._exit(0 if hits else 3)
"""


def test_f04_f26_signals_and_closed_streams(good: Path) -> None:
    """Signals that interrupt system calls, and streams that are closed, have no effect."""
    command = f'exec "{sys.executable}" -W error -c "$1" "$2" >&- 2>&-'
    done = subprocess.run(["/bin/sh", "-c", command, "sh", SIGNALS, good], timeout=90, check=False)
    assert done.returncode == 0
