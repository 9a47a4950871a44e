"""Wrappers, dtypes, options and numbers: rows 10 to 14 of the table in README.md."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcp_reshard import OptimizerStateError, load_optimizer
from tests.support.single import adamw, restore, save_optimizer, state_by_name, step
from tests.support.training import Net, same


class Wrapper(nn.Module):
    """A module around another, as torch's wrappers are."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize("side", ["model", "checkpoint"])
def test_wrappers_around_the_model_do_not_matter(side: str, form: str, tmp_path: Path) -> None:
    """Row 10: DDP, compile, checkpoint and FSDP1 wrappers, nested, on either side."""
    plain, wrapped = Net(), Net()
    wrapped.up = Wrapper("_checkpoint_wrapped_module", Wrapper("_fsdp_wrapped_module", wrapped.up))
    outer = Wrapper("module", Wrapper("_orig_mod", wrapped))
    model, other = (plain, outer) if side == "model" else (outer, plain)
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    saved = get_optimizer_state_dict(plain, adamw(plain))
    saved["state"] = dict(zip(names, optimizer.state_dict()["state"].values(), strict=True))
    saved["param_groups"][0]["params"] = names
    if form == "flattened":
        [group] = saved["param_groups"]
        saved = {f"state.{n}.{k}": v for n, s in saved["state"].items() for k, v in s.items()} | {
            f"param_groups.{n}.lr": group["lr"] for n in names
        }
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    report, _ = restore(tmp_path, other, fresh)
    assert report.restored == ("up.weight", "up.bias", "down.weight", "down.bias")
    assert report.renamed == ()
    assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"])


def test_fp32_moments_of_bf16_parameters_stay_fp32(tmp_path: Path) -> None:
    """Row 11: the stored dtype is kept; torch casts moments to the parameter's dtype."""
    model, other = Net(torch.bfloat16), Net(torch.bfloat16)
    optimizer = adamw(model)
    step(model, optimizer)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 2.0**-20
    saved = save_optimizer(tmp_path, model, optimizer)
    stock, fresh = adamw(other), adamw(other)
    set_optimizer_state_dict(other, stock, copy.deepcopy(saved))
    assert stock.state[other.up.bias]["exp_avg"].dtype == torch.bfloat16

    restore(tmp_path, other, fresh)
    assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    _, report = restore(tmp_path, other, fresh, state_dtype="parameter")
    state = fresh.state[other.up.bias]
    assert torch.equal(state["exp_avg"], optimizer.state[model.up.bias]["exp_avg"].bfloat16())
    assert state["step"].dtype == torch.float32
    assert ("optimizer.state.up.bias.exp_avg", "torch.float32", "torch.bfloat16") in report.casts
    restore(tmp_path, other, fresh, state_dtype=torch.float64)
    assert fresh.state[other.up.bias]["exp_avg"].dtype == torch.float64


def test_a_cast_that_overflows_is_refused(tmp_path: Path) -> None:
    """Row 12: narrowing is done only as far as the numbers allow; nothing is changed."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    optimizer.state[model.up.bias]["exp_avg"][3] = 1e9
    save_optimizer(tmp_path, model, optimizer)
    with pytest.raises(ValueError, match="exp_avg"):
        restore(tmp_path, other, fresh, state_dtype=torch.float16)
    assert not fresh.state


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_amsgrad_off_then_is_off_again(form: str, tmp_path: Path) -> None:
    """Row 13: the saved value holds and is reported; kept on, the missing state is an error."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other, amsgrad=True)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    report, _ = restore(tmp_path, other, fresh)
    [change] = [h for h in report.hyper_parameters if h.name == "amsgrad"]
    assert (change.what, change.value, change.instead_of) == ("restored", "False", "True")
    step(other, fresh)
    fresh = adamw(other, amsgrad=True)
    with pytest.raises(OptimizerStateError, match="no state `max_exp_avg_sq` in the checkpoint"):
        restore(tmp_path, other, fresh, keep_hyper_parameters=["amsgrad"])


def test_amsgrad_on_then_is_on_again(tmp_path: Path) -> None:
    """Row 13: the third moment is there; kept off, it is restored all the same."""
    model, other = Net(), Net()
    optimizer = adamw(model, amsgrad=True)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    for keep, value in ((), True), (("amsgrad",), False):
        fresh = adamw(other)
        restore(tmp_path, other, fresh, keep_hyper_parameters=keep)
        assert fresh.param_groups[0]["amsgrad"] is value
        assert same(state_by_name(other, fresh), state_by_name(model, optimizer))
        step(other, fresh)


def test_state_saved_by_number_needs_a_word(tmp_path: Path) -> None:
    """Row 14: `Optimizer.state_dict` has no names; by position only if the caller says so."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    with pytest.raises(OptimizerStateError, match="by the numbers of parameters"):
        restore(tmp_path, other, fresh)
    report, _ = restore(tmp_path, other, fresh, by_position=True)
    assert report.restored == ("up.weight", "up.bias", "down.weight", "down.bias")
    assert same(fresh.state_dict(), optimizer.state_dict())
    two = torch.optim.AdamW([{"params": other.up.parameters()}, {"params": [other.down.bias]}])
    with pytest.raises(OptimizerStateError, match=r"groups of \[4\] .* of \[2, 1\]"):
        restore(tmp_path, other, two, by_position=True)


def test_state_saved_by_number_with_names_is_matched_by_name(tmp_path: Path) -> None:
    """Row 14: an optimizer that was made of named parameters has saved the names as well."""
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    step(model, optimizer)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    fresh = torch.optim.AdamW(reversed(list(other.named_parameters())))
    load_optimizer(other, fresh, tmp_path)
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))
    names = [name for name, _ in other.named_parameters()]
    assert fresh.param_groups[0]["param_names"] == names[::-1]


def test_state_of_an_older_torch_is_brought_up_to_date(tmp_path: Path) -> None:
    """A `step` that was a number is a tensor afterwards, and the next step works."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    saved = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    for state in saved["state"].values():
        state["step"] = int(state["step"])
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    restore(tmp_path, other, fresh)
    assert same(fresh.state_dict()["state"], optimizer.state_dict()["state"])
    step(other, fresh)
