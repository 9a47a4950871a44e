"""The metadata pickle: what DCP writes is read, and nothing else; no name in it is ever run."""

from __future__ import annotations

import contextlib
import os
import pickle
import pickletools
import re
import sys
import tracemalloc
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
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_reshard import metadata_entries
from dcp_reshard.errors import CheckpointFormatError, ReshardError, UnsafeCheckpointError
from dcp_reshard.unpickle import unpickle_metadata
from tests.support.checkpoints import save_state
from tests.support.tensors import indexed_tensor

# Every opcode that reading metadata needs; `FRAME` and `PROTO` but at the start.
ALLOWED = (
    "BINFLOAT BINGET BININT BININT1 BININT2 BINPUT BINUNICODE BUILD EMPTY_DICT EMPTY_LIST"
    " EMPTY_TUPLE APPEND APPENDS FRAME GLOBAL LONG1 LONG_BINGET LONG_BINPUT MARK MEMOIZE NEWFALSE"
    " NEWOBJ NEWTRUE NONE REDUCE SETITEM SETITEMS SHORT_BINUNICODE STACK_GLOBAL STOP TUPLE TUPLE1"
    " TUPLE2 TUPLE3"
)


def read(data: bytes) -> metadata_entries.MetadataEntry:
    return unpickle_metadata(data, file=".metadata")


def make_metadata() -> Metadata:
    """Metadata of a tensor of two chunks, a scalar and an object."""
    rows = [torch.Size([0, 0]), torch.Size([300, 0])]
    chunks = [ChunkStorageMetadata(row, torch.Size([300, 70000])) for row in rows]
    places = {
        MetadataIndex("w", row, i): _StorageInfo(f"__{i}_0.distcp", i << 40, 5000)
        for i, row in enumerate(rows)
    }
    scalar = ChunkStorageMetadata(torch.Size([]), torch.Size([]))
    return Metadata(
        {
            "w": TensorStorageMetadata(
                TensorProperties(torch.bfloat16), torch.Size([600, 70000]), chunks
            ),
            "s": TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([]), [scalar]),
            "n": BytesStorageMetadata(),
        },
        {"w": ("w",), "s": ("s",), "n": ("n", 0)},
        places
        | {
            MetadataIndex("s", torch.Size([])): _StorageInfo("__0_0.distcp", 9000, 800),
            MetadataIndex("n"): _StorageInfo("__0_0.distcp", 5000, 700),
        },
        StorageMeta(Path("/checkpoints/step-7"), "save", "load"),
        "1.0.0",
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The metadata file of a small checkpoint."""
    path = tmp_path_factory.mktemp("checkpoint")
    save_state(path, {"model": {"w": indexed_tensor((4, 3)), "b": indexed_tensor(())}, "step": 7})
    return (path / ".metadata").read_bytes()


def describe(entry: Any) -> Any:
    """Records, and torch's objects that they stand for, as the same plain values."""
    if isinstance(entry, dict):
        return [(describe(key), describe(value)) for key, value in entry.items()]
    if isinstance(entry, list):
        return [describe(value) for value in entry]
    if isinstance(entry, tuple):
        return tuple(entry)
    if isinstance(entry, os.PathLike):
        return os.fspath(entry)
    if isinstance(entry, TensorProperties | metadata_entries.PropertiesEntry):
        return entry.dtype
    if type(entry).__module__.startswith(("dcp_reshard", "torch.distributed")):
        names = getattr(type(entry), "__slots__", None)
        names = sorted(vars(entry)) if names is None else names
        fields = {name: describe(getattr(entry, name)) for name in names}
        return {name: field for name, field in fields.items() if field is not None}
    return entry


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_field_of_torchs_metadata_is_read(protocol: int) -> None:
    """The records say what torch's own objects say, in each protocol and in the same order."""
    metadata = make_metadata()
    entry = read(pickle.dumps(metadata, protocol=protocol))
    expected = describe(metadata)
    assert describe(entry) == expected
    assert [len(t.chunks) for f, t in entry.state_dict_metadata.items() if f != "n"] == [2, 1]


def test_what_torch_writes_is_read(saved: bytes) -> None:
    """The records of a checkpoint saved by torch are those that torch reads itself."""
    assert describe(read(saved)) == describe(pickle.loads(saved))


@pytest.mark.parametrize("protocol", [0, 1])
def test_old_protocols_are_refused(protocol: int) -> None:
    """Text protocols, which no version of DCP has written."""
    with pytest.raises(CheckpointFormatError, match="protocol 2 to 5"):
        read(pickle.dumps(make_metadata(), protocol=protocol))


