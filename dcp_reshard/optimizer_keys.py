"""Where in a checkpoint is the state of an optimizer, and whose is each value?

Works on the recorded key paths alone. Below the optimizer's key, which may be at any depth, torch
writes one of two forms::

    nested      state / <parameter> / exp_avg            param_groups / <number> / lr
    flattened   state.<parameter>.exp_avg                param_groups.<parameter>.lr

Both may have deeper state (``preconditioner / 0``), and names of parameters have dots of their own.
In the nested form torch 2.3 and earlier wrote all groups, or all of a parameter's state, as one
object if there was no tensor in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dcp_reshard.catalog import Catalog, KeyPath
from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.nearest_names import shorten

__all__ = [
    "GroupKey",
    "StateKey",
    "StoredOptimizer",
    "find_stored_optimizer",
    "groups_path",
    "rename_param",
]

_STATE, _GROUPS = "state", "param_groups"
# Where no paths were recorded, a key says all: `param_groups.0.params` belongs to the nested form,
# which has this name in each group. The flattened form has it nowhere.
_NESTED_GROUP = re.compile(rf"{_GROUPS}\.(\d+)\.params$")


@dataclass(frozen=True, slots=True)
class StateKey:
    """One value of a parameter's state."""

    key: str
    """Key in the checkpoint."""

    param: str
    """Name of the parameter, or its number as text if the state was saved by number."""

    path: KeyPath
    """Path of the value in the parameter's state; empty if all of it is one object."""


@dataclass(frozen=True, slots=True)
class GroupKey:
    """One value of a parameter group."""

    key: str
    """Key in the checkpoint."""

    group: int | str | None
    """Number of the group; in the flattened form the parameter; None if all groups are one
    object."""

    path: KeyPath
    """Path of the value in the group; empty if all of it is one object."""


@dataclass(frozen=True, slots=True)
class StoredOptimizer:
    """The optimizer of a checkpoint."""

    state: tuple[StateKey, ...]
    """Values that belong to parameters."""

    groups: tuple[GroupKey, ...]
    """Values of parameter groups."""

    flattened: bool
    """Whether group values were stored for each parameter."""


def find_stored_optimizer(catalog: Catalog, optimizer_key: str) -> StoredOptimizer:
    """Find all values of an optimizer, and say whose they are.

    Args:
        catalog: What the checkpoint holds.
        optimizer_key: Where the optimizer's state dict was, with dots between nested keys; empty
            if it was saved by itself.

    Raises:
        OptimizerStateError: There is no optimizer state at that key.
    """
    below: dict[str, KeyPath] = {}
    for key in catalog.keys:
        rest = _below(catalog.key_path(key), optimizer_key)
        if rest is not None:
            below[key] = rest
    flat = {key: path for key, path in below.items() if path[0] not in (_STATE, _GROUPS)}
    numbered = {m[1] for path in flat.values() if (m := _NESTED_GROUP.match(str(path[0])))}
    groups = tuple(_group_keys(below, numbered))
    flattened = any(isinstance(value.group, str) for value in groups)
    names = {value.group for value in groups if isinstance(value.group, str)}
    state = tuple(_state_keys(below, names))
    if not state and not groups:
        raise OptimizerStateError(_nothing_there(catalog, optimizer_key, below))
    return StoredOptimizer(state, groups, flattened)


def rename_param(path: KeyPath, optimizer_key: str, old: str, new: str) -> KeyPath:
    """The path of a value of parameter `old` if the parameter were called `new`.

    Example:
        >>> rename_param(("optim", "state", "a.w", "exp_avg"), "optim", "a.w", "b.w")
        ('optim', 'state', 'b.w', 'exp_avg')
        >>> rename_param(("optim", "state.a.w.exp_avg"), "optim", "a.w", "b.w")
        ('optim', 'state.b.w.exp_avg')
    """
    rest = _below(path, optimizer_key)
    assert rest is not None
    above = path[: len(path) - len(rest)]
    if rest[0] in (_STATE, _GROUPS):
        return (*above, rest[0], new, *rest[2:])
    whole, text = str(path[len(above)]), str(rest[0])
    kind = next(kind for kind in (_STATE, _GROUPS) if text.startswith(f"{kind}."))
    start = len(whole) - len(text) + len(kind) + 1
    return (*above, f"{whole[:start]}{new}{whole[start + len(old) :]}", *rest[1:])


