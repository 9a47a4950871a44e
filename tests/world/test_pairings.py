"""Planner and reader, each with its own kind and with torch's: all four load alike.

Stock with stock is among the pairings, so what the others are held to is what `dcp.load` does.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import (
    InconsistentRanksError,
    ReaderOptions,
    ReshardLoadPlanner,
    ReshardStorageReader,
    UnsafeCheckpointError,
)
from tests.support.checkpoints import save_state, save_world
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world, thread_world

Load = Callable[..., None]
PLANNERS = {"ours": ReshardLoadPlanner, "stock": DefaultLoadPlanner}
READERS = {"ours": ReshardStorageReader, "stock": dcp.FileSystemReader}


class Counter:
    """A `Stateful` value with a number and a tensor, which counts how often it was loaded."""

    def __init__(self, value: int, weights: torch.Tensor) -> None:
        self.value = value
        self.weights = weights
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "nested": {"weights": self.weights}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.value = state_dict["value"]
        self.weights = state_dict["nested"]["weights"]
        self.loads += 1


def make_state(mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """Every kind of value that `dcp.save` takes; with a mesh, matrices are cut by rows over it."""

    def cut(*shape: int) -> torch.Tensor:
        full = indexed_tensor(shape)
        return (
            full if mesh is None else distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)
        )

    return {
        "model": {
            "w": cut(7, 3),
            "deep": {"b": cut(2, 2), "large": cut(160, 40)},
            "0.dotted": cut(5),
        },
        "list": [cut(4, 2), {"in_list": cut(3)}, 11, "text"],
        "numbers": [1, 2.5, None],
        "tuple": (3, ("four", 5.0)),
        "options": {"lr": 0.125, "name": "adam", "flag": True, "nothing": None, "raw": b"\0\1"},
        "step": torch.tensor(12.5),
        "count": torch.tensor(9, dtype=torch.int64),
        "counter": Counter(17, cut(6)),
    }


def make_empty_state(mesh: DeviceMesh | None = None) -> dict[str, Any]:
    """The same structure with other contents."""
    state = make_state(mesh)
    fill_with_sentinel(state)
    fill_with_sentinel({"counter": state["counter"].weights})
    state["list"][2:] = [0, ""]
    state["numbers"] = []
    state["tuple"] = ()
    state["options"] = {"lr": 0.0, "name": "", "flag": False, "nothing": 1, "raw": b""}
    state["counter"].value = 0
    return state


def make_three_rows(rank: int) -> dict[str, Any]:
    return make_state(init_device_mesh("cpu", (3,)))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`make_state` as saved by three ranks."""
    path = tmp_path_factory.mktemp("three")
    save_world(path, 3, make_three_rows)
    return path


@pytest.fixture(
    params=[(planner, reader) for planner in PLANNERS for reader in READERS],
    ids=lambda pair: f"{pair[0]}_planner-{pair[1]}_reader",
)
def load(request: pytest.FixtureRequest) -> Load:
    """`dcp.load` with one of the four pairings."""
    planner, reader = request.param

    def load_pair(state: dict[str, Any], path: Path, **options: Any) -> None:
        dcp.load(
            state, storage_reader=READERS[reader](path), planner=PLANNERS[planner](), **options
        )

    return load_pair


def check_loaded(state: dict[str, Any], mesh: DeviceMesh | None = None, *, where: str = "") -> None:
    """Check all values against `make_state`."""
    wanted = make_state(mesh)
    counter, wanted_counter = state["counter"], wanted["counter"]
    assert (counter.value, counter.loads) == (17, 1)
    check_same(snapshot({"": counter.weights}), snapshot({"": wanted_counter.weights}), where=where)
    check_same(snapshot(state), snapshot(wanted), where=where)
    assert state["list"][2:] == [11, "text"]
    for key in ("numbers", "tuple", "options"):
        assert state[key] == wanted[key], key
        assert type(state[key]) is type(wanted[key]), key


def test_one_process_without_a_group(load: Load, path: Path) -> None:
    """A process that knows of no group gets whole tensors and all other values."""
    state = make_empty_state()
    load(state, path)
    check_loaded(state)


def test_tensors_are_filled_in_place(load: Load, path: Path) -> None:
    """The memory that the caller gave is what holds the values afterwards: models share it."""
    state = make_empty_state()
    mine = {"w": state["model"]["w"], "item": state["list"][0], "step": state["step"]}
    weights = state["counter"].weights
    load(state, path)
    assert state["model"]["w"] is mine["w"]
    assert state["list"][0] is mine["item"]
    assert state["step"] is mine["step"]
    assert state["counter"].weights is weights
    assert mine["step"].item() == 12.5


@pytest.mark.parametrize("size", [1, 2, 4])
def test_rank_that_loads_alone(load: Load, path: Path, size: int) -> None:
    """With `no_dist=True`, a rank of any world loads its rows without talking to the others."""
    for rank in range(size):
        with fake_world(rank, size):
            mesh = init_device_mesh("cpu", (size,))
            state = make_empty_state(mesh)
            load(state, path, no_dist=True)
            check_loaded(state, mesh, where=f"rank {rank} of {size}")


