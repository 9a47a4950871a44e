"""Values that depend on the rank: the ways that docs/rank_values.md describes, and the warning."""

from __future__ import annotations

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import dcp_reshard
from dcp_reshard import RankValueWarning, ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.rank_values import AskedFor, collect_asked_for, warn_of_shared_values
from tests.support.checkpoints import check_world_loads, save_state, save_world
from tests.support.sharded import row_boxes, sharded_tensor
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world, gloo_world

State = dict[str, Any]
SAVED = 4


def generator_state(rank: int) -> torch.Tensor:
    return torch.Generator().manual_seed(rank).get_state()


def state_of(rank: int) -> State:
    return {
        "w": indexed_tensor((3,)),
        "rng": {str(rank): generator_state(rank)},
        "loader": {str(rank): {"epoch": 2, "position": 10 * rank, "seen": [rank, rank + 1]}},
    }


def blank(rank: int) -> State:
    return {
        "w": torch.zeros(3),
        "rng": {str(rank): generator_state(1000 + rank)},
        "loader": {str(rank): {"epoch": -1, "position": -1, "seen": None}},
    }


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    save_world(tmp_path, SAVED, state_of)
    return tmp_path


@pytest.mark.parametrize("size", [1, 2, 4, 6])
def test_a_key_for_each_rank(stored: Path, size: int) -> None:
    """Each rank gets what it saved; ranks that saved nothing keep what they have, by name."""
    for rank in range(size):
        with fake_world(rank, size):
            state = blank(rank)
            report = dcp_reshard.load(state, stored, no_dist=True, strict=False)
        assert torch.equal(state["w"], indexed_tensor((3,)))
        if rank < SAVED:
            assert report.missing == ()
            assert torch.equal(state["rng"][str(rank)], generator_state(rank))
            assert state["loader"] == state_of(rank)["loader"]
        else:
            assert f"rng.{rank}" in report.missing
            assert f"loader.{rank}.position" in report.missing
            assert torch.equal(state["rng"][str(rank)], generator_state(1000 + rank))


@pytest.mark.parametrize("size", [2, 6])
def test_asking_only_for_what_is_there(stored: Path, size: int) -> None:
    """The metadata say which ranks saved, so a load can stay strict about everything else."""
    for rank in range(size):
        with fake_world(rank, size):
            reader = ReshardStorageReader(stored)
            saved = [k for k in reader.read_metadata().state_dict_metadata if k.startswith("rng.")]
            assert saved == [f"rng.{r}" for r in range(SAVED)]
            state = {key: value for key, value in blank(rank).items() if key != "loader"}
            if f"rng.{rank}" not in saved:
                del state["rng"]
            dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), no_dist=True)
        assert torch.equal(state["w"], indexed_tensor((3,)))
        assert ("rng" in state) == (rank < SAVED)


def saved_by(key: str) -> str:
    """The key of the docs' example."""
    name, _, rest = key.partition(".")
    if name not in ("loader", "rng"):
        return key
    number, _, rest = rest.partition(".")
    return f"{name}.{int(number) % SAVED}" + (f".{rest}" if rest else "")


@pytest.mark.parametrize("size", [2, 4, 7])
def test_a_mapping_of_keys(stored: Path, size: int) -> None:
    """Ranks beyond those that saved get what another rank saved, under their own keys."""
    for rank in range(size):
        with fake_world(rank, size):
            state = blank(rank)
            report = dcp_reshard.load(state, stored, no_dist=True, rename=saved_by)
        assert report.missing == ()
        assert torch.equal(state["rng"][str(rank)], generator_state(rank % SAVED))
        assert state["loader"] == {str(rank): state_of(rank % SAVED)["loader"][str(rank % SAVED)]}


def test_the_mapping_of_the_readme(stored: Path) -> None:
    """A dict of one key is enough for a value that has one key: rank 5 gets what rank 1 saved."""
    with fake_world(5, 6):
        state = {"w": torch.zeros(3), "rng": {"5": generator_state(1005)}}
        rename = {"rng.5": f"rng.{5 % SAVED}"}
        report = dcp_reshard.load(state, stored, no_dist=True, rename=rename)
    assert report.missing == ()
    assert torch.equal(state["w"], indexed_tensor((3,)))
    assert torch.equal(state["rng"]["5"], generator_state(1))


def test_experts_as_one_sharded_tensor(tmp_path: Path) -> None:
    """Experts that are told apart by a mesh axis are resharded like any other tensor."""
    full = indexed_tensor((8, 3, 2))

    def experts(size: int) -> Any:
        def make(rank: int) -> State:
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("ep",))
            local = full.chunk(size)[rank].clone()
            shape, stride = full.shape, full.stride()
            return {
                "experts": DTensor.from_local(
                    local, mesh["ep"], [Shard(0)], run_check=False, shape=shape, stride=stride
                )
            }

        return make

    save_world(tmp_path, 4, experts(4))
    for size in (1, 2, 8):
        check_world_loads(
            size, experts(size), lambda s: dcp_reshard.load(s, tmp_path, no_dist=True)
        )


def dtensor_on(mesh: DeviceMesh) -> DTensor:
    return DTensor.from_local(torch.zeros(2), mesh, [Shard(0)], run_check=False)


def asked_by_all(make: Any, size: int = 4) -> list[AskedFor]:
    asked = []
    for rank in range(size):
        with fake_world(rank, size):
            asked.append(collect_asked_for(make(rank)))
    return asked


def groups_of_two(rank: int) -> State:
    """Two ranks to a mesh: expert groups that have the same keys."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "dp"))["dp"]
    return {"w": dtensor_on(mesh), "expert": torch.zeros(3), "step": 4, "list.0": torch.zeros(1)}


def stages(rank: int) -> State:
    """Two ranks to a mesh: pipeline stages that have keys of their own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    stage = rank // 2
    return {f"layer{stage}.w": dtensor_on(mesh), f"layer{stage}.buffer": torch.zeros(3)}