def groups_path(catalog: Catalog, optimizer_key: str, stored: StoredOptimizer) -> KeyPath | None:
    """Path of the list of groups in the saved state dict; None in the flattened form."""
    for group in stored.groups:
        path = catalog.key_path(group.key)
        rest = _below(path, optimizer_key)
        if rest is not None and rest[0] == _GROUPS:
            return (*path[: len(path) - len(rest)], _GROUPS)
    return None


def _below(path: KeyPath, prefix: str) -> KeyPath | None:
    """What is left of a path below a prefix, which may end inside a part that has dots itself."""
    if not prefix:
        return path
    joined = ""
    for i, part in enumerate(path):
        joined = f"{joined}.{part}" if i else str(part)
        if joined == prefix:
            return path[i + 1 :] or None
        if joined.startswith(f"{prefix}."):
            return (joined[len(prefix) + 1 :], *path[i + 1 :])
        if not prefix.startswith(f"{joined}."):
            return None
    return None


def _group_keys(below: Mapping[str, KeyPath], numbered: set[str]) -> Iterable[GroupKey]:
    for key, path in below.items():
        head, text = path[0], str(path[0])
        if head == _GROUPS:
            if len(path) == 1:
                yield GroupKey(key, None, ())
            elif str(path[1]).isdigit():
                yield GroupKey(key, int(path[1]), path[2:])
        elif text.startswith(f"{_GROUPS}."):
            name, _, value = text.removeprefix(f"{_GROUPS}.").rpartition(".")
            number, _, rest = text.removeprefix(f"{_GROUPS}.").partition(".")
            if number in numbered:
                parts = (int(part) if part.isdigit() else part for part in rest.split("."))
                yield GroupKey(key, int(number), (*parts, *path[1:]))
            elif name:
                yield GroupKey(key, name, (value, *path[1:]))


def _state_keys(below: Mapping[str, KeyPath], names: set[str]) -> Iterable[StateKey]:
    for key, path in below.items():
        head, text = path[0], str(path[0])
        if head == _STATE and len(path) > 1:
            yield StateKey(key, str(path[1]), path[2:])
        elif text.startswith(f"{_STATE}."):
            parts = text.removeprefix(f"{_STATE}.").split(".")
            # The longest known name; of an unknown one, the state is the last part.
            ends = range(len(parts) - 1, 0, -1)
            end = next((end for end in ends if ".".join(parts[:end]) in names), len(parts) - 1)
            if end:
                # Numbers stay text: the flattened form has dicts below a parameter, never lists.
                yield StateKey(key, ".".join(parts[:end]), (*parts[end:], *path[1:]))


def _nothing_there(catalog: Catalog, optimizer_key: str, below: Mapping[str, KeyPath]) -> str:
    places = set()
    for key in catalog.keys:
        text = ".".join(map(str, catalog.key_path(key)))
        places |= {text[: m.start()].rstrip(".") for m in re.finditer(rf"\b{_GROUPS}\.", text)}
    tops = sorted({str(catalog.key_path(key)[0]) for key in catalog.keys})
    what = f"{len(below)} keys, none of them optimizer state," if below else "nothing"
    where = f"; optimizer state is below {shorten(sorted(places))}" if places else ""
    return (
        f"the checkpoint has {what} below key {optimizer_key!r}{where}; its top-level keys are "
        f"{shorten(tops)}"
    )
