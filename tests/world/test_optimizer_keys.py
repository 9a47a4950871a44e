"""Which stored values belong to the optimizer, and to which parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

from dcp_reshard import (
    OptimizerStateError,
    ReshardLoadPlanner,
    ReshardStorageReader,
    load_sharded_optimizer_state_dict,
)
from tests.support.checkpoints import save_state
from tests.support.failures import catch_failure, find_failures
from tests.support.tensors import check_same, indexed_tensor
from tests.support.worlds import thread_world

SHAPES = {"layers.0.weight": (9, 4), "layers.0.bias": (9,), "weight": (3, 5)}


def make_state() -> dict[str, Any]:
    """Optimizer state as AdamW's, for the parameters of `SHAPES`."""
    state = {
        name: {
            "step": torch.tensor(float(number + 1)),
            "exp_avg": indexed_tensor(shape) + number,
            "exp_avg_sq": indexed_tensor(shape) * 2,
        }
        for number, (name, shape) in enumerate(SHAPES.items())
    }
    groups = [{"lr": 0.5, "betas": (0.9, 0.99), "params": list(SHAPES)}]
    return {"state": state, "param_groups": groups}


def make_model(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Parameters cut by rows over the current world."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        name: distribute_tensor(
            torch.zeros(shape, dtype=dtype), mesh, [Shard(0)], src_data_rank=None
        )
        for name, shape in SHAPES.items()
    }


