"""Optimizers of real processes: what ranks agree on, and parameters that FSDP1 leaves alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.optimizer import (
    load_sharded_optimizer_state_dict as torch_load_sharded,
)
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from dcp_reshard import (
    OptimizerOptions,
    ReshardStorageReader,
    load_optimizer,
    load_sharded_optimizer_state_dict,
)
from tests.support.training import (
    LAYOUTS,
    OPTIMIZERS,
    Net,
    make_optimizer,
    read_whole,
    same,
    save_training,
    train,
)
from tests.support.worlds import gloo_world

pytestmark = [
    pytest.mark.dist,
    pytest.mark.filterwarnings("ignore::UserWarning:torch[.]distributed[.].*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch[.]distributed[.].*"),
]


def build(layout: str, *, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = LAYOUTS[layout][1](Net())
    optimizer = make_optimizer("adamw", model)
    train(model, optimizer, start=0, steps=steps)
    return model, optimizer


def save(rank: int, layout: str, path: str) -> None:
    save_training(path, *build(layout, steps=2))


def message_of(error: CheckpointException) -> dict[int, str]:
    return {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}


def load_with_a_stranger(rank: int, path: str) -> dict[int, str]:
    model, optimizer = build("fsdp2-2", steps=1)
    if rank == 1:
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    before = optimizer.state_dict()
    try:
        load_optimizer(model, optimizer, path, optimizer_key="train.optim")
    except CheckpointException as error:
        after = optimizer.state_dict()
        assert after["param_groups"] == before["param_groups"]
        assert all(
            torch.equal(after["state"][i]["exp_avg"].to_local(), s["exp_avg"].to_local())
            for i, s in before["state"].items()
        )
        return message_of(error)
    raise AssertionError("loaded")


def test_an_error_of_one_rank_reaches_all_and_changes_nothing(tmp_path: Path) -> None:
    """A rank whose optimizer does not fit fails the load of all ranks; no optimizer has changed."""
    path = str(tmp_path)
    gloo_world(2, save, "fsdp2-2", path)
    for messages in gloo_world(2, load_with_a_stranger, path):
        assert list(messages) == [1]
        assert "is not in the model" in messages[1]


def load_renamed(rank: int, path: str) -> dict[int, str]:
    model, _ = build("fsdp2-2", steps=0)
    params = {f"other{rank}.{name}": p for name, p in model.state_dict().items()}
    try:
        load_sharded_optimizer_state_dict(
            model.state_dict() if rank == 0 else params, "train.optim", ReshardStorageReader(path)
        )
    except CheckpointException as error:
        return message_of(error)
    raise AssertionError("loaded")


def test_a_rank_that_finds_nothing_does_not_leave_the_others_waiting(tmp_path: Path) -> None:
    """Names are compared inside the load: if one rank's model has others, all ranks hear of it."""
    path = str(tmp_path)
    gloo_world(2, save, "fsdp2-2", path)
    for messages in gloo_world(2, load_renamed, path):
        assert list(messages) == [1]
        assert "OptimizerStateError: nothing to restore" in messages[1]


