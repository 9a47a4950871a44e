"""FSDP1: every form of its sharded state dict, saved and loaded by real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import StateDictType

import dcp_reshard
from dcp_reshard import ReshardSavePlanner, ReshardStorageReader, load_sharded_optimizer_state_dict
from dcp_reshard.layout import collect_tensor_layout
from tests.support.failures import find_failures
from tests.support.fsdp1 import KINDS, expected, make_model, sharded_state, whole_state
from tests.support.worlds import gloo_world

pytestmark = [
    pytest.mark.dist,
    # What torch's own FSDP1 warns of when it makes state dicts, and what it deprecates.
    pytest.mark.filterwarnings("ignore::UserWarning:torch[.]distributed[.].*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch[.]distributed[.].*"),
    # HYBRID_SHARD on a pair of groups: replicas shard over groups of their own, and all have the
    # buffer. Nothing tells that from values that depend on the rank.
    pytest.mark.filterwarnings("ignore::dcp_reshard.RankValueWarning"),
]

SIZES = {"flat": 3, "plain": 1}
SOURCES = [(kind, SIZES.get(kind, 4)) for kind in KINDS if kind != "even"]
DESTS = [*SOURCES, ("sharded", 3), ("mesh", 2), ("grad_op", 2), ("fsdp2", 3)]


def save_all(rank: int, root: Path, size: int) -> None:
    for kind, number in SOURCES:
        if number == size:
            model = make_model(kind, expected())
            dcp.save({"model": sharded_state(model)}, checkpoint_id=root / f"{kind}-{size}")


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of all forms, by stock `dcp.save`."""
    root = tmp_path_factory.mktemp("fsdp1")
    for size in sorted({size for _, size in SOURCES}):
        gloo_world(size, save_all, root, size)
    return root


def load_into(model: nn.Module, state: dict[str, Any], kind: StateDictType) -> None:
    if isinstance(model, Fsdp1):
        with Fsdp1.state_dict_type(model, kind):
            model.load_state_dict(state)
    else:
        model.load_state_dict(state)


def check_is_as_saved(model: nn.Module, where: str) -> None:
    found = whole_state(model)
    for name, tensor in expected().items():
        assert torch.equal(found[name], tensor), (where, name, found[name])


def load_all(rank: int, root: Path, kind: str) -> list[str]:
    done = []
    for path in sorted(root.iterdir()):
        model = make_model(kind)
        state = sharded_state(model)
        dcp_reshard.load({"model": state}, path)
        load_into(model, state, StateDictType.SHARDED_STATE_DICT)
        check_is_as_saved(model, path.name)
        done.append(path.name)
    return done


@pytest.mark.parametrize(("kind", "size"), DESTS)
def test_every_form_loads_from_every_other(stored: Path, kind: str, size: int) -> None:
    """With and without a mesh, hybrid, over tensor parallelism, from and to FSDP2 and plain."""
    [done, *_] = gloo_world(size, load_all, stored, kind, timeout=110.0)
    assert len(done) == len(SOURCES)


def save_local(rank: int, path: Path, kind: str) -> None:
    model = make_model(kind, expected())
    dcp.save({"model": sharded_state(model, StateDictType.LOCAL_STATE_DICT)}, checkpoint_id=path)


def load_local(rank: int, path: Path, kind: str) -> dict[int, str]:
    model = make_model(kind)
    state = sharded_state(model, StateDictType.LOCAL_STATE_DICT)
    failures = find_failures(lambda: dcp_reshard.load({"model": state}, path))
    if not failures:
        load_into(model, state, StateDictType.LOCAL_STATE_DICT)
        check_is_as_saved(model, kind)
    return {number: str(failure) for number, failure in failures.items()}


@pytest.mark.parametrize("size", [5, 4, 3, 2])
def test_local_state_dict_of_flat_parameters(tmp_path: Path, size: int) -> None:
    """LOCAL_STATE_DICT is flat parameters cut in parts: any number of ranks has the same whole."""
    gloo_world(4, save_local, tmp_path, "flat")
    assert gloo_world(size, load_local, tmp_path, "flat") == [{}] * size


@pytest.mark.parametrize("kind", ["sharded", "even"])
@pytest.mark.parametrize("size", [4, 2])
def test_local_state_dict_of_original_parameters(tmp_path: Path, size: int, kind: str) -> None:
    """Each rank has a piece under the same key, which is refused also where all have one shape."""
    gloo_world(4, save_local, tmp_path, kind)
    for failures in gloo_world(size, load_local, tmp_path, kind):
        assert len(failures) == size
        assert all("_flat_param`, so each rank has another piece" in f for f in failures.values())


