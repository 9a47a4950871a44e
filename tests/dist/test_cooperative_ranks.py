"""Cooperative reading by real processes whose ranks want odd things, or different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

import dcp_reshard
from dcp_reshard import ReaderOptions, ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.box import Box
from dcp_reshard.layout import LocalShard, TensorLayout
from tests.support.checkpoints import save_world
from tests.support.failures import find_failures
from tests.support.sources import RecordingCheckpoint
from tests.support.tensors import (
    check_same,
    fill_with_sentinel,
    indexed_tensor,
    sentinel_like,
    snapshot,
)
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

State = dict[str, Any]
FULL: dict[str, torch.Tensor] = {
    "w": indexed_tensor((300, 200)),
    "half": indexed_tensor((128, 64), torch.bfloat16),
    "complex": indexed_tensor((60, 80), torch.complex64),
    "ids": indexed_tensor((17,), torch.int64),
    "byte": torch.tensor([42], dtype=torch.uint8),
    "flag": torch.tensor(True),
    "empty": torch.zeros(0, 4),
} | {f"stage{i}": indexed_tensor((100 - 10 * i, 30)) + i for i in range(4)}
BLOCKS = ReaderOptions(
    block_bytes=1024, shared_item_bytes=4096, whole_item_bytes=2048, memory_budget=2**19, threads=2
)
WHOLE = ReaderOptions(threads=2)


def make_saved(rank: int) -> State:
    mesh = init_device_mesh("cpu", (2,))
    rows: State = {
        key: distribute_tensor(full.clone(), mesh, [Shard(0)], src_data_rank=None)
        if full.ndim
        else full.clone()
        for key, full in FULL.items()
    }
    return rows | {"note": "text", "nest": {"lr": 0.5, "list": [1, torch.ones(3)]}}


def blank(*keys: str) -> State:
    return {key: sentinel_like(FULL[key]) for key in keys}


def shard(key: str, mesh: DeviceMesh, dim: int = 0) -> torch.Tensor:
    return distribute_tensor(FULL[key].clone(), mesh, [Shard(dim)], src_data_rank=None)


def load(
    state: State, path: str, options: ReaderOptions, *, planner: Any = None, group: Any = None
) -> ReshardStorageReader:
    reader = ReshardStorageReader(
        RecordingCheckpoint(path), mode="cooperative", options=options, process_group=group
    )
    planner = planner or ReshardLoadPlanner()
    dcp.load(state, storage_reader=reader, planner=planner, process_group=group)
    return reader


def check(state: State) -> None:
    """Every tensor is all there."""
    for key, tensor in state.items():
        assert torch.equal(tensor.detach(), FULL[key].to(tensor.dtype)), key


def load_and_check(state: State, path: str, options: ReaderOptions, **more: Any) -> None:
    """The same of tensors that are sharded, which hold what is to be loaded."""
    wanted = snapshot(state)
    fill_with_sentinel(state)
    load(state, path, options, **more)
    check_same(snapshot(state), wanted)


def one_wants_nothing(rank: int, path: str, options: ReaderOptions) -> None:
    state = blank("w") if rank else {}
    load(state, path, options)
    check(state)


def all_want_nothing(rank: int, path: str, options: ReaderOptions) -> None:
    assert load({}, path, options).stats.cooperation.rounds == 0


def two_rows_for_one(rank: int, path: str, options: ReaderOptions) -> None:
    rows = torch.full((2, 200), -1.0)
    part = LocalShard(Box((149, 0), (2, 200)), rows)
    layout = TensorLayout("w", (300, 200), torch.float32, (part,))
    load({"w": layout} if rank == 2 else {}, path, options)
    assert rank != 2 or torch.equal(rows, FULL["w"][149:151])


def some_in_a_mesh(rank: int, path: str, options: ReaderOptions) -> None:
    mesh = DeviceMesh("cpu", [1, 2])
    # Ranks outside of the mesh hold the tensor, too: nothing of it.
    load_and_check({"w": shard("w", mesh, 1), "half": FULL["half"].clone()}, path, options)


def a_mesh_in_another_order(rank: int, path: str, options: ReaderOptions) -> None:
    mesh = DeviceMesh("cpu", list(reversed(range(dist.get_world_size()))))
    state = {key: shard(key, mesh, FULL[key].ndim - 1) for key in ("w", "half", "complex", "ids")}
    load_and_check(state, path, options)


def stages(rank: int, path: str, options: ReaderOptions) -> None:
    state = blank(f"stage{rank}", "flag")
    load(state, path, options)
    check(state)


def different_things(rank: int, path: str, options: ReaderOptions) -> None:
    turned = FULL["complex"].t().contiguous().t()
    state: State = [
        blank("w"),
        {"complex": sentinel_like(turned), "ids": torch.zeros(34, dtype=torch.int64)[::2]},
        {},
        {"half": torch.nn.Parameter(torch.zeros(128, 64, dtype=torch.bfloat16))},
    ][rank]
    load(state, path, options)
    check(state)


def more_ranks_than_bytes(rank: int, path: str, options: ReaderOptions) -> None:
    state = blank("byte", "flag", "empty")
    load(state, path, options)
    check(state)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    load_and_check({"byte": shard("byte", mesh), "empty": shard("empty", mesh, 1)}, path, options)


def the_same_twice(rank: int, path: str, options: ReaderOptions) -> None:
    state = {key: sentinel_like(FULL["w"]) for key in ("x", "y", "w")}
    dcp_reshard.load(state, path, mode="cooperative", options=options, rename=lambda _: "w")
    assert all(torch.equal(tensor, FULL["w"]) for tensor in state.values())


def two_groups(rank: int, path: str, options: ReaderOptions) -> None:
    last = dist.get_world_size() - 1
    # All ranks make all groups.
    groups = [dist.new_group([0, last]), dist.new_group(range(1, last))]
    state = blank("w", "half") | {"note": None}
    group = groups[0] if rank in (0, last) else groups[1]
    reader = load(state, path, options, group=group)
    expected = "cooperative" if dist.get_world_size(group) > 1 else "direct"
    assert reader.stats.cooperation.mode == expected
    assert state.pop("note") == "text"
    check(state)


def without_the_others(rank: int, path: str, options: ReaderOptions) -> None:
    state = blank("w")
    reader = ReshardStorageReader(RecordingCheckpoint(path), mode="cooperative", options=options)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), no_dist=True)
    check(state)


def torchs_planner(rank: int, path: str, options: ReaderOptions) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    load_and_check(
        {"w": shard("w", mesh, 1), "half": FULL["half"].clone()},
        path,
        options,
        planner=DefaultLoadPlanner(),
    )
    # It casts without a word.
    state: State = {"w": torch.zeros(300, 200, dtype=torch.float64)}
    values: State = {"note": "", "nest": {"lr": 0.0, "list": [0, torch.zeros(3)]}}
    both = state | values
    load(both, path, options, planner=DefaultLoadPlanner())
    check(state)
    assert both["note"] == "text"
    assert both["nest"]["lr"] == 0.5
    assert both["nest"]["list"][0] == 1
    assert torch.equal(both["nest"]["list"][1], torch.ones(3))


def casts(rank: int, path: str, options: ReaderOptions) -> None:
    dtype = [torch.float32, torch.bfloat16, torch.float64, torch.float32][rank]
    state = {key: torch.zeros(FULL[key].shape, dtype=dtype) for key in ("w", "half")}
    dcp_reshard.load(state, path, mode="cooperative", options=options, dtype_policy="cast")
    check(state)


def verified_or_not(rank: int, path: str, options: ReaderOptions) -> None:
    for verify in ("off", "required"):
        state = blank("w", "half")
        load(state, path, replace(options, verify=verify))  # type: ignore[arg-type]
        check(state)


def a_reader_again(rank: int, path: str, options: ReaderOptions) -> None:
    reader = load(blank("w"), path, options)
    state = blank("w", "half")
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    check(state)


def a_key_that_is_missing(rank: int, path: str, options: ReaderOptions) -> None:
    state = blank("w") | ({"gone": torch.zeros(3)} if rank == 1 else {})
    failures = find_failures(lambda: load(state, path, options))
    assert list(failures) == [1]
    assert "`gone`" in str(failures[1])


def other_options(rank: int, path: str, options: ReaderOptions) -> None:
    state = blank("w", "half")
    load(state, path, [BLOCKS, WHOLE, replace(BLOCKS, block_bytes=4096), WHOLE][rank])
    check(state)


SITUATIONS: Sequence[Callable[[int, str, ReaderOptions], None]] = (
    one_wants_nothing,
    all_want_nothing,
    two_rows_for_one,
    some_in_a_mesh,
    a_mesh_in_another_order,
    stages,
    different_things,
    more_ranks_than_bytes,
    the_same_twice,
    two_groups,
    without_the_others,
    torchs_planner,
    casts,
    verified_or_not,
    a_reader_again,
    a_key_that_is_missing,
    other_options,
)


def run_all(rank: int, path: str, options: ReaderOptions) -> int:
    for number, situation in enumerate(SITUATIONS):
        try:
            situation(rank, path, options)
        except BaseException as error:
            error.add_note(f"(in `{SITUATIONS[number].__name__}`)")
            raise
    return len(SITUATIONS)


@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
@pytest.mark.parametrize("size", [3, 4])
def test_whatever_ranks_want(
    tmp_path_factory: pytest.TempPathFactory, size: int, options: ReaderOptions
) -> None:
    """Nothing, other things, the same twice, in groups, with torch's planner: all get theirs."""
    path = tmp_path_factory.mktemp("saved")
    save_world(path, 2, make_saved)
    assert gloo_world(size, run_all, str(path), options) == [len(SITUATIONS)] * size
