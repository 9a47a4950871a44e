"""Parameter groups of `get_optimizer_state_dict` templates: whose hyper-parameters does each get?

By its number, as any other value of a list, a group would get what another group was saved with. So
groups of a template are matched as `load_optimizer` matches those of an optimizer: by their
parameters (`optimizer_groups`), and what that does not answer is refused. The template keeps its
own lists of parameters, which are those of the optimizer that it was made of.

For that the groups of the checkpoint, few and small, are read while the load is planned. The
flattened form has no groups, and is loaded parameter by parameter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_reshard.catalog import Catalog, KeyPath
from dcp_reshard.copying import Copy
from dcp_reshard.errors import MissingTensorError, OptimizerStateError, PlanError
from dcp_reshard.nearest_names import describe_nearest, shorten
from dcp_reshard.optimizer_groups import GroupPlan, LiveGroup, plan_groups
from dcp_reshard.optimizer_keys import StoredOptimizer, find_stored_optimizer
from dcp_reshard.param_names import canonical_name, match_names
from dcp_reshard.plan import PlanOptions
from dcp_reshard.saved_groups import SavedGroups, group_memory, make_saved_groups
from dcp_reshard.values import Taken, is_number, number_as_tensor, to_number

__all__ = [
    "Template",
    "TemplatePlan",
    "check_group_options",
    "find_templates",
    "plan_template",
]

_GROUP_KEY = re.compile(r"(?:(.*)\.)?param_groups(?:\.|$)")


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """An optimizer's state dict in the state dict to be loaded."""

    path: KeyPath
    """Where it is."""

    groups: list[dict[str, Any]]
    """Its parameter groups, the caller's own."""

    def has(self, path: KeyPath, part: str) -> bool:
        """Whether the path leads into its state, or its groups."""
        return path[: len(self.path) + 1] == (*self.path, part)

    def key(self, number: int) -> str:
        """The key of a group."""
        return ".".join(map(str, (*self.path, "param_groups", number)))

    def check_list(self, path: KeyPath, stored: object) -> None:
        """Check a list of parameters that was read as a group of this number.

        With the reader of another package the groups cannot be read beforehand.

        Raises:
            OptimizerStateError: No group of the template has these parameters, and no others.
        """
        if path[-1] != "params" or not isinstance(stored, list):
            return
        mine = [{canonical_name(name) for name in group["params"]} for group in self.groups]
        if {canonical_name(str(name)) for name in stored} not in mine:
            raise OptimizerStateError(
                f"`{'.'.join(map(str, path))}`: the checkpoint has a group of {shorten(stored)}, "
                f"the state dict has groups of {[group['params'] for group in self.groups]!r:.500};"
                f" give the optimizer the groups that it had, or use `ReshardStorageReader`, with "
                f"which the planner can match groups"
            )


@dataclass(frozen=True, slots=True, eq=False)
class TemplatePlan:
    """What the groups of a template get."""

    template: Template
    """The template."""

    plans: list[GroupPlan]
    """What each group gets."""

    unknown: tuple[int, ...]
    """Groups none of whose parameters the checkpoint knows; they keep what they have."""

    read: tuple[str, ...]
    """Keys of the checkpoint that these values come from."""

    def convert(self, *, lossy: bool) -> Iterator[tuple[dict[str, Any], str, Taken]]:
        """Groups, names of hyper-parameters, and their values; a number stays one, and so on.

        Args:
            lossy: Whether a number may be rounded to a tensor's dtype.

        Raises:
            PlanError: A number or tensor cannot have the saved value.
        """
        for number, (group, plan) in enumerate(zip(self.template.groups, self.plans, strict=True)):
            for name, value in plan.values.items():
                fqn = f"{self.template.key(number)}.{name}"
                yield group, name, _converted(fqn, group.get(name), value, lossy=lossy)


def find_templates(state_dict: Mapping[str, Any]) -> list[Template]:
    """All nested optimizer state dicts in which groups name their parameters."""
    return list(_find(state_dict, ()))


def _find(value: object, path: KeyPath) -> Iterator[Template]:
    if not isinstance(value, Mapping):
        return
    groups = value.get("param_groups")
    if isinstance(groups, list) and groups and all(map(_names_params, groups)):
        yield Template(path, groups)
        return
    for key, inner in value.items():
        yield from _find(inner, (*path, str(key)))


