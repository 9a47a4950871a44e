"""Checkpoints whose bytes are not those that were saved: told, or harmless, never loaded."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import dcp_reshard
from dcp_reshard import (
    CheckpointFormatError,
    CorruptRecordError,
    ReaderOptions,
    ReshardError,
    ReshardLoadPlanner,
    ReshardStorageReader,
    StorageError,
)
from dcp_reshard.metadata import read_catalog
from dcp_reshard.storage import LocalSource
from tests.support.checkpoints import save_state
from tests.support.failures import catch_failure, find_failures
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot

DATA = "__0_0.distcp"
TENSORS = {
    "large": indexed_tensor((300, 64)),
    "small": indexed_tensor((6, 5)),
    "turned": indexed_tensor((64, 200), torch.float64).t(),
}
OBJECTS = {"lr": 0.5, "name": "adam"}


def make_dest() -> dict[str, Any]:
    state: dict[str, Any] = {name: torch.zeros_like(t) for name, t in TENSORS.items()}
    fill_with_sentinel(state)
    return state | {"options": {"lr": 0.0, "name": ""}}


def load(path: Path, **options: Any) -> dict[str, Any]:
    """Load all of it in this process."""
    state = make_dest()
    dcp_reshard.load(state, path, no_dist=True, options=ReaderOptions(**options))
    return state


def check_loaded(state: dict[str, Any], where: str = "") -> None:
    check_same(snapshot(state), TENSORS, where=where)
    assert state["options"] == OBJECTS


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    save_state(path, {**TENSORS, "options": OBJECTS})
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(whole, tmp_path / "copy")


def item_of(path: Path, key: str) -> tuple[int, int]:
    """Bytes of the item of a tensor or an object."""
    catalog = read_catalog(LocalSource(path))
    if key in catalog.objects:
        item = catalog.objects[key]
        return item.start, item.start + item.length
    stored = catalog.tensors[key]
    return int(stored.starts[0]), int(stored.starts[0] + stored.lengths[0])


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(at)
        (byte,) = stream.read(1)
        stream.seek(at)
        stream.write(bytes([byte ^ 0x10]))


def element_byte(path: Path, key: str) -> int:
    """A byte in the middle of a tensor's elements."""
    start, end = item_of(path, key)
    raw = TENSORS[key].t() if key == "turned" else TENSORS[key]
    elements = raw.contiguous().numpy().tobytes()
    contents = (path / DATA).read_bytes()[start:end]
    return start + contents.index(elements) + len(elements) // 2


@pytest.mark.row("B22")
@pytest.mark.parametrize("key", TENSORS)
def test_a_flipped_bit_in_a_tensor_is_found(path: Path, key: str) -> None:
    """The error names tensor, file, bytes and both checksums, however the tensor is read."""
    flip(path / DATA, element_byte(path, key))
    error = catch_failure(lambda: load(path))
    assert isinstance(error, CorruptRecordError)
    assert (error.fqn, error.file) == (key, DATA)
    start, end = item_of(path, key)
    assert error.start is not None
    assert error.end is not None
    assert start <= error.start < error.end <= end
    assert all(word in str(error) for word in (f"`{key}`", DATA, "CRC-32", "recorded"))
    # Without verification nothing is noticed: it was the checksum that told.
    state = load(path, verify="off")
    assert int((state[key] != TENSORS[key]).sum()) == 1


def test_a_flipped_bit_in_an_object_is_found(path: Path) -> None:
    """The error names the key, and no tensor has been written."""
    start, end = item_of(path, "options.name")
    contents = (path / DATA).read_bytes()[start:end]
    flip(path / DATA, start + contents.index(b"adam"))
    state = make_dest()
    error = catch_failure(lambda: dcp_reshard.load(state, path, no_dist=True))
    assert isinstance(error, CorruptRecordError)
    assert (error.fqn, error.file) == ("options.name", DATA)
    check_same(snapshot(state), snapshot(make_dest()))


