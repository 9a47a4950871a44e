"""Objects: data come back as they were, and nothing else is loaded, or run."""

from __future__ import annotations

import collections
import threading
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.errors import CheckpointFormatError, CorruptRecordError, UnsafeCheckpointError
from dcp_reshard.objects import MAX_OBJECT_BYTES, check_data_only, load_data
from tests.support.bad_files import object_item
from tests.support.items import saved_bytes
from tests.support.tensors import check_same

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(min_size=1, max_size=20)
)
KEYS = st.text(max_size=3) | st.integers(-(2**63), 2**63) | st.tuples(st.integers(0, 9), st.text())
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(st.integers(0, 99) | st.text(max_size=3), max_size=4)
    ),
    max_leaves=12,
)


def load(value: object, **options: Any) -> object:
    return load_data(memoryview(saved_bytes(value)), **options)


@hypothesis.given(VALUES)
def test_data_come_back(value: object) -> None:
    """Numbers, texts and containers of these are what was saved."""
    assert load(value) == value


@pytest.mark.parametrize(
    "value",
    [
        torch.Size((2, 3)),
        torch.float32,
        torch.device("cpu"),
        {torch.bfloat16: 1},
        bytearray(b"abc"),
        1 + 2j,
        collections.OrderedDict(a=1, b={"c": 2}),
        collections.Counter("abca"),
        (1,) * 100_000,
    ],
    ids=str,
)
def test_torchs_data_come_back(value: object) -> None:
    """So are the values that torch counts as data."""
    loaded = load(value)
    assert loaded == value
    assert type(loaded) is type(value)


def test_tensors_in_objects_come_back() -> None:
    """Tensors of every form may be in an object: views, parameters, sparse ones."""
    value = {
        "view": torch.arange(12).view(3, 4).t()[1:],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "many": [torch.full((2,), float(i)) for i in range(50)],
    }
    loaded: Any = load(value | {"sparse": torch.eye(3).to_sparse()})
    check_same({"x": loaded["view"]}, {"x": value["view"]})
    assert isinstance(loaded["parameter"], torch.nn.Parameter)
    assert [int(t[0]) for t in loaded["many"]] == list(range(50))
    assert torch.equal(loaded["sparse"].to_dense(), torch.eye(3))


class Config:
    """A class of the program that saved."""

    def __init__(self, lr: float) -> None:
        self.lr = lr


@pytest.mark.parametrize(
    "value",
    [
        Config(0.1),
        {"deep": [Config(0.1)]},
        Path("/tmp"),  # noqa: S108
        np.float64(1.5),
        np.arange(3),
        threading.Thread,
        frozenset({1}),
        collections.defaultdict(list),
        collections.deque([1]),
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_other_classes_are_refused(value: object) -> None:
    """Instances of any other class are refused, by name; a class alone is nothing that runs."""
    if isinstance(value, type):
        with pytest.raises(UnsafeCheckpointError, match="Thread"):
            load(value)
        return
    with pytest.raises(UnsafeCheckpointError, match=r"not plain data"):
        load(value)


def test_classes_may_be_allowed_by_name() -> None:
    """A class that the caller lists is loaded; torch's own list is as before."""
    before = set(torch.serialization.get_safe_globals())
    loaded = load([Config(0.5)], allowed_classes=[Config])
    assert isinstance(loaded, list)
    assert loaded[0].lr == 0.5
    assert set(torch.serialization.get_safe_globals()) == before
    with torch.serialization.safe_globals([Config]):
        load([Config(0.5)], allowed_classes=[Config])
        assert Config in torch.serialization.get_safe_globals()


def text(value: str) -> bytes:
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def call(name: str, *arguments: bytes) -> bytes:
    """Opcodes of a call."""
    return b"c" + name.replace(" ", "\n").encode() + b"\n(" + b"".join(arguments) + b"tR"


HUGE = b"\x8a\x06\x00\x00\x00\x00\x00\x01"


@pytest.mark.parametrize(
    "code",
    [
        call("__builtin__ bytearray", HUGE),
        call("torch FloatTensor", HUGE),
        call("torch Tensor", HUGE),
        call("_codecs encode", text("x"), text("zlib_codec")),
        call("_codecs encode", text("x"), text("idna")),
        call("collections OrderedDict", b"](]K\x01K\x02ee"),
        call("collections Counter", b"K\x01"),
        call("__builtin__ set", b"(K\x01)\x85t\x85"),
        call("__builtin__ set", b"]" + b"a".join([b"", b""])),
        call("__builtin__ complex", text("1")),
        call("__builtin__ eval", text("1")),
        call("torch._utils _rebuild_nested_tensor"),
        call("torch.storage _load_from_bytes", b"C\x01x"),
        call("torch._tensor _rebuild_from_type_v2", b"cos\nsystem\ncos\nx\n)N"),
        call("torch device", b"K\x01K\x02K\x03"),
        b"}" + HUGE * 2 + b"\x8a\x0a" + bytes(9) + b"\x01Nus",
    ],
    ids=lambda code: repr(code[:24]),
)
def test_calls_that_data_does_not_make_are_refused(code: bytes) -> None:
    """Harmless names with harmful arguments are refused before they are called."""
    with pytest.raises(CheckpointFormatError):
        load_data(memoryview(object_item(b"\x80\x02" + code + b".")))


def test_keys_that_share_a_hash_are_refused() -> None:
    """Ten thousand keys of one hash would take minutes; they are refused at once."""
    prime = 2**61 - 1
    numbers = b"".join(b"\x8a\x12" + (i * prime).to_bytes(18, "little") + b"N" for i in range(9999))
    with pytest.raises(UnsafeCheckpointError, match="bits"):
        load_data(memoryview(object_item(b"\x80\x02}(" + numbers + b"u.")))


def test_sizes_are_limited() -> None:
    """Objects beyond the limit are refused unless the caller raises it."""
    contents = memoryview(saved_bytes("x" * MAX_OBJECT_BYTES))
    with pytest.raises(CheckpointFormatError, match="allowed are"):
        check_data_only(contents)
    check_data_only(contents, max_bytes=len(contents))


def test_a_damaged_pickle_is_found() -> None:
    """The pickle is compared with its checksum."""
    data = saved_bytes({"lr": 0.123})
    at = data.index(b"lr")
    with pytest.raises(CorruptRecordError):
        load_data(memoryview(data[:at] + b"LR" + data[at + 2 :]))
