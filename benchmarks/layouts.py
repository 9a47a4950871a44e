"""Layouts by name: how a job of so many ranks cuts every parameter.

``fsdp8`` cuts rows, ``col8`` the last dim, ``tp8`` as Llama is cut for tensor parallelism,
``hsdp2x4`` is 2 replicas of 4 shards, and ``fsdp4_tp2`` is both on a mesh of 4 x 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["Layout", "Shape", "parse_layout"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, and how it cuts a parameter."""

    mesh: Shape
    """Sizes of the mesh axes."""

    place: Callable[[str, Shape], list[Placement]]
    """Placements of a parameter, by its name and shape."""

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return prod(self.mesh)


def _tensor_parallel(fqn: str, shape: Shape) -> Placement:
    if len(shape) < 2:
        return Replicate()
    return Shard(1) if re.search(r"\.(wo|w2)\.", fqn) else Shard(0)


def _strided(axis: int) -> Callable[[str, Shape], list[Placement]]:
    """FSDP2 on the left of tensor parallelism of `axis` ranks, which cuts first."""

    def place(fqn: str, shape: Shape) -> list[Placement]:
        inner = _tensor_parallel(fqn, shape)
        outer = _StridedShard(0, split_factor=axis) if inner == Shard(0) else Shard(0)
        return [outer, inner]

    return place


def parse_layout(name: str) -> Layout:
    """A layout from its name.

    Raises:
        ValueError: It is not a name of this form.

    Example:
        >>> parse_layout("hsdp2x4").ranks
        8
    """
    mesh = tuple(int(number) for number in re.findall(r"\d+", name))
    kind = re.sub(r"\d+", "#", name)
    if 0 not in mesh:
        match kind:
            case "fsdp#":
                return Layout(mesh, lambda fqn, shape: [Shard(0)])
            case "tp#":
                return Layout(mesh, lambda fqn, shape: [_tensor_parallel(fqn, shape)])
            case "col#":
                return Layout(mesh, lambda fqn, shape: [Shard(len(shape) - 1)])
            case "hsdp#x#":
                return Layout(mesh, lambda fqn, shape: [Replicate(), Shard(0)])
            case "fsdp#_tp#":
                return Layout(mesh, _strided(mesh[1]))
    raise ValueError(f"layout {name!r} is not fsdpN, tpN, colN, hsdpNxM or fsdpN_tpM")
