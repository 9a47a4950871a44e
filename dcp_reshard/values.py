"""How does a loaded value that is not a tensor get into a state dict?

Usually it takes the place of the value that is there. Three cases need more:

* Its place is given by a key path in which all keys of dicts are strings. A dict with keys of
  another kind (``{0: ...}``) has one key of that text, and it is that one.
* DCP stores a tuple as one object, whatever is in it. Tensors of the caller inside a tuple are
  filled in place, if the loaded tuple has equal tensors at the same places.
* A number may have become a tensor of one element since the save (`step` of an optimizer, a
  learning rate), or the reverse. It is converted if nothing of it is lost.

What does not fit is refused by name. Nothing is written here: all values of a load are checked
before the first is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dcp_reshard._torch import DTensor, KeyPath, ShardedTensor, default_device
from dcp_reshard.copying import Copy
from dcp_reshard.errors import LayoutError, PlanError

__all__ = [
    "Number",
    "Taken",
    "check_object",
    "is_number",
    "merge_object",
    "number_as_tensor",
    "set_value",
    "to_number",
]

Number = bool | int | float | complex


class Taken(NamedTuple):
    """What a state dict takes of a loaded value."""

    value: object
    """What takes the place of the value that is there; perhaps that value itself."""

    copies: Sequence[Copy] = ()
    """How tensors of it are to be filled."""


def set_value(root: Any, path: KeyPath, value: object) -> None:
    """Set the value at a key path that exists.

    Example:
        >>> state = {"optimizer": {0: [1, 2]}}
        >>> set_value(state, ("optimizer", "0", 1), "new")
        >>> state
        {'optimizer': {0: [1, 'new']}}
    """
    for part in path[:-1]:
        root = root[_own_key(root, part)]
    root[_own_key(root, path[-1])] = value


def _own_key(container: object, part: str | int) -> object:
    if isinstance(container, Mapping) and part not in container:
        return next((key for key in container if str(key) == part), part)
    return part


def is_number(value: object) -> bool:
    """Whether a value is a plain number; numpy's scalars are not."""
    return type(value) in (bool, int, float, complex)


def check_object(fqn: str, value: object) -> None:
    """Check that a value which is stored as one object has no sharded tensor inside.

    Raises:
        LayoutError: It has: DCP stores the object of one rank and gives it to all.
    """
    for path, tensor in _tensors(value, fqn):
        if isinstance(tensor, (DTensor, ShardedTensor)):
            raise LayoutError(
                f"object `{fqn}`: `{path}` is a {type(tensor).__name__} inside a tuple; DCP stores "
                f"a tuple as one object of one rank, so the shards of other ranks are not in the "
                f"checkpoint; put it in a list or a dict",
                fqn=fqn,
            )


def merge_object(fqn: str, mine: object, loaded: object) -> Taken:
    """What takes the place of `mine`: the loaded value, but with the tensors of `mine`, filled.

    Raises:
        PlanError: `mine` has tensors, and the loaded value is not alike; or `mine` is a dict or a
            list of dicts, and the loaded value is none.

    Example:
        >>> taken = merge_object("pair", (torch.zeros(2), 1), (torch.tensor([3.0, 4.0]), 7))
        >>> taken.value
        (tensor([0., 0.]), 7)
        >>> taken.copies
        [Copy(fqn='pair', dest=tensor([0., 0.]), source=tensor([3., 4.]))]
    """
    if isinstance(mine, Mapping) and not isinstance(loaded, Mapping):
        raise _unlike(fqn, fqn, "a dict", f"a {type(loaded).__name__}")
    if _has_dicts(mine) and not isinstance(loaded, list):
        raise _unlike(fqn, fqn, "a list of dicts", f"a {type(loaded).__name__}")
    copies: list[Copy] = []
    return Taken(_merge(fqn, mine, loaded, fqn, copies), copies)


def _has_dicts(value: object) -> bool:
    return isinstance(value, list) and any(isinstance(one, Mapping) for one in value)


