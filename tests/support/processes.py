"""Ranks as real processes with gloo, forked from one server that has imported torch already.

The server is started by the first `gloo_world` of a process (each xdist worker has its own), and
pays for the imports, seconds; a rank is a fork of it, milliseconds. Ranks meet through a file, and
gloo's sockets stay on the loopback interface, at ports that the system picks.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support.rank_process import RankError, run_rank

__all__ = ["RankError", "gloo_world"]

# Imported by the server, once; a rank would import it again each time. pytest is in it because a
# child imports the main module of its parent, torch._dynamo because a first DTensor operation does.
_PRELOAD = [
    "pytest",
    "hypothesis",
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.testing._internal.distributed.fake_pg",
    "torch.testing._internal.distributed.multi_threaded_pg",
    "dcp_reshard",
]

# How long ranks may go on after one has failed. gloo tells the peers of a dead process at once, so
# what is still there after this waits for something else.
_GRACE_SECONDS = 10.0


def gloo_world(
    size: int, fn: Callable[..., Any], *args: object, timeout: float = 60.0
) -> list[Any]:
    """The results of ``fn(rank, *args)``, run by `size` processes as the ranks of one gloo group.

    `fn`, `args` and results are pickled, so `fn` is defined at the top of its module. Warnings are
    treated by the ranks as they are in the calling test. What ranks print is kept, and shown with
    their errors.

    Raises:
        BaseExceptionGroup: One or more ranks failed. It holds what each of them raised, with the
            rank's traceback and output as a note, and a `TimeoutError` for each rank that was
            killed. An `ExceptionGroup`, unless it holds torch's `CheckpointException`, which is a
            `BaseException`.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    # Pickled here: multiprocessing's own pickler would put tensors into shared memory.
    job = pickle.dumps((warnings.filters, fn, args))
    processes: list[BaseProcess] = []
    outcomes: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory(prefix="gloo_world_") as folder:
        try:
            for rank in range(size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=run_rank,
                    args=(sender, rank, size, folder, timeout, job),
                    daemon=True,
                )
                process.start()
                sender.close()
                processes.append(process)
                outcomes[receiver] = rank
            results, errors = _collect(outcomes, Path(folder), timeout)
            if not errors:
                for process in processes:
                    process.join(_GRACE_SECONDS)
        finally:
            for process in processes:
                process.kill()
                process.join()
                process.close()
            for receiver in outcomes:
                receiver.close()
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} of {size} ranks failed", errors)
    return [results[rank] for rank in range(size)]


def _collect(
    outcomes: dict[Connection, int], folder: Path, timeout: float
) -> tuple[dict[int, Any], list[BaseException]]:
    results: dict[int, Any] = {}
    errors: list[BaseException] = []
    deadline = time.monotonic() + timeout
    pending = dict(outcomes)
    while pending:
        ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
        if not ready:
            for rank in pending.values():
                late = TimeoutError(f"rank {rank} was killed: it had not ended in time")
                errors.append(_with_output(late, rank, folder))
            break
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            try:
                error, detail, result = pickle.loads(connection.recv_bytes())
            except EOFError:
                error, detail = RankError(f"rank {rank} died"), ""
            if error is None:
                results[rank] = result
                continue
            error.add_note(f"rank {rank}:\n{detail}")
            errors.append(_with_output(error, rank, folder))
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    return results, errors


def _with_output(error: BaseException, rank: int, folder: Path) -> BaseException:
    log = folder / f"{rank}.log"
    output = log.read_text(errors="replace") if log.exists() else ""
    if output:
        error.add_note(f"rank {rank} printed:\n{output[-4000:]}")
    return error
