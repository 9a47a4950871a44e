"""Cooperative reading by ranks that are threads: what is read, sent, and found in the end."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dcp_reshard
from dcp_reshard import (
    CorruptRecordError,
    DtypeMismatchError,
    LoadReport,
    PeerFailedError,
    RankGrid,
    ReaderOptions,
    ReshardLoadPlanner,
    ReshardStorageReader,
    StorageError,
    lockstep,
)
from dcp_reshard.box import Box
from dcp_reshard.layout import LocalShard, TensorLayout
from dcp_reshard.metadata import read_catalog
from dcp_reshard.options import RetryPolicy
from dcp_reshard.storage import ByteSource, LocalSource
from tests.support.checkpoints import save_state, save_world
from tests.support.failures import catch_failures, find_failures
from tests.support.sources import (
    InterceptedCheckpoint,
    RecordingCheckpoint,
    RecordingSource,
    Request,
)
from tests.support.tensors import (
    check_same,
    fill_with_sentinel,
    indexed_tensor,
    sentinel_like,
    snapshot,
)
from tests.support.worlds import thread_world

State = dict[str, Any]

# Every way that an item can take: small ones whole, others in blocks, in many rounds.
BLOCKS = ReaderOptions(
    block_bytes=1024, shared_item_bytes=4096, whole_item_bytes=2048, memory_budget=2**19, threads=2
)
# Only what is tiny is read whole.
ONLY_BLOCKS = ReaderOptions(shared_item_bytes=0, threads=2)
WHOLE = ReaderOptions(threads=2)


@dataclass(frozen=True)
class Layout:
    """A mesh, and the placements of a matrix (vectors take those that they have a dim for)."""

    mesh: tuple[int, ...]
    placements: tuple[Placement, ...]

    @property
    def size(self) -> int:
        return math.prod(self.mesh)

    def distribute(self, full: torch.Tensor) -> torch.Tensor:
        mesh = init_device_mesh("cpu", self.mesh)
        fitting = [
            p if not isinstance(p, Shard) or p.dim < full.ndim else Replicate()
            for p in self.placements
        ]
        return distribute_tensor(full, mesh, fitting, src_data_rank=None)


def rows(size: int) -> Layout:
    return Layout((size,), (Shard(0),))


def columns(size: int) -> Layout:
    return Layout((size,), (Shard(1),))


def replicas(size: int) -> Layout:
    return Layout((size,), (Replicate(),))


def hsdp(replicas: int, shards: int) -> Layout:
    return Layout((replicas, shards), (Replicate(), Shard(0)))


def grid(first: int, second: int) -> Layout:
    return Layout((first, second), (Shard(0), Shard(1)))


def make_state(shapes: Sequence[tuple[int, ...]], layout: Layout, rank: int) -> State:
    state: State = {"step": 7, "lr": torch.tensor(0.5), "betas": (0.9, 0.95)}
    for i, shape in enumerate(shapes):
        full = indexed_tensor(shape, torch.float32 if i % 2 else torch.bfloat16)
        state[f"w{i}"] = layout.distribute(full)
    return state


@dataclass(frozen=True)
class Loaded:
    """What one rank has done."""

    report: LoadReport
    requests: list[Request]


def load_rank(
    rank: int,
    path: str | Path,
    make: Callable[[int], State],
    options: ReaderOptions,
    mode: str = "cooperative",
    **more: Any,
) -> Loaded:
    state = make(rank)
    wanted = snapshot(state)
    fill_with_sentinel(state)
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            state[key] = None
    checkpoint = RecordingCheckpoint(path)
    report = dcp_reshard.load(state, checkpoint, mode=mode, options=options, **more)
    check_same(snapshot(state), wanted, where=f"rank {rank}")
    for key, value in make(rank).items():
        if not isinstance(value, torch.Tensor):
            assert state[key] == value
    return Loaded(report, checkpoint.data_requests)


def bytes_read(ranks: Sequence[Loaded]) -> int:
    return sum(request.length for rank in ranks for request in rank.requests)


def check_read_once(ranks: Sequence[Loaded]) -> None:
    """No byte of the data files is read by two requests."""
    spans = sorted((r.name, r.offset, r.offset + r.length) for rank in ranks for r in rank.requests)
    for (name, _, end), (other, start, _) in itertools.pairwise(spans):
        assert name != other or start >= end


SMALL = [(257, 130), (3, 7), (64, 64), (130,), (2,), (), (40, 3, 11)]
LAYOUTS = {
    "rows1": rows(1),
    "rows3": rows(3),
    "rows4": rows(4),
    "columns3": columns(3),
    "grid2x2": grid(2, 2),
    "hsdp2x2": hsdp(2, 2),
    "replicas3": replicas(3),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of checkpoints of the small tensors, by layout."""
    folders: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp(name)
            layout = LAYOUTS[name]
            save_world(folders[name], layout.size, partial(make_state, SMALL, layout))
        return folders[name]

    return get


