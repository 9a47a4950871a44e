"""Finding an optimizer in the keys of a checkpoint, in each form that torch writes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dcp_reshard import OptimizerStateError
from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import Catalog, KeyPath, StoredObject, StoredTensor
from dcp_reshard.optimizer_keys import StateKey, find_stored_optimizer, groups_path, rename_param

NESTED: dict[KeyPath, bool] = {
    ("state", "a.w", "exp_avg"): True,
    ("state", "a.w", "step"): True,
    ("state", "a.b", "old", 0): True,
    ("state", "a.b", "old", 1): True,
    ("param_groups", 0, "lr"): False,
    ("param_groups", 0, "params"): False,
}
FLATTENED: dict[KeyPath, bool] = {
    ("state.a.w.exp_avg",): True,
    ("state.a.w.step",): True,
    ("state.a.b.old.0",): True,
    ("state.a.b.old.1",): True,
    ("param_groups.a.w.lr",): False,
    ("param_groups.a.b.lr",): False,
}


def make_catalog(paths: dict[KeyPath, bool], *, recorded: bool = True) -> Catalog:
    """A catalog of these paths, each a tensor or an object, among the weights of a model."""
    paths = {**paths, ("model", "a.w"): True}
    keys = {".".join(map(str, path)): path for path in paths}
    none = np.zeros(1, np.int64)
    chunks = BoxArray.from_boxes([Box((), ())], ndim=0)
    tensors = {
        key: StoredTensor(key, (), torch.float32, chunks, none.astype(np.int32), none, none)
        for key, path in keys.items()
        if paths[path]
    }
    objects = {key: StoredObject(key, 0, 0, 0) for key, path in keys.items() if not paths[path]}
    return Catalog(tensors, objects, ("file",), keys if recorded else {})


def below(paths: dict[KeyPath, bool], *prefix: str) -> dict[KeyPath, bool]:
    return {(*prefix, *path): is_tensor for path, is_tensor in paths.items()}


@pytest.mark.parametrize("paths", ["recorded", "not recorded"])
@pytest.mark.parametrize("form", [NESTED, FLATTENED], ids=["nested", "flattened"])
@pytest.mark.parametrize(
    ("prefix", "key"),
    [
        (("optimizer",), "optimizer"),
        (("state", "optim"), "state.optim"),
        (("train.optim",), "train.optim"),
        (("train", "a.b", "optim"), "train.a.b.optim"),
        (("state/optim",), "state/optim"),
        ((), ""),
    ],
)
def test_each_value_belongs_to_its_parameter(
    prefix: tuple[str, ...], key: str, form: dict[KeyPath, bool], paths: str
) -> None:
    """At any depth, nested or flattened, with recorded paths or from the names of the keys."""
    recorded = paths == "recorded"
    if not recorded and form is NESTED:
        # Lists below a parameter cannot be told from parts of its name then.
        form = {path: v for path, v in NESTED.items() if len(path) == 3}
    found = find_stored_optimizer(make_catalog(below(form, *prefix), recorded=recorded), key)
    state = {value.param: set() for value in found.state}
    for value in found.state:
        state[value.param].add(tuple(map(str, value.path)))
    assert state["a.w"] == {("exp_avg",), ("step",)}
    if "a.b" in state:
        assert state["a.b"] == {("old", "0"), ("old", "1")}
    assert found.flattened == (form is FLATTENED)
    wanted = {"a.w", "a.b"} if form is FLATTENED else {0}
    assert {value.group for value in found.groups} == wanted


def test_lists_in_the_state_keep_their_numbers() -> None:
    """A path of the nested form is kept as it was recorded, so that lists are lists again."""
    found = find_stored_optimizer(make_catalog(below(NESTED, "o")), "o")
    assert StateKey("o.state.a.b.old.1", "a.b", ("old", 1)) in found.state


def test_the_longest_known_name_wins_in_the_flattened_form() -> None:
    """Nested state of a parameter is told from a longer name by what its group lists."""
    paths: dict[KeyPath, bool] = {
        ("state.a.precond.left",): True,
        ("param_groups.a.lr",): False,
    }
    [value] = find_stored_optimizer(make_catalog(below(paths, "o")), "o").state
    assert (value.param, value.path) == ("a", ("precond", "left"))


def test_groups_and_state_may_be_single_objects() -> None:
    """Torch 2.3 stored all groups, or a parameter's state without tensors, as one object."""
    paths: dict[KeyPath, bool] = {("state", "a.w"): False, ("param_groups",): False}
    found = find_stored_optimizer(make_catalog(below(paths, "o")), "o")
    assert [(value.param, value.path) for value in found.state] == [("a.w", ())]
    assert [(value.group, value.path) for value in found.groups] == [(None, ())]


def test_another_optimizer_with_a_longer_name_is_not_taken() -> None:
    """`optim` does not match `optimizer`, nor `optim2`."""
    paths = below(NESTED, "optimizer") | below(FLATTENED, "optim2")
    with pytest.raises(OptimizerStateError, match="nothing below key 'optim'"):
        find_stored_optimizer(make_catalog(paths), "optim")


def test_a_wrong_key_is_told_the_right_one() -> None:
    """The error says below which keys there is an optimizer, and what is at the top."""
    with pytest.raises(OptimizerStateError, match="below key 'optimizer'") as caught:
        find_stored_optimizer(make_catalog(below(NESTED, "train", "optim")), "optimizer")
    assert "optimizer state is below `train.optim`" in str(caught.value)
    assert "`model`, `train`" in str(caught.value)


def test_a_key_with_other_things_below_is_refused() -> None:
    """The weights of a model are not optimizer state."""
    with pytest.raises(OptimizerStateError, match="1 keys, none of them optimizer state"):
        find_stored_optimizer(make_catalog(below(NESTED, "optim")), "model")


@pytest.mark.parametrize(
    ("path", "renamed"),
    [
        (("t", "o", "state", "a.w", "x", 0), ("t", "o", "state", "b", "x", 0)),
        (("t.o.state.a.w.x",), ("t.o.state.b.x",)),
        (("t", "o", "param_groups.a.w.lr"), ("t", "o", "param_groups.b.lr")),
        (("t.o", "state.a.w.x"), ("t.o", "state.b.x")),
    ],
)
def test_renaming_changes_the_parameter_and_nothing_else(path: KeyPath, renamed: KeyPath) -> None:
    """Wherever the name stands in a path, it alone is replaced."""
    assert rename_param(path, "t.o", "a.w", "b") == renamed


def test_the_list_of_groups_is_found() -> None:
    """In the nested form there is a list of groups, in the flattened one there is none."""
    for form, path in ((NESTED, ("t", "o", "param_groups")), (FLATTENED, None)):
        catalog = make_catalog(below(form, "t", "o"))
        assert groups_path(catalog, "t.o", find_stored_optimizer(catalog, "t.o")) == path