class Mixed(nn.Module):
    """A net with a part that FSDP1 ignores, and a weight that is used twice inside one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.scale = nn.Linear(5, 5)
        self.twin = nn.Linear(6, 14, bias=False)
        self.twin.weight = self.net.up.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.net(x)) + self.twin(x).mean()


def build_mixed(kind: str, *, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    inner = Mixed()
    model = FullyShardedDataParallel(
        inner,
        ignored_modules=[inner.scale],
        use_orig_params=kind == "originals",
        device_id=torch.device("cpu"),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, start=0, steps=steps)
    return model, optimizer


def save_mixed(rank: int, path: str, kind: str) -> None:
    model, optimizer = build_mixed(kind, steps=2)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=path)


def load_mixed(rank: int, path: str, again: str, kind: str) -> tuple[Any, ...]:
    model, optimizer = build_mixed(kind, steps=0)
    report = load_optimizer(model, optimizer, path).optimizer
    assert report is not None
    inner = model.module
    state = {p: s["exp_avg"] for p, s in optimizer.state.items()}
    assert type(state[inner.scale.weight]) is torch.Tensor
    assert state[inner.scale.weight].shape == (5, 5)
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=again)
    train(model, optimizer, start=2, steps=1)
    return report.restored, report.extra, report.new


@pytest.mark.parametrize(
    ("source", "dest"),
    [("originals", "originals"), ("originals", "flat"), ("flat", "originals"), ("flat", "flat")],
)
def test_state_follows_ignored_and_shared_parameters_of_fsdp1(
    source: str, dest: str, tmp_path: Path
) -> None:
    """Row 22: ignored modules have plain state, a shared weight has one, the next step works."""
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    gloo_world(2, save_mixed, first, source)
    reports = gloo_world(3, load_mixed, first, again, dest)
    assert same(read_whole(first)["optimizer"]["state"], read_whole(again)["optimizer"]["state"])
    for restored, extra, new in reports:
        assert len(restored) == 6
        assert extra == new == ()


class CountingPlanner(dcp.DefaultLoadPlanner):
    plans = 0

    def create_local_plan(self) -> Any:
        self.plans += 1
        return super().create_local_plan()


def load_as_torch_does(rank: int, path: str) -> None:
    reader = dcp.FileSystemReader(path)
    model, optimizer = build_mixed("originals", steps=0)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        params = model.state_dict()
    assert type(params["scale.weight"]) is torch.Tensor
    osd = torch_load_sharded(params, "adamw", reader)["adamw"]
    flat = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, osd)
    optimizer.load_state_dict(flat)
    moment = optimizer.state[model.module.scale.weight]["exp_avg"]
    assert isinstance(moment, ShardedTensor)
    assert [shard.tensor.shape[0] for shard in moment.local_shards()] == [3 - rank]
    with pytest.raises(RuntimeError, match="not supported for ShardedTensor"):
        train(model, optimizer, start=2, steps=1)

    params, planner = LAYOUTS["fsdp2-2"][1](Net()).state_dict(), CountingPlanner()
    osd = torch_load_sharded(params, "adafactor", reader, planner)["adafactor"]
    assert planner.plans == 1
    assert {kind: type(value) for kind, value in osd["state"]["up.weight"].items()} == {
        "step": torch.Tensor,
        "row_var": ShardedTensor,
        "col_var": ShardedTensor,
    }
    assert torch_load_sharded(params, "nested.adamw", reader) == {}


def test_what_torch_does_with_state_that_is_not_laid_out_alike(tmp_path: Path) -> None:
    """Rows 22, 23, 24 and 25: what `load_sharded_optimizer_state_dict` of torch 2.13 gives."""
    saved: dict[str, Any] = {}
    for kind, model in (("adamw", Mixed()), ("adafactor", Net())):
        optimizer = OPTIMIZERS[kind](model.parameters())
        train(model, optimizer, start=0, steps=1)
        saved[kind] = get_optimizer_state_dict(model, optimizer)
    dcp.save({**saved, "nested": saved}, checkpoint_id=tmp_path)
    gloo_world(2, load_as_torch_does, str(tmp_path))


def load_by_other_name(rank: int, path: str, kind: str) -> tuple[str, ...]:
    model, optimizer = build_mixed(kind, steps=0)
    report = load_optimizer(model, optimizer, path).optimizer
    assert report is not None
    assert report.new == report.extra == ()
    return report.restored


@pytest.mark.parametrize("kind", ["originals", "flat"])
def test_a_shared_weight_is_found_by_any_of_its_names(kind: str, tmp_path: Path) -> None:
    """What was saved under the second name of a weight in a flat parameter is its state."""
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, start=0, steps=1)
    saved = get_optimizer_state_dict(model, optimizer)
    saved["state"]["twin.weight"] = saved["state"].pop("net.up.weight")
    [group] = saved["param_groups"]
    group["params"] = [name.replace("net.up.weight", "twin.weight") for name in group["params"]]
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    for restored in gloo_world(2, load_by_other_name, str(tmp_path), kind):
        assert len(restored) == 6


def load_partly(rank: int, path: str, on_no_state: Any) -> dict[str, torch.Tensor] | str:
    model = LAYOUTS["fsdp1-2-flat"][1](Net())
    optimizer = make_optimizer("adamw", model, grouped=False)
    options = OptimizerOptions(on_no_state=on_no_state)
    try:
        load_optimizer(model, optimizer, path, optimizer_options=options)
    except CheckpointException as error:
        return message_of(error)[dist.get_rank()]
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=f"{path}2")
    return {}


def test_part_of_a_flat_parameter_cannot_be_without_state(tmp_path: Path) -> None:
    """Row 21: frozen then, in a flat parameter now: refused by name, or zeros by option."""
    model = Net()
    model.up.bias.requires_grad_(False)
    optimizer = make_optimizer("adamw", model, grouped=False)
    train(model, optimizer, start=0, steps=2)
    saved = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": saved}, checkpoint_id=tmp_path)
    for message in gloo_world(2, load_partly, str(tmp_path), "leave"):
        assert "`up.weight`" in message
        assert "`up.bias` with no state" in message
        assert "use_orig_params=True" in message
    gloo_world(2, load_partly, str(tmp_path), "zeros")
    state = read_whole(f"{tmp_path}2")["optimizer"]["state"]
    assert torch.equal(state["up.bias"]["exp_avg"], torch.zeros(14))
    assert same(state["up.weight"], saved["state"]["up.weight"])


class Tiny(nn.Module):
    """Four elements: of three ranks that share them, the last has nothing but padding."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def build_tiny(*, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Tiny(), use_orig_params=False, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tiny_steps(model, optimizer, steps)
    return model, optimizer


def tiny_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(3, 1)).sum().backward()
        optimizer.step()


def save_tiny(rank: int, path: str) -> None:
    osd = get_optimizer_state_dict(*build_tiny(steps=2))
    dcp.save({"optimizer": osd}, checkpoint_id=path)


def load_tiny(rank: int, path: str, mode: str) -> tuple[float, int]:
    model, optimizer = build_tiny(steps=0)
    load_optimizer(model, optimizer, path, mode=mode)
    tiny_steps(model, optimizer, 1)
    [state] = optimizer.state.values()
    return state["step"].item(), state["exp_avg"].numel()


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_a_rank_with_nothing_but_padding_keeps_step(mode: str, tmp_path: Path) -> None:
    """The padding of a flat parameter is stepped like the rest, on the rank that has no more."""
    gloo_world(2, save_tiny, str(tmp_path))
    assert gloo_world(3, load_tiny, str(tmp_path), mode) == [(3.0, 2)] * 3