@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
@pytest.mark.parametrize("dest", LAYOUTS)
@pytest.mark.parametrize("source", ["rows4", "columns3", "grid2x2"])
def test_every_rank_gets_its_part(
    saved: Callable[[str], Path], source: str, dest: str, options: ReaderOptions
) -> None:
    """Whatever the two layouts, every element arrives, and every record is verified once."""
    layout = LAYOUTS[dest]
    ranks = thread_world(
        layout.size, load_rank, saved(source), partial(make_state, SMALL, layout), options
    )
    reports = [rank.report for rank in ranks]
    assert all(report.records_unverified == 0 for report in reports)
    if layout.size == 1:
        assert reports[0].cooperation.mode == "direct"
        return
    assert {report.cooperation.mode for report in reports} == {"cooperative"}
    sent = sum(report.cooperation.bytes_sent for report in reports)
    assert sent == sum(report.cooperation.bytes_received for report in reports) > 0
    assert {report.cooperation.imbalance for report in reports} == {
        reports[0].cooperation.imbalance
    }
    catalog = read_catalog(LocalSource(saved(source)))
    chunks = sum(len(tensor.chunks) for tensor in catalog.tensors.values())
    # An object's container has several records, each with a checksum.
    assert sum(report.records_verified for report in reports) >= chunks
    if options is WHOLE:
        check_read_once(ranks)


LARGE = [(1536, 768), (768, 1536), (2000,)]
PAIRS = {
    "rows4-replicas2": (rows(4), replicas(2)),
    "rows4-replicas4": (rows(4), replicas(4)),
    "rows4-replicas8": (rows(4), replicas(8)),
    "rows4-hsdp2x2": (rows(4), hsdp(2, 2)),
    "rows4-hsdp2x4": (rows(4), hsdp(2, 4)),
    "rows4-hsdp4x2": (rows(4), hsdp(4, 2)),
    "rows4-columns4": (rows(4), columns(4)),
    "rows4-columns8": (rows(4), columns(8)),
    "rows1-rows8": (rows(1), rows(8)),
    "grid4x2-grid2x4": (grid(4, 2), grid(2, 4)),
}


@pytest.mark.parametrize("options", [ONLY_BLOCKS, WHOLE], ids=["blocks", "whole"])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_job_reads_what_it_needs_once(
    pair: str, options: ReaderOptions, tmp_path: Path
) -> None:
    """Counted at the byte source: at most 2 % more than the bytes that anyone needs."""
    source, dest = PAIRS[pair]
    save_world(tmp_path, source.size, partial(make_state, LARGE, source))
    ranks = thread_world(dest.size, load_rank, tmp_path, partial(make_state, LARGE, dest), options)
    unique = 1536 * 768 * 2 + 768 * 1536 * 4 + 2000 * 2
    assert bytes_read(ranks) <= 1.02 * unique
    assert ranks[0].report.cooperation.imbalance < 1.2
    # The network carries what ranks did not read themselves, once per destination.
    wanted = sum(rank.report.bytes_wanted for rank in ranks)
    received = sum(rank.report.cooperation.bytes_received for rank in ranks)
    assert received <= 1.01 * wanted
    assert sum(rank.report.records_unverified for rank in ranks) == 0


def big() -> torch.Tensor:
    return indexed_tensor((1024, 640))


@pytest.mark.parametrize(
    "dest", [replicas(8), rows(8), columns(8)], ids=["copy", "rows", "columns"]
)
@pytest.mark.parametrize("budget", [2**18, 2**20])
def test_buffers_stay_in_the_budget(dest: Layout, budget: int, tmp_path: Path) -> None:
    """On all ranks, whether they read, send or receive, also where all want everything."""
    save_state(tmp_path, {"w": big()})
    options = ReaderOptions(memory_budget=budget, block_bytes=8192, threads=1)

    def make(rank: int) -> State:
        return {"w": dest.distribute(big())}

    for rank in thread_world(8, load_rank, tmp_path, make, options):
        assert 0 < rank.report.cooperation.buffer_bytes <= budget
        assert rank.report.cooperation.rounds > 1


def boxes_of(full: torch.Tensor, boxes: Sequence[Box]) -> TensorLayout:
    """Some boxes of a tensor, filled with a sentinel."""
    shards = [
        LocalShard(box, sentinel_like(full[box.slices()]).contiguous().clone()) for box in boxes
    ]
    return TensorLayout("w", tuple(full.shape), full.dtype, tuple(shards))


