"""A plan of ours between our planner and our reader, and where anyone else takes part.

What takes the short way must be the same parts in the same memory as the read items lead to, and
whoever looks at the items, or is asked for memory instead of our planner, must be heard.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import init_device_mesh as make_mesh

from dcp_reshard import ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.deferred import DeferredPlanner
from dcp_reshard.read_items import find_planned
from dcp_reshard.torch_metadata import catalog_of
from dcp_reshard.wanted import Wanted
from tests.support.checkpoints import save_state, save_world
from tests.support.strided import fsdp_over_tp
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world

Describe = Callable[[ReadItem], object]
SHAPE = (12, 10)


def make_state(size: int, *placements: Placement) -> dict[str, Any]:
    """A matrix in some layout, a scalar, a number that is stored as a tensor, and an object."""
    full = indexed_tensor(SHAPE)
    mesh = make_mesh("cpu", (size,) if len(placements) == 1 else (2, size // 2))
    return {
        "w": distribute_tensor(full, mesh, list(placements), src_data_rank=None),
        "scale": torch.tensor(3.0),
        "count": 0 if placements == (Replicate(),) else torch.tensor(5),
        "text": "something",
    }


class KeepingReader(ReshardStorageReader):
    """Keeps the plan that it is given, and may do something with it."""

    kept: LoadPlan

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        self.kept = plan
        return super().prepare_local_plan(plan)


class SortingReader(KeepingReader):
    """Changes the order of the items in place, as readers of others do."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        plan.items.sort(key=lambda item: item.dest_index.fqn, reverse=True)
        return super().prepare_local_plan(plan)


class AskedPlanner(ReshardLoadPlanner):
    """Notes for which tensors it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        self.asked.append(read_item.dest_index.fqn)
        return super().resolve_tensor(read_item)


def plan_of(path: Path, state: dict[str, Any]) -> tuple[ReshardLoadPlanner, LoadPlan]:
    """Our planner, and its plan for a state dict."""
    planner = ReshardLoadPlanner()
    planner.set_up_planner(state, ReshardStorageReader(path).read_metadata(), True)
    return planner, planner.create_local_plan()


def describe(wanted: Wanted, plan: LoadPlan) -> list[tuple[object, ...]]:
    """The parts of a plan, with address, shape and strides of their memory."""
    shared, _ = wanted.resolve(plan)
    return [
        (p.fqn, p.stored, p.chunk, p.offsets, p.dest.data_ptr(), p.dest.shape, p.dest.stride())
        for p in (*shared.tensors, *shared.values)
    ]


@pytest.mark.parametrize("saved", [(Shard(0),), (Shard(1),), (Shard(0), Shard(1))])
@pytest.mark.parametrize("loaded", [(Shard(0),), (Shard(1),), (Replicate(),), (Shard(1), Shard(0))])
def test_parts_are_those_that_the_items_lead_to(
    tmp_path: Path, saved: tuple[Placement, ...], loaded: tuple[Placement, ...]
) -> None:
    """Without items, the same parts go to the same memory, on every rank."""
    save_world(tmp_path, 4, lambda _: make_state(4, *saved))
    for rank in range(4):
        with fake_world(rank, 4):
            planner, plan = plan_of(tmp_path, make_state(4, *loaded))
            catalog = catalog_of(planner.metadata)
            planned = find_planned(plan)
            assert planned is not None
            short = describe(Wanted(catalog, planner), plan)
            assert find_planned(plan) is planned
            num_items, keys = planned.num_items, planned.keys
            items = plan.items
            assert find_planned(plan) is None
            assert short == describe(Wanted(catalog, planner), plan)
            assert num_items == len(items)
            assert keys == {item.dest_index.fqn for item in items} == {*make_state(4, *loaded)}


def test_parts_of_strided_layouts(tmp_path: Path) -> None:
    """Several boxes of one tensor on one rank are views of the right rows of its memory."""
    save_state(tmp_path, {"w": indexed_tensor((16, 3))})
    for rank in range(8):
        with fake_world(rank, 8):
            tensor = fsdp_over_tp(torch.zeros(16, 3), make_mesh("cpu", (4, 2)))
            planner, plan = plan_of(tmp_path, {"w": tensor})
            catalog = catalog_of(planner.metadata)
            short = describe(Wanted(catalog, planner), plan)
            assert plan.items
            assert short == describe(Wanted(catalog, planner), plan)


def test_no_items_are_made_between_our_planner_and_our_reader(tmp_path: Path) -> None:
    """A load through `dcp.load` ends without an item of a tensor, and numbers get their values."""
    save_state(tmp_path, {"w": indexed_tensor(SHAPE), "count": torch.tensor(5), "text": "stored"})
    state: dict[str, Any] = {"w": torch.zeros(SHAPE), "count": 0, "text": ""}
    reader = KeepingReader(tmp_path)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    assert find_planned(reader.kept) is not None
    assert torch.equal(state.pop("w"), indexed_tensor(SHAPE))
    assert state == {"count": 5, "text": "stored"}


def test_whoever_sees_the_items_may_change_them(tmp_path: Path) -> None:
    """A reader that sorts the items in place gets what it made of them."""
    save_state(tmp_path, {"a": indexed_tensor((3,)), "b": indexed_tensor((4,))})
    state = {"a": torch.zeros(3), "b": torch.zeros(4)}
    reader = SortingReader(tmp_path)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    assert [item.dest_index.fqn for item in reader.kept.items] == ["b", "a"]
    assert find_planned(reader.kept) is None
    assert torch.equal(state["b"], indexed_tensor((4,)))


def test_a_planner_of_someone_else_is_asked_for_memory(tmp_path: Path) -> None:
    """A subclass, and a planner that stands before ours, are asked for each tensor."""
    save_state(tmp_path, {"a": indexed_tensor((3,)), "b": indexed_tensor((4,))})
    state = {"a": torch.zeros(3), "b": torch.zeros(4)}
    planner = AskedPlanner()
    dcp.load(state, storage_reader=ReshardStorageReader(tmp_path), planner=planner)
    assert planner.asked == ["a", "b"]

    other = {"a": torch.zeros(3)}

    class Before(DeferredPlanner):
        """Gives memory of its own."""

        def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
            return other[read_item.dest_index.fqn]

    mine = {"a": torch.zeros(3)}
    before = Before(lambda _: (mine, ReshardLoadPlanner()))
    dcp.load(mine, storage_reader=ReshardStorageReader(tmp_path), planner=before)
    assert torch.equal(other["a"], indexed_tensor((3,)))
    assert torch.equal(mine["a"], torch.zeros(3))


def test_copies_of_a_plan_have_its_items(tmp_path: Path) -> None:
    """Pickled or replaced, a plan is what torch's own would be."""
    save_state(tmp_path, {"a": indexed_tensor((3,)), "b": indexed_tensor((4,))})
    _, plan = plan_of(tmp_path, {"a": torch.zeros(3), "b": torch.zeros(4)})
    sent = pickle.loads(pickle.dumps(plan))
    assert type(sent) is LoadPlan
    assert [item.dest_index.fqn for item in sent.items] == ["a", "b"]
    assert sent.planner_data == plan.planner_data
    fewer = replace(plan, items=plan.items[:1])
    assert find_planned(fewer) is None
    assert [item.dest_index.fqn for item in fewer.items] == ["a"]
