"""Where elements lie: what torch reads from an item is what is read at the place found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.payload import PROBE_BYTES, Payload, probe_payload
from tests.support.items import reader, saved_bytes
from tests.support.tensors import check_same, indexed_tensor

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
]
BASE = indexed_tensor((4, 6, 5))


def probe(data: bytes) -> Payload | None:
    return probe_payload(len(data), reader(data))


def read_elements(data: bytes, payload: Payload) -> torch.Tensor:
    """The tensor that lies at the place found."""
    buffer = bytearray(data[payload.start : payload.start + payload.extent])
    if not buffer:
        return torch.empty(payload.shape, dtype=payload.dtype)
    elements = torch.frombuffer(buffer, dtype=payload.dtype)
    strides = [stride // payload.dtype.itemsize for stride in payload.strides]
    return torch.as_strided(elements, payload.shape, strides)


def check_found(tensor: torch.Tensor, data: bytes) -> Payload:
    payload = probe(data)
    assert payload is not None
    found = read_elements(data, payload)
    dense = [t.detach().clone(memory_format=torch.contiguous_format) for t in (found, tensor)]
    check_same({"found": dense[0]}, {"found": dense[1]})
    return payload


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_every_dtype(dtype: torch.dtype) -> None:
    """All dtypes that torch can fill and save, old and new storage classes, bit for bit."""
    tensor = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(2, 3, 4)
    assert check_found(tensor, saved_bytes(tensor)).record.name == "data/0"


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda t: t,
    "transposed": lambda t: t.transpose(0, 2),
    "offset": lambda t: t[1:],
    "columns": lambda t: t[:, 2:4],
    "every second": lambda t: t[::2, :, ::3],
    "one row": lambda t: t[2],
    "one element": lambda t: t[3, 5, 4],
    "no row": lambda t: t[4:],
    "no column": lambda t: t[:, :, :0],
    "diagonal": lambda t: torch.diagonal(t, 0, 0, 1),
    "parameter": torch.nn.Parameter,
    "parameter that needs no gradient": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "with gradient": lambda t: t.clone().requires_grad_(),
    "channels last": lambda t: t[None].to(memory_format=torch.channels_last),
    "size one": lambda t: t.reshape(1, 4, 1, 30, 1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_elements_of_views(view: str) -> None:
    """A strided array in a larger storage is described as it is: offset, strides, shape."""
    tensor = VIEWS[view](BASE)
    payload = check_found(tensor, saved_bytes(tensor))
    assert payload.strides == tuple(st * tensor.element_size() for st in tensor.stride())
    assert payload.start - payload.record.start == 4 * tensor.storage_offset()


class Subclass(torch.Tensor):
    """A tensor that torch rebuilds by its class."""


def with_attribute() -> torch.Tensor:
    tensor = torch.zeros(2)
    tensor.note = "kept by torch.save"  # type: ignore[attr-defined]
    return tensor


OTHERS: dict[str, Callable[[], Any]] = {
    "dict": lambda: {"w": torch.zeros(2)},
    "list": lambda: [torch.zeros(2)],
    "int": lambda: 7,
    "none": lambda: None,
    "expanded": lambda: torch.zeros(3, 1).expand(3, 4),
    "overlapping": lambda: torch.zeros(6).unfold(0, 3, 1),
    "conjugated": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "negated": lambda: torch.zeros(2, dtype=torch.complex64).conj().imag,
    "coo": lambda: torch.eye(3).to_sparse(),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(2), 1.0, 0, torch.qint8),
    "meta": lambda: torch.zeros(2, device="meta"),
    "subclass": lambda: torch.zeros(2).as_subclass(Subclass),
    "attribute": with_attribute,
    "storage": lambda: torch.zeros(2).untyped_storage(),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", OTHERS)
def test_what_is_not_one_dense_tensor_is_left_to_torch(kind: str) -> None:
    """Sparse, quantized, overlapping, lazily conjugated, or no tensor: None, and no error."""
    assert probe(saved_bytes(OTHERS[kind]())) is None


@hypothesis.given(st.lists(st.integers(0, 4), max_size=4), st.data())
def test_elements_of_any_slice(shape: list[int], data: st.DataObject) -> None:
    """Any slices of any permutation of a tensor are found, or are left to torch if they overlap."""
    tensor = indexed_tensor(shape).permute(data.draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(tensor.shape):
        start, step = data.draw(st.integers(0, size)), data.draw(st.integers(1, 3))
        tensor = tensor[(slice(None),) * dim + (slice(start, None, step),)]
    check_found(tensor, saved_bytes(tensor))


def test_the_ends_of_an_item_are_enough() -> None:
    """Of a large item nothing is read but a little at both ends."""
    data = saved_bytes(torch.zeros(1 << 20))

    def read(start: int, end: int) -> bytes:
        assert end <= PROBE_BYTES or start >= len(data) - PROBE_BYTES
        return data[start:end]

    assert probe_payload(len(data), read) == probe(data)
