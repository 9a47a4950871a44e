"""What is in a ``.safetensors`` file, and where are its tensors' elements?

The file is eight bytes with the length of a header, the header (JSON), and the elements. Each entry
of the header has a dtype, a shape, and the first and last byte of its elements; the entries fill
the rest of the file without a gap. All of that is checked here, without the ``safetensors``
package, which reads whole tensors only.

Reads the header; no elements. The format stores no checksums.
"""

from __future__ import annotations

import json
import math
from typing import Any

import torch

from dcp_reshard.container import Read, Record
from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.payload import Payload

__all__ = ["read_safetensors_file"]

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The limit of the format itself."""

_MAX_NAME_BYTES = 4096
_MAX_DIMS = 16
_DTYPES = {
    name: getattr(torch, attribute)
    for name, attribute in {
        "BOOL": "bool",
        "U8": "uint8",
        "I8": "int8",
        "U16": "uint16",
        "I16": "int16",
        "U32": "uint32",
        "I32": "int32",
        "U64": "uint64",
        "I64": "int64",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
        "F8_E8M0": "float8_e8m0fnu",
        "F16": "float16",
        "BF16": "bfloat16",
        "F32": "float32",
        "F64": "float64",
        "C64": "complex64",
    }.items()
}


def read_safetensors_file(length: int, read: Read) -> dict[str, Payload]:
    """The tensors of a file, by name.

    Args:
        length: Bytes of the file.
        read: Gives bytes of it.

    Returns:
        Where the elements of each tensor are, counted from the start of the file.

    Raises:
        CheckpointFormatError: The file is not what the format prescribes.
    """
    if length < _LENGTH_BYTES:
        raise CheckpointFormatError(f"{length} bytes are too few for a safetensors file")
    size = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    if not 2 <= size <= min(_MAX_HEADER_BYTES, length - _LENGTH_BYTES):
        raise CheckpointFormatError(f"a header of {size} bytes in a file of {length}")
    first = _LENGTH_BYTES + size
    header = _parse_header(read(_LENGTH_BYTES, first))
    payloads: dict[str, Payload] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            _check_metadata(entry)
        else:
            payloads[name] = _parse_entry(name, entry, first)
    _check_filled(payloads, first, length)
    return payloads


def _parse_header(data: bytes) -> dict[str, Any]:
    if not data.startswith(b"{"):
        raise CheckpointFormatError(f"the header starts with {data[:1]!r}, not with '{{'")
    try:
        # RecursionError: JSON nested deeper than the interpreter goes.
        header = json.loads(
            data.decode(), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointFormatError(f"the header is not JSON as it should be: {error}") from None
    assert isinstance(header, dict)
    return header


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"key {name!r:.200} occurs twice")
        found[name] = value
    return found


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _check_metadata(entry: object) -> None:
    if not isinstance(entry, dict) or not all(isinstance(text, str) for text in entry.values()):
        raise CheckpointFormatError("`__metadata__` of the header is not a dict of strings")


def _parse_entry(name: str, entry: object, first: int) -> Payload:
    where = f"tensor {name!r:.200} of the header"
    if "\0" in name or len(name.encode(errors="surrogatepass")) > _MAX_NAME_BYTES:
        raise CheckpointFormatError(f"{where}: not a name of up to {_MAX_NAME_BYTES} bytes")
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise CheckpointFormatError(f"{where}: has not just dtype, shape and data_offsets")
    dtype = _DTYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        raise CheckpointFormatError(f"{where}: dtype {entry['dtype']!r:.100} is not supported")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _is_numbers(shape) or len(shape) > _MAX_DIMS:
        raise CheckpointFormatError(f"{where}: shape {shape!r:.200}")
    if not _is_numbers(offsets) or len(offsets) != 2:
        raise CheckpointFormatError(f"{where}: data_offsets {offsets!r:.200}")
    start, end = offsets
    nbytes = math.prod(shape) * dtype.itemsize
    if end - start != nbytes:
        raise CheckpointFormatError(
            f"{where}: bytes {start} to {end} for shape {shape!r} of {dtype}, which has {nbytes}"
        )
    strides = [math.prod(shape[i + 1 :]) * dtype.itemsize for i in range(len(shape))]
    record = Record(name, first + start, nbytes, crc=0, crc_at=0)
    return Payload(dtype, tuple(shape), tuple(strides), first + start, record)


def _is_numbers(value: object) -> bool:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)


def _check_filled(payloads: dict[str, Payload], first: int, length: int) -> None:
    """Check that the tensors lie one after the other, to the end of the file."""
    position = first
    for name, payload in sorted(payloads.items(), key=lambda p: (p[1].start, p[1].record.length)):
        if payload.start != position:
            kind = "no tensor has" if payload.start > position else "two tensors have"
            raise CheckpointFormatError(
                f"tensor {name!r:.200} starts at byte {payload.start}, the one before it ends at "
                f"{position}: {kind} the bytes between",
                start=position,
            )
        position += payload.record.length
    if position != length:
        raise CheckpointFormatError(
            f"the tensors end at byte {position}, the file at {length}", start=position
        )
