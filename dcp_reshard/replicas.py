"""Several ranks have stored the same part of a tensor: did they store the same elements?

Where each copy fills a record of its own, their recorded checksums answer, and nothing is read.
Where they do not (views into larger storages, formats without checksums), the elements themselves
can be compared, block by block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dcp_reshard.payload import Payload
from dcp_reshard.ranges import plan_spans
from dcp_reshard.storage import ByteSource

__all__ = ["Replica", "compare_elements", "compare_records"]

_BLOCK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Replica:
    """One copy of a part of a tensor."""

    file: str
    """Name of its file."""

    payload: Payload
    """Where its elements lie, counted from the start of the file."""


def compare_records(one: Replica, other: Replica) -> bool | None:
    """Whether two copies are equal, by their checksums; None if these do not tell."""
    first, second = one.payload, other.payload
    if one.file == other.file and first == second:
        return True
    if not (_fills_record(first) and _fills_record(second) and first.strides == second.strides):
        return None
    if first.record.length and not (first.record.crc and second.record.crc):
        return None
    return first.record.crc == second.record.crc


def _fills_record(payload: Payload) -> bool:
    numel = 1
    for size in payload.shape:
        numel *= size
    return (
        payload.start == payload.record.start
        and numel * payload.dtype.itemsize == payload.record.length
    )


def compare_elements(source: ByteSource, one: Replica, other: Replica) -> bool:
    """Whether two copies are equal, bit for bit; reads both.

    Raises:
        StorageError: Bytes could not be read.
    """
    spans = plan_spans(
        (0,) * len(one.payload.shape),
        one.payload.shape,
        strides=one.payload.strides,
        itemsize=one.payload.dtype.itemsize,
        extent=one.payload.extent,
        request_bytes=_BLOCK_BYTES,
        max_bytes=_BLOCK_BYTES,
    )
    return all(
        torch.equal(
            _read_bytes(source, one, span.offsets, span.sizes),
            _read_bytes(source, other, span.offsets, span.sizes),
        )
        for span in spans
    )


def _read_bytes(
    source: ByteSource, replica: Replica, offsets: tuple[int, ...], sizes: tuple[int, ...]
) -> torch.Tensor:
    """The bytes of the elements of a box of a copy, in the order of its indices."""
    payload = replica.payload
    itemsize = payload.dtype.itemsize
    start = payload.start + sum(o * st for o, st in zip(offsets, payload.strides, strict=True))
    length = itemsize + sum((n - 1) * st for n, st in zip(sizes, payload.strides, strict=True))
    memory = bytearray(length)
    source.read_into(replica.file, start, [memoryview(memory)])
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    return torch.as_strided(flat, (*sizes, itemsize), (*payload.strides, 1)).contiguous()
