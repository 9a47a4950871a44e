"""Groups of optimizer templates, nested and flattened: whose hyper-parameters does each get?"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_reshard
from dcp_reshard import MissingTensorError, OptimizerStateError, PlanOptions, ReshardLoadPlanner
from tests.support.failures import catch_failure
from tests.support.single import adamw, save_optimizer, state_by_name, step
from tests.support.templates import grouped, put_back, template, value_of
from tests.support.training import Net, same


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_groups_in_another_order_keep_their_own_values(form: str, tmp_path: Path) -> None:
    """Groups are found by their parameters, so torch sets each value where it belongs."""
    model, other = Net(), Net()
    groups = [
        {"params": m.parameters(), "lr": lr} for m, lr in ((model.up, 0.1), (model.down, 0.2))
    ]
    optimizer = torch.optim.AdamW(groups)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    fresh = grouped(other, ("down", 0.5), ("up", 0.6))
    state = template(other, fresh, form)
    dcp_reshard.load(state, tmp_path)
    put_back(other, fresh, state, form)
    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.1]
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))


def load_template(
    path: Path,
    saved: list[tuple[str, float]],
    now: list[tuple[str, float]],
    form: str = "nested",
    **options: Any,
) -> tuple[torch.optim.AdamW, dcp_reshard.LoadReport]:
    """Save with these groups, and bring a template with those back into an optimizer."""
    model, other = Net(), Net()
    optimizer, fresh = grouped(model, *saved), grouped(other, *now)
    step(model, optimizer)
    save_optimizer(path, model, optimizer, form=form)
    state = template(other, fresh, form)
    before = copy.deepcopy(state)
    try:
        report = dcp_reshard.load(state, path, **options)
    except dcp_reshard.ReshardError:
        assert same(state, before)
        raise
    put_back(other, fresh, state, form)
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))
    return fresh, report


MERGED = ([("up", 0.1), ("down", 0.2)], [("up down", 0.5)])
SPLIT = ([("up down", 0.1)], [("up", 0.5), ("down", 0.6)])


@pytest.mark.parametrize(
    ("groups", "form"), [(MERGED, "nested"), (SPLIT, "nested"), (MERGED, "flattened")]
)
def test_merged_and_split_groups_are_refused(groups: Any, form: str, tmp_path: Path) -> None:
    """Rows 16, 17: which group's learning rate holds is not torch's choice, and nothing is set."""
    with pytest.raises(OptimizerStateError, match="`groups`") as caught:
        load_template(tmp_path, *groups, form, strict=False)
    assert groups is not MERGED or "`lr` 0.1 and 0.2" in str(caught.value)


def test_split_groups_of_a_flattened_template_get_what_their_parameters_had(tmp_path: Path) -> None:
    """Row 17: each parameter has its own values there, and those of a group are equal."""
    fresh, report = load_template(tmp_path, *SPLIT, "flattened")
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.1]
    assert [(h.group, h.what, h.instead_of) for h in report.hyper_parameters] == [
        ("up.weight", "restored", "0.5"),
        ("down.weight", "restored", "0.6"),
    ]


def test_flattened_groups_that_look_like_one_need_a_name(tmp_path: Path) -> None:
    """Groups with equal values may be one, of which torch takes the first's; a name tells."""
    saved, now = [("up", 0.1), ("down", 0.2)], [("up", 0.5), ("down", 0.5)]
    with pytest.raises(OptimizerStateError, match=r"`lr` 0\.1 and 0\.2.*a `name` in each"):
        load_template(tmp_path, saved, now, "flattened")
    other = Net()
    fresh = grouped(other, *now)
    for group, name in zip(fresh.param_groups, ("one", "two"), strict=True):
        group["name"] = name
    state = template(other, fresh, "flattened")
    report = dcp_reshard.load(state, tmp_path)
    put_back(other, fresh, state, "flattened")
    assert [(group["name"], group["lr"]) for group in fresh.param_groups] == [
        ("one", 0.1),
        ("two", 0.2),
    ]
    assert {(h.group, h.value) for h in report.hyper_parameters if h.what == "kept"} == {
        ("up.weight", "'one'"),
        ("down.weight", "'two'"),
    }


