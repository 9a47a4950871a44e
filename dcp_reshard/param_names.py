"""Which parameter of the checkpoint is which parameter of the model?

Names differ by the wrappers that were around the model when it was saved, and are now
(`DistributedDataParallel`, `torch.compile`, activation checkpointing, FSDP1). Names are matched

1. by what the caller's `rename` says,
2. exactly,
3. with the wrappers' parts taken out of both, if that leaves one name on each side.

An exact name goes first, because a model may well have a submodule that is called ``module``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.nearest_names import hint_at_nearest, shorten
from dcp_reshard.plan import Rename

__all__ = ["NameMatch", "canonical_name", "match_names"]

_WRAPPERS = frozenset({"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@dataclass(frozen=True, slots=True)
class NameMatch:
    """Names of the model and of the checkpoint, brought together."""

    stored: tuple[str | None, ...]
    """For each parameter of the model its name in the checkpoint, or None."""

    unused: tuple[str, ...]
    """Names of the checkpoint that no parameter of the model has."""


def canonical_name(name: str) -> str:
    """The name without the parts that wrappers add.

    Example:
        >>> canonical_name("module._orig_mod.layers.0._checkpoint_wrapped_module.w")
        'layers.0.w'
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def match_names(
    wanted: Sequence[tuple[str, ...]], stored: Collection[str], *, rename: Rename | None = None
) -> NameMatch:
    """Find the name in the checkpoint of each parameter.

    Args:
        wanted: For each parameter of the model its names, several if it is tied; the first that is
            in the checkpoint counts.
        stored: Names in the checkpoint.
        rename: Gives the name in the checkpoint for a name of the model, with or without wrappers.

    Raises:
        OptimizerStateError: Without the wrappers, two names of one side are the same; or a name
            that `rename` gives is not in the checkpoint.

    Example:
        >>> match_names([("module.w",), ("new",)], ["w", "old"])
        NameMatch(stored=('w', None), unused=('old',))
    """
    known = dict.fromkeys(stored)
    by_canonical_name = _by_canonical_name(known)
    found: list[str | None] = []
    left: list[int] = []
    for i, names in enumerate(wanted):
        renamed = _rename(names, rename)
        if renamed is not None:
            must = isinstance(rename, Mapping)
            found.append(_find_renamed(*renamed, known, by_canonical_name, must=must))
            continue
        found.append(next((own for own in names if own in known), None))
        if found[i] is None:
            left.append(i)
    canonical = _by_canonical_name(known.keys() - set(found))
    users: dict[str, str] = {}
    for i in left:
        names = wanted[i]
        short = next((c for c in map(canonical_name, names) if c in canonical), None)
        if short is None:
            continue
        if len(canonical[short]) > 1 or short in users:
            _raise_ambiguous(short, canonical[short], [users.get(short, names[0]), names[0]])
        users[short] = names[0]
        found[i] = canonical[short][0]
    taken = set(found)
    return NameMatch(tuple(found), tuple(name for name in known if name not in taken))


def _by_canonical_name(names: Iterable[str]) -> dict[str, list[str]]:
    canonical: dict[str, list[str]] = {}
    for name in sorted(names):
        canonical.setdefault(canonical_name(name), []).append(name)
    return canonical


def _rename(names: tuple[str, ...], rename: Rename | None) -> tuple[str, str] | None:
    """The first name that is renamed, and its new name."""
    if rename is None:
        return None
    for name in dict.fromkeys([*names, *map(canonical_name, names)]):
        new = rename(name) if callable(rename) else rename.get(name, name)
        if new != name:
            return name, new
    return None


def _find_renamed(
    name: str,
    new: str,
    known: Collection[str],
    by_canonical_name: Mapping[str, Sequence[str]],
    *,
    must: bool,
) -> str | None:
    if new in known:
        return new
    others = by_canonical_name.get(canonical_name(new), ())
    if len(others) == 1:
        return others[0]
    if must:
        # A function may well give a name for a new parameter too; a mapping names it on purpose.
        raise OptimizerStateError(
            f"parameter `{name}`: `rename` says that it is `{new}` in the checkpoint, where there "
            f"is no such parameter{hint_at_nearest(new, known)}",
            fqn=name,
        )
    return None


def _raise_ambiguous(short: str, stored: Iterable[str], wanted: Iterable[str]) -> None:
    raise OptimizerStateError(
        f"parameter `{short}`: without the parts that wrappers add, that is the name of "
        f"{shorten(stored)} in the checkpoint and of {shorten(dict.fromkeys(wanted))} in the "
        f"model; say which is which with `rename`",
        fqn=short,
    )
