"""Meta tensors of a state dict: memory for them, laid out as they are."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from dcp_reshard._torch import (
    DTensor,
    ShardedTensor,
    default_device,
    empty_dtensor_like,
    empty_sharded_tensor_like,
)

__all__ = ["make_real"]


def make_real(values: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Tensors with uninitialised memory for those of the values that are meta tensors.

    A tensor under several keys (tied parameters) stays one tensor.
    """
    made: dict[int, torch.Tensor] = {}
    real: dict[str, torch.Tensor] = {}
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and _is_meta(value):
            if id(value) not in made:
                made[id(value)] = _empty_like(value)
            real[key] = made[id(value)]
    return real


def _empty_like(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        device = default_device(tensor.device_mesh.device_type)
        return empty_dtensor_like(tensor, dtype=tensor.dtype, device=device)
    if isinstance(tensor, ShardedTensor):
        return empty_sharded_tensor_like(tensor, dtype=tensor.dtype, device=default_device())
    return torch.empty_like(tensor, device=default_device())


def _is_meta(tensor: torch.Tensor) -> bool:
    # torch 2.13 guesses the device of a ShardedTensor that has no shard on this rank, and asks for
    # a CUDA device where the group is not gloo's; without CUDA that raises.
    if isinstance(tensor, ShardedTensor):
        return any(_is_meta(shard.tensor) for shard in tensor.local_shards())
    return tensor.device.type == "meta"
