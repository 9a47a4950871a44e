"""Damaged and forged items: an error of this package, or the right elements, and nothing is run."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.container import read_directory, read_record
from dcp_reshard.errors import CheckpointFormatError, ReshardError
from dcp_reshard.payload import Payload, probe_payload
from tests.support.items import patch, reader, saved_bytes, write_container

ITEM = saved_bytes(torch.arange(6.0).reshape(2, 3))
RECORDS = {r.name: r for r in read_directory(len(ITEM), reader(ITEM))}
CONTENTS = {name: read_record(record, reader(ITEM)) for name, record in RECORDS.items()}


def probe(data: bytes) -> Payload | None:
    return probe_payload(len(data), reader(data))


def flip(data: bytes, bit: int) -> bytes:
    return patch(data, bit // 8, bytes([data[bit // 8] ^ 1 << bit % 8]))


def place(payload: Payload) -> tuple[Any, ...]:
    """What is said of the elements, but for their checksum."""
    return payload.dtype, payload.shape, payload.strides, payload.start, payload.record.length


@pytest.mark.row("B22")
def test_every_flipped_bit_is_noticed_or_does_not_matter() -> None:
    """An error, or the same place; there the bytes are the same, or not those of the checksum."""
    intact = probe(ITEM)
    assert intact is not None
    noticed = 0
    for bit in range(8 * len(ITEM)):
        data = flip(ITEM, bit)
        try:
            payload = probe(data)
        except ReshardError:
            noticed += 1
            continue
        assert payload is not None
        assert place(payload) == place(intact)
        record = payload.record
        contents = data[record.start : record.start + record.length]
        if zlib.crc32(contents) != record.crc:
            noticed += 1
        else:
            assert contents == CONTENTS["data/0"]
    assert noticed > 8 * (len(CONTENTS["data.pkl"]) + len(CONTENTS["data/0"]))


def test_every_cut_item_is_refused() -> None:
    """An item that ends early, or has bytes behind its end, is an error at every length."""
    for length in range(len(ITEM)):
        with pytest.raises(ReshardError):
            probe(ITEM[:length])
    with pytest.raises(ReshardError):
        probe(ITEM + b"\0")


def with_pickle(described: bytes) -> bytes:
    """The item with another description, whose checksum is right."""
    return write_container((CONTENTS | {"data.pkl": described}).items())


def test_every_flipped_bit_of_a_description_with_the_right_checksum() -> None:
    """A forged description is an error, or not a dense tensor, or one that fits its storage."""
    described = CONTENTS["data.pkl"]
    outcomes: dict[str, int] = {}
    for bit in range(8 * len(described)):
        try:
            payload = probe(with_pickle(flip(described, bit)))
        except ReshardError:
            payload = "error"
        if isinstance(payload, Payload):
            assert payload.start >= payload.record.start
            assert 0 in payload.shape or span_bytes(payload) <= payload.extent
        kind = type(payload).__name__
        outcomes[kind] = outcomes.get(kind, 0) + 1
    assert outcomes.keys() == {"Payload", "NoneType", "str"}


def span_bytes(payload: Payload) -> int:
    """Bytes from the first element to the end of the last."""
    steps = zip(payload.shape, payload.strides, strict=True)
    return payload.dtype.itemsize + sum(stride * (size - 1) for size, stride in steps)


def test_every_cut_description_is_refused() -> None:
    """A description that ends early is never taken for a whole one."""
    described = CONTENTS["data.pkl"]
    for length in range(len(described)):
        with pytest.raises(CheckpointFormatError, match="cut or broken"):
            probe(with_pickle(described[:length]))


@hypothesis.given(st.data())
def test_descriptions_of_random_opcodes(data: st.DataObject) -> None:
    """Whatever is spliced into a description, no other exception than ours is raised."""
    described = CONTENTS["data.pkl"]
    start = data.draw(st.integers(0, len(described)))
    end = data.draw(st.integers(start, min(start + 4, len(described))))
    known = st.sampled_from(list(b"qKMJ\x8ahc(Xt\x85\x86\x87)\x88\x89QR\x80.N}]"))
    spliced = bytes(data.draw(st.lists(st.one_of(known, st.integers(0, 255)), max_size=8)))
    try:
        found = probe(with_pickle(described[:start] + spliced + described[end:]))
    except ReshardError:
        return
    assert found is None or 0 in found.shape or span_bytes(found) <= found.extent


class Described:
    """Pickled as a call of `function` with these arguments; a `Storage` among them by its id."""

    def __init__(
        self, args: tuple[Any, ...], function: Any = torch._utils._rebuild_tensor_v2
    ) -> None:
        self.args, self.function = args, function

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class Storage:
    """Pickled as a persistent id."""

    def __init__(self, *pid: Any) -> None:
        self.pid = pid


def item(described: object, *, data: bytes = bytes(24), order: bytes = b"little") -> bytes:
    """An item of this description and these elements."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: object) -> object:
            return value.pid if isinstance(value, Storage) else None

    buffer = io.BytesIO()
    Pickler(buffer, protocol=2).dump(described)
    return write_container(
        [("data.pkl", buffer.getvalue()), ("byteorder", order), ("data/0", data)]
    )


