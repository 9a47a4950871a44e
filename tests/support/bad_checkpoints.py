"""Checkpoints with something wrong, each under the number of its row in the table of bad inputs.

A `Case` is made from what two ranks of stock `dcp.save` wrote (`save_good`), by its `damage`; what
a load must do about it is `error` and `match`, or to load what was saved. `METADATA_CASES` are
those whose metadata are wrong, `FILE_CASES` (of `bad_files`) those whose files are.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dcp_reshard import (
    CheckpointFormatError,
    ChunkCoverageError,
    ReshardError,
    StorageError,
    UnsafeCheckpointError,
)
from tests.support.checkpoints import save_world
from tests.support.tensors import indexed_tensor

__all__ = [
    "FIRST",
    "MARKER",
    "METADATA_CASES",
    "SECOND",
    "Case",
    "change_metadata",
    "find_place",
    "make_state",
    "save_good",
]

FIRST, SECOND = "__0_0.distcp", "__1_0.distcp"


@dataclass(frozen=True, slots=True)
class Case:
    """One bad (or merely odd) checkpoint, and what a load must do with it."""

    row: str
    """Number of the row."""

    name: str
    """What is wrong."""

    damage: Callable[[Path], object]
    """Makes it so."""

    error: type[ReshardError] | None = None
    """What the load raises; None if it loads what was saved."""

    match: str = ""
    """What its message says, as a regular expression."""

    options: dict[str, Any] = field(default_factory=dict)
    """For `ReaderOptions`."""


def make_state(rank: int = 0) -> dict[str, Any]:
    """The state of a rank: rows of `w` if there are several ranks, all of it otherwise."""
    w = indexed_tensor((7, 3))
    if dist.is_initialized():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        w = distribute_tensor(w, mesh, [Shard(0)], src_data_rank=None)
    return {"w": w, "v": indexed_tensor((5,), torch.int64), "note": "text", "opt": {"lr": 0.5}}


def save_good(path: Path) -> Path:
    """What two ranks save: rows 0 to 3 of `w` in the first file, 4 to 6 in the second."""
    save_world(path, 2, make_state)
    return path


def change_metadata(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """A damage to the metadata, done to torch's own objects."""

    def damage(path: Path) -> None:
        metadata = pickle.loads((path / ".metadata").read_bytes())
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))

    return damage


def find_place(metadata: Metadata, fqn: str, row: int = 0) -> Any:
    """The storage entry of an object, or of the chunk of `w` or `v` that starts at a row."""
    for index, place in metadata.storage_data.items():
        if index.fqn == fqn and (index.offset is None or index.offset[0] == row):
            return place
    raise KeyError(fqn, row)


def _set_place(fqn: str, **values: Any) -> Callable[[Path], None]:
    def change(metadata: Metadata) -> None:
        place = find_place(metadata, fqn)
        for name, value in values.items():
            setattr(place, name, value)

    return change_metadata(change)


def _set_chunk(
    number: int = 1, *, offsets: Any = None, sizes: Any = None, follow: bool = True
) -> Callable[[Path], None]:
    """Change a chunk of `w`; its storage entry follows unless told otherwise."""

    def change(metadata: Metadata) -> None:
        chunk = metadata.state_dict_metadata["w"].chunks[number]
        for index in list(metadata.storage_data):
            if follow and index.fqn == "w" and index.offset == chunk.offsets:
                place = metadata.storage_data.pop(index)
                new = MetadataIndex("w", offsets or chunk.offsets, number)
                metadata.storage_data[new] = place
        chunk.offsets = chunk.offsets if offsets is None else offsets
        chunk.sizes = chunk.sizes if sizes is None else sizes

    return change_metadata(change)


def _drop_chunk(metadata: Metadata) -> None:
    chunk = metadata.state_dict_metadata["w"].chunks.pop()
    del metadata.storage_data[MetadataIndex("w", chunk.offsets, 1)]


def _twice(metadata: Metadata) -> None:
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks.append(ChunkStorageMetadata(chunks[0].offsets, chunks[0].sizes))


def _cyclic(metadata: Metadata) -> None:
    loop: list[Any] = []
    loop.append(loop)
    metadata.planner_data = {"w": loop, "v": ("v", 10**9), "other": {"deep": loop}}


def _pickled(*opcodes: bytes) -> Callable[[Path], object]:
    data = b"\x80\x04" + b"".join(opcodes) + b"."
    return lambda path: (path / ".metadata").write_bytes(data)


