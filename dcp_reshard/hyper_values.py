"""Hyper-parameters: are two equal, in what do those of two groups differ, what state is theirs?"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

__all__ = ["STATE_OF", "differences", "same_named", "same_value", "show_named"]

STATE_OF = {
    "amsgrad": "max_exp_avg_sq",
    "centered": "grad_avg",
    "momentum": "momentum_buffer",
}
"""State that optimizers of torch keep if a hyper-parameter is set, and only then."""


def same_value(one: object, other: object) -> bool:
    """Whether two hyper-parameters are equal; a tensor equals a number of its value."""
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        try:
            return bool((torch.as_tensor(one).cpu() == torch.as_tensor(other).cpu()).all())
        except (TypeError, ValueError, RuntimeError):
            return False
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_value(one[key], other[key]) for key in one)
    alike = type(one) is type(other) or _both_numbers(one, other)
    return alike and bool(one == other)


def _both_numbers(one: object, other: object) -> bool:
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (one, other))


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], *, but: Collection[str] = ()
) -> str:
    """In what two groups differ, with both values, as text; empty if in nothing."""
    return ", ".join(
        f"`{name}` {show_named(one, name)} and {show_named(other, name)}"
        for name in sorted(one.keys() | other.keys())
        if name not in but and not same_named(one, other, name)
    )


def same_named(one: Mapping[str, Any], other: Mapping[str, Any], name: str) -> bool:
    """Whether both groups have a hyper-parameter, and equal ones."""
    return name in one and name in other and same_value(one[name], other[name])


def show_named(values: Mapping[str, Any], name: str) -> str:
    """A hyper-parameter as text, or that the group has none of that name."""
    return repr(values[name]) if name in values else "(none)"
