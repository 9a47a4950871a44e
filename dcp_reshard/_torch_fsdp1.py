"""Adapter to the private attributes of FSDP1's flat parameters; beside `_torch`, which is full.

Tested against torch 2.13.0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from dcp_reshard.errors import LayoutError

__all__ = ["FlatSlice", "fsdp1_flat_slices"]


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """What this rank holds of one original parameter in an FSDP1 flat parameter."""

    names: tuple[str, ...]
    """Names of the original parameter in the model, several if it is shared."""

    shape: tuple[int, ...]
    """Shape of what was flattened: the original parameter, or this rank's shard of it."""

    start: int
    """First element held, of what was flattened."""

    end: int
    """One past the last element held."""

    offset: int
    """Where that element lies in the parameter that the optimizer has."""

    size: int
    """Elements of that parameter while it is sharded, padding included."""

    shard_of: DTensor | None = None
    """The original parameter, on the meta device, if it is tensor-parallel: a shard of it was
    flattened."""


def fsdp1_flat_slices(model: torch.nn.Module) -> dict[torch.nn.Parameter, tuple[FlatSlice, ...]]:
    """Original parameters in each parameter that FSDP1 has cut from a flat one, or made flat.

    With `use_orig_params` the optimizer has one flattened piece of each original parameter, without
    it the flat parameters. Stands for torch's `_shard_orig_param_state` and `_flatten_optim_state`,
    which gather each state in full on every rank first.

    Raises:
        LayoutError: A parameter was flattened in another order than that of its dims.
    """
    slices: dict[torch.nn.Parameter, tuple[FlatSlice, ...]] = {}
    for prefix, module in model.named_modules():
        handle = getattr(module, "_handle", None)
        if not isinstance(module, FullyShardedDataParallel) or handle is None:
            continue
        flat = handle.flat_param
        names = [[f"{prefix}.{fqn}" if prefix else fqn] for fqn in flat._fqns]
        for [name], shape, strides in zip(names, flat._shapes, flat._strides, strict=True):
            _check_order(name, shape, strides)
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
                None if spec is None else _sharded_by(spec, shape),
            )
            for own, shape, info, spec in zip(
                names,
                flat._shapes,
                flat._shard_param_infos,
                flat._param_extensions,
                strict=True,
            )
        ]
        if flat._params is None:
            slices[flat] = tuple(held)
        elif handle.uses_sharded_strategy:
            for param, part in zip(flat._params, held, strict=True):
                slices[param] = (replace(part, offset=0, size=part.end - part.start),)
    return slices


def _check_order(name: str, shape: torch.Size, strides: tuple[int, ...]) -> None:
    # torch 2.13 flattens in the order of memory, and gathers state in that order as if it were that
    # of the dims. So what was saved from such a layout is in one order, all else in the other.
    if not torch.empty_strided(shape, strides, device="meta").is_contiguous():
        raise LayoutError(
            f"parameter `{name}`: FSDP1 has flattened it in the order of its memory, of strides "
            f"{strides!r} for shape {tuple(shape)!r} (`channels_last`, say), and the order in "
            f"which its state was saved cannot be known; make it contiguous before it is wrapped",
            fqn=name,
        )


def _sharded_by(spec: Any, shape: torch.Size) -> DTensor:
    """A DTensor with the layout that torch's `DTensorExtensions` keep of what they flatten."""
    local = torch.empty(shape, device="meta")
    return DTensor.from_local(
        local, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
    )
