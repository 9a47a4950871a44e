"""Do tensors have an order of shards that stock's saves get wrong?

A `DTensor` may say in which order its mesh axes have cut a dim (`DTensorSpec.shard_order`), or
imply it (FSDP2 over expert and tensor parallelism). Stock `dcp.save` of torch 2.13 records boxes as
if axes had cut from left to right, and for some sizes nothing shows it. Stock `dcp.load` makes the
same mistake, so its resume on the same mesh is right. A load that believes the records is right for
all checkpoints that were recorded rightly, and exchanges rows of these. Nothing but the tensors
that are asked for says that it may be so.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

from dcp_reshard._torch import DTensor, dtensor_cuts, has_own_order, recorded_box
from dcp_reshard.nearest_names import shorten
from dcp_reshard.sharding import plan_shard_boxes

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
    # All ranks of the mesh are looked at, and many tensors have one layout.
    known: dict[Hashable, bool] = {}
    found = []
    for fqn in stored_in_parts:
        tensor = tensors.get(fqn)
        if not isinstance(tensor, DTensor) or not has_own_order(tensor):
            continue
        cuts = dtensor_cuts(tensor, fqn=fqn, coordinate=[0] * tensor.device_mesh.ndim)
        layout = (tensor.shape, tensor.placements, tuple(cuts or ()))
        if layout not in known:
            known[layout] = _misplaces_silently(tensor)
        if known[layout]:
            found.append(fqn)
    if found:
        warnings.warn(
            f"tensors whose dims were cut in an order of their own ({shorten(found)}): stock "
            f"dcp.save of torch 2.13 ignores the order, so if it has saved them like this, rows "
            f"are recorded in each other's place, and nothing shows it; load such a checkpoint "
            f"with stock dcp.load, and save with ReshardSavePlanner",
            ShardOrderWarning,
            stacklevel=2,
        )


def _misplaces_silently(tensor: DTensor) -> bool:
    """Whether stock records parts of it elsewhere than they are, and no size shows it."""
    elsewhere = False
    sizes_of_axes = (
        1 if placement.is_replicate() else tensor.device_mesh.size(axis)
        for axis, placement in enumerate(tensor.placements)
    )
    for coordinate in itertools.product(*map(range, sizes_of_axes)):
        cuts = dtensor_cuts(tensor, fqn="", coordinate=coordinate)
        assert cuts is not None
        shape, boxes = plan_shard_boxes(tuple(tensor.shape), tuple(cuts))
        sizes, offsets = recorded_box(tensor, coordinate)
        if sizes != shape and not (0 in sizes and 0 in shape):
            return False
        elsewhere = elsewhere or any(shard.box.offsets != offsets for shard in boxes)
    return elsewhere
