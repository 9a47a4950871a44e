"""Templates of `get_optimizer_state_dict`, filled by `load`: what is there, and what is not."""

from __future__ import annotations

import copy
import re
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
from dcp_reshard import MissingTensorError, OptimizerStateError, PlanOptions, ReshardLoadPlanner
from tests.support.failures import catch_failure
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


def grouped(model: Net, *groups: tuple[str, float]) -> torch.optim.AdamW:
    """An optimizer with groups of the named parts of the model."""
    return torch.optim.AdamW(
        [
            {"params": [p for n in names.split() for p in getattr(model, n).parameters()], "lr": lr}
            for names, lr in groups
        ]
    )


def load_template(
    path: Path, saved: list[tuple[str, float]], now: list[tuple[str, float]], **options: Any
) -> tuple[torch.optim.AdamW, dcp_reshard.LoadReport]:
    """Save with these groups, and bring a template with those back into an optimizer."""
    model, other = Net(), Net()
    optimizer, fresh = grouped(model, *saved), grouped(other, *now)
    step(model, optimizer)
    save_optimizer(path, model, optimizer)
    state = template(other, fresh, "nested")
    before = copy.deepcopy(state)
    try:
        report = dcp_reshard.load(state, path, **options)
    except dcp_reshard.ReshardError:
        assert same(state, before)
        raise
    set_optimizer_state_dict(other, fresh, state["optimizer"])
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))
    return fresh, report


MERGED = ([("up", 0.1), ("down", 0.2)], [("up down", 0.5)])
SPLIT = ([("up down", 0.1)], [("up", 0.5), ("down", 0.6)])


@pytest.mark.parametrize(("saved", "now"), [MERGED, SPLIT])
def test_merged_and_split_groups_are_refused(
    saved: list[tuple[str, float]], now: list[tuple[str, float]], tmp_path: Path
) -> None:
    """Rows 16, 17: which group's learning rate holds is not torch's choice, and nothing is set."""
    with pytest.raises(OptimizerStateError, match="`groups`") as caught:
        load_template(tmp_path, saved, now, strict=False)
    assert saved != MERGED[0] or "`lr` 0.1 and 0.2" in str(caught.value)


def test_regrouped_parameters_are_refused(tmp_path: Path) -> None:
    """As many groups with other parameters are refused as well."""
    model, other = Net(), Net()
    biases = [model.up.bias, model.down.bias]
    weights = [model.up.weight, model.down.weight]
    optimizer = torch.optim.AdamW([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 0.2}])
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    state = template(other, grouped(other, ("up", 0.5), ("down", 0.6)), "nested")
    with pytest.raises(OptimizerStateError, match=r"`lr` 0\.1 and 0\.2"):
        dcp_reshard.load(state, tmp_path)


def test_a_mapping_says_whose_values_a_merged_group_gets(tmp_path: Path) -> None:
    """The values are those of the group named, and what moved is reported."""
    mapping = {"optimizer.param_groups.0": "down.weight"}
    fresh, report = load_template(tmp_path, *MERGED, groups=mapping)
    assert [group["lr"] for group in fresh.param_groups] == [0.2]
    [moved] = [h for h in report.hyper_parameters if h.what == "moved"]
    assert (moved.group, moved.name, moved.value, moved.instead_of) == (0, "lr", "0.2", "0.1")
    assert not report.unexpected


def test_a_mapping_lets_both_halves_have_the_values(tmp_path: Path) -> None:
    """Two groups get those of one, or one of them keeps its own."""
    mapping: dict[str, int | str | None] = {
        "optimizer.param_groups.0": 0,
        "optimizer.param_groups.1": None,
    }
    fresh, report = load_template(tmp_path, *SPLIT, groups=mapping)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.6]
    assert {(h.group, h.what) for h in report.hyper_parameters if h.name == "lr"} == {
        (0, "restored"),
        (1, "moved"),
    }


def test_a_mapping_of_groups_that_are_not_there_is_refused(tmp_path: Path) -> None:
    """A misspelt key is not ignored."""
    with pytest.raises(dcp_reshard.PlanError, match=r"`optim\.param_groups\.0`"):
        load_template(tmp_path, *MERGED, groups={"optim.param_groups.0": 0})


