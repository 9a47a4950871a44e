"""Adapter to the private attributes of FSDP1's flat parameters; beside `_torch`, which is full.

Tested against torch 2.13.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.distributed.fsdp import FullyShardedDataParallel

from dcp_reshard.errors import LayoutError

__all__ = ["FlatSlice", "fsdp1_flat_slices"]


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """What this rank holds of one original parameter in an FSDP1 flat parameter."""

    names: tuple[str, ...]
    """Names of the original parameter in the model, several if it is shared."""

    shape: tuple[int, ...]
    """Shape of the original parameter."""

    start: int
    """First element held, in the flattened original parameter."""

    end: int
    """One past the last element held."""

    offset: int
    """Where that element lies in the parameter that the optimizer has."""

    size: int
    """Elements of that parameter while it is sharded, padding included."""


def fsdp1_flat_slices(model: torch.nn.Module) -> dict[torch.nn.Parameter, tuple[FlatSlice, ...]]:
    """Original parameters in each parameter that FSDP1 has cut from a flat one, or made flat.

    With `use_orig_params` the optimizer has one flattened piece of each original parameter, without
    it the flat parameters. Stands for torch's `_shard_orig_param_state` and `_flatten_optim_state`,
    which gather each state in full on every rank first.

    Raises:
        LayoutError: A flat parameter is made of tensor-parallel parameters.
    """
    slices: dict[torch.nn.Parameter, tuple[FlatSlice, ...]] = {}
    for prefix, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if not isinstance(module, FullyShardedDataParallel) or handle is None:
            continue
        flat = handle.flat_param
        names = [[f"{prefix}.{fqn}" if prefix else fqn] for fqn in flat._fqns]
        if any(extension is not None for extension in flat._param_extensions):
            name = names[0][0]
            raise LayoutError(f"parameter `{name}`: FSDP1 over tensor parallelism", fqn=name)
        primary = {(info.module, info.param_name): i for i, info in enumerate(flat._param_infos)}
        for shared in flat._shared_param_infos:
            own = f"{shared.module_name}.{shared.param_name}".lstrip(".")
            index = primary[shared.prim_module, shared.prim_param_name]
            names[index].append(f"{prefix}.{own}" if prefix else own)
        held = [
            FlatSlice(
                tuple(own),
                tuple(shape),
                info.intra_param_start_idx or 0,
                info.intra_param_end_idx + 1 if info.in_shard else 0,
                info.offset_in_shard or 0,
                flat._sharded_size.numel(),
            )
            for own, shape, info in zip(names, flat._shapes, flat._shard_param_infos, strict=True)
        ]
        if flat._params is None:
            slices[flat] = tuple(held)
        elif handle.uses_sharded_strategy:
            for param, part in zip(flat._params, held, strict=True):
                slices[param] = (replace(part, offset=0, size=part.end - part.start),)
    return slices