@pytest.mark.parametrize("saved_as", ["nested", "flattened"])
@pytest.mark.parametrize("groups", [MERGED[0], MERGED[0][::-1]])
def test_a_template_of_one_form_takes_what_was_saved_in_the_other(
    groups: list[tuple[str, float]], saved_as: str, tmp_path: Path
) -> None:
    """State has the same keys in both, and groups are found by their parameters."""
    form = "flattened" if saved_as == "nested" else "nested"
    model, other = Net(), Net()
    optimizer, fresh = grouped(model, *groups), grouped(other, ("up", 0.5), ("down", 0.6))
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=saved_as)
    state = template(other, fresh, form)
    report = dcp_reshard.load(state, tmp_path)
    put_back(other, fresh, state, form)
    assert [group["lr"] for group in fresh.param_groups] == [0.1, 0.2]
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))
    assert report.unexpected == report.missing == ()


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


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_a_mapping_says_whose_values_a_merged_group_gets(form: str, tmp_path: Path) -> None:
    """The values are those of the group named, and what moved is reported."""
    group = {"nested": 0, "flattened": "up.weight"}[form]
    mapping = {"optimizer.param_groups." + {0: "0"}.get(group, "down.bias"): "down.weight"}
    fresh, report = load_template(tmp_path, *MERGED, form, groups=mapping)
    assert [group["lr"] for group in fresh.param_groups] == [0.2]
    [moved] = [h for h in report.hyper_parameters if h.what == "moved"]
    assert (moved.group, moved.name, moved.value, moved.instead_of) == (group, "lr", "0.2", "0.1")
    assert not report.unexpected


