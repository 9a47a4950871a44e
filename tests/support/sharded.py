"""ShardedTensors, which FSDP1 makes, cut by hand: any boxes on any ranks, nested if need be."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
    TensorProperties,
)

from dcp_reshard.box import Box

__all__ = ["row_boxes", "sharded_tensor"]


def row_boxes(shape: Sequence[int], size: int) -> list[tuple[Box, int]]:
    """The boxes of `size` ranks that share the rows of a tensor as `torch.chunk` does, none empty.

    ::

        rank 0 | rank 0 | rank 1 | rank 1 | rank 2        5 rows, 4 ranks; rank 3 has none
    """
    step = -(-shape[0] // size)
    starts = range(0, shape[0], step or 1)
    rest, zeros = tuple(shape[1:]), (0,) * (len(shape) - 1)
    return [
        (Box((start, *zeros), (min(step, shape[0] - start), *rest)), rank)
        for rank, start in enumerate(starts)
    ]


def sharded_tensor(
    full: torch.Tensor,
    boxes: Sequence[tuple[Box, int]],
    *,
    make_local: Callable[[Box], torch.Tensor] | None = None,
) -> ShardedTensor:
    """The ShardedTensor of the current rank for a tensor cut into boxes; no communication.

    Args:
        full: The whole tensor.
        boxes: All boxes, of all ranks, each with its rank. A rank may have several, or none.
        make_local: What a shard of this rank holds, by default a copy of its part of `full`. For
            tensor parallelism inside data parallelism, it returns a ShardedTensor or a DTensor of
            that part.
    """
    metadata = [
        ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{rank}/cpu") for box, rank in boxes
    ]
    local = [
        Shard(make_local(box) if make_local else full[box.slices()].clone(), shard)
        for (box, rank), shard in zip(boxes, metadata, strict=True)
        if rank == dist.get_rank()
    ]
    whole = ShardedTensorMetadata(metadata, full.size(), TensorProperties(dtype=full.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, whole)
