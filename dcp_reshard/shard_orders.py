"""Do tensors have an order of shards that stock's saves get wrong?

A `DTensor` may say in which order its mesh axes have cut a dim (`DTensorSpec.shard_order`), or
imply it (FSDP2 over expert and tensor parallelism). Stock `dcp.save` of torch 2.13 records boxes as
if axes had cut from left to right, and for some sizes nothing shows it. Stock `dcp.load` makes the
same mistake, so its resume on the same mesh is right. A load that believes the records is right for
all checkpoints that were recorded rightly, and exchanges rows of these. Nothing but the tensors
that are asked for says that it may be so.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from dcp_reshard._torch import DTensor
from dcp_reshard._torch_records import misplaces_silently
from dcp_reshard.nearest_names import shorten

__all__ = ["ShardOrderWarning", "warn_of_shard_orders"]


class ShardOrderWarning(UserWarning):
    """Tensors have an order of shards that a checkpoint written by stock torch got wrong."""


def warn_of_shard_orders(tensors: Mapping[str, Any], stored_in_parts: Iterable[str]) -> None:
    """Warn if tensors that are stored in parts are such that stock would misplace the parts.

    Args:
        tensors: The values of the state dict, by key.
        stored_in_parts: Keys of tensors of which the checkpoint has several chunks; one chunk is
            the whole tensor, and right.
    """
    found = [
        fqn
        for fqn in stored_in_parts
        if isinstance(tensor := tensors.get(fqn), DTensor) and misplaces_silently(tensor)
    ]
    if found:
        warnings.warn(
            f"tensors whose dims were cut in an order of their own ({shorten(found)}): stock "
            f"dcp.save of torch 2.13 ignores the order, so if it has saved them like this, rows "
            f"are recorded in each other's place, and nothing shows it; load such a checkpoint "
            f"with stock dcp.load, and save with ReshardSavePlanner",
            ShardOrderWarning,
            stacklevel=2,
        )
