"""Templates of `get_optimizer_state_dict`, filled: which key is which, what is not there."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_reshard
from dcp_reshard import MissingTensorError
from tests.support.single import adamw, save_optimizer, step
from tests.support.templates import template, with_prefix
from tests.support.training import Net, same


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


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize("side", ["saved", "now"])
def test_wrappers_do_not_matter(side: str, form: str, tmp_path: Path) -> None:
    """Row 10: weights, state and groups of one model find each other, and are reported."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model, lr=0.1), adamw(other, lr=0.5)
    step(model, optimizer)
    saved = {"model": model.state_dict(), **template(model, optimizer, form)}
    state = {"model": other.state_dict(), **template(other, fresh, form)}
    for values in state["model"].values():
        values.fill_(-1.0)
    wrapped = with_prefix(saved if side == "saved" else state, "module._orig_mod.")
    dcp.save(wrapped if side == "saved" else saved, checkpoint_id=tmp_path)
    dest = state if side == "saved" else wrapped
    report = dcp_reshard.load(dest, tmp_path)
    wanted = saved if side == "saved" else with_prefix(saved, "module._orig_mod.")
    assert same(dest, wanted)
    names = {"model.up.weight", "model.module._orig_mod.up.weight"}
    assert any(set(pair) == names for pair in report.renamed)


def test_wrapped_names_that_may_be_two_are_refused(tmp_path: Path) -> None:
    """An exact name goes first; of two others neither is taken."""
    dcp.save({"module.w": torch.ones(2), "w": torch.zeros(2)}, checkpoint_id=tmp_path)
    state = {"w": torch.full((2,), -1.0)}
    assert dcp_reshard.load(state, tmp_path).renamed == ()
    assert not state["w"].any()
    with pytest.raises(dcp_reshard.PlanError, match=r"`module\.w`, `w` in the checkpoint"):
        dcp_reshard.load({"_orig_mod.w": torch.zeros(2)}, tmp_path, strict=False)
    with pytest.raises(
        dcp_reshard.PlanError, match=r"`_orig_mod\.w`, `module\._orig_mod\.w` in the st"
    ):
        dcp_reshard.load(
            {
                "w": torch.zeros(2),
                "_orig_mod.w": torch.zeros(2),
                "module._orig_mod.w": torch.ones(2),
            },
            tmp_path,
        )


@pytest.mark.parametrize("whole", ["model", "optimizer"])
def test_a_dict_that_is_wholly_renamed_is_an_error(whole: str, tmp_path: Path) -> None:
    """Row 9: nothing restored is no success, even if missing keys may be left as they are."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model), adamw(other)
    step(model, optimizer)
    saved = {"model": model.state_dict(), **template(model, optimizer, "nested"), "epoch": 3}
    dcp.save(saved, checkpoint_id=tmp_path)
    named = with_prefix({"model": other.state_dict(), **template(other, fresh, "nested")}, "net.")
    state = {**saved, whole: named[whole], "epoch": 0}
    with pytest.raises(MissingTensorError, match="nothing to restore") as caught:
        dcp_reshard.load(state, tmp_path, strict=False)
    assert "net.up.weight" in str(caught.value)
    assert "in the checkpoint: " in str(caught.value)
    assert state["epoch"] == 0


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_an_optimizer_without_state_that_is_wholly_renamed_is_an_error(
    form: str, tmp_path: Path
) -> None:
    """Row 9: groups are all that SGD has, and if none is found nothing is restored."""
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    state = template(other, torch.optim.SGD(other.parameters(), lr=0.5), form)
    named = with_prefix({"model": {}, **state}, "net.")
    with pytest.raises(MissingTensorError, match=r"`net\.up\.weight`"):
        dcp_reshard.load({"optimizer": named["optimizer"]}, tmp_path, strict=False)


def test_a_dict_that_the_checkpoint_does_not_have_is_missing(tmp_path: Path) -> None:
    """Averaged weights that were not kept then may be left as they are, and so may new numbers."""
    dcp.save({"model": Net().state_dict(), "rng": {"0": torch.ones(2)}}, checkpoint_id=tmp_path)
    state = {"model": Net().state_dict(), "ema": {"w": torch.zeros(2)}, "rng": {"1": torch.ones(2)}}
    assert dcp_reshard.load(state, tmp_path, strict=False).missing == ("ema.w", "rng.1")
    with pytest.raises(MissingTensorError, match="nothing to restore"):
        dcp_reshard.load({"ema": state["ema"]}, tmp_path, strict=False)


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
