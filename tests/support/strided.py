"""FSDP2 over tensor parallelism, in all small sizes: what each rank holds, cut by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["COMBINATIONS", "chunk", "fsdp_over_tp", "held_by", "strided_placements"]

COMBINATIONS = list(itertools.product(range(1, 31), range(1, 7), range(1, 7)))
"""Rows, dp and tp: 1080 in all."""


def chunk(tensor: torch.Tensor, pieces: int, index: int, dim: int = 0) -> torch.Tensor:
    """Part `index` of `tensor.chunk(pieces, dim)`, which may have fewer parts than asked for."""
    parts = tensor.chunk(pieces, dim)
    return parts[index] if index < len(parts) else tensor.narrow(dim, 0, 0)


def held_by(full: torch.Tensor, dp: Sequence[int], tp: Sequence[int]) -> torch.Tensor:
    """What a rank holds: tensor parallelism cuts the rows first, FSDP what is left of them.

    Args:
        full: The whole tensor.
        dp: Size of the axis, coordinate of the rank.
        tp: The same.
    """
    return chunk(chunk(full, *tp), *dp)


def strided_placements(tp: int) -> list[Placement]:
    """As FSDP2 writes them for rows that both axes cut."""
    return [_StridedShard(0, split_factor=tp) if tp > 1 else Shard(0), Shard(0)]


def fsdp_over_tp(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """The parameter of a rank under FSDP2 over tensor parallelism, as `fully_shard` makes it."""
    dp, tp = mesh.size(0), mesh.size(1)
    row, column = mesh.get_coordinate() or (0, 0)
    local = held_by(full, (dp, row), (tp, column)).clone()
    return DTensor.from_local(
        local,
        mesh,
        strided_placements(tp),
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
