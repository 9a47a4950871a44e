"""Where do the elements of a stored chunk lie in its bytes?

A chunk that stock `dcp.save` wrote is what `torch.save` writes for one tensor: a container of
records (`container`), of which ``data.pkl`` describes the tensor and ``data/0`` holds its elements.
`probe_payload` finds the elements without reading them. The pickle opcodes of ``data.pkl`` are
*interpreted symbolically*: nothing is imported, nothing is called. A dense tensor gives a
`Payload`: first byte, shape, strides. Anything else (sparse, quantized, a subclass) gives None, and
is then left to `torch.load(weights_only=True)` as a whole.

Does no I/O of its own: bytes come from the `read` function it is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from dcp_reshard.container import Read, Record, read_directory, read_record
from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.pickle_data import Call, Global, Persistent, interpret_pickle
from dcp_reshard.ranges import may_overlap

__all__ = [
    "PROBE_BYTES",
    "Payload",
    "find_dtype",
    "find_payload",
    "find_tensor",
    "probe_payload",
    "read_pickle",
]

PROBE_BYTES = 2048
"""Bytes at the start and at the end of an item that are enough to probe it, in practice."""

_MAX_PICKLE_BYTES = 16 * 1024
_MAX_ORDER_BYTES = 16


@dataclass(frozen=True, slots=True)
class Payload:
    """The elements of one stored chunk: a strided array inside one record."""

    dtype: torch.dtype
    """dtype of the elements."""

    shape: tuple[int, ...]
    """Shape of the chunk."""

    strides: tuple[int, ...]
    """Bytes from one index to the next, in each dim."""

    start: int
    """First byte of element 0, counted from the start of the item."""

    record: Record
    """The record that the elements lie in."""

    @property
    def extent(self) -> int:
        """Bytes from element 0 to the end of the record."""
        return self.record.start + self.record.length - self.start


def probe_payload(length: int, read: Read) -> Payload | None:
    """Find the elements of a tensor that `torch.save` wrote.

    Args:
        length: Bytes of the whole item.
        read: Gives bytes of the item.

    Returns:
        Where the elements are, or None if the item is a sound container of something other than one
        dense tensor.

    Raises:
        CheckpointFormatError: The container is not what `torch.save` writes.
        CorruptRecordError: ``data.pkl`` does not have its recorded checksum.
    """
    return find_payload(read_directory(length, read), read)


def find_payload(directory: Iterable[Record], read: Read) -> Payload | None:
    """As `probe_payload`, once the records are known."""
    records = {record.name: record for record in directory}
    pickle = read_pickle(records, read, max_bytes=_MAX_PICKLE_BYTES)
    if pickle is None:
        return None
    try:
        value = interpret_pickle(pickle)
    except UnsafeCheckpointError:
        return None
    return find_tensor(value, records)


def read_pickle(records: Mapping[str, Record], read: Read, *, max_bytes: int) -> bytes | None:
    """Contents of ``data.pkl``; None if it is longer than `max_bytes`.

    Raises:
        CheckpointFormatError: There is none, or it was written with another byte order.
        CorruptRecordError: It does not have its recorded checksum.
    """
    pickle_record = records.get("data.pkl")
    if pickle_record is None:
        raise CheckpointFormatError("the container has no record `data.pkl`")
    if pickle_record.length > max_bytes:
        return None
    byteorder = records.get("byteorder")
    if byteorder is not None:
        order = read_record(byteorder, read) if byteorder.length <= _MAX_ORDER_BYTES else b""
        if order != b"little":
            raise CheckpointFormatError(
                f"byte order {order!r:.40} is not supported, only b'little'"
            )
    return read_record(pickle_record, read)


def find_tensor(value: object, records: Mapping[str, Record]) -> Payload | None:
    """The elements of a tensor that a pickle describes; None if it is not one dense tensor.

    Args:
        value: What the pickle says (`interpret_pickle`).
        records: Records of the container, by name.

    Raises:
        CheckpointFormatError: The tensor is not inside its record.
    """
    described = _describe_tensor(value)
    if described is None:
        return None
    key, dtype, storage_bytes, offset, shape, strides = described
    record = records.get(f"data/{key}")
    if record is None:
        raise CheckpointFormatError(f"the container has no record `data/{key}`")
    if record.length != storage_bytes:
        raise CheckpointFormatError(
            f"record `data/{key}` has {record.length} bytes, but the tensor's storage "
            f"is said to have {storage_bytes}"
        )
    last = offset + sum(st * (s - 1) for st, s in zip(strides, shape, strict=True)) + 1
    if 0 not in shape and last * dtype.itemsize > record.length:
        raise CheckpointFormatError(
            f"a tensor of shape {shape!r}, strides {strides!r} and offset {offset} does not fit "
            f"into the {record.length} bytes of its storage"
        )
    if may_overlap(shape, strides):
        return None
    start = record.start + offset * dtype.itemsize
    return Payload(dtype, shape, tuple(st * dtype.itemsize for st in strides), start, record)


_Described = tuple[str, torch.dtype, int, int, tuple[int, ...], tuple[int, ...]]


def _describe_tensor(value: object) -> _Described | None:
    while isinstance(value, Call) and value.function == "torch._utils _rebuild_parameter":
        value = value.args[0] if value.args else None
    if not isinstance(value, Call):
        return None
    match value.function, value.args:
        case "torch._utils _rebuild_tensor_v2", (
            Persistent() as storage,
            offset,
            shape,
            strides,
            _,
            _,
        ):
            pass
        case (
            "torch._utils _rebuild_tensor_v3",
            (Persistent() as storage, offset, shape, strides, _, _, Global() as dtype_global),
        ):
            pass
        case _:
            return None
    match storage.id:
        case ("storage", Global() as kind, str() as key, str(), int() as numel):
            pass
        case _:
            return None
    if value.function.endswith("v3"):
        dtype, unit = find_dtype(dtype_global.name), 1
        if kind.name != "torch.storage UntypedStorage":
            return None
    else:
        dtype = _STORAGE_DTYPES.get(kind.name)
        unit = dtype.itemsize if dtype else 0
    if dtype is None or not isinstance(shape, tuple) or not isinstance(strides, tuple):
        return None
    numbers = (numel, offset, *shape, *strides)
    if not isinstance(offset, int) or any(type(n) is not int for n in numbers):
        raise CheckpointFormatError("a tensor's sizes, strides and offset must be integers")
    if len(shape) != len(strides) or min(numbers) < 0:
        raise CheckpointFormatError(
            f"a tensor with offset {offset!r}, shape {shape!r}, strides {strides!r} in a storage "
            f"of "
            f"{numel!r} elements cannot exist"
        )
    return key, dtype, numel * unit, offset, shape, strides


_STORAGE_DTYPES = {
    f"torch {name}Storage": dtype
    for name, dtype in {
        "Double": torch.float64,
        "Float": torch.float32,
        "Half": torch.float16,
        "BFloat16": torch.bfloat16,
        "Long": torch.int64,
        "Int": torch.int32,
        "Short": torch.int16,
        "Char": torch.int8,
        "Byte": torch.uint8,
        "Bool": torch.bool,
        "ComplexFloat": torch.complex64,
        "ComplexDouble": torch.complex128,
    }.items()
}


def find_dtype(name: str) -> torch.dtype | None:
    """The dtype that a global of a pickle names, or None if it names something else."""
    module, _, attribute = name.partition(" ")
    # Not `getattr`: torch imports some of its modules when they are asked for.
    dtype = vars(torch).get(attribute) if module == "torch" else None
    return dtype if isinstance(dtype, torch.dtype) else None
