"""Adapters to torch's private or shifting names; the only module that may use them.

Each adapter says which private name it stands for. All are tested against torch 2.13.0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import (
    ShardedTensorMetadata,
)
from torch.distributed._shard.sharded_tensor.metadata import (
    TensorProperties as ShardedTensorProperties,
)
from torch.distributed._shard.sharded_tensor.shard import Shard as TorchShard
from torch.distributed._shard.sharded_tensor.utils import _parse_and_validate_remote_device
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint._nested_dict import flatten_state_dict as _flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element as _set_element
from torch.distributed.checkpoint._traverse import traverse_state_dict_v_2_3
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import Store
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import (
    Replicate,
    Shard,
    _StridedShard,
)

from dcp_reshard.errors import LayoutError
from dcp_reshard.sharding import Cut, cut_order

__all__ = [
    "ChunkShardingSpec",
    "DTensor",
    "KeyPath",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "chunk_metadata",
    "copy_together",
    "default_device",
    "default_store",
    "describe_ranks",
    "dtensor_cuts",
    "empty_dtensor_like",
    "empty_sharded_tensor_like",
    "flatten_state_dict",
    "flatten_state_dict_2_3",
    "has_own_order",
    "load_state_dict",
    "local_tensor",
    "make_sharded_tensor",
    "recorded_box",
    "set_element",
    "shard_places",
    "sharing_ranks",
    "storage_info",
]

KeyPath = tuple[str | int, ...]


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The local tensor of a DTensor, outside of any graph.

    Stands for `to_local()`, which makes an autograd node each time: half of what it takes to
    describe a tensor.
    """
    local = tensor._local_tensor
    if type(local) in (torch.Tensor, torch.nn.Parameter):
        return local
    return tensor.to_local()  # waits for a result that is still under way


def dtensor_cuts(
    tensor: DTensor, *, fqn: str, coordinate: Sequence[int] | None = None
) -> list[Cut] | None:
    """The cuts that a DTensor's placements make on a rank, in the order in which they were made.

    torch 2.13 has two readings of `_StridedShard`, told apart by a private field of the spec. As
    FSDP2 uses it, it says that axes to its right cut the dim before it did; where a view
    (``flatten``, say) has made it, it is meant by definition, and the axes cut from left to right.
    The order of plain shards is from left to right unless the spec has another
    (`DTensorSpec.shard_order`).

    Args:
        tensor: The tensor.
        fqn: Its key.
        coordinate: Where the rank is in the tensor's mesh; this rank's place if None.

    Returns:
        The cuts, or None if this rank is not part of the tensor's mesh.

    Raises:
        LayoutError: A placement is neither a shard nor a replica (`Partial`, say).
    """
    if coordinate is None:
        coordinate = tensor.device_mesh.get_coordinate()
    cuts: dict[int, Cut] = {}
    for axis, placement in enumerate(tensor.placements):
        if isinstance(placement, Replicate):
            continue
        # `_StridedShard` is not a subclass of `Shard` in torch 2.13, but was one before 2.10.
        if not isinstance(placement, (Shard, _StridedShard)):
            raise LayoutError(
                f"tensor `{fqn}`: placement {placement!r} on mesh axis {axis} is not a shard or a "
                f"replica, so no element of the checkpoint belongs to one rank of it; placements "
                f"are {tensor.placements!r}",
                fqn=fqn,
            )
        dim = placement.dim + tensor.ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < tensor.ndim:
            raise LayoutError(
                f"tensor `{fqn}`: placement {placement!r} on mesh axis {axis} cuts a dim that a "
                f"tensor of shape {tuple(tensor.shape)!r} does not have",
                fqn=fqn,
            )
        if coordinate is not None:
            split = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
            cuts[axis] = Cut(dim, tensor.device_mesh.size(axis), coordinate[axis], split)
    if coordinate is None:
        return None
    spec = tensor._spec
    if not spec.use_strided_shard_as_shard_order:
        return [cuts[axis] for entry in spec.shard_order for axis in entry.mesh_dims]
    dims = sorted({cut.dim for cut in cuts.values()})
    return [
        cut for dim in dims for cut in cut_order([cut for cut in cuts.values() if cut.dim == dim])
    ]


