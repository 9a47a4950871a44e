"""`RankGrid`: files of every grid into every layout, with the bytes that this should take."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import dcp_reshard
from dcp_reshard import (
    ChunkCoverageError,
    CorruptRecordError,
    FusedBlocks,
    LayoutError,
    RankGrid,
    ReaderOptions,
    ReshardStorageReader,
    StorageError,
    UnsafeCheckpointError,
)
from dcp_reshard.catalog import Catalog
from dcp_reshard.storage import ByteSource
from tests.support.rank_grids import safetensors_bytes, split_grid
from tests.support.sources import RecordingSource
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world, thread_world

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
        mine = {name: split[t][d].clone() for name, split in splits.items()}
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


def make_grid(sizes: tuple[int, int]) -> dict[str, Any]:
    """DTensors on a mesh of tp x dp: tp cuts the dim of the rules first, dp cuts dim 0 of that."""
    mesh = init_device_mesh("cpu", sizes)
    state = {}
    for name, full in FULL.items():
        tp = Shard(DIMS[name]) if name in DIMS else Replicate()
        dp = Shard(0) if full.ndim else Replicate()
        state[name] = distribute_tensor(full, mesh, [tp, dp], src_data_rank=None)
    return state


def make_fsdp_tp() -> dict[str, Any]:
    """FSDP2 of two over tensor parallelism of two, as `fully_shard` makes it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    state = {}
    for name, full in FULL.items():
        dim = DIMS.get(name)
        tp = Replicate() if dim is None else Shard(dim)
        dp: Any = Shard(0) if full.ndim else Replicate()
        if dim == 0:
            dp = _StridedShard(0, split_factor=2)
        state[name] = distribute_tensor(full, mesh, [dp, tp], src_data_rank=None)
    return state


