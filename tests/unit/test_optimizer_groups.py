"""Which hyper-parameters a parameter group gets; above all, never another group's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dcp_reshard import HyperParameter, OptimizerStateError
from dcp_reshard.optimizer_groups import GroupPlan, LiveGroup, plan_groups, same_value
from dcp_reshard.optimizer_keys import GroupKey, StoredOptimizer
from dcp_reshard.saved_groups import SavedGroup, SavedGroups, make_saved_groups

TWO = SavedGroups((SavedGroup(("a", "b"), {"lr": 1.0}), SavedGroup(("c",), {"lr": 2.0})))


def flattened(saved: SavedGroups) -> SavedGroups:
    """The same, stored for each parameter."""
    return SavedGroups(
        tuple(SavedGroup((p,), group.values) for group in saved.groups for p in group.params),
        flattened=True,
    )


def plan(
    live: list[tuple[str | None, ...]],
    saved: SavedGroups = TWO,
    *,
    mapping: Mapping[int, int | str | None] | None = None,
    keep: tuple[str, ...] = (),
    **values: Any,
) -> list[GroupPlan]:
    """Plan for groups of these parameters, which all have a learning rate of 0 and these values."""
    groups = [LiveGroup(names, {"params": [], "lr": 0.0, **values}) for names in live]
    return plan_groups(groups, saved, mapping=mapping or {}, keep=keep)


def rates(plans: list[GroupPlan]) -> list[float | None]:
    return [p.values.get("lr") for p in plans]


@given(st.data())
def test_a_group_gets_what_its_own_parameters_had(data: st.DataObject) -> None:
    """In any order of groups and of parameters, nested or flattened, the learning rate follows."""
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    groups = [[f"p{i}.{j}" for j in range(size)] for i, size in enumerate(sizes)]
    saved = SavedGroups(tuple(SavedGroup(tuple(g), {"lr": i}) for i, g in enumerate(groups)))
    order = data.draw(st.permutations(range(len(groups))))
    live = [tuple(data.draw(st.permutations(groups[i]))) for i in order]
    assert rates(plan(live, saved)) == order
    assert rates(plan(live, flattened(saved))) == order


@pytest.mark.parametrize("saved", [TWO, flattened(TWO)], ids=["nested", "flattened"])
def test_merged_groups_are_refused(saved: SavedGroups) -> None:
    """One group cannot have two learning rates; the error shows both."""
    with pytest.raises(OptimizerStateError, match=r"`lr` 1\.0 and 2\.0"):
        plan([("a", "b", "c")], saved)


def test_split_groups_are_refused() -> None:
    """A group that is two groups now would overwrite what one of the two was made for."""
    with pytest.raises(OptimizerStateError, match="groups 0 and 1 were one group, 0,"):
        plan([("a",), ("b",), ("c",)])


def test_groups_merged_with_equal_values_are_refused_too() -> None:
    """Another number of groups is never taken for the same."""
    saved = SavedGroups((SavedGroup(("a",), {"lr": 1}), SavedGroup(("b",), {"lr": 1})))
    with pytest.raises(OptimizerStateError, match="equal hyper-parameters"):
        plan([("a", "b")], saved)


@pytest.mark.parametrize(
    ("saved", "choice"), [(TWO, 1), (TWO, "c"), (flattened(TWO), "c")], ids=str
)
def test_a_mapping_says_whose_values_a_merged_group_gets(
    saved: SavedGroups, choice: int | str
) -> None:
    """By number or by a parameter; what the other parameters had is reported as moved."""
    [group] = plan([("a", "b", "c")], saved, mapping={0: choice})
    assert group.values == {"lr": 2.0}
    moved = HyperParameter(group=0, name="lr", what="moved", value="2.0", instead_of="1.0")
    assert [change for change in group.changes if change.what == "moved"] == [moved]


def test_a_mapping_lets_both_halves_of_a_split_group_have_its_values() -> None:
    """Split groups are restored where the caller says so."""
    assert rates(plan([("a",), ("b",), ("c",)], mapping={0: 0, 1: 0})) == [1.0, 1.0, 2.0]


def test_a_mapping_lets_a_group_keep_its_own_values() -> None:
    """None in the mapping changes nothing in the group, and reports what its parameters had."""
    [group, _] = plan([("a", "b"), ("c",)], mapping={0: None})
    assert group.values == {}
    assert [(c.what, c.value, c.instead_of) for c in group.changes] == [("moved", "0.0", "1.0")]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({3: 0}, r"names groups \[3\], but the optimizer has 2 groups"),
        ({0: 2}, "mapped to saved group 2, but the checkpoint has 2 groups"),
        ({0: -1}, "mapped to saved group -1"),
        ({0: "x"}, "saved group of `x`, which is in no group"),
    ],
)
def test_a_mapping_to_what_is_not_there_is_refused(
    mapping: dict[int, int | str | None], message: str
) -> None:
    """Numbers and names in the mapping must exist."""
    with pytest.raises(OptimizerStateError, match=message):
        plan([("a", "b"), ("c",)], mapping=mapping)


def test_a_number_says_nothing_in_the_flattened_form() -> None:
    """Where there are no groups in the checkpoint, a mapping must name a parameter."""
    with pytest.raises(OptimizerStateError, match="name a parameter"):
        plan([("a", "b"), ("c",)], flattened(TWO), mapping={0: 0})


def test_new_and_removed_groups_leave_the_others_alone() -> None:
    """A group of new parameters keeps what it has; a group that is gone is nobody's."""
    assert rates(plan([(None,), ("c",)])) == [None, 2.0]


