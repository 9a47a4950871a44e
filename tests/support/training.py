"""A small model, its training, and every way to spread it over ranks.

All ranks train on the same batch. So however the model is spread, it is the same training, and what
one process computes alone says what loss there must be after each step.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

__all__ = [
    "LAYOUTS",
    "OPTIMIZERS",
    "Net",
    "load_model",
    "losses_of",
    "make_optimizer",
    "read_whole",
    "same",
    "save_training",
    "train",
]


class Net(nn.Module):
    """Dims that three or four ranks do not divide; two divide the inner one, for torch's TP."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up = nn.Linear(6, 14)
        self.down = nn.Linear(14, 5)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.sin(torch.arange(param.numel()) + number).view_as(param))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def _fsdp2(model: nn.Module, mesh: Any) -> nn.Module:
    for layer in (model.up, model.down):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _tp(model: nn.Module, mesh: Any) -> nn.Module:
    return parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _fsdp1(model: nn.Module, **options: Any) -> nn.Module:
    policy = ModuleWrapPolicy({nn.Linear})
    device = torch.device("cpu")
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device, **options)


def _mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


def _fsdp2_tp(model: nn.Module, dp: int, tp: int) -> nn.Module:
    mesh = _mesh(dp, tp)
    return _fsdp2(_tp(model, mesh["tp"]), mesh["dp"])


def _fsdp1_tp(model: nn.Module, **options: Any) -> nn.Module:
    mesh = _mesh(2, 2)
    return _fsdp1(_tp(model, mesh["tp"]), device_mesh=mesh["dp"], **options)


LAYOUTS: dict[str, tuple[int, Callable[[nn.Module], nn.Module]]] = {
    "one": (1, lambda model: model),
    "fsdp2-2": (2, lambda model: _fsdp2(model, _mesh(2))),
    "fsdp2-3": (3, lambda model: _fsdp2(model, _mesh(3))),
    "fsdp2-4": (4, lambda model: _fsdp2(model, _mesh(4))),
    "hsdp-2x2": (4, lambda model: _fsdp2(model, _mesh(2, 2))),
    "tp-2": (2, lambda model: _tp(model, _mesh(2))),
    "fsdp2xtp-2x2": (4, lambda model: _fsdp2_tp(model, 2, 2)),
    "fsdp2xtp-4x1": (4, lambda model: _fsdp2_tp(model, 4, 1)),
    "fsdp1-2": (2, lambda model: _fsdp1(model, use_orig_params=True)),
    "fsdp1-3": (3, lambda model: _fsdp1(model, use_orig_params=True)),
    "fsdp1-2-flat": (2, lambda model: _fsdp1(model, use_orig_params=False)),
    "fsdp1-3-flat": (3, lambda model: _fsdp1(model, use_orig_params=False)),
    "fsdp1xtp-2x2": (4, lambda model: _fsdp1_tp(model, use_orig_params=True)),
    "fsdp1xtp-2x2-flat": (4, lambda model: _fsdp1_tp(model, use_orig_params=False)),
    "fsdp1-hybrid": (
        4,
        lambda model: _fsdp1(
            model,
            use_orig_params=True,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_mesh=_mesh(2, 2),
        ),
    ),
    "fsdp1-ddp": (
        2,
        lambda model: _fsdp1(
            model, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD
        ),
    ),
    "fsdp1-ddp-flat": (
        2,
        lambda model: _fsdp1(
            model, use_orig_params=False, sharding_strategy=ShardingStrategy.NO_SHARD
        ),
    ),
}
"""Number of ranks, and how they share the model."""

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.05),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.05),
}


def make_optimizer(name: str, model: nn.Module, *, grouped: bool = True) -> torch.optim.Optimizer:
    """An optimizer with a group for weights and another one for biases, or with one for all.

    FSDP1's flat parameters hold both, and can only be in one group.
    """
    named = list(model.named_parameters())
    weights = [param for key, param in named if "bias" not in key]
    biases = [param for key, param in named if "bias" in key]
    optimizer = OPTIMIZERS[name](
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
        if grouped
        else [{"params": weights + biases, "weight_decay": 0.1}]
    )
    for group in optimizer.param_groups:
        # As learning rate schedulers do.
        group["initial_lr"] = group["lr"]
    return optimizer


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, *, start: int, steps: int
) -> list[float]:
    """Losses of `steps` steps, on the batches from number `start`."""
    losses = []
    for number in range(start, start + steps):
        x = torch.cos(torch.arange(24.0) + number).view(4, 6)
        x = x.to(next(model.parameters()).dtype)
        optimizer.zero_grad()
        loss = (model(x) - 0.5).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        losses.append(loss.item())
    return losses


def losses_of(name: str, steps: int, *, grouped: bool = True) -> list[float]:
    """Losses of a training that is never interrupted, in one process."""
    model = Net()
    return train(model, make_optimizer(name, model, grouped=grouped), start=0, steps=steps)


def save_training(
    path: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, flattened: bool = False
) -> None:
    """Stock `dcp.save` of both; the optimizer two levels down."""
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    state = {
        "model": get_model_state_dict(model),
        "train": {"optim": get_optimizer_state_dict(model, optimizer, options=options)},
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False))


def load_model(path: str | Path, model: nn.Module) -> None:
    """Stock `dcp.load` of the model alone."""
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])


def read_whole(path: str | Path) -> dict[str, Any]:
    """All of a checkpoint in one process, every tensor whole."""
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(path, Path(folder, "whole.pt"))
        return copy.deepcopy(torch.load(Path(folder, "whole.pt"), weights_only=True))


def same(one: Any, other: Any) -> bool:
    """Whether two nested values are equal to the bit, types, dtypes and devices included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        described = (one.dtype, one.device) == (other.dtype, other.device)
        return described and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)
