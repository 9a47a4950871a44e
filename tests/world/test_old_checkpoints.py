"""Checkpoints of older or other saves: per-rank metadata, the flattening of torch 2.3, no paths."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import (
    MissingTensorError,
    PlanError,
    ReshardLoadPlanner,
    ReshardStorageReader,
    load_sharded_optimizer_state_dict,
)
from dcp_reshard._torch import flatten_state_dict_2_3
from tests.support.checkpoints import check_world_loads, save_state, save_world
from tests.support.failures import catch_failure, find_failures
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world, gloo_world, thread_world

State = dict[str, Any]
FULL = indexed_tensor((13, 3))


def our_load(path: Path, **options: Any) -> Callable[[State], object]:
    return lambda state: dcp_reshard.load(state, path, no_dist=True, **options)


def state_of(size: int) -> Callable[[int], State]:
    """Rows, replicas, plain values, and a key of each rank's own."""

    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", (size,))
        return {
            "rows": distribute_tensor(FULL, mesh, [Shard(0)], src_data_rank=None),
            "few": distribute_tensor(FULL[:2].clone(), mesh, [Shard(0)], src_data_rank=None),
            "copies": distribute_tensor(FULL + 1, mesh, [Replicate()], src_data_rank=None),
            "plain": FULL + 2,
            "nested": {"list": [FULL + 3], "step": 7},
        }

    return make


@pytest.mark.parametrize("dest", [1, 2, 4, 6])
@pytest.mark.parametrize("source", [1, 4])
def test_metadata_of_each_rank(tmp_path: Path, source: int, dest: int) -> None:
    """A save without collectives is loaded by fewer, as many and more ranks than saved it."""
    save_world(tmp_path, source, state_of(source), use_collectives=False)
    assert not (tmp_path / ".metadata").exists()
    check_world_loads(dest, state_of(dest), our_load(tmp_path))
    with fake_world(0, dest):
        state = state_of(dest)(0)
        state["nested"]["step"] = -1
        dcp_reshard.load(state, tmp_path, no_dist=True)
    assert state["nested"]["step"] == 7


def load_in_threads(rank: int, path: Path) -> dict[str, torch.Tensor]:
    state = state_of(dist.get_world_size())(rank)
    wanted = snapshot(state)
    fill_with_sentinel(state)
    reader = ReshardStorageReader(path, process_group=dist.group.WORLD)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    check_same(snapshot(state), wanted, where=f"rank {rank}")
    return wanted


def test_metadata_of_each_rank_with_collectives(tmp_path: Path) -> None:
    """More ranks than saved load together: none waits for metadata that only others have."""
    save_world(tmp_path, 2, state_of(2), use_collectives=False)
    assert len(thread_world(5, load_in_threads, tmp_path)) == 5


def test_metadata_of_a_rank_that_is_not_there(tmp_path: Path) -> None:
    """Without the file of one rank its rows are missing, and every rank says which file it is."""
    save_world(tmp_path, 4, state_of(4), use_collectives=False)
    (tmp_path / "__2.metadata").unlink()
    for rank in (0, 3):
        with fake_world(rank, 4):
            state = state_of(4)(rank)
            error = catch_failure(lambda state=state: our_load(tmp_path)(state))
            assert "`__2.metadata` is missing" in str(error)


def values_of(rank: int) -> State:
    """What depends on the rank, beside a tensor that all ranks share."""
    return {
        "rows": state_of(dist.get_world_size())(rank)["rows"],
        "rng": torch.full((3,), rank),
        "loader": {"position": 10 * rank, "seen": [rank]},
    }