def replicas(rank: int) -> State:
    """Tensor parallelism over two ranks, twice, with the optimizer's state."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["tp"]
    moments = {"exp_avg": dtensor_on(mesh), "step": torch.tensor(3.0)}
    return {f"optimizer.state.layer.w.{name}": value for name, value in moments.items()}


def everyone(rank: int) -> State:
    """All ranks on one mesh, with a sub-mesh of it that is the same for all."""
    mesh = init_device_mesh("cpu", (4,))
    return {"w": dtensor_on(mesh), "buffer": torch.zeros(3), "rng": torch.zeros(3)}


def test_shared_plain_tensors_under_different_meshes_are_named() -> None:
    """What two groups of ranks both ask for as a plain tensor is named, with the groups."""
    with pytest.warns(RankValueWarning) as caught:
        warn_of_shared_values(asked_by_all(groups_of_two), ["w", "expert", "step", "list.0"])
    message = str(caught[0].message)
    assert "(`expert`, `list.0`)" in message
    assert "(ranks 0, 1; ranks 2, 3)" in message
    assert "docs/rank_values.md" in message


@pytest.mark.parametrize("make", [stages, everyone, replicas])
def test_no_warning_where_ranks_differ_in_keys_or_not_in_meshes(make: Any) -> None:
    """Stages with keys of their own, ranks of one mesh, and steps give nothing to warn of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_shared_values(asked_by_all(make), ["layer0.buffer", "layer1.buffer", "buffer"])


def test_a_number_of_its_own_is_named() -> None:
    """A seed is a plain tensor without dims, too, but not one beside sharded tensors."""

    def make(rank: int) -> State:
        return replicas(rank) | {"rng.seed": torch.tensor(rank)}

    with pytest.warns(RankValueWarning, match=r"\(`rng.seed`\)"):
        warn_of_shared_values(asked_by_all(make), make_names(make))


def make_names(make: Any) -> list[str]:
    with fake_world(0, 4):
        return list(make(0))


def test_process_groups_count_like_meshes() -> None:
    """Ranks that hold ShardedTensors and ranks that hold nothing sharded differ."""

    def make(rank: int) -> State:
        state: State = {"expert": torch.zeros(3)}
        if rank < 2:
            state["w"] = sharded_tensor(indexed_tensor((4, 2)), row_boxes((4, 2), 4))
        return state

    with pytest.warns(RankValueWarning, match="`expert`"):
        warn_of_shared_values(asked_by_all(make), ["expert"])


def test_names_that_this_rank_does_not_have_are_counted() -> None:
    """Keys that only other ranks know by name are told of in number."""
    asked = [AskedFor(b"a", b"")]
    for meshes in (b"b", b"c"):
        with fake_world(0, 1):
            plain = collect_asked_for({f"k{i}": torch.zeros(1) for i in range(9)}).plain
        asked.append(AskedFor(meshes, plain))
    with pytest.warns(RankValueWarning, match=r"\(9 of them\)"):
        warn_of_shared_values(asked, ["other"])
    with pytest.warns(RankValueWarning, match=r"`k0`, `k1`, `k2`, `k3`, `k4` and 4 more"):
        warn_of_shared_values(asked, [f"k{i}" for i in range(9)])


def test_what_is_sent_stays_small(tmp_path: Path) -> None:
    """Under 1 KB per rank, for any number of tensors and meshes; equal keys are still seen."""
    names = [f"model.layers.{i}.buffer" for i in range(3000)]
    save_state(tmp_path, {name: torch.zeros(1) for name in names[:50]})
    with fake_world(0, 4):
        state: State = {name: torch.zeros(1) for name in names}
        for i in range(4):
            state[f"w{i}"] = dtensor_on(DeviceMesh("cpu", torch.tensor([0, i] if i else [0])))
        asked = collect_asked_for(state)
    reader = ReshardStorageReader(tmp_path)
    reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    plan = reader.prepare_local_plan(LoadPlan([], planner_data=asked))
    assert plan.planner_data == asked
    assert len(pickle.dumps(plan)) < 1024
    with pytest.warns(RankValueWarning, match="model.layers"):
        warn_of_shared_values([asked, AskedFor(b"other", asked.plain)], names)


def load_in_groups(rank: int, path: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp"))["dp"]
    state = {"w": dtensor_on(mesh), "expert": torch.zeros(3)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dcp_reshard.load(state, path)
    assert torch.equal(state["expert"], indexed_tensor((3,)))
    return [str(w.message) for w in caught if w.category is RankValueWarning]


@pytest.mark.dist
def test_ranks_that_get_their_own_copies_are_not_warned(tmp_path: Path) -> None:
    """A save without collectives has a copy for each of its ranks, and none for a third."""

    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("ep", "dp"))["dp"]
        return {"w": dtensor_on(mesh), "expert": indexed_tensor((3,))}

    save_world(tmp_path, 2, make, use_collectives=False)
    assert gloo_world(2, load_in_groups, tmp_path) == [[], []]
    (tmp_path / "__1.metadata").unlink()
    first, second = gloo_world(2, load_in_groups, tmp_path)
    assert (len(first), len(second)) == (1, 0)


@pytest.mark.dist
def test_the_first_rank_of_a_job_warns(tmp_path: Path) -> None:
    """In a load of several processes the warning comes once, and the load goes on."""
    save_state(tmp_path, {"w": indexed_tensor((2,)), "expert": indexed_tensor((3,))})
    first, second = gloo_world(2, load_in_groups, tmp_path)
    assert len(first) == 1
    assert "`expert`" in first[0]
    assert second == []
