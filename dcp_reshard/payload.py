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

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from dcp_reshard.container import Read, Record, read_directory, read_record
from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.ranges import may_overlap

__all__ = ["PROBE_BYTES", "Payload", "find_payload", "probe_payload"]

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
    pickle_record = records.get("data.pkl")
    if pickle_record is None:
        raise CheckpointFormatError("the container has no record `data.pkl`")
    if pickle_record.length > _MAX_PICKLE_BYTES:
        return None
    byteorder = records.get("byteorder")
    if byteorder is not None:
        order = read_record(byteorder, read) if byteorder.length <= _MAX_ORDER_BYTES else b""
        if order != b"little":
            raise CheckpointFormatError(
                f"byte order {order!r:.40} is not supported, only b'little'"
            )
    described = _describe_tensor(read_record(pickle_record, read))
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
            f"into "
            f"the {record.length} bytes of its storage"
        )
    if may_overlap(shape, strides):
        return None
    start = record.start + offset * dtype.itemsize
    return Payload(dtype, shape, tuple(st * dtype.itemsize for st in strides), start, record)


_Described = tuple[str, torch.dtype, int, int, tuple[int, ...], tuple[int, ...]]


def _describe_tensor(pickle: bytes) -> _Described | None:
    """What the pickle says of a tensor; None if that is not one dense tensor."""
    value = _interpret(pickle)
    while isinstance(value, _Call) and value.function == "torch._utils _rebuild_parameter":
        value = value.args[0] if value.args else None
    if not isinstance(value, _Call):
        return None
    match value.function, value.args:
        case "torch._utils _rebuild_tensor_v2", (
            _Persistent() as storage,
            offset,
            shape,
            strides,
            _,
            _,
        ):
            pass
        case (
            "torch._utils _rebuild_tensor_v3",
            (_Persistent() as storage, offset, shape, strides, _, _, _Global() as dtype_global),
        ):
            pass
        case _:
            return None
    match storage.id:
        case ("storage", _Global() as kind, str() as key, str(), int() as numel):
            pass
        case _:
            return None
    if value.function.endswith("v3"):
        dtype, unit = _find_dtype(dtype_global.name), 1
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


def _find_dtype(name: str) -> torch.dtype | None:
    module, _, attribute = name.partition(" ")
    # Not `getattr`: torch imports some of its modules when they are asked for.
    dtype = vars(torch).get(attribute) if module == "torch" else None
    return dtype if isinstance(dtype, torch.dtype) else None


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Persistent:
    id: object


@dataclass(frozen=True, slots=True)
class _Call:
    function: str
    args: tuple[object, ...]


_MARK = object()


def _interpret(pickle: bytes) -> object:  # noqa: C901  one branch per opcode
    """What a pickle says, as data: globals, calls and persistent ids stay names.

    Returns:
        The described value, or None if an opcode occurs that `torch.save` of a tensor does not
        need.
    """
    stack: list[object] = []
    memo: dict[int, object] = {}
    i = 0
    try:
        while True:
            op = pickle[i]
            i += 1
            if op == 0x71:  # BINPUT
                memo[pickle[i]] = stack[-1]
                i += 1
            elif op == 0x4B:  # BININT1
                stack.append(pickle[i])
                i += 1
            elif op == 0x4D:  # BININT2
                stack.append(int.from_bytes(pickle[i : i + 2], "little"))
                i += 2
            elif op == 0x4A:  # BININT
                stack.append(int.from_bytes(pickle[i : i + 4], "little", signed=True))
                i += 4
            elif op == 0x8A:  # LONG1
                stack.append(
                    int.from_bytes(pickle[i + 1 : i + 1 + pickle[i]], "little", signed=True)
                )
                i += 1 + pickle[i]
            elif op == 0x68:  # BINGET
                stack.append(memo[pickle[i]])
                i += 1
            elif op == 0x63:  # GLOBAL
                end = pickle.index(b"\n", pickle.index(b"\n", i) + 1)
                stack.append(_Global(pickle[i:end].decode().replace("\n", " ")))
                i = end + 1
            elif op == 0x28:  # MARK
                stack.append(_MARK)
            elif op == 0x58:  # BINUNICODE
                end = i + 4 + int.from_bytes(pickle[i : i + 4], "little")
                stack.append(pickle[i + 4 : end].decode())
                i = end
            elif op == 0x74:  # TUPLE
                mark = len(stack) - 1 - stack[::-1].index(_MARK)
                stack[mark:] = [tuple(stack[mark + 1 :])]
            elif op in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
                first = len(stack) - (op - 0x84)
                stack[first:] = [tuple(stack[first:])]
            elif op == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif op in (0x88, 0x89):  # NEWTRUE, NEWFALSE
                stack.append(op == 0x88)
            elif op == 0x51:  # BINPERSID
                stack.append(_Persistent(stack.pop()))
            elif op == 0x52:  # REDUCE
                args, function = stack.pop(), stack.pop()
                if not isinstance(args, tuple) or not isinstance(function, _Global):
                    return None
                stack.append(_Call(function.name, args))
            elif op == 0x80:  # PROTO
                i += 1
            elif op == 0x2E:  # STOP
                return stack.pop() if len(stack) == 1 and i == len(pickle) else None
            else:
                return None
    except (IndexError, KeyError, ValueError) as error:
        raise CheckpointFormatError(f"record `data.pkl` is cut or broken at byte {i}") from error
