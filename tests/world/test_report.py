"""`dcp_reshard.load` and what it says that it did."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import (
    LoadReport,
    MissingTensorError,
    ReaderOptions,
    ReshardLoadPlanner,
    ReshardStorageReader,
)
from dcp_reshard.metadata import read_catalog
from dcp_reshard.storage import LocalSource, read_bytes
from tests.support.checkpoints import save_state, save_world
from tests.support.failures import catch_failure
from tests.support.sources import RecordingCheckpoint
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world, thread_world

ROWS, COLUMNS = 300, 128


def make_two_rows(rank: int) -> dict[str, Any]:
    """What two ranks save: chunks of 76,800 and 8 bytes each, two whole tensors, two objects."""
    mesh = init_device_mesh("cpu", (2,))
    return {
        "big": cut_rows(indexed_tensor((ROWS, COLUMNS)), mesh),
        "small": cut_rows(indexed_tensor((4, 1)), mesh),
        "half": indexed_tensor((60,), torch.bfloat16),
        "step": torch.tensor(7),
        "options": {"lr": 0.5, "betas": (0.9, 0.95)},
    }


def cut_rows(full: torch.Tensor, mesh: Any) -> torch.Tensor:
    return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)


def make_empty() -> dict[str, Any]:
    return {
        "big": torch.zeros(ROWS, COLUMNS),
        "small": torch.zeros(4, 1),
        "half": torch.zeros(60, dtype=torch.bfloat16),
        "step": torch.tensor(0),
        "options": {"lr": 0.0, "betas": ()},
    }


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("two")
    save_world(path, 2, make_two_rows)
    return path


def count_object_records(path: Path) -> int:
    """Records in the containers of all objects, by Python's own zip module."""
    source = LocalSource(path)
    catalog = read_catalog(source)
    total = 0
    for item in catalog.objects.values():
        name = catalog.files[item.file]
        contents = read_bytes(source, name, item.start, item.start + item.length)
        total += len(zipfile.ZipFile(io.BytesIO(contents)).namelist())
    source.close()
    return total


BYTES_OF_ALL = ROWS * COLUMNS * 4 + 4 * 4 + 60 * 2 + 8


def test_a_whole_load_is_counted_exactly(path: Path) -> None:
    """Bytes, chunks, records, requests and values are those of the checkpoint and its files."""
    checkpoint = RecordingCheckpoint(path)
    state = make_empty()
    report = dcp_reshard.load(state, checkpoint)
    assert torch.equal(state["big"], indexed_tensor((ROWS, COLUMNS)))
    assert state["options"] == {"lr": 0.5, "betas": (0.9, 0.95)}
    assert isinstance(report, LoadReport)
    assert report.rank == 0
    assert (report.tensors, report.objects) == (4, 2)
    assert report.bytes_wanted == BYTES_OF_ALL
    assert report.bytes_direct == ROWS * COLUMNS * 4
    assert report.bytes_read == checkpoint.source.bytes_requested
    assert report.requests == len(checkpoint.source.requests)
    assert report.read_amplification == report.bytes_read / BYTES_OF_ALL
    assert report.chunks_read == 2 + 2 + 1 + 1
    assert report.chunks_read_whole == ()
    assert report.records_verified == report.chunks_read + count_object_records(path)
    assert report.records_unverified == 0
    assert report.casts == report.missing == report.unexpected == ()
    phases = {name: s for name, s in report.seconds.items() if name != "total"}
    assert {"metadata", "read", "verify"} <= phases.keys()
    assert all(s >= 0 for s in phases.values())
    assert sum(phases.values()) <= report.seconds["total"]


