"""Tensors whose elements say where they belong, and comparison by bits.

Works on any value of a state dict: plain tensors, DTensors and (nested) ShardedTensors, in nested
dicts and lists. What counts of them is the local memory of this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

__all__ = [
    "check_same",
    "fill_with_sentinel",
    "indexed_tensor",
    "local_tensors",
    "sentinel_like",
    "snapshot",
]

# Primes below the first integer that the dtype cannot tell from its neighbour. A prime, because the
# period must not be a multiple of a row, or a row in the wrong place would have the right values.
_PERIOD = {torch.bfloat16: 251, torch.float16: 2039, torch.int8: 113, torch.uint8: 251}


def indexed_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A tensor in which each element is its own flat index, as far as the dtype can count.

    Small dtypes start again at a prime. One-byte floats count in their bit patterns, without NaN;
    bool has a pseudo-random bit of the index; complex is ``i - 1j * i``.
    """
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    if dtype == torch.bool:
        mixed = (index + 1) * 0x2545F4914F6CDD1D
        mixed = (mixed ^ (mixed >> 31)) * 0x1B873593CC9E2D51
        values = ((mixed >> 40) & 1).to(torch.bool)
    elif dtype.is_complex:
        values = torch.complex(index.double(), -index.double()).to(dtype)
    elif dtype.itemsize == 1 and dtype.is_floating_point:
        values = (index % 113).to(torch.uint8).view(dtype)
    else:
        values = (index % _PERIOD.get(dtype, 1 << 62)).to(dtype)
    return values.reshape(tuple(shape))


def sentinel_like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that differs in each element from `tensor` and from any `indexed_tensor`: -1.

    Unsigned integers have their maximum, one-byte floats a bit pattern with the sign set. bool has
    no third value, so it is inverted.
    """
    if tensor.dtype == torch.bool:
        return ~tensor
    if tensor.dtype.itemsize == 1 and tensor.dtype.is_floating_point:
        return torch.full_like(tensor.view(torch.uint8), 0xB8).view(tensor.dtype)
    if not tensor.dtype.is_signed:
        return torch.full_like(tensor, torch.iinfo(tensor.dtype).max)
    return torch.full_like(tensor, -1)


def local_tensors(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every plain tensor of this rank's memory in a state dict, with a name: ``layers.0.w``.

    The shards of a ShardedTensor are numbered, ``w[0]``. The tensors are detached, and share memory
    with the state dict.
    """
    children: Iterable[tuple[str, object]] = ()
    if isinstance(value, ShardedTensor):
        children = ((f"{path}[{i}]", s.tensor) for i, s in enumerate(value.local_shards()))
    elif isinstance(value, DTensor):
        children = ((path, value.to_local()),)
    elif isinstance(value, torch.Tensor):
        yield path, value.detach()
    elif isinstance(value, Mapping):
        children = ((f"{path}.{key}" if path else str(key), v) for key, v in value.items())
    elif isinstance(value, list | tuple):
        children = ((f"{path}.{i}" if path else str(i), v) for i, v in enumerate(value))
    for name, child in children:
        yield from local_tensors(child, name)


def snapshot(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Copies of all local tensors by name."""
    return {name: tensor.clone() for name, tensor in local_tensors(state)}


def fill_with_sentinel(state: Mapping[str, Any]) -> None:
    """Overwrite all local tensors, in place, with `sentinel_like` themselves."""
    for _, tensor in local_tensors(state):
        tensor.copy_(sentinel_like(tensor))


def check_same(
    found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], *, where: str = ""
) -> None:
    """Check that two snapshots hold the same names, dtypes, shapes and bits.

    Raises:
        AssertionError: They do not; the message names the first elements that differ.
    """
    assert found.keys() == wanted.keys(), f"{where}: {sorted(found.keys() ^ wanted.keys())}"
    for name, tensor in wanted.items():
        other = found[name]
        described = (other.dtype, tuple(other.shape))
        assert described == (tensor.dtype, tuple(tensor.shape)), f"{where}: `{name}`: {described}"
        differ = (_bytes(other) != _bytes(tensor)).any(dim=-1).nonzero().flatten()
        assert not len(differ), (
            f"{where}: `{name}`, shape {tuple(tensor.shape)}: {len(differ)} elements differ, "
            f"first at flat index {differ[:5].tolist()}: found "
            f"{other.flatten()[differ[:5]].tolist()}, "
            f"wanted {tensor.flatten()[differ[:5]].tolist()}"
        )


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A tensor of one element counts as contiguous whatever its strides, and cannot be viewed then.
    flat = tensor.cpu().resolve_conj().resolve_neg().reshape(-1)
    return torch.empty(len(flat), 1, dtype=flat.dtype).copy_(flat[:, None]).view(torch.uint8)
