"""Parameter groups of `get_optimizer_state_dict` templates: whose hyper-parameters does each get?

By its number, as any other value of a list, a group would get what another group was saved with. So
groups of a template are matched as `load_optimizer` matches those of an optimizer: by their
parameters (`optimizer_groups`), and what that does not answer is refused. The template keeps its
own lists of parameters, which are those of the optimizer that it was made of. Template and
checkpoint may each be nested or flattened (`optimizer_templates`).

For that the groups of the checkpoint, few and small, are read while the load is planned.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from dcp_reshard.catalog import Catalog, KeyPath
from dcp_reshard.copying import Copy
from dcp_reshard.errors import MissingTensorError, OptimizerStateError, PlanError
from dcp_reshard.hyper_values import STATE_OF
from dcp_reshard.nearest_names import describe_nearest, shorten
from dcp_reshard.optimizer_groups import GroupPlan, LiveGroup, plan_groups
from dcp_reshard.optimizer_keys import StoredOptimizer, find_stored_optimizer
from dcp_reshard.optimizer_templates import Template
from dcp_reshard.param_names import match_names
from dcp_reshard.plan import PlanOptions
from dcp_reshard.report import HyperParameter
from dcp_reshard.saved_groups import SavedGroups, group_memory, make_saved_groups
from dcp_reshard.values import Taken, is_number, number_as_tensor, to_number

__all__ = ["TemplatePlan", "plan_template"]

_GROUP_KEY = re.compile(r"(?:(.*)\.)?param_groups(?:\.|$)")


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
        """Dicts of the caller, their keys, and the values of those; a number stays one, and so on.

        Args:
            lossy: Whether a number may be rounded to a tensor's dtype.

        Raises:
            PlanError: A number or tensor cannot have the saved value.
        """
        for group, plan in zip(self.template.groups, self.plans, strict=True):
            for name, value in plan.values.items():
                for key, (container, prefix) in zip(group.keys, group.places, strict=True):
                    own = container.get(prefix + name)
                    taken = _converted(f"{key}.{name}", own, value, lossy=lossy)
                    yield container, prefix + name, taken

    def changes(self) -> Iterator[HyperParameter]:
        """What there is to report; a flattened group is called by its first parameter."""
        for group, plan in zip(self.template.groups, self.plans, strict=True):
            for change in plan.changes:
                named = self.template.flattened
                yield replace(change, group=group.params[0]) if named else change


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
        The plan; None if the checkpoint has no such groups.

    Raises:
        OptimizerStateError: Groups were merged or split, and `options.groups` does not say how;
            they do not name their parameters; or the template has no place for state that is
            needed.
        MissingTensorError: The checkpoint does not know any parameter of a group.
    """
    where = _stored_at(template, paths, keys, catalog)
    if where is None:
        return None
    stored = find_stored_optimizer(catalog, where)
    values = group_memory(stored, catalog)
    read(values)
    listed = make_saved_groups(stored, values)
    if listed.numbered:
        raise OptimizerStateError(
            f"`{where}` was saved with the numbers of parameters (by `Optimizer.state_dict`), and "
            f"the state dict has their names; `load_optimizer` matches them by position if "
            f"`OptimizerOptions` say so"
        )
    saved = listed.by_parameter() if template.flattened else listed
    names = _match(template, paths, keys, stored, saved, options)
    live = [
        LiveGroup(tuple(names[p] for p in g.params), g.values, guessed=template.flattened)
        for g in template.groups
    ]
    mapping = _mapping(template, options)
    plans = plan_groups(live, saved, mapping=mapping, keep=options.keep_hyper_parameters)
    unknown = tuple(
        number
        for number, group in enumerate(live)
        if group.params and number not in mapping and not any(group.params)
    )
    nothing = len(unknown) == len(live)
    if unknown and (nothing or options.on_missing == "error"):
        own = [name for number in unknown for name in template.groups[number].params]
        key = template.groups[unknown[0]].keys[0]
        raise MissingTensorError(
            f"{'nothing to restore: ' * nothing}the checkpoint knows no parameter of `{key}`; "
            + describe_nearest(own, saved.params(), here="in the state dict"),
            fqn=key,
        )
    asked = {keys[fqn] for fqn, path in paths.items() if template.param_at(path) is not None}
    _check_state(template, plans, names, stored, saved, asked)
    used = {name for name in names.values() if name is not None}
    for plan in plans:
        if plan.source is not None:
            used.update(saved.groups[plan.source].params)
    return TemplatePlan(template, plans, unknown, tuple(_used(stored, listed, used)))


