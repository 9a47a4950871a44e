"""Memory for a stored value of optimizer state, laid out like the parameter that it belongs to.

* A tensor of the parameter's shape gets the parameter's layout: plain for plain, `DTensor` for
  `DTensor` on its mesh, `ShardedTensor` for `ShardedTensor` over its process group.
* A scalar (0-d, or of one element in one dim) is plain and whole on every rank. `step` is on the
  CPU, where torch's optimizers keep it, unless the group is `capturable` or `fused`.
* Any other tensor (factored moments) is whole on every rank: for a `DTensor` parameter a `DTensor`
  that is replicated on the same mesh, because torch cannot compute with both kinds at once.

The stored dtype is kept, so fp32 moments of a bf16 parameter stay fp32, unless an option says
otherwise; `Optimizer.load_state_dict` of torch casts them to the parameter's dtype.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import Replicate

from dcp_reshard._torch import (
    DTensor,
    ShardedTensor,
    empty_dtensor_like,
    empty_sharded_tensor_like,
)
from dcp_reshard.catalog import Catalog, KeyPath, StoredTensor
from dcp_reshard.errors import ShapeMismatchError
from dcp_reshard.optimizer_keys import StateKey
from dcp_reshard.optimizer_options import OptimizerOptions

__all__ = [
    "check_shapes",
    "has_param_shape",
    "is_scalar",
    "make_memory",
    "state_dtype",
    "step_on_device",
]

# Scalars of torch's optimizers, which look like moments if the parameter is 0-d as well.
_SCALARS = frozenset({"step", "mu_product", "eta", "mu"})


def is_scalar(path: KeyPath, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> bool:
    """Whether a value of this shape counts for the parameter as a whole.

    Example:
        >>> is_scalar(("step",), (), (4, 4)), is_scalar(("exp_avg",), (), ())
        (True, False)
    """
    if shape == param_shape:
        return shape == () and path[-1:] != () and path[-1] in _SCALARS
    return shape in ((), (1,))


def has_param_shape(path: KeyPath, shape: tuple[int, ...], param_shape: tuple[int, ...]) -> bool:
    """Whether a value has an element for each element of the parameter."""
    return shape == param_shape and not is_scalar(path, shape, param_shape)


def state_dtype(
    path: KeyPath, stored: StoredTensor, param: torch.Tensor, options: OptimizerOptions
) -> torch.dtype:
    """The dtype that a value is to have."""
    wanted = options.state_dtype
    shape = tuple(param.size())
    if wanted == "stored" or is_scalar(path, stored.shape, shape):
        return stored.dtype
    if not stored.dtype.is_floating_point:
        return stored.dtype
    return param.dtype if isinstance(wanted, str) else wanted


def step_on_device(path: KeyPath, group: Mapping[str, Any]) -> bool:
    """Whether a value is a `step` that the kernels of its group want beside the parameter."""
    return path == ("step",) and bool(group.get("capturable") or group.get("fused"))


def check_shapes(
    name: str, param_shape: tuple[int, ...], keys: Iterable[StateKey], catalog: Catalog
) -> None:
    """Check that the state of a parameter can be that of a parameter of this shape.

    Some state has another shape by nature: factored moments broadcast to the parameter, others have
    more dims or fewer. What has as many dims, and does not broadcast, is of a parameter that has
    been resized, unless other state does have the parameter's shape.

    Raises:
        ShapeMismatchError: It cannot.
    """
    shapes = {
        key.path: catalog.tensors[key.key].shape for key in keys if key.key in catalog.tensors
    }
    # LBFGS keeps the state of all parameters, flattened, with the first of them.
    if param_shape in shapes.values() or ("func_evals",) in {key.path for key in keys}:
        return
    for path, shape in shapes.items():
        if len(shape) == len(param_shape) and any(
            size not in (1, own) for size, own in zip(shape, param_shape, strict=True)
        ):
            raise ShapeMismatchError(
                f"parameter `{name}`: state `{'.'.join(map(str, path))}` was saved with shape "
                f"{shape!r}, the parameter has {param_shape!r}",
                fqn=name,
            )


def make_memory(
    path: KeyPath,
    stored: StoredTensor,
    param: torch.Tensor,
    *,
    name: str,
    group: Mapping[str, Any],
    options: OptimizerOptions,
) -> torch.Tensor:
    """Uninitialised memory for a stored value.

    Args:
        path: Path of the value in the parameter's state.
        stored: The value in the checkpoint.
        param: The parameter, which is not one that FSDP1 has flattened.
        name: Its name.
        group: Its group as it will be.
        options: dtype, and the caller's own way to make memory.
    """
    if options.make_state is not None:
        made = options.make_state(name, path, stored, param)
        if made is not None:
            return made
    dtype = state_dtype(path, stored, param, options)
    shape = tuple(param.size())
    if has_param_shape(path, stored.shape, shape):
        if isinstance(param, DTensor):
            return empty_dtensor_like(param, dtype=dtype)
        if isinstance(param, ShardedTensor):
            return empty_sharded_tensor_like(param, dtype=dtype)
        return torch.empty_like(param, dtype=dtype, requires_grad=False)
    device = _device(param)
    if path == ("step",) and not step_on_device(path, group):
        device = torch.device("cpu")
    plain = torch.empty(stored.shape, dtype=dtype, device=device)
    if isinstance(param, DTensor) and not is_scalar(path, stored.shape, shape):
        mesh = param.device_mesh
        return DTensor.from_local(plain, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return plain


def _device(param: torch.Tensor) -> torch.device:
    if isinstance(param, DTensor):
        return param.to_local().device
    if isinstance(param, ShardedTensor):
        # Its own `device` is a guess where this rank has no shard.
        shards = param.local_shards()
        return shards[0].tensor.device if shards else torch.device("cpu")
    return param.device
