"""Templates of `get_optimizer_state_dict`, filled by `load`: what is there, and what is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dcp_reshard
from dcp_reshard import MissingTensorError
from tests.support.single import adamw, save_optimizer, state_by_name, step
from tests.support.training import Net, same


def template(model: nn.Module, optimizer: torch.optim.Optimizer, form: str) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    return {"optimizer": get_optimizer_state_dict(model, optimizer, options=options)}


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_groups_in_another_order_keep_their_own_values(form: str, tmp_path: Path) -> None:
    """The lists of names are loaded with the groups, so torch sets each where it belongs."""
    model, other = Net(), Net()
    groups = [
        {"params": m.parameters(), "lr": lr} for m, lr in ((model.up, 0.1), (model.down, 0.2))
    ]
    optimizer = torch.optim.AdamW(groups)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    fresh = torch.optim.AdamW(
        [{"params": m.parameters(), "lr": 0.5} for m in (other.down, other.up)]
    )
    state = template(other, fresh, form)
    dcp_reshard.load(state, tmp_path)
    set_optimizer_state_dict(
        other,
        fresh,
        state["optimizer"],
        options=StateDictOptions(flatten_optimizer_state_dict=form == "flattened"),
    )
    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.1]
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_state_that_was_not_saved_is_an_error_or_is_reported(form: str, tmp_path: Path) -> None:
    """Torch's template invents a first step; it is never taken for what was saved."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    model.up.bias.grad = torch.ones(14)
    optimizer.step()
    optimizer.step()
    save_optimizer(tmp_path, model, optimizer, form=form)
    state = template(other, fresh, form)
    before = copy.deepcopy(state)
    with pytest.raises(MissingTensorError, match="9 keys of the state dict are not in"):
        dcp_reshard.load(state, tmp_path)
    assert same(state, before)
    report = dcp_reshard.load(state, tmp_path, strict=False)
    assert set(report.missing) == {
        f"optimizer.state.{name}.{kind}"
        for name in ("up.weight", "down.weight", "down.bias")
        for kind in ("step", "exp_avg", "exp_avg_sq")
    }


def test_groups_that_are_gone_are_reported(tmp_path: Path) -> None:
    """What a template with fewer groups does not ask for is named as unexpected."""
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW([{"params": m.parameters()} for m in (model.up, model.down)])
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    state = template(other, adamw(other), "nested")
    report = dcp_reshard.load(state, tmp_path)
    assert "optimizer.param_groups.1.lr" in report.unexpected


def test_a_template_is_renamed_by_the_caller(tmp_path: Path) -> None:
    """State that was saved from a wrapped model fills a flattened template by other names."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    saved = template(model, optimizer, "flattened")["optimizer"]
    wrapped = {
        key.replace("state.", "state._orig_mod.").replace("groups.", "groups._orig_mod."): value
        for key, value in saved.items()
    }
    dcp.save({"optimizer": wrapped}, checkpoint_id=tmp_path)
    state = template(other, fresh, "flattened")
    dcp_reshard.load(
        state,
        tmp_path,
        rename=lambda key: key.replace("state.", "state._orig_mod.").replace(
            "groups.", "groups._orig_mod."
        ),
    )
    assert same(state["optimizer"], saved)