def _names_params(group: object) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def plan_template(
    template: Template,
    paths: Mapping[str, KeyPath],
    keys: Mapping[str, str],
    catalog: Catalog,
    *,
    options: PlanOptions,
    read: Callable[[dict[str, Any]], None],
) -> TemplatePlan | None:
    """Find the hyper-parameters of each group.

    Args:
        template: The template.
        paths: Path of each key of the state dict.
        keys: Key in the checkpoint of each.
        catalog: What the checkpoint holds.
        options: How to treat what does not match.
        read: Fills values of the checkpoint, by key.

    Returns:
        The plan; None if the checkpoint has no such groups, or none that name their parameters.

    Raises:
        OptimizerStateError: Groups were merged or split, and `options.groups` does not say how.
        MissingTensorError: The checkpoint does not know any parameter of a group.
    """
    where = [keys[fqn] for fqn, path in paths.items() if template.has(path, "param_groups")]
    match = next((m for key in where if key in catalog and (m := _GROUP_KEY.match(key))), None)
    if match is None:
        return None
    stored = find_stored_optimizer(catalog, match[1] or "")
    if stored.flattened:
        return None
    values = group_memory(stored, catalog)
    read(values)
    saved = make_saved_groups(stored, values)
    if saved.numbered:
        return None
    names = _match(template, paths, keys, stored, saved, options)
    given = options.groups or {}
    numbers = range(len(template.groups))
    mapping = {n: given[template.key(n)] for n in numbers if template.key(n) in given}
    live = [LiveGroup(tuple(names[p] for p in g["params"]), g) for g in template.groups]
    plans = plan_groups(live, saved, mapping=mapping, keep=options.keep_hyper_parameters)
    unknown = tuple(
        number
        for number, group in enumerate(live)
        if group.params and number not in mapping and not any(group.params)
    )
    if unknown and options.on_missing == "error":
        own = [name for number in unknown for name in template.groups[number]["params"]]
        raise MissingTensorError(
            f"the checkpoint knows no parameter of `{template.key(unknown[0])}`; "
            + describe_nearest(own, saved.params(), here="in the state dict"),
            fqn=template.key(unknown[0]),
        )
    return TemplatePlan(template, plans, unknown, tuple(_used(stored, saved, names, plans)))


def _match(
    template: Template,
    paths: Mapping[str, KeyPath],
    keys: Mapping[str, str],
    stored: StoredOptimizer,
    saved: SavedGroups,
    options: PlanOptions,
) -> dict[str, str | None]:
    """Name in the checkpoint of each parameter: that of its state, if it has some."""
    params = {key.key: saved.names.get(key.param, key.param) for key in stored.state}
    by_state: dict[str, str] = {}
    for fqn, path in paths.items():
        if template.has(path, "state") and len(path) > len(template.path) + 1:
            name = params.get(keys[fqn])
            if name is not None:
                by_state[str(path[len(template.path) + 1])] = name
    prefix = ".".join(map(str, (*template.path, "state")))
    wanted: dict[str, tuple[str, ...]] = {}
    for group in template.groups:
        for own in group["params"]:
            renamed = options.stored_key(f"{prefix}.{own}").rpartition("state.")[2]
            wanted[own] = (by_state[own],) if own in by_state else (own, renamed)
    found = match_names(list(wanted.values()), [*saved.params(), *by_state.values()])
    return dict(zip(wanted, found.stored, strict=True))


def _used(
    stored: StoredOptimizer,
    saved: SavedGroups,
    names: Mapping[str, str | None],
    plans: Sequence[GroupPlan],
) -> Iterator[str]:
    """Keys of the groups that have any of the parameters, or whose values are taken."""
    index = saved.index()
    used = {plan.source for plan in plans} | {index.get(name or "") for name in names.values()}
    numbers = sorted({int(key.group) for key in stored.groups if key.group is not None})
    for key in stored.groups:
        if key.group is None or numbers.index(int(key.group)) in used:
            yield key.key


def check_group_options(options: PlanOptions, templates: list[Template]) -> None:
    """Check that `groups` names groups that there are.

    Raises:
        PlanError: It does not.
    """
    known = {t.key(number) for t in templates for number in range(len(t.groups))}
    unknown = sorted((options.groups or {}).keys() - known)
    if unknown:
        raise PlanError(
            f"`groups` names {shorten(unknown)}, but the state dict has parameter groups "
            f"{shorten(sorted(known)) or 'nowhere'}"
        )


def _converted(fqn: str, mine: object, value: object, *, lossy: bool) -> Taken:
    if isinstance(mine, torch.Tensor):
        if isinstance(value, torch.Tensor) and (mine.shape, mine.dtype) == (
            value.shape,
            value.dtype,
        ):
            return Taken(mine, [Copy(fqn, mine, value)])
        number = value.item() if isinstance(value, torch.Tensor) else value
        return Taken(mine, [number_as_tensor(fqn, mine, number, lossy=lossy)])
    if is_number(mine) and isinstance(value, torch.Tensor):
        return Taken(to_number(fqn, value, mine))
    return Taken(value)