def load_and_check(rank: int, load: Load, path: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = make_empty_state(mesh)
    load(state, path)
    check_loaded(state, mesh, where=f"rank {rank}")


def test_all_ranks_of_the_default_group(load: Load, path: Path) -> None:
    """Four ranks load together, with the collectives of `dcp.load`."""
    thread_world(4, load_and_check, load, path)


def load_in_subgroup(rank: int, load: Load, path: Path) -> None:
    group = dist.new_group([1, 3])
    if rank in (1, 3):
        mesh = DeviceMesh.from_group(group, "cpu", [1, 3])
        state = make_empty_state(mesh)
        load(state, path, process_group=group)
        check_loaded(state, mesh, where=f"rank {rank}")


def test_some_ranks_of_the_world(load: Load, path: Path) -> None:
    """With `process_group`, two ranks of four load; the other two are not waited for."""
    thread_world(4, load_in_subgroup, load, path)


def load_in_subgroup_verified(rank: int, path: Path) -> list[tuple[int, int]]:
    group = dist.new_group([0, 2])
    if rank not in (0, 2):
        return []
    counts = []
    for given in (None, group):
        reader = ReshardStorageReader(path, process_group=given)
        mesh = DeviceMesh.from_group(group, "cpu", [0, 2])
        state = {"w": distribute_tensor(torch.zeros(400, 64), mesh, [Shard(0)], src_data_rank=None)}
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), process_group=group)
        counts.append((reader.stats.records_verified, reader.stats.records_unverified))
    return counts


def test_reader_that_knows_its_group_verifies_shared_records(tmp_path: Path) -> None:
    """Ranks that read half a record each compare its checksum, if the reader has their group."""
    save_state(tmp_path, {"w": indexed_tensor((400, 64))})
    counts = thread_world(3, load_in_subgroup_verified, tmp_path)
    without, with_group = zip(*(c for c in counts if c), strict=True)
    assert without == ((0, 1), (0, 1))
    assert sorted(with_group) == [(0, 0), (1, 0)]


def test_a_reader_serves_one_load_after_the_other(path: Path) -> None:
    """A reader used twice counts each load by itself, and reads what is there at the time."""
    reader = ReshardStorageReader(path)
    counts = []
    for _ in range(2):
        state = make_empty_state()
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
        check_loaded(state)
        counts.append((reader.stats.bytes_read, reader.stats.requests, reader.stats.chunks_read))
    assert counts[0] == counts[1]


def test_reader_without_a_local_plan(path: Path) -> None:
    """With `keep_plan_local=False` the items travel through the coordinator, with equal results."""

    def run(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        state = make_empty_state(mesh)
        options = ReaderOptions(keep_plan_local=False)
        reader = ReshardStorageReader(path, options=options)
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
        check_loaded(state, mesh)

    thread_world(2, run)


class Custom:
    """A class that no checkpoint may bring in unasked."""

    def __init__(self, value: int) -> None:
        self.value = value


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_objects_of_other_classes_are_refused_unless_named(
    tmp_path: Path, reader: type[Any]
) -> None:
    """Instances of a class are only made if the caller lists it; the error names the key."""
    save_state(tmp_path, {"thing": Custom(5), "space": Namespace(a=1)})
    state: dict[str, Any] = {"thing": None}
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=reader(tmp_path), planner=ReshardLoadPlanner())
    (error,) = (failure[0] for failure in caught.value.failures.values())
    assert isinstance(error, UnsafeCheckpointError)
    assert error.fqn == "thing"
    assert "allowed_classes" in str(error)
    assert state == {"thing": None}

    planner = ReshardLoadPlanner(allowed_classes=[Custom])
    dcp.load(state, storage_reader=reader(tmp_path), planner=planner)
    assert state["thing"].value == 5


def test_tied_tensors_load_under_both_keys(load: Load, tmp_path: Path) -> None:
    """One memory under two keys, as tied embeddings are, is filled once with one value."""
    tensor = indexed_tensor((40, 9))
    save_state(tmp_path, {"in": tensor, "out": tensor})
    shared = torch.full((40, 9), -1.0)
    state = {"in": shared, "out": shared}
    load(state, tmp_path)
    assert torch.equal(shared, tensor)
    assert state["in"] is state["out"]


def differing_keys(rank: int, path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = distribute_tensor(torch.zeros(7, 3), mesh, [Replicate()], src_data_rank=None)
    state = {"model": {"w": whole}} if rank else {"step": torch.zeros(())}
    strict = ReaderOptions(require_same_keys=True)
    dcp.load(state, storage_reader=ReshardStorageReader(path), planner=ReshardLoadPlanner())
    if rank:
        assert torch.equal(whole.to_local(), indexed_tensor((7, 3)))
    with pytest.raises(CheckpointException) as caught:
        dcp_reshard.load(state, path, options=strict)
    (error,) = (failure[0] for failure in caught.value.failures.values())
    assert isinstance(error, InconsistentRanksError)
    assert "keys" in str(error)


def test_ranks_may_ask_for_different_keys_unless_told_otherwise(path: Path) -> None:
    """Pipeline stages load keys of their own; `require_same_keys` makes that an error on all."""
    thread_world(2, differing_keys, path)
