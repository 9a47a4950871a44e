"""Cooperative reading by real processes: bytes of the job, ranks that fail or die in any phase."""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

import dcp_reshard
from dcp_reshard import (
    PeerFailedError,
    ReaderOptions,
    ReshardLoadPlanner,
    ReshardStorageReader,
    cooperative,
    lockstep,
    verdict,
)
from dcp_reshard.metadata import read_catalog
from dcp_reshard.options import RetryPolicy
from dcp_reshard.outcome import own_errors
from dcp_reshard.payload import PROBE_BYTES
from dcp_reshard.storage import ByteSource, LocalSource
from tests.support.failures import find_failures
from tests.support.faults import EXCEPTIONS
from tests.support.processes import RankError
from tests.support.sources import InterceptedCheckpoint, RecordingCheckpoint
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

SHAPES = [(1024, 512), (512, 1024), (3000,)]
DTYPES = [torch.float32, torch.bfloat16, torch.float32]
UNIQUE = sum(
    torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(SHAPES, DTYPES, strict=True)
)
# Several rounds, of which some read blocks.
OPTIONS = ReaderOptions(
    memory_budget=2**20,
    block_bytes=8192,
    shared_item_bytes=2**16,
    threads=2,
    retry=RetryPolicy(tries=1),
)


def make_state(mesh: tuple[int, ...], placements: Sequence[Placement]) -> dict[str, Any]:
    device_mesh = init_device_mesh("cpu", mesh)
    state: dict[str, Any] = {"step": torch.tensor(7.0)}
    for i, (shape, dtype) in enumerate(zip(SHAPES, DTYPES, strict=True)):
        fitting = [
            p if not isinstance(p, Shard) or p.dim < len(shape) else Replicate() for p in placements
        ]
        full = indexed_tensor(shape, dtype)
        state[f"w{i}"] = distribute_tensor(full, device_mesh, fitting, src_data_rank=None)
    return state


