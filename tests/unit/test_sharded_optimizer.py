"""`load_sharded_optimizer_state_dict` for plain models: names, keys, planners, and what is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from dcp_reshard import (
    OptimizerOptions,
    OptimizerReport,
    OptimizerStateError,
    ReshardLoadPlanner,
    ReshardStorageReader,
    ShapeMismatchError,
    load_sharded_optimizer_state_dict,
)
from tests.support.single import adamw, save_optimizer, state_by_name, step
from tests.support.training import Net, same

Params = dict[str, torch.Tensor]


class OnceReader(ReshardStorageReader):
    """Counts how often the metadata are read."""

    times = 0

    def read_metadata(self) -> Metadata:
        self.times += 1
        return super().read_metadata()


class NotingPlanner(ReshardLoadPlanner):
    """Notes the keys that it was asked for."""

    asked: tuple[str, ...] = ()

    def set_up_planner(self, state_dict: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        self.asked = tuple(state_dict)
        super().set_up_planner(state_dict, *args, **kwargs)


def saved_net(path: Path, form: str = "nested") -> tuple[Net, torch.optim.Optimizer]:
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer)
    save_optimizer(path, model, optimizer, form=form)
    return model, optimizer


def load(path: Path, params: Params, **options: Any) -> tuple[dict[str, Any], OptimizerReport]:
    reports: list[OptimizerReport] = []
    osd = load_sharded_optimizer_state_dict(
        params,
        "optimizer",
        ReshardStorageReader(path),
        options=OptimizerOptions(**options),
        on_report=reports.append,
    )
    return osd["optimizer"], reports[0]


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_the_result_is_what_torch_sets(form: str, tmp_path: Path) -> None:
    """`set_optimizer_state_dict` of stock torch makes the optimizer what it was."""
    model, optimizer = saved_net(tmp_path, form)
    other = Net()
    fresh = adamw(other)
    osd, report = load(tmp_path, other.state_dict())
    set_optimizer_state_dict(other, fresh, osd)
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))
    assert report.restored == ("up.weight", "up.bias", "down.weight", "down.bias")


@pytest.mark.parametrize("planner", [NotingPlanner, dcp.DefaultLoadPlanner])
def test_the_metadata_are_read_once_and_the_planner_is_used(
    planner: Callable[[], Any], tmp_path: Path
) -> None:
    """Row 25: the caller's planner is asked for the keys below the optimizer's, no others."""
    saved_net(tmp_path)
    reader, own = OnceReader(tmp_path), planner()
    load_sharded_optimizer_state_dict(Net().state_dict(), "optimizer", reader, own)
    assert reader.times == 1
    assert set(own.state_dict) == set(reader.read_metadata().state_dict_metadata)
    if isinstance(own, NotingPlanner):
        assert own.plan is not None
        assert len(own.asked) == len(own.plan.tensors) + len(own.plan.objects)


def test_a_stock_reader_works_as_well(tmp_path: Path) -> None:
    """Only the metadata of torch's own reader are needed."""
    model, optimizer = saved_net(tmp_path)
    osd = load_sharded_optimizer_state_dict(
        Net().state_dict(), "optimizer", dcp.FileSystemReader(tmp_path)
    )
    assert same(osd["optimizer"]["state"], state_by_name(model, optimizer))


def test_the_nesting_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """An optimizer two levels down comes back two levels down."""
    model = Net()
    optimizer = adamw(model)
    step(model, optimizer)
    state = {"a.b": {"optim": get_optimizer_state_dict(model, optimizer)}}
    dcp.save(state, checkpoint_id=tmp_path)
    reader = ReshardStorageReader(tmp_path)
    osd = load_sharded_optimizer_state_dict(Net().state_dict(), "a.b.optim", reader)
    assert list(osd) == ["a.b"]
    assert same(osd["a.b"]["optim"]["state"], state_by_name(model, optimizer))


@pytest.mark.parametrize("form", ["nested", "flattened"])
@pytest.mark.parametrize("wrap", ["module.{}", "_orig_mod.{}", "module._orig_mod.{}"])
def test_the_names_of_the_result_are_the_models(wrap: str, form: str, tmp_path: Path) -> None:
    """State and groups are told by the names that the model has now."""
    _, optimizer = saved_net(tmp_path, form)
    params = {wrap.format(name): p for name, p in Net().state_dict().items()}
    osd, report = load(tmp_path, params)
    assert report.renamed == ()
    if form == "nested":
        assert set(osd["state"]) == set(params)
        assert osd["param_groups"][0]["params"] == list(params)
    else:
        assert {key for key in osd if key.endswith(".lr")} == {
            f"param_groups.{name}.lr" for name in params
        }
        wanted = optimizer.state_dict()["state"][0]["exp_avg"]
        assert torch.equal(osd[f"state.{wrap.format('up.weight')}.exp_avg"], wanted)


def test_parameters_are_renamed_by_the_caller(tmp_path: Path) -> None:
    """A model with other names gets its state under these, and the report says so."""
    model, optimizer = saved_net(tmp_path)
    params = {name.replace("up", "first"): p for name, p in Net().state_dict().items()}
    osd, report = load(tmp_path, params, rename=lambda name: name.replace("first", "up"))
    wanted = state_by_name(model, optimizer)
    assert same(osd["state"], {name.replace("up", "first"): s for name, s in wanted.items()})
    assert report.renamed == (("first.weight", "up.weight"), ("first.bias", "up.bias"))


