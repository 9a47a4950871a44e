"""One rank of `test_nccl`: trains a step and saves, or loads into other layouts and compares."""

from __future__ import annotations

import itertools
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import dcp_reshard


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(517, 1031), nn.ReLU(), nn.Linear(1031, 13)).cuda()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(8, 517, device="cuda")).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def save(path: str) -> None:
    model, optimizer = make_model()
    train(model, optimizer)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=path)
    whole = {k: full(v).cpu() for k, v in state["model"].items()}
    moments = {
        k: {n: full(t).cpu() for n, t in s.items()} for k, s in state["optimizer"]["state"].items()
    }
    if dist.get_rank() == 0:
        torch.save({"model": whole, "optimizer": moments}, f"{path}/expected.pt")


def load(path: str) -> None:
    expected = torch.load(f"{path}/expected.pt")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    layouts = itertools.product((Shard(0), Shard(1), Replicate()), ("direct", "cooperative"))
    for placement, mode in layouts:
        model = {
            k: distribute_tensor(
                torch.full_like(v, -1.0).cuda(), mesh, [placement if v.ndim > 1 else Shard(0)]
            )
            for k, v in expected["model"].items()
        }
        report = dcp_reshard.load({"model": model}, path, mode=mode)
        assert report.records_unverified == 0, report
        if dist.get_world_size() > 1:
            assert report.cooperation.mode == mode, report
        for key, value in model.items():
            assert torch.equal(full(value).cpu(), expected["model"][key]), key
        osd = dcp_reshard.load_sharded_optimizer_state_dict(
            model, "optimizer", dcp_reshard.ReshardStorageReader(path, mode=mode)
        )
        for key, moments in expected["optimizer"].items():
            for name, value in moments.items():
                loaded = osd["optimizer"]["state"][key][name]
                assert torch.equal(full(loaded).cpu(), value), (key, name)


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    {"save": save, "load": load}[sys.argv[1]](sys.argv[2])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
