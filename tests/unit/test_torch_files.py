"""Files of `torch.save`: every tensor found in place, everything else data or named."""

from __future__ import annotations

import io
import warnings
from collections import OrderedDict
from typing import Any

import pytest
import torch

from dcp_reshard.errors import CheckpointFormatError, CorruptRecordError, UnsafeCheckpointError
from dcp_reshard.payload import Payload
from dcp_reshard.torch_files import NotData, read_torch_file
from tests.support.tensors import check_same, indexed_tensor


def save(value: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def read(data: bytes) -> dict[str, Any]:
    return read_torch_file(len(data), lambda start, end: data[start:end])


def elements(data: bytes, payload: Payload) -> torch.Tensor:
    """The tensor that a payload describes, from the bytes of its file."""
    memory = torch.frombuffer(bytearray(data[payload.start :]), dtype=torch.uint8)
    size = payload.dtype.itemsize
    flat = memory[: len(memory) // size * size].view(payload.dtype)
    return torch.as_strided(flat, payload.shape, [stride // size for stride in payload.strides])


def test_a_training_checkpoint_is_read_without_its_elements() -> None:
    """Dicts, groups and numbers are data, tensors are found in place, elements are not read."""
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.BatchNorm1d(30))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7}
    data = save(saved)
    requests: list[tuple[int, int]] = []

    def read_bytes(start: int, end: int) -> bytes:
        requests.append((start, end))
        return data[start:end]

    values: Any = read_torch_file(len(data), read_bytes)
    assert values["step"] == 7
    assert values["optimizer"]["param_groups"] == optimizer.state_dict()["param_groups"]
    weight = values["model"]["0.weight"]
    assert torch.equal(elements(data, weight), model[0].weight)
    assert torch.equal(
        elements(data, values["optimizer"]["state"][0]["exp_avg_sq"]),
        optimizer.state_dict()["state"][0]["exp_avg_sq"],
    )
    span = range(weight.start, weight.start + weight.record.length)
    assert not any(start in span or end - 1 in span for start, end in requests)
    assert len(data) > 4 * sum(end - start for start, end in set(requests))


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.int8,
        torch.bfloat16,
        torch.float64,
        torch.complex64,
        torch.uint16,
        torch.float8_e4m3fn,
    ],
)
def test_dtypes_and_views(dtype: torch.dtype) -> None:
    """Slices, transposes and rows of one storage are found where they are, in any dtype."""
    full = indexed_tensor((6, 5), dtype)
    saved = {
        "whole": full,
        "rows": full[2:4],
        "column": full[:, 3],
        "turned": full.t(),
        "steps": full[::2, 1::2],
        "scalar": full[5, 4],
        "empty": full[:0],
        "parameter": torch.nn.Parameter(full, requires_grad=False),
    }
    data = save(saved)
    values = read(data)
    for name, tensor in saved.items():
        payload = values[name]
        assert isinstance(payload, Payload)
        found = elements(data, payload)
        assert payload.shape == tuple(tensor.shape)
        check_same({name: found}, {name: tensor.detach()})
        assert payload.record == values["whole"].record


class Odd:
    """A class that a file may name, and that is not data."""


def test_what_is_not_data_is_named_and_the_rest_is_read() -> None:
    """Objects, functions, sparse and quantized tensors are names; their neighbours are there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sparse = torch.eye(2).to_sparse()
    saved = {
        "object": Odd(),
        "class": Odd,
        "function": torch.add,
        "set": {1},
        "sparse": sparse,
        "expanded": torch.ones(1).expand(3),
        "list": [1, Odd()],
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "bytes": b"\x00\xff",
        "ordered": OrderedDict(a=1),
        "fine": torch.ones(2),
    }
    values = read(save(saved))
    for name in ("object", "class", "function", "set", "sparse", "expanded"):
        assert isinstance(values[name], NotData), name
    assert values["object"].kind.endswith(".Odd")
    assert values["sparse"].kind == "torch._utils._rebuild_sparse_tensor"
    assert values["list"][0] == 1
    assert isinstance(values["list"][1], NotData)
    assert values["dtype"] is torch.bfloat16
    assert values["size"] == (2, 3)
    assert values["bytes"] == b"\x00\xff"
    assert values["ordered"] == {"a": 1}
    assert isinstance(values["fine"], Payload)


def test_many_records() -> None:
    """A file may have far more records than an item of a DCP checkpoint."""
    values = read(save({str(i): torch.tensor(i) for i in range(400)}))
    assert len({values[str(i)].record.start for i in range(400)}) == 400


def test_other_protocols() -> None:
    """A file pickled with protocol 4 or 5 says the same."""
    saved = {"a": {"w": torch.ones(2, 2)}, "n": [1, 2.5, "x" * 300, b"y"]}
    for protocol in (2, 3, 4, 5):
        values = read(save(saved, pickle_protocol=protocol))
        assert values["n"] == [1, 2.5, "x" * 300, b"y"]
        assert values["a"]["w"].shape == (2, 2)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.ones(2), "holds a torch._utils._rebuild_tensor_v2, not a dict"),
        ([torch.ones(2)], "holds a list, not a dict"),
        (Odd(), r"Odd, not a dict"),
    ],
)
def test_a_file_of_something_else_is_refused(value: object, message: str) -> None:
    """A rank file holds a dict; anything else is named."""
    with pytest.raises(CheckpointFormatError, match=message):
        read(save(value))


def test_damage_is_found() -> None:
    """Cut files, a flipped bit of the description, and a storage of another size are errors."""
    data = save({"w": torch.ones(64, 64), "name": "unmistakable"})
    for end in (0, 10, len(data) // 2, len(data) - 1):
        with pytest.raises(CheckpointFormatError):
            read(data[:end])
    at = data.index(b"unmistakable")
    with pytest.raises(CorruptRecordError, match=r"`data\.pkl`"):
        read(data[:at] + b"U" + data[at + 1 :])
    with pytest.raises(CheckpointFormatError, match="legacy format"):
        read(save({"w": torch.ones(2)}, _use_new_zipfile_serialization=False))


def test_nesting_is_limited() -> None:
    """A file nested deeper than any state dict is refused before anything walks over it."""
    value: dict[str, Any] = {}
    for _ in range(80):
        value = {"x": value}
    with pytest.raises(UnsafeCheckpointError, match="nested deeper than 64"):
        read(save(value))
