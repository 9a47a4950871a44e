"""Adapter to torch's own reading of placements: which box does stock record for a rank?

Stands for `_compute_local_shape_and_global_offset`, by which `dcp.save` records what a rank holds.
Tested against torch 2.13.0.
"""

from __future__ import annotations

import collections
import itertools

from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from dcp_reshard._torch import DTensor, dtensor_cuts
from dcp_reshard.sharding import plan_shard_boxes

__all__ = ["misplaces_silently"]

# Two axes of FSDP over tensor parallelism are recorded wrongly with other sizes, or rightly.
_FEW_AXES = 2


def misplaces_silently(tensor: DTensor) -> bool:
    """Whether stock records parts of such a tensor elsewhere than they are, and no size shows it.

    Looks at all ranks of the mesh, but only for tensors of which one dim is cut by axes in an
    explicit order, or by three axes.
    """
    spec = tensor._spec
    mesh = tuple(tensor.device_mesh.shape)
    dims = {
        axis: placement.dim % tensor.ndim
        for axis, placement in enumerate(spec.placements)
        if isinstance(placement, (Shard, _StridedShard))
    }
    if spec.use_strided_shard_as_shard_order:
        by_dim = collections.Counter(dims.values())
        if not any(count > _FEW_AXES for count in by_dim.values()):
            return False
    elif all(list(entry.mesh_dims) == sorted(entry.mesh_dims) for entry in spec.shard_order):
        return False
    elsewhere = False
    for coordinate in itertools.product(
        *(range(size if axis in dims else 1) for axis, size in enumerate(mesh))
    ):
        cuts = dtensor_cuts(tensor, fqn="", coordinate=coordinate)
        assert cuts is not None
        shape, boxes = plan_shard_boxes(tuple(tensor.shape), tuple(cuts))
        sizes, offsets = _compute_local_shape_and_global_offset(
            tensor.shape, mesh, list(coordinate), spec.placements
        )
        if tuple(sizes) != shape and not (0 in sizes and 0 in shape):
            return False
        elsewhere = elsewhere or any(shard.box.offsets != tuple(offsets) for shard in boxes)
    return elsewhere
