"""What a catalog can tell of its chunks, keys and files, and what may be in metadata."""

from __future__ import annotations

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from dcp_reshard import catalog_builder
from dcp_reshard.errors import CheckpointFormatError, ChunkCoverageError
from tests.support.forged_metadata import (
    DEEP,
    ELSEWHERE,
    add_index,
    build,
    chunk,
    make_metadata,
    size,
    tensor,
)


def test_limits_are_those_that_are_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 dims, keys of 4 KiB, and as many chunks as allowed are fine."""
    metadata = make_metadata()
    many = size(*[1] * 16)
    metadata.state_dict_metadata["é" * 2048] = tensor(
        many, ChunkStorageMetadata(size(*[0] * 16), many)
    )
    add_index("é" * 2048, size(*[0] * 16), ELSEWHERE)(metadata)
    assert build(metadata).tensors["é" * 2048].shape == many
    monkeypatch.setattr(catalog_builder, "_MAX_CHUNKS", 2)
    build(make_metadata())
    with pytest.raises(CheckpointFormatError, match="more than 2 chunks"):
        build(metadata)


def test_several_empty_chunks_at_one_place_are_fine() -> None:
    """Ranks beyond the last row may each have described an empty shard, of which one is stored."""
    metadata = make_metadata()
    metadata.state_dict_metadata["w"].chunks += [chunk(4, 0)] * 3
    add_index("w", size(4, 0), ELSEWHERE)(metadata)
    build(metadata).tensors["w"].check_coverage()


@pytest.mark.parametrize(
    ("planner_data", "paths"),
    [
        (None, {}),
        ([("w",)], {}),
        ({"w": ("a", 0, "b"), "n": ("n",)}, {"w": ("a", 0, "b"), "n": ("n",)}),
        ({"w": ("a", 10**9), "x": ("x",), "n": "n"}, {"w": ("a", 10**9)}),
        ({"w": ("a", 1.5), "n": ()}, {}),
        ({"w": ["a"], "n": (True,)}, {}),
        ({"w": DEEP, "n": {"w": DEEP}}, {}),
    ],
    ids=repr,
)
def test_key_paths_are_taken_if_they_are_some(planner_data: object, paths: object) -> None:
    """Other planners keep other things there; what is no path of a key is passed over."""
    metadata = make_metadata()
    metadata.planner_data = planner_data
    assert build(metadata).key_paths == paths


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([chunk(0, 2), chunk(3, 1)], r"\[2:3, 0:3\] of shape \(4, 3\) in no chunk"),
        ([chunk(0, 3), chunk(2, 2)], r"\[2:3, 0:3\] of shape \(4, 3\) in 2 chunks"),
        ([], r"\[0:4, 0:3\] of shape \(4, 3\) in no chunk"),
    ],
)
def test_holes_and_overlaps_are_named(chunks: list[ChunkStorageMetadata], message: str) -> None:
    """A tensor of which not each element is stored once tells which are not."""
    metadata = make_metadata()
    metadata.state_dict_metadata["w"] = tensor(size(4, 3), *chunks)
    metadata.storage_data = {
        MetadataIndex("w", c.offsets): _StorageInfo("f", 10 * i, 10) for i, c in enumerate(chunks)
    } | {MetadataIndex("n"): ELSEWHERE}
    stored = build(metadata).tensors["w"]
    with pytest.raises(ChunkCoverageError, match=message) as info:
        stored.check_coverage()
    assert info.value.fqn == "w"


def test_overlaps_are_found_at_any_place_of_a_file() -> None:
    """One shared byte is found where floating-point numbers could not tell it from none."""
    metadata = make_metadata()
    del metadata.state_dict_metadata["n"], metadata.storage_data[MetadataIndex("n")]
    infos = list(metadata.storage_data.values())
    for info, start in zip(infos, ((1 << 61), (1 << 61) + 99), strict=True):
        vars(info).update(offset=start)
    with pytest.raises(CheckpointFormatError, match="share bytes"):
        build(metadata)
    vars(infos[1]).update(offset=(1 << 61) + 100)
    build(metadata)


def test_chunks_and_keys_are_found() -> None:
    """A chunk by its offsets, whatever the hint says; a key by a byte of its item."""
    catalog = build(make_metadata())
    stored = catalog.tensors["w"]
    assert [stored.find_chunk((2, 0), hint) for hint in (None, 0, 1, 7)] == [1] * 4
    assert stored.find_chunk((1, 0)) is None
    keys = [catalog.find_key("f", byte) for byte in (0, 99, 100, 149, 150, 156, 157)]
    assert keys == ["w", "w", "w", "w", "n", "n", None]
    assert catalog.find_key("g", 0) is None
    assert ("w" in catalog, "n" in catalog, "x" in catalog) == (True, True, False)
