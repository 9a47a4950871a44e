"""Forged metadata of allowed opcodes and names: odd states, odd values."""

from __future__ import annotations

import gc
import pathlib
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from dcp_reshard import unpickle
from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.metadata_entries import MetadataEntry, SizeEntry
from dcp_reshard.unpickle import unpickle_metadata

METADATA = b"\x8c\x25torch.distributed.checkpoint.metadata"
SIZE = torch.Size([2])


def read(data: bytes) -> MetadataEntry:
    return unpickle_metadata(data, file=".metadata")


def read_value(value: object) -> Any:
    """What the unpickler makes of a value, of which only the metadata's version consists."""
    return read(pickle.dumps(Metadata({}, version=value))).version


class Call:
    """Pickled as a call of a function with these arguments."""

    def __init__(self, function: object, *args: object) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[object, ...]:
        return self.call


def with_state(value: Any, **fields: object) -> Any:
    """The value with other fields in its state; those of None are missing."""
    vars(value).update(fields)
    for name in [name for name, field in fields.items() if field is None]:
        del vars(value)[name]
    return value


def index() -> MetadataIndex:
    return MetadataIndex("w", SIZE, 0)


@pytest.mark.row("B05")
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (with_state(Metadata({}), more=1), "MetadataEntry: unknown fields [\"'more'\"]"),
        (with_state(Metadata({}), storage_data=None), "MetadataEntry: field 'storage_data'"),
        (with_state(ChunkStorageMetadata(SIZE, SIZE), sizes=None), "field 'sizes' is missing"),
        (with_state(ChunkStorageMetadata(SIZE, SIZE), a=1, b=2), "ChunkEntry: unknown fields"),
        (with_state(BytesStorageMetadata(), size=1), "BytesEntry: unknown fields [\"'size'\"]"),
        (with_state(index(), fqn=None), "IndexEntry: field 'fqn' is missing"),
        (with_state(_StorageInfo("f", 0, 1), length=None), "field 'length' is missing"),
        (with_state(TensorStorageMetadata(None, SIZE, []), size=None), "field 'size' is missing"),
    ],
)
def test_records_take_their_fields_and_nothing_else(value: object, message: str) -> None:
    """A field that is missing, or not known, is named."""
    with pytest.raises(CheckpointFormatError) as info:
        read_value(value)
    assert message in str(info.value)


@pytest.mark.row("B51")
def test_fields_that_older_versions_lack_are_optional() -> None:
    """`version`, `storage_meta`, `planner_data` and `transform_descriptors` came one by one."""
    metadata = with_state(
        Metadata({}, None, {}), version=None, storage_meta=None, planner_data=None
    )
    entry = read(pickle.dumps(metadata))
    assert (entry.version, entry.storage_meta, entry.planner_data) == (None, None, None)
    info = with_state(_StorageInfo("f", 0, 1), transform_descriptors=None)
    assert read_value(info).transform_descriptors is None


def assemble(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts) + b"."


def record(name: bytes) -> bytes:
    """Opcodes that push an empty record."""
    return METADATA + b"\x8c" + bytes([len(name)]) + name + b"\x93)\x81"


@pytest.mark.row("B05")
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([record(b"MetadataIndex"), b"Nb"], "IndexEntry: state of type NoneType"),
        ([record(b"MetadataIndex"), b"]b"], "IndexEntry: state of type list"),
        ([record(b"MetadataIndex"), b"}\x8c\x03fqnNs", b"b}\x8c\x03fqnNsb"], "state is set twice"),
        ([record(b"TensorProperties"), b")b"], "TensorProperties: state ()"),
        ([record(b"TensorProperties"), b"(NNNNNtb"], "TensorProperties: state (None"),
        ([b"ctorch\nfloat32\n", b"}b"], "a dtype cannot be given state"),
        ([b"ctorch\nfloat32\n", b"N}\x8c\x01xK\x01s\x86b"], "a dtype cannot be given state"),
        ([b"ctorch\nSize\n", b"}b"], "a function cannot be given state"),
        ([b"ctorch\nSize\n", b"N}\x8c\x01xK\x01s\x86b"], "a function cannot be given state"),
        ([METADATA, b"\x8c\x08Metadata\x93", b"}b"], "a type cannot be given state"),
        ([METADATA, b"\x8c\x08Metadata\x93", b"N}\x8c\x01xK\x01s\x86b"], "a type cannot be"),
        ([METADATA, b"\x8c\x08Metadata\x93K\x01\x85\x81"], "takes no arguments"),
        ([METADATA, b"\x8c\x08Metadata\x93K\x01\x85R"], "takes no arguments"),
        ([record(b"Metadata")], "holds a MetadataEntry, not checkpoint metadata"),
        ([b"}"], "holds a dict, not checkpoint metadata"),
        ([b"ctorch\nfloat32\n", b")R"], "not callable"),
        ([b"h\x07"], "Memo value not found"),
        ([b"N\x94h\x00e"], "could not find MARK"),
        ([b"}]Ns"], "unhashable type: 'list'"),
    ],
)
def test_misuse_of_what_is_allowed_is_an_error(parts: list[bytes], message: str) -> None:
    """State of another type, twice, or for what has none; calls of what is no function."""
    with pytest.raises(
        CheckpointFormatError,
    ) as info:
        read(assemble(*parts))
    assert any(m in str(info.value) for m in message.split("|"))
    assert not hasattr(torch.float32, "x")
    assert not hasattr(MetadataEntry, "x")


