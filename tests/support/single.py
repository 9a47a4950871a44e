"""Optimizers of one process: saved by stock torch, changed, and restored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

from dcp_reshard import LoadReport, OptimizerOptions, OptimizerReport, load_optimizer

__all__ = ["adamw", "restore", "save_optimizer", "state_by_name", "step"]


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    """An optimizer with one group."""
    return torch.optim.AdamW(model.parameters(), **{"lr": 0.05} | options)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    """Steps with other gradients each, for those parameters that want one."""
    for number in range(steps):
        for i, param in enumerate(model.parameters()):
            if param.requires_grad:
                grad = torch.cos(torch.arange(param.numel()) + number + i)
                param.grad = grad.view_as(param).to(param.dtype)
        optimizer.step()
    optimizer.zero_grad()


def save_optimizer(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, *, form: str = "nested"
) -> dict[str, Any]:
    """Save with stock torch, nested or flattened; returns what was saved."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    state = {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False))
    return state["optimizer"]


def restore(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any
) -> tuple[OptimizerReport, LoadReport]:
    """`load_optimizer` with these options."""
    chosen = OptimizerOptions(**options)
    report = load_optimizer(model, optimizer, path, optimizer_options=chosen)
    assert report.optimizer is not None
    return report.optimizer, report


def state_by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    """State of each parameter that has some."""
    return {
        name: dict(optimizer.state[param])
        for name, param in model.named_parameters()
        if optimizer.state.get(param)
    }
