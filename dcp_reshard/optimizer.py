"""Optimizer state straight from a checkpoint, laid out like the model that it belongs to.

No optimizer step is taken and no template is needed: what there is to load follows from the
recorded key paths of the checkpoint, and where it goes from the parameters alone. For each stored
value below the optimizer's key:

1. Its path says which parameter it belongs to (``state.<fqn>.<name>``), in the nested form that
   `get_optimizer_state_dict` gives, and in the flattened one.
2. A tensor of the parameter's shape gets the parameter's layout: `DTensor` for `DTensor` on the
   same mesh, `ShardedTensor` for `ShardedTensor` over the same process group, plain for plain.
3. Any other tensor (0-d `step`, factored moments) is loaded whole on every rank.

The stored dtype is kept: fp32 moments of a bf16 parameter stay fp32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader

from dcp_reshard._torch import (
    DTensor,
    ShardedTensor,
    empty_dtensor_like,
    empty_sharded_tensor_like,
    flatten_state_dict,
    load_state_dict,
    set_element,
)
from dcp_reshard.catalog import Catalog, KeyPath, StoredTensor
from dcp_reshard.errors import OptimizerStateError
from dcp_reshard.planner import ReshardLoadPlanner
from dcp_reshard.torch_metadata import catalog_of

__all__ = ["load_sharded_optimizer_state_dict"]

_STATE = "state"


def load_sharded_optimizer_state_dict(
    model_state_dict: Mapping[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """Load the optimizer state of a checkpoint for a model that may be sharded in another way.

    Takes the arguments of torch's function of this name, and any model: parameters may be `DTensor`
    (FSDP2, TP, HSDP), `ShardedTensor` (FSDP1), or plain.

    Args:
        model_state_dict: The state dict of the model (values may be nested below a key).
        optimizer_key: Key under which the optimizer was saved; dots lead into nested dicts.
        storage_reader: Reads the checkpoint.
        planner: Plans the load; `ReshardLoadPlanner()` if None.

    Returns:
        The optimizer's state dict below its key, nested as it was saved: ready for
        `set_optimizer_state_dict`, or for FSDP1's `optim_state_dict_to_load`.

    Raises:
        OptimizerStateError: The checkpoint has nothing below the key.
        ReshardError: The load failed.

    Example:
        >>> osd = load_sharded_optimizer_state_dict(
        ...     model.state_dict(), "optimizer", ReshardStorageReader(path)
        ... )  # doctest: +SKIP
        >>> set_optimizer_state_dict(model, optimizer, osd["optimizer"])  # doctest: +SKIP
    """
    catalog = catalog_of(storage_reader.read_metadata())
    params, _ = flatten_state_dict(model_state_dict)
    prefix: KeyPath = tuple(optimizer_key.split("."))
    state: dict[str, Any] = {}
    for fqn in catalog.keys:
        path = _below(catalog.key_path(fqn), prefix)
        if path is None:
            continue
        stored = catalog.tensors.get(fqn)
        # The planner replaces a value that is not a tensor; until then it is a placeholder.
        state[fqn] = (
            None if stored is None else _make_destination(stored, _find_param(path, params))
        )
    if not state:
        raise OptimizerStateError(
            f"the checkpoint has nothing below key {optimizer_key!r}; its top-level keys are "
            f"{_top_level(catalog)}"
        )
    load_state_dict(
        state,
        storage_reader=storage_reader,
        planner=planner or ReshardLoadPlanner(),
        process_group=getattr(storage_reader, "process_group", None),
        no_dist=not (dist.is_available() and dist.is_initialized()),
    )
    nested: dict[str, Any] = {}
    for fqn, value in state.items():
        set_element(nested, catalog.key_path(fqn), value)
    return nested


def _below(path: KeyPath, prefix: KeyPath) -> KeyPath | None:
    """The rest of a key path below the optimizer's key, which may itself be one part with dots."""
    parts = [part for part in ".".join(map(str, path)).split(".") if part]
    if tuple(parts[: len(prefix)]) != prefix or len(parts) == len(prefix):
        return None
    return tuple(parts[len(prefix) :])


def _find_param(path: KeyPath, params: Mapping[str, Any]) -> torch.Tensor | None:
    """The parameter that a state value belongs to: the longest name that the path goes through."""
    if path[0] != _STATE:
        return None
    parts = list(map(str, path[1:]))
    for end in range(len(parts) - 1, 0, -1):
        param = params.get(".".join(parts[:end]))
        if isinstance(param, torch.Tensor):
            return param
    return None


def _make_destination(stored: StoredTensor, param: torch.Tensor | None) -> torch.Tensor:
    # `step` of one element is kept on the CPU, where torch's optimizers keep it; those that want it
    # elsewhere (`capturable`, `fused`) move it when the state dict is loaded.
    if param is None or not stored.shape or tuple(param.size()) != stored.shape:
        return torch.empty(stored.shape, dtype=stored.dtype)
    if isinstance(param, DTensor):
        return empty_dtensor_like(param, dtype=stored.dtype)
    if isinstance(param, ShardedTensor):
        return empty_sharded_tensor_like(param, dtype=stored.dtype)
    return torch.empty_like(param, dtype=stored.dtype, requires_grad=False)


def _top_level(catalog: Catalog) -> list[str]:
    return sorted({str(catalog.key_path(fqn)[0]) for fqn in catalog.keys})[:20]
