"""Parameters that come, go, freeze and thaw: rows 1 to 9 of the table in README.md.

The rows are numbered there, and each test says which one it is. Where torch can be asked cheaply,
the test also shows what the table says that torch does.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcp_reshard import OptimizerStateError, ShapeMismatchError
from dcp_reshard.catalog import StoredTensor
from tests.support.single import adamw, restore, save_optimizer, state_by_name, step
from tests.support.training import Net, same


def test_the_live_optimizer_is_not_stepped(tmp_path: Path) -> None:
    """Row 1: nothing but the saved state is in the optimizer, gradients or not."""
    model, other = Net(), Net()
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)

    # torch steps an optimizer to see what its state is like, or does not if there are gradients.
    template = get_optimizer_state_dict(other, adamw(other))
    assert template["state"]["up.bias"]["step"] == 1
    other.up.bias.grad = torch.ones(14)
    assert get_optimizer_state_dict(other, adamw(other))["state"] == {}

    fresh = adamw(other)
    weights = copy.deepcopy(other.state_dict())
    restore(tmp_path, other, fresh)
    assert same(other.state_dict(), weights)
    assert torch.equal(other.up.bias.grad, torch.ones(14))
    assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_a_parameter_that_was_never_stepped_has_no_state(form: str, tmp_path: Path) -> None:
    """Row 2: nothing is invented for it, and it is reported."""
    model, other = Net(), Net()
    optimizer = adamw(model)
    for steps in range(2):
        model.down.weight.grad = torch.full((5, 14), 1.0 + steps)
        optimizer.step()
    saved = save_optimizer(tmp_path, model, optimizer, form=form)
    if form == "nested":
        with pytest.raises(
            RuntimeError, match=r"Missing optimizer state for parameter 'up\.weight'"
        ):
            set_optimizer_state_dict(other, adamw(other), copy.deepcopy(saved))

    fresh = adamw(other)
    step(other, fresh)
    report, _ = restore(tmp_path, other, fresh)
    assert list(state_by_name(other, fresh)) == ["down.weight"]
    assert report.restored == ("down.weight",)
    assert report.without_state == ("up.weight", "up.bias", "down.bias")

    with pytest.raises(OptimizerStateError, match=r"3 parameters have no state .* `up\.weight`"):
        restore(tmp_path, other, fresh, on_no_state="error")
    restore(tmp_path, other, fresh, on_no_state="zeros")
    zeros = state_by_name(other, fresh)["up.bias"]
    wanted = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(14), "exp_avg_sq": torch.zeros(14)}
    assert same(zeros, wanted)
    step(other, fresh)


def test_a_parameter_frozen_then_and_trainable_now_starts_fresh(tmp_path: Path) -> None:
    """Row 3: it was in the optimizer without state, and so it is; its first step is its first."""
    model, other = Net(), Net()
    model.up.weight.requires_grad_(False)
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    fresh = adamw(other)
    report, _ = restore(tmp_path, other, fresh)
    assert report.without_state == ("up.weight",)
    step(other, fresh, 1)
    steps = {name: s["step"].item() for name, s in state_by_name(other, fresh).items()}
    assert steps == {"up.weight": 1, "up.bias": 3, "down.weight": 3, "down.bias": 3}


def test_a_parameter_trainable_then_and_frozen_now_keeps_its_state(tmp_path: Path) -> None:
    """Row 4: thawed again, it goes on where it was; torch drops its state without a word."""
    model, other = Net(), Net()
    optimizer = adamw(model)
    step(model, optimizer)
    saved = save_optimizer(tmp_path, model, optimizer)
    other.up.weight.requires_grad_(False)
    stock = adamw(other)
    set_optimizer_state_dict(other, stock, copy.deepcopy(saved))
    assert "up.weight" not in state_by_name(other, stock)

    fresh = adamw(other)
    report, _ = restore(tmp_path, other, fresh)
    assert report.frozen == ("up.weight",)
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))

    report, _ = restore(tmp_path, other, fresh, on_frozen="skip")
    assert report.frozen == ("up.weight",)
    assert list(state_by_name(other, fresh)) == ["up.bias", "down.weight", "down.bias"]


def test_a_parameter_that_left_the_optimizer_is_reported(tmp_path: Path) -> None:
    """Row 5: frozen and not given to the optimizer, or removed: named, and not read."""
    model, other = Net(), Net()
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    fresh = torch.optim.AdamW(other.down.parameters())
    report, whole = restore(tmp_path, other, fresh)
    assert report.extra == ("up.weight", "up.bias")
    assert set(state_by_name(other, fresh)) == {"down.weight", "down.bias"}
    assert whole.bytes_wanted == 4 * (2 * (5 * 14 + 5) + 2)
    assert (whole.tensors, whole.objects) == (6, len(optimizer.param_groups[0]))
    assert set(whole.unexpected) == {
        f"optimizer.state.up.{p}.{s}"
        for p in ("weight", "bias")
        for s in ("exp_avg", "exp_avg_sq", "step")
    }
    with pytest.raises(OptimizerStateError, match="2 parameters of the checkpoint are not in"):
        restore(tmp_path, other, fresh, on_extra="error")


class WithAdapter(Net):
    """The net with two new parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.ones(2, 6))
        self.lora_b = nn.Parameter(torch.ones(14, 2))


