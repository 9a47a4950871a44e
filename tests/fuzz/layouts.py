"""Layouts drawn at random: any way in which torch can spread a tensor over ranks.

A layout knows the whole tensor, and makes what a rank holds of it by `torch.chunk`, by slicing, or
by torch's own `distribute_tensor`. Nothing of this package is used, so a load can be compared with
it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcp_reshard.box import Box
from dcp_reshard.sharding import chunk_bounds
from tests.support.sharded import sharded_tensor
from tests.support.strided import chunk

__all__ = ["DTYPES", "Layout", "World", "draw_layout", "draw_shape", "draw_world"]

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
]

Make = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class World:
    """A number of ranks, and the shape of the mesh of all of them."""

    mesh_shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return math.prod(self.mesh_shape)


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to hold a tensor; `make` is called in the world of a rank."""

    text: str
    make: Make


def draw_world(rng: random.Random, *, max_ranks: int = 8) -> World:
    """A mesh of one to three axes."""
    while True:
        shape = tuple(rng.choice((1, 2, 2, 3, 4)) for _ in range(rng.randint(1, 3)))
        if math.prod(shape) <= max_ranks:
            return World(shape)


def draw_shape(rng: random.Random) -> tuple[int, ...]:
    """Up to four dims, most not divisible by the numbers of ranks, some without elements."""
    sides = (0, 1, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9, 11, 13, 16, 17, 21)
    return tuple(rng.choice(sides) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3, 4))))


def draw_layout(rng: random.Random, world: World, shape: Sequence[int]) -> Layout:
    """Any layout that a tensor of this shape can have in this world, in memory of any strides."""
    kinds = [_plain, _placements, _placements]
    if shape:
        kinds += [_cuts, _cuts, _cuts, _order, _sub_mesh]
    if math.prod(shape) and shape:
        kinds += [_sharded, _nested]
    if len(shape) == 1 and shape[0] > 1:
        kinds += [_view]
    layout = rng.choice(kinds)(rng, world, tuple(shape))
    text, put = _draw_memory(rng, len(shape))
    return Layout(f"{layout.text}{text}", lambda full: _in_memory(layout.make(full), put))


def _draw_memory(rng: random.Random, ndim: int) -> tuple[str, Make]:
    """How local tensors lie in memory: dims in any order, with gaps, behind others, or as usual."""
    kind = rng.choice(("", "", "", "gaps", "behind", "order", "order"))
    if kind == "order":
        order = rng.sample(range(ndim), ndim)
        back = [order.index(dim) for dim in range(ndim)]
        return f" in order {order}", lambda t: t.permute(order).contiguous().permute(back)

    def put(tensor: torch.Tensor) -> torch.Tensor:
        if kind == "gaps":
            room = tensor.new_empty([size + 3 for size in tensor.shape])
            return room[(slice(1, -2),) * ndim].copy_(tensor)
        room = tensor.new_empty(tensor.numel() + 5)
        return room[5:].view(tensor.shape).copy_(tensor) if kind else tensor

    return f" with {kind}" if kind else "", put


def _in_memory(value: torch.Tensor, put: Make) -> torch.Tensor:
    """The same value, with local tensors of this rank made by `put` from those that it has."""
    if isinstance(value, ShardedTensor):
        for shard in value.local_shards():
            shard.tensor = _in_memory(shard.tensor, put)
        return value
    if isinstance(value, DTensor):
        local = value.to_local()
        # On ranks outside of the mesh it has another number of dims.
        local = put(local) if local.ndim == value.ndim else local
        return DTensor(local, value._spec, requires_grad=False)
    return put(value)


