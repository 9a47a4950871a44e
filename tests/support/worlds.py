"""Worlds of several ranks, from cheap to real.

* `fake_world`: this process pretends to be one rank. No communication; milliseconds. For layouts,
  plans, and loads with ``no_dist=True``, run for every rank in turn.
* `thread_world`: ranks are threads with working collectives in Python. Tens of milliseconds.
* `gloo_world` (see `processes`): ranks are processes with gloo. Tenths of a second, once warm.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.distributed.multi_threaded_pg import (
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)

from tests.support.processes import gloo_world

__all__ = ["fake_world", "gloo_world", "thread_world"]


@contextmanager
def fake_world(rank: int, size: int) -> Iterator[None]:
    """Be rank `rank` of `size`, with a process group whose collectives do nothing.

    Meshes and DTensors can be built as usual, except with collectives: give `distribute_tensor` the
    argument ``src_data_rank=None``. They stay readable after the world has ended.
    """
    # Layouts of results that torch has worked out for another rank hold that rank's mesh.
    _clear_sharding_prop_cache()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def thread_world(
    size: int, fn: Callable[..., Any], *args: object, timeout: float = 60.0
) -> list[Any]:
    """The results of ``fn(rank, *args)``, run by `size` threads as the ranks of one process group.

    Collectives work, point-to-point messages do not (torch's threaded group has none). Whatever is
    global to a process is shared by the ranks, the random number generator among it.

    Raises:
        BaseException: What a rank raised first; the others are released from their collectives.
        TimeoutError: A rank has not ended in time; the message says where it stands.
    """
    # Without isolation, the threads would register their groups under the same names in C++.
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store = dist.HashStore()
    results: list[Any] = [None] * size
    released: list[int] = []
    errors: list[tuple[int, BaseException]] = []

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            try:
                results[rank] = fn(rank, *args)
            finally:
                dist.destroy_process_group()
        except SystemExit:
            # How torch releases a rank that waits for one that has failed.
            released.append(rank)
        except BaseException as error:
            errors.append((rank, error))
            ProcessLocalGroup.exception_handle(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    deadline = time.monotonic() + timeout
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if stuck:
            late = TimeoutError(f"ranks {stuck} of {size} have not ended after {timeout} s")
            for rank in stuck:
                late.add_note(f"rank {rank} stands at:\n{_stack(threads[rank])}")
            ProcessLocalGroup.exception_handle(late)
            for rank in stuck:
                threads[rank].join(1.0)
            errors.append((stuck[0], late))
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if released and not errors:
        # torch's release is global to the process: a thread that an earlier world gave up on has
        # failed late, and ended this world, in which nothing was wrong.
        return thread_world(size, fn, *args, timeout=timeout)
    if errors:
        rank, error = errors[0]
        error.add_note(f"(rank {rank} of {size})")
        raise error
    return results


def _stack(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)
    return "".join(traceback.format_stack(frame)) if frame else "(ended)"
