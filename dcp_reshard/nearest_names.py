"""Names in an error: the first of many, and those that resemble a name that is not there."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

__all__ = ["describe_nearest", "find_nearest", "hint_at_nearest", "shorten"]

_SHOWN = 20
_COMPARED = 2000


def describe_nearest(
    wanted: Collection[str], stored: Collection[str], *, here: str = "in the model"
) -> str:
    """The first names of both sides, each with the nearest of the other side, for an error."""
    sides = []
    for title, names, others in (
        (here, wanted, stored),
        ("in the checkpoint", stored, wanted),
    ):
        first = [f"`{name}`{hint_at_nearest(name, others)}" for name in list(names)[:3]]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        sides.append(f"{title}: {', '.join(first)}{more}" if first else f"{title}: none")
    return "; ".join(sides)


def hint_at_nearest(name: str, others: Iterable[str]) -> str:
    """`` (nearest: ...)``, or nothing if no name resembles this one."""
    near = find_nearest(name, others)
    return f" (nearest: {shorten(near)})" if near else ""


def find_nearest(name: str, others: Iterable[str]) -> list[str]:
    """Up to three names that resemble one; of thousands, among those in its module or named alike.

    A comparison takes some 10 us: with 100,000 names an error would be a second late for each.

    Example:
        >>> find_nearest("layer.weight_", ["layer.weight", "head.bias"])
        ['layer.weight']
    """
    others = list(others)
    if len(others) > _COMPARED:
        module, _, last = name.rpartition(".")
        parts = ((other, other.rpartition(".")) for other in others)
        others = [other for other, (head, _, tail) in parts if head == module or tail == last]
    return difflib.get_close_matches(name, others[:_COMPARED], n=3, cutoff=0.5)


def shorten(names: Iterable[str]) -> str:
    """The first names of many, in backticks.

    Example:
        >>> shorten(["a", "b"])
        '`a`, `b`'
    """
    names = list(names)
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
