"""Containers of a state dict; values that are a tensor on one side and a number on the other."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import LayoutError, PlanError, ReshardLoadPlanner, ReshardStorageReader
from tests.support.checkpoints import save_state
from tests.support.failures import catch_failure
from tests.support.tensors import (
    check_same,
    fill_with_sentinel,
    indexed_tensor,
    local_tensors,
    snapshot,
)
from tests.support.worlds import fake_world

State = dict[str, Any]


def containers() -> State:
    """Tensors and other values in every container that is looked into, under keys of all kinds."""
    return {
        "list": [indexed_tensor((3,)), {"in": [indexed_tensor((2, 2)), 7]}, "text"],
        "numbers": {0: indexed_tensor((4,)), 1: {"step": 5, 2: [8, indexed_tensor((5,))]}},
        "with.dots": {"layers.0.w": indexed_tensor((6,)), "": 3},
        "ordered": OrderedDict(b=indexed_tensor((2,)), a=None),
        "flat": [1, 2, 3],
        "empty": {},
        "betas": (0.9, 0.95),
        "deep": {3: {4: 1}},
    }


def blank(value: Any) -> Any:
    """The same containers with every value that is not a tensor replaced."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, dict):
        return type(value)((key, blank(inner)) for key, inner in value.items())
    if isinstance(value, list) and any(isinstance(v, list | dict | torch.Tensor) for v in value):
        return [blank(inner) for inner in value]
    return "to be replaced"


def load_with(reader: type, state: State, path: Path) -> None:
    dcp.load(state, storage_reader=reader(path), planner=ReshardLoadPlanner(), no_dist=True)


@pytest.mark.parametrize("reader", [ReshardStorageReader, dcp.FileSystemReader])
def test_every_value_goes_back_under_its_own_key(tmp_path: Path, reader: type) -> None:
    """Keys that are not strings, have dots or are empty get their values; no other key appears."""
    wanted = containers()
    save_state(tmp_path, wanted)
    state = blank(containers())
    own = {name: tensor.data_ptr() for name, tensor in local_tensors(state)}
    fill_with_sentinel(state)
    load_with(reader, state, tmp_path)
    check_same(snapshot(state), snapshot(wanted))
    assert {name: tensor.data_ptr() for name, tensor in local_tensors(state)} == own
    assert without_tensors(state) == without_tensors(wanted)


def test_outer_keys_of_several_types(tmp_path: Path) -> None:
    """`load` takes numbers and texts as keys of one dict, which `dcp.load` of torch cannot sort."""
    wanted = {"w": indexed_tensor((3,)), 3: {4: indexed_tensor((2,))}, 10: 1, True: "yes"}
    save_state(tmp_path, wanted)
    state: Any = {"w": torch.zeros(3), 3: {4: torch.zeros(2)}, 10: None, True: None}
    dcp_reshard.load(state, tmp_path, no_dist=True)
    check_same(snapshot(state), snapshot(wanted))
    assert without_tensors(state) == without_tensors(wanted)


