"""Which key of the checkpoint is each key of the state dict, and is anything restored at all?

A key is looked up as it is, or as `rename` says. If that is not there, the parts that wrappers add
to names (``module``, ``_orig_mod``, ...) do not count, on either side, as long as one key is left.
Of a checkpoint of torch 2.3 or earlier, the key of a dict without tensors is that of the dict.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dcp_reshard._torch import flatten_state_dict, flatten_state_dict_2_3
from dcp_reshard.catalog import Catalog, KeyPath
from dcp_reshard.errors import MissingTensorError, PlanError
from dcp_reshard.nearest_names import describe_nearest, shorten
from dcp_reshard.param_names import canonical_name

__all__ = ["check_restored", "flatten_as_stored", "match_wrapped"]

_NUMBER = re.compile(r"\d+")


def flatten_as_stored(
    state_dict: dict[str, Any], catalog: Catalog, stored_key: Callable[[str], str]
) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Values and paths by key, as they were stored.

    Args:
        state_dict: The state dict.
        catalog: What the checkpoint holds.
        stored_key: Key in the checkpoint of a key.

    Raises:
        PlanError: Two values have one key.
    """
    try:
        values, paths = flatten_state_dict(state_dict)
        if all(stored_key(fqn) in catalog for fqn in values):
            return values, paths
        # torch 2.3 and earlier stored a dict or list without tensors as one object.
        old_values, old_paths = flatten_state_dict_2_3(state_dict)
    except ValueError as error:
        fqn = str(error).removeprefix("duplicated flatten key ")
        raise PlanError(f"two values of the state dict have one name: `{fqn}`", fqn=fqn) from error
    keys = {fqn: stored_key(fqn) for fqn in (*values, *old_values)}
    for fqn, parts in _find_old_objects(paths, old_paths, keys, catalog).items():
        for part in parts:
            del values[part], paths[part]
        values[fqn], paths[fqn] = old_values[fqn], old_paths[fqn]
    return values, paths


def _find_old_objects(
    paths: Mapping[str, KeyPath],
    old_paths: Mapping[str, KeyPath],
    keys: Mapping[str, str],
    catalog: Catalog,
) -> dict[str, list[str]]:
    """Dicts and lists that are one object of the checkpoint, as torch 2.3 and earlier stored them.

    Each is looked at alone: what a rank has beside it, and the checkpoint does not, has no say.

    Args:
        paths: Paths of the state dict's keys as they are now.
        old_paths: The same as they were then.
        keys: Key in the checkpoint of each of both.
        catalog: What the checkpoint holds.

    Returns:
        The key of each such container, and the keys of its parts, none of which is stored.
    """
    containers = {path: fqn for fqn, path in old_paths.items() if fqn not in paths}
    parts: dict[str, list[str]] = {fqn: [] for fqn in containers.values()}
    for fqn, path in paths.items():
        if fqn not in old_paths:
            for i in range(1, len(path)):
                if path[:i] in containers:
                    parts[containers[path[:i]]].append(fqn)
    stored = {canonical_name(key) for key in catalog.keys}
    objects = {canonical_name(key) for key in catalog.objects}
    return {
        fqn: own
        for fqn, own in parts.items()
        if canonical_name(keys[fqn]) in objects
        and not any(canonical_name(keys[part]) in stored for part in own)
    }


def match_wrapped(keys: Mapping[str, str], catalog: Catalog) -> dict[str, str]:
    """Keys that are in the checkpoint under another name, because of wrappers.

    Args:
        keys: Key in the checkpoint by key of the state dict, as far as it is known.
        catalog: What the checkpoint holds.

    Returns:
        Key of the state dict, and what it is called in the checkpoint.

    Raises:
        PlanError: Without the parts that wrappers add, two keys of one side are the same.
    """
    missing = {fqn: key for fqn, key in keys.items() if key not in catalog}
    if not missing:
        return {}
    used = set(keys.values())
    free: dict[str, list[str]] = {}
    for key in catalog.keys:
        if key not in used:
            free.setdefault(canonical_name(key), []).append(key)
    found: dict[str, str] = {}
    users: dict[str, list[str]] = {}
    for fqn, key in missing.items():
        short = canonical_name(key)
        if short not in free:
            continue
        users.setdefault(short, []).append(fqn)
        if len(free[short]) > 1 or len(users[short]) > 1:
            raise PlanError(
                f"key `{fqn}`: without the parts that wrappers add, that is the name of "
                f"{shorten(free[short])} in the checkpoint and of {shorten(users[short])} in the "
                f"state dict; say which is which with `rename`",
                fqn=fqn,
            )
        found[fqn] = free[short][0]
    return found


def check_restored(
    paths: Mapping[str, KeyPath],
    keys: Mapping[str, str],
    tensors: Collection[str],
    catalog: Catalog,
) -> None:
    """Check that a load that may leave keys out does not leave out all of them.

    A dict of the state dict of which no tensor is in the checkpoint, although the checkpoint has
    other tensors in that dict, was renamed. A dict that the checkpoint does not have is missing,
    and so is one whose keys differ by numbers only: those of ranks or experts that were not there.

    Args:
        paths: Path of each key of the state dict.
        keys: Key in the checkpoint of each.
        tensors: Keys whose values are tensors.
        catalog: What the checkpoint holds.

    Raises:
        MissingTensorError: Nothing would be restored, or nothing of such a dict.
    """
    if keys and not any(key in catalog for key in keys.values()):
        raise _nothing("", keys, catalog.keys)
    dicts: dict[str, list[str]] = {}
    for fqn in tensors:
        path = paths[fqn]
        # A parameter of an optimizer may be without some of its state, or all of it.
        end = path.index("state") + 1 if "state" in path[:-1] else len(path) - 1
        for i in range(1, end + 1):
            dicts.setdefault(".".join(map(str, path[:i])), []).append(fqn)
    for name, own in dicts.items():
        if any(keys[fqn] in catalog for fqn in own):
            continue
        there = [key for key in catalog.tensors if key.startswith(f"{name}.")]
        numbered = {_NUMBER.sub("#", key) for key in there}
        if there and not any(_NUMBER.sub("#", keys[fqn]) in numbered for fqn in own):
            raise _nothing(f" of `{name}`", {fqn: keys[fqn] for fqn in own}, there)


def _nothing(what: str, keys: Mapping[str, str], stored: Collection[str]) -> MissingTensorError:
    nearest = describe_nearest(list(keys.values()), stored, here="in the state dict")
    return MissingTensorError(
        f"nothing to restore: no key{what} is in the checkpoint; {nearest}", fqn=next(iter(keys))
    )
