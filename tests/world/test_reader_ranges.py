"""Which bytes a load asks for: what it needs, once, and in few requests."""

from __future__ import annotations

import gc
import io
import itertools
import math
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.distributed.tensor.placement_types import Placement, _StridedShard

import dcp_reshard
from dcp_reshard import LoadReport, ReaderOptions, ReshardStorageReader
from dcp_reshard.catalog import Catalog
from dcp_reshard.metadata import read_catalog
from dcp_reshard.storage import LocalSource
from dcp_reshard.torch_metadata import catalog_of
from tests.support.checkpoints import save_state, save_world
from tests.support.sources import RecordingCheckpoint
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world, thread_world

PROBE = 2048
Interval = tuple[int, int]


def item_interval(path: Path, fqn: str) -> Interval:
    """Bytes of the only chunk of a tensor, container included, in the only file."""
    stored = read_catalog(LocalSource(path)).tensors[fqn]
    (start,), (length,) = stored.starts.tolist(), stored.lengths.tolist()
    return start, start + length


def first_element(path: Path, fqn: str) -> int:
    """Byte of element 0 in the file, as Python's own zip module finds it."""
    start, end = item_interval(path, fqn)
    item = (path / "__0_0.distcp").read_bytes()[start:end]
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        (info,) = (info for info in archive.infolist() if info.filename.endswith("data/0"))
    head = item[info.header_offset : info.header_offset + 30]
    lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
    return start + info.header_offset + 30 + lengths


def joined(intervals: Iterable[Interval]) -> list[Interval]:
    """The same bytes in as few intervals as possible."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def asked(checkpoint: RecordingCheckpoint) -> list[Interval]:
    return sorted((r.offset, r.offset + r.length) for r in checkpoint.data_requests)


def check_nothing_twice(checkpoint: RecordingCheckpoint, path: Path) -> None:
    """Check that no request overlaps another, but at the ends of containers.

    These are read first, to find the elements; a large request then goes over them once more.
    """
    catalog = read_catalog(LocalSource(path))
    for number, name in enumerate(catalog.files):
        ends = joined(
            (start + at, start + at + PROBE)
            for stored in catalog.tensors.values()
            for file, start, length in zip(stored.files, stored.starts, stored.lengths, strict=True)
            for at in (0, max(0, length - PROBE))
            if file == number
        )
        asked_here = [r for r in checkpoint.data_requests if r.name == name]
        edges = sorted({e for r in asked_here for e in (r.offset, r.offset + r.length)})
        for start, end in itertools.pairwise(edges):
            times = sum(r.offset <= start and end <= r.offset + r.length for r in asked_here)
            at_end = any(first <= start and end <= last for first, last in ends)
            assert times <= (2 if at_end else 1), (name, start, end, times)


def load_cut(
    checkpoint: RecordingCheckpoint,
    shapes: dict[str, tuple[int, ...]],
    placement: Placement,
    **options: Any,
) -> LoadReport:
    """Load as one rank of the current world, with every tensor cut in the same way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        name: distribute_tensor(torch.zeros(shape), mesh, [placement], src_data_rank=None)
        for name, shape in shapes.items()
    }
    report = dcp_reshard.load(state, checkpoint, no_dist=True, options=ReaderOptions(**options))
    for name, tensor in state.items():
        whole = distribute_tensor(
            indexed_tensor(shapes[name]), mesh, [placement], src_data_rank=None
        )
        assert torch.equal(tensor.to_local(), whole.to_local())
    return report


