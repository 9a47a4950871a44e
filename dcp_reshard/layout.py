"""The 2-D layout collector: which boxes of a tensor does this rank hold, where in memory?

Everything that a state dict can hold of a tensor is brought to one shape, a list of `LocalShard`: a
box in global coordinates and the view of local memory that it fills.

* A plain tensor is one full box.
* A `DTensor` is what the cuts of its placements leave (`sharding`), usually one box, several for
  strided placements, none on ranks outside of its mesh.
* A `ShardedTensor` is one box per local shard. One nested in another (tensor parallelism inside
  data parallelism, the case that torch's `_ReaderWithOffset` was made for) adds the outer offset to
  the inner one.
* Any other tensor that implements `__create_chunk_list__` and `__get_tensor_shard__` is asked.

The shape that follows from the description is always compared with the real one. Nothing is
allocated, read, or changed.
"""

from __future__ import annotations

import bisect
import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dcp_reshard._torch import DTensor, ShardedTensor, dtensor_cuts, local_tensor
from dcp_reshard.box import Box
from dcp_reshard.errors import LayoutError
from dcp_reshard.ranges import may_overlap
from dcp_reshard.sharding import plan_shard_boxes

__all__ = [
    "LocalShard",
    "TensorLayout",
    "check_no_pieces",
    "collect_layout",
    "collect_tensor_layout",
]


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One box of a global tensor, and the memory of this rank that holds it."""

    box: Box
    """Where the shard lies in the global tensor."""

    tensor: torch.Tensor
    """A detached view of local memory, of shape ``box.sizes``."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """What this rank holds of one global tensor."""

    fqn: str
    """Key in the flattened state dict."""

    shape: tuple[int, ...]
    """Global shape."""

    dtype: torch.dtype
    """dtype of the local memory."""

    shards: tuple[LocalShard, ...]
    """The boxes held, none of them empty."""


def collect_layout(state_dict: Mapping[str, Any]) -> dict[str, TensorLayout]:
    """Layouts of all tensors of a flattened state dict; other values are left out.

    A value may be a `TensorLayout` itself: one that no tensor class can describe, such as a part of
    an FSDP1 flat parameter.

    Raises:
        LayoutError: A tensor cannot be described, or is memory of another one's shard; the message
            names it and the reason.

    Example:
        >>> layout = collect_layout({"w": torch.zeros(2, 3), "step": 7})
        >>> [(fqn, str(t.shards[0].box)) for fqn, t in layout.items()]
        [('w', '[0:2, 0:3]')]
    """
    layouts = {
        fqn: value if isinstance(value, TensorLayout) else collect_tensor_layout(fqn, value)
        for fqn, value in state_dict.items()
        if isinstance(value, (torch.Tensor, TensorLayout))
    }
    check_no_pieces(layouts.values())
    return layouts


def check_no_pieces(layouts: Collection[TensorLayout]) -> None:
    """Check that no tensor which seems to be whole is in the memory of a shard of another tensor.

    Such a tensor is this rank's piece of something, and a checkpoint has one value for its key, of
    one rank. FSDP1's LOCAL_STATE_DICT has them beside its flat parameters if these were made with
    `use_orig_params`; where all pieces have one shape, nothing else shows it.

    Raises:
        LayoutError: One is.
    """
    # Storage -> (first byte, end, key) of shards in it.
    held: dict[int, list[tuple[int, int, str]]] = {}
    whole: list[tuple[str, torch.Tensor]] = []
    for layout in layouts:
        is_whole = [shard.box for shard in layout.shards] == [Box.full(layout.shape)]
        for shard in layout.shards:
            tensor = shard.tensor
            if type(tensor) is not torch.Tensor or not _has_memory(tensor):
                continue
            if is_whole:
                whole.append((layout.fqn, tensor))
            elif tensor.is_contiguous():  # else other tensors may lie in its gaps
                start = tensor.data_ptr()
                place = (start, start + tensor.numel() * tensor.element_size(), layout.fqn)
                held.setdefault(tensor.untyped_storage().data_ptr(), []).append(place)
    if not held:
        return
    for places in held.values():
        places.sort()
    for fqn, tensor in whole:
        places = held.get(tensor.untyped_storage().data_ptr(), [])
        start = tensor.data_ptr()
        before = bisect.bisect(places, start, key=operator.itemgetter(0))
        if before and start < places[before - 1][1]:
            raise LayoutError(
                f"tensor `{fqn}`: its memory is in this rank's shard of `{places[before - 1][2]}`, "
                f"so each rank has another piece under this key, and a checkpoint has one of them "
                f"(FSDP1's LOCAL_STATE_DICT with use_orig_params); use SHARDED_STATE_DICT",
                fqn=fqn,
            )


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta


def collect_tensor_layout(fqn: str, tensor: torch.Tensor, *, writable: bool = True) -> TensorLayout:
    """The layout of one tensor.

    Args:
        fqn: Key of the tensor.
        tensor: Any tensor.
        writable: Whether it is to be loaded, not saved: then its elements need memory of their own.

    Raises:
        LayoutError: The tensor cannot be described, or several of its elements share memory.
    """
    shape = tuple(tensor.size())
    shards = tuple(s for s in _collect_shards(fqn, tensor) if not s.box.is_empty)
    whole = Box.full(shape)
    for shard in shards:
        if not whole.contains(shard.box):
            raise LayoutError(
                f"tensor `{fqn}`: this rank claims {shard.box} of a tensor of shape {shape!r}",
                fqn=fqn,
            )
        if writable:
            _check_writable(fqn, shard.tensor)
    return TensorLayout(fqn, shape, tensor.dtype, shards)


def _collect_shards(fqn: str, tensor: torch.Tensor) -> Iterator[LocalShard]:
    """Shards of a tensor, in coordinates of that tensor."""
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.local_shards():
            outer = Box(tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
            _check_shape(
                fqn, outer.sizes, tuple(shard.tensor.size()), "the ShardedTensor's metadata"
            )
            for inner in _collect_shards(fqn, shard.tensor):
                yield LocalShard(inner.box.translate(outer.offsets), inner.tensor)
    elif isinstance(tensor, DTensor) and not _is_checkpointable(local := _local(fqn, tensor)):
        yield from _collect_dtensor_shards(fqn, tensor, local.detach())
    elif _is_checkpointable(tensor):
        for i, chunk in enumerate(tensor.__create_chunk_list__()):  # type: ignore[attr-defined]
            index = MetadataIndex(fqn, chunk.offsets, i)
            local = tensor.__get_tensor_shard__(index).detach()  # type: ignore[attr-defined]
            _check_shape(fqn, tuple(chunk.sizes), tuple(local.size()), type(tensor).__name__)
            yield LocalShard(Box(tuple(chunk.offsets), tuple(chunk.sizes)), local)
    else:
        yield LocalShard(Box.full(tuple(tensor.size())), tensor.detach())


def _local(fqn: str, tensor: DTensor) -> torch.Tensor:
    local = local_tensor(tensor)
    if isinstance(local, (DTensor, ShardedTensor)):
        # A DTensor has torch's protocol, too, but what that says of it is not where it lies.
        raise LayoutError(
            f"tensor `{fqn}`: a DTensor whose local tensor is a {type(local).__name__} is not "
            f"supported",
            fqn=fqn,
        )
    return local


def _collect_dtensor_shards(fqn: str, tensor: DTensor, local: torch.Tensor) -> Iterator[LocalShard]:
    cuts = dtensor_cuts(tensor, fqn=fqn)
    if cuts is None:
        return
    shape, boxes = plan_shard_boxes(tuple(tensor.size()), tuple(cuts))
    if shape != tuple(local.size()):
        mesh = tuple(tensor.device_mesh.shape)
        why = f"placements {tensor.placements!r} on a mesh of shape {mesh!r}"
        _check_shape(fqn, shape, tuple(local.size()), why)
    for shard in boxes:
        # A single box is all of the local tensor, usually.
        whole = shard.box.sizes == shape
        view = local if whole else local[Box(shard.local_offsets, shard.box.sizes).slices()]
        yield LocalShard(shard.box, view)


def _is_checkpointable(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "__create_chunk_list__") and hasattr(tensor, "__get_tensor_shard__")


def _check_shape(fqn: str, described: tuple[int, ...], real: tuple[int, ...], by: str) -> None:
    # An empty shard has no elements to misplace, and torch gives it various shapes.
    if described == real or (0 in described and 0 in real):
        return
    raise LayoutError(
        f"tensor `{fqn}`: the local tensor has shape {real!r}, but {by} give this rank "
        f"{described!r}; rows would go to the wrong place",
        fqn=fqn,
    )


def _check_writable(fqn: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise LayoutError(
            f"tensor `{fqn}`: only dense tensors can be loaded in place, this one has layout "
            f"{tensor.layout} and dtype {tensor.dtype}",
            fqn=fqn,
        )
    if not tensor.is_contiguous() and may_overlap(tuple(tensor.size()), tensor.stride()):
        raise LayoutError(
            f"tensor `{fqn}`: an expanded tensor (shape {tuple(tensor.size())!r}, strides "
            f"{tensor.stride()!r}) cannot be loaded in place: several of its elements share memory",
            fqn=fqn,
        )