def _merge(
    fqn: str,
    mine: Any,
    loaded: Any,
    path: str,
    copies: list[Copy],
) -> object:
    if isinstance(mine, torch.Tensor):
        if not isinstance(loaded, torch.Tensor) or loaded.layout is not torch.strided:
            raise _unlike(fqn, path, "a tensor", f"a {type(loaded).__name__}")
        if (mine.shape, mine.dtype) != (loaded.shape, loaded.dtype):
            raise _unlike(
                fqn,
                path,
                f"shape {tuple(mine.shape)!r} of {mine.dtype}",
                f"shape {tuple(loaded.shape)!r} of {loaded.dtype}",
            )
        if mine.is_meta:
            return loaded.detach().to(default_device())
        copies.append(Copy(fqn, mine.detach(), loaded.detach()))
        return mine
    if next(_tensors(mine, path), None) is None:
        return loaded
    if isinstance(mine, Mapping):
        if not isinstance(loaded, dict) or mine.keys() != loaded.keys():
            raise _unlike(
                fqn, path, f"a dict with keys {list(mine)!r:.200}", f"a {type(loaded).__name__}"
            )
        for key, value in mine.items():
            loaded[key] = _merge(fqn, value, loaded[key], f"{path}.{key}", copies)
        return loaded
    if not isinstance(loaded, (list, tuple)) or len(mine) != len(loaded):
        raise _unlike(fqn, path, f"{len(mine)} values", f"a {type(loaded).__name__}")
    values = [
        _merge(fqn, own, other, f"{path}.{i}", copies)
        for i, (own, other) in enumerate(zip(mine, loaded, strict=True))
    ]
    return values if isinstance(loaded, list) else tuple(values)


def _tensors(value: object, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _tensors(inner, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _tensors(inner, f"{path}.{i}")


def _unlike(fqn: str, path: str, mine: str, loaded: str) -> PlanError:
    return PlanError(
        f"object `{fqn}`: at `{path}` the state dict has {mine}, the checkpoint has {loaded}",
        fqn=fqn,
    )


def to_number(fqn: str, loaded: torch.Tensor, mine: object) -> Number:
    """The one element of a tensor, as a number of the type of `mine`.

    Raises:
        PlanError: A number of that type cannot have this value.

    Example:
        >>> to_number("step", torch.tensor(3.0), 0)
        3
    """
    value: Number = loaded.item()
    kind: Any = type(mine)
    # A bool is an int in Python; as a number it is meant for nothing.
    if (kind is bool) == isinstance(value, bool):
        try:
            made: Number = kind(value)
        except (TypeError, ValueError, OverflowError):
            made = False
        if type(made) is kind and _same(made, value):
            return made
    raise PlanError(
        f"key `{fqn}`: the checkpoint has a tensor of one element, {value!r}, and the state dict a "
        f"{kind.__name__}, which cannot have this value",
        fqn=fqn,
    )


def number_as_tensor(fqn: str, dest: torch.Tensor, value: object, *, lossy: bool) -> Copy:
    """How a tensor of one element is to be filled with a number.

    Args:
        fqn: Key in the state dict.
        dest: What to fill.
        value: What was loaded.
        lossy: Whether a floating-point number may be rounded to the dtype.

    Raises:
        PlanError: The value is not a number, or the dtype cannot have it.
    """
    if is_number(value) and isinstance(value, bool) == (dest.dtype == torch.bool):
        try:
            made = torch.tensor(value, dtype=dest.dtype).reshape(dest.shape)
        except (RuntimeError, TypeError, OverflowError):
            made = None
        if made is not None:
            rounded = lossy and isinstance(value, float) and dest.dtype.is_floating_point
            if _same(made.item(), value) or (rounded and math.isfinite(made.item())):
                return Copy(fqn, dest, made)
    hint = "; `dtype_policy='cast'` allows rounding" if isinstance(value, float) else ""
    raise PlanError(
        f"key `{fqn}`: the checkpoint has {value!r:.100}, which is not a tensor, and a tensor of "
        f"one element of {dest.dtype} cannot have this value{hint}",
        fqn=fqn,
    )


def _same(a: Any, b: Any) -> bool:
    return bool(a == b or (a != a and b != b))
