"""The catalog of a checkpoint: what torch's own metadata says, or an error that says why not."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
)
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard.catalog import Catalog
from dcp_reshard.errors import (
    CheckpointFormatError,
    ReshardError,
    StorageError,
)
from dcp_reshard.metadata import DcpCheckpoint, read_catalog
from dcp_reshard.torch_metadata import catalog_of, to_torch_metadata
from tests.support.checkpoints import save_world
from tests.support.tensors import indexed_tensor


def make_state(rank: int) -> dict[str, Any]:
    """Rows over all ranks (one rank has none), a replica, a scalar, objects, in a nested dict."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = distribute_tensor(indexed_tensor((2, 3)), mesh, [Shard(0)], src_data_rank=None)
    copy = distribute_tensor(indexed_tensor((4,)), mesh, [Replicate()], src_data_rank=None)
    return {"model": {"w": rows, "b": copy, "s": torch.tensor(1.0)}, "step": 7, f"r{rank}": "text"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of three ranks."""
    path = tmp_path_factory.mktemp("saved")
    save_world(path, 3, make_state)
    return path


def read(path: Path) -> Catalog:
    checkpoint = DcpCheckpoint(path)
    return checkpoint.read_catalog(checkpoint.open())


def places(catalog: Catalog) -> dict[tuple[Any, ...], tuple[str, int, int]]:
    """File, first byte and length of each chunk and object."""
    found: dict[tuple[Any, ...], tuple[str, int, int]] = {}
    for fqn, stored in catalog.tensors.items():
        columns = zip(stored.files, stored.starts, stored.lengths, strict=True)
        for i, (file, start, length) in enumerate(columns):
            key = (fqn, stored.chunks[i].offsets)
            found[key] = (catalog.files[file], int(start), int(length))
    for fqn, item in catalog.objects.items():
        found[fqn, None] = (catalog.files[item.file], item.start, item.length)
    return found


def test_the_catalog_says_what_torchs_metadata_says(saved: Path) -> None:
    """Keys, shapes, dtypes, boxes, files and byte ranges are those that torch reads."""
    metadata: Metadata = pickle.loads((saved / ".metadata").read_bytes())
    catalog = read(saved)
    assert set(catalog.tensors) | set(catalog.objects) == set(metadata.state_dict_metadata)
    assert catalog.keys == sorted(metadata.state_dict_metadata)
    for fqn, stored in catalog.tensors.items():
        entry = metadata.state_dict_metadata[fqn]
        assert (stored.shape, stored.dtype) == (tuple(entry.size), entry.properties.dtype)
        boxes = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]
        found = [stored.chunks[i] for i in range(len(stored.chunks))]
        assert [(box.offsets, box.sizes) for box in found] == boxes
        stored.check_coverage()
    assert places(catalog) == {
        (index.fqn, None if index.offset is None else tuple(index.offset)): (
            info.relative_path,
            info.offset,
            info.length,
        )
        for index, info in metadata.storage_data.items()
    }
    assert catalog.key_paths == metadata.planner_data
    assert catalog.key_path("model.w") == ("model", "w")
    assert catalog.key_path("unknown") == ("unknown",)


def test_torchs_metadata_is_made_again(saved: Path) -> None:
    """The lazy `Metadata` equals the one that torch reads, entry by entry, and leads back."""
    metadata: Metadata = pickle.loads((saved / ".metadata").read_bytes())
    catalog = read(saved)
    made = to_torch_metadata(catalog)
    assert dict(made.state_dict_metadata) == metadata.state_dict_metadata
    assert dict(made.storage_data) == metadata.storage_data
    assert (len(made.state_dict_metadata), len(made.storage_data)) == (
        len(metadata.state_dict_metadata),
        len(metadata.storage_data),
    )
    assert made.planner_data == metadata.planner_data
    assert "model.w" in made.state_dict_metadata
    assert "other" not in made.state_dict_metadata
    for index in (MetadataIndex("model.w", [9, 9]), MetadataIndex("other")):
        assert index not in made.storage_data
    assert catalog_of(made) is catalog
    other = catalog_of(metadata)
    assert (list(other.objects), list(other.tensors)) == (
        [f for f in metadata.state_dict_metadata if f in catalog.objects],
        [f for f in metadata.state_dict_metadata if f in catalog.tensors],
    )
    for fqn, stored in other.tensors.items():
        assert stored.shape == catalog.tensors[fqn].shape
        assert (stored.chunks.offsets == catalog.tensors[fqn].chunks.offsets).all()
        assert (stored.chunks.sizes == catalog.tensors[fqn].chunks.sizes).all()


def test_equal_metadata_have_equal_digests(saved: Path, tmp_path: Path) -> None:
    """The digest is that of the file's bytes: another save has another one."""
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / ".metadata").write_bytes((saved / ".metadata").read_bytes())
    save_world(tmp_path / "again", 3, make_state)
    assert read(copy).digest == read(saved).digest != read(tmp_path / "again").digest