def tensor_of(
    storage: Any = None, offset: Any = 0, shape: Any = (2, 3), strides: Any = (3, 1)
) -> Described:
    storage = storage or Storage("storage", torch.FloatStorage, "0", "cpu", 6)
    return Described((storage, offset, shape, strides, False, OrderedDict()))


def test_items_made_by_hand_are_read() -> None:
    """What the tests below change is found when it is left alone."""
    data = item(tensor_of(), data=ITEM[:24])
    payload = probe(data)
    assert payload is not None
    assert (payload.dtype, payload.shape, payload.strides) == (torch.float32, (2, 3), (12, 4))
    assert data[payload.start :][: payload.extent] == ITEM[:24]


@pytest.mark.row("B29")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (item(tensor_of(), order=b"big"), r"byte order b'big' is not supported"),
        (item(tensor_of(), order=b"little" * 9), r"byte order b'' is not supported"),
        (item(tensor_of(), data=bytes(20)), r"has 20 bytes.* said to have 24"),
        (item(tensor_of(), data=bytes(28)), r"has 28 bytes.* said to have 24"),
        (item(tensor_of(Storage("storage", torch.FloatStorage, "1", "cpu", 6))), r"`data/1`"),
        (item(tensor_of(offset=1)), r"does not fit into"),
        (item(tensor_of(shape=(3, 3))), r"does not fit into"),
        (item(tensor_of(strides=(4, 1))), r"does not fit into"),
        (item(tensor_of(shape=(1, 7), strides=(7, 1))), r"does not fit into"),
        (item(tensor_of(strides=(1 << 64, 1))), r"does not fit into"),
        (item(tensor_of(offset=-1)), r"cannot exist"),
        (item(tensor_of(strides=(-3, 1))), r"cannot exist"),
        (item(tensor_of(shape=(-2, 3))), r"cannot exist"),
        (item(tensor_of(strides=(1,))), r"cannot exist"),
        (item(tensor_of(offset="0")), r"must be integers"),
        (item(tensor_of(shape=(True, 3))), r"must be integers"),
        (item(tensor_of(shape=("2", 3))), r"must be integers"),
        (item(tensor_of(Storage("storage", torch.FloatStorage, "0", "cpu", True))), r"integers"),
        (write_container([("data/0", bytes(24))]), r"no record `data.pkl`"),
    ],
)
def test_descriptions_that_cannot_be_true_are_refused(data: bytes, message: str) -> None:
    """Sizes that do not fit the record, numbers that are none, and another byte order."""
    with pytest.raises(CheckpointFormatError, match=message):
        probe(data)


@pytest.mark.parametrize(
    "described",
    [
        Described(("echo run > marker",), function=os.system),
        Described((tensor_of(), tensor_of()), function=torch._utils._rebuild_parameter),
        tensor_of(Storage("storage", torch.FloatStorage, 0, "cpu", 6)),
        tensor_of(Storage("storage", torch.storage.UntypedStorage, "0", "cpu", 6)),
        tensor_of(shape=None),
        Described((1, 2)),
    ],
)
def test_nothing_named_in_an_item_is_run(
    described: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls are read, not made; those of another form than a tensor's leave the item to torch."""
    monkeypatch.chdir(tmp_path)
    found = probe(item(described))
    assert found is None or found.shape == (2, 3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("levels", "message"), [(900, "must be integers"), (15_000, "must be integers"), (17_000, None)]
)
def test_deep_descriptions_are_bounded(levels: int, message: str | None) -> None:
    """Nested tuples for a shape are an error at any depth; a long description is not looked at."""
    shape = b"K\x02K\x03\x86"
    assert CONTENTS["data.pkl"].count(shape) == 1
    data = with_pickle(CONTENTS["data.pkl"].replace(shape, b")" + b"\x85" * levels))
    if message is None:
        assert probe(data) is None
    else:
        with pytest.raises(CheckpointFormatError, match=message):
            probe(data)