def without_tensors(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, dict):
        return {key: without_tensors(inner) for key, inner in value.items()}
    return [without_tensors(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.row("B39")
def test_two_keys_of_one_name_are_refused(tmp_path: Path) -> None:
    """Values whose flattened names are equal cannot be told apart in a checkpoint."""
    save_state(tmp_path, {"a": {"b": indexed_tensor((2,))}})
    state = {"a": {"b": torch.zeros(2)}, "a.b": torch.zeros(2)}
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert "a.b" in str(error)
    assert "one name" in str(error)


def test_tensors_inside_a_tuple_are_filled_in_place(tmp_path: Path) -> None:
    """A tuple is stored as one object, but the caller's tensors in it are kept and filled."""
    whole = {"pair": (indexed_tensor((3,)), [1, {"w": indexed_tensor((2,), torch.int16)}], "text")}
    save_state(tmp_path, whole)
    first, second = torch.zeros(3), torch.zeros(2, dtype=torch.int16)
    state: State = {"pair": (first, [None, {"w": second}], None)}
    dcp_reshard.load(state, tmp_path, no_dist=True)
    assert state["pair"][0] is first
    assert state["pair"][1][1]["w"] is second
    assert torch.equal(first, whole["pair"][0])
    assert second.tolist() == [0, 1]
    assert (state["pair"][1][0], state["pair"][2]) == (1, "text")


@pytest.mark.parametrize(
    "value",
    [
        (torch.zeros(3), torch.zeros(2)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3), torch.zeros(3), torch.zeros(3)),
        (torch.zeros(3), {"w": torch.zeros(3)}),
        (torch.zeros(3), (torch.zeros(3),)),
        torch.zeros(3).split(1),
    ],
    ids=["shape", "dtype", "length", "dict", "tuple", "views"],
)
def test_a_tuple_that_does_not_fit_is_refused(tmp_path: Path, value: tuple[Any, ...]) -> None:
    """No tensor of a tuple is written unless all of them fit, and the error says which does not."""
    save_state(tmp_path, {"pair": (indexed_tensor((3,)) + 1, indexed_tensor((3,)) + 1)})
    state: State = {"pair": value}
    before = snapshot(state)
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert isinstance(error, PlanError)
    assert error.fqn == "pair"
    assert "`pair" in str(error)
    check_same(snapshot(state), before)


def test_shards_inside_a_tuple_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    """One rank's object cannot hold what other ranks have, so it is never tried."""
    save_state(tmp_path, {"fine": indexed_tensor((4,)), "pair": (indexed_tensor((4,)), 1)})
    with fake_world(0, 2):
        mesh = init_device_mesh("cpu", (2,))
        shard = distribute_tensor(torch.zeros(4), mesh, [Shard(0)], src_data_rank=None)
        state = {"fine": torch.zeros(4), "pair": (shard, 1)}
        error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert isinstance(error, LayoutError)
    assert "`pair.0` is a DTensor inside a tuple" in str(error)
    assert not state["fine"].any()


def test_a_list_that_had_no_tensors_is_missing_as_tensors(tmp_path: Path) -> None:
    """A list of numbers was one object; the tensors that are wanted now are named, each."""
    save_state(tmp_path, {"betas": [0.9, 0.95]})
    state = {"betas": [torch.zeros(()), torch.zeros(())]}
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert "`betas.0`, `betas.1`" in str(error)


def replicated(tensor: torch.Tensor) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    return distribute_tensor(tensor, mesh, [Replicate()], src_data_rank=None)


NUMBERS = [
    (5, torch.int64, ()),
    (5, torch.float32, (1,)),
    (-0.5, torch.bfloat16, (1, 1)),
    (0.1, torch.float64, ()),
    (True, torch.bool, ()),
    (1 - 2j, torch.complex64, ()),
    (float("inf"), torch.float32, ()),
    (2**53 + 1, torch.int64, ()),
]


@pytest.mark.parametrize("make", [lambda t: t, replicated], ids=["plain", "dtensor"])
@pytest.mark.parametrize(("number", "dtype", "shape"), NUMBERS)
@pytest.mark.parametrize("reader", [ReshardStorageReader, dcp.FileSystemReader])
def test_a_number_goes_into_a_tensor_and_back(
    tmp_path: Path,
    number: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    reader: type,
    make: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """What was a number is loaded into the caller's own tensor of one element, and the reverse."""
    tensor = torch.full(shape, number, dtype=dtype)
    save_state(tmp_path, {"group": {"number": number, "tensor": tensor}})
    with fake_world(1, 2):
        dest = make(torch.zeros(shape, dtype=dtype))
        state = {"group": {"number": dest, "tensor": type(number)()}}
        load_with(reader, state, tmp_path)
        assert state["group"]["number"] is dest
        check_same(snapshot({"w": dest}), {"w": tensor})
    assert state["group"]["tensor"] == number
    assert type(state["group"]["tensor"]) is type(number)


@pytest.mark.parametrize(
    ("stored", "dest"),
    [
        (0.1, torch.zeros(())),
        (300, torch.zeros((), dtype=torch.int8)),
        (1.5, torch.zeros((), dtype=torch.int64)),
        (2**53 + 1, torch.zeros((), dtype=torch.float64)),
        (True, torch.zeros((), dtype=torch.int64)),
        (1, torch.zeros((), dtype=torch.bool)),
        (1j, torch.zeros(())),
        ("1", torch.zeros(())),
        (None, torch.zeros(())),
        (torch.tensor(1.5), 0),
        (torch.tensor(2**53 + 1), 0.0),
        (torch.tensor([1.0]), True),
        (torch.tensor(True), 1),
        (torch.tensor(float("nan")), 1),
        (torch.tensor(1j), 1.0),
    ],
)
def test_a_number_that_would_change_is_refused(tmp_path: Path, stored: Any, dest: Any) -> None:
    """No value is rounded, cut, or given another meaning on its way from number to tensor."""
    save_state(tmp_path, {"lr": stored})
    state = {"lr": dest}
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert isinstance(error, PlanError)
    assert error.fqn == "lr"
    assert state["lr"] is dest
    assert not isinstance(dest, torch.Tensor) or not dest


def test_rounding_a_number_is_a_cast(tmp_path: Path) -> None:
    """The policy that lets tensors be cast lets a number be rounded to a tensor's dtype."""
    save_state(tmp_path, {"lr": 0.1})
    state = {"lr": torch.zeros(())}
    dcp_reshard.load(state, tmp_path, no_dist=True, dtype_policy="cast")
    assert state["lr"] == torch.tensor(0.1)


@pytest.mark.parametrize(
    ("stored", "dest"),
    [
        (7, torch.zeros(2)),
        (7, torch.zeros(0)),
        (torch.zeros(2), 7),
        (torch.zeros(1), "7"),
        (torch.zeros(1), None),
    ],
)
def test_more_than_a_number_is_refused_before_anything_is_written(
    tmp_path: Path, stored: Any, dest: Any
) -> None:
    """A tensor of several elements is no number, and a text is no tensor: the plan says so."""
    save_state(tmp_path, {"fine": indexed_tensor((4,)), "value": stored})
    state = {"fine": torch.zeros(4), "value": dest}
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert error.fqn == "value"
    assert not state["fine"].any()
    assert state["value"] is dest


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tied_parameters_stay_tied(tmp_path: Path, device: str) -> None:
    """One tensor under two keys is one tensor afterwards, also if it had no memory before."""
    full = indexed_tensor((5, 3))
    save_state(tmp_path, {"embedding": full, "head": {"w": full}, "step": 4})
    tied = torch.zeros(5, 3, device=device)
    state: State = {
        "embedding": tied,
        "head": {"w": tied},
        "step": torch.zeros((), device=device),
    }
    dcp_reshard.load(state, tmp_path, no_dist=True)
    assert state["embedding"] is state["head"]["w"]
    assert torch.equal(state["embedding"], full)
    assert state["step"] == 4
