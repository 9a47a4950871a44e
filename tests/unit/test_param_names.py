"""Names of parameters of model and checkpoint, whatever wrappers were around either."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dcp_reshard import OptimizerStateError
from dcp_reshard.nearest_names import describe_nearest, find_nearest
from dcp_reshard.param_names import match_names

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
NAMES = ["layers.0.weight", "layers.0.bias", "layers.1.weight", "head.weight"]


@st.composite
def wrapped(draw: st.DrawFn, name: str) -> str:
    """The name with any number of wrappers, in any order, before each part."""
    parts: list[str] = []
    for part in name.split("."):
        parts += [*draw(st.lists(st.sampled_from(WRAPPERS), max_size=2)), part]
    return ".".join(parts)


@given(st.data())
def test_wrappers_on_either_side_do_not_matter(data: st.DataObject) -> None:
    """Each parameter is found, however both of its names are wrapped."""
    wanted = [data.draw(wrapped(name)) for name in NAMES]
    stored = [data.draw(wrapped(name)) for name in NAMES]
    match = match_names([(name,) for name in wanted], data.draw(st.permutations(stored)))
    assert match.stored == tuple(stored)
    assert match.unused == ()


def test_an_exact_name_goes_before_one_without_wrappers() -> None:
    """A model with a real submodule called `module` is matched part by part."""
    match = match_names([("w",), ("module.w",)], ["module.w", "w"])
    assert match.stored == ("w", "module.w")


def test_a_name_that_is_taken_is_not_given_again() -> None:
    """Of `w` and `module.w` in the checkpoint, a model that has `w` alone gets `w`."""
    match = match_names([("w",)], ["module.w", "w"])
    assert match.stored == ("w",)
    assert match.unused == ("module.w",)


@pytest.mark.parametrize(
    ("wanted", "stored"),
    [
        ([("w",)], ["module.w", "_orig_mod.w"]),
        ([("module.w",), ("_orig_mod.w",)], ["w"]),
    ],
)
def test_two_names_that_are_one_without_wrappers_are_refused(
    wanted: list[tuple[str, ...]], stored: list[str]
) -> None:
    """Nothing is guessed where taking the wrappers off leaves two candidates, on either side."""
    with pytest.raises(OptimizerStateError, match=r"parameter `w`: without the parts") as caught:
        match_names(wanted, stored)
    for name in ("`module.w`", "`_orig_mod.w`"):
        assert name in str(caught.value)


def test_the_first_stored_name_of_a_tied_parameter_counts() -> None:
    """A parameter with several names is found by any of them; the others are left over."""
    wanted = [("a.w", "b.w")]
    assert match_names(wanted, ["b.w"]).stored == ("b.w",)
    match = match_names(wanted, ["b.w", "a.w"])
    assert match.stored == ("a.w",)
    assert match.unused == ("b.w",)


@pytest.mark.parametrize("rename", [{"new.w": "old.w"}, lambda n: n.replace("new", "old")])
@pytest.mark.parametrize("name", ["new.w", "module.new.w"])
def test_renaming_works_with_and_without_wrappers(
    name: str, rename: Mapping[str, str] | Callable[[str], str]
) -> None:
    """`rename` may be written for bare names, and goes before any match."""
    match = match_names([(name,)], ["old.w", "new.w"], rename=rename)
    assert match.stored == ("old.w",)


def test_two_parameters_may_be_renamed_to_one() -> None:
    """Both halves of a weight that was tied when it was saved get its state."""
    match = match_names([("emb.w",), ("head.w",)], ["emb.w"], rename={"head.w": "emb.w"})
    assert match.stored == ("emb.w", "emb.w")


def test_renaming_to_a_name_that_is_not_there_is_refused() -> None:
    """A typing error in `rename` is not taken for a new parameter."""
    with pytest.raises(OptimizerStateError, match=r"`old\.v` .*nearest: `old\.w`"):
        match_names([("new.w",)], ["old.w"], rename={"new.w": "old.v"})


def test_nearest_names_are_listed_on_both_sides() -> None:
    """The hint names both sides, with what comes nearest on the other, and counts the rest."""
    text = describe_nearest(["layers.0.w", "b", "c", "d"], ["blocks.0.w"])
    assert "in the model: `layers.0.w` (nearest: `blocks.0.w`)" in text
    assert "and 1 more" in text
    assert "in the checkpoint: `blocks.0.w` (nearest: `layers.0.w`)" in text


def test_the_nearest_of_very_many_names_is_found_among_those_in_its_place() -> None:
    """Of 100,000 names, those that share the module or the last word are compared."""
    names = [f"layers.{i}.weight" for i in range(50_000)] + [f"bias.{i}" for i in range(50_000)]
    assert "layers.77.weight" in find_nearest("layers.77.weight_", names)
    assert find_nearest("layers.1.weight", names)[0] == "layers.1.weight"
    assert find_nearest("nothing.like.it", names) == []
