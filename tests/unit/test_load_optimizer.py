"""`load_optimizer` in one process: every optimizer, every form, and what becomes of groups.

Tests of groups are rows 15 to 20 of the table in README.md.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import dcp_reshard
from dcp_reshard import OptimizerStateError, load_optimizer
from tests.support.single import adamw, restore, save_optimizer, state_by_name, step
from tests.support.training import Net, same

Params = Iterable[Any]
MATRICES_ONLY = ("Muon",)
# Needs sparse gradients, and has the state of Adam.
LEFT_OUT = ("Optimizer", "SparseAdam")
OPTIMIZERS = sorted(
    name
    for name, value in vars(torch.optim).items()
    if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer) and name not in LEFT_OUT
)
OPTIONS = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.9, "centered": True}}


def make(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    params = [p for p in model.parameters() if p.ndim == 2 or name not in MATRICES_ONLY]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(
        params, lr=lr, **OPTIONS.get(name, {})
    )
    return optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[float]:
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = (model(torch.ones(3, 6)) - 0.5).pow(2).mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(steps):
        optimizer.step(closure)
    return losses


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_of_torch_goes_on_as_if_nothing_had_been(
    name: str, form: str, tmp_path: Path
) -> None:
    """State, hyper-parameters and every later loss are the same to the last bit."""
    if (name, form) == ("LBFGS", "flattened"):
        pytest.skip("torch does not flatten the lists in the state of LBFGS")
    model, other = Net(), Net()
    optimizer, fresh = make(name, model, 0.01), make(name, other, 0.5)
    train(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    other.load_state_dict(model.state_dict())
    restore(tmp_path, other, fresh)
    assert same(fresh.state_dict(), optimizer.state_dict())
    assert fresh.state_dict()["state"] or name not in OPTIONS
    assert train(other, fresh) == train(model, optimizer)


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_an_optimizer_without_state_gets_its_hyper_parameters(form: str, tmp_path: Path) -> None:
    """SGD without momentum has nothing but groups, and that is enough."""
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    fresh = torch.optim.SGD(other.parameters(), lr=0.5)
    report, _ = restore(tmp_path, other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.25
    assert report.without_state == ("up.weight", "up.bias", "down.weight", "down.bias")
    assert not any(fresh.state.values())


@pytest.mark.parametrize(
    ("nest", "key"),
    [
        (lambda osd: {"state": {"optim": osd}}, "state.optim"),
        (lambda osd: {"a.b": {"c": osd}}, "a.b.c"),
        (lambda osd: {"x": {"optim": osd, "optim2": {"state": {"up": {"step": 1}}}}}, "x.optim"),
        (lambda osd: osd, ""),
    ],
)
def test_the_optimizer_may_be_anywhere(
    nest: Callable[[Any], dict[str, Any]], key: str, tmp_path: Path
) -> None:
    """Row 24: at any depth, below keys with dots, beside others, or alone."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    dcp.save(nest(get_optimizer_state_dict(model, optimizer)), checkpoint_id=tmp_path)
    load_optimizer(other, fresh, tmp_path, optimizer_key=key)
    assert same(fresh.state_dict(), optimizer.state_dict())


def two_groups(model: Net, *, order: int = 1, **options: Any) -> torch.optim.AdamW:
    groups = [
        {"params": model.up.parameters(), "lr": 0.1, "weight_decay": 0.0},
        {"params": model.down.parameters(), "lr": 0.2, **options},
    ]
    return torch.optim.AdamW(groups[::order])


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_groups_in_another_order_keep_their_own_values(form: str, tmp_path: Path) -> None:
    """Row 15: groups are found by their parameters; torch's `load_state_dict` goes by position."""
    model, other = Net(), Net()
    optimizer, fresh = two_groups(model), two_groups(other, order=-1)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    restore(tmp_path, other, fresh)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.05]
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_merged_groups_need_a_word(form: str, tmp_path: Path) -> None:
    """Row 16: torch gives all parameters the last group's rate; here that must be asked for."""
    model, other = Net(), Net()
    optimizer, stock, fresh = two_groups(model), adamw(other), adamw(other)
    step(model, optimizer)
    saved = save_optimizer(tmp_path, model, optimizer, form=form)
    if form == "nested":
        set_optimizer_state_dict(other, stock, copy.deepcopy(saved))
        assert stock.param_groups[0]["lr"] == 0.2
    with pytest.raises(OptimizerStateError, match=r"`lr` 0\.1 and 0\.2"):
        restore(tmp_path, other, fresh)
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.05
    report, _ = restore(tmp_path, other, fresh, groups={0: "up.bias"})
    assert fresh.param_groups[0]["lr"] == 0.1
    moved = {(h.name, h.value, h.instead_of) for h in report.hyper_parameters if h.what == "moved"}
    assert moved == {("lr", "0.1", "0.2"), ("weight_decay", "0.0", "0.01")}


