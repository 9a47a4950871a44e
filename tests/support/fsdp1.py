"""FSDP1 in all its forms, around one small model whose parameters are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

__all__ = ["KINDS", "Small", "expected", "make_model", "sharded_state", "whole_state"]


class Small(nn.Module):
    """Parameters that four ranks do not divide, some with fewer rows than ranks, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 14)
        self.down = nn.Linear(14, 2)
        self.scale = nn.Parameter(torch.zeros(1))
        self.register_buffer("steps", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x))) * self.scale


def expected() -> dict[str, torch.Tensor]:
    """What all parameters and buffers are before a save: no two elements are alike."""
    values, start = {}, 1
    for name, tensor in Small().state_dict().items():
        stop = start + tensor.numel()
        values[name] = torch.arange(start, stop, dtype=tensor.dtype).reshape(tensor.shape)
        start = stop
    return values


def _fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    options = {"device_id": torch.device("cpu"), "use_orig_params": True} | options
    return Fsdp1(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


def _even(model: nn.Module) -> nn.Module:
    """Weights alone, each in a flat parameter; two ranks cut them evenly. Biases are left out."""
    for layer in (model.up, model.down):
        layer.bias = None
    return _fsdp1(model, ignored_states=[model.scale])


def _pairs() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """The groups of a rank: those that share its shards, those that hold the same."""
    size = dist.get_world_size()
    shard = [dist.new_group([r, r + 1]) for r in range(0, size, 2)]
    replicas = [dist.new_group(list(range(r, size, 2))) for r in range(2)]
    return shard[dist.get_rank() // 2], replicas[dist.get_rank() % 2]


def _tp_inside(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _fsdp1(model, device_mesh=mesh["dp"])


def _fsdp2(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


KINDS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "sharded": _fsdp1,
    "flat": lambda model: _fsdp1(model, use_orig_params=False),
    "mesh": lambda model: _fsdp1(
        model, device_mesh=init_device_mesh("cpu", (dist.get_world_size(),))
    ),
    "even": _even,
    "grad_op": lambda model: _fsdp1(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP),
    "hybrid_groups": lambda model: _fsdp1(
        model, sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=_pairs()
    ),
    "hybrid_mesh": lambda model: _fsdp1(
        model,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        device_mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")),
    ),
    "tp_inside": _tp_inside,
    "ignored": lambda model: _fsdp1(model, ignored_modules=[model.down]),
    "fsdp2": _fsdp2,
    "plain": lambda model: model,
}
"""Ways to share the model, each for the ranks of the current world."""


def make_model(kind: str, values: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """The model with these values, or with zeros, shared by the ranks of the current world."""
    model = Small()
    zeros = {name: torch.zeros_like(tensor) for name, tensor in model.state_dict().items()}
    model.load_state_dict(values or zeros)
    return KINDS[kind](model)


def sharded_state(
    model: nn.Module, kind: StateDictType = StateDictType.SHARDED_STATE_DICT
) -> dict[str, Any]:
    """The model's state dict of this kind, if it is FSDP1's."""
    if not isinstance(model, Fsdp1):
        return model.state_dict()
    with Fsdp1.state_dict_type(model, kind):
        return model.state_dict()


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """All parameters and buffers whole, on every rank, as torch puts them together."""
    options = StateDictOptions(full_state_dict=True)
    found = get_model_state_dict(model, options=options)
    sent = [found]
    dist.broadcast_object_list(sent, src=0)
    return sent[0]