def test_a_rank_of_eight_reads_its_rows_and_the_ends_of_containers(tmp_path: Path) -> None:
    """From a checkpoint of one rank, FSDP 8 reads 1.02 of its bytes at most, and exactly these."""
    shapes = {"a": (1024, 1024), "b": (4096, 300)}
    save_state(tmp_path, {name: indexed_tensor(shape) for name, shape in shapes.items()})
    ends = []
    for name in shapes:
        start, end = item_interval(tmp_path, name)
        ends += [(start, start + PROBE), (end - PROBE, end)]
    for rank in range(8):
        checkpoint = RecordingCheckpoint(tmp_path)
        with fake_world(rank, 8):
            report = load_cut(checkpoint, shapes, Shard(0))
        own = []
        for name, shape in shapes.items():
            nbytes = math.prod(shape) // 8 * 4
            start = first_element(tmp_path, name) + rank * nbytes
            own.append((start, start + nbytes))
        assert joined(asked(checkpoint)) == joined([*ends, *own])
        assert all(interval in asked(checkpoint) for interval in own)
        check_nothing_twice(checkpoint, tmp_path)
        wanted = sum(end - start for start, end in own)
        assert checkpoint.data_bytes <= 1.02 * wanted
        assert report.bytes_wanted == report.bytes_direct == wanted
        assert report.bytes_read == checkpoint.source.bytes_requested
        assert report.requests == len(checkpoint.source.requests)


def test_long_columns_are_read_run_by_run(tmp_path: Path) -> None:
    """Where each row has 64 KiB for this rank, these runs are read and nothing between them."""
    rows, columns = 24, 4 * 16384
    save_state(tmp_path, {"w": indexed_tensor((rows, columns))})
    first = first_element(tmp_path, "w")
    for rank in (0, 2, 3):
        checkpoint = RecordingCheckpoint(tmp_path)
        with fake_world(rank, 4):
            report = load_cut(checkpoint, {"w": (rows, columns)}, Shard(1))
        runs = [
            (start, start + 65536)
            for start in range(first + rank * 65536, first + rows * columns * 4, columns * 4)
        ]
        start, end = item_interval(tmp_path, "w")
        ends = [(start, start + PROBE), (end - PROBE, end)]
        assert asked(checkpoint) == sorted([*runs, *ends])
        assert checkpoint.data_bytes <= 1.25 * report.bytes_wanted


def test_short_columns_are_read_together_but_no_further_than_needed(tmp_path: Path) -> None:
    """Where runs are short, few requests read over the gaps, in whole rows."""
    rows, columns = 3000, 256
    save_state(tmp_path, {"w": indexed_tensor((rows, columns))})
    first = first_element(tmp_path, "w")
    for rank in range(4):
        checkpoint = RecordingCheckpoint(tmp_path)
        with fake_world(rank, 4):
            load_cut(
                checkpoint, {"w": (rows, columns)}, Shard(1), memory_budget=4 * 2**20, threads=2
            )
        payload = [i for i in asked(checkpoint) if i[1] - i[0] > 2 * PROBE]
        start, end = first, first + rows * columns * 4
        assert (payload[0][0], payload[-1][1]) == (start, end)
        # Whole rows, from one request to the next: the rank can tell the checksum of all of them.
        assert all(a[1] == b[0] for a, b in itertools.pairwise(payload))
        assert len(payload) == 3
        check_nothing_twice(checkpoint, tmp_path)


def test_columns_of_a_transposed_tensor_are_read_in_one_piece(tmp_path: Path) -> None:
    """What counts is the order of the stored bytes: columns stored as lines need no gaps."""
    full = indexed_tensor((400, 300)).t().contiguous().t()
    save_state(tmp_path, {"w": full})
    checkpoint = RecordingCheckpoint(tmp_path)
    with fake_world(1, 3):
        load_cut(checkpoint, {"w": (400, 300)}, Shard(1))
    start = first_element(tmp_path, "w") + 160_000
    assert (start, start + 160_000) in asked(checkpoint)


def small_tensors(count: int) -> dict[str, torch.Tensor]:
    return {f"t{i:03}": indexed_tensor((10,)) + i for i in range(count)}