def load_boxes(
    rank: int,
    path: Path,
    full: torch.Tensor,
    boxes: Sequence[Sequence[Box]],
    options: ReaderOptions,
) -> Loaded:
    layout = boxes_of(full, boxes[rank])
    checkpoint = RecordingCheckpoint(path)
    state = {"w": layout} if boxes[rank] else {}
    report = dcp_reshard.load(state, checkpoint, mode="cooperative", options=options)
    for shard in layout.shards:
        assert torch.equal(shard.tensor, full[shard.box.slices()]), f"rank {rank}, {shard.box}"
    return Loaded(report, checkpoint.data_requests)


@pytest.mark.parametrize("order", ["rows", "columns"])
def test_what_nobody_needs_is_not_read(order: str, tmp_path: Path) -> None:
    """Ranks want parts of a large chunk, some twice, some nothing: in blocks, each is read once."""
    full = indexed_tensor((2048, 1024))
    # The saved tensor may have its columns, not its rows, one after the other.
    save_state(tmp_path, {"w": full if order == "rows" else full.t().contiguous().t()})

    def box(first: int, count: int) -> Box:
        inner, outer = (0, 1024), (first, count)
        pairs = (outer, inner) if order == "rows" else ((0, 2048), outer)
        return Box(tuple(p[0] for p in pairs), tuple(p[1] for p in pairs))

    boxes = [[box(300, 40), box(310, 7)], [], [box(320, 60), box(900, 1)], [box(380, 20)]]
    options = ReaderOptions(block_bytes=4096, threads=2)
    ranks = thread_world(4, load_boxes, tmp_path, full, boxes, options)
    line = 4 * (1024 if order == "rows" else 2048)
    needed = 101 * line
    assert needed <= bytes_read(ranks) <= needed + 4 * 4096 + 2 * 2048
    check_read_once(ranks)


def test_a_small_part_of_a_small_chunk(tmp_path: Path) -> None:
    """Where less than half of a chunk is wanted it is read in blocks, however small it is."""
    full = indexed_tensor((256, 256))
    save_state(tmp_path, {"w": full})
    boxes = [[Box((3, 0), (10, 256))], [Box((10, 0), (10, 256))]]
    options = ReaderOptions(block_bytes=4096, threads=2)
    ranks = thread_world(2, load_boxes, tmp_path, full, boxes, options)
    assert bytes_read(ranks) <= 17 * 1024 + 2 * 4096 + 2 * 2048


def test_one_element_for_many_ranks(tmp_path: Path) -> None:
    """More ranks than bytes: those that read nothing get theirs, or want nothing either."""
    full = torch.tensor([[42]], dtype=torch.uint8)
    save_state(tmp_path, {"w": full})
    boxes = [[Box((0, 0), (1, 1))]] * 3 + [[]] * 2
    thread_world(5, load_boxes, tmp_path, full, boxes, ReaderOptions(threads=2))


def test_nobody_needs_anything(tmp_path: Path) -> None:
    """A load of nothing ends, having read nothing."""
    save_state(tmp_path, {"w": torch.zeros(3, 3)})
    ranks = thread_world(
        3, load_boxes, tmp_path, torch.zeros(3, 3), [[], [], []], ReaderOptions(threads=2)
    )
    assert bytes_read(ranks) == 0
    assert ranks[0].report.cooperation.rounds == 0


def load_stages(rank: int, path: Path) -> None:
    """Pipeline stages hold different keys; the embedding lives on the first and the last."""
    keys = [["embed", "a"], ["b"], ["c", "embed"]][rank]
    full = {key: indexed_tensor((300, 200)) + ord(key[0]) for key in ("embed", "a", "b", "c")}
    state = {key: torch.zeros(300, 200) for key in keys}
    report = dcp_reshard.load(state, path, mode="cooperative", options=BLOCKS)
    assert report.cooperation.mode == "cooperative"
    for key in keys:
        assert torch.equal(state[key], full[key])


def test_pipeline_stages_with_different_keys(tmp_path: Path) -> None:
    """Ranks that ask for different keys help each other to read them."""
    save_state(
        tmp_path,
        {key: indexed_tensor((300, 200)) + ord(key[0]) for key in ("embed", "a", "b", "c")},
    )
    thread_world(3, load_stages, tmp_path)


def load_in_submesh(rank: int, path: Path) -> None:
    mesh = DeviceMesh("cpu", [1, 2], _init_backend=False)
    full = indexed_tensor((300, 200))
    part = distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None) if rank else full.clone()
    state = {"w": part}
    wanted = snapshot(state)
    fill_with_sentinel(state)
    dcp_reshard.load(state, path, mode="cooperative", options=BLOCKS)
    check_same(snapshot(state), wanted, where=f"rank {rank}")


