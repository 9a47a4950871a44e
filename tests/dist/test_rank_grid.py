"""Rank files with real processes: the worked example of the documentation, and shared reading."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh

from dcp_reshard import FusedBlocks, RankGrid, ReshardLoadPlanner, ReshardStorageReader
from tests.support.rank_grids import split_grid
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

DOC = Path(__file__).parents[2] / "docs" / "rank_files.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", DOC.read_text(), re.DOTALL | re.MULTILINE)
TOKENS = torch.arange(36).reshape(3, 12) * 7 % 50


def run_block(number: int, names: dict[str, Any]) -> dict[str, Any]:
    """Run a block of Python of the documentation, with these names and in this folder."""
    exec(compile(BLOCKS[number], f"{DOC.name}, block {number}", "exec"), names)  # noqa: S102
    return names


def train_step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step on the same batch for every rank, so that all layouts compute the same."""
    logits = model(TOKENS)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS.roll(1, 1).flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


def cut_rank(tensor: torch.Tensor, name: str, rank: int) -> torch.Tensor:
    """What a tensor-parallel rank of two holds of a parameter, or of a moment of it."""
    if name in ("embed.weight", "head.weight"):
        padded = torch.cat([tensor, torch.zeros(2, tensor.shape[1])])
        return padded.chunk(2)[rank].clone()
    if name.endswith("gate_up.weight"):
        return torch.cat([block.chunk(2)[rank] for block in tensor.chunk(2)])
    if name.endswith("down.weight"):
        return tensor.chunk(2, 1)[rank].clone()
    return tensor.clone()


def save_rank_files(folder: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Train, write what two tensor-parallel ranks would, train on.

    Returns:
        Parameters and moments that were saved; losses of the two steps after that.
    """
    torch.manual_seed(0)
    model = run_block(0, {})["Model"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(3):
        train_step(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    saved = tensors_of(model, optimizer)
    state = optimizer.state_dict()
    for rank in range(2):
        moments = {
            number: {
                key: cut_rank(value, names[number], rank) if value.ndim else value
                for key, value in held.items()
            }
            for number, held in state["state"].items()
        }
        torch.save(
            {
                "model": {name: cut_rank(saved[name], name, rank) for name in names},
                "optimizer": state | {"state": moments},
                "step": 3,
            },
            folder / f"model.tp{rank}.pt",
        )
    return saved, [train_step(model, optimizer) for _ in range(2)]


def tensors_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all parameters and of their state, whole."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = param.detach()
        found |= {f"{name}.{key}": value for key, value in optimizer.state[param].items()}
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).clone()
        for name, t in found.items()
    }


def resume(rank: int, folder: str) -> tuple[Any, ...]:
    os.chdir(folder)
    names = run_block(1, run_block(0, {}))
    model, optimizer = names["model"], names["optimizer"]
    loaded = tensors_of(model, optimizer)
    placements = {tuple(p.placements) for p in model.parameters()}
    losses = [train_step(model, optimizer) for _ in range(2)]
    return loaded, names["state"]["step"], placements, losses, names["report"].notes


def test_the_worked_example_goes_on_where_the_old_job_stopped(tmp_path: Path) -> None:
    """Two tensor-parallel files, optimizer included, become FSDP2 on three ranks, bit for bit."""
    (tmp_path / "checkpoint").mkdir()
    saved, losses = save_rank_files(tmp_path / "checkpoint")
    results = gloo_world(3, resume, str(tmp_path))
    for loaded, step, placements, new_losses, notes in results:
        check_same(loaded, saved)
        assert step == 3
        assert placements == {(Shard(0),)}
        assert new_losses == pytest.approx(losses, rel=1e-5)
        assert any(note.startswith("`model.embed.weight`: stored shape (52, 16)") for note in notes)
        assert len(notes) == 6  # two parameters, and two moments of each


def test_other_blocks_of_the_documentation_run() -> None:
    """What is said of `reshard_tensor` is true."""
    assert len(BLOCKS) == 3
    run_block(2, {"torch": torch})


FULL = {
    "rows": indexed_tensor((403, 50)),
    "columns": indexed_tensor((64, 90), torch.bfloat16),
    "gate_up": indexed_tensor((60, 20)),
    "norm": indexed_tensor((700,)),
    "scalar": torch.tensor(2.5),
}
DIMS = {"rows": 0, "columns": 1, "gate_up": 0}
FUSED = {"gate_up": FusedBlocks((30, 30))}


def save_grid(folder: Path) -> None:
    splits = {n: split_grid(t, (3, 2), DIMS.get(n), FUSED.get(n)) for n, t in FULL.items()}
    for t in range(3):
        for d in range(2):
            model = {name: split[t][d].clone() for name, split in splits.items()}
            model["tied"] = model["rows"]
            torch.save({"model": model, "lr": 0.5, "rank": t}, folder / f"{t}.{d}.pt")


def load(rank: int, folder: str, mode: str) -> tuple[int, int, int]:
    dims = DIMS | {"tied": 0}
    grid = RankGrid(f"{folder}/{{tp}}.{{dp}}.pt", dims, sizes=(3, 2), fused=FUSED)
    mesh = init_device_mesh("cpu", (2, 2))
    state: dict[str, Any] = {"model": {}, "lr": None}
    for name, full in (FULL | {"tied": FULL["rows"]}).items():
        places = [Replicate(), Shard(0) if full.ndim else Replicate()]
        state["model"][name] = distribute_tensor(full, mesh, places, src_data_rank=None)
    wanted = snapshot(state)
    fill_with_sentinel(state)
    reader = ReshardStorageReader(grid, mode=mode, process_group=torch.distributed.group.WORLD)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    check_same(snapshot(state), wanted, where=f"rank {rank}")
    assert state["lr"] == 0.5
    assert any("`rank`" in note for note in reader.stats.notes)
    return reader.stats.bytes_read, reader.stats.records_verified, reader.stats.records_unverified


def load_refused(rank: int, folder: str, mode: str) -> str:
    grid = RankGrid(f"{folder}/{{tp}}.{{dp}}.pt", DIMS | {"tied": 0}, fused=FUSED)
    state: dict[str, Any] = {"rank": None} if rank == 1 else {"lr": None}
    reader = ReshardStorageReader(grid, mode=mode, process_group=torch.distributed.group.WORLD)
    try:
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    except BaseException as error:  # `CheckpointException` is one
        return str(error)
    return "loaded"


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_ranks_read_a_grid_together(mode: str, tmp_path: Path) -> None:
    """HSDP ranks load a grid of six files, each for itself or together, and verify all of it."""
    save_grid(tmp_path)
    results = gloo_world(4, load, str(tmp_path), mode)
    assert [unverified for _, _, unverified in results] == [0] * 4
    assert sum(verified for _, verified, _ in results) >= 6
    elements = sum(t.nbytes for t in FULL.values())
    total = sum(bytes_read for bytes_read, _, _ in results)
    if mode == "cooperative":
        assert total - elements < 6 * 32 * 1024  # directories of six files, read once
    else:
        assert total - 2 * elements < 4 * 32 * 1024 + 6 * 32 * 1024


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_a_value_that_is_refused_is_an_error_on_all_ranks(mode: str, tmp_path: Path) -> None:
    """A rank that asks for what ranks have differently fails, and no other waits for it."""
    save_grid(tmp_path)
    for message in gloo_world(3, load_refused, str(tmp_path), mode):
        assert "`rank`: the rank files differ" in message
