"""What does the caller of a load see when it has failed?

torch wraps what any rank has raised into one `CheckpointException`, on all ranks. Where that hides
more than it says, it is taken off again: a process that loads alone gets its own error, and a rank
that was interrupted gets its own interrupt.

If a collective call fails, because a rank has died or does not answer, no rank has an error to
send. gloo and NCCL report a broken connection or a timeout, but not whose. So the ranks that are
left leave a note in the store through which the process group was formed, and look whose notes do
not come. That is a hint and no proof: a rank that is slow to notice counts as silent, and where the
store has gone with the rank that kept it, nothing is found. While all is well nothing is written.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import Store

from dcp_reshard._torch import default_store
from dcp_reshard.destination import Destination
from dcp_reshard.errors import PeerFailedError, ReshardError
from dcp_reshard.portable import STOPS

__all__ = ["find_silent_ranks", "leave_note", "own_errors"]

logger = logging.getLogger(__name__)

_WAIT_SECONDS = 2.0
_POLL_SECONDS = 0.1
# Notes of an earlier failure do not count. Clocks of hosts may differ by a little.
_MAX_AGE_SECONDS = 60.0
_SHOWN_RANKS = 16


@contextmanager
def own_errors(
    *,
    group: dist.ProcessGroup | None,
    waiting_for: Callable[[], str],
    destination: Destination | None = None,
) -> Iterator[None]:
    """Around a load by torch: raises what this rank's caller should see.

    Args:
        group: The ranks that load together; None if this process loads alone.
        waiting_for: Tells what this rank waits for in a collective call.
        destination: What the load fills, if it is known whether that has been written to.

    Raises:
        PeerFailedError: A collective call has failed.
        CheckpointException: The load has failed on some of several ranks.
        BaseException: What a process that loads alone has raised; what has interrupted this rank.
    """
    try:
        yield
    except CheckpointException as error:
        rank = 0 if group is None else dist.get_rank(group)
        failure: BaseException = error.failures.get(rank, (error, None))[0]
        if group is not None and not isinstance(failure, STOPS):
            raise
    except RuntimeError as error:
        # What hooks raise comes as a `CheckpointException`: this is a collective call that failed.
        if group is None or isinstance(error, ReshardError):
            raise
        silent = find_silent_ranks(group)
        lost = PeerFailedError(
            f"a rank of the load has died, or did not answer in time, while this one waited for "
            f"{waiting_for()}; {_name(silent)} ({str(error).partition(chr(10))[0]:.500})"
        )
        lost.destination = destination.state if destination is not None else None
        raise lost from error
    else:
        return
    raise failure


def find_silent_ranks(group: dist.ProcessGroup) -> list[int] | None:
    """Ranks of the group that leave no note within a few seconds, or None if that fails.

    To be called by each rank that is still there, at about the same time.
    """
    found: list[list[int]] = []
    # In a thread: calls to a store whose keeper was stopped do not return.
    thread = threading.Thread(target=_call_roll, args=(group, found), daemon=True)
    thread.start()
    thread.join(2 * _WAIT_SECONDS)
    return found[0] if found else None


def leave_note() -> None:
    """Leave a note that this rank is there, as soon as it notices that another may not be.

    A collective call of torch's may keep it from looking who else is there until others have given
    up: they must not take it for dead.
    """
    thread = threading.Thread(target=_leave_note, daemon=True)
    thread.start()
    thread.join(_POLL_SECONDS)


def _leave_note() -> None:
    try:
        default_store().set(_key(dist.get_rank()), str(time.time()))
    except Exception as error:
        logger.info("the store of the process group cannot be told who is there: %s", error)


def _key(rank: int) -> str:
    return f"dcp_reshard/alive/{rank}"


def _call_roll(group: dist.ProcessGroup, found: list[list[int]]) -> None:
    try:
        store = default_store()
        ranks = dist.get_process_group_ranks(group)
        keys = {rank: _key(rank) for rank in ranks}
        store.set(keys[dist.get_rank()], str(time.time()))
        deadline = time.monotonic() + _WAIT_SECONDS
        silent = list(ranks)
        while silent and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            silent = [rank for rank in silent if not _has_note(store, keys[rank])]
        found.append([ranks.index(rank) for rank in silent])
    except Exception as error:
        logger.info("the store of the process group cannot be asked who is there: %s", error)


def _has_note(store: Store, key: str) -> bool:
    if not store.check([key]):
        return False
    return time.time() - float(store.get(key)) < _MAX_AGE_SECONDS


def _name(silent: list[int] | None) -> str:
    if not silent:
        return "it is not known which rank"
    more = f" and {len(silent) - _SHOWN_RANKS} more" if len(silent) > _SHOWN_RANKS else ""
    return f"no sign of rank {', '.join(map(str, silent[:_SHOWN_RANKS]))}{more}"