class MetadataSource:
    """A checkpoint of which there is nothing but its metadata, in memory."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def names(self) -> list[str]:
        return [".metadata"]

    def size(self, name: str) -> int:
        return len(self.data)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        [buffer] = buffers
        buffer[:] = self.data[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_an_error_of_ours_or_a_catalog(tmp_path: Path, bit: int) -> None:
    """Nothing else is raised by any flip of a real file, coverage included; most are noticed."""
    save_world(tmp_path, 1, lambda rank: {"w": indexed_tensor((2, 3)), "n": {"step": 1}})
    intact = (tmp_path / ".metadata").read_bytes()
    noticed = 0
    for place in range(len(intact)):
        data = bytearray(intact)
        data[place] ^= 1 << bit
        try:
            for stored in read_catalog(MetadataSource(bytes(data))).tensors.values():
                stored.check_coverage()
        except ReshardError:
            noticed += 1
    assert noticed > 0.8 * len(intact)


@pytest.mark.parametrize("files", [[], ["__0_0.distcp"], ["model.safetensors", "config.json"]])
def test_a_folder_without_metadata(tmp_path: Path, files: list[str]) -> None:
    """The message lists what is there, and says what the reason may be."""
    for name in files:
        (tmp_path / name).touch()
    shown = ", ".join(sorted(files)) or "nothing"
    with pytest.raises(StorageError, match=rf"no `\.metadata`.*holds {shown}\. .*interrupted"):
        read(tmp_path)
    with pytest.raises(StorageError, match="missing"):
        read(tmp_path / "missing")


def save_ranks(path: Path, *states: dict[str, Any]) -> None:
    """A save without collectives: one metadata file per rank."""
    save_world(path, len(states), lambda rank: states[rank], use_collectives=False)


def test_metadata_files_of_ranks_are_merged(tmp_path: Path) -> None:
    """Without a global file, all ranks' files count; of replicas that of the lowest rank."""
    save_world(tmp_path, 3, make_state, use_collectives=False)
    catalog = read(tmp_path)
    assert catalog.keys == ["model.b", "model.s", "model.w", "r0", "r1", "r2", "step"]
    assert catalog.read_from == ("__0.metadata", "__1.metadata", "__2.metadata")
    catalog.tensors["model.w"].check_coverage()
    catalog.tensors["model.b"].check_coverage()
    files = {key: place[0] for key, place in places(catalog).items()}
    assert files["model.b", (0,)].startswith("__0_")
    assert files["step", None].startswith("__0_")
    assert files["model.w", (1, 0)].startswith("__1_")
    assert files["r2", None].startswith("__2_")


@pytest.mark.parametrize("lost", [0, 1])
def test_a_missing_metadata_file_of_a_rank_is_named(tmp_path: Path, lost: int) -> None:
    """A gap is an error, not a smaller checkpoint."""
    save_world(tmp_path, 3, make_state, use_collectives=False)
    (tmp_path / f"__{lost}.metadata").unlink()
    with pytest.raises(CheckpointFormatError, match=rf"`__{lost}\.metadata` is missing"):
        read(tmp_path)


def test_a_global_metadata_file_counts_alone(saved: Path, tmp_path: Path) -> None:
    """Files of ranks beside it, left over from another save, are not looked at."""
    save_ranks(tmp_path, {"other": 1})
    (tmp_path / ".metadata").write_bytes((saved / ".metadata").read_bytes())
    assert read(tmp_path).keys == read(saved).keys
    assert read(tmp_path).read_from == (".metadata",)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (torch.zeros(4), torch.zeros(5), r"shape \(4,\) of torch.float32 .* another \(5,\)"),
        (torch.zeros(4), torch.zeros(4).int(), r"float32 under .* of torch.int32"),
        (torch.zeros(4), 7, "another a value that is not a tensor"),
        (7, torch.zeros(4), "another a value that is not a tensor"),
    ],
)
def test_ranks_that_contradict_each_other(
    tmp_path: Path, first: object, second: object, message: str
) -> None:
    """One key is one tensor of one shape and dtype, or one object; if not, other keys still are."""
    save_ranks(tmp_path, {"x": first, "y": torch.ones(2)}, {"x": second, "y": torch.ones(2)})
    wanted = first if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) else 3
    state = {"x": wanted, "y": torch.zeros(2)}
    with pytest.raises(CheckpointFormatError, match=rf"`x`.*{message}"):
        dcp_reshard.load(state, tmp_path, no_dist=True)
    assert state["y"].tolist() == [0, 0]
    dcp_reshard.load({"y": state["y"]}, tmp_path, no_dist=True)
    assert state["y"].tolist() == [1, 1]