def test_ranks_outside_of_a_mesh(tmp_path: Path) -> None:
    """A rank that is not in a tensor's mesh reads for those that are."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200))})
    thread_world(3, load_in_submesh, tmp_path)


def load_in_subgroup(rank: int, path: Path) -> str:
    group = dist.new_group([0, 2])
    if rank == 1:
        return ""
    state = {"w": torch.zeros(300, 200)}
    report = dcp_reshard.load(state, path, mode="cooperative", process_group=group, options=BLOCKS)
    assert torch.equal(state["w"], indexed_tensor((300, 200)))
    return report.cooperation.mode


def test_a_subgroup_reads_by_itself(tmp_path: Path) -> None:
    """Ranks outside of the process group take no part, and are not waited for."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200))})
    assert thread_world(3, load_in_subgroup, tmp_path) == ["cooperative", "", "cooperative"]


@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
def test_one_stored_tensor_for_two_keys(options: ReaderOptions, tmp_path: Path) -> None:
    """A destination that needs a byte twice gets it twice, and it is read once."""
    full = indexed_tensor((300, 200))
    save_state(tmp_path, {"w": full})

    def load(rank: int) -> Loaded:
        state = {"x": torch.zeros(300, 200), "y": torch.zeros(300, 200)}
        checkpoint = RecordingCheckpoint(tmp_path)
        report = dcp_reshard.load(
            state, checkpoint, mode="cooperative", rename=lambda _: "w", options=options
        )
        assert torch.equal(state["x"], full)
        assert torch.equal(state["y"], full)
        return Loaded(report, checkpoint.data_requests)

    ranks = thread_world(2, load)
    assert bytes_read(ranks) < 1.05 * full.nbytes


@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
def test_other_orders_dtypes_and_forms(options: ReaderOptions, tmp_path: Path) -> None:
    """Transposed on either side, cast, conjugated, boolean, complex: as in a direct load."""
    full = indexed_tensor((90, 70, 5))
    lazy = indexed_tensor((60, 80), torch.complex64).conj()
    saved = {
        "turned": full.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        "half": indexed_tensor((300, 100), torch.float16),
        "other": indexed_tensor((300, 100), torch.bfloat16) / 8,
        "lazy": lazy,
        "flags": indexed_tensor((1000,), torch.bool),
        "wide": indexed_tensor((70, 90), torch.complex128),
    }
    save_state(tmp_path, saved)

    def load(rank: int) -> tuple[str, ...]:
        state = {
            "turned": torch.zeros(70, 5, 90).permute(2, 0, 1),
            "half": torch.zeros(300, 100, dtype=torch.float64),
            "other": torch.zeros(300, 100, dtype=torch.float16),
            "lazy": torch.zeros(60, 80, dtype=torch.complex64),
            "flags": torch.zeros(2000, dtype=torch.bool)[::2],
            "wide": torch.zeros(90, 70, dtype=torch.complex128).t(),
        }
        report = dcp_reshard.load(
            state, tmp_path, mode="cooperative", dtype_policy="cast", options=options
        )
        for key, tensor in saved.items():
            assert torch.equal(state[key], tensor.to(state[key].dtype)), key
        return report.chunks_read_whole

    # Only the rank that has read it knows of what form it was.
    assert sorted(thread_world(3, load)) == [(), (), ("lazy",)]


def test_files_of_a_grid_of_ranks(tmp_path: Path) -> None:
    """Where it is known where elements lie, nothing is probed, and it is read in blocks."""
    full = indexed_tensor((300, 200))
    for tp, part in enumerate(full.chunk(2)):
        torch.save({"w": part.clone(), "step": 3}, tmp_path / f"model.tp{tp}.pt")
    grid = RankGrid(str(tmp_path / "model.tp{tp}.pt"), {"w": 0})

    def load(rank: int) -> LoadReport:
        layout = columns(3)
        state = {"w": layout.distribute(full.clone()), "step": 0}
        wanted = snapshot(state)
        fill_with_sentinel(state)
        report = dcp_reshard.load(
            state, grid, mode="cooperative", options=replace(BLOCKS, memory_budget=2**18)
        )
        check_same(snapshot(state), wanted, where=f"rank {rank}")
        assert state["step"] == 3
        return report

    reports = thread_world(3, load)
    assert {report.cooperation.mode for report in reports} == {"cooperative"}
    assert sum(report.records_unverified for report in reports) == 0


def flip(path: Path, marker: bytes) -> None:
    """Flip a bit of the only place in the checkpoint where `marker` stands."""
    for file in path.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        at = data.find(marker)
        if at >= 0:
            data[at] ^= 1
            file.write_bytes(data)
            return
    raise AssertionError("the marker is not in the checkpoint")