def test_split_groups_need_a_word(tmp_path: Path) -> None:
    """Row 17: two groups that were one do not both get its values unless that is asked for."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), two_groups(other)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    with pytest.raises(OptimizerStateError, match="groups 0 and 1 were one group, 0,"):
        restore(tmp_path, other, fresh)
    report, _ = restore(tmp_path, other, fresh, groups={0: 0, 1: None})
    assert [group["lr"] for group in fresh.param_groups] == [0.05, 0.2]
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))
    moved = [(h.group, h.name) for h in report.hyper_parameters if h.what == "moved"]
    assert moved == [(1, "lr")]


def test_split_groups_of_the_flattened_form_get_what_their_parameters_had(tmp_path: Path) -> None:
    """Row 17: values are saved for each parameter there, so there is nothing to mistake."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), two_groups(other)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form="flattened")
    restore(tmp_path, other, fresh)
    assert [group["lr"] for group in fresh.param_groups] == [0.05, 0.05]


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_hyper_parameters_that_one_side_lacks_are_kept(form: str, tmp_path: Path) -> None:
    """Rows 18 and 19: what a scheduler added is there again, what a newer torch added still is."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    optimizer.param_groups[0]["initial_lr"] = 0.75
    fresh.param_groups[0]["newer"] = "option"
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    report, whole = restore(tmp_path, other, fresh)
    [group] = fresh.param_groups
    assert (group["initial_lr"], group["newer"]) == (0.75, "option")
    assert {(h.name, h.what) for h in report.hyper_parameters} == {
        ("initial_lr", "added"),
        ("newer", "kept"),
    }
    assert "group 0 `initial_lr` added: 0.75, not (none)" in str(whole)


def test_a_hyper_parameter_can_be_given_anew(tmp_path: Path) -> None:
    """Row 20: the saved learning rate holds, or, by option, the optimizer's own."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model, lr=0.5), adamw(other, lr=0.25)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    report, _ = restore(tmp_path, other, fresh, keep_hyper_parameters=["lr"])
    assert fresh.param_groups[0]["lr"] == 0.25
    assert [(h.what, h.value, h.instead_of) for h in report.hyper_parameters] == [
        ("kept", "0.25", "0.5")
    ]
    restore(tmp_path, other, fresh)
    assert fresh.param_groups[0]["lr"] == 0.5


def test_a_learning_rate_that_is_a_tensor_stays_the_same_tensor(tmp_path: Path) -> None:
    """A compiled step has a hold of it: the value changes, the tensor does not."""
    model, other = Net(), Net()
    optimizer = adamw(model, lr=torch.tensor(0.5), foreach=False)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    rate = torch.tensor(0.25)
    fresh = adamw(other, lr=rate, foreach=False)
    restore(tmp_path, other, fresh)
    assert fresh.param_groups[0]["lr"] is rate
    assert rate == 0.5


def test_the_report_is_plain_data(tmp_path: Path) -> None:
    """It goes into a log as JSON, and names every parameter."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other, lr=1.0)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    report = load_optimizer(other, fresh, tmp_path)
    plain = json.loads(json.dumps(report.to_dict()))["optimizer"]
    assert plain["restored"] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert plain["hyper_parameters"] == [
        {"group": 0, "name": "lr", "what": "restored", "value": "0.05", "instead_of": "1.0"}
    ]
    assert dcp_reshard.load({"optimizer": {}}, tmp_path, no_dist=True).optimizer is None


def test_a_parameter_that_is_not_in_the_model_is_refused(tmp_path: Path) -> None:
    """Without a name there is no telling whose state it should have."""
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    stranger = torch.optim.AdamW([*model.parameters(), nn.Parameter(torch.ones(2))])
    with pytest.raises(OptimizerStateError, match="parameter 4 of parameter group 0"):
        load_optimizer(model, stranger, tmp_path)


def test_a_model_without_memory_is_refused(tmp_path: Path) -> None:
    """State on the meta device would be lost at the first step."""
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    with torch.device("meta"):
        other = nn.Linear(6, 14)
    with pytest.raises(OptimizerStateError, match="`weight` is on the meta device"):
        load_optimizer(other, adamw(other), tmp_path)