@pytest.mark.row("B02")
def test_every_cut_file_is_refused(saved: bytes) -> None:
    """A file that ends early is an error at every length, the empty one included."""
    for length in range(len(saved)):
        with pytest.raises(CheckpointFormatError, match=r"file '\.metadata'") as info:
            read(saved[:length])
        assert info.value.file == ".metadata"


@pytest.mark.row("B03")
@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_an_error_of_ours_or_harmless(saved: bytes, bit: int) -> None:
    """No flip raises anything else, or takes more than 64 MiB."""
    if bit == 7:
        # It makes the largest of lengths, counts and indices; tracing costs ten times the reading.
        tracemalloc.start()
    try:
        for place in range(len(saved)):
            data = bytearray(saved)
            data[place] ^= 1 << bit
            with contextlib.suppress(ReshardError):
                read(bytes(data))
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("stray", [b"\0", b".", b"N.", b"(((("])
def test_bytes_behind_the_pickle_are_refused(saved: bytes, stray: bytes) -> None:
    """A second pickle, or anything, behind the first, be it in the same frame or not."""
    framed = saved[:3] + (len(saved) + len(stray) - 11).to_bytes(8, "little") + saved[11:]
    for data in (saved + stray, framed + stray, saved + saved):
        with pytest.raises(CheckpointFormatError, match="stray bytes after the pickle"):
            read(data)


@pytest.mark.parametrize("opcode", pickletools.opcodes, ids=lambda opcode: opcode.name)
def test_opcodes_that_metadata_does_not_need_are_refused(opcode: pickletools.OpcodeInfo) -> None:
    """Persistent ids, extension codes, buffers, text, and all else that the list does not have."""
    if opcode.name in ALLOWED.split():
        return
    code = opcode.code.encode("latin1")
    with pytest.raises(UnsafeCheckpointError, match=re.escape(repr(code))):
        read(b"\x80\x02" + code + bytes(8) + b"\n\n.")


NAMES = [
    ("os", "system"),
    ("posix", "system"),
    ("builtins", "eval"),
    ("builtins", "getattr"),
    ("torch", "load"),
    ("torch", "float32.is_complex"),
    ("torch", "Tensor"),
    ("torch.storage", "_load_from_bytes"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch.distributed.checkpoint.metadata", "Metadata.__init__"),
    ("torch.distributed.checkpoint.metadata", "os"),
    ("dcp_reshard.unpickle", "MetadataEntry"),
    ("collections", "defaultdict"),
    ("copyreg", "_reconstructor"),
    ("this", "s"),
]


ENUM = rb"(ctorch\.distributed\.checkpoint\.metadata\n_MEM_FORMAT_ENCODING\nq.)"
MEMBER = b"X\x17\0\0\0TORCH_CONTIGUOUS_FORMAT\x86"


def test_a_member_of_an_enum_may_be_named_by_getattr() -> None:
    """Python 3.11.0 to 3.11.3 pickles it so; other versions call the enum with a number."""
    data = pickle.dumps(make_metadata(), 3)
    by_number = re.compile(ENUM + rb"K\x00\x85", re.DOTALL)
    by_name = by_number.sub(rb"cbuiltins\ngetattr\n\1" + MEMBER, data, count=1)
    assert b"getattr" in by_name
    assert read(by_name).version == "1.0.0"


@pytest.mark.parametrize("first", [b"N", b"ctorch\nfloat32\n", b"cbuiltins\ngetattr\n"])
def test_getattr_of_anything_else_is_refused(first: bytes) -> None:
    """No attribute is looked up for a pickle, neither of a dtype nor of `getattr` itself."""
    with pytest.raises(UnsafeCheckpointError, match=r"`builtins\.getattr`"):
        read(b"\x80\x03cbuiltins\ngetattr\n" + first + MEMBER + b"R.")


@pytest.mark.parametrize("form", ["GLOBAL", "STACK_GLOBAL"])
@pytest.mark.parametrize(("module", "name"), NAMES)
def test_other_names_are_refused_and_named(
    form: str, module: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is imported or called, and the message says which name it was."""
    monkeypatch.chdir(tmp_path)
    if form == "GLOBAL":
        called = f"c{module}\n{name}\n".encode()
    else:
        called = b"".join(b"\x8c" + bytes([len(s)]) + s.encode() for s in (module, name)) + b"\x93"
    argument = b"\x8c\x0etouch ./marker"
    with pytest.raises(UnsafeCheckpointError, match=re.escape(f"`{module}.{name}`")):
        read(b"\x80\x04" + called + argument + b"\x85R.")
    assert list(tmp_path.iterdir()) == []
    assert "this" not in sys.modules
