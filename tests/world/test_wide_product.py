"""Layouts beyond those of everyday training, each loaded from each other, through real saves.

The sources are saved by `ReshardSavePlanner`: most of them are what stock refuses or records
wrongly. The everyday layouts are in `test_layout_product`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dcp_reshard
from dcp_reshard import ReshardSavePlanner
from dcp_reshard.box import Box
from tests.support.checkpoints import check_world_loads, save_world
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.strided import chunk
from tests.support.tensors import indexed_tensor

# One layout has it; what is stored here is as it was recorded.
pytestmark = pytest.mark.filterwarnings("ignore::dcp_reshard.ShardOrderWarning")

State = dict[str, Any]
SHAPES = [(13,), (3,), (24,), (7, 5), (11, 4, 3), (0, 4)]


@dataclass(frozen=True, slots=True)
class Wide:
    """How the ranks of a mesh hold a tensor."""

    mesh_shape: tuple[int, ...]
    make: Callable[[torch.Tensor, DeviceMesh], torch.Tensor]

    def state(self, rank: int) -> State:
        """All tensors as this rank holds them; to be called in its world."""
        mesh = init_device_mesh("cpu", self.mesh_shape)
        return {str(shape): self.make(indexed_tensor(shape), mesh) for shape in SHAPES}

    @property
    def size(self) -> int:
        return math.prod(self.mesh_shape)


def part_of(full: torch.Tensor, mesh: DeviceMesh, order: Sequence[int], dim: int) -> torch.Tensor:
    """What is left of a tensor when axes have cut a dim in this order."""
    for axis in order:
        full = chunk(full, mesh.size(axis), mesh.get_local_rank(axis), dim)
    return full.clone(memory_format=torch.contiguous_format)


def cuts(order: Sequence[int], *, dim: int = 0) -> Callable[..., torch.Tensor]:
    """Axes cut a dim in this order, written with strided placements as FSDP2 writes them."""

    def make(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        along = min(dim, full.ndim - 1)
        placements: list[Placement] = [Replicate()] * mesh.ndim
        for number, axis in enumerate(order):
            pieces = math.prod(mesh.size(a) for a in order[:number] if a > axis)
            strided = _StridedShard(along, split_factor=pieces)
            placements[axis] = strided if pieces > 1 else Shard(along)
        return DTensor.from_local(
            part_of(full, mesh, order, along),
            mesh,
            placements,
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )

    return make


def explicit(order: Sequence[int]) -> Callable[..., torch.Tensor]:
    """The same, written as plain shards and an order of the axes."""

    def make(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        meta = TensorMeta(full.shape, full.stride(), full.dtype)
        entries = (ShardOrderEntry(0, tuple(order)),)
        spec = DTensorSpec(mesh, (Shard(0),) * mesh.ndim, meta, shard_order=entries)
        return DTensor(part_of(full, mesh, order, 0), spec, requires_grad=False)

    return make


def by_definition(*placements: Any) -> Callable[..., torch.Tensor]:
    """Strided placements that mean no order of cuts, as `distribute_tensor` cuts."""
    return lambda full, mesh: distribute_tensor(full, mesh, placements, src_data_rank=None)


def both_dims(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    last = _StridedShard(full.ndim - 1, split_factor=3)
    return by_definition(last, _StridedShard(0, split_factor=3))(full, mesh)


def view(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Columns, and where the tensor is a vector, the flattened columns of a matrix."""
    if full.ndim > 1 or full.numel() != 24:
        return distribute_tensor(full, mesh, [Shard(full.ndim - 1)], src_data_rank=None)
    return distribute_tensor(full.view(4, 6), mesh, [Shard(1)], src_data_rank=None).flatten()


def sub_mesh(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """On two of the ranks, in reverse."""
    inner = DeviceMesh("cpu", torch.tensor([3, 1]))
    return distribute_tensor(full, inner, [Shard(0)], src_data_rank=None)


def bricks(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Boxes of several ranks, several of them on rank 2, none on rank 0."""
    if full.numel() == 0:
        return full
    boxes = []
    for box, number in row_boxes(full.shape, 5):
        ranks = (2, 1, 2, 3, 2)
        boxes.append((box, ranks[number]))
    return sharded_tensor(full, boxes)


def nested(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """Tensor parallelism inside data parallelism: columns in halves, in the halves of the rows."""
    if full.ndim < 2 or min(full.shape[:2]) < 2:
        return full
    row, column = divmod(dist.get_rank(), 2)
    half = -(-full.shape[1] // 2)
    rest, zeros = tuple(full.shape[2:]), (0,) * (full.ndim - 2)

    def inner(box: Box) -> torch.Tensor:
        widths = (half, full.shape[1] - half)
        boxes = [
            (Box((0, c * half, *zeros), (box.sizes[0], widths[c], *rest)), 2 * row + c)
            for c in range(2)
        ]
        return sharded_tensor(full[box.slices()], boxes)

    outer = [(box, 2 * number + column) for box, number in row_boxes(full.shape, 2)]
    return sharded_tensor(full, outer, make_local=inner)


LAYOUTS = {
    "plain": Wide((1,), lambda full, mesh: full),
    "fsdp3": Wide((3,), cuts([0])),
    "fsdp_over_tp": Wide((3, 2), cuts([1, 0])),
    "fsdp_over_tp_columns": Wide((2, 3), cuts([1, 0], dim=1)),
    "fsdp_over_ep_and_tp": Wide((2, 2, 2), cuts([1, 2, 0])),
    "last_to_first": Wide((2, 2, 2), cuts([2, 1, 0])),
    "middle_first": Wide((2, 3, 1), cuts([1, 0, 2])),
    "explicit_order": Wide((2, 3), explicit([1, 0])),
    "factor_2": Wide((3,), by_definition(_StridedShard(0, split_factor=2))),
    "shard_then_strided": Wide((2, 2), by_definition(Shard(0), _StridedShard(0, split_factor=2))),
    "both_dims": Wide((2, 2), both_dims),
    "view": Wide((3,), view),
    "sub_mesh": Wide((4,), sub_mesh),
    "bricks": Wide((4,), bricks),
    "nested": Wide((4,), nested),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes the checkpoint of a layout, once."""
    paths: dict[str, Path] = {}

    def store(name: str) -> Path:
        if name not in paths:
            paths[name] = tmp_path_factory.mktemp(name)
            layout = LAYOUTS[name]
            save_world(paths[name], layout.size, layout.state, planner=ReshardSavePlanner)
        return paths[name]

    return store


@pytest.mark.parametrize("dest", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_loads_from_any_other(
    source: str, dest: str, stored: Callable[[str], Path]
) -> None:
    """Every rank of the destination gets the elements of its own part, and no others."""
    path = stored(source)
    layout = LAYOUTS[dest]
    check_world_loads(
        layout.size, layout.state, lambda state: dcp_reshard.load(state, path, no_dist=True)
    )
