"""Checkpoints that stock torch wrote wrongly: restored where that is possible, else refused."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_reshard
from dcp_reshard import ChunkCoverageError, ReshardStorageReader
from dcp_reshard.metadata import DcpCheckpoint
from dcp_reshard.storage import LocalSource
from tests.support.checkpoints import check_world_loads, load_world, save_world
from tests.support.failures import catch_failure
from tests.support.sources import RecordingSource
from tests.support.strided import chunk, fsdp_over_tp, wrong_layouts
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world

State = dict[str, Any]


def our_load(path: Path, **options: Any) -> Callable[[State], object]:
    return lambda state: dcp_reshard.load(state, path, no_dist=True, **options)


def states(rows: Sequence[int], mesh_shape: tuple[int, int]) -> Callable[[int], State]:
    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", mesh_shape)
        return {str(n): fsdp_over_tp(indexed_tensor((n, 2)), mesh) for n in rows}

    return make


MESHES = sorted({(dp, tp) for _, dp, tp in wrong_layouts()})


def rows_of(mesh_shape: tuple[int, int]) -> list[int]:
    return [rows for rows, *mesh in wrong_layouts() if tuple(mesh) == mesh_shape]


@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_saves_without_collectives_are_restored(
    tmp_path: Path, mesh_shape: tuple[int, int]
) -> None:
    """Per-rank metadata hold all records: each of the 45 is restored, under any layout."""
    rows = rows_of(mesh_shape)
    size = math.prod(mesh_shape)
    make = states([*rows, 30], mesh_shape)
    save_world(tmp_path, size, make, use_collectives=False)
    wholes = {str(n): indexed_tensor((n, 2)) for n in (*rows, 30)}
    report = dcp_reshard.load({n: torch.zeros_like(t) for n, t in wholes.items()}, tmp_path)
    assert sorted(report.repaired) == sorted(map(str, rows))
    assert "repaired" in str(report)
    check_world_loads(1, lambda _: wholes, our_load(tmp_path))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=lambda shape: f"{shape[0]}x{shape[1]}")
def test_what_stock_accepts_is_restored_or_refused(
    tmp_path: Path, mesh_shape: tuple[int, int]
) -> None:
    """Of each of the 45 that `dcp.save` accepts, either every element comes back, or none does."""
    for rows in rows_of(mesh_shape):
        path = tmp_path / str(rows)
        with contextlib.suppress(ValueError):  # "Failed to validate global plan"
            save_world(path, math.prod(mesh_shape), states([rows], mesh_shape))
        if not (path / ".metadata").exists():
            continue
        full = indexed_tensor((rows, 2))
        state = {str(rows): torch.full_like(full, -1)}
        if lost(path, full):
            error = catch_failure(lambda state=state, path=path: our_load(path)(state))
            assert isinstance(error, ChunkCoverageError)
            assert f"tensor `{rows}`: " in str(error)
            assert "no layout explains that without loss; the checkpoint itself is wrong" in str(
                error
            )
            assert bool((state[str(rows)] == -1).all())
        else:
            report = dcp_reshard.load(state, path)
            assert torch.equal(state[str(rows)], full)
            assert report.repaired == (str(rows),)


def lost(path: Path, full: torch.Tensor) -> bool:
    """Whether some element of the tensor is in none of the records of the checkpoint."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    found = []
    for place in metadata.storage_data.values():
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            found.append(torch.load(io.BytesIO(file.read(place.length))).flatten())
    return len(torch.cat(found).unique()) < full.numel()


AXES = {
    "tensor_parallel_columns": ((3, 2, 2), [_StridedShard(0, split_factor=2), Shard(0), Shard(1)]),
    "replicas": ((2, 3, 2), [Replicate(), _StridedShard(0, split_factor=2), Shard(0)]),
    "two_inner_axes": ((2, 2, 2), [_StridedShard(0, split_factor=4), Shard(0), Shard(0)]),
}


