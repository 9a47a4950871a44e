"""Bad inputs that are no single damage: what is asked for, several saves, names, and sizes."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import dcp_reshard
from dcp_reshard import (
    CheckpointFormatError,
    MissingTensorError,
    PlanError,
    ReaderOptions,
    ReshardError,
    RetryPolicy,
    ShapeMismatchError,
    StorageError,
)
from dcp_reshard.box import Box
from dcp_reshard.layout import LocalShard, TensorLayout
from tests.support.bad_checkpoints import SECOND, change_metadata, find_place, make_state, save_good
from tests.support.checkpoints import check_world_loads, save_state, save_world
from tests.support.failures import catch_failure, find_failures
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot

ONCE = ReaderOptions(retry=RetryPolicy(tries=1))


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_good(tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "checkpoint")


def load(state: dict[str, Any], path: Path, **options: Any) -> dcp_reshard.LoadReport:
    return dcp_reshard.load(state, path, no_dist=True, **{"options": ONCE} | options)


def make_dest() -> dict[str, Any]:
    state = make_state()
    fill_with_sentinel(state)
    return state


@pytest.mark.parametrize("world", [1, 3])
def test_b13_empty_chunks_are_fine(tmp_path: Path, world: int) -> None:
    """Ranks without a row store nothing, or a chunk of no rows, and all loads back."""
    save_world(tmp_path, 9, make_state)
    check_world_loads(world, make_state, lambda state: load(state, tmp_path))


def test_b20_a_file_cut_at_any_length(path: Path) -> None:
    """A data file cut at every 64th byte is an error that names it, before anything is written."""
    size = (path / SECOND).stat().st_size
    for length in reversed(range(0, size, 64)):
        os.truncate(path / SECOND, length)
        state = make_dest()
        before = snapshot(state)
        error = catch_failure(lambda state=state: load(state, path))
        assert isinstance(error, StorageError), length
        assert error.file == SECOND
        assert error.fqn is not None
        check_same(snapshot(state), before)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        pytest.param({"w": torch.zeros(7, 4)}, ShapeMismatchError, r"\(7, 3\).*\(7, 4\)", id="B33"),
        pytest.param({"note": torch.zeros(3)}, PlanError, "not a tensor", id="B34-object"),
        pytest.param({"v": "text"}, PlanError, "the checkpoint has a tensor", id="B34-tensor"),
        pytest.param({"x": torch.zeros(1)}, MissingTensorError, "`x`", id="B38"),
    ],
)
def test_states_that_do_not_fit(
    path: Path, change: dict[str, Any], error: type[ReshardError], match: str
) -> None:
    """A state dict that asks for something else is an error that says both, and writes nothing."""
    state = make_dest() | change
    before = snapshot(state)
    found = catch_failure(lambda: load(state, path))
    with pytest.raises(error, match=match):
        raise found
    check_same(snapshot(state), before)


def test_b38_keys_that_are_not_asked_for_are_reported(path: Path) -> None:
    """What only the checkpoint has is in the report."""
    state = {"v": torch.zeros(5, dtype=torch.int64)}
    assert load(state, path).unexpected == ("note", "opt.lr", "w")


NAMES = ["a.b", "a..b", ".", "größe", "层.0", "x" * 4000, "with space", "per%cent", "quo'te", "`"]


def test_b39_names_of_every_kind(tmp_path: Path) -> None:
    """Names with dots, of any script and of 4 KB come back; longer ones are refused."""
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(NAMES)}
    save_state(tmp_path / "fine", state)
    loaded = {name: torch.zeros(2) for name in NAMES}
    load(loaded, tmp_path / "fine")
    check_same(snapshot(loaded), snapshot(state))
    save_state(tmp_path / "long", {"x" * 5000: torch.zeros(2)})
    error = catch_failure(lambda: load({"x" * 5000: torch.zeros(2)}, tmp_path / "long"))
    assert isinstance(error, CheckpointFormatError)
    assert len(str(error)) < 500


def test_b43_files_of_two_saves(good: Path, path: Path) -> None:
    """Without a manifest nothing tells that a file is of another save; the report says as much."""

    def make_other(rank: int) -> dict[str, Any]:
        state = make_state()
        return state | {"w": make_state(rank)["w"].add(100), "v": state["v"] + 100}

    save_world(path.parent / "other", 2, make_other)
    shutil.copy(path.parent / "other" / SECOND, path / SECOND)
    report = dcp_reshard.verify(path)
    assert report.ok
    assert report.save_identity == "unproven"
    assert "no manifest" in str(report)


@pytest.mark.parametrize("damage", ["none", "incomplete", "beside"])
def test_b44_metadata_per_rank(tmp_path: Path, damage: str) -> None:
    """Metadata files per rank are merged if all are there; beside a global one none counts."""
    save_world(tmp_path, 2, make_state, use_collectives=False)
    state = make_dest()
    if damage == "incomplete":
        (tmp_path / "__0.metadata").rename(tmp_path / "__2.metadata")
        error = catch_failure(lambda: load(state, tmp_path))
        with pytest.raises(CheckpointFormatError, match=r"`__0\.metadata` is missing"):
            raise error
        return
    if damage == "beside":
        save_world(tmp_path / "global", 2, make_state)
        for file in (tmp_path / "global").iterdir():
            shutil.copy(file, tmp_path)
        (tmp_path / "__0.metadata").write_bytes(b"not even a pickle")
    load(state, tmp_path)
    check_same(snapshot(state), snapshot(make_state()))


def test_b45_a_tensor_of_a_trillion_elements(path: Path) -> None:
    """Of a tensor of 2**40 elements in a sparse file, a few are loaded at the cost of a few."""
    far = 1 << 40

    def grow(metadata: Metadata) -> None:
        place = find_place(metadata, "v")
        metadata.state_dict_metadata["v"] = TensorStorageMetadata(
            TensorProperties(dtype=torch.int64),
            torch.Size((far,)),
            [
                ChunkStorageMetadata(torch.Size((0,)), torch.Size((5,))),
                ChunkStorageMetadata(torch.Size((5,)), torch.Size((far - 5,))),
            ],
        )
        index = MetadataIndex("v", torch.Size((5,)), 1)
        metadata.storage_data[index] = type(place)(SECOND, 1 << 20, 8 * far)

    change_metadata(grow)(path)
    os.truncate(path / SECOND, (1 << 20) + 8 * far)
    dest = torch.zeros(3, dtype=torch.int64)
    layout = TensorLayout("v", (far,), torch.int64, (LocalShard(Box((1,), (3,)), dest),))
    report = load({"v": layout}, path)
    assert dest.tolist() == indexed_tensor((5,), torch.int64)[1:4].tolist()
    assert report.bytes_read < 20_000


def test_metadata_of_random_bits_never_takes_long(good: Path) -> None:
    """Opcodes put together at random are refused, whatever they do to each other."""
    data = (good / ".metadata").read_bytes()
    pieces = [data[i : i + 16] for i in range(0, len(data), 16)]
    generator = torch.Generator().manual_seed(7)
    for _ in range(50):
        order = torch.randint(len(pieces), (200,), generator=generator).tolist()
        shuffled = data[:64] + b"".join(pieces[i] for i in order) + b"."
        with pytest.raises(CheckpointFormatError):
            dcp_reshard.unpickle.unpickle_metadata(shuffled, file="x")


def test_pickles_of_failures_are_small(path: Path) -> None:
    """What a rank would send of an error about a checkpoint full of nonsense stays small."""
    state = {f"{'z' * 3000}{i}": torch.zeros(1) for i in range(200)}
    [error] = find_failures(lambda: load(state, path)).values()
    assert len(pickle.dumps(error)) < 2**19