def load_values(rank: int, path: Path, mode: str, planner: type) -> tuple[Any, ...]:
    state = values_of(rank)
    wanted = state["rows"].to_local().clone()
    state["rows"].to_local().fill_(-1)
    state["rng"].fill_(-1)
    state["loader"] = {"position": -1, "seen": [-1]}
    reader = ReshardStorageReader(path, mode=mode, process_group=dist.group.WORLD)
    dcp.load(state, storage_reader=reader, planner=planner())
    assert torch.equal(state["rows"].to_local(), wanted)
    loader = state["loader"]
    return state["rng"].tolist(), loader["position"], loader["seen"], reader.stats.records_verified


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_rank_gets_the_copy_that_it_stored(tmp_path: Path, size: int) -> None:
    """Without collectives each rank's values are kept: it gets its own, new ranks the first's."""
    save_world(tmp_path, 3, values_of, use_collectives=False)
    for mode in ("direct", "cooperative"):
        for planner in (ReshardLoadPlanner, dcp.DefaultLoadPlanner):
            found = gloo_world(size, load_values, tmp_path, mode, planner)
            for rank, (rng, position, seen, _) in enumerate(found):
                saved_by = rank if rank < 3 else 0
                assert rng == [saved_by] * 3, (mode, planner)
                assert (position, seen) == (10 * saved_by, [saved_by])
            # Three parts of one tensor, and each rank's own copy.
            assert sum(verified for *_, verified in found) >= 3 + min(size, 3)


def load_damaged(rank: int, path: Path, mode: str) -> dict[int, str]:
    state = values_of(rank)
    return {
        r: str(e)
        for r, e in find_failures(lambda: dcp_reshard.load(state, path, mode=mode)).items()
    }


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_damage_in_a_copy_of_one_rank(tmp_path: Path, mode: str) -> None:
    """Only rank 2 reads its own copy; that it is damaged reaches all ranks, by name."""
    save_world(tmp_path, 3, values_of, use_collectives=False)
    file = tmp_path / "__2_0.distcp"
    contents = bytearray(file.read_bytes())
    at = contents.index(torch.full((3,), 2).numpy().tobytes())
    contents[at] ^= 1
    file.write_bytes(contents)
    for failures in gloo_world(3, load_damaged, tmp_path, mode):
        assert "`rng`" in failures[2]
        assert "__2_0.distcp" in failures[2]


class OldSavePlanner(DefaultSavePlanner):
    """Flattens as torch 2.3 and earlier did: a dict without tensors is stored as one object."""

    def set_up_planner(self, state_dict: State, storage_meta: Any = None, **kwargs: Any) -> None:
        super().set_up_planner(state_dict, storage_meta, **kwargs)
        self.state_dict, self.mappings = flatten_state_dict_2_3(state_dict)


def old_state(stage: int = 0) -> State:
    """Dicts with and without tensors, in one another; other keys for each pipeline stage."""
    state: State = {
        "model": {f"layer{stage}": {"w": FULL + stage}, "names": {"a": 1, "b": [2, {"c": 3}]}},
        "groups": [{"lr": 0.1, "params": [0, 1]}, {"lr": 0.2, "params": [2]}],
        "numbers": {"step": 4, "deep": {"er": 5}},
        "mixed": [{"w": FULL[0].clone()}, {"only": "text"}],
    }
    return state if stage == 0 else {key: state[key] for key in ("model",)}