def _stored_at(
    template: Template, paths: Mapping[str, KeyPath], keys: Mapping[str, str], catalog: Catalog
) -> str | None:
    """Where in the checkpoint the optimizer is; None if it has no groups there."""
    for fqn, path in paths.items():
        if template.has_group_value(path) and keys[fqn] in catalog:
            match = _GROUP_KEY.match(keys[fqn])
            return None if match is None else match[1] or ""
    # Saved in the other form, or by other names.
    where = ".".join(map(str, template.path))
    groups = f"{where}.param_groups." if where else "param_groups."
    return where if any(key.startswith(groups) for key in catalog.keys) else None


def _mapping(template: Template, options: PlanOptions) -> dict[int, int | str | None]:
    """What `groups` says of each group, by number.

    Raises:
        PlanError: It says two things of one.
    """
    given = options.groups or {}
    mapping: dict[int, int | str | None] = {}
    for number, group in enumerate(template.groups):
        said = {key: given[key] for key in group.keys if key in given}
        if len(set(said.values())) > 1:
            raise PlanError(
                f"`groups` says {said!r}, but these parameters have equal hyper-parameters in the "
                f"state dict, and may be one group"
            )
        mapping |= dict.fromkeys([number] if said else [], next(iter(said.values()), None))
    return mapping


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
        own, name = template.param_at(path), params.get(keys[fqn])
        if own is not None and name is not None:
            by_state[own] = name
    prefix = ".".join(map(str, (*template.path, "state")))
    wanted: dict[str, tuple[str, ...]] = {}
    for group in template.groups:
        for own in group.params:
            renamed = options.stored_key(f"{prefix}.{own}").rpartition("state.")[2]
            wanted[own] = (by_state[own],) if own in by_state else (own, renamed)
    found = match_names(list(wanted.values()), [*saved.params(), *by_state.values()])
    return dict(zip(wanted, found.stored, strict=True))


def _check_state(
    template: Template,
    plans: Sequence[GroupPlan],
    names: Mapping[str, str | None],
    stored: StoredOptimizer,
    saved: SavedGroups,
    asked: Set[str],
) -> None:
    """Check that the template has the state that there will have to be.

    Raises:
        OptimizerStateError: It has none at all, or not that of a hyper-parameter that it gets.
    """
    owners = {
        name: (group.values, plan.values)
        for group, plan in zip(template.groups, plans, strict=True)
        for own in group.params
        if (name := names[own]) is not None
    }
    left: list[str] = []
    for key in stored.state:
        param = saved.names.get(key.param, key.param)
        if key.key in asked or param not in owners or not key.path:
            continue
        before, restored = owners[param]
        hyper = next((h for h, state in STATE_OF.items() if state == key.path[0]), "")
        if restored.get(hyper) and not before.get(hyper):
            raise OptimizerStateError(
                f"parameter `{param}`: `{hyper}` was saved as {restored[hyper]!r}, with state "
                f"`{key.path[0]}`, for which the state dict has no place, and the next step would "
                f"go on without it; make the state dict from an optimizer with that `{hyper}`, "
                f"keep it as it is (`keep_hyper_parameters`), or use `load_optimizer`",
                fqn=param,
            )
        if not hyper or restored.get(hyper, before.get(hyper)):
            left.append(param)
    if left and asked.isdisjoint(key.key for key in stored.state):
        raise OptimizerStateError(
            f"nothing to restore: the state dict has no state, the checkpoint has that of "
            f"{shorten(dict.fromkeys(left))}; `get_optimizer_state_dict` gives none if parameters "
            f"have gradients: set these to None first, or use `load_optimizer`",
            fqn=left[0],
        )


def _used(stored: StoredOptimizer, listed: SavedGroups, params: set[str]) -> Iterator[str]:
    """Keys of the groups that have any of the parameters, or none at all."""
    numbers = sorted({int(key.group) for key in stored.groups if isinstance(key.group, int)})
    lists = dict(
        zip(numbers, (group.params for group in listed.groups), strict=not stored.flattened)
    )
    for key in stored.groups:
        if isinstance(key.group, str):
            own: tuple[str, ...] = (key.group,)
        else:
            own = () if key.group is None else lists[key.group]
        if not own or not params.isdisjoint(own):
            yield key.key


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