def test_a_mapping_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """Parameters that may be in one group cannot be given to two."""
    names = ("up.weight", "down.weight")
    mapping = {f"optimizer.param_groups.{name}": name for name in names}
    with pytest.raises(dcp_reshard.PlanError, match="may be one group"):
        load_template(tmp_path, *MERGED, "flattened", groups=mapping)


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


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_values_that_one_side_lacks_are_kept_and_reported(form: str, tmp_path: Path) -> None:
    """Rows 18, 19, 20: a newer option keeps its value, `initial_lr` comes, `lr` stays if asked."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model, lr=0.1), adamw(other, lr=0.5)
    optimizer.param_groups[0]["initial_lr"] = 0.3
    fresh.param_groups[0]["newer"] = 7
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    state = template(other, fresh, form)
    report = dcp_reshard.load(state, tmp_path, keep_hyper_parameters=["lr"])
    for name in ("up.weight", "down.bias"):
        assert [value_of(state, name, key) for key in ("lr", "initial_lr", "newer")] == [
            0.5,
            0.3,
            7,
        ]
    put_back(other, fresh, state, form)
    assert fresh.param_groups[0]["newer"] == 7
    assert {(h.name, h.what) for h in report.hyper_parameters} == {
        ("lr", "kept"),
        ("newer", "kept"),
        ("initial_lr", "added"),
    }


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_a_group_of_new_parameters_is_refused_or_reported(form: str, tmp_path: Path) -> None:
    """No group of the checkpoint gives it its values, whatever its number."""
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.down.parameters(), lr=0.1)
    fresh = torch.optim.SGD(
        [{"params": m.parameters(), "lr": lr} for m, lr in ((other.up, 0.5), (other.down, 0.6))]
    )
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    state = template(other, fresh, form)
    key = {"nested": "0", "flattened": "up.weight"}[form]
    with pytest.raises(MissingTensorError, match=rf"`optimizer\.param_groups\.{key}`"):
        dcp_reshard.load(state, tmp_path)
    report = dcp_reshard.load(state, tmp_path, strict=False)
    assert [value_of(state, name, "lr") for name in ("up.bias", "down.bias")] == [0.5, 0.1]
    assert f"optimizer.param_groups.{key}.lr" in report.missing
    assert not any("down" in missing for missing in report.missing)


def test_a_new_parameter_among_others_of_a_flattened_template_needs_a_word(tmp_path: Path) -> None:
    """It may be in their group or in one of its own, whose learning rate is not theirs."""
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.down.parameters(), lr=0.1)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form="flattened")
    state = template(other, torch.optim.SGD(other.parameters(), lr=0.5), "flattened")
    before = copy.deepcopy(state)
    with pytest.raises(OptimizerStateError, match=r"`down\.weight` .*`lr` 0\.1 and 0\.5"):
        dcp_reshard.load(state, tmp_path, strict=False)
    assert state == before
    mapping = {"optimizer.param_groups.up.weight": "down.weight"}
    dcp_reshard.load(state, tmp_path, strict=False, groups=mapping)
    assert {value_of(state, name, "lr") for name in ("up.weight", "down.weight")} == {0.1}


@pytest.mark.parametrize("mine", [0.5, torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)])
@pytest.mark.parametrize("theirs", [0.125, torch.tensor(0.125)])
@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_a_learning_rate_stays_what_it_is(
    form: str, mine: Any, theirs: Any, tmp_path: Path
) -> None:
    """A tensor is filled in place, a number is a number, whatever was saved."""
    model, other = Net(), Net()
    optimizer, fresh = adamw(model, lr=theirs), adamw(other, lr=mine)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    state = template(other, fresh, form)
    own = value_of(state, "up.bias", "lr")
    dcp_reshard.load(state, tmp_path)
    value = value_of(state, "up.bias", "lr")
    assert same(value, torch.full_like(own, 0.125) if isinstance(own, torch.Tensor) else 0.125)
    assert (value is own) == isinstance(own, torch.Tensor)


@pytest.mark.parametrize(
    ("groups", "form", "says"),
    [
        (MERGED, "nested", "`ReshardStorageReader`"),
        (SPLIT, "nested", "`ReshardStorageReader`"),
        (MERGED, "flattened", "is 0.1 and `optimizer.param_groups.down.weight.lr` 0.2"),
    ],
)
@pytest.mark.parametrize("rate", [float, torch.tensor])
def test_the_reader_of_torch_cannot_mix_groups_either(
    groups: Any, form: str, says: str, rate: Any, tmp_path: Path
) -> None:
    """What arrives is compared: the lists, or the values of parameters that may be one group."""
    model, other = Net(), Net()
    optimizer, fresh = grouped(model, *groups[0]), grouped(other, *groups[1])
    for group in (*optimizer.param_groups, *fresh.param_groups):
        group["lr"] = rate(group["lr"])
    if rate is torch.tensor:
        says = says.replace("0.1", "tensor(0.1000)").replace("0.2", "tensor(0.2000)")
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form=form)
    planner = ReshardLoadPlanner(options=PlanOptions(on_missing="keep"))
    failure = catch_failure(
        lambda: dcp.load(
            template(other, fresh, form),
            storage_reader=dcp.FileSystemReader(tmp_path),
            planner=planner,
        )
    )
    assert isinstance(failure, OptimizerStateError)
    assert says in str(failure)


def test_the_reader_of_torch_compares_with_what_does_not_arrive(tmp_path: Path) -> None:
    """A new parameter keeps its value, which torch would give to all of its group, or not."""
    model, other = Net(), Net()
    optimizer = torch.optim.SGD(model.down.parameters(), lr=0.1)
    step(model, optimizer)
    save_optimizer(tmp_path, model, optimizer, form="flattened")
    planner = ReshardLoadPlanner(options=PlanOptions(on_missing="keep"))
    failure = catch_failure(
        lambda: dcp.load(
            template(other, torch.optim.SGD(other.parameters(), lr=0.5), "flattened"),
            storage_reader=dcp.FileSystemReader(tmp_path),
            planner=planner,
        )
    )
    assert isinstance(failure, OptimizerStateError)
    assert "is 0.5 and `optimizer.param_groups.down.weight.lr` 0.1" in str(failure)


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
def test_groups_that_were_saved_by_number_are_refused(form: str, tmp_path: Path) -> None:
    """Row 14: their order is all that they have, and it may not be that of the template."""
    model, other = Net(), Net()
    rates = [{"params": model.up.parameters(), "lr": 0.1}, {"params": model.down.parameters()}]
    dcp.save({"optimizer": torch.optim.SGD(rates, lr=0.2).state_dict()}, checkpoint_id=tmp_path)
    parts = [{"params": other.down.parameters()}, {"params": other.up.parameters(), "lr": 0.4}]
    state = template(other, torch.optim.SGD(parts, lr=0.3), form)
    with pytest.raises(OptimizerStateError, match="numbers of parameters"):
        dcp_reshard.load(state, tmp_path, strict=False)
    assert [value_of(state, name, "lr") for name in ("down.bias", "up.bias")] == [0.3, 0.4]
