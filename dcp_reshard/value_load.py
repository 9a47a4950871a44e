"""The values of one load that are not tensors on one of the two sides: checked first, taken later.

A number may be stored as a tensor of one element, a tensor of one element as a number; what is
neither is one object. Each is held against what the state dict has before anything is written
(`values`), and waits here until all of them are known to fit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from dcp_reshard.box import Box
from dcp_reshard.catalog import Catalog
from dcp_reshard.copying import copy_all
from dcp_reshard.layout import LocalShard, TensorLayout
from dcp_reshard.values import Taken, is_number, merge_object, number_as_tensor, to_number

__all__ = ["ValueLoad"]


@dataclass(slots=True, eq=False)
class ValueLoad:
    """Which values need more than their own place, and what was found for those that have come."""

    from_numbers: dict[str, TensorLayout]
    """Tensors of the state dict that the checkpoint has as numbers."""

    to_numbers: dict[str, TensorLayout]
    """Memory of their own for numbers that the checkpoint has as tensors of one element."""

    lossy: bool
    """Whether a number may be rounded to a tensor's dtype."""

    _taken: dict[str, Taken] = field(default_factory=dict, init=False)

    @classmethod
    def of(
        cls,
        values: Mapping[str, Any],
        layouts: Mapping[str, TensorLayout],
        keys: Mapping[str, str],
        catalog: Catalog,
        *,
        lossy: bool,
    ) -> ValueLoad:
        """Find numbers that are tensors on the other side.

        Args:
            values: The state dict, flat.
            layouts: Its tensors.
            keys: Key in the checkpoint of each value.
            catalog: What the checkpoint holds.
            lossy: Whether a number may be rounded to a tensor's dtype.
        """
        from_numbers = {
            fqn: layout
            for fqn, layout in layouts.items()
            if keys[fqn] in catalog.objects and math.prod(layout.shape) == 1
        }
        to_numbers: dict[str, TensorLayout] = {}
        for fqn, value in values.items():
            stored = catalog.tensors.get(keys[fqn]) if is_number(value) else None
            if stored is not None and math.prod(stored.shape) == 1:
                memory = torch.empty(stored.shape, dtype=stored.dtype)
                shard = LocalShard(Box.full(stored.shape), memory)
                to_numbers[fqn] = TensorLayout(fqn, stored.shape, stored.dtype, (shard,))
        return cls(from_numbers, to_numbers, lossy=lossy)

    def check(self, fqn: str, mine: object, loaded: object) -> None:
        """Check that `mine`, of the state dict, can take a loaded value; it waits to be taken.

        Raises:
            PlanError: It cannot.
        """
        if fqn in self.to_numbers:
            assert isinstance(loaded, torch.Tensor)
            self._taken[fqn] = Taken(to_number(fqn, loaded, mine))
        elif fqn in self.from_numbers:
            dests = [shard.tensor for shard in self.from_numbers[fqn].shards]
            copies = [number_as_tensor(fqn, dest, loaded, lossy=self.lossy) for dest in dests]
            self._taken[fqn] = Taken(mine, copies)
        else:
            self._taken[fqn] = merge_object(fqn, mine, loaded)

    def has_checked(self, fqn: str) -> bool:
        """Whether a value waits to be taken."""
        return fqn in self._taken

    def take(self, fqn: str) -> object:
        """What takes the place of a value that was checked; tensors of it are filled."""
        taken = self._taken.pop(fqn)
        copy_all(taken.copies)
        return taken.value
