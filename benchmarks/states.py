"""State dicts to measure with: Llama-like, with Adam state, in any of the usual layouts.

An element is its flat index in the global tensor plus a number of the tensor's own, as bits: a load
into a wrong place shows, and so does a load of another tensor of the same shape.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

from benchmarks.layouts import Layout, Shape

__all__ = [
    "PRESETS",
    "Preset",
    "State",
    "WrongLoadError",
    "check_state",
    "checkpoint_bytes",
    "clear_state",
    "local_tensors",
    "make_state",
]

State = dict[str, Any]

_STEP = 7.0
_SENTINEL = -1.0
_GROUP = {
    "lr": 3e-4,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.1,
    "amsgrad": False,
    "maximize": False,
    "foreach": None,
    "capturable": False,
    "differentiable": False,
    "fused": None,
}


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model."""

    layers: int = 0
    width: int = 0
    hidden: int = 0
    vocabulary: int = 0
    small_tensors: int = 0
    """If not 0: this many tensors of 1 KiB, without an optimizer, instead of a model."""


PRESETS = {
    "xs": Preset(2, 320, 896, 4096),  # 60 MB
    "t": Preset(3, 448, 1216, 4000),  # 0.12 GB
    "s": Preset(4, 768, 2048, 9000),  # 0.46 GB
    "m": Preset(6, 1024, 2816, 12288),  # 1.1 GB
    "l": Preset(8, 1536, 4096, 16384),  # 3 GB
    "small": Preset(small_tensors=10_000),  # 10 MB
}


class WrongLoadError(Exception):
    """A load did not bring back what was saved: its time is worth nothing."""


def _parameters(preset: Preset) -> Iterator[tuple[str, Shape]]:
    if preset.small_tensors:
        yield from ((f"table.{i}.weight", (256,)) for i in range(preset.small_tensors))
        return
    width, hidden = preset.width, preset.hidden
    yield "tok_embeddings.weight", (preset.vocabulary, width)
    for layer in range(preset.layers):
        for name, shape in {
            "attention.wq": (width, width),
            "attention.wk": (width // 4, width),
            "attention.wv": (width // 4, width),
            "attention.wo": (width, width),
            "feed_forward.w1": (hidden, width),
            "feed_forward.w2": (width, hidden),
            "feed_forward.w3": (hidden, width),
            "attention_norm": (width,),
            "ffn_norm": (width,),
        }.items():
            yield f"layers.{layer}.{name}.weight", shape
    yield "norm.weight", (width,)
    yield "output.weight", (preset.vocabulary, width)


class _Entry(NamedTuple):
    """A sharded tensor of a state dict."""

    path: tuple[str, ...]
    fqn: str
    shape: Shape


def _entries(preset: Preset) -> Iterator[_Entry]:
    for fqn, shape in _parameters(preset):
        yield _Entry(("model", fqn), fqn, shape)
        if not preset.small_tensors:
            for name in ("exp_avg", "exp_avg_sq"):
                yield _Entry(("optimizer", "state", fqn, name), fqn, shape)


def checkpoint_bytes(preset: Preset) -> int:
    """Bytes of all tensors, each counted once."""
    return sum(4 * prod(entry.shape) for entry in _entries(preset))


def _make_tensor(entry: _Entry, layout: Layout, mesh: DeviceMesh) -> DTensor:
    # A communication-free cut of the tensor at hand, which is torch's own: the oracle of the check.
    number = zlib.crc32(".".join(entry.path).encode()) % 2**31
    full = torch.arange(prod(entry.shape), dtype=torch.int32).add_(number)
    full = full.view(torch.float32).view(entry.shape)
    return distribute_tensor(full, mesh, layout.place(entry.fqn, entry.shape), src_data_rank=None)


def make_state(preset: Preset, layout: Layout) -> State:
    """This rank's state dict, with the values that are to be saved."""
    mesh = init_device_mesh("cpu", layout.mesh)
    state: State = {"model": {}}
    for entry in _entries(preset):
        inner = state
        for part in entry.path[:-1]:
            inner = inner.setdefault(part, {})
        inner[entry.path[-1]] = _make_tensor(entry, layout, mesh)
    if "optimizer" in state:
        for param_state in state["optimizer"]["state"].values():
            param_state["step"] = torch.tensor(_STEP)
        state["optimizer"]["param_groups"] = [{**_GROUP, "params": list(state["model"])}]
    return state


def local_tensors(state: State) -> list[torch.Tensor]:
    """The memory that a load into `state` fills on this rank."""
    optimizer = state.get("optimizer", {"state": {}})
    return [
        value.to_local() if isinstance(value, DTensor) else value
        for values in (state["model"], *optimizer["state"].values())
        for value in values.values()
    ]


def clear_state(state: State) -> None:
    """Set everything that a load is to bring back to something else."""
    for tensor in local_tensors(state):
        tensor.fill_(_SENTINEL)
    for group in state.get("optimizer", {}).get("param_groups", ()):
        group.update(dict.fromkeys(group, "not loaded"))


def check_state(preset: Preset, layout: Layout, state: State, *, loader: str) -> None:
    """Compare every element of a loaded state dict, and every other value.

    Raises:
        WrongLoadError: Something differs.
    """
    mesh = init_device_mesh("cpu", layout.mesh)
    for entry in _entries(preset):
        value: Any = state
        for part in entry.path:
            value = value[part]
        loaded = value.to_local().view(torch.int32)
        if not torch.equal(loaded, _make_tensor(entry, layout, mesh).to_local().view(torch.int32)):
            raise WrongLoadError(f"{loader}: `{'.'.join(entry.path)}` was not loaded right")
    if "optimizer" not in state:
        return
    for fqn, param_state in state["optimizer"]["state"].items():
        if param_state["step"].item() != _STEP:
            raise WrongLoadError(f"{loader}: the step of `{fqn}` was not loaded right")
    if state["optimizer"]["param_groups"] != [{**_GROUP, "params": list(state["model"])}]:
        raise WrongLoadError(f"{loader}: the parameter group was not loaded right")
