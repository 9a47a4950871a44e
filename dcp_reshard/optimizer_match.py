"""Which parameter of the checkpoint is each parameter of an optimizer, and what if there is none?

Names decide (`param_names`). State that was saved by number has none; then, if the caller says so,
the position in the optimizer does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.nearest_names import describe_nearest, shorten
from dcp_reshard.optimizer_options import OptimizerOptions
from dcp_reshard.optimizer_params import LiveParam, Original
from dcp_reshard.param_names import canonical_name, match_names
from dcp_reshard.saved_groups import SavedGroups

__all__ = ["ParamMatch", "match_params"]


@dataclass(frozen=True, slots=True)
class ParamMatch:
    """The parameters of an optimizer and those of a checkpoint, brought together."""

    names: Mapping[Original, str | None]
    """Name in the checkpoint of each parameter, None for those that it does not know."""

    new: tuple[str, ...]
    """Names of the parameters that the checkpoint does not know."""

    unused: tuple[str, ...]
    """Names in the checkpoint that no parameter has."""

    renamed: tuple[tuple[str, str], ...]
    """Name in the model and in the checkpoint, where they differ by more than wrappers."""


def match_params(
    groups: Sequence[Sequence[LiveParam]],
    saved: SavedGroups,
    with_state: Collection[str],
    options: OptimizerOptions,
) -> ParamMatch:
    """Find the name in the checkpoint of each parameter of an optimizer.

    Args:
        groups: Parameters of the optimizer, by group.
        saved: Groups of the checkpoint.
        with_state: Names of the parameters that have state in the checkpoint.
        options: What to do with parameters that only one side has.

    Raises:
        OptimizerStateError: No parameter with state is there on both sides, or a parameter is on
            one side only and the options do not allow it.
    """
    originals = [o for group in groups for live in group for o in live.originals]
    own = [o.name for o in originals]
    if saved.numbered:
        names: tuple[str | None, ...] = _match_positions(groups, saved, options)
        taken = set(names)
        unused = tuple(name for name in with_state if name not in taken)
    else:
        known = dict.fromkeys([*saved.params(), *with_state])
        found = match_names([o.names for o in originals], known, rename=options.rename)
        names, unused = found.stored, found.unused
    pairs = list(zip(own, names, strict=True))
    new = tuple(name for name, stored in pairs if stored is None)
    if len(new) == len(own) or (with_state and not set(with_state) & set(names)):
        raise OptimizerStateError(
            "nothing to restore: no parameter of the optimizer has state in the checkpoint; "
            + describe_nearest(own, list(with_state) or unused)
        )
    if new and options.on_new == "error":
        raise OptimizerStateError(
            f"{len(new)} parameters of the optimizer are not in the checkpoint, where they may be "
            f"new, or have been frozen and not in the optimizer (`on_new='keep'` lets them keep "
            f"what they have); {describe_nearest(new, unused)}",
            fqn=new[0],
        )
    if unused and options.on_extra == "error":
        raise OptimizerStateError(
            f"{len(unused)} parameters of the checkpoint are not in the optimizer: "
            f"{shorten(unused)}",
            fqn=unused[0],
        )
    renamed = tuple((n, s) for n, s in pairs if s is not None and canonical_name(s) != n)
    return ParamMatch(
        dict(zip(originals, names, strict=True)),
        new,
        unused,
        () if saved.numbered else renamed,
    )


def _match_positions(
    groups: Sequence[Sequence[LiveParam]], saved: SavedGroups, options: OptimizerOptions
) -> tuple[str, ...]:
    if not options.by_position:
        raise OptimizerStateError(
            "the checkpoint has state by the numbers of parameters, not by their names (it was "
            "saved with `Optimizer.state_dict`); `by_position=True` loads it if the parameters "
            "and their order are still the same"
        )
    sizes = [len(group) for group in groups]
    saved_sizes = [len(group.params) for group in saved.groups]
    flat = any(o.part is not None for group in groups for live in group for o in live.originals)
    if sizes != saved_sizes or flat:
        raise OptimizerStateError(
            f"the checkpoint has parameter groups of {saved_sizes!r} parameters by number, the "
            f"optimizer of {sizes!r}{', flattened by FSDP1' if flat else ''}; these cannot be "
            f"matched by position"
        )
    return tuple(saved.params())
