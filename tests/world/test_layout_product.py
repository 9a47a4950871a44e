"""Every layout of the field loads from every other, rank by rank.

The oracle is `torch.chunk` applied to the whole tensor, cut after cut in the order in which the
cuts were made. A layout's placements follow from these cuts, not the other way round::

    FSDP2 over TP, mesh (dp=3, tp=2):  cuts (tp, dim 0), (dp, dim 0)
                                       placements [_StridedShard(0, split_factor=2), Shard(0)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dcp_reshard import ReshardLoadPlanner, ReshardStorageReader
from tests.support.checkpoints import save_world
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world

Cut = tuple[int, int]
"""Mesh axis, and the tensor dim that it cuts."""

# Dims smaller than, equal to, and not divisible by the numbers of ranks; tensors without dims and
# without elements; two whose parts are read by range even when eight ranks share them.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "scalar": ((), torch.int64),
    "none": ((0,), torch.float32),
    "no_columns": ((3, 0), torch.float32),
    "no_rows": ((0, 4), torch.bfloat16),
    "one": ((1,), torch.int16),
    "few": ((3,), torch.float64),
    "eight": ((8,), torch.int8),
    "thirteen": ((13,), torch.complex64),
    "seven": ((7,), torch.uint8),
    "flags": ((11, 3), torch.bool),
    "narrow": ((2, 3), torch.bfloat16),
    "odd": ((5, 7), torch.float16),
    "square": ((8, 8), torch.float32),
    "odd_rows": ((13, 9), torch.int32),
    "bytes": ((6, 10), torch.float8_e4m3fn),
    "columns": ((1, 24), torch.float32),
    "long": ((30, 2), torch.uint32),
    "cube": ((4, 5, 6), torch.float64),
    "thin_cube": ((9, 1, 3), torch.complex128),
    "large": ((521, 130), torch.float32),
    "large_line": ((90001,), torch.int64),
}


@dataclass(frozen=True, slots=True)
class WorldLayout:
    """How the ranks of one world share tensors."""

    name: str
    mesh_shape: tuple[int, ...]
    cut: Callable[[int, int], tuple[Cut, ...]]
    """The cuts, in the order in which they are made, for a tensor's number of dims and its number
    in `TENSORS`."""
    kind: str = "dtensor"
    """``"dtensor"``, ``"sharded_tensor"`` or ``"plain"``."""

    @property
    def size(self) -> int:
        return math.prod(self.mesh_shape)

    def coordinate(self, rank: int) -> tuple[int, ...]:
        return list(itertools.product(*map(range, self.mesh_shape)))[rank]

    def cuts(self, name: str) -> tuple[Cut, ...]:
        ndim = len(TENSORS[name][0])
        return self.cut(ndim, list(TENSORS).index(name)) if ndim else ()

    def placements(self, name: str) -> list[Placement]:
        """As FSDP2 and `distribute_tensor` write these cuts: in the order of the mesh axes."""
        result: list[Placement] = [Replicate() for _ in self.mesh_shape]
        cuts = self.cuts(name)
        for number, (axis, dim) in enumerate(cuts):
            before = [a for a, d in cuts[:number] if d == dim and a > axis]
            pieces = math.prod(self.mesh_shape[a] for a in before)
            result[axis] = _StridedShard(dim, split_factor=pieces) if before else Shard(dim)
        return result

    def part(self, full: torch.Tensor, name: str, rank: int) -> torch.Tensor:
        """What the rank holds."""
        coordinate = self.coordinate(rank)
        for axis, dim in self.cuts(name):
            pieces = full.chunk(self.mesh_shape[axis], dim)
            number = coordinate[axis]
            full = pieces[number] if number < len(pieces) else full.narrow(dim, 0, 0)
        return full


def rows(ndim: int, number: int) -> tuple[Cut, ...]:
    return ((0, 0),)


def columns(ndim: int, number: int) -> tuple[Cut, ...]:
    return ((0, ndim - 1),)


def tensor_parallel(ndim: int, number: int) -> tuple[Cut, ...]:
    """Column-wise and row-wise layers by turns."""
    return ((0, (0, ndim - 1)[number % 2]),)


def rows_of_tensor_parallel(ndim: int, number: int) -> tuple[Cut, ...]:
    return ((1, (0, ndim - 1)[number % 2]), (0, 0))


def hybrid_rows(ndim: int, number: int) -> tuple[Cut, ...]:
    return ((1, 0),)


def hybrid_rows_of_tensor_parallel(ndim: int, number: int) -> tuple[Cut, ...]:
    return ((2, (0, ndim - 1)[number % 2]), (1, 0))


def grid(ndim: int, number: int) -> tuple[Cut, ...]:
    """Each axis cuts a dim of its own, as long as there are dims."""
    return tuple((axis, min(axis, ndim - 1)) for axis in range(3))


def whole(ndim: int, number: int) -> tuple[Cut, ...]:
    return ()


LAYOUTS = [
    *(WorldLayout(f"fsdp{n}", (n,), rows) for n in range(1, 9)),
    WorldLayout("tp2", (2,), tensor_parallel),
    WorldLayout("tp3", (3,), tensor_parallel),
    WorldLayout("fsdp2_x_tp2", (2, 2), rows_of_tensor_parallel),
    WorldLayout("fsdp3_x_tp2", (3, 2), rows_of_tensor_parallel),
    WorldLayout("fsdp2_x_tp3", (2, 3), rows_of_tensor_parallel),
    WorldLayout("hsdp2_x_2", (2, 2), hybrid_rows),
    WorldLayout("hsdp2_x_3", (2, 3), hybrid_rows),
    WorldLayout("columns4", (4,), columns),
    WorldLayout("replicated2", (2,), whole),
    WorldLayout("hsdp2_x_2_x_tp2", (2, 2, 2), hybrid_rows_of_tensor_parallel),
    WorldLayout("grid2_x_2_x_2", (2, 2, 2), grid),
    WorldLayout("fsdp1_of_4", (4,), rows, kind="sharded_tensor"),
    WorldLayout("plain", (1,), whole, kind="plain"),
]
STRIDED = {"fsdp2_x_tp2", "fsdp3_x_tp2", "fsdp2_x_tp3", "hsdp2_x_2_x_tp2"}

State = dict[str, Any]
StoreWorld = Callable[[WorldLayout], tuple[Path, list[str]]]
EnterRank = Callable[[WorldLayout, int], tuple[State, dict[str, torch.Tensor]]]


def make_value(layout: WorldLayout, name: str, rank: int, mesh: DeviceMesh | None) -> torch.Tensor:
    shape, dtype = TENSORS[name]
    full = indexed_tensor(shape, dtype)
    if layout.kind == "sharded_tensor" and full.numel():
        return sharded_tensor(full, row_boxes(shape, layout.size)) if shape else full
    if mesh is None:
        return full
    local = layout.part(full, name, rank).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local,
        mesh,
        layout.placements(name),
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )


def make_state(layout: WorldLayout, rank: int) -> State:
    """What a rank holds; to be called in its world."""
    mesh = init_device_mesh("cpu", layout.mesh_shape) if layout.kind == "dtensor" else None
    return {name: make_value(layout, name, rank, mesh) for name in TENSORS}


def stock_is_right(layout: WorldLayout, name: str) -> bool:
    """Whether torch 2.13's `dcp.save` describes what it stores of this tensor.

    It evaluates strided placements in the wrong order. For uneven sizes the box that it records is
    then not what the rank holds, and the checkpoint itself is wrong.
    """
    shape, _ = TENSORS[name]
    full = indexed_tensor(shape)
    for rank in range(layout.size):
        sizes, offsets = _compute_local_shape_and_global_offset(
            shape, layout.mesh_shape, layout.coordinate(rank), layout.placements(name)
        )
        box = tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))
        part = layout.part(full, name, rank)
        if part.numel() and not torch.equal(full[box], part):
            return False
    return True


@pytest.fixture(scope="module")
def store_world(tmp_path_factory: pytest.TempPathFactory) -> StoreWorld:
    """Writes the checkpoint of a layout, once; returns its path and the keys in it."""
    stored: dict[str, tuple[Path, list[str]]] = {}

    def store(layout: WorldLayout) -> tuple[Path, list[str]]:
        if layout.name not in stored:
            path = tmp_path_factory.mktemp(layout.name)
            keys = [name for name in TENSORS if stock_is_right(layout, name)]

            def make(rank: int) -> State:
                state = make_state(layout, rank)
                return {name: state[name] for name in keys}

            save_world(path, layout.size, make)
            stored[layout.name] = path, keys
        return stored[layout.name]

    return store


@pytest.fixture(scope="module")
def enter_rank() -> Iterator[EnterRank]:
    """Makes a rank's state and its right contents, once: meshes are readable after their world."""
    made: dict[tuple[str, int], tuple[State, dict[str, torch.Tensor]]] = {}

    def enter(layout: WorldLayout, rank: int) -> tuple[State, dict[str, torch.Tensor]]:
        if (layout.name, rank) not in made:
            state = make_state(layout, rank)
            made[layout.name, rank] = state, snapshot(state)
        return made[layout.name, rank]

    yield enter
    made.clear()