def save(rank: int, path: str) -> None:
    dcp.save(make_state((2,), [Shard(0)]), checkpoint_id=path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint of two ranks."""
    path = str(tmp_path_factory.mktemp("saved"))
    gloo_world(2, save, path)
    return path


def load(rank: int, path: str, mesh: tuple[int, ...], placements: Sequence[Placement]) -> int:
    state = make_state(mesh, placements)
    wanted = snapshot(state)
    fill_with_sentinel(state)
    checkpoint = RecordingCheckpoint(path)
    reader = ReshardStorageReader(checkpoint, mode="cooperative", options=OPTIONS)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    check_same(snapshot(state), wanted, where=f"rank {rank}")
    assert reader.stats.cooperation.rounds > 1
    assert reader.stats.cooperation.buffer_bytes <= OPTIONS.memory_budget
    assert reader.stats.records_unverified == 0
    return checkpoint.data_bytes


@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((3,), [Shard(0)]),
    ],
    ids=["columns4", "replicas4", "hsdp2x2", "rows3"],
)
def test_the_job_reads_every_byte_once(
    saved: str, mesh: tuple[int, ...], placements: Sequence[Placement]
) -> None:
    """Over gloo, whatever the layout, every rank gets its part and no byte is read twice."""
    size = torch.Size(mesh).numel()
    assert sum(gloo_world(size, load, saved, mesh, placements)) <= 1.02 * UNIQUE


def load_in_a_subgroup(rank: int, path: str) -> None:
    group = dist.new_group([1, 2])
    if rank == 0:
        return
    state = {"w1": torch.zeros(SHAPES[1], dtype=DTYPES[1])}
    report = dcp_reshard.load(state, path, mode="cooperative", process_group=group, options=OPTIONS)
    assert torch.equal(state["w1"], indexed_tensor(SHAPES[1], DTYPES[1]))
    assert report.cooperation.bytes_received > 0


def test_a_subgroup_reads_by_itself(saved: str) -> None:
    """Rank numbers of a group are not those of the world."""
    gloo_world(3, load_in_a_subgroup, saved)


class FailingCheckpoint(InterceptedCheckpoint):
    """Fails, or dies, when it is asked for the size of a data file, or for the bytes of a round."""

    def __init__(self, path: str, *, where: str, number: int, how: str) -> None:
        """Take the folder, the method and the number of the call, and what to do there."""
        super().__init__(path)
        self._where, self._left, self._how = where, number, how

    def _count(self, where: str, name: str) -> None:
        if where != self._where or not name.endswith(".distcp"):
            return
        self._left -= 1
        if self._left == 0:
            fail(self._how)

    def size(self, name: str) -> int:
        self._count("size", name)
        return super().size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        # What is looked into in large chunks is not more than their two ends.
        if sum(buffer.nbytes for buffer in buffers) > 2 * PROBE_BYTES:
            self._count("read", name)
        super().read_into(name, offset, buffers)


def fail(how: str) -> None:
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "Ctrl-C":
        os.kill(os.getpid(), signal.SIGINT)
        return
    raise EXCEPTIONS[how]()


class FailingPlanner(ReshardLoadPlanner):
    """Fails, or dies, when it is asked for memory."""

    how = ""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        fail(self.how)
        return super().resolve_tensor(read_item)


class DyingReader(ReshardStorageReader):
    """Dies when it begins to wait for other ranks to do a certain thing."""

    dies_at = ""

    @property
    def waiting_for(self) -> str:
        return self._waiting_for

    @waiting_for.setter
    def waiting_for(self, what: str) -> None:
        self._waiting_for = what
        if self.dies_at and what.startswith(self.dies_at):
            fail("die")


# Where a rank fails, and what the others wait for then, if it dies.
PHASES = {
    "agreement": "end finding out what it wants",
    "placing": "end looking into large chunks",
    "planning": "end planning its requests",
    "requests": "send their requests",
    "read": "end reading round 1 of ",
    "exchange": "send the bytes of round 2 of ",
    "scatter": "end reading round 2 of ",
    "verdict": "end adding up checksums",
}
# A call to the storage, by method and number. What fails in the exchange is the read of the next
# round, which goes on meanwhile.
CALLS = {"placing": ("size", 1), "read": ("read", 1), "exchange": ("read", 2)}
# No hook of the caller's is called there: a function of this package fails.
FUNCTIONS: dict[str, tuple[Any, str]] = {
    "planning": (cooperative, "plan_domains"),
    "verdict": (verdict, "join_parts"),
}
# "requests" is a collective call, in which a rank can only die; the work for it is "planning".
WORK = sorted(PHASES.keys() - {"requests"})
VICTIM = 1


def load_failing(rank: int, path: str, phase: str, how: str) -> None:
    """A load of replicas, in which one rank fails."""
    state = {f"w{i}": torch.zeros(shape, dtype=DTYPES[i]) for i, shape in enumerate(SHAPES)}
    checkpoint: Any = RecordingCheckpoint(path)
    planner = ReshardLoadPlanner()
    calls = 0

    def on_progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if rank == VICTIM and phase == "scatter" and calls == 1:
            fail(how)

    dies_waiting = how == "die" and phase in ("requests", "exchange")
    if rank == VICTIM and phase in CALLS and not dies_waiting:
        where, number = CALLS[phase]
        checkpoint = FailingCheckpoint(path, where=where, number=number, how=how)
    if rank == VICTIM and phase == "agreement":
        planner = FailingPlanner()
        planner.how = how
    reader = DyingReader(checkpoint, mode="cooperative", options=OPTIONS, on_progress=on_progress)
    if rank == VICTIM and dies_waiting:
        reader.dies_at = PHASES[phase]

    def load() -> None:
        dcp.load(state, storage_reader=reader, planner=planner)

    if rank == VICTIM and phase in FUNCTIONS:
        with failing_function(*FUNCTIONS[phase], how):
            load()
    else:
        load()


@contextmanager
def failing_function(module: Any, name: str, how: str) -> Iterator[None]:
    """In this process, a function of a module fails, or dies, before it does its work."""
    real = getattr(module, name)

    def failing(*args: Any, **kwargs: Any) -> Any:
        fail(how)
        return real(*args, **kwargs)

    setattr(module, name, failing)
    try:
        yield
    finally:
        setattr(module, name, real)


def load_telling(rank: int, path: str, phase: str, how: str) -> None:
    """The same, and what `dcp_reshard.load` makes of a failure."""
    waiting_for = "all ranks to " + PHASES[phase]
    with own_errors(group=dist.group.WORLD, waiting_for=lambda: waiting_for):
        load_failing(rank, path, phase, how)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_that_dies(saved: str, phase: str, size: int) -> None:
    """The others are told which rank it was, and what they waited for; none waits for ever."""
    with pytest.raises(BaseExceptionGroup) as caught:
        gloo_world(size, load_telling, saved, phase, "die")
    errors = caught.value.exceptions
    assert len(errors) == size
    assert sum(isinstance(error, RankError) for error in errors) == 1
    for error in errors:
        if not isinstance(error, RankError):
            assert isinstance(error, PeerFailedError), error
            assert f"no sign of rank {VICTIM} " in str(error)
            assert f"waited for all ranks to {PHASES[phase]}" in str(error)


def catch_failing(rank: int, path: str, phase: str, how: str) -> dict[int, str]:
    failures = find_failures(lambda: load_failing(rank, path, phase, how))
    return {number: f"{type(error).__name__}: {error}" for number, error in failures.items()}


def check_outcomes(outcomes: Sequence[dict[int, str]]) -> str:
    """What the victim has raised; all ranks must have been told it, and who it was."""
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert sorted(outcomes[0]) == list(range(len(outcomes)))
    for rank in set(outcomes[0]) - {VICTIM}:
        start = f"PeerFailedError: rank {VICTIM} of the load failed while "
        assert outcomes[0][rank].startswith(start)
    return outcomes[0][VICTIM]


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("phase", WORK)
def test_a_rank_that_fails(saved: str, phase: str, size: int) -> None:
    """All ranks raise the same: that rank's error, and that it was this rank on the others."""
    assert "told to fail" in check_outcomes(
        gloo_world(size, catch_failing, saved, phase, "os")
    )


def catch_every_kind(rank: int, path: str, phase: str) -> list[dict[int, str]]:
    return [catch_failing(rank, path, phase, kind) for kind in EXCEPTIONS]


@pytest.mark.parametrize("phase", WORK)
def test_any_exception_in_any_phase(saved: str, phase: str) -> None:
    """No memory, an interrupt, what cannot be pickled: all ranks are told, and load again."""
    by_rank = gloo_world(3, catch_every_kind, saved, phase)
    for kind, outcomes in zip(EXCEPTIONS, zip(*by_rank, strict=True), strict=True):
        told = check_outcomes(outcomes)
        assert type(EXCEPTIONS[kind]()).__name__ in told or kind == "os", kind
        assert "told to fail" in told or kind in ("no text", "bytes"), kind


def load_with_full_device(rank: int, path: str) -> list[dict[int, str]]:
    """On one rank each use of the device that messages are in fails once, in a load of its own."""
    real, uses, outcomes = lockstep.collective_device, 0, []

    def collective_device(group: Any) -> torch.device:
        nonlocal uses
        uses += 1
        if rank == VICTIM and uses == len(outcomes) + 1:
            raise torch.OutOfMemoryError("told to fail")
        return real(group)

    lockstep.collective_device = collective_device  # type: ignore[attr-defined]
    while not outcomes or outcomes[-1]:
        uses = 0
        outcomes.append(catch_failing(rank, path, "none", "none"))
    return outcomes


def test_a_device_that_is_full_at_any_time(saved: str) -> None:
    """Wherever memory for messages is taken, all ranks are told that there was none."""
    *failed, loaded = zip(*gloo_world(3, load_with_full_device, saved), strict=True)
    assert loaded == ({}, {}, {})
    assert len(failed) > 10
    for outcomes in failed:
        assert all(outcome == outcomes[0] for outcome in outcomes)
        assert outcomes[0][VICTIM] == "OutOfMemoryError: told to fail"


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def load_by_choice(
    rank: int, path: str, placements: Sequence[Placement], remote: object
) -> tuple[list[str], dict[str, Any], str]:
    lines = Lines()
    logger = logging.getLogger("dcp_reshard.job_read")
    logger.setLevel(logging.INFO)
    logger.addHandler(lines)
    checkpoint = RecordingCheckpoint(path) if remote else path
    options = replace(OPTIONS, auto_bytes=1000)
    report = dcp_reshard.load(make_state((3,), placements), checkpoint, options=options)
    return lines.lines, report.to_dict()["cooperation"], str(report)


@pytest.mark.parametrize(
    ("placements", "mode", "times"), [([Replicate()], "cooperative", 3), ([Shard(0)], "direct", 1)]
)
def test_what_auto_decides_by_bytes_is_logged(
    saved: str, placements: Sequence[Placement], mode: str, times: int
) -> None:
    """With the numbers that decided, once, in the log and the report, and alike on all ranks."""
    ranks = gloo_world(3, load_by_choice, saved, placements, True)
    reasons = {cooperation["reason"] for _, cooperation, _ in ranks}
    assert len(reasons) == 1
    (reason,) = reasons
    match = re.fullmatch(
        r"3 ranks on 1 hosts would read (\d+) bytes from remote storage, each for itself, of which "
        r"(\d+) are needed once",
        reason,
    )
    assert match is not None
    total, unique = map(int, match.groups())
    assert times * UNIQUE <= total <= times * UNIQUE + 12  # a scalar on each rank
    assert UNIQUE <= unique <= 1.01 * UNIQUE  # containers, too
    for lines, cooperation, text in ranks:
        assert lines == [f"reading in mode {mode!r}: {reason}"]
        assert cooperation["mode"] == mode
        assert f"{mode} ({reason})" in text


def test_what_auto_decides_by_place_is_logged(saved: str) -> None:
    """On a disk of the host, with the numbers of ranks and hosts."""
    reason = "the files are on a disk of the host (3 ranks on 1 hosts)"
    for lines, cooperation, text in gloo_world(3, load_by_choice, saved, [Replicate()], False):
        assert lines == [f"reading in mode 'direct': {reason}"]
        assert (cooperation["mode"], cooperation["reason"]) == ("direct", reason)
        assert f"direct ({reason})" in text


class FlakyCheckpoint(FailingCheckpoint):
    """Gives wrong bytes, once."""

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        super().read_into(name, offset, buffers)
        if self._left == 0:
            self._left = -1
            buffers[0][-1] ^= 1

    def _count(self, where: str, name: str) -> None:
        if where == self._where and name.endswith(".distcp"):
            self._left -= 1


def load_flaky(rank: int, path: str, mode: str) -> tuple[int, int]:
    """Rows over all ranks, uneven; a bit is wrong in what the last one reads first."""
    state = make_state((dist.get_world_size(),), [Shard(0)])
    wanted = snapshot(state)
    fill_with_sentinel(state)
    number = 1 if rank == dist.get_world_size() - 1 else -1
    checkpoint = FlakyCheckpoint(path, where="read", number=number, how="none")
    reader = ReshardStorageReader(checkpoint, mode=mode, options=OPTIONS)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    check_same(snapshot(state), wanted, where=f"rank {rank}")
    return reader.stats.rereads, reader.stats.records_unverified


@pytest.mark.parametrize("mode", ["cooperative", "direct"])
@pytest.mark.parametrize("size", [3, 4])
def test_wrong_bytes_that_come_once(saved: str, size: int, mode: str) -> None:
    """A record that several ranks have read is read once more by all of them, and then right."""
    told = gloo_world(size, load_flaky, saved, mode)
    assert [sum(column) for column in zip(*told, strict=True)] == [1, 0]


def load_damaged(rank: int, folders: list[str], mode: str) -> list[dict[int, str]]:
    outcomes = []
    for folder in folders:
        state = make_state((dist.get_world_size(),), [Shard(0)])
        reader = ReshardStorageReader(folder, mode=mode, options=OPTIONS)
        failures = find_failures(lambda s=state, r=reader: dcp.load(s, storage_reader=r))
        outcomes.append({n: f"{type(e).__name__}: {e}" for n, e in failures.items()})
    return outcomes


@pytest.mark.parametrize("mode", ["cooperative", "direct"])
@pytest.mark.parametrize("size", [3, 4])
def test_a_flipped_bit(saved: str, tmp_path: Path, size: int, mode: str) -> None:
    """In any record, whoever reads it: all ranks get the same error, which names the tensor."""
    folders = [shutil.copytree(saved, tmp_path / f"w{i}") for i in range(len(SHAPES))]
    for i, folder in enumerate(folders):
        flip(folder, f"w{i}")
    by_rank = gloo_world(size, load_damaged, [str(folder) for folder in folders], mode)
    for i, outcomes in enumerate(zip(*by_rank, strict=True)):
        assert all(outcome == outcomes[0] for outcome in outcomes)
        told = [text for text in outcomes[0].values() if not text.startswith("PeerFailedError")]
        assert told
        for text in told:
            assert text.startswith("CorruptRecordError")
            assert f"`w{i}`" in text
            assert "CRC-32 is" in text
            assert "recorded was" in text


def flip(folder: Path, fqn: str) -> None:
    """Flip a bit in the middle of the first chunk of a tensor, where its elements are."""
    source = LocalSource(folder)
    catalog = read_catalog(source)
    source.close()
    stored = catalog.tensors[fqn]
    file = folder / catalog.files[stored.files[0]]
    contents = bytearray(file.read_bytes())
    contents[stored.starts[0] + stored.lengths[0] // 2] ^= 1
    file.write_bytes(contents)


def load_interrupted(rank: int, path: str, phase: str) -> str:
    before = signal.getsignal(signal.SIGINT)
    try:
        load_telling(rank, path, phase, "Ctrl-C")
        return "loaded"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    finally:
        assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("phase", ["planning", "scatter", "verdict"])
def test_a_rank_that_is_interrupted(saved: str, phase: str) -> None:
    """An interrupt from the keyboard stops all ranks; its own raises it, the others say whose."""
    outcomes = gloo_world(3, load_interrupted, saved, phase)
    assert outcomes[VICTIM].startswith("KeyboardInterrupt")
    for rank in {0, 1, 2} - {VICTIM}:
        assert "KeyboardInterrupt" in outcomes[rank]
        assert f"rank {VICTIM} of the load failed while" in outcomes[rank]


def test_a_load_after_a_failed_one(saved: str) -> None:
    """The ranks are still in step after a failure: the same group loads again."""
    assert gloo_world(3, load_twice, saved) == [True] * 3


def load_twice(rank: int, path: str) -> bool:
    assert catch_failing(rank, path, "read", "os")
    state = {f"w{i}": torch.zeros(shape, dtype=DTYPES[i]) for i, shape in enumerate(SHAPES)}
    dcp_reshard.load(state, path, mode="cooperative", options=OPTIONS)
    return all(
        torch.equal(state[f"w{i}"], indexed_tensor(shape, DTYPES[i]))
        for i, shape in enumerate(SHAPES)
    )