def test_values_that_one_side_lacks_are_kept_and_reported(tmp_path: Path) -> None:
    """Rows 18, 19, 20: a newer option keeps its value, `initial_lr` comes, `lr` stays if asked."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model, lr=0.1), adamw(other, lr=0.5)
    optimizer.param_groups[0]["initial_lr"] = 0.3
    fresh.param_groups[0]["newer"] = 7
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    state = template(other, fresh, "nested")
    report = dcp_reshard.load(state, tmp_path, keep_hyper_parameters=["lr"])
    [group] = state["optimizer"]["param_groups"]
    assert (group["lr"], group["initial_lr"], group["newer"]) == (0.5, 0.3, 7)
    assert {(h.name, h.what) for h in report.hyper_parameters} == {
        ("lr", "kept"),
        ("newer", "kept"),
        ("initial_lr", "added"),
    }


def test_a_group_of_new_parameters_is_refused_or_reported(tmp_path: Path) -> None:
    """No group of the checkpoint gives it its values, whatever its number."""
    saved, now = [("down", 0.1)], [("up", 0.5), ("down", 0.6)]
    model, other = Net(), Net()
    optimizer, fresh = torch.optim.SGD(model.down.parameters(), lr=0.1), grouped(other, *now)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    fresh = torch.optim.SGD([{**g, "params": g["params"]} for g in fresh.param_groups])
    state = template(other, fresh, "nested")
    with pytest.raises(MissingTensorError, match=r"`optimizer\.param_groups\.0`"):
        dcp_reshard.load(state, tmp_path)
    report = dcp_reshard.load(state, tmp_path, strict=False)
    assert [g["lr"] for g in state["optimizer"]["param_groups"]] == [0.5, saved[0][1]]
    assert "optimizer.param_groups.0.lr" in report.missing


@pytest.mark.parametrize("mine", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.parametrize("theirs", [0.125, torch.tensor(0.125)])
def test_a_learning_rate_stays_what_it_is(mine: Any, theirs: Any, tmp_path: Path) -> None:
    """A tensor is filled in place, a number is a number, whatever was saved."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model, lr=theirs), adamw(other, lr=mine)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    state = template(other, fresh, "nested")
    own = state["optimizer"]["param_groups"][0]["lr"]
    dcp_reshard.load(state, tmp_path)
    value = state["optimizer"]["param_groups"][0]["lr"]
    assert same(value, torch.full_like(own, 0.125) if isinstance(own, torch.Tensor) else 0.125)
    assert (value is own) == isinstance(own, torch.Tensor)


@pytest.mark.parametrize(("saved", "now"), [MERGED, SPLIT])
def test_the_reader_of_torch_cannot_mix_groups_either(
    saved: list[tuple[str, float]], now: list[tuple[str, float]], tmp_path: Path
) -> None:
    """The lists are compared when they arrive."""
    model, other = Net(), Net()
    optimizer, fresh = grouped(model, *saved), grouped(other, *now)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer)
    planner = ReshardLoadPlanner(options=PlanOptions(on_missing="keep"))
    failure = catch_failure(
        lambda: dcp.load(
            template(other, fresh, "nested"),
            storage_reader=dcp.FileSystemReader(tmp_path),
            planner=planner,
        )
    )
    assert isinstance(failure, OptimizerStateError)
    assert "`ReshardStorageReader`" in str(failure)


def test_lists_that_another_rank_has_saved_are_known_by_number(tmp_path: Path) -> None:
    """Of pipeline stages `dcp.save` keeps one list; the other stages have their own parameters."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model, lr=0.1), adamw(other, lr=0.5)
    step(model, optimizer)
    saved = template(model, optimizer, "nested")
    saved["optimizer"]["param_groups"][0]["params"] = ["another.stage"]
    dcp.save(saved, checkpoint_id=tmp_path)
    state = template(other, fresh, "nested")
    report = dcp_reshard.load(state, tmp_path)
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1
    assert [(h.name, h.what) for h in report.hyper_parameters] == [("lr", "restored")]


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