def has_own_order(tensor: DTensor) -> bool:
    """Whether a dim was cut in an order that stock's saves may ignore without a size showing it.

    Those are explicit orders of plain shards, and three axes or more as FSDP2 makes them: two are
    recorded wrongly with other sizes, or rightly.
    """
    spec = tensor._spec
    if spec.use_strided_shard_as_shard_order:
        shards = (p for p in spec.placements if isinstance(p, (Shard, _StridedShard)))
        dims = [shard.dim % tensor.ndim for shard in shards]
        return any(dims.count(dim) > 2 for dim in dims)
    return any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in spec.shard_order)


def recorded_box(
    tensor: DTensor, coordinate: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes and offsets that `dcp.save` records for the rank at a place of the mesh.

    Stands for `_compute_local_shape_and_global_offset`.
    """
    mesh = tuple(tensor.device_mesh.shape)
    sizes, offsets = _compute_local_shape_and_global_offset(
        tensor.shape, mesh, list(coordinate), tensor.placements
    )
    return tuple(sizes), tuple(offsets)


def sharing_ranks(tensor: torch.Tensor) -> object | None:
    """What says which ranks share a tensor: its mesh, or its process group; None if it is plain."""
    if isinstance(tensor, DTensor):
        return tensor.device_mesh
    return tensor._process_group if isinstance(tensor, ShardedTensor) else None


def describe_ranks(ranks: Any) -> str:
    """The ranks of a mesh, in their arrangement, or of a process group."""
    if isinstance(ranks, DeviceMesh):
        return f"{tuple(ranks.shape)} {ranks.mesh.flatten().tolist()}"
    # `get_process_group_ranks` fails for a group that has been destroyed.
    return str(sorted(dist.distributed_c10d._world.pg_group_ranks.get(ranks, ())))


def empty_dtensor_like(
    param: DTensor, *, dtype: torch.dtype, device: torch.device | None = None
) -> DTensor:
    """A DTensor of `param`'s layout, of another dtype, with uninitialised local memory."""
    local = param.to_local().detach()
    made = DTensor.from_local(
        torch.empty_like(local, dtype=dtype, device=device or local.device, requires_grad=False),
        param.device_mesh,
        param.placements,
        run_check=False,
        shape=param.shape,
        stride=param.stride(),
    )
    # `from_local` of torch 2.13 reads placements in the way that it guesses; see `dtensor_cuts`.
    made._spec.use_strided_shard_as_shard_order = param._spec.use_strided_shard_as_shard_order
    made._spec.shard_order = param._spec.shard_order
    return made


def empty_sharded_tensor_like(
    param: ShardedTensor, *, dtype: torch.dtype, device: torch.device | None = None
) -> ShardedTensor:
    """A ShardedTensor of `param`'s layout, nested or not, with uninitialised local memory.

    Stands for `ShardedTensor._init_from_local_shards_and_global_metadata`, which makes no
    collective call. The process group is that of `param` itself: torch 2.13's
    `load_sharded_optimizer_state_dict` takes the default group instead, and under FSDP1 with
    HYBRID_SHARD fills moments with other rows.
    """
    shards = []
    for shard in param.local_shards():
        inner = shard.tensor
        if isinstance(inner, ShardedTensor):
            tensor: torch.Tensor = empty_sharded_tensor_like(inner, dtype=dtype, device=device)
        elif isinstance(inner, DTensor):
            tensor = empty_dtensor_like(inner, dtype=dtype, device=device)
        else:
            tensor = torch.empty_like(
                inner, dtype=dtype, device=device or inner.device, requires_grad=False
            )
        shards.append(TorchShard(tensor, shard.metadata))
    old = param.metadata()
    properties = ShardedTensorProperties(
        dtype=dtype,
        layout=old.tensor_properties.layout,
        requires_grad=False,
        memory_format=old.tensor_properties.memory_format,
        pin_memory=False,
    )
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards,
        ShardedTensorMetadata(list(old.shards_metadata), old.size, properties),
        process_group=param._process_group,
    )


def chunk_metadata(spec: ChunkShardingSpec, tensor: torch.Tensor) -> ShardedTensorMetadata:
    """Where the shards of a tensor lie if it is sharded by this spec.

    Raises:
        ValueError: The tensor does not have the dim, or has too few indices along it: torch 2.13
            places some empty shards behind the end of the tensor, and then, in all operations,
            refuses them.
    """
    properties = ShardedTensorProperties(
        dtype=tensor.dtype,
        layout=tensor.layout,
        requires_grad=tensor.requires_grad,
        memory_format=torch.contiguous_format,
        pin_memory=False,
    )
    metadata = spec.build_metadata(tensor.size(), properties)
    for i, shard in enumerate(metadata.shards_metadata):
        if any(o > size for o, size in zip(shard.shard_offsets, tensor.size(), strict=True)):
            raise ValueError(
                f"a ShardedTensor of shape {tuple(tensor.size())!r} cannot be cut along dim "
                f"{spec.dim} into {len(spec.placements)} shards: shard {i} would start at "
                f"{shard.shard_offsets!r}"
            )
    return metadata


