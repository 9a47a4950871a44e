"""Which dim of a parameter does tensor parallelism cut, and is it fused? Looked up by its key.

Two ways to say it: `shard_dims` names each parameter; `shard_specs` has regular expressions, which
are matched from the start of the key. A key that neither knows is held whole by every
tensor-parallel rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dcp_reshard.errors import LayoutError
from dcp_reshard.fused import FusedBlocks

__all__ = ["ShardDim", "ShardRules", "make_rules"]


class ShardDim(Protocol):
    """A dim wrapped in an object, as older versions of fairseq2 have it in their `shard_specs`."""

    @property
    def dim(self) -> int:
        """The dim that is cut."""
        ...


@dataclass(frozen=True, slots=True)
class ShardRules:
    r"""How parameters are cut.

    Example:
        >>> rules = ShardRules({"wq.weight": 0}, {r".*\.wo\.weight$": 1})
        >>> [rules.find_dim(key) for key in ("wq.weight", "layers.0.wo.weight", "norm.weight")]
        [0, 1, None]
    """

    dims: Mapping[str, int] = field(default_factory=dict)
    """Dim by key."""

    specs: Mapping[str, int | ShardDim] = field(default_factory=dict)
    """Dim by regular expression."""

    fused: Mapping[str, FusedBlocks] = field(default_factory=dict)
    """Fused blocks by key."""

    def find_dim(self, key: str) -> int | None:
        """The dim along which a key is cut; None if no rule is for it.

        Raises:
            LayoutError: Rules disagree, or a dim is not a number from 0.
        """
        found: dict[int, str] = {}
        if key in self.dims:
            found[_check_dim(key, self.dims[key])] = "`shard_dims`"
        for pattern, spec in self.specs.items():
            if re.match(pattern, key):
                found.setdefault(_check_dim(key, spec), f"pattern {pattern!r}")
        if len(found) > 1:
            said = " and ".join(f"dim {dim} ({by})" for dim, by in found.items())
            raise LayoutError(f"tensor `{key}`: rules disagree, they say {said}", fqn=key)
        return next(iter(found), None)


def make_rules(
    dims: Mapping[str, int] | Mapping[str, ShardDim],
    specs: Mapping[str, int | ShardDim],
    fused: Mapping[str, FusedBlocks],
) -> ShardRules:
    """Rules from dims by key, or by regular expression if they are wrapped in objects."""
    by_key = {key: dim for key, dim in dims.items() if not hasattr(dim, "dim")}
    wrapped = {key: spec for key, spec in dims.items() if hasattr(spec, "dim")}
    return ShardRules(by_key, {**wrapped, **specs}, fused)


def _check_dim(key: str, spec: int | ShardDim) -> int:
    dim = getattr(spec, "dim", spec)
    # -1 means "not cut" to some and "the last dim" to others.
    if type(dim) is not int or dim < 0:
        raise LayoutError(
            f"tensor `{key}`: {dim!r:.100} is not a dim to be cut, dims are numbers from 0", fqn=key
        )
    return dim
