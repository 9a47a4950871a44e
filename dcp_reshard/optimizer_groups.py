"""Which hyper-parameters does each parameter group of the optimizer get?

Groups have no names, and their order means nothing, so a saved group is found by the parameters in
it. Where that gives no single answer (groups that were split or merged), nothing is guessed: one
group's learning rate must not become another's. The caller then says which is which.

Reads and changes nothing: `plan_groups` says what would be set, and what there is to report.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_reshard.catalog import KeyPath
from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.hyper_values import STATE_OF, differences, same_named, same_value, show_named
from dcp_reshard.report import HyperParameter
from dcp_reshard.saved_groups import NOT_HYPER_PARAMETERS, SavedGroups

__all__ = ["GroupPlan", "LiveGroup", "check_needed_state", "plan_groups"]

_GUESSED = (
    "; the flattened form does not say what is one group, and those with equal hyper-parameters "
    "look like one: a `name` in each tells them apart"
)


@dataclass(frozen=True, slots=True)
class LiveGroup:
    """A parameter group of the optimizer."""

    params: tuple[str | None, ...]
    """Names of its parameters in the checkpoint, None for those that it does not have."""

    values: Mapping[str, Any]
    """The group as it is."""

    guessed: bool = False
    """Whether it is several parameters with equal hyper-parameters, in one group or not."""


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """What is to be set in a parameter group."""

    values: Mapping[str, Any]
    """Hyper-parameters to set."""

    changes: tuple[HyperParameter, ...]
    """What there is to report."""

    source: int | None = None
    """Number of the saved group whose values these are."""


def plan_groups(
    live: Sequence[LiveGroup],
    saved: SavedGroups,
    *,
    mapping: Mapping[int, int | str | None],
    keep: Collection[str],
) -> list[GroupPlan]:
    """Find the hyper-parameters of each group.

    Args:
        live: Groups of the optimizer.
        saved: Groups of the checkpoint.
        mapping: Saved group (by number, or by a parameter of it) of a group of the optimizer; None
            if it keeps its own.
        keep: Names of hyper-parameters that are not to be changed.

    Raises:
        OptimizerStateError: The parameters of a group come from several saved groups, or those of
            a saved group are in several groups now, and `mapping` does not say what to do.
    """
    unknown = sorted(set(mapping) - set(range(len(live))))
    if unknown:
        raise OptimizerStateError(
            f"the mapping of parameter groups names groups {unknown!r}, but the optimizer has "
            f"{len(live)} groups"
        )
    where = saved.index()
    sources = [_sources(group, where) for group in live]
    chosen: list[int | None] = []
    for number, group in enumerate(live):
        if number in mapping:
            chosen.append(_look_up(mapping[number], number, saved, where))
        elif saved.flattened:
            chosen.append(_agreeing(number, group, sources[number], saved, keep))
        else:
            chosen.append(_only(number, sources, saved, mapping))
            if chosen[-1] is None:
                chosen[-1] = _twin(number, group, len(live), saved)
    values = [group.values for group in saved.groups]
    plans = [
        _plan_group(
            number,
            group,
            values[choice] if choice is not None else None,
            [values[source] for source in own],
            keep,
        )
        for number, (group, own, choice) in enumerate(zip(live, sources, chosen, strict=True))
    ]
    return [replace(plan, source=choice) for plan, choice in zip(plans, chosen, strict=True)]


def check_needed_state(
    optimizer: torch.optim.Optimizer,
    plan: GroupPlan,
    final: Mapping[str, Any],
    paths: Collection[KeyPath],
    *,
    name: str,
) -> None:
    """Check that a hyper-parameter that is not as it was saved has the state that it needs.

    Args:
        optimizer: The optimizer.
        plan: What is set in the group.
        final: The group as it will be.
        paths: Paths of the state that a parameter of it has in the checkpoint.
        name: Name of the parameter.

    Raises:
        OptimizerStateError: It has not, and the next step would fail.
    """
    for hyper, state in STATE_OF.items():
        if hyper == "momentum" and not isinstance(optimizer, torch.optim.RMSprop):
            continue  # SGD makes its buffer when it needs one
        if final.get(hyper) and hyper not in plan.values and (state,) not in paths:
            raise OptimizerStateError(
                f"parameter `{name}`: `{hyper}` is to stay {final[hyper]!r}, but there is no "
                f"state `{state}` in the checkpoint, and the next step would need it",
                fqn=name,
            )


def _sources(group: LiveGroup, where: Mapping[str, int]) -> list[int]:
    """Saved groups that the parameters of a group were in, each once."""
    return list(dict.fromkeys(where[n] for n in group.params if n is not None and n in where))


def _look_up(
    wanted: int | str | None, number: int, saved: SavedGroups, where: Mapping[str, int]
) -> int | None:
    if wanted is None:
        return None
    if isinstance(wanted, str):
        if wanted not in where:
            raise OptimizerStateError(
                f"parameter group {number} is mapped to the saved group of `{wanted}`, which is in "
                f"no group of the checkpoint"
            )
        return where[wanted]
    if saved.flattened:
        raise OptimizerStateError(
            f"parameter group {number} is mapped to saved group {wanted}, but this checkpoint "
            f"stores hyper-parameters by parameter; name a parameter that had the wanted ones"
        )
    if not 0 <= wanted < len(saved.groups):
        raise OptimizerStateError(
            f"parameter group {number} is mapped to saved group {wanted}, but the checkpoint has "
            f"{len(saved.groups)} groups"
        )
    return wanted


def _agreeing(
    number: int,
    group: LiveGroup,
    sources: Sequence[int],
    saved: SavedGroups,
    keep: Collection[str],
) -> int | None:
    """In the flattened form: any of the parameters, if all had the same hyper-parameters."""
    known = [name for name in group.params if name is not None]
    if not sources:
        if known:
            raise OptimizerStateError(
                f"the checkpoint has state of `{known[0]}`, but no hyper-parameters; say with "
                f"`groups` which ones are meant",
                fqn=known[0],
            )
        return None
    first = saved.groups[sources[0]]
    others = [saved.groups[other] for other in sources[1:]]
    for other in others:
        if differing := differences(first.values, other.values, but=keep):
            raise OptimizerStateError(
                f"parameters `{first.params[0]}` and `{other.params[0]}` of parameter group "
                f"{number} were saved with other hyper-parameters ({differing}); give the "
                f"optimizer the groups that it had, or say with `groups` which ones are meant"
                f"{_GUESSED if group.guessed else ''}"
            )
    if group.guessed and len(known) < len(group.params):
        own = {name: value for name, value in group.values.items() if name in first.values}
        now = {name: value for name, value in first.values.items() if name in own}
        if differing := differences(now, own, but=keep):
            raise OptimizerStateError(
                f"parameter `{first.params[0]}` was saved with other hyper-parameters than it has "
                f"({differing}), and is with parameters in a group that the checkpoint does not "
                f"know; say with `groups` whether they get its hyper-parameters{_GUESSED}",
                fqn=first.params[0],
            )
    return sources[0]


def _only(
    number: int,
    sources: Sequence[Sequence[int]],
    saved: SavedGroups,
    mapping: Mapping[int, int | str | None],
) -> int | None:
    """In the nested form: the saved group that these parameters, and no others, were in."""
    own = sources[number]
    if len(own) > 1:
        first, second = saved.groups[own[0]].values, saved.groups[own[1]].values
        raise OptimizerStateError(
            f"the parameters of parameter group {number} were saved in several groups, {own!r} "
            f"({differences(first, second) or 'with equal hyper-parameters'}); give the optimizer "
            f"the {len(saved.groups)} groups that it had, or say with `groups` which ones are meant"
        )
    for other, theirs in enumerate(sources[:number]):
        if own and other not in mapping and own[0] in theirs:
            raise OptimizerStateError(
                f"parameter groups {other} and {number} were one group, {own[0]}, when they were "
                f"saved; give the optimizer the {len(saved.groups)} groups that it had, or say "
                f"with `groups` that both get its hyper-parameters"
            )
    return own[0] if own else None


def _twin(number: int, group: LiveGroup, num_live: int, saved: SavedGroups) -> int | None:
    """A group without parameters, or with such that no list has, is known by its position only.

    Under pipeline parallelism every stage has an optimizer of its own, and `dcp.save` keeps the
    lists of one of them, with the state of all.
    """
    alike = num_live == len(saved.groups)
    if not group.params:
        return number if alike and not saved.groups[number].params else None
    unlisted = [name for name in group.params if name is not None]
    if unlisted and not alike:
        raise OptimizerStateError(
            f"no group of the checkpoint lists the parameters of parameter group {number} "
            f"(`{unlisted[0]}`), and it has {len(saved.groups)} groups, not {num_live}; say with "
            f"`groups` which one is meant",
            fqn=unlisted[0],
        )
    return number if unlisted else None


def _plan_group(
    number: int,
    group: LiveGroup,
    wanted: Mapping[str, Any] | None,
    sources: Sequence[Mapping[str, Any]],
    keep: Collection[str],
) -> GroupPlan:
    """The values of a group that is to have `wanted`, and whose parameters had `sources`."""
    own = {name: v for name, v in group.values.items() if name not in NOT_HYPER_PARAMETERS}
    new = {n: value for n, value in (wanted or {}).items() if n not in keep or n not in own}
    final = own | new
    changes: list[HyperParameter] = []

    def note(what: str, name: str, instead_of: Mapping[str, Any]) -> None:
        changes.append(
            HyperParameter(
                group=number,
                name=name,
                what=what,
                value=show_named(final, name),
                instead_of=show_named(instead_of, name),
            )
        )

    for name in new:
        if name not in own:
            note("added", name, own)
        elif not same_value(own[name], new[name]):
            note("restored", name, own)
    if wanted is not None:
        for name in own:
            if not same_named(final, wanted, name):
                note("kept", name, wanted)
    for values in sources:
        for name in values if values is not wanted else ():
            if not same_named(final, values, name) and not same_named(wanted or {}, values, name):
                note("moved", name, values)
    return GroupPlan(new, tuple(dict.fromkeys(changes)))