def test_a_new_parameter_must_be_expected(tmp_path: Path) -> None:
    """Row 6: an unknown name is an error that says what is near; or it keeps what it has."""
    model, other = Net(), WithAdapter()
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    fresh = adamw(other)
    with pytest.raises(OptimizerStateError, match="2 parameters of the optimizer are not in"):
        restore(tmp_path, other, fresh)
    assert not fresh.state
    other.lora_b.grad = torch.ones(14, 2)
    fresh.step()
    own = copy.deepcopy(state_by_name(other, fresh)["lora_b"])
    report, _ = restore(tmp_path, other, fresh, on_new="keep")
    assert report.new == ("lora_a", "lora_b")
    state = state_by_name(other, fresh)
    assert "lora_a" not in state
    assert same(state.pop("lora_b"), own)
    assert same(state, state_by_name(model, optimizer))


class Tied(nn.Module):
    """Two names for one weight, or two weights."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 3, bias=False)
        self.head = nn.Linear(4, 3, bias=False)
        if tied:
            self.head.weight = self.embed.weight


def test_a_tied_weight_that_is_untied_now_is_two_by_name(tmp_path: Path) -> None:
    """Row 7: one of the two finds the state, the other is new, or gets a copy by renaming."""
    model, other = Tied(tied=True), Tied(tied=False)
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    fresh = adamw(other)
    with pytest.raises(OptimizerStateError, match=r"`head\.weight`"):
        restore(tmp_path, other, fresh)
    report, _ = restore(tmp_path, other, fresh, rename={"head.weight": "embed.weight"})
    assert report.renamed == (("head.weight", "embed.weight"),)
    state = state_by_name(other, fresh)
    assert same(state["head.weight"], state["embed.weight"])
    assert same(state["embed.weight"], state_by_name(model, optimizer)["embed.weight"])
    tensors = [state[name]["exp_avg"].data_ptr() for name in ("head.weight", "embed.weight")]
    assert len(set(tensors)) == 2


def test_two_weights_that_are_tied_now_are_the_first(tmp_path: Path) -> None:
    """Row 8: of two states the first name's is restored, and the other is reported."""
    model, other = Tied(tied=False), Tied(tied=True)
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    fresh = adamw(other)
    report, _ = restore(tmp_path, other, fresh)
    assert report.extra == ("head.weight",)
    state = state_by_name(model, optimizer)
    assert same(state_by_name(other, fresh), {"embed.weight": state["embed.weight"]})


def test_a_model_that_is_wholly_renamed_restores_nothing(tmp_path: Path) -> None:
    """Row 9: the error lists names of both sides with the nearest ones; renaming helps."""
    model = Net()
    other = nn.ModuleDict({"net": Net()})
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    fresh = adamw(other)
    for on_new in ("error", "keep"):
        with pytest.raises(OptimizerStateError, match="nothing to restore") as caught:
            restore(tmp_path, other, fresh, on_new=on_new)
        assert "in the model: `net.up.weight` (nearest: `up.weight`" in str(caught.value)
        assert "in the checkpoint: `down.bias` (nearest: `net.down.bias`" in str(caught.value)
    restore(tmp_path, other, fresh, rename=lambda name: name.removeprefix("net."))
    wanted = {f"net.{name}": s for name, s in state_by_name(model, optimizer).items()}
    assert same(state_by_name(other, fresh), wanted)


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_state_of_a_parameter_of_another_size_is_refused(form: str, tmp_path: Path) -> None:
    """Row 26: a resized weight is named with both shapes, unless the caller makes its memory."""
    model, other = Net(), Net()
    other.down = nn.Linear(15, 5)
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    message = r"`down\.weight`: state `exp_avg` was saved with shape \(5, 14\), .* \(5, 15\)"
    with pytest.raises(ShapeMismatchError, match=message):
        restore(tmp_path, other, fresh)
    assert not fresh.state

    def pad(name: str, path: object, stored: StoredTensor, param: torch.Tensor) -> torch.Tensor:
        wide = torch.zeros(param.shape if stored.shape else ())
        return wide[:, : stored.shape[1]] if len(stored.shape) == 2 else wide

    restore(tmp_path, other, fresh, make_state=pad)
    saved = optimizer.state[model.down.weight]["exp_avg"]
    assert torch.equal(fresh.state[other.down.weight]["exp_avg"], saved)