@pytest.mark.row("B23")
def test_no_flip_in_a_container_loads_wrongly(path: Path) -> None:
    """A flip in any byte of a small tensor's container is an error, or changes no value."""
    start, end = item_of(path, "small")
    state = {"small": torch.zeros(6, 5)}
    reader = ReshardStorageReader(path, options=ReaderOptions(threads=1))

    def load_small() -> None:
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner(), no_dist=True)

    told = 0
    for at in range(start, end, 3):
        flip(path / DATA, at)
        state["small"].fill_(-1)
        failures = find_failures(load_small)
        if failures:
            assert isinstance(failures[0], CheckpointFormatError), at
            assert failures[0].fqn == "small"
            told += 1
        else:
            assert torch.equal(state["small"], TENSORS["small"]), at
        flip(path / DATA, at)
    # Padding, dates and a serial number take up the rest.
    assert told > (end - start) // 3 // 4


@pytest.mark.row("B03")
def test_no_flip_in_the_metadata_loads_wrongly(path: Path) -> None:
    """A flip in any byte of ``.metadata`` is an error of this package, or changes no value."""
    for at in range(0, (path / ".metadata").stat().st_size, 5):
        flip(path / ".metadata", at)
        state = make_dest()
        load_all = partial(dcp_reshard.load, state, path, no_dist=True)
        failures = find_failures(partial(load_all, options=ReaderOptions(threads=1)))
        if failures:
            assert isinstance(failures[0], ReshardError), at
        else:
            check_loaded(state, where=f"byte {at}")
        flip(path / ".metadata", at)


@pytest.mark.parametrize("left", [0, 1, 1000, -1000, -1])
def test_cut_data_files(path: Path, left: int) -> None:
    """A data file that ends too early is told before anything is written, with both sizes."""
    contents = (path / DATA).read_bytes()
    (path / DATA).write_bytes(contents[:left])
    state = make_dest()
    error = catch_failure(lambda: dcp_reshard.load(state, path, no_dist=True))
    assert isinstance(error, StorageError)
    assert error.file == DATA
    assert f"has {len(contents[:left])} bytes" in str(error)
    check_same(snapshot(state), snapshot(make_dest()))


def rewrite(path: Path, change: Callable[[Metadata], None]) -> None:
    """Change the metadata that stock wrote, with stock's own classes."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def turn_shape(metadata: Metadata) -> None:
    entry = metadata.state_dict_metadata["small"]
    entry.size = torch.Size((5, 6))
    entry.chunks[0].sizes = torch.Size((5, 6))


def change_dtype(metadata: Metadata) -> None:
    metadata.state_dict_metadata["small"].properties.dtype = torch.int32


def swap_places(metadata: Metadata) -> None:
    places = metadata.storage_data
    small, large = (next(i for i in places if i.fqn == name) for name in ("small", "large"))
    places[small], places[large] = places[large], places[small]


def take_an_object(metadata: Metadata) -> None:
    places = metadata.storage_data
    small, item = (next(i for i in places if i.fqn == n) for n in ("small", "options.lr"))
    places[small], places[item] = places[item], places[small]


@pytest.mark.parametrize("change", [turn_shape, change_dtype, swap_places, take_an_object])
def test_metadata_that_disagree_with_the_files(
    path: Path, change: Callable[[Metadata], None]
) -> None:
    """The file's own description of a tensor must be that of the metadata; nothing is written."""
    rewrite(path, change)
    state = {"small": torch.full((6, 5), -1.0)}
    if change is turn_shape:
        state["small"] = torch.full((5, 6), -1.0)
    elif change is change_dtype:
        state["small"] = torch.full((6, 5), -1, dtype=torch.int32)
    before = state["small"].clone()
    error = catch_failure(lambda: dcp_reshard.load(state, path, no_dist=True))
    assert isinstance(error, CheckpointFormatError)
    assert (error.fqn, error.file) == ("small", DATA)
    assert torch.equal(state["small"], before)
