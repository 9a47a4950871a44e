"""The parameter groups of a checkpoint, brought to one form, whatever form they were stored in.

A group is the names of its parameters and its hyper-parameters by name. The flattened form stores
hyper-parameters for each parameter, so there every parameter is a group of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dcp_reshard._torch import set_element
from dcp_reshard.catalog import Catalog
from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.optimizer_keys import StoredOptimizer

__all__ = [
    "NOT_HYPER_PARAMETERS",
    "SavedGroup",
    "SavedGroups",
    "group_memory",
    "make_saved_groups",
]

NOT_HYPER_PARAMETERS = frozenset({"params", "param_names"})


@dataclass(frozen=True, slots=True)
class SavedGroup:
    """One parameter group of the checkpoint."""

    params: tuple[str, ...]
    """Names of its parameters; numbers as text if they were saved by number and have no name."""

    values: Mapping[str, Any]
    """Its hyper-parameters."""


@dataclass(frozen=True, slots=True)
class SavedGroups:
    """All parameter groups of the checkpoint."""

    groups: tuple[SavedGroup, ...]
    """The groups, in the order in which they were saved."""

    flattened: bool = False
    """Whether each parameter is a group of its own, because hyper-parameters were saved so."""

    numbered: bool = False
    """Whether parameters were saved by number, and no names with them."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Name of each parameter that was saved by number, where names were saved as well."""

    def index(self) -> dict[str, int]:
        """Number of the group of each parameter."""
        return {name: i for i, group in enumerate(self.groups) for name in group.params}

    def params(self) -> list[str]:
        """Names of all parameters."""
        return [name for group in self.groups for name in group.params]

    def by_parameter(self) -> SavedGroups:
        """The same, with each parameter a group of its own."""
        own = (SavedGroup((name,), group.values) for group in self.groups for name in group.params)
        return replace(self, groups=tuple(own), flattened=True)


def group_memory(stored: StoredOptimizer, catalog: Catalog) -> dict[str, Any]:
    """What to load the group keys into: memory for tensors, None for other values."""
    tensors = {key.key: catalog.tensors.get(key.key) for key in stored.groups}
    return {
        key: torch.empty(tensor.shape, dtype=tensor.dtype) if tensor is not None else None
        for key, tensor in tensors.items()
    }


def make_saved_groups(stored: StoredOptimizer, values: Mapping[str, Any]) -> SavedGroups:
    """The groups, from the values read for the group keys.

    Raises:
        OptimizerStateError: A group is not what an optimizer saves.
    """
    if stored.flattened:
        per_param: dict[str, dict[str, Any]] = {}
        for key in stored.groups:
            set_element(per_param.setdefault(str(key.group), {}), key.path, values[key.key])
        own = tuple(SavedGroup((name,), _hyper(group)) for name, group in per_param.items())
        return SavedGroups(own, flattened=True)
    groups: dict[int, dict[str, Any]] = {}
    for key in stored.groups:
        value = values[key.key]
        if key.group is None:
            groups.update(enumerate(value))
        elif not key.path:
            groups[int(key.group)] = value
        else:
            set_element(groups.setdefault(int(key.group), {}), key.path, value)
    return _name_params([groups[number] for number in sorted(groups)])


def _name_params(groups: Sequence[Mapping[str, Any]]) -> SavedGroups:
    names: dict[str, str] = {}
    numbered = False
    saved: list[SavedGroup] = []
    for number, group in enumerate(groups):
        params = group.get("params")
        if not isinstance(params, (list, tuple)):
            raise OptimizerStateError(
                f"parameter group {number} of the checkpoint has no list of parameters, only "
                f"{sorted(group)!r}"
            )
        given = group.get("param_names")
        if not any(isinstance(param, int) for param in params):
            own = tuple(map(str, params))
        elif isinstance(given, (list, tuple)) and len(given) == len(params):
            own = tuple(map(str, given))
            names |= dict(zip(map(str, params), own, strict=True))
        else:
            own, numbered = tuple(map(str, params)), True
        saved.append(SavedGroup(own, _hyper(group)))
    return SavedGroups(tuple(saved), numbered=numbered, names=names)


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in NOT_HYPER_PARAMETERS}