def blank(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(isinstance(inner, dict) for inner in value):
        return [blank(inner) for inner in value]
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    return bool(found == wanted)


@pytest.mark.parametrize("reader", [ReshardStorageReader, dcp.FileSystemReader])
def test_the_flattening_of_torch_2_3(tmp_path: Path, reader: type) -> None:
    """Dicts that old torch stored as one object are found under the key that they had then."""
    dcp.save(old_state(), checkpoint_id=tmp_path, planner=OldSavePlanner())
    keys = dcp.FileSystemReader(tmp_path).read_metadata().state_dict_metadata.keys()
    assert {"groups", "numbers", "model.names"} <= keys
    state = blank(old_state())
    dcp.load(state, storage_reader=reader(tmp_path), planner=ReshardLoadPlanner(), no_dist=True)
    assert same(state, old_state())


def load_stage(rank: int, path: Path, options: dict[str, Any]) -> State:
    state = blank(old_state(rank))
    dcp_reshard.load(state, path, **options)
    return state


def test_old_flattening_is_decided_alike_on_every_rank(tmp_path: Path) -> None:
    """Ranks that ask for other keys, some of which look the same in both forms, load together."""
    stages = [old_state(), old_state(1), old_state(2)]
    save_world(tmp_path, 3, lambda rank: stages[rank], planner=OldSavePlanner)
    for state, wanted in zip(thread_world(3, load_stage, tmp_path, {}), stages, strict=True):
        assert same(state, wanted)


def test_each_dict_is_looked_at_alone(tmp_path: Path) -> None:
    """That a dict was no dict when it was saved does not hide others, and is refused by name."""
    full = FULL.clone()
    save_state(tmp_path, {"w": full, "config": None, "groups": [{"lr": 0.1}], "rest": (1, 2)})
    state: State = {"w": torch.zeros_like(full), "groups": [{"lr": 0.0}]}
    for key in ("config", "rest"):
        asked = state | {key: {"x": 1}}
        error = catch_failure(lambda asked=asked: our_load(tmp_path, strict=False)(asked))
        assert isinstance(error, PlanError)
        assert f"at `{key}` the state dict has a dict, the checkpoint has a" in str(error)
        assert asked[key] == {"x": 1}
    report = dcp_reshard.load(state | {"other": {"x": 1}}, tmp_path, strict=False)
    assert report.missing == ("other.x",)
    assert same(state, {"w": full, "groups": [{"lr": 0.1}]})


def test_old_flattening_below_a_wrapper(tmp_path: Path) -> None:
    """What torch 2.3 stored as one object is found without the parts that wrappers add."""
    planner = OldSavePlanner()
    dcp.save({"module": {"w": FULL, "names": {"a": 1}}}, checkpoint_id=tmp_path, planner=planner)
    state = {"w": torch.zeros_like(FULL), "names": {"a": 0}}
    report = dcp_reshard.load(state, tmp_path)
    assert sorted(report.renamed) == [("names", "module.names"), ("w", "module.w")]
    assert same(state, {"w": FULL, "names": {"a": 1}})


def test_new_values_beside_an_old_checkpoint(tmp_path: Path) -> None:
    """A key that no form of the checkpoint has is missing, and does not hide what is there."""
    dcp.save(old_state(), checkpoint_id=tmp_path, planner=OldSavePlanner())
    state = blank(old_state()) | {"added": {"w": torch.ones(2), "n": 6}}
    error = catch_failure(lambda: our_load(tmp_path)(state))
    assert isinstance(error, MissingTensorError)
    assert "2 keys of the state dict are not in the checkpoint" in str(error)
    report = dcp_reshard.load(state, tmp_path, strict=False)
    assert sorted(report.missing) == ["added.n", "added.w"]
    assert same(state, old_state() | {"added": {"w": torch.ones(2), "n": 6}})


def test_missing_keys_do_not_make_a_checkpoint_old(tmp_path: Path) -> None:
    """A new checkpoint stays one although the state dict has more than it."""
    save_state(tmp_path, old_state())
    state = blank(old_state()) | {"added": {"n": 6}}
    report = dcp_reshard.load(state, tmp_path, strict=False)
    assert report.missing == ("added.n",)
    assert same(state, old_state() | {"added": {"n": 6}})


def drop_planner_data(path: Path) -> None:
    metadata = dcp.FileSystemReader(path).read_metadata()
    with (path / ".metadata").open("wb") as file:
        pickle.dump(dataclasses.replace(metadata, planner_data=None), file)


def test_metadata_without_planner_data(tmp_path: Path) -> None:
    """A checkpoint that does not say how its keys were nested is loaded by its flat keys."""
    save_state(tmp_path, old_state())
    drop_planner_data(tmp_path)
    state = blank(old_state())
    dcp_reshard.load(state, tmp_path, no_dist=True)
    assert same(state, old_state())


def load_moment(rank: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.zeros(5, 2), mesh, [Shard(0)], src_data_rank=None)
    reader = ReshardStorageReader(path, process_group=dist.group.WORLD)
    loaded = load_sharded_optimizer_state_dict({"net.0.weight": weight}, "optimizer", reader)
    moment, step = snapshot(loaded).values()
    assert torch.equal(moment, (indexed_tensor((5, 2)) + 0.5).chunk(2)[rank])
    assert step == 3


def test_optimizer_state_without_planner_data(tmp_path: Path) -> None:
    """Optimizer state is found by the flat keys, dots in parameter names and all."""
    moment = indexed_tensor((5, 2)) + 0.5
    optimizer = {"state": {"net.0.weight": {"exp_avg": moment, "step": torch.tensor(3.0)}}}
    save_state(tmp_path, {"optimizer": optimizer})
    drop_planner_data(tmp_path)
    thread_world(2, load_moment, tmp_path)