def _append(extra: bytes) -> Callable[[Path], object]:
    def damage(path: Path) -> None:
        with (path / ".metadata").open("ab") as file:
            file.write(extra)

    return damage


def _cut(name: str, length: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / name, length)


MARKER = "was_run"
_SYSTEM = b"cposix\nsystem\n(X\x0d\x00\x00\x00touch was_runtR"
_BAD_NUMBERS: dict[str, Any] = {
    "negative": -1,
    "huge": 1 << 70,
    "bool": True,
    "float": 1.5,
    "str": "1",
    "none": None,
}
_BAD_NAMES = {
    "parent": "../__0_0.distcp",
    "absolute": "/etc/passwd",
    "folder": "sub/__0_0.distcp",
    "backslash": "sub\\__0_0.distcp",
    "nul": "__0_0.distcp\0",
    "empty": "",
    "dot": ".",
    "dots": "..",
    "drive": "C:x",
    "url": "http://host/x",
    "long": "x" * 5000,
    "newline": "a\nb",
}
_Format, _Unsafe = CheckpointFormatError, UnsafeCheckpointError

METADATA_CASES = [
    Case("B01", "missing", lambda p: (p / ".metadata").unlink(), StorageError, "__0_0.distcp"),
    Case("B02", "empty", _cut(".metadata", 0), _Format, "does not start like a pickle"),
    Case("B02", "cut", _cut(".metadata", 900), _Format, "byte"),
    Case("B04", "global", _pickled(_SYSTEM), _Unsafe, "`posix.system`"),
    Case("B04", "dotted", _pickled(b"\x8c\x05torch\x8c\x0cSize.__new__\x93"), _Unsafe, "Size.__"),
    Case("B04", "persistent id", _pickled(b"NQ"), _Unsafe, "opcode b'Q'"),
    Case("B04", "extension code", _pickled(b"\x82\x01"), _Unsafe, "opcode"),
    Case("B05", "tuple as key", _pickled(b"}K\x01K\x02K\x03\x87Ns"), _Format, "unhashable"),
    Case("B05", "deep key", _pickled(b"})" + b"\x85" * 10**6 + b"Ns"), _Unsafe, "tuples in tuples"),
    Case("B04", "trailing bytes", _append(b"abc"), _Format, "3 stray bytes"),
    *(
        Case("B06", f"{name} {what}", _set_place("v", **{what: value}), _Format, "`v`|missing")
        for name, value in _BAD_NUMBERS.items()
        for what in ("offset", "length")
    ),
    Case("B06", "sizes", _set_chunk(sizes=torch.Size((1 << 62, 3))), _Format, "outside"),
    Case("B07", "version", change_metadata(lambda m: setattr(m, "version", "9.0")), _Format, "9.0"),
    Case("B08", "rank", _set_chunk(sizes=torch.Size((3,))), _Format, "`w`.*2 dims"),
    Case("B09", "out of bounds", _set_chunk(sizes=torch.Size((4, 3))), _Format, "outside"),
    Case("B10", "hole", change_metadata(_drop_chunk), ChunkCoverageError, r"4:7.*no chunk"),
    Case("B11", "overlap", _set_chunk(0, sizes=torch.Size((5, 3))), ChunkCoverageError, "2 chunks"),
    Case("B12", "twice", change_metadata(_twice), _Format, "not stored"),
    Case("B14", "no entry", _set_chunk(offsets=torch.Size((3, 0)), follow=False), _Format, "`w`"),
    Case(
        "B14",
        "no chunk",
        change_metadata(lambda m: m.state_dict_metadata["w"].chunks.pop()),
        _Format,
        "`w`.*no chunk",
    ),
    Case("B15", "one range", _set_place("v", offset=0), _Format, "share bytes"),
    Case("B16", "zero", _set_place("v", length=0), _Format, "`v`"),
    Case("B16", "outside", _set_place("v", offset=1 << 40), StorageError, "`v`.*cut"),
    Case("B16", "huge", _set_place("v", length=1 << 50, offset=1 << 20), StorageError, "cut"),
    *(
        Case("B17", name, _set_place("v", relative_path=value), _Unsafe, "bare name")
        for name, value in _BAD_NAMES.items()
    ),
    Case("B17", "bytes", _set_place("v", relative_path=b"x"), _Format, ""),
    Case("B37", "transform", _set_place("v", transform_descriptors=["zstd"]), _Format, "transform"),
    Case("B40", "planner data", change_metadata(_cyclic)),
]
