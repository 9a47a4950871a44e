"""The collective calls of a load, beyond those that torch makes itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from dcp_reshard.errors import PeerFailedError

__all__ = ["collective_device", "compute_once", "takes_cpu_tensors"]

Value = TypeVar("Value")


def collective_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group wants its tensors: on the CPU, unless it has a backend for GPUs only."""
    if takes_cpu_tensors(dist.get_backend_config(group)):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def takes_cpu_tensors(backends: str) -> bool:
    """Whether a group of these backends does.

    Example:
        >>> takes_cpu_tensors("cpu:gloo,cuda:nccl"), takes_cpu_tensors("cuda:nccl")
        (True, False)
    """
    return any(pair.partition(":")[0] == "cpu" for pair in backends.split(","))


def compute_once(function: Callable[[], Value], *, group: dist.ProcessGroup) -> Value:
    """The value of `function` on the first rank of the group, on all ranks; a collective call.

    Args:
        function: Called on the first rank only. Its value is pickled.
        group: The ranks.

    Raises:
        PeerFailedError: The function failed on the first rank, which raises the cause.
    """
    box: list[Any] = [None]
    try:
        if dist.get_rank(group) == 0:
            box[0] = (function(),)
    finally:
        # Also when it failed: the others are waiting.
        dist.broadcast_object_list(box, group_src=0, group=group)
    if box[0] is None:
        raise PeerFailedError("the first rank of the group has failed; see its error")
    value: Value = box[0][0]
    return value