@pytest.mark.parametrize("use_collectives", [True, False])
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("tensor_parallel_columns", (7, 5)),
        ("tensor_parallel_columns", (7, 1)),
        ("tensor_parallel_columns", (7, 9000)),
        ("replicas", (7, 3)),
        ("two_inner_axes", (10, 3)),
    ],
)
def test_further_axes(
    tmp_path: Path, name: str, shape: tuple[int, int], *, use_collectives: bool
) -> None:
    """Other dims that are cut as well, replicas, and two axes below FSDP are restored, too."""
    mesh_shape, placements = AXES[name]
    full = indexed_tensor(shape)

    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", mesh_shape)
        local = full
        for axis in (1, 2, 0) if name != "replicas" else (2, 1):
            dim = getattr(placements[axis], "dim", 0)
            local = chunk(local, mesh_shape[axis], mesh.get_local_rank(axis), dim)
        local = local.clone()
        return {
            "w": DTensor.from_local(
                local, mesh, placements, run_check=False, shape=shape, stride=(shape[1], 1)
            )
        }

    size = math.prod(mesh_shape)
    save_world(tmp_path, size, make, use_collectives=use_collectives)
    state = {"w": torch.full(shape, -1.0)}
    assert dcp_reshard.load(state, tmp_path).repaired == ("w",)
    assert torch.equal(state["w"], full)
    check_world_loads(size, make, our_load(tmp_path))


def test_resuming_on_the_same_mesh(tmp_path: Path) -> None:
    """7 rows over 3 x 2: where stock fails or leaves a row unfilled, each rank gets its own."""
    make = states([7, 8], (3, 2))
    save_world(tmp_path, 6, make)
    check_world_loads(6, make, our_load(tmp_path))

    def stock(state: State) -> None:
        for tensor in state.values():
            tensor.to_local().fill_(-1)
        dcp.load(state, checkpoint_id=tmp_path, no_dist=True)

    wrong = []
    for rank in range(6):
        with fake_world(rank, 6):
            try:
                stock(make(rank))
            except dcp.api.CheckpointException:
                wrong.append(rank)
    loaded = load_world(6, make, lambda state: None if dist_rank() in wrong else stock(state))
    unfilled = [r for r, s in enumerate(loaded) if bool((s["7"].to_local() == -1).any())]
    # If torch has been corrected, neither happens any more.
    assert wrong or unfilled


def dist_rank() -> int:
    return torch.distributed.get_rank()


def test_stock_planner_gets_the_true_boxes(tmp_path: Path) -> None:
    """The metadata that our reader gives to torch's planner are the corrected ones."""
    save_world(tmp_path, 6, states([7], (3, 2)))
    state = {"7": torch.full((7, 2), -1.0)}
    dcp.load(state, storage_reader=ReshardStorageReader(tmp_path), no_dist=True)
    assert torch.equal(state["7"], indexed_tensor((7, 2)))


def test_a_wrong_tensor_that_nobody_wants(tmp_path: Path) -> None:
    """Tensors that cannot be restored do not keep others from being loaded."""
    save_world(tmp_path, 10, states([11, 12, 17], (5, 2)))
    full = {str(n): indexed_tensor((n, 2)) for n in (11, 12, 17)}
    catalog = DcpCheckpoint(tmp_path).read_catalog(LocalSource(tmp_path))
    assert "the checkpoint itself is wrong" in catalog.tensors["11"].defect
    assert not catalog.tensors["12"].defect
    state = {"12": torch.zeros(12, 2)}
    dcp_reshard.load(state, tmp_path)
    assert torch.equal(state["12"], full["12"])


def test_nothing_is_read_of_right_checkpoints(tmp_path: Path) -> None:
    """Uneven, empty and tiny chunks that are what they seem to be cost no request."""
    rows = [n for n in range(1, 31) if (n, 4, 3) not in wrong_layouts()]
    save_world(tmp_path, 12, states(rows, (4, 3)))
    source = RecordingSource(LocalSource(tmp_path))
    DcpCheckpoint(tmp_path).read_catalog(source)
    assert {request.name for request in source.requests} == {".metadata"}


def test_damaged_records_are_not_repaired(tmp_path: Path) -> None:
    """If a record of such a tensor cannot be read, the load that wants it says so, and only it."""
    save_world(tmp_path, 6, states([7, 8], (3, 2)))
    metadata = dcp.FileSystemReader(tmp_path).read_metadata()
    place = next(p for i, p in metadata.storage_data.items() if (i.fqn, i.offset[0]) == ("7", 0))
    with (tmp_path / place.relative_path).open("r+b") as file:
        file.seek(place.offset)
        file.write(b"\0" * place.length)
    state = {"8": torch.zeros(8, 2)}
    dcp_reshard.load(state, tmp_path)
    error = catch_failure(lambda: dcp_reshard.load({"7": torch.zeros(7, 2)}, tmp_path))
    assert "`7`" in str(error)
