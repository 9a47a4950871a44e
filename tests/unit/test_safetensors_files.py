"""Headers of safetensors files: what the format prescribes is read, everything else refused."""

from __future__ import annotations

import json
import struct
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.payload import Payload
from dcp_reshard.safetensors_files import read_safetensors_file
from tests.support.rank_grids import safetensors_bytes
from tests.support.tensors import indexed_tensor

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.uint16,
    torch.int16,
    torch.uint32,
    torch.int32,
    torch.uint64,
    torch.int64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


def read(data: bytes) -> dict[str, Payload]:
    return read_safetensors_file(len(data), lambda start, end: data[start:end])


def make(header: Any, rest: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + rest


def entry(shape: Any, start: Any, end: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def test_tensors_of_all_dtypes_are_found() -> None:
    """Each tensor's bytes are where its payload says, for all dtypes, 0-d and empty tensors."""
    tensors = {str(dtype): indexed_tensor((3, 5), dtype) for dtype in DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4), "a.b/ü": torch.ones(1)}
    data = safetensors_bytes(tensors, metadata={"format": "pt"})
    payloads = read(data)
    assert payloads.keys() == tensors.keys()
    for name, tensor in tensors.items():
        payload = payloads[name]
        assert (payload.shape, payload.dtype) == (tuple(tensor.shape), tensor.dtype)
        stored = data[payload.start : payload.start + payload.record.length]
        assert stored == tensor.reshape(-1, 1).view(torch.uint8).numpy().tobytes()
        wanted = [stride * tensor.itemsize for stride in tensor.stride()]
        assert list(payload.strides) == wanted or not tensor.numel()


def test_files_of_the_safetensors_package_are_read() -> None:
    """What the package writes is what this parser reads."""
    package = pytest.importorskip("safetensors.torch", reason="extra `safetensors`")
    tensors = {str(dtype): indexed_tensor((3, 5), dtype) for dtype in DTYPES[:9]}
    data = package.save(tensors, metadata={"format": "pt"})
    payloads = read(data)
    for name, tensor in tensors.items():
        payload = payloads[name]
        stored = data[payload.start : payload.start + payload.record.length]
        assert stored == tensor.view(torch.uint8).numpy().tobytes()


def test_the_header_may_be_padded() -> None:
    """Spaces after the JSON are allowed, as the format says."""
    header = json.dumps({"w": entry([1], 0, 4)}).encode() + b"   "
    assert read(make(header, b"1234"))["w"].start == 8 + len(header)


ONE = entry([1], 0, 4)
DEEP = b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "0 bytes are too few"),
    "seven bytes": (b"1234567", "7 bytes are too few"),
    "header length 0": (make({}, length=0), "header of 0 bytes in a file of 10"),
    "header length 2**63": (make({}, length=1 << 63), "header of 9223372036854775808 bytes"),
    "header beyond the file": (make({}, length=3), "header of 3 bytes in a file of 10"),
    "no JSON": (make(b"{'w': 1}"), "not JSON as it should be"),
    "not UTF-8": (make(b'{"\xff": 1}'), "not JSON as it should be"),
    "a list": (make(b"[1, 2]"), "starts with b'\\['"),
    "leading space": (make(b" {}"), "starts with b' '"),
    "cut JSON": (make(b'{"w": {'), "not JSON"),
    "bytes after the JSON": (make(b"{}{}"), "not JSON"),
    "NaN": (make(b'{"w": NaN}'), "NaN is not JSON"),
    "deep JSON": (make(DEEP), "not JSON as it should be"),
    "long number": (make(b'{"w": ' + b"9" * 5000 + b"}"), "not JSON as it should be"),
    "same tensor twice": (
        make(b'{"w": %b, "w": %b}' % ((json.dumps(ONE).encode(),) * 2), b"1234"),
        "key 'w' occurs twice",
    ),
    "same field twice": (
        make(b'{"w": {"dtype": "F32", "dtype": "I32", "shape": [1], "data_offsets": [0, 4]}}'),
        "key 'dtype' occurs twice",
    ),
    "entry without a field": (make({"w": {"dtype": "F32", "shape": [1]}}), "has not just dtype"),
    "entry with a field more": (make({"w": ONE | {"x": 1}}, b"1234"), "has not just dtype"),
    "entry of text": (make({"w": "F32"}), "has not just dtype"),
    "unknown dtype": (make({"w": entry([1], 0, 4, "F31")}, b"1234"), "dtype 'F31' is not"),
    "dtype of a list": (make({"w": entry([1], 0, 4, [])}, b"1234"), r"dtype \[\] is not"),
    "four-bit floats": (make({"w": entry([2], 0, 1, "F4")}, b"1"), "dtype 'F4' is not supported"),
    "hole": (make({"w": ONE, "v": entry([1], 5, 9)}, b"123456789"), "no tensor has"),
    "hole at the start": (make({"w": entry([1], 1, 5)}, b"12345"), "no tensor has"),
    "overlap": (make({"w": ONE, "v": entry([1], 2, 6)}, b"123456"), "two tensors have"),
    "twice the same bytes": (make({"w": ONE, "v": ONE}, b"1234"), "two tensors have"),
    "inversion": (make({"w": entry([1], 4, 0)}, b"1234"), "bytes 4 to 0 for shape"),
    "beyond the file": (make({"w": ONE}, b"123"), "tensors end at byte .*, the file at"),
    "bytes after the tensors": (make({"w": ONE}, b"12345"), "tensors end at byte"),
    "shape and bytes differ": (make({"w": entry([2], 0, 4)}, b"1234"), "which has 8"),
    "dtype and bytes differ": (make({"w": entry([1], 0, 4, "F64")}, b"1234"), "which has 8"),
    "negative offset": (make({"w": entry([1], -4, 0)}, b""), r"data_offsets \[-4, 0\]"),
    "negative shape": (make({"w": entry([-1, -1], 0, 4)}, b"1234"), r"shape \[-1, -1\]"),
    "huge shape": (make({"w": entry([1 << 62, 4], 0, 4)}, b"1234"), "shape"),
    "float in the shape": (make({"w": entry([1.0], 0, 4)}, b"1234"), r"shape \[1.0\]"),
    "bool in the shape": (make({"w": entry([True], 0, 4)}, b"1234"), r"shape \[True\]"),
    "17 dims": (make({"w": entry([1] * 17, 0, 4)}, b"1234"), "shape"),
    "three offsets": (
        make({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4, 4]}}, b"1234"),
        "data_offsets",
    ),
    "NUL in a name": (make({"w\0": ONE}, b"1234"), "not a name"),
    "long name": (make({"w" * 4097: ONE}, b"1234"), "not a name of up to 4096"),
    "metadata of numbers": (make({"__metadata__": {"a": 1}}), "not a dict of strings"),
    "metadata of a list": (make({"__metadata__": []}), "not a dict of strings"),
}


@pytest.mark.parametrize("case", BAD)
def test_b41_bad_files_are_errors(case: str) -> None:
    """Lengths, JSON, names, shapes and offsets that the format does not allow are refused."""
    data, message = BAD[case]
    with pytest.raises(CheckpointFormatError, match=message):
        read(data)


@hypothesis.given(st.data())
def test_b41_flipped_bits_are_an_error_or_read(data: st.DataObject) -> None:
    """One flipped bit of the header is our error, or gives tensors inside the file."""
    whole = bytearray(safetensors_bytes({"w": torch.ones(3), "v": torch.ones(2, 2)}))
    size = 8 + int.from_bytes(whole[:8], "little")
    bit = data.draw(st.integers(0, 8 * size - 1))
    whole[bit // 8] ^= 1 << bit % 8
    try:
        payloads = read(bytes(whole))
    except CheckpointFormatError:
        return
    for payload in payloads.values():
        assert 0 <= payload.start <= payload.start + payload.record.length <= len(whole)