def shard_places(
    metadata: ShardedTensorMetadata, group: dist.ProcessGroup | None
) -> list[tuple[int, torch.device]]:
    """Rank in the group, and device, of each shard.

    Stands for `_parse_and_validate_remote_device`.

    Raises:
        ValueError: A shard is placed on a rank outside of the group, or on none.
    """
    group = group or dist.distributed_c10d._get_default_group()
    places = []
    for shard in metadata.shards_metadata:
        rank, device = _parse_and_validate_remote_device(  # type: ignore[no-untyped-call]
            group, shard.placement
        )
        if rank is None:
            raise ValueError(f"placement {shard.placement!s} names no rank")
        places.append((dist.get_group_rank(group, rank), device))
    return places


def make_sharded_tensor(
    local: torch.Tensor,
    *,
    index: int,
    metadata: ShardedTensorMetadata,
    spec: ChunkShardingSpec,
    group: dist.ProcessGroup | None,
) -> ShardedTensor:
    """A ShardedTensor of which this rank holds shard `index`; no collective call.

    Stands for `ShardedTensor._init_from_local_shards_and_global_metadata`.
    """
    shard = TorchShard(local, metadata.shards_metadata[index])
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [shard], metadata, process_group=group, sharding_spec=spec
    )


def copy_together(dests: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source into its destination, in place: a third of what as many `copy_` take."""
    if dests:
        with torch.no_grad():
            torch._foreach_copy_(list(dests), list(sources))


def flatten_state_dict(state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """Values and key paths by dotted name, as `dcp.save` of torch 2.4 and later makes them."""
    return _flatten_state_dict(dict(state_dict))


def flatten_state_dict_2_3(
    state_dict: Mapping[str, Any],
) -> tuple[dict[str, Any], dict[str, KeyPath]]:
    """As `flatten_state_dict`, with the rules of torch 2.3 and earlier.

    There a dict without tensors was stored as one object. The traversal is called directly: the
    switch that torch has for it (`_version._derived_version`) is a global, which stays set after an
    error and is shared by threads.
    """
    values: dict[str, Any] = {}
    paths: dict[str, KeyPath] = {}

    def visit(path: KeyPath, value: object) -> None:
        fqn = ".".join(map(str, path))
        if fqn in values:
            raise ValueError(f"duplicated flatten key {fqn}")
        values[fqn], paths[fqn] = value, path

    traverse_state_dict_v_2_3(dict(state_dict), visit)
    return values, paths


def set_element(root: dict[str, Any], path: KeyPath, value: object) -> None:
    """Set the value at a key path, making the dicts and lists on the way."""
    _set_element(root, path, value)


def default_device(kind: str | None = None) -> torch.device:
    """The current device of a kind; if None, of that which the default process group works on.

    Stands for `_get_object_coll_device`. torch's planner materialises meta tensors on the device of
    `_get_pg_default_device`, which in torch 2.13 warns that it will be deprecated; under ``-W
    error`` that is a failed load.
    """
    if kind is None:
        kind = dist.distributed_c10d._get_object_coll_device() if dist.is_initialized() else "cpu"
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def default_store() -> Store:
    """The store through which the default process group was formed.

    Stands for `_get_default_store`.
    """
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def storage_info(path: str, offset: int, length: int) -> object:
    """The storage entry that torch's `FileSystemReader` looks up (`_StorageInfo`)."""
    return _StorageInfo(path, offset, length)


def load_state_dict(
    state_dict: dict[str, Any],
    *,
    storage_reader: StorageReader,
    planner: LoadPlanner,
    process_group: dist.ProcessGroup | None,
    no_dist: bool,
) -> None:
    """The load of `dcp.load`, without its warning that a single process is a single process.

    Stands for `_load_state_dict`. The public function warns on every load without a process group,
    even where `no_dist=True` was asked for; under ``-W error`` that is a failed load.
    """
    _load_state_dict(
        state_dict=state_dict,
        storage_reader=storage_reader,
        process_group=process_group,
        no_dist=no_dist,
        planner=planner,
    )