def find_load_failures(
    rank: int, path: Path, options: ReaderOptions, **more: Any
) -> dict[int, BaseException]:
    checkpoint = RecordingCheckpoint(path, **more)
    state = {"w": torch.zeros(300, 200), "v": torch.zeros(50)}
    reader = ReshardStorageReader(checkpoint, mode="cooperative", options=options)
    return find_failures(lambda: dcp.load(state, storage_reader=reader))


@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
def test_a_flipped_bit_is_an_error_on_every_rank(options: ReaderOptions, tmp_path: Path) -> None:
    """Also in a record that several ranks have read in blocks; the tensor is named."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200)), "v": torch.ones(50)})
    flip(tmp_path, indexed_tensor((300, 200))[150].numpy().tobytes())
    for failures in thread_world(3, find_load_failures, tmp_path, options):
        errors = [e for e in failures.values() if not isinstance(e, PeerFailedError)]
        assert [type(e) for e in errors] == [CorruptRecordError]
        assert "tensor `w`" in str(errors[0]) or "`w`, file" in str(errors[0])


def test_a_cut_file_is_found_before_anything_is_written(tmp_path: Path) -> None:
    """One rank looks, all are told, and the destinations are as they were."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200)), "v": torch.ones(50)})
    (file,) = tmp_path.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100_000])

    def load(rank: int) -> dict[int, BaseException]:
        state = {"w": torch.full((300, 200), -1.0)}
        failures = catch_failures(
            lambda: dcp_reshard.load(state, tmp_path, mode="cooperative", options=BLOCKS)
        )
        assert bool((state["w"] == -1).all())
        return failures

    for failures in thread_world(3, load):
        assert sorted(type(e).__name__ for e in failures.values()) == [
            "PeerFailedError",
            "PeerFailedError",
            "StorageError",
        ]
        assert "the file is cut" in str(failures[0])


