"""Optimizer state from a checkpoint, laid out like a model that is cut in another way.

The update rules here are elementwise, and gradients are an elementwise function of the parameters.
So a whole model trained in one process says what each rank must hold, cut by `torch.chunk` in the
order in which the cuts are made, and what each must compute in the next step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from dcp_reshard import ReshardStorageReader, load_sharded_optimizer_state_dict
from tests.support.checkpoints import save_world
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.tensors import check_same, snapshot
from tests.support.worlds import thread_world

Optimizers = Callable[[nn.Module], torch.optim.Optimizer]
Cuts = tuple[tuple[int, int], ...]
"""Mesh axis and tensor dim of each cut, in the order in which they are made."""

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Net(nn.Module):
    """Dims that no number of ranks here divides, one of them smaller than the number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 13)
        self.down = nn.Linear(13, 3)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.copy_(torch.arange(param.numel()).view_as(param) / 7 + number)


@dataclass(frozen=True, slots=True)
class Kind:
    """A way to spread the model over ranks."""

    mesh_shape: tuple[int, ...]
    wrap: Callable[[nn.Module, Any], None]
    cuts: dict[str, Cuts]

    @property
    def size(self) -> int:
        return math.prod(self.mesh_shape)

    def build(self, *, trained: bool) -> Net:
        """The model of this rank, as it was made or after training."""
        net = Net()
        if trained:
            whole, _ = train(adamw)
            net.load_state_dict(whole.state_dict())
        if self.cuts:
            names = ("dp", "tp")[: len(self.mesh_shape)]
            self.wrap(net, init_device_mesh("cpu", self.mesh_shape, mesh_dim_names=names))
        return net

    def part(self, full: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        """What a rank holds of a tensor of the parameter's shape."""
        columns = self.mesh_shape[-1]
        coordinate = divmod(rank, columns) if len(self.mesh_shape) == 2 else (rank,)
        for axis, dim in self.cuts.get(name, ()):
            pieces = full.chunk(self.mesh_shape[axis], dim)
            number = coordinate[axis]
            full = pieces[number] if number < len(pieces) else full.narrow(dim, 0, 0)
        return full


def shard(net: nn.Module, mesh: Any) -> None:
    fully_shard(net, mesh=mesh)


def tensor_parallel(net: nn.Module, mesh: Any) -> None:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(net, mesh, plan, src_data_rank=None)


def shard_tensor_parallel(net: nn.Module, mesh: Any) -> None:
    tensor_parallel(net, mesh["tp"])
    fully_shard(net, mesh=mesh["dp"])


def every(cuts: Cuts) -> dict[str, Cuts]:
    return {name: cuts for name, _ in Net().named_parameters()}


def columns_then_rows(tp: int, *then: tuple[int, int]) -> dict[str, Cuts]:
    """`up` is cut by its outputs, `down` by its inputs; its bias is on all ranks."""
    return {
        "up.weight": ((tp, 0), *then),
        "up.bias": ((tp, 0), *then),
        "down.weight": ((tp, 1), *then),
        "down.bias": then,
    }


KINDS = {
    "plain": Kind((1,), shard, {}),
    "fsdp2": Kind((4,), shard, every(((0, 0),))),
    "tp": Kind((2,), tensor_parallel, columns_then_rows(0)),
    "fsdp2_x_tp": Kind((2, 2), shard_tensor_parallel, columns_then_rows(1, (0, 0))),
    "fsdp3_x_tp": Kind((3, 2), shard_tensor_parallel, columns_then_rows(1, (0, 0))),
    "hsdp": Kind((2, 2), shard, every(((1, 0),))),
}


def adamw(net: nn.Module) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in net.parameters() if p.ndim > 1], "weight_decay": 0.25},
        {"params": [p for p in net.parameters() if p.ndim == 1], "weight_decay": 0.0, "lr": 0.5},
    ]
    return torch.optim.AdamW(groups, lr=0.125)


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.125, momentum=0.75)


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """One step with the sine of each parameter as its gradient."""
    for param in net.parameters():
        if isinstance(param, DTensor):
            param.grad = DTensor.from_local(
                torch.sin(param.to_local().detach()),
                param.device_mesh,
                param.placements,
                run_check=False,
                shape=param.shape,
                stride=param.stride(),
            )
        else:
            param.grad = torch.sin(param.detach())
    optimizer.step()


def train(make: Optimizers, steps: int = 2) -> tuple[Net, torch.optim.Optimizer]:
    """The whole model and its optimizer after some steps."""
    net = Net()
    optimizer = make(net)
    for _ in range(steps):
        step(net, optimizer)
    return net, optimizer


def make_saved(rank: int, kind: Kind, make: Optimizers, options: Any) -> dict[str, Any]:
    """What a rank saves after two steps."""
    net = kind.build(trained=False)
    optimizer = make(net)
    for _ in range(2):
        step(net, optimizer)
    return {
        "model": net.state_dict(),
        "optimizer": get_optimizer_state_dict(net, optimizer, options=options),
    }


