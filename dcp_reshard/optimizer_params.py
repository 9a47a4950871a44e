"""The parameters of a live optimizer, by name, and what this rank holds of each.

An optimizer has parameters without names, a model has names (several for a tied parameter), and
FSDP1 puts flattened pieces in between. Here every parameter of the optimizer becomes a list of
original parameters of the model: one, or as many as there are in an FSDP1 flat parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dcp_reshard._torch import DTensor, ShardedTensor
from dcp_reshard._torch_fsdp1 import FlatSlice, fsdp1_flat_slices
from dcp_reshard.box import Box
from dcp_reshard.errors import LayoutError, OptimizerStateError
from dcp_reshard.flat_range import flat_range_boxes
from dcp_reshard.layout import LocalShard, TensorLayout, collect_tensor_layout
from dcp_reshard.nearest_names import shorten
from dcp_reshard.param_names import canonical_name

__all__ = ["LiveParam", "Original", "collect_live_params", "slice_layout"]


@dataclass(frozen=True, slots=True, eq=False)
class Original:
    """A parameter of the model, as it was before FSDP1 flattened it."""

    names: tuple[str, ...]
    """Its names in the model."""

    shape: tuple[int, ...]
    """Global shape."""

    part: FlatSlice | None = None
    """Which elements this rank holds, and where in the optimizer's parameter; None if that is the
    parameter itself."""

    origin: tuple[int, ...] = ()
    """Where what FSDP1 has flattened lies in the parameter: not at 0 under tensor parallelism."""

    @property
    def name(self) -> str:
        """Its first name, without the parts that wrappers add, for people to read."""
        return canonical_name(self.names[0])


@dataclass(frozen=True, slots=True, eq=False)
class LiveParam:
    """A parameter of the optimizer."""

    param: torch.Tensor
    """The parameter."""

    originals: tuple[Original, ...]
    """The parameters of the model that it holds."""

    @property
    def is_held(self) -> bool:
        """Whether this rank has any of it; torch keeps no state of an FSDP1 piece it has not."""
        part = self.originals[0].part
        return part is None or part.size > 0

    def zeros(self, dtype: torch.dtype) -> torch.Tensor:
        """Zeros laid out like the parameter; of an FSDP1 parameter, as it is while sharded."""
        part = self.originals[0].part
        if part is None:
            return torch.zeros_like(self.param, dtype=dtype, requires_grad=False)
        return torch.zeros(part.size, dtype=dtype, device=self.param.device)


def collect_live_params(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[list[LiveParam]]:
    """The parameters of each group of the optimizer.

    Raises:
        OptimizerStateError: A parameter of the optimizer is not in the model, or on the meta
            device.
        LayoutError: A parameter cannot be described.
    """
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    flat = fsdp1_flat_slices(model)
    groups: list[list[LiveParam]] = []
    for number, group in enumerate(optimizer.param_groups):
        groups.append([])
        for i, param in enumerate(group["params"]):
            if param in flat:
                originals = tuple(map(_flattened, flat[param]))
            elif param in names:
                originals = (Original(tuple(names[param]), tuple(param.size())),)
            else:
                raise OptimizerStateError(
                    f"parameter {i} of parameter group {number}, of shape {tuple(param.size())!r}, "
                    f"is not in the model, which has {shorten(n[0] for n in names.values())}"
                )
            _check_real(param, originals)
            groups[-1].append(LiveParam(param, originals))
    return groups


def _flattened(part: FlatSlice) -> Original:
    if part.shard_of is None:
        return Original(part.names, part.shape, part, (0,) * len(part.shape))
    name = canonical_name(part.names[0])
    layout = collect_tensor_layout(name, part.shard_of)
    if len(layout.shards) > 1:
        raise LayoutError(
            f"parameter `{name}`: FSDP1 has flattened a shard of several boxes, placed as "
            f"{part.shard_of.placements!r} on {part.shard_of.device_mesh!r}; use FSDP2",
            fqn=name,
        )
    # A rank without rows has no box, and no elements either.
    origin = layout.shards[0].box.offsets if layout.shards else (0,) * len(layout.shape)
    return Original(part.names, layout.shape, part, origin)


def _check_real(param: torch.Tensor, originals: Sequence[Original]) -> None:
    local = param.to_local() if isinstance(param, DTensor) else param
    if not isinstance(local, ShardedTensor) and local.is_meta:
        name = originals[0].name
        raise OptimizerStateError(
            f"parameter `{name}` is on the meta device: give it memory before its optimizer's "
            f"state is loaded",
            fqn=name,
        )


def slice_layout(key: str, original: Original, memory: torch.Tensor) -> TensorLayout:
    """Where in `memory`, laid out like the optimizer's parameter, the elements held belong."""
    part = original.part
    assert part is not None
    position = part.offset
    shards: list[LocalShard] = []
    boxes: list[Box] = flat_range_boxes(part.shape, part.start, part.end)
    for box in boxes:
        view = memory[position : position + box.numel].view(box.sizes)
        shards.append(LocalShard(box.translate(original.origin), view))
        position += box.numel
    return TensorLayout(key, original.shape, memory.dtype, tuple(shards))
