"""Tensors in memory: the splits of one parameter, from one grid of ranks to a rank of another.

`reshard_tensor` has the meaning of fairseq2's function of that name. It goes by boxes:

1. The splits' shapes say which boxes of the global tensor each of them holds (`grid.plan_grid`).
2. The sizes and ranks of the target say which boxes are wanted (`grid.plan_target`).
3. Where one split holds just what is wanted, it is returned as it is. Else the target is allocated,
   and each split that overlaps it is loaded, copied from, and let go.

Reads no file: a split may be a callable, and what that does is its own business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from dcp_reshard._torch import DTensor, ShardedTensor
from dcp_reshard.box import Box
from dcp_reshard.errors import LayoutError
from dcp_reshard.fused import FusedBlocks
from dcp_reshard.grid import Held, plan_grid, plan_target
from dcp_reshard.shard_rules import ShardDim, make_rules
from dcp_reshard.sharding import ShardBox

__all__ = ["LazySplit", "Split", "reshard_tensor"]


@dataclass(frozen=True, slots=True)
class LazySplit:
    """A split that is loaded when it is needed; its shape is known before."""

    shape: tuple[int, ...]
    """Shape of the tensor that `load` gives."""

    load: Callable[[], torch.Tensor]
    """Loads the split; called at most once."""


Split = torch.Tensor | LazySplit | Callable[[], torch.Tensor]
"""What one rank stored of a parameter."""


def reshard_tensor(
    key: str,
    source_splits: Sequence[Sequence[Split]],
    source_shard_sizes: tuple[int, int],
    target_shard_sizes: tuple[int, int],
    target_shard_ranks: tuple[int, int],
    shard_dims: Mapping[str, int] | Mapping[str, ShardDim] | None = None,
    *,
    shard_specs: Mapping[str, int | ShardDim] | None = None,
    fused: Mapping[str, FusedBlocks] | None = None,
    on_uneven: Literal["cut", "error"] = "cut",
    target_dp: Literal["cut", "join"] = "cut",
) -> torch.Tensor:
    """One rank's part of a parameter, from the splits that the ranks of another grid hold.

    Data-parallel splits are parts along dim 0 of a tensor-parallel shard. A parameter without a dim
    in `shard_dims` or `shard_specs` is held whole by every tensor-parallel rank, and taken from the
    first. Only splits that overlap the target are loaded, one at a time.

    Source shards may differ in size. The target is cut as `torch.chunk` cuts: the first ranks hold
    `ceil(size / ranks)` indices, the last ones fewer or none. With as many tensor-parallel ranks as
    before, a rank gets the shard of the same rank, whatever its size.

    Args:
        key: Name of the parameter.
        source_splits: ``source_splits[tp][dp]``: tensors (memory-mapped, say), `LazySplit`, or
            callables that give a tensor. Bare callables must give tensors of one shape: it is
            learned from one that is wanted (where sizes do not divide, maybe its neighbour), and
            only those that are called can be checked. Where shapes differ, use `LazySplit`.
        source_shard_sizes: Numbers of tensor- and data-parallel ranks that stored the splits.
        target_shard_sizes: Numbers of tensor- and data-parallel ranks that there are now.
        target_shard_ranks: Tensor- and data-parallel rank whose part is wanted.
        shard_dims: The dim that tensor parallelism cuts, by key. Where the values are objects with
            an attribute `dim`, these are taken as `shard_specs`, which older versions of fairseq2
            have in this place.
        shard_specs: The same by regular expression, matched from the start of the key. A value may
            be an object with an attribute `dim`.
        fused: Blocks fused along that dim, by key; see `FusedBlocks`.
        on_uneven: What to do where the dim does not divide by the number of ranks: ``"cut"`` it as
            above, or ``"error"``.
        target_dp: What the number of data-parallel ranks now means: ``"cut"`` gives one rank's part
            of dim 0, ``"join"`` all of it (as fairseq2 does, whatever the number).

    Returns:
        The source split itself where it is just what is wanted, else a new tensor.

    Raises:
        LayoutError: The splits, sizes, ranks or dims do not fit together; the message names the
            key.

    Example:
        >>> whole = torch.arange(6)
        >>> splits = [[whole[:3]], [whole[3:]]]
        >>> [reshard_tensor("w", splits, (2, 1), (4, 1), (r, 0), {"w": 0}).tolist() for r in (0, 1)]
        [[0, 1], [2, 3]]
    """
    for name, value, choices in (
        ("on_uneven", on_uneven, ("cut", "error")),
        ("target_dp", target_dp, ("cut", "join")),
    ):
        if value not in choices:
            raise ValueError(f"`{name}` must be {choices[0]!r} or {choices[1]!r}, got {value!r}")
    rules = make_rules(shard_dims or {}, shard_specs or {}, fused or {})
    dim = rules.find_dim(key)
    blocks = rules.fused.get(key)
    if blocks is not None and dim is None:
        raise LayoutError(f"tensor `{key}`: has fused blocks, but no dim that is cut", fqn=key)
    splits = _check_splits(key, source_splits, source_shard_sizes)
    (tp, dp), (tp_rank, dp_rank) = _check_ranks(key, target_shard_sizes, target_shard_ranks)
    if dim is None:
        splits, tp, tp_rank = splits[:1], 1, 0
    if target_dp == "join":
        dp, dp_rank = 1, 0
    source = _Source(key, splits)
    source.learn_shapes(_guess_wanted(splits, dim, (tp, tp_rank), (dp, dp_rank)))
    try:
        grid = plan_grid(source.shapes, dim=dim, fused=blocks)
        if on_uneven == "error" and dim is not None and tp != len(splits):
            _check_even(grid.shape[dim], tp, blocks)
        wanted = plan_target(grid, dim=dim, fused=blocks, tp=(tp, tp_rank), dp=(dp, dp_rank))
    except ValueError as error:
        raise LayoutError(f"tensor `{key}`: {error}", fqn=key) from error
    return _gather(source, grid.splits, wanted)


@dataclass(slots=True, eq=False)
class _Source:
    """The splits, and what is known of them. Not frozen: it learns by loading."""

    key: str
    splits: Sequence[Sequence[Split]]
    shapes: list[list[tuple[int, ...]]] = field(default_factory=list)
    _loaded: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
    _dtype: torch.dtype | None = None

    def learn_shapes(self, wanted: tuple[int, int]) -> None:
        """Find the shapes of all splits; those of bare callables from one that is wanted."""
        known = [[_known_shape(split) for split in row] for row in self.splits]
        if any(shape is None for row in known for shape in row):
            first = self._loaded[wanted] = self._call(*wanted)
            guess = known[wanted[0]][wanted[1]] = tuple(first.shape)
        else:
            guess = ()
        self.shapes = [[guess if shape is None else shape for shape in row] for row in known]
        for t, row in enumerate(self.splits):
            for d, split in enumerate(row):
                if isinstance(split, torch.Tensor):
                    self._check(t, d, split)

    def load(self, t: int, d: int) -> torch.Tensor:
        """A split; nothing here keeps it."""
        tensor = self._loaded.pop((t, d), None)
        return self._check(t, d, self._call(t, d) if tensor is None else tensor)

    def load_any(self) -> torch.Tensor:
        """One split, whichever costs nothing: for the dtype of a target without elements."""
        places = [(t, d) for t, row in enumerate(self.splits) for d in range(len(row))]
        ready = [p for p in places if isinstance(self.splits[p[0]][p[1]], torch.Tensor)]
        return self.load(*[*self._loaded, *ready, *places][0])

    def _call(self, t: int, d: int) -> torch.Tensor:
        split = self.splits[t][d]
        if not isinstance(split, torch.Tensor):
            split = split.load() if isinstance(split, LazySplit) else split()
        if not isinstance(split, torch.Tensor):
            raise self._error(t, d, f"is a {type(split).__name__}, not a tensor")
        return split

    def _check(self, t: int, d: int, tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, (DTensor, ShardedTensor)) or tensor.layout is not torch.strided:
            raise self._error(t, d, f"is a {type(tensor).__name__}, not a plain dense tensor")
        if tuple(tensor.shape) != self.shapes[t][d]:
            raise self._error(
                t,
                d,
                f"has shape {tuple(tensor.shape)!r}, taken was {self.shapes[t][d]!r}; where splits "
                f"differ in shape, give them as `LazySplit`",
            )
        if self._dtype is None:
            self._dtype = tensor.dtype
        if tensor.dtype != self._dtype:
            raise self._error(t, d, f"is of {tensor.dtype}, another one of {self._dtype}")
        return tensor

    def _error(self, t: int, d: int, what: str) -> LayoutError:
        return LayoutError(
            f"tensor `{self.key}`: the split of tp rank {t}, dp rank {d} {what}", fqn=self.key
        )


def _check_pair(key: str, name: str, pair: Sequence[Any], least: int) -> tuple[int, int]:
    if len(pair) != 2 or any(type(n) is not int or n < least for n in pair):
        raise LayoutError(
            f"tensor `{key}`: `{name}` is {pair!r}, not two numbers (tp, dp) from {least}", fqn=key
        )
    return pair[0], pair[1]


def _check_ranks(
    key: str, sizes: tuple[int, int], ranks: tuple[int, int]
) -> tuple[tuple[int, int], tuple[int, int]]:
    sizes = _check_pair(key, "target_shard_sizes", sizes, 1)
    ranks = _check_pair(key, "target_shard_ranks", ranks, 0)
    if any(rank >= size for rank, size in zip(ranks, sizes, strict=True)):
        raise LayoutError(
            f"tensor `{key}`: there is no rank {ranks!r} in a grid of {sizes!r}", fqn=key
        )
    return sizes, ranks


def _check_splits(
    key: str, splits: Sequence[Sequence[Split]], sizes: tuple[int, int]
) -> Sequence[Sequence[Split]]:
    tp, dp = _check_pair(key, "source_shard_sizes", sizes, 1)
    lengths = [len(row) for row in splits]
    if lengths != [dp] * tp:
        raise LayoutError(
            f"tensor `{key}`: `source_splits` has {len(splits)} tp ranks with {lengths!r} splits, "
            f"but `source_shard_sizes` is {sizes!r}",
            fqn=key,
        )
    return splits


def _known_shape(split: Split) -> tuple[int, ...] | None:
    return tuple(split.shape) if isinstance(split, (torch.Tensor, LazySplit)) else None


def _guess_wanted(
    splits: Sequence[Sequence[Split]], dim: int | None, tp: tuple[int, int], dp: tuple[int, int]
) -> tuple[int, int]:
    """A split that overlaps the target if all have one shape: the one where it starts."""
    rows, columns = len(splits), len(splits[0])
    if dim == 0:
        place = (tp[1] * dp[0] + dp[1]) * rows * columns // (tp[0] * dp[0])
        return divmod(place, columns)
    return tp[1] * rows // tp[0], dp[1] * columns // dp[0]


def _check_even(size: int, tp: int, fused: FusedBlocks | None) -> None:
    blocks = fused or FusedBlocks((size,))
    for block in blocks.sizes:
        if block // blocks.unit % tp and not (blocks.repeat and tp % (block // blocks.unit) == 0):
            raise ValueError(
                f"{block} indices in units of {blocks.unit} do not divide by {tp} tp ranks"
            )


def _gather(source: _Source, splits: Sequence[Sequence[Held]], wanted: Held) -> torch.Tensor:
    """The target: a split that is just that, or a new tensor filled from all that overlap it."""
    target: torch.Tensor | None = None
    done: set[Box] = set()
    for t, row in enumerate(splits):
        for d, held in enumerate(row):
            if held == wanted:
                return source.load(t, d)
    for t, row in enumerate(splits):
        for d, held in enumerate(row):
            # Repeated blocks and 0-d tensors are held by several ranks: one of them will do.
            parts = [p for p in _overlaps(held, wanted) if p.box not in done]
            if not parts:
                continue
            tensor = source.load(t, d).detach()
            if target is None:
                target = torch.empty(wanted.shape, dtype=tensor.dtype, device=tensor.device)
            for part in parts:
                target[part.to].copy_(tensor[part.by])
                done.add(part.box)
    if target is None:
        target = source.load_any().detach().new_empty(wanted.shape)
    return target


@dataclass(frozen=True, slots=True)
class _Overlap:
    box: Box
    by: tuple[slice, ...]
    to: tuple[slice, ...]


def _overlaps(held: Held, wanted: Held) -> list[_Overlap]:
    found: list[_Overlap] = []
    for one in held.boxes:
        for two in wanted.boxes:
            box = one.box.intersect(two.box)
            if box is not None:
                found.append(_Overlap(box, _local_slices(one, box), _local_slices(two, box)))
    return found


def _local_slices(part: ShardBox, box: Box) -> tuple[slice, ...]:
    return box.relative_to(part.box.offsets).translate(part.local_offsets).slices()
