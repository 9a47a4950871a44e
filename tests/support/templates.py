"""Templates of `get_optimizer_state_dict`, in either form."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from tests.support.training import Net

__all__ = ["grouped", "put_back", "template", "value_of", "with_prefix"]


def template(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    """What `get_optimizer_state_dict` gives, below a key."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    return {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


def put_back(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any], form: str
) -> None:
    """Set an optimizer to what a template holds."""
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def grouped(model: Net, *groups: tuple[str, float]) -> torch.optim.AdamW:
    """An optimizer with groups of the named parts of the model."""
    return torch.optim.AdamW(
        [
            {"params": [p for n in names.split() for p in getattr(model, n).parameters()], "lr": lr}
            for names, lr in groups
        ]
    )


def value_of(state: dict[str, Any], param: str, name: str) -> Any:
    """A hyper-parameter of a parameter, in either form."""
    osd = state["optimizer"]
    if "param_groups" not in osd:
        return osd[f"param_groups.{param}.{name}"]
    return next(group[name] for group in osd["param_groups"] if param in group["params"])


def with_prefix(state: dict[str, Any], prefix: str) -> dict[str, Any]:
    """As the state dict of a wrapped model and its optimizer."""
    optimizer = state["optimizer"]
    if "state" in optimizer:
        named = {
            "state": {prefix + name: value for name, value in optimizer["state"].items()},
            "param_groups": [
                {**group, "params": [prefix + name for name in group["params"]]}
                for group in optimizer["param_groups"]
            ],
        }
    else:
        named = {
            re.sub("^(state|param_groups)[.]", rf"\1.{prefix}", k): v for k, v in optimizer.items()
        }
    return {"model": {prefix + k: v for k, v in state["model"].items()}, "optimizer": named}