@pytest.mark.parametrize(("step", "requests"), [(1, 1), (2, 1), (3, 1), (10, 20)])
def test_small_tensors_that_lie_together_are_read_together(
    tmp_path: Path, step: int, requests: int
) -> None:
    """Neighbours share a request, also over small gaps; what lies far apart is not joined."""
    full = small_tensors(200)
    save_state(tmp_path, full)
    state = {name: torch.zeros(10) for name in list(full)[::step]}
    checkpoint = RecordingCheckpoint(tmp_path)
    dcp_reshard.load(state, checkpoint, no_dist=True)
    assert all(torch.equal(state[name], full[name]) for name in state)
    assert len(checkpoint.data_requests) == requests
    start, end = item_interval(tmp_path, "t000")[0], item_interval(tmp_path, list(state)[-1])[1]
    assert asked(checkpoint)[0][0] == start
    assert asked(checkpoint)[-1][1] == end


def test_a_large_tensor_among_small_ones_is_not_read_over(tmp_path: Path) -> None:
    """Small neighbours of a large tensor that is not wanted do not draw it in."""
    full = {"a": indexed_tensor((10,)), "b": indexed_tensor((99, 999)), "c": indexed_tensor((10,))}
    save_state(tmp_path, full)
    checkpoint = RecordingCheckpoint(tmp_path)
    dcp_reshard.load({"a": torch.zeros(10), "c": torch.zeros(10)}, checkpoint, no_dist=True)
    assert checkpoint.data_bytes < 4096