def test_a_failing_read_on_any_rank_at_any_time(tmp_path: Path) -> None:
    """Each request of each rank fails once; each time all ranks raise, and know whose it was."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200)), "v": torch.ones(50)})
    options = replace(BLOCKS, retry=RetryPolicy(tries=1))

    def count(rank: int) -> range:
        """Numbers of the requests for data, of a load that succeeds."""
        checkpoint = RecordingCheckpoint(tmp_path)
        state = {"w": torch.zeros(300, 200), "v": torch.zeros(50)}
        reader = ReshardStorageReader(checkpoint, mode="cooperative", options=options)
        dcp.load(state, storage_reader=reader)
        total = len(checkpoint.source.requests)
        return range(total - len(checkpoint.data_requests), total)

    def load(rank: int, failing: int, number: int) -> dict[int, BaseException]:
        more = {"fail_at": number} if rank == failing else {}
        return find_load_failures(rank, tmp_path, options, **more)

    for failing, numbers in enumerate(thread_world(3, count)):
        assert len(numbers) > 1
        for number in numbers:
            for failures in thread_world(3, load, failing, number):
                assert isinstance(failures[failing], StorageError)
                for rank in {0, 1, 2} - {failing}:
                    assert isinstance(failures[rank], PeerFailedError)
                    assert f"rank {failing} of the load failed" in str(failures[rank])


class Flaky(InterceptedCheckpoint):
    """Flips a bit in long reads of data: in the first one, or in all."""

    def __init__(self, path: Path, *, times: int) -> None:
        super().__init__(path)
        self.times = times

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        super().read_into(name, offset, buffers)
        if self.times and buffers[0].nbytes > 10_000:
            self.times -= 1
            buffers[0][5_000] ^= 1


def load_flaky(
    rank: int, path: Path, mode: str, layout: Layout, options: ReaderOptions, times: int
) -> tuple[LoadReport | None, dict[int, BaseException]]:
    """Rank 1 gets wrong bytes."""
    state = {"w": layout.distribute(big()), "v": torch.ones(50)}
    wanted = snapshot(state)
    fill_with_sentinel(state)
    checkpoint = Flaky(path, times=times if rank == 1 else 0)
    reports: list[LoadReport] = []
    failures = find_failures(
        lambda: reports.append(dcp_reshard.load(state, checkpoint, mode=mode, options=options))
    )
    if not failures:
        check_same(snapshot(state), wanted, where=f"rank {rank}")
    return (reports[0] if reports else None), failures


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
@pytest.mark.parametrize("layout", [rows(3), columns(3), replicas(3)], ids=["rows", "cols", "all"])
def test_wrong_bytes_that_come_once(
    tmp_path: Path, mode: str, options: ReaderOptions, layout: Layout
) -> None:
    """Whoever has read them, and however much of the record: they are read once more, and right."""
    save_state(tmp_path, {"w": big(), "v": torch.ones(50)})
    loaded = thread_world(3, load_flaky, tmp_path, mode, layout, options, 1)
    reports = [report for report, _ in loaded]
    assert [failures for _, failures in loaded] == [{}] * 3
    assert sum(report.rereads for report in reports) == 1
    assert sum(report.records_unverified for report in reports) == 0
    if mode == "cooperative":
        assert sum(r.cooperation.bytes_sent - r.cooperation.bytes_received for r in reports) == 0


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
def test_wrong_bytes_that_come_again(tmp_path: Path, mode: str, options: ReaderOptions) -> None:
    """Bytes that are wrong the second time are an error on all ranks, which names the tensor."""
    save_state(tmp_path, {"w": big(), "v": torch.ones(50)})
    for _, failures in thread_world(3, load_flaky, tmp_path, mode, rows(3), options, 100):
        errors = [e for e in failures.values() if not isinstance(e, PeerFailedError)]
        assert [type(error) for error in errors] == [CorruptRecordError]
        assert "`w`" in str(errors[0])


def test_a_planner_that_fails_on_one_rank(tmp_path: Path) -> None:
    """What a planner raises is raised on that rank; the others do not wait for it."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200))})

    class Failing(ReshardLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> torch.Tensor:
            raise ValueError(f"no memory for {read_item.dest_index.fqn}")

    def load(rank: int, mode: str) -> dict[int, BaseException]:
        state = {"w": torch.zeros(300, 200)}
        reader = ReshardStorageReader(tmp_path, mode=mode)
        planner = Failing() if rank == 1 else ReshardLoadPlanner()
        return find_failures(lambda: dcp.load(state, storage_reader=reader, planner=planner))

    for mode in ("cooperative", "direct", "auto"):
        for failures in thread_world(3, load, mode):
            assert "no memory for w" in str(failures[1])
            assert isinstance(failures[0], PeerFailedError)
            assert "rank 1" in str(failures[2])


def test_an_overflow_on_one_rank(tmp_path: Path) -> None:
    """What fails while pieces are put into place is agreed on before the next exchange."""
    full = indexed_tensor((300, 200)) * 10
    save_state(tmp_path, {"w": full})

    def load(rank: int) -> dict[int, BaseException]:
        dtype = torch.float16 if rank == 1 else torch.float32
        state = {"w": torch.zeros(300, 200, dtype=dtype)}
        return find_failures(
            lambda: dcp_reshard.load(
                state, tmp_path, mode="cooperative", dtype_policy="cast", options=BLOCKS
            )
        )

    for failures in thread_world(3, load):
        assert sorted(failures) == [0, 1, 2]
        assert isinstance(failures[1], DtypeMismatchError)
        assert "rank 1 of the load failed while reading round" in str(failures[0])


def test_progress_is_told_to_the_end(tmp_path: Path) -> None:
    """Bytes done grow to bytes in all, on every rank that wants something."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200))})

    def load(rank: int) -> list[tuple[int, int]]:
        told: list[tuple[int, int]] = []
        reader = ReshardStorageReader(
            tmp_path,
            mode="cooperative",
            options=BLOCKS,
            on_progress=lambda done, total: told.append((done, total)),
        )
        state = {"w": torch.zeros(300, 200)}
        dcp.load(state, storage_reader=reader)  # torch's own planner
        assert torch.equal(state["w"], indexed_tensor((300, 200)))
        return told

    for told in thread_world(2, load):
        assert len(told) > 1
        assert told == sorted(told)
        assert told[-1][0] == told[-1][1] >= 240000


def test_the_report_says_how_it_was_read(tmp_path: Path) -> None:
    """Mode, reason, bytes sent and received, rounds, imbalance, and seconds of both."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200))})
    layout = replicas(2)
    ranks = thread_world(
        2,
        load_rank,
        tmp_path,
        lambda _: {"w": layout.distribute(indexed_tensor((300, 200)))},
        BLOCKS,
    )
    cooperation = ranks[0].report.cooperation
    assert (cooperation.mode, cooperation.reason) == ("cooperative", "asked for")
    assert abs(cooperation.bytes_sent - 120000) < 2048
    assert {"read in rounds", "exchange"} <= set(ranks[0].report.seconds)
    text = str(ranks[0].report)
    assert "cooperative (asked for)" in text
    assert f"in {cooperation.rounds} rounds" in text
    assert ranks[0].report.to_dict()["cooperation"]["rounds"] == cooperation.rounds


@pytest.mark.parametrize("storage", ["local", "remote"])
@pytest.mark.parametrize("dest", ["rows4", "hsdp2x2"])
def test_auto_chooses_by_storage_and_bytes(
    saved: Callable[[str], Path], dest: str, storage: str
) -> None:
    """A local disk is read directly; of another source replicas read each byte once."""
    layout = LAYOUTS[dest]
    make = partial(make_state, SMALL, layout)
    options = ReaderOptions(auto_bytes=1000, threads=2)
    path = saved("rows4")

    def load(rank: int) -> LoadReport:
        state = make(rank)
        checkpoint = RecordingCheckpoint(path) if storage == "remote" else path
        return dcp_reshard.load(state, checkpoint, options=options)

    for report in thread_world(4, load):
        expected = "cooperative" if (storage, dest) == ("remote", "hsdp2x2") else "direct"
        assert report.cooperation.mode == expected
        where = "on a disk of the host" if storage == "local" else "4 ranks on 1 hosts"
        assert where in report.cooperation.reason


class CountingReader(ReshardStorageReader):
    """Remembers every collective call of its own."""

    @property
    def waiting_for(self) -> str:
        return self.calls[-1]

    @waiting_for.setter
    def waiting_for(self, what: str) -> None:
        self.calls = [*getattr(self, "calls", []), what]


@pytest.mark.parametrize("dest", ["rows4", "replicas3"])
def test_what_auto_costs(saved: Callable[[str], Path], dest: str) -> None:
    """Where direct reading is chosen by place: nothing; by bytes: two collective calls."""
    layout = LAYOUTS[dest]
    path = saved("rows4")

    def load(rank: int, mode: str, remote: object) -> list[str]:
        checkpoint = RecordingCheckpoint(path) if remote else path
        reader = CountingReader(checkpoint, mode=mode, options=WHOLE)
        state = make_state(SMALL, layout, rank)
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
        assert reader.stats.cooperation.mode == "direct"
        return reader.calls

    direct, by_place, by_bytes = (
        thread_world(layout.size, load, mode, remote)[0]
        for mode, remote in (("direct", True), ("auto", False), ("auto", True))
    )
    assert by_place == direct
    more = ["end finding out what it wants", "say which bytes they need"]
    assert [call for call in by_bytes if call not in more] == direct
    assert len(by_bytes) == len(direct) + 2


def test_ranks_with_other_options(tmp_path: Path) -> None:
    """Sizes, threads and budgets may differ, as on hosts with other CPUs; the least counts."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200)), "v": torch.ones(500)})
    options = [
        BLOCKS,
        replace(BLOCKS, block_bytes=4096, shared_item_bytes=0, memory_budget=2**20, threads=1),
        ReaderOptions(whole_item_bytes=0, auto_ratio=3),
    ]

    def load(rank: int, mode: str) -> str:
        state = {"w": torch.zeros(300, 200), "v": torch.zeros(500)}
        report = dcp_reshard.load(
            state, RecordingCheckpoint(tmp_path), mode=mode, options=options[rank]
        )
        assert torch.equal(state["w"], indexed_tensor((300, 200)))
        assert report.cooperation.buffer_bytes <= 2**19
        return report.cooperation.mode

    assert thread_world(3, load, "cooperative") == ["cooperative"] * 3
    # The highest bars count: 64 MiB are not to be saved here.
    assert thread_world(3, load, "auto") == ["direct"] * 3


def test_ranks_that_would_wait_for_different_things(tmp_path: Path) -> None:
    """Other modes, or verification on some ranks only, are an error on all before reading."""
    save_state(tmp_path, {"w": torch.zeros(3, 3)})

    def load(rank: int, mode: str, verify: str) -> str:
        reader = ReshardStorageReader(
            tmp_path,
            mode=mode if rank else "direct",
            options=ReaderOptions(verify=verify if rank else "available", threads=2),
        )
        state = {"w": torch.ones(3, 3)}
        failures = find_failures(lambda: dcp.load(state, storage_reader=reader))
        assert bool((state["w"] == 1).all())
        return str(failures[0])

    for mode, verify in (("cooperative", "available"), ("auto", "available"), ("direct", "off")):
        for failure in thread_world(2, load, mode, verify):
            assert "ranks differ in the mode, verification or process group" in failure


def load_in_group_without_saying_so(rank: int, path: Path, mode: str) -> str:
    group = dist.new_group([0, 2])
    if rank == 1:
        return ""
    reader = ReshardStorageReader(path, mode=mode)
    state = {"w": torch.zeros(300, 200)}
    failures = find_failures(lambda: dcp.load(state, storage_reader=reader, process_group=group))
    return str(failures[0]) if failures else reader.stats.cooperation.mode


def test_a_group_that_the_reader_does_not_know(tmp_path: Path) -> None:
    """Told to cooperate, it asks for the group; left to choose, every rank reads for itself."""
    save_state(tmp_path, {"w": indexed_tensor((300, 200))})
    modes = thread_world(3, load_in_group_without_saying_so, tmp_path, "auto")
    assert modes == ["direct", "", "direct"]
    for rank in (0, 2):
        message = thread_world(3, load_in_group_without_saying_so, tmp_path, "cooperative")[rank]
        assert "2 ranks take part in the load, but the reader's process group has 3" in message


def test_a_single_rank_reads_directly(tmp_path: Path) -> None:
    """There is nobody to cooperate with: no error, and the report says so."""
    save_state(tmp_path, {"w": indexed_tensor((30, 20))})
    state = {"w": torch.zeros(30, 20)}
    report = dcp_reshard.load(state, tmp_path, mode="cooperative")
    assert torch.equal(state["w"], indexed_tensor((30, 20)))
    assert report.cooperation.mode == "direct"
    assert report.cooperation.reason == "this rank reads alone"


def test_other_modes_are_refused() -> None:
    """A misspelt mode is not taken for another."""
    with pytest.raises(ValueError, match="'cooperative', got 'together'"):
        ReshardStorageReader("anywhere", mode="together")


def test_the_next_round_is_read_while_this_one_is_exchanged(tmp_path: Path) -> None:
    """No rank begins to exchange round 1 before it has begun to read round 2."""
    full = indexed_tensor((300, 200))
    save_state(tmp_path, {"w": full})

    def load(rank: int) -> None:
        reading = threading.Event()
        windows: list[int] = []

        class Reader(ReshardStorageReader):
            @property
            def waiting_for(self) -> str:
                return ""

            @waiting_for.setter
            def waiting_for(self, what: str) -> None:
                if what.startswith("send the bytes of round 1 of "):
                    assert reading.wait(10)

        class Watched(RecordingCheckpoint):
            def open(self) -> ByteSource:
                return WatchedSource(super().open())

        class WatchedSource(RecordingSource):
            def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
                if threading.current_thread().name.startswith("dcp_reshard_window"):
                    windows.append(offset)
                    if len(windows) > 1:
                        reading.set()
                super().read_into(name, offset, buffers)

        # One request makes a round.
        options = ReaderOptions(memory_budget=2**18, block_bytes=8192, threads=1)
        reader = Reader(Watched(tmp_path), mode="cooperative", options=options)
        state = {"w": torch.zeros(300, 200)}
        dcp.load(state, storage_reader=reader)
        assert torch.equal(state["w"], full)
        assert len(windows) == reader.stats.cooperation.rounds > 2

    thread_world(2, load)


def test_not_every_rank_opens_every_file(tmp_path: Path) -> None:
    """Scalars and objects of all files travel from the rank that has read them."""

    def make(rank: int) -> State:
        return {f"{name}{rank}": value for name, value in (("t", torch.ones(9)), ("o", "text"))}

    save_world(tmp_path, 8, make)

    def load(rank: int) -> Loaded:
        state: State = {}
        for i in range(8):
            state |= {f"t{i}": torch.zeros(9), f"o{i}": None}
        checkpoint = RecordingCheckpoint(tmp_path)
        report = dcp_reshard.load(state, checkpoint, mode="cooperative", options=WHOLE)
        assert all(bool((state[f"t{i}"] == 1).all()) for i in range(8))
        assert all(state[f"o{i}"] == "text" for i in range(8))
        return Loaded(report, checkpoint.data_requests)

    ranks = thread_world(4, load)
    check_read_once(ranks)
    # Two files a rank, and one more where a file is cut between two ranks.
    opened = [len({request.name for request in rank.requests}) for rank in ranks]
    assert sum(opened) <= 8 + 3
    assert {rank.report.cooperation.rounds for rank in ranks} <= {1, 2}


@pytest.mark.parametrize("options", [BLOCKS, WHOLE], ids=["blocks", "whole"])
def test_pieces_travel_from_the_memory_of_a_device(
    options: ReaderOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where messages are in other memory than windows, as for NCCL, every piece is moved there."""
    # Another name of the CPU: what was made without it does not count as being there.
    monkeypatch.setattr(lockstep, "collective_device", lambda group: torch.device("cpu", 0))
    layout = grid(2, 2)
    tensors = {
        "w": indexed_tensor((257, 130)),
        "lazy": indexed_tensor((60, 80), torch.complex64).conj(),
        "s": torch.tensor(3.0),
    }
    save_state(tmp_path, tensors)

    def make(rank: int) -> State:
        return {
            "w": layout.distribute(tensors["w"]),
            "lazy": tensors["lazy"].resolve_conj().clone(),
            "s": tensors["s"].clone(),
        }

    ranks = thread_world(4, load_rank, tmp_path, make, options)
    assert sum(rank.report.records_unverified for rank in ranks) == 0
