"""State dicts to measure with: Llama-like, with Adam state, in any of the usual layouts.

Every element is its flat index in the global tensor (as bits), so that a load into a wrong place
shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

__all__ = ["PRESETS", "Layout", "Preset", "check_state", "make_state", "parse_layout"]

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Preset:
    """Sizes of a model."""

    layers: int
    width: int
    hidden: int
    vocabulary: int
    small_tensors: int = 0
    """If not 0: this many tensors of 1 KiB instead of a model."""


PRESETS = {
    "xs": Preset(2, 512, 1408, 4096),
    "s": Preset(4, 1024, 2816, 8192),
    "m": Preset(8, 1536, 4096, 16384),
    "l": Preset(12, 2048, 5632, 16384),
    "small": Preset(0, 0, 0, 0, small_tensors=10_000),
}


def shapes_of(preset: Preset) -> Iterator[tuple[str, Shape]]:
    """Names and shapes of the parameters."""
    if preset.small_tensors:
        yield from ((f"table.{i}.weight", (256,)) for i in range(preset.small_tensors))
        return
    width, hidden = preset.width, preset.hidden
    yield "tok_embeddings.weight", (preset.vocabulary, width)
    for layer in range(preset.layers):
        for name, shape in {
            "wq": (width, width),
            "wk": (width // 4, width),
            "wv": (width // 4, width),
            "wo": (width, width),
            "w1": (hidden, width),
            "w2": (width, hidden),
            "w3": (hidden, width),
            "norm": (width,),
        }.items():
            yield f"layers.{layer}.{name}.weight", shape
    yield "output.weight", (preset.vocabulary, width)


@dataclass(frozen=True, slots=True)
class Layout:
    """A mesh, and how it cuts a parameter."""

    mesh: Shape
    place: Callable[[str, Shape], list[Placement]]

    @property
    def ranks(self) -> int:
        """Ranks of the mesh."""
        return int(torch.Size(self.mesh).numel())


def _tensor_parallel(fqn: str, shape: Shape) -> Placement:
    if len(shape) < 2:
        return Replicate()
    return Shard(1) if re.search(r"\.(wo|w2)\.", fqn) else Shard(0)


def parse_layout(name: str) -> Layout:
    """A layout from its name: fsdp8, tp8, col8, hsdp2x4, fsdp4_tp2."""
    numbers = [int(n) for n in re.findall(r"\d+", name)]
    kind = re.sub(r"\d+", "", name)
    if kind == "fsdp":
        return Layout((numbers[0],), lambda fqn, shape: [Shard(0)])
    if kind == "tp":
        return Layout((numbers[0],), lambda fqn, shape: [_tensor_parallel(fqn, shape)])
    if kind == "col":
        return Layout((numbers[0],), lambda fqn, shape: [Shard(len(shape) - 1)])
    if kind == "hsdpx":
        return Layout((numbers[0], numbers[1]), lambda fqn, shape: [Replicate(), Shard(0)])
    if kind == "fsdp_tp":

        def place(fqn: str, shape: Shape) -> list[Placement]:
            inner = _tensor_parallel(fqn, shape)
            outer = Shard(0)
            if inner == Shard(0):
                outer = _StridedShard(0, split_factor=numbers[1])
            return [outer, inner]

        return Layout((numbers[0], numbers[1]), place)
    raise ValueError(f"layout {name!r} is not fsdpN, tpN, colN, hsdpNxM or fsdpN_tpM")


def _full(shape: Shape) -> torch.Tensor:
    return (
        torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(torch.float32).view(shape)
    )


def _entries(preset: Preset) -> Iterator[tuple[tuple[str, ...], Shape]]:
    for fqn, shape in shapes_of(preset):
        yield ("model", fqn), shape
        if not preset.small_tensors:
            yield ("optimizer", "state", fqn, "exp_avg"), shape
            yield ("optimizer", "state", fqn, "exp_avg_sq"), shape


def _cut(full: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def make_state(preset: Preset, layout: Layout, *, filled: bool) -> dict[str, Any]:
    """This rank's state dict; with `filled` False, all elements are -1."""
    mesh = init_device_mesh("cpu", layout.mesh)
    state: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
    names = []
    for path, shape in _entries(preset):
        value = _cut(
            _full(shape), mesh, layout.place(path[-1] if len(path) == 2 else path[2], shape)
        )
        if not filled:
            value.to_local().fill_(-1.0)
        inner = state
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
        if path[0] == "model":
            names.append(path[1])
    for param_state in state["optimizer"]["state"].values():
        param_state["step"] = torch.tensor(7.0 if filled else -1.0)
    groups = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.1, "params": names}
    state["optimizer"]["param_groups"].append(groups)
    return state


def check_state(preset: Preset, layout: Layout, state: dict[str, Any]) -> int:
    """Compare every element of a loaded state dict, and return how many there were.

    Raises:
        ValueError: A tensor differs.
    """
    mesh = init_device_mesh("cpu", layout.mesh)
    count = 0
    for path, shape in _entries(preset):
        value: Any = state
        for part in path:
            value = value[part]
        fqn = path[1] if len(path) == 2 else path[2]
        wanted = _cut(_full(shape), mesh, layout.place(fqn, shape)).to_local().view(torch.int32)
        if not torch.equal(value.to_local().view(torch.int32), wanted):
            raise ValueError(f"{'.'.join(path)} was not loaded right")
        count += wanted.numel()
    for fqn, param_state in state["optimizer"]["state"].items():
        if float(param_state["step"]) != 7.0:
            raise ValueError(f"the step of {fqn} was not loaded")
    return count