def test_groups_without_parameters_are_known_by_position() -> None:
    """An empty group gets the values of the empty group at its place, and of no other."""
    saved = SavedGroups((SavedGroup((), {"lr": 5.0}), SavedGroup(("a",), {"lr": 1.0})))
    assert rates(plan([(), ("a",)], saved)) == [5.0, 1.0]
    assert rates(plan([("a",), ()], saved)) == [1.0, None]
    assert rates(plan([("a",), (), ()], saved)) == [1.0, None, None]


def test_values_that_one_side_lacks_are_kept_and_reported() -> None:
    """`initial_lr` of a scheduler and an option of a newer torch are both there afterwards."""
    saved = SavedGroups((SavedGroup(("a",), {"lr": 1.0, "initial_lr": 3.0}),))
    [group] = plan([("a",)], saved, decoupled=True)
    assert group.values == {"lr": 1.0, "initial_lr": 3.0}
    assert {(c.name, c.what, c.value, c.instead_of) for c in group.changes} == {
        ("lr", "restored", "1.0", "0.0"),
        ("initial_lr", "added", "3.0", "(none)"),
        ("decoupled", "kept", "True", "(none)"),
    }


def test_a_value_that_is_to_be_kept_is_kept_and_reported() -> None:
    """A learning rate given anew goes before the saved one, by option only."""
    [group, _] = plan([("a", "b"), ("c",)], keep=("lr",))
    assert group.values == {}
    [change] = group.changes
    assert (change.what, change.value, change.instead_of) == ("kept", "0.0", "1.0")


def test_equal_values_are_not_reported() -> None:
    """A group that was as it was saved has nothing to report."""
    saved = SavedGroups((SavedGroup(("a",), {"lr": 0.0, "betas": (0.9, 0.99)}),))
    [group] = plan([("a",)], saved, betas=(0.9, 0.99))
    assert group.changes == ()


@pytest.mark.parametrize(
    ("one", "other", "equal"),
    [
        (1, 1.0, True),
        (True, 1, False),
        (None, 0, False),
        ((0.9, 0.99), [0.9, 0.99], True),
        ((0.9, 0.99), (0.9,), False),
        (torch.tensor(0.5), 0.5, True),
        (torch.tensor(0.5), torch.tensor(0.25), False),
        (torch.tensor(0.5), None, False),
    ],
)
def test_hyper_parameters_are_compared_by_value(one: object, other: object, equal: bool) -> None:  # noqa: FBT001
    """Numbers, tensors and tuples are what they hold; flags and None are not numbers."""
    assert same_value(one, other) is equal
    assert same_value(other, one) is equal


def make(values: dict[GroupKey, Any], *, flattened: bool = False) -> SavedGroups:
    stored = StoredOptimizer((), tuple(values), flattened)
    return make_saved_groups(stored, {key.key: value for key, value in values.items()})


def test_groups_are_read_from_every_form() -> None:
    """Value by value, as one object, or by parameter: the same groups."""
    lists = {"lr": 1.0, "betas": [torch.tensor(0.9)], "params": ["a", "b"]}
    nested = make(
        {
            GroupKey("0", 0, ("lr",)): 1.0,
            GroupKey("1", 0, ("betas", 0)): torch.tensor(0.9),
            GroupKey("2", 0, ("params",)): ["a", "b"],
        }
    )
    for saved in (
        nested,
        make({GroupKey("0", None, ()): [lists]}),
        make({GroupKey("0", 0, ()): lists}),
    ):
        [group] = saved.groups
        assert group.params == ("a", "b")
        assert group.values == {"lr": 1.0, "betas": [torch.tensor(0.9)]}
    per_param = {GroupKey("0", "a", ("lr",)): 1.0, GroupKey("1", "b", ("lr",)): 2.0}
    assert [g.values for g in make(per_param, flattened=True).groups] == [{"lr": 1.0}, {"lr": 2.0}]


def test_numbers_get_the_names_that_were_saved_with_them() -> None:
    """`param_names` of a named optimizer turn numbers into names; without them, they stay."""
    with_names = [
        {"params": [0, 1], "param_names": ["a", "b"]},
        {"params": [2], "param_names": ["c"]},
    ]
    saved = make({GroupKey("0", None, ()): with_names})
    assert (saved.params(), saved.numbered) == (["a", "b", "c"], False)
    assert saved.names == {"0": "a", "1": "b", "2": "c"}
    bare = make({GroupKey("0", None, ()): [{"params": [0, 1]}]})
    assert (bare.params(), bare.numbered, bare.names) == (["0", "1"], True, {})


def test_a_group_without_parameters_listed_is_refused() -> None:
    """What has no list of parameters is not a parameter group."""
    with pytest.raises(OptimizerStateError, match="group 0 of the checkpoint has no list"):
        make({GroupKey("0", 0, ("lr",)): 1.0})
