"""Ranks that are killed or stopped: the others say who is gone, and do not wait for ever."""

from __future__ import annotations

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_reshard
from dcp_reshard import PeerFailedError, ReaderOptions, ReshardLoadPlanner, RetryPolicy
from tests.support.checkpoints import save_world
from tests.support.failing import Failing
from tests.support.tensors import check_same, indexed_tensor, snapshot
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

ONCE = ReaderOptions(retry=RetryPolicy(tries=1))
State = dict[str, Any]


def make_rows() -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {"large": indexed_tensor((500, 64)), "small": indexed_tensor((6, 5))}
    state: State = {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in full.items()
    }
    return state | {"note": "text"}


def load_and_lose(rank: int, path: str, victim: int, phase: str, mode: str, stop: int) -> None:
    """Load; the victim sends itself a signal in some phase, at its own hand."""
    group = dist.new_group(timeout=timedelta(seconds=3)) if stop == signal.SIGSTOP else None
    hit = (lambda: os.kill(os.getpid(), stop)) if rank == victim else (lambda: None)
    hooks = {"before plan": "open", "in read": "read_into", "before verdict": "close"}
    checkpoint = Failing(Path(path), hooks.get(phase, "none"), 0, hit)

    def rename(key: str) -> str:
        if phase == "in plan":
            hit()
        return key

    class Planner(ReshardLoadPlanner):
        def commit_tensor(self, *_: Any) -> None:
            if phase == "in commit":
                hit()

    dcp_reshard.api.ReshardLoadPlanner = Planner  # type: ignore[misc]
    dcp_reshard.load(
        make_rows(), checkpoint, mode=mode, rename=rename, options=ONCE, process_group=group
    )


def lose(path: Path, victim: int, phase: str, mode: str, stop: int) -> None:
    """Check that those who are left say who is lost, soon."""
    save_world(path, 2, lambda rank: make_rows())
    started = time.monotonic()
    with pytest.raises(BaseExceptionGroup) as caught:
        gloo_world(3, load_and_lose, str(path), victim, phase, mode, stop, timeout=30.0)
    assert time.monotonic() - started < 25
    survivors = [e for e in caught.value.exceptions if not isinstance(e, TimeoutError)]
    told = [str(e) for e in survivors if isinstance(e, PeerFailedError)]
    assert len(told) == 2, caught.value.exceptions
    for text in told:
        assert "waited for all ranks to" in text
        assert f"no sign of rank {victim}" in text


@pytest.mark.parametrize(
    ("victim", "phase", "mode"),
    [
        (1, "before plan", "direct"),
        (0, "in plan", "direct"),
        (1, "in read", "direct"),
        (0, "in read", "cooperative"),
        (2, "before verdict", "direct"),
        (1, "before verdict", "cooperative"),
        (0, "in commit", "direct"),
        (1, "in commit", "cooperative"),
    ],
)
def test_f11_f12_a_rank_that_is_killed(tmp_path: Path, victim: int, phase: str, mode: str) -> None:
    """The others end with an error that says who is gone and what they waited for."""
    lose(tmp_path, victim, phase, mode, signal.SIGKILL)


def test_f13_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """A rank that never answers is given up after the timeout of the process group."""
    lose(tmp_path, 1, "in read", "direct", signal.SIGSTOP)


def load_with_pause(rank: int, path: str) -> None:
    group = dist.new_group(timeout=timedelta(seconds=5))
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    hit = (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank == 1 else (lambda: None)
    if rank == 0:
        threading.Timer(2.5, os.kill, (pids[1], signal.SIGCONT)).start()
    state = make_rows()
    state["large"].to_local().fill_(-1)
    dcp_reshard.load(state, Failing(Path(path), "read_into", 0, hit), process_group=group)
    check_same(snapshot(state), snapshot(make_rows()))


def test_f13_a_rank_that_is_stopped_and_goes_on(tmp_path: Path) -> None:
    """A pause of half the timeout is no error."""
    save_world(tmp_path, 2, lambda rank: make_rows())
    gloo_world(3, load_with_pause, str(tmp_path))
