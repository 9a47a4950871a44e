"""The life of one rank of a `gloo_world`: join the group, run the function, send the outcome."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import sys
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["RankError", "run_rank"]


class RankError(Exception):
    """A rank died without a word, or raised something that cannot be sent."""


def run_rank(
    sender: Connection, rank: int, size: int, folder: str, timeout: float, job: bytes
) -> None:
    """Run the pickled `job` as rank `rank`, and send ``(error, traceback, result)``, pickled.

    What is printed goes to ``<rank>.log`` in `folder`.
    """
    with Path(folder, f"{rank}.log").open("wb", buffering=0) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    # Shortly before the caller's limit, so that what it reports of this rank says where it stands.
    faulthandler.dump_traceback_later(0.9 * timeout)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_WORLD_SIZE"] = str(size)  # as torchrun does
    torch.set_num_threads(1)
    try:
        filters, fn, args = pickle.loads(job)
        warnings.filters[:] = filters
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path(folder, "store")), size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=timeout),
        )
        outcome = pickle.dumps((None, "", fn(rank, *args)))
    except BaseException as error:
        sender.send_bytes(_pickle_error(error))
        sys.stdout.flush()
        # Without a farewell: peers must see the connection break, as if the process had crashed.
        os._exit(1)
    sender.send_bytes(outcome)
    # A rank that leaves early breaks the collectives of those that are behind. If one of these
    # has failed, it says so itself.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    dist.destroy_process_group()


def _pickle_error(error: BaseException) -> bytes:
    detail = "".join(traceback.format_exception(error))
    try:
        outcome = pickle.dumps((error, detail, None))
        pickle.loads(outcome)
    except Exception:
        return pickle.dumps((RankError(f"{type(error).__name__}: {error}"), detail, None))
    return outcome