def make_mixed(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    cut = {
        name: distribute_tensor(indexed_tensor(shape), mesh, [Shard(0)], src_data_rank=None)
        for name, shape in MIXED.items()
    }
    return {**cut, "options": {"lr": 0.5, "name": "adam"}}


MIXED = {
    "big": (1000, 130),
    "wide": (37, 5000),
    "line": (40001,),
    "few": (2, 3),
    "cube": (9, 50, 60),
}


@pytest.mark.parametrize("placement", [Shard(0), Shard(-1)], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_no_byte_is_read_twice(tmp_path: Path, placement: Placement, size: int) -> None:
    """Whatever the layouts, requests of a rank do not overlap."""
    save_world(tmp_path, 3, make_mixed)
    for rank in range(size):
        checkpoint = RecordingCheckpoint(tmp_path)
        with fake_world(rank, size):
            load_cut(checkpoint, MIXED, placement)
        check_nothing_twice(checkpoint, tmp_path)


def test_parts_of_several_boxes_are_read_box_by_box(tmp_path: Path) -> None:
    """A rank whose local tensor is three separate blocks of rows reads these, and not the rest."""
    full = indexed_tensor((600, 300))
    save_state(tmp_path, {"w": full})
    blocks = [piece.chunk(2)[1] for piece in full.chunk(3)]
    checkpoint = RecordingCheckpoint(tmp_path)
    with fake_world(1, 2):
        tensor = DTensor.from_local(
            torch.zeros(300, 300),
            init_device_mesh("cpu", (2,)),
            [_StridedShard(0, split_factor=3)],
            run_check=False,
            shape=full.shape,
            stride=full.stride(),
        )
        report = dcp_reshard.load({"w": tensor}, checkpoint, no_dist=True)
    assert torch.equal(tensor.to_local(), torch.cat(blocks))
    first = first_element(tmp_path, "w")
    rows = [(first + row * 1200, first + (row + 100) * 1200) for row in (100, 300, 500)]
    assert [i for i in asked(checkpoint) if i[1] - i[0] > PROBE] == rows
    assert report.bytes_direct == report.bytes_wanted == 3 * 100 * 1200


@pytest.mark.parametrize("rank", [0, 1])
def test_columns_between_those_of_others_are_read_once(tmp_path: Path, rank: int) -> None:
    """Eight boxes of one rank, out of the same rows: the rows are read once, not eight times."""
    rows, columns = 600, 256
    full = indexed_tensor((rows, columns))
    save_state(tmp_path, {"w": full})
    with fake_world(rank, 2):
        mesh = init_device_mesh("cpu", (2,))
        local = torch.full((rows, columns // 2), -1.0)
        cut = [_StridedShard(1, split_factor=8)]
        state = {
            "w": DTensor.from_local(
                local, mesh, cut, run_check=False, shape=full.shape, stride=(256, 1)
            )
        }
        report = dcp_reshard.load(state, tmp_path, no_dist=True)
    assert torch.equal(local, full.reshape(rows, 8, 2, 16)[:, :, rank].reshape(rows, -1))
    assert report.bytes_read < 1.02 * full.nbytes


def test_only_files_with_something_wanted_are_opened(tmp_path: Path) -> None:
    """A rank of FSDP 3 that resumes on FSDP 3 reads its own file; objects, those that have them."""
    save_world(tmp_path, 3, make_mixed)
    for rank in range(3):
        checkpoint = RecordingCheckpoint(tmp_path)
        with fake_world(rank, 3):
            load_cut(checkpoint, MIXED, Shard(0))
        assert {r.name for r in checkpoint.data_requests} == {f"__{rank}_0.distcp"}
    state = {"options": {"lr": 0.0, "name": ""}}
    dcp_reshard.load(state, checkpoint, no_dist=True)
    assert state == {"options": {"lr": 0.5, "name": "adam"}}
    catalog = read_catalog(LocalSource(tmp_path))
    places = {(catalog.files[o.file], o.start, o.length) for o in catalog.objects.values()}
    assert set(checkpoint.data_requests) == places


def test_reading_metadata_reads_no_data_file(tmp_path: Path) -> None:
    """`read_metadata` asks for ``.metadata`` once, and for nothing else."""
    save_world(tmp_path, 3, make_mixed)
    checkpoint = RecordingCheckpoint(tmp_path)
    metadata = ReshardStorageReader(checkpoint).read_metadata()
    assert set(metadata.state_dict_metadata) == {*MIXED, "options.lr", "options.name"}
    assert [(r.name, r.offset) for r in checkpoint.source.requests] == [(".metadata", 0)]
    assert checkpoint.source.closed


def test_metadata_are_read_once_for_the_job(tmp_path: Path) -> None:
    """With a process group its first rank reads; the others open nothing, and get the columns."""
    save_world(tmp_path, 3, make_mixed)

    def read(_: int) -> tuple[list[str], Catalog]:
        checkpoint = RecordingCheckpoint(tmp_path)
        reader = ReshardStorageReader(checkpoint, process_group=dist.group.WORLD)
        catalog = catalog_of(reader.read_metadata())
        opened = hasattr(checkpoint, "source")
        return [r.name for r in checkpoint.source.requests] if opened else [], catalog

    (first, catalog), *others = thread_world(3, read)
    assert first == [".metadata"]
    for asked, other in others:
        assert asked == []
        assert (other.digest, other.files) == (catalog.digest, catalog.files)
        assert other is not catalog
        for fqn, stored in catalog.tensors.items():
            assert np.array_equal(other.tensors[fqn].chunks.offsets, stored.chunks.offsets)
            assert np.array_equal(other.tensors[fqn].starts, stored.starts)


def test_torchs_metadata_are_made_when_asked_for(tmp_path: Path) -> None:
    """No object of a chunk is made before its tensor is looked at, and then those of it alone."""
    save_world(tmp_path, 3, make_mixed)

    def count() -> int:
        return sum(type(thing) is ChunkStorageMetadata for thing in gc.get_objects())

    before = count()
    metadata = ReshardStorageReader(tmp_path).read_metadata()
    assert len(metadata.state_dict_metadata) > 2
    assert count() == before
    catalog = catalog_of(metadata)
    fqn = max(catalog.tensors, key=lambda fqn: len(catalog.tensors[fqn].chunks))
    entry = metadata.state_dict_metadata[fqn]
    assert count() == before + len(entry.chunks) == before + len(catalog.tensors[fqn].chunks)
    assert len(entry.chunks) == 3
