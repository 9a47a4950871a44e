"""State that optimizer templates have no place for."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_reshard
from dcp_reshard import OptimizerStateError
from tests.support.single import adamw, save_optimizer, step
from tests.support.templates import put_back, template, value_of
from tests.support.training import Net, same

SGD = functools.partial(torch.optim.SGD, lr=0.1)
NEEDS = [
    (functools.partial(torch.optim.AdamW, amsgrad=True), torch.optim.AdamW, "amsgrad"),
    (functools.partial(SGD, momentum=0.9), SGD, "momentum"),
    (functools.partial(torch.optim.RMSprop, centered=True), torch.optim.RMSprop, "centered"),
]


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize(("saved", "now", "hyper"), NEEDS)
def test_a_hyper_parameter_does_not_come_without_its_state(
    saved: Any, now: Any, hyper: str, form: str, tmp_path: Path
) -> None:
    """Row 13: a template has no place for state that its optimizer does not have."""
    model, other = Net(), Net()
    optimizer, fresh = saved(model.parameters()), now(other.parameters())
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    state = template(other, fresh, form)
    before = copy.deepcopy(state)
    with pytest.raises(OptimizerStateError, match=rf"`{hyper}`.*no place"):
        dcp_reshard.load(state, tmp_path, strict=False)
    assert same(state, before)
    report = dcp_reshard.load(state, tmp_path, keep_hyper_parameters=[hyper])
    assert not value_of(state, "up.weight", hyper)
    assert any(h.name == hyper and h.what == "kept" for h in report.hyper_parameters)
    put_back(other, fresh, state, form)
    step(other, fresh)


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_a_template_that_gradients_have_emptied_is_refused(form: str, tmp_path: Path) -> None:
    """Row 1: torch gives no state if there are gradients; hyper-parameters alone are nothing."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    other.up.bias.grad = torch.ones(14)
    state = template(other, fresh, form)
    assert not any("exp_avg" in key for key in state["optimizer"].get("state", state["optimizer"]))
    with pytest.raises(OptimizerStateError, match=r"nothing to restore: .*gradients"):
        dcp_reshard.load(state, tmp_path, strict=False)


def test_a_frozen_parameter_needs_no_place_for_its_state(tmp_path: Path) -> None:
    """Row 4: its state, of all kinds, is in the checkpoint alone, and reported."""
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    other.up.bias.requires_grad_(False)
    state = template(other, torch.optim.AdamW(other.parameters(), amsgrad=True), "nested")
    report = dcp_reshard.load(state, tmp_path)
    assert {key.rpartition(".")[2] for key in report.unexpected} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
        "max_exp_avg_sq",
    }
    assert all(key.startswith("optimizer.state.up.bias.") for key in report.unexpected)