def _plain(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    return Layout("plain", torch.Tensor.clone)


def _coordinate(mesh: DeviceMesh) -> list[int]:
    found = mesh.get_coordinate()
    assert found is not None
    return list(found)


def _from_local(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], full: torch.Tensor
) -> DTensor:
    return DTensor.from_local(
        local.clone(memory_format=torch.contiguous_format),
        mesh,
        placements,
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def _draw_cuts(rng: random.Random, world: World, ndim: int) -> list[tuple[int, int]]:
    """Mesh axis and dim of each cut, in the order in which they are made."""
    cuts = [(axis, rng.randrange(ndim)) for axis in range(len(world.mesh_shape))]
    if rng.random() < 0.5:
        # Axes that cut the same dim are what is hard.
        cuts = [(axis, cuts[0][1]) for axis, _ in cuts]
    cuts = [cut for cut in cuts if rng.random() < 0.85]
    rng.shuffle(cuts)
    return cuts


def _cut(full: torch.Tensor, mesh: DeviceMesh, cuts: Sequence[tuple[int, int]]) -> torch.Tensor:
    coordinate = _coordinate(mesh)
    for axis, dim in cuts:
        full = chunk(full, mesh.size(axis), coordinate[axis], dim)
    return full


def _cuts(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    """Cuts in any order, as FSDP2 writes them: strided where an axis to the right was first."""
    cuts = _draw_cuts(rng, world, len(shape))
    placements: list[Placement] = [Replicate() for _ in world.mesh_shape]
    for number, (axis, dim) in enumerate(cuts):
        pieces = math.prod(world.mesh_shape[a] for a, d in cuts[:number] if d == dim and a > axis)
        placements[axis] = _StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)

    def make(full: torch.Tensor) -> torch.Tensor:
        mesh = init_device_mesh("cpu", world.mesh_shape)
        return _from_local(_cut(full, mesh, cuts), mesh, placements, full)

    return Layout(f"cuts {cuts}", make)


def _order(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    """The same, written as plain shards with an explicit order of the axes."""
    cuts = _draw_cuts(rng, world, len(shape))
    placements: list[Placement] = [Replicate() for _ in world.mesh_shape]
    for axis, dim in cuts:
        placements[axis] = Shard(dim)
    dims = sorted({dim for _, dim in cuts})
    order = tuple((dim, tuple(axis for axis, d in cuts if d == dim)) for dim in dims)

    def make(full: torch.Tensor) -> torch.Tensor:
        mesh = init_device_mesh("cpu", world.mesh_shape)
        meta = TensorMeta(full.shape, full.stride(), full.dtype)
        entries = tuple(ShardOrderEntry(dim, axes) for dim, axes in order)
        spec = DTensorSpec(mesh, tuple(placements), meta, shard_order=entries)
        local = _cut(full, mesh, cuts).clone(memory_format=torch.contiguous_format)
        return DTensor(local, spec, requires_grad=False)

    return Layout(f"order {order}", make)


def _placements(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    """Any placements and split factors, as torch decodes them, or by definition if it can't."""
    placements: list[Placement] = []
    for _ in world.mesh_shape:
        if not shape or rng.random() < 0.2:
            placements.append(Replicate())
        elif rng.random() < 0.5:
            placements.append(Shard(rng.randrange(-len(shape), len(shape))))
        else:
            dim = rng.randrange(len(shape))
            placements.append(_StridedShard(dim, split_factor=rng.randint(1, 5)))

    def make(full: torch.Tensor) -> torch.Tensor:
        mesh = init_device_mesh("cpu", world.mesh_shape)
        plain = [_from_front(placement, full.ndim) for placement in placements]
        order = DTensorSpec._maybe_convert_StridedShard_to_shard_order(tuple(plain), mesh)
        if order is None:
            return distribute_tensor(full, mesh, plain, src_data_rank=None)
        cuts = [(axis, entry.tensor_dim) for entry in order for axis in entry.mesh_dims]
        return _from_local(_cut(full, mesh, cuts), mesh, placements, full)

    return Layout(f"placements {placements}", make)


def _from_front(placement: Placement, ndim: int) -> Placement:
    if isinstance(placement, Shard) and placement.dim < 0:
        return Shard(placement.dim + ndim)
    return placement


def _sub_mesh(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    """A mesh of some of the ranks, in any order, of one or two axes; the others hold nothing."""
    ranks = rng.sample(range(world.size), rng.randint(1, world.size))
    if len(ranks) % 2 == 0 and rng.random() < 0.5:
        inner = World((2, len(ranks) // 2))
        cuts = [(axis, rng.randrange(len(shape))) for axis in range(2) if rng.random() < 0.8]
    else:
        inner = World((len(ranks),))
        cuts = [(0, rng.randrange(len(shape)))]
    placements: list[Placement] = [Replicate() for _ in inner.mesh_shape]
    for axis, dim in cuts:
        placements[axis] = Shard(dim)

    def make(full: torch.Tensor) -> torch.Tensor:
        mesh = DeviceMesh("cpu", torch.tensor(ranks).view(inner.mesh_shape))
        inside = dist.get_rank() in ranks
        local = _cut(full, mesh, cuts) if inside else full.new_empty(0)
        return _from_local(local, mesh, placements, full)

    return Layout(f"sub-mesh {ranks} {inner.mesh_shape} cuts {cuts}", make)


def _sharded(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    """A ShardedTensor of any boxes on any ranks."""
    boxes = [Box.full(shape)]
    for _ in range(rng.randint(0, 6)):
        index = rng.randrange(len(boxes))
        dims = [d for d, side in enumerate(boxes[index].sizes) if side > 1]
        if dims:
            box, dim = boxes.pop(index), rng.choice(dims)
            first = rng.randint(1, box.sizes[dim] - 1)
            for start, size in ((0, first), (first, box.sizes[dim] - first)):
                offsets, sizes = list(box.offsets), list(box.sizes)
                offsets[dim] += start
                sizes[dim] = size
                boxes.append(Box(tuple(offsets), tuple(sizes)))
    placed = [(box, rng.randrange(world.size)) for box in boxes]
    text = ", ".join(f"{box} on {rank}" for box, rank in placed)
    return Layout(f"sharded tensor {text}", lambda full: sharded_tensor(full, placed))


def _nested(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    """Parts along a dim, over ranks in any order, each a ShardedTensor of parts along some dim."""
    dim, inner_dim = rng.randrange(len(shape)), rng.randrange(len(shape))
    ranks = rng.sample(range(world.size), world.size)
    pieces = rng.randint(1, 3)

    def parts(box: Box, along: int, number: int) -> list[Box]:
        bounds = [chunk_bounds(box.sizes[along], number, i) for i in range(number)]
        return [
            Box(
                tuple(low * (d == along) for d in range(len(shape))),
                tuple(high - low if d == along else n for d, n in enumerate(box.sizes)),
            )
            for low, high in bounds
            if low < high
        ]

    def make(full: torch.Tensor) -> torch.Tensor:
        placed = list(zip(parts(Box.full(shape), dim, world.size), ranks, strict=False))

        def inner(box: Box) -> torch.Tensor:
            boxes = [(part, dist.get_rank()) for part in parts(box, inner_dim, pieces)]
            return sharded_tensor(full[box.slices()], boxes)

        return sharded_tensor(full, placed, make_local=inner)

    return Layout(f"nested over {ranks} dim {dim}, in {pieces} along {inner_dim}", make)


def _view(rng: random.Random, world: World, shape: tuple[int, ...]) -> Layout:
    """A matrix of columns over all ranks, flattened."""
    [length] = shape
    # torch does not flatten columns of one element.
    rows = rng.choice([n for n in range(1, length) if length % n == 0])

    def make(full: torch.Tensor) -> torch.Tensor:
        mesh = init_device_mesh("cpu", (world.size,))
        matrix = distribute_tensor(
            full.reshape(rows, length // rows), mesh, [Shard(1)], src_data_rank=None
        )
        return matrix.flatten()

    return Layout(f"view of {rows} rows", make)