def check_rows(loaded: dict[str, Any], rank: int, size: int) -> None:
    wanted = make_state()
    assert loaded["param_groups"] == wanted["param_groups"]
    assert loaded["state"].keys() == wanted["state"].keys()
    for name, values in wanted["state"].items():
        found = loaded["state"][name]
        assert torch.equal(found["step"], values["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(found[key], DTensor), (name, key)
            assert found[key].placements == (Shard(0),)
            rows = values[key].chunk(size)
            assert torch.equal(found[key].to_local(), rows[rank]), (name, key)


def load_rows(rank: int, path: Path, key: str) -> None:
    osd = load_sharded_optimizer_state_dict(make_model(), key, ReshardStorageReader(path))
    for part in key.split("."):
        osd = osd[part]
    check_rows(osd, rank, 3)


@pytest.mark.parametrize("key", ["optimizer", "training.optimizer", "a.b.c"])
def test_the_key_may_lead_into_nested_dicts(tmp_path: Path, key: str) -> None:
    """Dots lead into dicts, and the result is nested in the same way."""
    saved: dict[str, Any] = make_state()
    for part in reversed(key.split(".")):
        saved = {part: saved}
    others = {"model": {"w": indexed_tensor((4,))}, "optimizer_2": make_state()}
    save_state(tmp_path, saved | others)
    thread_world(3, load_rows, tmp_path, key)


def load_nested(rank: int, path: Path) -> None:
    model = {"model": make_model()}
    reader = ReshardStorageReader(path)
    loaded: list[dict[str, Any]] = []
    failures = find_failures(
        lambda: loaded.append(load_sharded_optimizer_state_dict(model, "optimizer", reader))
    )
    if loaded:
        check_rows(loaded[0]["optimizer"], rank, 3)
    else:
        assert all(isinstance(error, OptimizerStateError) for error in failures.values())
        assert "layers.0.weight" in str(failures[rank])


def test_names_of_a_nested_model_are_understood_or_refused(tmp_path: Path) -> None:
    """``{"model": model.state_dict()}`` does not give whole tensors where parameters are cut."""
    save_state(tmp_path, {"optimizer": make_state()})
    thread_world(3, load_nested, tmp_path)


def test_nothing_below_the_key(tmp_path: Path) -> None:
    """A key that the checkpoint does not have is an error that says which there are."""
    save_state(tmp_path, {"optim": make_state(), "model": {"w": torch.zeros(2)}})
    reader = ReshardStorageReader(tmp_path)
    error = catch_failure(
        lambda: load_sharded_optimizer_state_dict({"w": torch.zeros(2)}, "optimizer", reader)
    )
    assert isinstance(error, OptimizerStateError)
    assert "'optimizer'" in str(error)
    assert all(key in str(error) for key in ("optim", "model"))


def load_low_precision(rank: int, path: Path) -> None:
    osd = load_sharded_optimizer_state_dict(
        make_model(torch.bfloat16), "optimizer", ReshardStorageReader(path)
    )
    check_rows(osd["optimizer"], rank, 3)


def test_moments_keep_their_stored_dtype(tmp_path: Path) -> None:
    """fp32 moments of bf16 parameters come back as fp32, bit for bit."""
    save_state(tmp_path, {"optimizer": make_state()})
    thread_world(3, load_low_precision, tmp_path)


def load_factored(rank: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = {
        "weight": distribute_tensor(torch.zeros(9, 4), mesh, [Shard(0)], src_data_rank=None),
    }
    osd = load_sharded_optimizer_state_dict(model, "optimizer", ReshardStorageReader(path))
    state = osd["optimizer"]["state"]["weight"]
    local = {
        key: value.to_local() if isinstance(value, DTensor) else value
        for key, value in state.items()
    }
    _, wanted = make_factored()
    check_same(local, wanted)


def make_factored() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Adafactor's state dict after a step, and what it holds of its only parameter."""
    net = nn.Linear(4, 9, bias=False)
    optimizer = torch.optim.Adafactor(net.parameters(), lr=0.1)
    net.weight.grad = indexed_tensor((9, 4))
    optimizer.step()
    state = optimizer.state[net.weight]
    assert {key: tuple(value.shape) for key, value in state.items()} == {
        "step": (),
        "row_var": (9, 1),
        "col_var": (1, 4),
    }
    return get_optimizer_state_dict(net, optimizer), state


def test_state_of_another_shape_is_whole_on_every_rank(tmp_path: Path) -> None:
    """Factored moments do not have their parameter's shape, so no layout follows from it."""
    save_state(tmp_path, {"optimizer": make_factored()[0]})
    thread_world(2, load_factored, tmp_path)


def load_some(rank: int, path: Path) -> None:
    model = {"layers.0.weight": make_model()["layers.0.weight"], "new": torch.zeros(3)}
    osd = load_sharded_optimizer_state_dict(model, "optimizer", ReshardStorageReader(path))
    state = osd["optimizer"]["state"]
    assert "new" not in state
    found = state["layers.0.weight"]["exp_avg"]
    assert isinstance(found, DTensor)
    full = make_state()["state"]["layers.0.weight"]["exp_avg"]
    assert torch.equal(found.to_local(), full.chunk(2)[rank])


def test_a_model_with_other_parameters(tmp_path: Path) -> None:
    """Parameters that only one side has do not keep the others from their state."""
    save_state(tmp_path, {"optimizer": make_state()})
    thread_world(2, load_some, tmp_path)


def load_stock(rank: int, path: Path, planner: Any) -> None:
    reader = dcp.FileSystemReader(path)
    osd = load_sharded_optimizer_state_dict(make_model(), "optimizer", reader, planner())
    check_rows(osd["optimizer"], rank, 3)


@pytest.mark.parametrize("planner", [ReshardLoadPlanner, DefaultLoadPlanner])
def test_with_torchs_reader_and_planner(tmp_path: Path, planner: Any) -> None:
    """Layouts follow from the metadata and the model, whoever reads."""
    save_state(tmp_path, {"optimizer": make_state()})
    thread_world(3, load_stock, tmp_path, planner)


def test_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    """The error is that of the storage, and names what is missing."""
    reader = ReshardStorageReader(tmp_path)
    failures = find_failures(
        lambda: load_sharded_optimizer_state_dict({"w": torch.zeros(2)}, "optimizer", reader)
    )
    assert ".metadata" in str(failures[0])