def test_each_rank_counts_its_own_part(path: Path) -> None:
    """Of three ranks in turn, each reports its rows, and no checksum of what it read in part."""
    for rank, (rows, small) in enumerate([(100, 2), (100, 2), (100, 0)]):
        with fake_world(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            state = {
                "big": cut_rows(torch.zeros(ROWS, COLUMNS), mesh),
                "small": cut_rows(torch.zeros(4, 1), mesh),
            }
            report = dcp_reshard.load(state, path, no_dist=True)
        assert report.rank == rank
        assert report.bytes_wanted == rows * COLUMNS * 4 + small * 4
        assert report.tensors == (2 if small else 1)
        # Of 150 rows a chunk, rank 1 has 50 of each. Small chunks are read whole, and verified.
        assert report.chunks_read == (2 if rank == 1 else 1) + (1 if small else 0)
        assert report.records_verified == (1 if small else 0)
        assert report.records_unverified == (2 if rank == 1 else 1)
        assert report.unexpected == ("half", "options.betas", "options.lr", "step")


def load_rows(rank: int, path: Path) -> LoadReport:
    mesh = init_device_mesh("cpu", (3,))
    state = make_empty() | {"big": cut_rows(torch.zeros(ROWS, COLUMNS), mesh)}
    return dcp_reshard.load(state, path)


def test_ranks_together_verify_every_record(path: Path) -> None:
    """Records read by several ranks are verified by one of them, and counted once in the job."""
    reports = thread_world(3, load_rows, path)
    assert [r.rank for r in reports] == [0, 1, 2]
    assert [r.records_unverified for r in reports] == [0, 0, 0]
    # Two records of `big` in parts; by each rank, four of small tensors and those of the objects.
    own = 4 + count_object_records(path)
    assert sum(r.records_verified for r in reports) == 2 + 3 * own


def test_all_keys_that_do_not_match_are_listed(path: Path) -> None:
    """However many keys are missing or unexpected, the report has all, and the error too."""
    absent = {f"absent.{i:02}": torch.full((2,), 5.0) for i in range(30)}
    state: dict[str, Any] = {"half": torch.zeros(60, dtype=torch.bfloat16), **absent, "old": 3}
    report = dcp_reshard.load(state, path, strict=False)
    assert report.missing == (*absent, "old")
    assert report.unexpected == ("big", "options.betas", "options.lr", "small", "step")
    assert report.tensors == 1
    assert all(torch.equal(state[key], torch.full((2,), 5.0)) for key in absent)
    assert state["old"] == 3
    assert torch.equal(state["half"], indexed_tensor((60,), torch.bfloat16))

    state["half"].zero_()
    error = catch_failure(lambda: dcp_reshard.load(state, path))
    assert isinstance(error, MissingTensorError)
    assert "31 keys" in str(error)
    assert not state["half"].any()


def test_renamed_keys_are_neither_missing_nor_unexpected(path: Path) -> None:
    """A mapping or a function gives the stored key; the report uses the caller's names."""
    state = {"module.half": torch.zeros(60), "module.step": torch.tensor(0)}
    rename = {"module.half": "half", "module.step": "step"}
    for given in (rename, lambda key: key.removeprefix("module.")):
        state["module.half"].zero_()
        report = dcp_reshard.load(state, path, rename=given, dtype_policy="widen")
        assert torch.equal(state["module.half"], indexed_tensor((60,)))
        assert state["module.step"].item() == 7
        assert report.missing == ()
        assert report.unexpected == ("big", "options.betas", "options.lr", "small")
        assert report.casts == (("module.half", "torch.bfloat16", "torch.float32"),)
        # Wanted is counted as stored: that is what has to be read.
        assert report.bytes_wanted == 60 * 2 + 8


def test_chunks_of_unknown_form_are_named(tmp_path: Path) -> None:
    """What only `torch.load` understands is read whole, and the report says so."""
    lazy = indexed_tensor((50, 80), torch.complex64).conj()
    save_state(tmp_path, {"lazy": lazy, "plain": indexed_tensor((5,))})
    state = {"lazy": torch.zeros(50, 80, dtype=torch.complex64), "plain": torch.zeros(5)}
    report = dcp_reshard.load(state, tmp_path)
    assert torch.equal(state["lazy"], lazy.resolve_conj())
    assert report.chunks_read_whole == ("lazy",)
    assert report.chunks_read == 2
    for rank in range(3):
        with fake_world(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            cut = distribute_tensor(
                torch.zeros(50, 80, dtype=torch.complex64), mesh, [Shard(1)], src_data_rank=None
            )
            dcp_reshard.load({"lazy": cut}, tmp_path, no_dist=True)
            assert torch.equal(cut.to_local(), lazy.chunk(3, 1)[rank].resolve_conj())


def test_checksums_can_be_left_out(path: Path) -> None:
    """With ``verify="off"`` no record counts as verified."""
    report = dcp_reshard.load(make_empty(), path, options=ReaderOptions(verify="off"))
    assert report.records_verified == 0
    assert report.records_unverified >= report.chunks_read


def test_the_report_is_json_and_a_table(path: Path) -> None:
    """`to_dict` survives JSON unchanged; `str` has a line for each thing that was out of order."""
    state = {"half": torch.zeros(60), "absent": torch.zeros(1)}
    report = dcp_reshard.load(state, path, strict=False, dtype_policy="widen")
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain["missing"] == ["absent"]
    assert plain["casts"] == [["half", "torch.bfloat16", "torch.float32"]]
    assert plain["bytes_wanted"] == 120
    lines = {line.split()[0]: line for line in str(report).splitlines()}
    assert "half (torch.bfloat16 to torch.float32)" in lines["cast"]
    assert "absent" in lines["missing"]
    assert "5: big" in lines["unexpected"]
    assert str(path) in lines["checkpoint"]
    assert "120 B" in lines["wanted"]


def test_a_load_of_nothing_reports_zeros(path: Path) -> None:
    """An empty state dict is loaded, and divides nothing by zero."""
    report = dcp_reshard.load({}, path)
    assert (report.bytes_wanted, report.tensors, report.objects) == (0, 0, 0)
    assert report.read_amplification == 0
    assert len(report.unexpected) == 6


def test_progress_grows_to_the_total(path: Path) -> None:
    """`on_progress` counts up without a step back, and ends at the total it has always named."""
    calls: list[tuple[int, int]] = []
    options = ReaderOptions(memory_budget=512 * 2**10, threads=4)
    reader = ReshardStorageReader(
        path, options=options, on_progress=lambda *call: calls.append(call)
    )
    dcp.load(make_empty(), storage_reader=reader, planner=ReshardLoadPlanner())
    done, totals = zip(*calls, strict=True)
    assert len(done) > 1
    assert list(done) == sorted(set(done))
    assert set(totals) == {done[-1]}
    assert done[-1] == ROWS * COLUMNS * 4


def test_progress_bar_goes_to_stderr(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``progress=True`` writes one bar, which ends at 100 %, and nothing on stdout."""
    dcp_reshard.load(make_empty(), path, progress=True)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "100%" in printed.err
    dcp_reshard.load(make_empty(), path)
    assert capsys.readouterr() == ("", "")


def load_with_bar(rank: int, path: Path) -> None:
    dcp_reshard.load(make_empty(), path, progress=True)


def test_only_rank_0_shows_a_bar(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ranks that load together, or each alone, show one bar in all."""
    thread_world(3, load_with_bar, path)
    assert capsys.readouterr().err.count("\n") == 1
    with fake_world(1, 3):
        dcp_reshard.load(make_empty(), path, progress=True, no_dist=True)
    assert capsys.readouterr() == ("", "")


class Counter:
    """A `Stateful` value."""

    def __init__(self) -> None:
        self.step = torch.tensor(0)
        self.loaded: list[dict[str, Any]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"lr": 0.0, "step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded.append(state_dict)


def test_stateful_values_are_given_what_was_loaded(tmp_path: Path) -> None:
    """`load` asks a `Stateful` for its state dict, fills it, and hands it over, once."""
    save_state(tmp_path, {"counter": {"lr": 0.25, "step": torch.tensor(12)}})
    counter = Counter()
    state = {"counter": counter}
    dcp_reshard.load(state, tmp_path)
    assert state["counter"] is counter
    assert counter.loaded == [{"lr": 0.25, "step": torch.tensor(12)}]
    assert counter.step.item() == 12
