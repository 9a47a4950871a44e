"""What is fuzzed: functions of bytes that must end well, or with an error of ours.

Each target parses its input as the package would, and checks what it accepts as far as that can be
known. Anything else that is raised is a finding. `SEEDS` gives inputs to begin with.
"""

from __future__ import annotations

import io
import pickle
import struct
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from dcp_reshard import (
    Catalog,
    ReaderOptions,
    ReshardError,
    ReshardLoadPlanner,
    ReshardStorageReader,
    RetryPolicy,
    StorageError,
)
from dcp_reshard.box import Box
from dcp_reshard.catalog_builder import build_catalog
from dcp_reshard.container import Record, read_directory, read_record
from dcp_reshard.local_files import check_file_name
from dcp_reshard.metadata import read_catalog
from dcp_reshard.objects import load_data
from dcp_reshard.payload import find_tensor
from dcp_reshard.pickle_data import interpret_pickle
from dcp_reshard.pickle_extent import check_extent
from dcp_reshard.repair import repair_catalog
from dcp_reshard.storage import ByteSource
from dcp_reshard.unpickle import unpickle_metadata
from tests.support.bad_checkpoints import make_state, save_good
from tests.support.bad_files import object_item
from tests.support.checkpoints import save_world
from tests.support.items import reader, saved_bytes
from tests.support.strided import fsdp_over_tp
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot

__all__ = ["SEEDS", "TARGETS"]

_LENGTH = struct.Struct("<L")


def fuzz_metadata(data: bytes) -> None:
    """A metadata file: what is accepted is a sound catalog of bare file names."""
    try:
        catalog = build_catalog([unpickle_metadata(data, file=".metadata")], digest="")
        for stored in catalog.tensors.values():
            whole = Box.full(stored.shape)
            assert all(whole.contains(stored.chunks[i]) for i in range(len(stored.chunks)))
            stored.check_coverage()
    except ReshardError:
        return
    assert all(check_file_name(name) == name for name in catalog.files)


def fuzz_container(data: bytes) -> None:
    """An item's container: what is accepted is what Python's own reader of archives finds."""
    try:
        records = read_directory(len(data), reader(data))
        for record in records:
            read_record(record, reader(data))
    except ReshardError:
        return
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found = [(i.filename.partition("/")[2], i.file_size, i.CRC) for i in archive.filelist]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, UnicodeDecodeError):
        return  # it is more particular about dates and versions, which say nothing of contents
    assert found == [(record.name, record.length, record.crc) for record in records]


def fuzz_pickle(data: bytes) -> None:
    """The pickle of a tensor: a payload lies inside of its record."""
    records = _records()
    try:
        value = interpret_pickle(data)
        check_extent(value, max_depth=64, max_values=10**6)
        payload = find_tensor(value, records)
    except ReshardError:
        return
    if payload is not None and 0 not in payload.shape:
        last = sum(st * (s - 1) for st, s in zip(payload.strides, payload.shape, strict=True))
        end = payload.start + last + payload.dtype.itemsize
        assert payload.record.start <= payload.start
        assert end <= payload.record.start + payload.record.length


def fuzz_object(data: bytes) -> None:
    """The pickle of an object: what is loaded is as large as its pickle, and nothing is run."""
    try:
        load_data(memoryview(object_item(data, ("data/0", bytes(64)))))
    except ReshardError:
        return


def fuzz_load(data: bytes) -> None:
    """A whole checkpoint, of a metadata file and a data file: right or an error.

    If the metadata are those that were saved, what is loaded is what was saved.
    """
    length = _LENGTH.unpack(data[:4])[0] if len(data) >= 4 else 0
    metadata, contents = data[4 : 4 + length], data[4 + length :]
    state = make_state() | {"note": None, "opt": {"lr": None}}
    fill_with_sentinel(state)
    retry = RetryPolicy(tries=1)
    options = ReaderOptions(threads=1, retry=retry, verify="required", memory_budget=2**18)
    checkpoint = _InMemory({".metadata": metadata, "__0_0.distcp": contents})
    load, planner = ReshardStorageReader(checkpoint, options=options), ReshardLoadPlanner()
    try:
        # The steps of `dcp.load`, without its logging, which takes as long as they do.
        found = load.read_metadata()
        planner.set_up_planner(state, found, True)
        load.set_up_storage_reader(found, True)
        plan = load.prepare_local_plan(planner.create_local_plan())
        [plan] = load.prepare_global_plan(planner.create_global_plan([plan]))
        load.read_data(planner.finish_plan(plan), planner).wait()
    except ReshardError:
        return
    if metadata == _files()[".metadata"]:
        check_same(snapshot(state), snapshot(make_state()))