@pytest.mark.parametrize(
    "values",
    [[-1], [1.0], [True], ["1"], [None], [[1]], [1 << 63], [1 << 100], "12", {1: 2}, 7, None],
    ids=repr,
)
def test_sizes_are_integers_from_0_to_63_bits(values: object) -> None:
    """Everything that numpy would take for an integer, and is none, is refused."""
    with pytest.raises(CheckpointFormatError, match=r"size (with|of type)|integer of 13 bytes"):
        read_value(Call(torch.Size, values))


def test_sizes_are_marked_as_checked() -> None:
    """A size has its own type; a tuple that was not checked stays a tuple."""
    assert read_value(Call(torch.Size, [0, (1 << 63) - 1])) == (0, (1 << 63) - 1)
    assert type(read_value(torch.Size([2]))) is SizeEntry
    assert type(read_value((2,))) is tuple


@pytest.mark.row("B51")
@pytest.mark.parametrize("cls", ["PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"])
@pytest.mark.parametrize("module", ["pathlib", "pathlib._local"])
def test_paths_of_any_system_are_strings(cls: str, module: str) -> None:
    """A checkpoint saved under Windows, or by Python 3.13, is read on Linux by Python 3.11."""
    data = pickle.dumps(Metadata({}, version=pathlib.PurePosixPath("a/b")), protocol=2)
    data = data.replace(b"pathlib\nPurePosixPath", f"{module}\n{cls}".encode())
    assert read(data).version == "a/b"


@pytest.mark.parametrize(
    "value",
    [
        Call(Path, *["a"] * 257),
        Call(Path, 1),
        Call(torch.serialization._get_layout, ["torch.strided"]),
        Call(OrderedDict, [("a", 1)]),
    ],
)
def test_functions_check_their_arguments(value: object) -> None:
    """What a call gets, it takes only in the form in which torch pickles it."""
    with pytest.raises(CheckpointFormatError):
        read_value(value)


def test_the_rest_of_what_pickles_of_metadata_hold() -> None:
    """Dicts of any kind, lists, numbers of any length, texts of any length, and references."""
    text = "é" * 300
    value = OrderedDict(a=[1, -1, 255, 65536, 1 << 40, -(1 << 70), 1.5, True, None, text, text])
    for protocol in (2, 3, 4, 5):
        data = pickle.dumps(Metadata({}, version=value), protocol=protocol)
        assert read(data).version == value
        many = [str(i) for i in range(400)]
        many += [torch.Size([1, 2]), torch.Size([3] * 5), *many]
        assert read(pickle.dumps(Metadata({}, version=many), protocol=protocol)).version == many
    itself = Metadata({})
    itself.planner_data = itself
    entry = read(pickle.dumps(itself))
    assert entry.planner_data is entry


def test_the_garbage_collector_is_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is paused while reading, and on again after success and after failure."""
    states: list[bool] = []
    find_class = unpickle.find_class
    monkeypatch.setattr(
        unpickle, "find_class", lambda *a: states.append(gc.isenabled()) or find_class(*a)
    )
    read_value("1.0.0")
    assert states == [False]
    assert gc.isenabled()
    with pytest.raises(CheckpointFormatError):
        read(assemble(b"cos\nsystem\n"))
    assert gc.isenabled()


def test_a_file_of_any_size_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is a limit, and the message has it."""
    monkeypatch.setattr(unpickle, "MAX_METADATA_BYTES", 100)
    with pytest.raises(CheckpointFormatError, match="bytes of metadata, allowed are 100"):
        read_value("x" * 100)
