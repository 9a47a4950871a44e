"""How do the ranks of a grid hold the tensor of this key? Parameters by name, their state alike.

Rules are given for parameters, by the names that they have in the model. A key of a checkpoint is
more than that: ``model.wq.weight`` is the parameter ``wq.weight``, and
``optimizer.state.wq.weight.exp_avg`` is state of it, held in the same way if it has the same shape.

`name_params` makes keys of that kind of those that `torch.optim` saves, which have numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dcp_reshard.catalog import KeyPath
from dcp_reshard.errors import CheckpointFormatError, LayoutError
from dcp_reshard.grid_catalog import KeyRule, Rank
from dcp_reshard.payload import Payload
from dcp_reshard.shard_rules import ShardRules

__all__ = ["KeyRules", "name_params"]

_SHOWN = 8


@dataclass(slots=True, eq=False)
class KeyRules:
    """Finds the rule for a key. Not frozen: it notes which rules were for something."""

    rules: ShardRules
    """Dims and fused blocks by name of the parameter."""

    true_sizes: Mapping[str, int]
    """Sizes without padding by name of the parameter."""

    model_key: str
    """Key of the model's state dict."""

    optimizer_key: str
    """Key of the optimizer's state dict."""

    split_dp: bool
    """Whether dp ranks hold parts along dim 0."""

    whole: Sequence[str]
    """Regular expressions of names that are held whole all the same."""

    _used: set[str] = field(default_factory=set, init=False)

    def find(
        self,
        fqn: str,
        payloads: Mapping[Rank, Payload],
        files: Mapping[Rank, Mapping[str, object]],
    ) -> KeyRule:
        """How the ranks hold a tensor.

        Args:
            fqn: Its key.
            payloads: The tensor as it is in each rank's file.
            files: All that is in each rank's file, by key.

        Raises:
            LayoutError: Rules contradict each other.
        """
        rank, payload = next(iter(payloads.items()))
        if not payload.shape:
            return KeyRule()
        prefix = f"{self.optimizer_key}." if self.optimizer_key else ""
        state = fqn.removeprefix(f"{prefix}state.")
        names = [fqn, fqn.removeprefix(f"{self.model_key}.")]
        if state != fqn:
            name = self._find_owner(state, files[rank])
            names = [name] if name is not None else []
            if name is not None and not self._is_alike(payload, name, files[rank]):
                return KeyRule()
        return self._rule_for(fqn, list(dict.fromkeys(names)))

    def _rule_for(self, fqn: str, names: Sequence[str]) -> KeyRule:
        dims = {name: dim for name in names if (dim := self.rules.find_dim(name)) is not None}
        if len(set(dims.values())) > 1:
            raise LayoutError(f"tensor `{fqn}`: rules disagree, they say {dims!r}", fqn=fqn)
        dim = next(iter(dims.values()), None)
        fused = next((self.rules.fused[n] for n in names if n in self.rules.fused), None)
        if fused is not None and dim is None:
            raise LayoutError(f"tensor `{fqn}`: has fused blocks, but no dim that is cut", fqn=fqn)
        true_size = next((self.true_sizes[n] for n in names if n in self.true_sizes), None)
        if fused is not None and true_size is not None:
            raise LayoutError(
                f"tensor `{fqn}`: has fused blocks and padding; leave the padding out block by "
                f"block, by hand",
                fqn=fqn,
            )
        self._used.update(names)
        is_whole = any(re.match(pattern, name) for pattern in self.whole for name in names)
        return KeyRule(dim, self.split_dp and not is_whole, fused, true_size)

    def _find_owner(self, state: str, leaves: Mapping[str, object]) -> str | None:
        """The parameter that a state value belongs to: the longest name that is known."""
        parts = state.split(".")
        for end in range(len(parts) - 1, 0, -1):
            name = ".".join(parts[:end])
            if self._find_param(name, leaves) is not None or self.rules.find_dim(name) is not None:
                return name
        return None

    def _find_param(self, name: str, leaves: Mapping[str, object]) -> Payload | None:
        for key in (f"{self.model_key}.{name}", name):
            leaf = leaves.get(key)
            if isinstance(leaf, Payload):
                return leaf
        return None

    def _is_alike(self, payload: Payload, name: str, leaves: Mapping[str, object]) -> bool:
        """Whether a state value is held as its parameter is: not so factored moments, say."""
        param = self._find_param(name, leaves)
        if param is not None:
            return param.shape == payload.shape
        # The file has the optimizer alone.
        return (self.rules.find_dim(name) or 0) < len(payload.shape)

    def check_used(self) -> list[str]:
        """Notes on rules that were for nothing.

        Raises:
            LayoutError: Such a rule is about the order or the number of elements: without it, what
                it was meant for is loaded wrongly.
        """
        for what, rules in (("fused", self.rules.fused), ("true_sizes", self.true_sizes)):
            unused = [name for name in rules if name not in self._used]
            if unused:
                raise LayoutError(
                    f"`{what}` has rules for {_names(unused)}, which no rank file has",
                    fqn=unused[0],
                )
        unused = [name for name in self.rules.dims if name not in self._used]
        return [f"`shard_dims` has {_names(unused)}, which no rank file has"] if unused else []


def name_params(
    leaves: Mapping[KeyPath, object], names: Sequence[str], *, optimizer_key: str
) -> dict[KeyPath, object]:
    """The leaves of a file, with the names of parameters where `torch.optim` has their numbers.

    Args:
        leaves: Values by key path.
        names: Name of each parameter, by its number.
        optimizer_key: Where the optimizer's state dict is.

    Raises:
        CheckpointFormatError: There are more parameters than names.

    Example:
        >>> name_params({("state", "0", "step"): 3, ("param_groups", 0, "params"): [0]}, ["w"],
        ...             optimizer_key="")
        {('state', 'w', 'step'): 3, ('param_groups', 0, 'params'): ['w']}
    """
    prefix = tuple(optimizer_key.split(".")) if optimizer_key else ()
    state, groups = (*prefix, "state"), (*prefix, "param_groups")

    def name_of(number: int) -> str:
        if number >= len(names):
            raise CheckpointFormatError(
                f"the optimizer has a parameter number {number}, but `param_names` has only "
                f"{len(names)} names"
            )
        return names[number]

    named: dict[KeyPath, object] = {}
    for path, value in leaves.items():
        at = len(state)
        if path[:at] == state and len(path) > at and str(path[at]).isdecimal():
            path = (*state, name_of(int(path[at])), *path[at + 1 :])
        elif path[:at] == groups and path[-1] == "params" and isinstance(value, list):
            value = [name_of(n) if type(n) is int and n >= 0 else n for n in value]
        named[path] = value
    return named


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
