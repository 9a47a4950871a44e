"""`shard_parameter`: a parameter of one rank, spread over all of them as a `ShardedTensor`.

It has the meaning of torch's function of that name, and differs in how it gets there:

1. Each rank checks what it can check alone, and makes room for its shard.
2. One exchange tells all ranks what each was called with and whether it is ready. If anything does
   not fit, all ranks raise, and none waits for another.
3. The source sends the shards in rounds of bounded size, by scatter, or by broadcast where the
   backend has no scatter. (torch makes copies of all shards on the source first.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from dcp_reshard._torch import (
    ChunkShardingSpec,
    DTensor,
    ShardedTensor,
    ShardedTensorMetadata,
    chunk_metadata,
    make_sharded_tensor,
    shard_places,
)
from dcp_reshard.collectives import collective_device
from dcp_reshard.errors import InconsistentRanksError, LayoutError, MissingParameterError

__all__ = ["shard_parameter"]

_ROUND_BYTES = 64 * 2**20
"""Bytes that the source sends in one round; another rank has a buffer for its part of them."""


def shard_parameter(
    module: torch.nn.Module,
    param_name: str,
    sharding_spec: ChunkShardingSpec,
    src_rank: int = 0,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Replace a parameter of a module by a `ShardedTensor` with the values of one rank.

    A collective call of all ranks of the process group. On an error, on any of them, all raise, and
    the parameter is as it was.

    Args:
        module: The module that owns the parameter itself, not through a submodule.
        param_name: Name of the parameter, which is contiguous on all ranks.
        sharding_spec: Dim to cut, and the rank and device of each shard; one shard per rank.
        src_rank: The rank, in the process group, whose values count.
        process_group: The ranks; the default group if None.

    Raises:
        MissingParameterError: The module has no such parameter.
        InconsistentRanksError: Ranks differ in the spec, the source, or the parameter's shape,
            dtype or `requires_grad`; the message has both values.
        LayoutError: It is not a contiguous, dense parameter, or the spec does not fit it or the
            group.

    Example:
        >>> spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu", "rank:1/cpu"])
        >>> shard_parameter(linear, "weight", spec)  # doctest: +SKIP
    """
    ready: _Ready | None = None
    failure: Exception | None = None
    try:
        tensor = _find_parameter(module, param_name)
        offer = _describe(src_rank, sharding_spec, tensor)
        ready = _prepare(param_name, tensor, sharding_spec, src_rank, process_group)
    except Exception as error:
        # Whatever it is: the other ranks wait for this one, and must be told.
        failure = error
        offer = _Offer(src_rank, problem=str(error) or type(error).__name__)
    offers: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(offers, offer, group=process_group)
    if failure is not None:
        raise failure
    _check_offers(param_name, offers)
    assert ready is not None
    _send_shards(ready, src_rank, process_group)
    ready.local.requires_grad_(ready.source.requires_grad)
    sharded = make_sharded_tensor(
        ready.local,
        index=ready.index,
        metadata=ready.metadata,
        spec=sharding_spec,
        group=process_group,
    )
    parameter = torch.nn.Parameter(sharded, requires_grad=ready.source.requires_grad)
    module.register_parameter(param_name, parameter)


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank was called with, or why it cannot go on."""

    src_rank: int
    spec: str = ""
    parameter: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class _Ready:
    """A rank that can go on."""

    source: torch.Tensor
    metadata: ShardedTensorMetadata
    dim: int
    owners: list[int]
    index: int
    local: torch.Tensor


def _find_parameter(module: torch.nn.Module, name: str) -> torch.Tensor:
    kind = type(module).__name__
    tensor = dict(module.named_parameters(recurse=False, remove_duplicate=False)).get(name)
    if tensor is None and not hasattr(module, name):
        raise MissingParameterError(f"{kind} has no parameter `{name}`", fqn=name)
    if tensor is None:
        other = type(getattr(module, name)).__name__
        raise LayoutError(f"`{name}` of {kind} is a {other}, not a parameter", fqn=name)
    if isinstance(tensor, (DTensor, ShardedTensor)) or tensor.layout is not torch.strided:
        raise LayoutError(
            f"parameter `{name}` is a {type(tensor).__name__} of layout {tensor.layout}; only a "
            f"plain dense one can be sharded",
            fqn=name,
        )
    if not tensor.is_contiguous():
        raise LayoutError(
            f"parameter `{name}` of shape {tuple(tensor.shape)!r} and strides "
            f"{tensor.stride()!r} is not contiguous",
            fqn=name,
        )
    return tensor


def _describe(src_rank: int, spec: ChunkShardingSpec, tensor: torch.Tensor) -> _Offer:
    placements = [str(placement) for placement in getattr(spec, "placements", ())]
    return _Offer(
        src_rank,
        f"{type(spec).__name__}(dim={getattr(spec, 'dim', None)!r}, placements={placements!r})",
        f"shape {tuple(tensor.shape)!r} of {tensor.dtype}, requires_grad={tensor.requires_grad}",
    )


def _prepare(
    name: str,
    tensor: torch.Tensor,
    spec: ChunkShardingSpec,
    src_rank: int,
    group: dist.ProcessGroup | None,
) -> _Ready:
    ranks = dist.get_world_size(group)
    if not isinstance(spec, ChunkShardingSpec):
        raise LayoutError(
            f"parameter `{name}`: {type(spec).__name__} is not a ChunkShardingSpec", fqn=name
        )
    if not 0 <= src_rank < ranks:
        raise LayoutError(
            f"parameter `{name}`: there is no source rank {src_rank!r} in a group of {ranks}",
            fqn=name,
        )
    try:
        metadata = chunk_metadata(spec, tensor)
        places = shard_places(metadata, group)
    except ValueError as error:
        raise LayoutError(f"parameter `{name}`: {error}", fqn=name) from error
    owners = [rank for rank, _ in places]
    if sorted(owners) != list(range(ranks)):
        raise LayoutError(
            f"parameter `{name}`: each of {ranks} ranks must hold one shard, but the spec gives "
            f"them to ranks {owners!r}",
            fqn=name,
        )
    index = owners.index(dist.get_rank(group))
    sizes = metadata.shards_metadata[index].shard_sizes
    local = torch.empty(sizes, dtype=tensor.dtype, device=places[index][1])
    return _Ready(tensor, metadata, int(spec.dim) % tensor.ndim, owners, index, local)


def _check_offers(name: str, offers: list[_Offer]) -> None:
    for rank, offer in enumerate(offers):
        if offer.problem:
            raise LayoutError(f"rank {rank} of {len(offers)}: {offer.problem}", fqn=name)
    for what in ("src_rank", "spec", "parameter"):
        ranks: dict[object, list[int]] = {}
        for rank, offer in enumerate(offers):
            ranks.setdefault(getattr(offer, what), []).append(rank)
        if len(ranks) > 1:
            said = "; ".join(f"{value} on ranks {own}" for value, own in ranks.items())
            raise InconsistentRanksError(
                f"parameter `{name}`: ranks differ in the {_NAMES[what]}: {said}", fqn=name
            )


_NAMES = {"src_rank": "`src_rank`", "spec": "`sharding_spec`", "parameter": "parameter itself"}


def _send_shards(ready: _Ready, src_rank: int, group: dist.ProcessGroup | None) -> None:
    """Fill the local shards of all ranks with the source's values; a collective call.

    The parameter is taken as a matrix, the dims before the cut by the rest: a shard is a range of
    its columns. A round sends the same rectangle of every shard.
    """
    dtype, dim, shape = ready.source.dtype, ready.dim, ready.source.shape
    rows, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    columns: list[tuple[int, int]] = [(0, 0)] * len(ready.owners)
    for owner, shard in zip(ready.owners, ready.metadata.shards_metadata, strict=True):
        first = shard.shard_offsets[dim] * inner
        columns[owner] = (first, first + shard.shard_sizes[dim] * inner)
    width = max(last - first for first, last in columns)
    if not rows * width:
        return
    limit = max(1, _ROUND_BYTES // (len(columns) * dtype.itemsize))
    rank, count = dist.get_rank(group), len(columns)
    room = min(limit, rows * width) * dtype.itemsize
    # As bytes: gloo knows few dtypes. Zeroed: what a narrow shard leaves unused is sent as well.
    buffers = torch.zeros(
        count + 1 if rank == src_rank else 1,
        room,
        dtype=torch.uint8,
        device=collective_device(group),
    )
    whole = ready.source.detach().view(rows, shape[dim] * inner)
    local = ready.local.view(rows, columns[rank][1] - columns[rank][0])
    send = _Sender(src_rank, group)
    for part in _rounds(rows, width, limit):
        nbytes = part.numel * dtype.itemsize
        received, *pieces = [buffer[:nbytes] for buffer in buffers]
        for piece, (first, last) in zip(pieces, columns if pieces else (), strict=True):
            block = part.cut(whole[:, first:last])
            _as_block(piece, block).copy_(block)
        send(received, pieces)
        block = part.cut(local)
        block.copy_(_as_block(received, block))


@dataclass(frozen=True, slots=True)
class _Part:
    """A rectangle of a matrix."""

    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def numel(self) -> int:
        return (self.rows[1] - self.rows[0]) * (self.columns[1] - self.columns[0])

    def cut(self, matrix: torch.Tensor) -> torch.Tensor:
        return matrix[self.rows[0] : self.rows[1], self.columns[0] : self.columns[1]]


def _rounds(rows: int, width: int, limit: int) -> Iterator[_Part]:
    """Rectangles of up to `limit` elements that make up a matrix."""
    if width <= limit:
        step = limit // width
        for row in range(0, rows, step):
            yield _Part((row, min(row + step, rows)), (0, width))
        return
    for row in range(rows):
        for column in range(0, width, limit):
            yield _Part((row, row + 1), (column, min(column + limit, width)))


def _as_block(memory: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """The first bytes of a buffer as elements, in the shape and dtype of a block."""
    return memory[: block.numel() * block.itemsize].view(block.dtype).view(block.shape)


@dataclass(slots=True, eq=False)
class _Sender:
    """Sends a piece to each rank. Not frozen: it learns what the backend can do."""

    src_rank: int
    group: dist.ProcessGroup | None
    has_scatter: bool = True

    def __call__(self, received: torch.Tensor, pieces: list[torch.Tensor]) -> None:
        """Fill `received` with this rank's piece; the source has the pieces of all ranks."""
        if self.has_scatter:
            try:
                dist.scatter(received, pieces or None, group=self.group, group_src=self.src_rank)
            except RuntimeError as error:
                # What a backend without it says, on every rank and before anything is sent.
                if "does not support scatter" not in str(error):
                    raise
                self.has_scatter = False
            else:
                return
        rank = dist.get_rank(self.group)
        others = torch.empty_like(received)
        for owner in range(dist.get_world_size(self.group)):
            piece = pieces[owner] if pieces else received if owner == rank else others
            dist.broadcast(piece, group=self.group, group_src=self.src_rank)
        if pieces:
            received.copy_(pieces[rank])