def load_moved(rank: int, path: Path, kind: str) -> list[str]:
    """What is said about pieces that are not in the memory of their shard: copies on the CPU."""
    model = make_model(kind, expected())
    state = {
        name: value.detach().clone() if isinstance(value, (torch.Tensor, nn.Parameter)) else value
        for name, value in sharded_state(model, StateDictType.LOCAL_STATE_DICT).items()
    }
    dcp.save({"model": state}, checkpoint_id=path)
    failures = find_failures(lambda: dcp_reshard.load({"model": state}, path))
    if failures:
        return [str(failure) for failure in failures.values()]
    try:
        load_into(model, state, StateDictType.LOCAL_STATE_DICT)
    except RuntimeError as error:
        return [str(error)]
    return []


def test_pieces_moved_to_the_cpu(tmp_path: Path) -> None:
    """Of uneven pieces the shape is refused; even ones cannot be told, and FSDP1 refuses those."""
    for name, said in (("sharded", "stored shape"), ("even", 'Unexpected key(s) in state_dict: "')):
        for errors in gloo_world(2, load_moved, tmp_path / name, name):
            assert errors
            assert all(said in error for error in errors), errors


def find_piece(rank: int, path: Path) -> tuple[str, int]:
    state = sharded_state(make_model("even", expected()), StateDictType.LOCAL_STATE_DICT)
    failures = find_failures(
        lambda: dcp.save(state, checkpoint_id=path, planner=ReshardSavePlanner())
    )
    return str(failures[rank]), len(state["up.weight"])


def test_pieces_are_not_saved(tmp_path: Path) -> None:
    """`ReshardSavePlanner` writes no checkpoint in which one rank's piece stands for all."""
    for failure, piece in gloo_world(2, find_piece, tmp_path):
        assert piece == 21
        assert "tensor `up.weight`: its memory is in this rank's shard" in failure
    assert not list(tmp_path.glob("*.distcp"))


def step(model: nn.Module) -> torch.optim.Optimizer:
    """One step, in which every element of every parameter gets moments of its own."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    x = torch.arange(12.0).reshape(4, 3) / 10
    (model(x) - 3).pow(2).sum().backward()
    optimizer.step()
    return optimizer


def save_training(rank: int, path: Path, kind: str) -> dict[str, torch.Tensor]:
    model = make_model(kind, {name: tensor / 50 for name, tensor in expected().items()})
    optimizer = step(model)
    state = {
        "model": sharded_state(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=path)
    options = StateDictOptions(full_state_dict=True)
    whole = get_optimizer_state_dict(model, optimizer, options=options)
    return {name: value["exp_avg"] for name, value in whole.get("state", {}).items()}


def load_moments(rank: int, path: Path, kind: str, whole: dict[str, torch.Tensor]) -> int:
    params = sharded_state(make_model(kind))
    loaded = load_sharded_optimizer_state_dict(
        params, "optimizer", ReshardStorageReader(path, process_group=dist.group.WORLD)
    )
    seen = 0
    for name, full in whole.items():
        moment = loaded["optimizer"]["state"][name]["exp_avg"]
        assert type(moment) is type(params[name]) or isinstance(params[name], nn.Parameter), name
        layout = collect_tensor_layout(name, moment)
        wanted = [shard.box for shard in collect_tensor_layout(name, params[name]).shards]
        assert [shard.box for shard in layout.shards] == wanted, name
        for shard in layout.shards:
            assert torch.equal(shard.tensor, full[shard.box.slices()]), (kind, name, shard.box)
            seen += shard.tensor.numel()
    return seen


@pytest.mark.parametrize("source", ["sharded", "hybrid_mesh"])
def test_moments_are_cut_like_their_parameters(tmp_path: Path, source: str) -> None:
    """Under HYBRID_SHARD too, a moment is cut over the group that shares the parameter itself."""
    whole, *_ = gloo_world(4, save_training, tmp_path, source)
    assert len(whole) == 5
    elements = sum(tensor.numel() for tensor in whole.values())
    for dest in ("hybrid_groups", "hybrid_mesh", "sharded", "fsdp2"):
        seen = gloo_world(4, load_moments, tmp_path, dest, whole)
        # Two replicas see every element twice.
        assert sum(seen) == elements * (2 if "hybrid" in dest else 1)
