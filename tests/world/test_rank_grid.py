"""`RankGrid`: files of every grid into every layout, with the bytes that this should take."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import FusedBlocks, RankGrid
from dcp_reshard.catalog import Catalog
from dcp_reshard.storage import ByteSource
from tests.support.rank_grids import safetensors_bytes, split_grid
from tests.support.sources import RecordingSource
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world

GRIDS = list(itertools.product((1, 2, 3, 4), (1, 2)))
QKV = FusedBlocks((12, 4, 4), unit=2)
FUSED = {"qkv.weight": QKV, "qkv.bias": QKV}
DIMS = {"rows": 0, "columns": 1, "uneven": 0, "narrow": 1, "qkv.weight": 0, "qkv.bias": 0}
FULL = {
    "rows": indexed_tensor((24, 5)),
    "columns": indexed_tensor((7, 12), torch.bfloat16),
    "uneven": indexed_tensor((13, 3), torch.float64),
    "narrow": indexed_tensor((3, 2)),
    "qkv.weight": indexed_tensor((20, 6)),
    "qkv.bias": indexed_tensor((20,)),
    "norm": indexed_tensor((11,)),
    "scalar": torch.tensor(2.5),
}


def save_grid(
    root: Path,
    full: Mapping[str, torch.Tensor],
    sizes: tuple[int, int],
    *,
    kind: str = "pt",
    more: Mapping[str, Any] | None = None,
    nest: bool = True,
) -> str:
    """Write the files of a grid, and return their template."""
    splits = {
        name: split_grid(tensor, sizes, DIMS.get(name), FUSED.get(name))
        for name, tensor in full.items()
    }
    for t, d in itertools.product(range(sizes[0]), range(sizes[1])):
        mine = {name: split[t][d].contiguous() for name, split in splits.items()}
        path = root / f"tp{t}.dp{d}.{kind}"
        if kind == "safetensors":
            path.write_bytes(safetensors_bytes(mine))
        else:
            torch.save({"model": mine, **(more or {})} if nest else mine, path)
    return f"{root}/tp{{tp}}.dp{{dp}}.{kind}"


@dataclass
class Recorded:
    """A grid whose source keeps what it is asked for."""

    grid: RankGrid
    source: RecordingSource | None = None

    def open(self) -> ByteSource:
        self.source = RecordingSource(self.grid.open())
        return self.source

    def read_catalog(self, source: ByteSource) -> Catalog:
        return self.grid.read_catalog(source)


def load_all(grid: RankGrid, make: Any, size: int) -> None:
    """Load on every rank of a fake world, and compare with what `make` makes."""
    for rank in range(size):
        with fake_world(rank, size):
            state = make()
            wanted = snapshot(state)
            fill_with_sentinel(state)
            dcp_reshard.load(state, grid, no_dist=True)
            check_same(snapshot(state), wanted, where=f"rank {rank} of {size}")


def make_fsdp() -> dict[str, Any]:
    """FSDP2 over all ranks."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    return {
        "model": {
            name: distribute_tensor(
                full, mesh, [Shard(0) if full.ndim else Replicate()], src_data_rank=None
            )
            for name, full in FULL.items()
        }
    }


def make_fsdp_tp() -> dict[str, Any]:
    """FSDP2 over tensor parallelism of two, along the dims of the grid."""
    size = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    return {
        "model": {
            name: distribute_tensor(
                full,
                mesh,
                [
                    Shard(1) if full.ndim > 1 and DIMS.get(name) != 1 else Replicate(),
                    Shard(DIMS[name]) if name in DIMS else Replicate(),
                ],
                src_data_rank=None,
            )
            for name, full in FULL.items()
        }
    }


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: f"tp{sizes[0]}-dp{sizes[1]}")
def test_every_grid_into_every_layout(sizes: tuple[int, int], kind: str, tmp_path: Path) -> None:
    """Files of any grid load into plain tensors, FSDP2 on 1 to 4 ranks, and FSDP2 x TP."""
    template = save_grid(tmp_path, FULL, sizes, kind=kind)
    grid = RankGrid(template, DIMS, fused=FUSED)
    key = "model" if kind == "pt" else None
    for make, size in ((make_fsdp, 1), (make_fsdp, 3), (make_fsdp, 4), (make_fsdp_tp, 4)):
        load_all(grid, make if key else lambda make=make: make()["model"], size)
    plain = {"model": {name: full.clone() for name, full in FULL.items()}}
    load_all(grid, lambda: plain if key else plain["model"], 1)