def test_what_the_model_does_not_have_is_left_out_and_named(tmp_path: Path) -> None:
    """State of removed parameters is not read, new ones are named, or an error if asked for."""
    saved_net(tmp_path)
    params = {"down.weight": torch.zeros(5, 14), "buffer": torch.zeros(3)}
    osd, report = load(tmp_path, params)
    assert list(osd["state"]) == osd["param_groups"][0]["params"] == ["down.weight"]
    assert set(report.extra) == {"down.bias", "up.bias", "up.weight"}
    assert report.new == ("buffer",)
    with pytest.raises(OptimizerStateError, match="3 parameters of the checkpoint"):
        load(tmp_path, params, on_extra="error")


def test_a_parameter_without_state_is_told_from_a_removed_one(tmp_path: Path) -> None:
    """What is in a group but has no state is neither lost nor invented."""
    model = Net()
    optimizer = adamw(model)
    model.up.bias.grad = torch.ones(14)
    optimizer.step()
    save_optimizer(tmp_path, model, optimizer)
    osd, report = load(tmp_path, Net().state_dict())
    assert list(osd["state"]) == ["up.bias"]
    assert osd["param_groups"][0]["params"] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert (report.without_state, report.extra) == (("up.weight", "down.weight", "down.bias"), ())


def test_nothing_in_common_is_an_error(tmp_path: Path) -> None:
    """A wholly renamed model gets an error with the nearest names, not an empty state dict."""
    saved_net(tmp_path)
    with pytest.raises(OptimizerStateError, match=r"nearest: `up\.bias`"):
        load(tmp_path, {"net.up.bias": torch.zeros(14)})
    with pytest.raises(OptimizerStateError, match="nothing below key 'optim'"):
        load_sharded_optimizer_state_dict(
            Net().state_dict(), "optim", ReshardStorageReader(tmp_path)
        )


def test_one_state_is_not_given_to_two_parameters(tmp_path: Path) -> None:
    """A state dict that is keyed by the checkpoint has one place for each of its keys."""
    saved_net(tmp_path)
    params = {"up.bias": torch.zeros(14), "twin": torch.zeros(14)}
    with pytest.raises(OptimizerStateError, match="other parameters have as well"):
        load(tmp_path, params, rename={"twin": "up.bias"})


def test_the_caller_may_make_the_memory(tmp_path: Path) -> None:
    """`make_state` is asked for each tensor, and what it declines is made here."""
    saved_net(tmp_path)
    made = torch.zeros(14, dtype=torch.float64)

    def make_state(name: str, path: Any, stored: Any, param: torch.Tensor) -> torch.Tensor | None:
        assert param.shape == Net().state_dict()[name].shape
        return made if (name, path) == ("up.bias", ("exp_avg",)) else None

    osd, _ = load(tmp_path, Net().state_dict(), make_state=make_state)
    assert osd["state"]["up.bias"]["exp_avg"] is made
    assert made.any()
    assert osd["state"]["up.bias"]["exp_avg_sq"].dtype == torch.float32


def test_numbers_with_names_come_back_as_names(tmp_path: Path) -> None:
    """What an optimizer of named parameters saved by itself is told by the names it saved."""
    model, other = Net(), Net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    step(model, optimizer)
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    osd, _ = load(tmp_path, other.state_dict())
    assert same(osd["state"], state_by_name(model, optimizer))
    fresh = torch.optim.AdamW(reversed(list(other.named_parameters())))
    set_optimizer_state_dict(other, fresh, osd)
    assert same(state_by_name(other, fresh), state_by_name(model, optimizer))


def test_state_of_a_parameter_of_another_size_is_refused(tmp_path: Path) -> None:
    """Moments of 14 rows are not taken for factored moments of 15."""
    saved_net(tmp_path)
    params = Net().state_dict() | {"up.weight": torch.zeros(15, 6)}
    message = r"`up.weight`: state `exp_avg` was saved with shape \(14, 6\), .* \(15, 6\)"
    with pytest.raises(ShapeMismatchError, match=message):
        load(tmp_path, params)


@pytest.mark.parametrize("form", ["nested", "flattened"])
def test_groups_of_an_optimizer_without_state_are_set_by_name(form: str, tmp_path: Path) -> None:
    """Without a name of a parameter with state, torch would set groups by their position."""
    model, other = Net(), Net()
    parts = [{"params": model.up.parameters(), "lr": 0.1}, {"params": model.down.parameters()}]
    save_optimizer(tmp_path, model, torch.optim.SGD(parts, lr=0.2), form=form)
    fresh = torch.optim.SGD(
        [{"params": other.down.parameters()}, {"params": other.up.parameters()}], lr=0.5
    )
    osd, _ = load(tmp_path, other.state_dict())
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    set_optimizer_state_dict(other, fresh, osd, options=options)
    assert [group["lr"] for group in fresh.param_groups] == [0.2, 0.1]
    step(other, fresh)
