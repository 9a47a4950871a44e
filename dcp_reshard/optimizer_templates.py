"""State dicts of optimizers within a state dict: which groups do they have, nested or flattened?

`get_optimizer_state_dict` gives one of two forms. Nested, groups are a list, and each names its
parameters. Flattened, every parameter has its own copy of its group's hyper-parameters, and nothing
says which parameters are in one group. Parameters of one group do have equal hyper-parameters, so
those that have are taken for a group: they may be several groups, but never a part of one.
`set_optimizer_state_dict` gives a group the values of one of its parameters, which is safe if all
of them get equal values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_reshard._torch import DTensor, ShardedTensor
from dcp_reshard.catalog import KeyPath
from dcp_reshard.hyper_values import same_value
from dcp_reshard.saved_groups import NOT_HYPER_PARAMETERS

__all__ = ["Template", "TemplateGroup", "find_templates"]

_STATE, _GROUPS = "state", "param_groups"
# The nested form, flattened by somebody else.
_NESTED_GROUP = re.compile(rf"{_GROUPS}\.\d+\.params(\.|$)")


@dataclass(frozen=True, slots=True, eq=False)
class TemplateGroup:
    """A parameter group, or, in the flattened form, parameters that may be one."""

    params: tuple[str, ...]
    """Names of its parameters."""

    values: Mapping[str, Any]
    """Its hyper-parameters."""

    keys: tuple[str, ...]
    """Keys that mean it: its own, or in the flattened form that of any of its parameters."""

    places: tuple[tuple[dict[str, Any], str], ...]
    """Where its hyper-parameters are: dicts of the caller, and what goes before their names."""


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """An optimizer's state dict in the state dict to be loaded."""

    path: KeyPath
    """Where it is."""

    groups: tuple[TemplateGroup, ...]
    """Its groups."""

    flattened: bool
    """Whether it is of the flattened form."""

    _numbers: Mapping[str, int] = field(init=False)
    """Number of the group of each parameter."""

    def __post_init__(self) -> None:
        """Number the parameters."""
        numbers = {name: n for n, group in enumerate(self.groups) for name in group.params}
        object.__setattr__(self, "_numbers", numbers)

    def has_group_value(self, path: KeyPath) -> bool:
        """Whether a value is one of a group, or all groups as one object."""
        return self._below(path, _GROUPS) is not None

    def group_at(self, path: KeyPath) -> int | None:
        """Number of the group that a value belongs to; None if it is not one of one group."""
        rest = self._below(path, _GROUPS)
        if not rest:
            return None
        if not self.flattened:
            return rest[0] if isinstance(rest[0], int) else None
        return self._numbers.get(str(rest[0]).rpartition(".")[0])

    def param_at(self, path: KeyPath) -> str | None:
        """Name of the parameter whose state a value is; None if it is not state."""
        rest = self._below(path, _STATE)
        if not rest:
            return None
        if not self.flattened:
            return str(rest[0])
        parts = str(rest[0]).split(".")
        names = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
        return next((name for name in names if name in self._numbers), None)

    def _below(self, path: KeyPath, part: str) -> KeyPath | None:
        depth = len(self.path)
        if path[:depth] != self.path or len(path) == depth:
            return None
        head, rest = str(path[depth]), path[depth + 1 :]
        if not self.flattened:
            return rest if head == part else None
        return (head[len(part) + 1 :], *rest) if head.startswith(f"{part}.") else None


def find_templates(state_dict: Mapping[str, Any]) -> list[Template]:
    """All optimizer state dicts in which groups name their parameters, or that are flattened."""
    return list(_find(state_dict, ()))


def _find(value: object, path: KeyPath) -> Iterator[Template]:
    if not isinstance(value, Mapping):
        return
    groups = value.get(_GROUPS)
    if isinstance(groups, list) and groups and all(map(_names_params, groups)):
        found = (
            TemplateGroup(tuple(group["params"]), group, (_key(path, number),), ((group, ""),))
            for number, group in enumerate(groups)
        )
        yield Template(path, tuple(found), flattened=False)
        return
    if isinstance(value, dict) and (flat := _flattened_groups(value, path)):
        yield Template(path, flat, flattened=True)
        return
    for key, inner in value.items():
        yield from _find(inner, (*path, str(key)))


def _names_params(group: object) -> bool:
    params = group.get("params") if isinstance(group, dict) else None
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def _key(path: KeyPath, group: int | str) -> str:
    return ".".join(map(str, (*path, _GROUPS, group)))


def _flattened_groups(osd: dict[str, Any], path: KeyPath) -> tuple[TemplateGroup, ...]:
    """Groups of a dict in the flattened form; none if it is not in that form."""
    per_param: dict[str, dict[str, Any]] = {}
    for key, value in osd.items():
        if not str(key).startswith(f"{_GROUPS}."):
            continue
        name, _, hyper = key.removeprefix(f"{_GROUPS}.").rpartition(".")
        if _NESTED_GROUP.match(key) or not _is_hyper_parameter(value):
            return ()
        if name and hyper not in NOT_HYPER_PARAMETERS:
            per_param.setdefault(name, {})[hyper] = value
    alike: list[tuple[dict[str, Any], list[str]]] = []
    for name, values in per_param.items():
        names = next((names for other, names in alike if same_value(values, other)), None)
        if names is None:
            alike.append((values, names := []))
        names.append(name)
    return tuple(
        TemplateGroup(
            tuple(names),
            values,
            tuple(_key(path, name) for name in names),
            tuple((osd, f"{_GROUPS}.{name}.") for name in names),
        )
        for values, names in alike
    )


def _is_hyper_parameter(value: object) -> bool:
    """Whether a value may be one; a module that is called ``param_groups`` has weights."""
    if isinstance(value, torch.Tensor):
        sharded = isinstance(value, (DTensor, ShardedTensor))
        return not sharded and value.numel() == 1 and not value.is_meta
    return True
