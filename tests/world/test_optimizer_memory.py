"""Where optimizer state lies: like its parameter, on the parameter's own mesh, rank by rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import (
    DTensor,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)

from dcp_reshard import (
    OptimizerOptions,
    OptimizerStateError,
    ReshardStorageReader,
    load_optimizer,
    load_sharded_optimizer_state_dict,
)
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world

SHAPES = {"matrix": (6, 5), "row": (1, 5), "vector": (7,), "one": (1,), "scalar": ()}
STATE: dict[str, dict[str, torch.Tensor]] = {
    "matrix": {
        "step": torch.tensor(3.0),
        "exp_avg": indexed_tensor((6, 5)),
        "row_var": indexed_tensor((6, 1)),
        "col_var": indexed_tensor((1, 5)),
        "count": torch.tensor([4.0]),
    },
    "row": {"row_var": torch.tensor([[2.0]]), "col_var": indexed_tensor((1, 5))},
    "vector": {"step": torch.tensor(3.0), "exp_avg": indexed_tensor((7,), torch.bfloat16)},
    "one": {"step": torch.tensor(3.0), "exp_avg": torch.tensor([5.0])},
    "scalar": {"step": torch.tensor(3.0), "exp_avg": torch.tensor(5.0), "mu": torch.tensor(1.0)},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    group = {"lr": 0.5, "params": list(STATE)}
    dcp.save({"optimizer": {"state": STATE, "param_groups": [group]}}, checkpoint_id=tmp_path)
    return tmp_path


def model_of(placements: dict[str, tuple[Placement, ...] | None]) -> nn.Module:
    """A model of plain parameters and DTensors; each DTensor on a mesh of as many axes as named."""
    model = nn.Module()
    for name, placed in placements.items():
        param: torch.Tensor = torch.zeros(SHAPES[name])
        if placed is not None:
            mesh = init_device_mesh("cpu", (4,) if len(placed) == 1 else (2, 2))
            param = distribute_tensor(param, mesh, placed, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(param))
    return model


def load(path: Path, model: nn.Module, how: str) -> dict[str, Any]:
    if how == "state dict":
        reader = ReshardStorageReader(path)
        osd = load_sharded_optimizer_state_dict(
            dict(model.named_parameters()), "optimizer", reader, no_dist=True
        )
        return dict(osd["optimizer"]["state"])
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    load_optimizer(model, optimizer, path, no_dist=True)
    return {name: optimizer.state[param] for name, param in model.named_parameters()}


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("how", ["state dict", "optimizer"])
def test_state_lies_like_its_own_parameter(how: str, rank: int, path: Path) -> None:
    """Row 23: plain for plain, DTensor for DTensor on its own mesh, factored moments whole."""
    with fake_world(rank, 4):
        model = model_of(
            {
                "matrix": (Shard(0),),
                "row": (Replicate(), Shard(1)),
                "vector": (Shard(0), Replicate()),
                "one": None,
                "scalar": (Replicate(),),
            }
        )
        state = load(path, model, how)
        for name, param in model.named_parameters():
            for kind, stored in STATE[name].items():
                value = state[name][kind]
                assert (value.dtype, tuple(value.shape)) == (stored.dtype, tuple(stored.shape))
                if not isinstance(param, DTensor) or kind in ("step", "mu", "count"):
                    assert type(value) is torch.Tensor
                    assert torch.equal(value, stored)
                    continue
                assert isinstance(value, DTensor)
                assert value.device_mesh is param.device_mesh or (
                    value.device_mesh == param.device_mesh
                )
                same_shape = stored.shape == param.shape
                replicated = (Replicate(),) * param.device_mesh.ndim
                assert value.placements == (param.placements if same_shape else replicated)
                wanted = distribute_tensor(
                    stored, value.device_mesh, value.placements, src_data_rank=None
                )
                assert torch.equal(value.to_local(), wanted.to_local())


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_without_rows_has_empty_state(rank: int, path: Path) -> None:
    """FSDP2 steps empty parameters too: their state must be there, and be empty."""
    with fake_world(rank, 4):
        model = model_of({"row": (Shard(0),), "one": (Shard(0),)})
        state = load(path, model, "optimizer")
        assert state["one"]["exp_avg"].to_local().tolist() == ([5.0] if rank == 0 else [])
        assert state["row"]["col_var"].to_local().shape[0] == (rank == 0)
        assert state["one"]["step"] == 3


def test_memory_keeps_the_order_of_the_parameters(path: Path) -> None:
    """State of a parameter with another order in memory has that order, as torch makes it."""
    model = nn.Module()
    model.matrix = nn.Parameter(torch.zeros(5, 6).t())
    optimizer = torch.optim.SGD(model.parameters())
    load_optimizer(model, optimizer, path)
    value = optimizer.state[model.matrix]["exp_avg"]
    assert value.stride() == model.matrix.stride() == (1, 6)
    assert torch.equal(value, STATE["matrix"]["exp_avg"])


@pytest.mark.parametrize("flag", ["capturable", "fused"])
def test_steps_are_where_the_kernels_want_them(flag: str, tmp_path: Path) -> None:
    """`step` of a capturable or fused group becomes float32, as in `Optimizer.load_state_dict`."""
    model = nn.Linear(2, 2, bias=False)
    group = {"lr": 0.5, flag: True, "params": ["weight"]}
    state = {"weight": {"step": torch.tensor(3.0, dtype=torch.float64)}}
    dcp.save({"optimizer": {"state": state, "param_groups": [group]}}, checkpoint_id=tmp_path)
    optimizer = torch.optim.SGD(model.parameters())
    load_optimizer(model, optimizer, tmp_path)
    step = optimizer.state[model.weight]["step"]
    assert (step.dtype, step.item()) == (torch.float32, 3)


def test_zeros_for_what_cannot_be_zeros_are_refused(path: Path) -> None:
    """Factored moments of one parameter say nothing about those of another."""
    model = model_of({"matrix": None})
    model.other = nn.Parameter(torch.zeros(2, 2))
    groups = [{"lr": 0.5, "params": ["matrix", "other"]}]
    state = {"state": {"matrix": STATE["matrix"]}, "param_groups": groups}
    dcp.save({"optimizer": state}, checkpoint_id=path / "two")
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(
        OptimizerStateError, match=r"`other`: .* zeros cannot stand for state `.*_var"
    ):
        load_optimizer(
            model,
            optimizer,
            path / "two",
            optimizer_options=OptimizerOptions(on_no_state="zeros"),
        )
