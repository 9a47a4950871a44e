"""Collective calls: where does a process group want its tensors?"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["collective_device", "takes_cpu_tensors"]


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