@pytest.mark.parametrize("sizes", GRIDS, ids=lambda sizes: f"tp{sizes[0]}-dp{sizes[1]}")
def test_every_grid_into_every_grid(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Files of any grid load into DTensors of any grid, FSDP2 among them, and plain tensors."""
    grid = RankGrid(save_grid(tmp_path, FULL, sizes), DIMS, fused=FUSED)
    for dest in GRIDS:
        load_all(grid, lambda dest=dest: {"model": make_grid(dest)}, dest[0] * dest[1])
    load_all(grid, lambda: {"model": make_fsdp_tp()}, 4)
    load_all(grid, lambda: {"model": {name: full.clone() for name, full in FULL.items()}}, 1)


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (3, 2)], ids=str)
def test_safetensors_into_other_grids(sizes: tuple[int, int], tmp_path: Path) -> None:
    """Files of the safetensors format, which have no nested keys, load alike."""
    template = save_grid(tmp_path, FULL, sizes, kind="safetensors")
    grid = RankGrid(template, DIMS, fused=FUSED, replicas="elements")
    for dest in ((1, 1), (1, 3), (2, 2)):
        load_all(grid, lambda dest=dest: make_grid(dest), dest[0] * dest[1])


def test_a_rank_reads_its_own_bytes_and_no_more(tmp_path: Path) -> None:
    """A rank of three asks for its rows of two files, byte for byte; the catalog asks for none."""
    full = indexed_tensor((3000, 200))
    template = save_grid(tmp_path, {"rows": full}, (2, 1))
    places = [
        Path(template.format(tp=t, dp=0)).read_bytes().index(part.numpy().tobytes())
        for t, part in enumerate(full.chunk(2))
    ]
    recorded = Recorded(RankGrid(template, {"rows": 0}))
    options = ReaderOptions(threads=1)
    for rank, wanted in enumerate(
        [[(0, 0, 1000)], [(0, 1000, 1500), (1, 0, 500)], [(1, 500, 1500)]]
    ):
        with fake_world(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            dest = distribute_tensor(
                torch.full_like(full, -1), mesh, [Shard(0)], src_data_rank=None
            )
            report = dcp_reshard.load(
                {"model": {"rows": dest}}, recorded, no_dist=True, options=options
            )
            assert torch.equal(dest.to_local(), full[1000 * rank : 1000 * rank + 1000])
        asked = [r for r in recorded.source.requests if r.length > 4096]
        assert [(r.name, r.offset, r.offset + r.length) for r in asked] == [
            (f"tp{t}.dp0.pt", places[t] + first * 800, places[t] + last * 800)
            for t, first, last in wanted
        ]
        assert report.bytes_wanted == 800_000
        assert report.bytes_read - report.bytes_wanted < 2 * 32 * 1024  # directories of two files
        assert report.bytes_direct == 800_000
        assert report.records_unverified == len(wanted)


def test_columns_are_read_by_runs(tmp_path: Path) -> None:
    """Of files cut along dim 1, a rank that wants rows reads rows of each file."""
    full = indexed_tensor((900, 800))
    template = save_grid(tmp_path, {"columns": full}, (2, 1))
    recorded = Recorded(RankGrid(template, {"columns": 1}))
    with fake_world(1, 3):
        mesh = init_device_mesh("cpu", (3,))
        dest = distribute_tensor(torch.full_like(full, -1), mesh, [Shard(0)], src_data_rank=None)
        report = dcp_reshard.load({"model": {"columns": dest}}, recorded, no_dist=True)
        assert torch.equal(dest.to_local(), full[300:600])
    lengths = [r.length for r in recorded.source.requests if r.length > 4096]
    assert lengths == [300 * 400 * 4] * 2
    assert report.bytes_read - report.bytes_wanted < 2 * 32 * 1024


def test_replicated_tensors_are_read_once(tmp_path: Path) -> None:
    """Of a tensor that all files hold, one copy is read, and records are verified."""
    full = {"norm": indexed_tensor((50_000,)), "scalar": torch.tensor(1.0)}
    template = save_grid(tmp_path, full, (4, 1))
    recorded = Recorded(RankGrid(template))
    state = {"model": {name: torch.full_like(t, -1) for name, t in full.items()}}
    report = dcp_reshard.load(state, recorded, no_dist=True)
    check_same(snapshot(state["model"]), full)
    [large] = [r for r in recorded.source.requests if r.length > 4096]
    assert large.name == "tp0.dp0.pt"
    assert 200_000 < large.length < 200_100  # one request for both
    assert (report.records_verified, report.records_unverified) == (2, 0)
    assert report.notes == ()


def optimizer_state(full: Mapping[str, torch.Tensor], sizes: tuple[int, int]) -> list[list[Any]]:
    """State of an optimizer as `torch.optim` saves it, cut like the parameters, for each rank."""
    grid: list[list[Any]] = []
    moments = {
        name: {
            key: split_grid(p * scale, sizes, DIMS.get(name), FUSED.get(name))
            for key, scale in (("exp_avg", 2), ("exp_avg_sq", 3))
        }
        for name, p in full.items()
    }
    for t in range(sizes[0]):
        grid.append([])
        for d in range(sizes[1]):
            state = {
                i: {"step": torch.tensor(7.0)}
                | {key: split[t][d].clone() for key, split in moments[name].items()}
                for i, name in enumerate(full)
            }
            numbers = list(range(len(full)))
            groups = [
                {"lr": 0.5, "betas": (0.9, 0.95), "foreach": None, "params": numbers[:2]},
                {"lr": 0.25, "betas": (0.9, 0.95), "foreach": None, "params": numbers[2:]},
            ]
            grid[t].append({"state": state, "param_groups": groups})
    return grid


PARAMS = {name: FULL[name].float() for name in ("rows", "columns", "qkv.weight", "norm")}


def save_training(root: Path, sizes: tuple[int, int]) -> str:
    splits = {n: split_grid(t, sizes, DIMS.get(n), FUSED.get(n)) for n, t in PARAMS.items()}
    states = optimizer_state(PARAMS, sizes)
    for t, d in itertools.product(range(sizes[0]), range(sizes[1])):
        model = {name: split[t][d].clone() for name, split in splits.items()}
        saved = {"model": model, "optimizer": states[t][d], "step": 7, "rank": (t, d)}
        torch.save(saved, root / f"model.tp{t}.dp{d}.pt")
    return f"{root}/model.tp{{tp}}.dp{{dp}}.pt"


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1), (3, 1), (2, 2), (4, 2)], ids=str)
def test_optimizer_state_is_held_like_the_parameters(
    sizes: tuple[int, int], tmp_path: Path
) -> None:
    """Moments follow their parameters into FSDP2, by the names that `torch.optim` leaves out."""
    grid = RankGrid(
        save_training(tmp_path, sizes), DIMS, fused={"qkv.weight": QKV}, param_names=list(PARAMS)
    )

    def load(rank: int) -> None:
        mesh = init_device_mesh("cpu", (3,))
        model = {
            name: distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
            for name, full in PARAMS.items()
        }
        loaded = dcp_reshard.load_sharded_optimizer_state_dict(
            model, "optimizer", ReshardStorageReader(grid)
        )["optimizer"]
        for name, param in model.items():
            state = loaded["state"][name]
            assert state["step"] == 7
            for key, scale in (("exp_avg", 2), ("exp_avg_sq", 3)):
                assert state[key].placements == param.placements
                assert torch.equal(state[key].to_local(), param.to_local() * scale)
        groups = loaded["param_groups"]
        assert [g["params"] for g in groups] == [["rows", "columns"], ["qkv.weight", "norm"]]
        assert [g["lr"] for g in groups] == [0.5, 0.25]
        assert groups[0]["betas"] == (0.9, 0.95)
        assert groups[0]["foreach"] is None

    thread_world(3, load)


def test_keys_are_those_of_the_files_without_names(tmp_path: Path) -> None:
    """Without `param_names`, state has its numbers; what is cut is not loadable, and says why."""
    template = save_training(tmp_path, (2, 1))
    grid = RankGrid(template, DIMS, fused={"qkv.weight": QKV})
    state = {"optimizer": {"state": {"3": {"exp_avg": torch.full((11,), -1.0)}}}, "step": None}
    report = dcp_reshard.load(state, grid, no_dist=True)
    assert torch.equal(state["optimizer"]["state"]["3"]["exp_avg"], PARAMS["norm"] * 2)
    assert state["step"] == 7
    assert "`optimizer.state.0.exp_avg`" in report.notes[-1]
    wanted = {"optimizer": {"state": {"0": {"exp_avg": torch.zeros(12, 5)}}}}
    message = r"hold different elements of \[0:12, 0:5\]; no rule says .*`param_names`"
    with pytest.raises(ChunkCoverageError, match=message):
        dcp_reshard.load(wanted, grid, no_dist=True)


def test_factored_moments_and_states_of_other_shapes_are_held_whole(tmp_path: Path) -> None:
    """State that has not its parameter's shape is not cut, unless copies show that it is."""
    for t in range(2):
        saved = {
            "model": {"w": torch.full((2, 3), float(t))},
            "optimizer": {"state": {"w": {"row": torch.ones(3), "odd": torch.full((2,), t)}}},
        }
        torch.save(saved, tmp_path / f"{t}.pt")
    grid = RankGrid(f"{tmp_path}/{{tp}}.pt", {"w": 0})
    catalog = grid.read_catalog(grid.open())
    assert catalog.tensors["optimizer.state.w.row"].shape == (3,)
    assert catalog.tensors["optimizer.state.w.row"].defect == ""
    assert "different elements" in catalog.tensors["optimizer.state.w.odd"].defect


def test_files_of_the_optimizer_alone(tmp_path: Path) -> None:
    """Where the model is elsewhere, state is cut along its parameter's dim if it has that dim."""
    full = indexed_tensor((4, 6))
    for t, part in enumerate(full.chunk(2, 1)):
        state = {0: {"step": torch.tensor(1.0), "exp_avg": part.clone()}}
        torch.save({"state": state, "param_groups": [{"params": [0]}]}, tmp_path / f"{t}.pt")
    grid = RankGrid(f"{tmp_path}/{{tp}}.pt", {"w": 1}, optimizer_key="", param_names=["w"])
    state = {"state": {"w": {"exp_avg": torch.full((4, 6), -1.0)}}}
    dcp_reshard.load(state, grid, no_dist=True)
    assert torch.equal(state["state"]["w"]["exp_avg"], full)
    short = RankGrid(f"{tmp_path}/{{tp}}.pt", {"w": 1}, optimizer_key="", param_names=[])
    with pytest.raises(Exception, match="parameter number 0, but `param_names` has only 0 names"):
        dcp_reshard.load(state, short, no_dist=True)


def save_pair(root: Path, first: Any, second: Any) -> str:
    torch.save(first, root / "0.pt")
    torch.save(second, root / "1.pt")
    return f"{root}/{{tp}}.pt"


def test_values_that_differ_are_refused_when_asked_for(tmp_path: Path) -> None:
    """What belongs to a rank alone does not keep the rest from being loaded, and is named."""
    template = save_pair(
        tmp_path,
        {"w": torch.ones(2), "rng": torch.zeros(4), "rank": 0, "nan": float("nan"), "flag": True},
        {"w": torch.ones(2), "rng": torch.ones(4), "rank": 1, "nan": float("nan"), "flag": 1},
    )
    grid = RankGrid(template)
    state: dict[str, Any] = {"w": torch.zeros(2), "nan": None}
    report = dcp_reshard.load(state, grid, no_dist=True)
    assert state["w"].tolist() == [1, 1]
    assert state["nan"] != state["nan"]
    assert report.notes == ("not loadable, each for its own reason: `rng`, `rank`, `flag`",)
    assert "rng" in str(report)
    with pytest.raises(ChunkCoverageError, match=r"`rng`: files '0.pt' and '1.pt' hold different"):
        dcp_reshard.load({"rng": torch.zeros(4)}, grid, no_dist=True)
    for key, said in (("rank", "0 in '0.pt', 1 in '1.pt'"), ("flag", "True in .*, 1 in")):
        with pytest.raises(dcp_reshard.CheckpointFormatError, match=f"`{key}`: .*differ: {said}"):
            dcp_reshard.load({key: None}, grid, no_dist=True)


def test_a_stock_planner_does_not_get_what_is_not_loadable(tmp_path: Path) -> None:
    """Also with torch's planner, which asks nobody, copies that differ are refused."""
    template = save_pair(tmp_path, {"w": torch.zeros(4)}, {"w": torch.ones(4)})
    reader = ReshardStorageReader(RankGrid(template))
    with pytest.raises(BaseException, match="hold different elements"):
        dcp.load({"w": torch.zeros(4)}, storage_reader=reader, no_dist=True)
    template = save_pair(tmp_path, {"w": torch.ones(4)}, {"w": torch.ones(4)})
    state = {"w": torch.zeros(4)}
    dcp.load(state, storage_reader=ReshardStorageReader(RankGrid(template)), no_dist=True)
    assert state["w"].tolist() == [1] * 4


class Odd:
    """Not data."""


def test_what_is_not_data_is_refused_by_name(tmp_path: Path) -> None:
    """An object in a rank file is never unpickled; the rest is loaded, it is not."""
    template = save_pair(
        tmp_path, {"w": torch.ones(2), "args": Odd()}, {"w": torch.ones(2), "args": Odd()}
    )
    state = {"w": torch.zeros(2)}
    report = dcp_reshard.load(state, RankGrid(template), no_dist=True)
    assert "`args`" in report.notes[0]
    with pytest.raises(UnsafeCheckpointError, match=r"`args`: a \S+Odd is not data"):
        dcp_reshard.load({"args": None}, RankGrid(template), no_dist=True)


def test_values_of_all_kinds_come_back(tmp_path: Path) -> None:
    """Numbers, strings, bytes, None, tuples, lists, sizes and dtypes arrive as they were saved."""
    values = {
        "int": 2**60,
        "float": 0.1,
        "text": "ü",
        "bytes": b"\x00\xff",
        "none": None,
        "flag": True,
        "tuple": (1, (2.5, "x")),
        "list": [1, [2, None]],
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "empty": [],
        "nested": {"a": {"b": 1}, "groups": [{"lr": 1.5}]},
    }
    torch.save(values, tmp_path / "0.pt")
    state = dict.fromkeys(values) | {"nested": {"a": {"b": 0}, "groups": [{"lr": 0}]}}
    dcp_reshard.load(state, RankGrid(f"{tmp_path}/{{tp}}.pt"), no_dist=True)
    assert state == values
    assert type(state["int"]) is int
    assert type(state["flag"]) is bool


@pytest.mark.parametrize("kind", ["views", "safetensors"])
def test_copies_without_usable_checksums(kind: str, tmp_path: Path) -> None:
    """Where checksums do not tell, copies are taken on trust and noted, or compared bit by bit."""

    def save(t: int, value: float) -> None:
        tensor = torch.full((300, 50), 1.0)
        tensor[299, 49] = value
        if kind == "views":
            storage = torch.zeros(300, 60)
            storage[:, :50] = tensor
            torch.save({"w": storage[:, :50]}, tmp_path / f"{t}.views")
        else:
            (tmp_path / f"{t}.safetensors").write_bytes(safetensors_bytes({"w": tensor}))

    template = f"{tmp_path}/{{tp}}.{kind}"
    save(0, 1.0)
    save(1, 1.0)
    state = {"w": torch.zeros(300, 50)}
    report = dcp_reshard.load(state, RankGrid(template), no_dist=True)
    assert report.notes[0].endswith("the first is taken: `w`")
    report = dcp_reshard.load(state, RankGrid(template, replicas="elements"), no_dist=True)
    assert report.notes == ()
    save(1, 2.0)
    assert dcp_reshard.load(state, RankGrid(template), no_dist=True).notes
    with pytest.raises(ChunkCoverageError, match="hold different elements"):
        dcp_reshard.load(state, RankGrid(template, replicas="elements"), no_dist=True)
    assert dcp_reshard.load(state, RankGrid(template, replicas="off"), no_dist=True).notes


def test_padding_of_a_vocabulary_is_left_out_and_reported(tmp_path: Path) -> None:
    """A vocabulary that was padded for four ranks loads without the padding into any layout."""
    full = indexed_tensor((10, 3))
    padded = torch.cat([full, torch.full((6, 3), -9.0)])
    template = save_grid(
        tmp_path,
        {"rows": padded},
        (4, 1),
        more={"optimizer": {"state": {"rows": {"step": torch.tensor(1.0)}}}},
    )
    grid = RankGrid(template, {"rows": 0}, true_sizes={"rows": 10})
    for rank in range(3):
        with fake_world(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            dest = distribute_tensor(torch.zeros(10, 3), mesh, [Shard(0)], src_data_rank=None)
            report = dcp_reshard.load({"model": {"rows": dest}}, grid, no_dist=True)
            assert torch.equal(dest.to_local(), full.chunk(3)[rank])
    assert report.notes == ("`model.rows`: stored shape (16, 3) without padding is (10, 3)",)
    too_large = RankGrid(template, {"rows": 0}, true_sizes={"rows": 17})
    with pytest.raises(ChunkCoverageError, match="has 16 indices in dim 0, not 17 and more"):
        dcp_reshard.load({"model": {"rows": torch.zeros(17, 3)}}, too_large, no_dist=True)


def test_data_parallel_replicas_and_buffers(tmp_path: Path) -> None:
    """Ranks of dp may hold copies, all of them or of some names; a name by pattern."""
    full = indexed_tensor((6, 4))
    for t, d in itertools.product(range(2), range(2)):
        saved = {"w": full.chunk(2)[t].clone(), "buffer": torch.ones(3)}
        torch.save(saved, tmp_path / f"same.{t}.{d}")
        saved["w"] = full.chunk(2)[t].chunk(2)[d].clone()
        torch.save(saved, tmp_path / f"split.{t}.{d}")
    for grid in (
        RankGrid(f"{tmp_path}/same.{{tp}}.{{dp}}", {"w": 0}, dp="replicate"),
        RankGrid(f"{tmp_path}/split.{{tp}}.{{dp}}", {"w": 0}, whole=[r"buf"]),
    ):
        state = {"w": torch.full((6, 4), -1.0), "buffer": torch.zeros(3)}
        assert dcp_reshard.load(state, grid, no_dist=True).notes == ()
        assert torch.equal(state["w"], full)
        assert state["buffer"].tolist() == [1, 1, 1]


def test_repeated_heads_are_copies(tmp_path: Path) -> None:
    """Key and value heads that several ranks hold are taken once, and compared."""
    fused = FusedBlocks((8, 2, 2), unit=2, repeat=True)
    full = indexed_tensor((12, 3))
    for t, row in enumerate(split_grid(full, (4, 1), 0, fused)):
        torch.save({"qkv": row[0].clone()}, tmp_path / f"{t}.pt")
    grid = RankGrid(f"{tmp_path}/{{tp}}.pt", {"qkv": 0}, fused={"qkv": fused}, replicas="elements")
    state = {"qkv": torch.zeros(12, 3)}
    assert dcp_reshard.load(state, grid, no_dist=True).notes == ()
    assert torch.equal(state["qkv"], full)
    odd = split_grid(full, (4, 1), 0, fused)[3][0].clone()
    odd[-1] = 99
    torch.save({"qkv": odd}, tmp_path / "3.pt")
    with pytest.raises(ChunkCoverageError, match=r"hold different elements of \[10:12, 0:3\]"):
        dcp_reshard.load(state, grid, no_dist=True)


def test_tied_and_non_contiguous_tensors(tmp_path: Path) -> None:
    """Tensors that share a storage, and transposed ones, load as what they are."""
    full = indexed_tensor((8, 6))
    for t, part in enumerate(full.chunk(2)):
        part = part.clone()
        torch.save({"embed": part, "head": part, "turned": part.t()}, tmp_path / f"{t}.pt")
    grid = RankGrid(f"{tmp_path}/{{tp}}.pt", {"embed": 0, "head": 0, "turned": 1})
    state = {"embed": torch.zeros(8, 6), "head": torch.zeros(8, 6), "turned": torch.zeros(6, 8)}
    report = dcp_reshard.load(state, grid, no_dist=True)
    assert torch.equal(state["embed"], full)
    assert torch.equal(state["head"], full)
    assert torch.equal(state["turned"], full.t())
    assert (report.records_verified, report.records_unverified) == (2, 0)


def test_uneven_shards_and_patterns(tmp_path: Path) -> None:
    """Files whose shards differ in size are joined as they are; dims may come from patterns."""
    full = indexed_tensor((9, 2))
    for t, rows in enumerate((slice(0, 2), slice(2, 7), slice(7, 9))):
        torch.save({"model": {"layers.0.w": full[rows].clone()}}, tmp_path / f"{t}.pt")
    grid = RankGrid(f"{tmp_path}/{{tp}}.pt", shard_specs={r"layers\.\d+\.w$": 0})
    state = {"model": {"layers.0.w": torch.zeros(9, 2)}}
    dcp_reshard.load(state, grid, no_dist=True)
    assert torch.equal(state["model"]["layers.0.w"], full)


def test_a_part_that_a_file_lacks(tmp_path: Path) -> None:
    """A cut tensor that one file does not have is refused, with the file's name; others load."""
    template = save_pair(tmp_path, {"w": torch.ones(2), "v": torch.ones(2)}, {"v": torch.zeros(2)})
    grid = RankGrid(template, {"w": 0, "v": 0})
    state = {"v": torch.full((4,), -1.0)}
    dcp_reshard.load(state, grid, no_dist=True)
    assert state["v"].tolist() == [1, 1, 0, 0]
    with pytest.raises(
        ChunkCoverageError, match=r"`w`: not in `1\.pt`, whose part of it is needed"
    ):
        dcp_reshard.load({"w": torch.zeros(4)}, grid, no_dist=True)


@pytest.mark.parametrize(
    ("first", "second", "dims", "message"),
    [
        ({"w": torch.ones(2)}, {"w": torch.ones(2).double()}, {"w": 0}, "holds torch.float64"),
        ({"w": torch.ones(2, 2)}, {"w": torch.ones(2, 3)}, {"w": 0}, "tp rank 1 holds shape"),
        ({"w": torch.ones(2)}, {"w": torch.ones(3)}, {}, r"shape \(3,\) in `1.pt`, \(2,\) in"),
        ({"w": torch.ones(2)}, {"w": torch.ones(2)}, {"w": 1}, "cut along dim 1, but it has 1"),
    ],
    ids=["dtype", "shape", "replica", "dim"],
)
def test_what_does_not_fit_together_is_refused_by_name(
    first: Any, second: Any, dims: dict[str, int], message: str, tmp_path: Path
) -> None:
    """Dtypes, shapes and dims that do not fit are an error when the tensor is asked for."""
    grid = RankGrid(save_pair(tmp_path, first, second), dims)
    with pytest.raises(ChunkCoverageError, match=f"`w`: .*{message}"):
        dcp_reshard.load({"w": torch.zeros(4)}, grid, no_dist=True)


def test_rules_that_are_for_nothing(tmp_path: Path) -> None:
    """A dim for a name that no file has is noted; fused blocks and true sizes are errors."""
    template = save_pair(tmp_path, {"w": torch.ones(2)}, {"w": torch.ones(2)})
    grid = RankGrid(template, {"typo": 0})
    assert dcp_reshard.load({"w": torch.zeros(2)}, grid, no_dist=True).notes == (
        "`shard_dims` has `typo`, which no rank file has",
    )
    for options in ({"fused": {"typo": FusedBlocks((2,))}}, {"true_sizes": {"typo": 2}}):
        with pytest.raises(LayoutError, match="has rules for `typo`, which no rank file has"):
            RankGrid(template, **options).read_catalog(RankGrid(template).open())
    for options, message in (
        ({"fused": {"w": FusedBlocks((2,))}}, "`w`: has fused blocks, but no dim"),
        ({"shard_specs": {"w": 1}, "shard_dims": {"w": 0}}, "`w`: rules disagree"),
        (
            {"fused": {"w": FusedBlocks((4,))}, "shard_dims": {"w": 0}, "true_sizes": {"w": 3}},
            "`w`: has fused blocks and padding",
        ),
    ):
        with pytest.raises(LayoutError, match=message):
            RankGrid(template, **options).read_catalog(RankGrid(template).open())
    with pytest.raises(ValueError, match="`dp` must be 'split' or 'replicate', got 'both'"):
        RankGrid(template, dp="both")  # type: ignore[arg-type]


def test_missing_files_and_damage_are_errors(tmp_path: Path) -> None:
    """A missing file is named; so is one that is no checkpoint; a flipped element is found."""
    template = save_grid(tmp_path, {"rows": FULL["rows"]}, (2, 1))
    state = {"model": {"rows": torch.zeros(24, 5)}}
    with pytest.raises(StorageError, match=r"2 of 4 rank files are missing, .* 'tp2.dp0.pt'"):
        dcp_reshard.load(state, RankGrid(template, DIMS, sizes=(4, 1)), no_dist=True)
    file = tmp_path / "tp1.dp0.pt"
    good = file.read_bytes()
    at = good.index(FULL["rows"][12:].numpy().tobytes())
    file.write_bytes(good[: at + 3] + bytes([good[at + 3] ^ 1]) + good[at + 4 :])
    with pytest.raises(CorruptRecordError, match=r"`model\.rows`, file 'tp1\.dp0\.pt'"):
        dcp_reshard.load(state, RankGrid(template, DIMS), no_dist=True)
    file.write_bytes(good[: len(good) // 2])
    with pytest.raises(dcp_reshard.CheckpointFormatError, match=r"file 'tp1\.dp0\.pt': "):
        dcp_reshard.load(state, RankGrid(template, DIMS), no_dist=True)


def test_two_meanings_of_one_key_are_refused(tmp_path: Path) -> None:
    """A key with a dot, and the same key nested, are not told apart, and refused."""
    template = save_pair(tmp_path, {"a.b": 1}, {"a": {"b": 1}})
    with pytest.raises(dcp_reshard.CheckpointFormatError, match=r"`a.b` stands for .* and for"):
        dcp_reshard.load({"a": {"b": 0}}, RankGrid(template), no_dist=True)


def test_fingerprints_tell_saves_apart(tmp_path: Path) -> None:
    """The fingerprint is that of the files, and changes when one is written again."""
    template = save_grid(tmp_path, {"rows": FULL["rows"]}, (2, 1))
    grid = RankGrid(template, DIMS)
    before = grid.fingerprint(grid.open())
    assert before == grid.fingerprint(grid.open())
    torch.save({"model": {"rows": FULL["rows"][12:] + 1}}, tmp_path / "tp1.dp0.pt")
    assert before != grid.fingerprint(grid.open())


@pytest.mark.parametrize("key", ["w\0", "w" * 4097], ids=["NUL", "long"])
def test_names_that_are_none(key: str, tmp_path: Path) -> None:
    """Keys with a NUL, or longer than names are, are refused."""
    torch.save({key: torch.ones(1)}, tmp_path / "0.pt")
    with pytest.raises(dcp_reshard.CheckpointFormatError, match=r"file '0\.pt': key 'w"):
        dcp_reshard.load({"w": torch.ones(1)}, RankGrid(f"{tmp_path}/{{tp}}.pt"), no_dist=True)


def test_ranks_with_other_rules_have_other_digests(tmp_path: Path) -> None:
    """The digest tells other files and other rules, not other places of the same files."""
    template = save_grid(tmp_path, {"rows": FULL["rows"]}, (2, 1))
    (tmp_path / "copy").mkdir()
    for file in tmp_path.glob("*.pt"):
        (tmp_path / "copy" / file.name).write_bytes(file.read_bytes())

    def digest(grid: RankGrid) -> str:
        return grid.read_catalog(grid.open()).digest

    same = digest(RankGrid(template, DIMS))
    assert same == digest(RankGrid(f"{tmp_path}/copy/tp{{tp}}.dp{{dp}}.pt", DIMS))
    assert same != digest(RankGrid(template))
    assert str(RankGrid(template)) == template
    paths = [f"{tmp_path}/tp{t}.dp0.pt" for t in range(2)]
    assert str(RankGrid(paths)) == f"{paths[0]} and the other rank files"
    assert same == digest(RankGrid(paths, DIMS))


def test_verify_reads_a_grid_end_to_end(tmp_path: Path) -> None:
    """`verify` compares every record of rank files, and says what cannot be loaded."""
    template = save_grid(tmp_path, FULL, (2, 2), more={"lr": 0.5})
    report = dcp_reshard.verify(RankGrid(template, DIMS, fused=FUSED))
    assert report.ok
    assert report.notes == ()
    assert report.records_unverified == 0
    file = tmp_path / "tp1.dp0.pt"
    data = bytearray(file.read_bytes())
    data[data.index(FULL["rows"][12:18].numpy().tobytes()) + 7] ^= 4
    file.write_bytes(data)
    report = dcp_reshard.verify(RankGrid(template, DIMS, fused=FUSED))
    assert [problem.fqn for problem in report.problems] == ["model.rows"]
    report = dcp_reshard.verify(RankGrid(template))
    assert {"model.rows", "model.columns"} <= {problem.fqn for problem in report.problems}
    assert report.notes[0].startswith("not loadable, each for its own reason: `model.rows`")