def fuzz_repair(data: bytes) -> None:
    """The metadata of a checkpoint whose boxes torch recorded wrongly: sound, or no catalog."""
    source = _InMemory(_misrecorded() | {".metadata": data})
    try:
        catalog = source.read_catalog(source)
        for stored in catalog.tensors.values():
            stored.check_coverage()
    except ReshardError:
        return


TARGETS: dict[str, Callable[[bytes], None]] = {
    "metadata": fuzz_metadata,
    "container": fuzz_container,
    "pickle": fuzz_pickle,
    "object": fuzz_object,
    "load": fuzz_load,
    "repair": fuzz_repair,
}
"""The functions, by name."""


@dataclass(slots=True)
class _InMemory:
    """A checkpoint in memory."""

    files: dict[str, bytes] = field(default_factory=dict)

    def open(self) -> ByteSource:
        return self

    def read_catalog(self, source: ByteSource) -> Catalog:
        return repair_catalog(read_catalog(source), source)

    def names(self) -> list[str]:
        return sorted(self.files)

    def size(self, name: str) -> int:
        if check_file_name(name) not in self.files:
            raise StorageError(f"file {name!r}: not there", file=name)
        return len(self.files[name])

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self.size(name)
        for buffer in buffers:
            part = self.files[name][offset : offset + buffer.nbytes]
            if len(part) < buffer.nbytes:
                raise StorageError(f"file {name!r}: ends before byte {offset}", file=name)
            buffer[:] = part
            offset += buffer.nbytes

    def close(self) -> None:
        return None


@cache
def _item() -> bytes:
    return saved_bytes(indexed_tensor((4, 4)))


@cache
def _records() -> dict[str, Record]:
    return {record.name: record for record in read_directory(len(_item()), reader(_item()))}


@cache
def _files() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.checkpoint.save(make_state(), checkpoint_id=folder)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


@cache
def _misrecorded() -> dict[str, bytes]:
    def make(rank: int) -> dict[str, Any]:
        mesh = init_device_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
        return {f"w{rows}": fsdp_over_tp(indexed_tensor((rows, 2)), mesh) for rows in (7, 8)}

    with tempfile.TemporaryDirectory() as folder:
        save_world(folder, 6, make)
        return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def _metadata_seeds() -> list[bytes]:
    with tempfile.TemporaryDirectory() as folder:
        save_good(Path(folder, "checkpoint"))
        metadata = pickle.loads(Path(folder, "checkpoint", ".metadata").read_bytes())
    return [pickle.dumps(metadata, protocol) for protocol in (2, 3, 4, 5)]


def _record(item: bytes, name: str = "data.pkl") -> bytes:
    [record] = [r for r in read_directory(len(item), reader(item)) if r.name == name]
    return item[record.start : record.start + record.length]


_VALUES: list[Any] = [
    {"lr": 0.5, "betas": (0.9, 0.95), "names": ["a", "b"], "none": None, "flag": True},
    {1, 2, 3},
    torch.Size((1, 2)),
    [torch.float32, torch.device("cpu"), b"bytes", bytearray(b"more"), 1j, 2**70],
    torch.arange(16, dtype=torch.float32),
    {"nested": {"tensor": torch.nn.Parameter(torch.ones(4, 4)), (1, "a"): [[[]]]}},
]


def _load_seeds() -> list[bytes]:
    metadata, contents = _files()[".metadata"], _files()["__0_0.distcp"]
    return [_LENGTH.pack(len(metadata)) + metadata + contents]


SEEDS: dict[str, Callable[[], list[bytes]]] = {
    "metadata": _metadata_seeds,
    "container": lambda: [_item(), saved_bytes({"lr": 0.5}), saved_bytes(torch.zeros(0))],
    "pickle": lambda: [
        _record(saved_bytes(tensor))
        for tensor in (
            indexed_tensor((4, 4)),
            indexed_tensor((4, 4)).t()[1:],
            torch.zeros(2, 2, dtype=torch.uint16),
            torch.nn.Parameter(torch.ones(3)),
        )
    ],
    "object": lambda: [_record(saved_bytes(value)) for value in _VALUES],
    "load": _load_seeds,
    "repair": lambda: [_misrecorded()[".metadata"]],
}
"""Inputs to begin with, by the name of the target."""
