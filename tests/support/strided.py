"""FSDP2 over tensor parallelism, in all small sizes: what each rank holds, cut by hand."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcp_reshard.sharding import Cut, Run, apply_cuts, held_runs

__all__ = [
    "COMBINATIONS",
    "chunk",
    "fsdp_over_tp",
    "held_by",
    "recorded_and_held",
    "strided_placements",
    "wrong_layouts",
]

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


def recorded_and_held(rows: int, axes: Sequence[int]) -> list[tuple[Run, Run]]:
    """For each rank: what torch 2.13 records, and what it holds. FSDP's axis first."""
    factor = math.prod(axes[1:])
    pairs = []
    for coordinate in itertools.product(*map(range, axes)):
        cuts = [Cut(0, axes[0], coordinate[0], split_factor=factor)]
        cuts += [Cut(0, n, c) for n, c in zip(axes[1:], coordinate[1:], strict=True)]
        found = []
        for runs in (apply_cuts(rows, cuts), held_runs(rows, cuts)):
            length = sum(run.length for run in runs)
            found.append(Run(runs[0].start, length) if runs else Run(rows, 0))
        pairs.append((found[0], found[1]))
    return pairs


@functools.cache
def wrong_layouts() -> dict[tuple[int, int, int], list[tuple[Run, Run]]]:
    """The combinations that torch 2.13 records wrongly, and `recorded_and_held` of each."""
    described = {
        (rows, dp, tp): recorded_and_held(rows, (dp, tp))
        for rows, dp, tp in COMBINATIONS
        if dp > 1 and tp > 1
    }
    return {key: pairs for key, pairs in described.items() if any(a != b for a, b in pairs)}
