"""What the ranks of a tensor-parallel x data-parallel grid hold, by plain slicing: the oracle."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import torch

from dcp_reshard.fused import FusedBlocks

__all__ = ["cut", "safetensors_bytes", "split_grid"]


def cut(
    full: torch.Tensor,
    sizes: tuple[int, int],
    ranks: tuple[int, int],
    dim: int | None,
    fused: FusedBlocks | None = None,
) -> torch.Tensor:
    """The part of one rank: tp cuts `dim` (each fused block by itself), dp cuts dim 0 of that."""
    if dim is not None:
        blocks = full.split(fused.sizes, dim) if fused else (full,)
        full = torch.cat(
            [_cut_block(block, sizes[0], ranks[0], dim, fused) for block in blocks], dim
        )
    return _part(full, sizes[1], ranks[1], 0)


def _cut_block(
    block: torch.Tensor, tp: int, rank: int, dim: int, fused: FusedBlocks | None
) -> torch.Tensor:
    unit = fused.unit if fused else 1
    units = block.unflatten(dim, (-1, unit)) if block.numel() else block.unsqueeze(dim + 1)
    if fused is not None and fused.repeat and units.shape[dim] < tp:
        copies = tp // units.shape[dim]
        units = units.repeat_interleave(copies, dim)
    return _part(units, tp, rank, dim).flatten(dim, dim + 1)


def _part(tensor: torch.Tensor, parts: int, index: int, dim: int) -> torch.Tensor:
    if tensor.ndim == 0:
        return tensor
    chunks = tensor.chunk(parts, dim) if tensor.shape[dim] else ()
    return chunks[index] if index < len(chunks) else tensor.narrow(dim, 0, 0)


def split_grid(
    full: torch.Tensor,
    sizes: tuple[int, int],
    dim: int | None,
    fused: FusedBlocks | None = None,
) -> list[list[torch.Tensor]]:
    """The parts of all ranks: that of tp rank t and dp rank d at ``[t][d]``."""
    return [
        [cut(full, sizes, (t, d), dim, fused) for d in range(sizes[1])] for t in range(sizes[0])
    ]


def safetensors_bytes(
    tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str] | None = None
) -> bytes:
    """A file of these tensors in the safetensors format, written by its definition."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    elements = b""
    for name, tensor in tensors.items():
        flat = tensor.contiguous().reshape(-1, 1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(elements), len(elements) + len(flat)],
        }
        elements += flat
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + elements


_SAFETENSORS_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
