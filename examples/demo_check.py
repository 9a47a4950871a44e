"""Are the tensors of a resumed training bit for bit those that were saved?

The answer must not depend on what it judges, so nothing here uses a checkpoint, `dcp_reshard`, or
torch's rules for state dicts:

1. When the training saves, every rank also writes its part of each live tensor to a plain file.
2. The parts of a tensor, put one under the other, are the full tensor: the saving job is FSDP2.
3. A resumed rank cuts what it should hold out of the full tensor, by the definition of its mesh,
   and compares that with what its model and its optimizer do hold, as integers of the same width.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from train_fsdp import Trainer

_INTEGER_OF_WIDTH = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class Tally:
    """Number of elements compared, and with which result."""

    differ: int = 0
    """Elements whose bits differ from the saved ones."""
    compared: int = 0
    """Elements that this rank compared."""
    full: int = 0
    """Elements that all ranks together must have compared: every one, once for each copy of it."""

    def __add__(self, other: Tally) -> Tally:
        """Returns the tally of two comparisons, one after the other."""
        return Tally(
            self.differ + other.differ, self.compared + other.compared, self.full + other.full
        )


def local(tensor: Tensor) -> Tensor:
    """Returns the part of `tensor` that is on this rank, sharing its memory."""
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def live_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Returns the parameters and the optimizer's state tensors themselves, by name."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in trainer.model.named_parameters():
        tensors[f"model.{name}"] = parameter
        for key, value in trainer.optimizer.state[parameter].items():
            tensors[f"optimizer.{name}.{key}"] = value
    return tensors


def group_settings(trainer: Trainer) -> list[dict[str, Any]]:
    """Returns the settings of every parameter group, with its parameters by name."""
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
        for group in trainer.optimizer.param_groups
    ]


def fill_with_garbage(trainer: Trainer) -> None:
    """Overwrites all that a load has to restore, so that nothing can be right by accident."""
    for tensor in live_tensors(trainer).values():
        local(tensor).fill_(torch.nan)
    for group in trainer.optimizer.param_groups:
        group.update(
            lr=torch.nan, betas=(torch.nan, torch.nan), eps=torch.nan, weight_decay=torch.nan
        )
    trainer.step = -1


def write_reference(trainer: Trainer, folder: Path) -> None:
    """Writes this rank's parts of all tensors to a plain file."""
    tensors = live_tensors(trainer)
    content = {
        "parts": {name: local(tensor) for name, tensor in tensors.items()},
        "sharded": [name for name, tensor in tensors.items() if isinstance(tensor, DTensor)],
        "groups": group_settings(trainer),
        "step": trainer.step,
    }
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / f"{dist.get_rank()}.pt")


class Reference:
    """The full tensors and the settings of the training that was saved."""

    def __init__(self, folder: Path) -> None:
        ranks = [torch.load(folder / f"{i}.pt") for i in range(len(list(folder.iterdir())))]
        sharded = set(ranks[0]["sharded"])
        self.groups = ranks[0]["groups"]
        self.step = ranks[0]["step"]
        self.tensors: dict[str, Tensor] = {}
        for name, first in ranks[0]["parts"].items():
            parts = [rank["parts"][name] for rank in ranks]
            if name in sharded:
                self.tensors[name] = torch.cat(parts, dim=0)
            elif all(same_bits(first, part).all() for part in parts):
                self.tensors[name] = first
            else:
                raise ValueError(f"the saving ranks hold different values of `{name}`")

    def compare(self, trainer: Trainer, world_size: int) -> tuple[Tally, Tally]:
        """Returns the tallies of the parameters and of the optimizer's state on this rank."""
        tensors = live_tensors(trainer)
        if tensors.keys() != self.tensors.keys():
            raise ValueError(f"only on one side: {sorted(tensors.keys() ^ self.tensors.keys())}")
        if trainer.step != self.step:
            raise ValueError(f"`step` is {trainer.step}, saved {self.step}")
        for live, saved in zip(group_settings(trainer), self.groups, strict=True):
            for key in live.keys() | saved.keys():
                if live.get(key) != saved.get(key):
                    raise ValueError(
                        f"group setting `{key}` is {live.get(key)!r}, saved {saved.get(key)!r}"
                    )
        tallies = {"model": Tally(), "optimizer": Tally()}
        for name, tensor in tensors.items():
            full = self.tensors[name]
            if tensor.shape != full.shape:
                raise ValueError(f"`{name}` is {tuple(tensor.shape)}, saved {tuple(full.shape)}")
            expected, shards = own_slice(full, tensor)
            equal = same_bits(local(tensor), expected)
            tally = tallies[name.partition(".")[0]]
            tally.differ += int((~equal).sum())
            tally.compared += equal.numel()
            tally.full += full.numel() * world_size // shards
        return tallies["model"], tallies["optimizer"]


def same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Returns for each element whether both tensors have the same bits there."""
    if (left.shape, left.dtype) != (right.shape, right.dtype):
        raise ValueError(
            f"{left.dtype} {tuple(left.shape)} against {right.dtype} {tuple(right.shape)}"
        )
    integer = _INTEGER_OF_WIDTH[left.element_size()]
    return left.contiguous().view(integer) == right.contiguous().view(integer)


def own_slice(full: Tensor, tensor: Tensor) -> tuple[Tensor, int]:
    """Returns the part of `full` that this rank's `tensor` should be, and the number of parts.

    Tensor parallelism cuts first, along the dim of its plan; FSDP2 cuts what is left, along dim 0;
    an axis of replicas cuts nothing. Both cut as `torch.chunk` does: all parts but the last ones
    have ceil(size / ranks) rows, the last ones may be smaller or empty.
    """
    shards = 1
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names = mesh.mesh_dim_names or ()
        for axis in ("tp", "fsdp"):
            if axis not in names or tensor.placements[names.index(axis)].is_replicate():
                continue
            placement = tensor.placements[names.index(axis)]
            dim = placement.dim if axis == "tp" and isinstance(placement, Shard) else 0
            size = mesh[axis].size()
            rows = -(-full.shape[dim] // size)
            start = min(mesh[axis].get_local_rank() * rows, full.shape[dim])
            full = full.narrow(dim, start, min(rows, full.shape[dim] - start))
            shards *= size
    return full, shards