Save = Callable[..., Path]


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Writes a checkpoint of a kind, once."""
    paths: dict[tuple[Any, ...], Path] = {}

    def save_once(source: str, make: Optimizers = adamw, options: Any = None) -> Path:
        key = source, make, options is None
        if key not in paths:
            paths[key] = tmp_path_factory.mktemp(source)
            kind = KINDS[source]
            make_state = partial(make_saved, kind=kind, make=make, options=options)
            save_world(paths[key], kind.size, make_state)
        return paths[key]

    return save_once


def wanted_state(make: Optimizers) -> dict[str, dict[str, torch.Tensor]]:
    """The whole state by parameter and name, after two steps."""
    net, optimizer = train(make)
    return {name: optimizer.state[param] for name, param in net.named_parameters()}


def check_layout(kind: Kind, net: nn.Module, state: dict[str, Any], make: Optimizers) -> None:
    """Check types, layouts and bits of the state of this rank."""
    params = dict(net.named_parameters())
    wanted = wanted_state(make)
    assert state.keys() == wanted.keys()
    for name, values in wanted.items():
        assert state[name].keys() == values.keys()
        for key, full in values.items():
            found, param = state[name][key], params[name]
            if full.ndim and isinstance(param, DTensor):
                assert isinstance(found, DTensor), (name, key)
                assert found.placements == param.placements
                assert found.device_mesh == param.device_mesh
                assert found.shape == param.shape
                found, full = found.to_local(), kind.part(full, name, dist.get_rank())
            assert type(found) is torch.Tensor, (name, key)
            assert not found.requires_grad
            check_same({key: found}, {key: full}, where=name)


def load_and_step(rank: int, path: Path, kind: Kind, make: Optimizers, options: Any) -> None:
    net = kind.build(trained=True)
    before = snapshot(net.state_dict())
    reader = ReshardStorageReader(path)
    osd = load_sharded_optimizer_state_dict(net.state_dict(), "optimizer", reader)
    assert list(osd) == ["optimizer"]
    check_same(snapshot(net.state_dict()), before)
    loaded = osd["optimizer"]
    if options is None:
        check_layout(kind, net, loaded["state"], make)
    optimizer = make(net)
    set_optimizer_state_dict(net, optimizer, loaded, options=options)
    state = {name: optimizer.state[param] for name, param in net.named_parameters()}
    check_layout(kind, net, state, make)
    step(net, optimizer)

    whole, whole_optimizer = train(make)
    if make is not adamw:
        trained, _ = train(adamw)
        whole.load_state_dict(trained.state_dict())
    step(whole, whole_optimizer)
    for name, param in net.named_parameters():
        local = param.to_local() if isinstance(param, DTensor) else param
        full = dict(whole.named_parameters())[name].detach()
        torch.testing.assert_close(local.detach(), kind.part(full, name, rank), msg=name)


@pytest.mark.parametrize("dest", KINDS)
@pytest.mark.parametrize("source", ["plain", "fsdp2", "tp", "hsdp"])
def test_any_model_gets_state_from_any_other(save: Save, source: str, dest: str) -> None:
    """Each rank has its part of each moment, the groups as they were, and can go on training."""
    kind = KINDS[dest]
    thread_world(kind.size, load_and_step, save(source), kind, adamw, None)


@pytest.mark.parametrize("dest", KINDS)
def test_the_flattened_form(save: Save, dest: str) -> None:
    """State that was saved flattened comes back flattened, and is set in that form."""
    kind = KINDS[dest]
    thread_world(kind.size, load_and_step, save("fsdp2", adamw, FLAT), kind, adamw, FLAT)


@pytest.mark.parametrize("dest", KINDS)
def test_momentum_without_a_step_count(save: Save, dest: str) -> None:
    """SGD keeps one buffer for each parameter and nothing else."""
    kind = KINDS[dest]
    thread_world(kind.size, load_and_step, save("plain", sgd), kind, sgd, None)


def load_sharded_tensors(rank: int, path: Path) -> None:
    """As FSDP1 gives them: a ShardedTensor for each parameter, some without rows on this rank."""
    model = {
        name: sharded_tensor(param.detach(), row_boxes(param.shape, 4))
        for name, param in Net().named_parameters()
    }
    osd = load_sharded_optimizer_state_dict(model, "optimizer", ReshardStorageReader(path))
    for name, values in wanted_state(adamw).items():
        found = osd["optimizer"]["state"][name]
        assert torch.equal(found["step"], values["step"])
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(found[key], ShardedTensor)
            assert found[key].metadata().shards_metadata == model[name].metadata().shards_metadata
            rows = values[key].chunk(4)
            local = [shard.tensor for shard in found[key].local_shards()]
            assert len(local) == (rank < len(rows))
            assert all(torch.equal(tensor, rows[rank]) for tensor in local)


def test_models_of_sharded_tensors(save: Save) -> None:
    """State becomes a ShardedTensor with the shards of its parameter."""
    thread_world(4, load_sharded_tensors, save("hsdp"))