@pytest.mark.row("B46")
@pytest.mark.parametrize("dest", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("source", LAYOUTS, ids=lambda layout: layout.name)
def test_any_layout_loads_from_any_other(
    source: WorldLayout, dest: WorldLayout, store_world: StoreWorld, enter_rank: EnterRank
) -> None:
    """Every rank of the destination gets the elements of its own part, and no others."""
    path, keys = store_world(source)
    for rank in range(dest.size):
        with fake_world(rank, dest.size):
            whole_state, whole_wanted = enter_rank(dest, rank)
            state = {name: whole_state[name] for name in keys}
            wanted = {n: t for n, t in whole_wanted.items() if n.partition("[")[0] in state}
            fill_with_sentinel(state)
            dcp.load(
                state,
                storage_reader=ReshardStorageReader(path),
                planner=ReshardLoadPlanner(),
                no_dist=True,
            )
            check_same(snapshot(state), wanted, where=f"{dest.name}, rank {rank}")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_parts_of_all_ranks_cover_every_tensor(layout: WorldLayout) -> None:
    """What the product above compares with leaves no element out, so a full load was seen."""
    for name, (shape, _) in TENSORS.items():
        full = indexed_tensor(shape, torch.int64)
        parts = [layout.part(full, name, rank).flatten() for rank in range(layout.size)]
        assert torch.equal(torch.cat(parts).unique(), full.flatten()), name


def test_only_strided_sources_leave_tensors_out() -> None:
    """Sizes that stock stores wrongly are the only gap of the product, and a small one."""
    left_out = {
        layout.name: [name for name in TENSORS if not stock_is_right(layout, name)]
        for layout in LAYOUTS
    }
    assert {name for name, names in left_out.items() if names} <= STRIDED
    assert all(len(names) <= 4 for names in left_out.values()), left_out
    # If torch has been corrected, this file can do without its exception.
    assert left_out["fsdp3_x_tp2"], left_out
