"""`verify`: a checkpoint read from end to end, without a model, in bounded memory."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch

from dcp_reshard import ReaderOptions, RetryPolicy, StorageError, verify
from tests.support.bad_checkpoints import SECOND, make_state, save_good
from tests.support.checkpoints import save_state, save_world
from tests.support.faults import FaultyOs, patient
from tests.support.sources import RecordingCheckpoint
from tests.support.tensors import indexed_tensor

BLOCKS = ReaderOptions(memory_budget=512 * 2**10, threads=2)


def make_large() -> dict[str, Any]:
    return {"large": indexed_tensor((700, 1000)), "small": indexed_tensor((5,)), "step": 7}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    save_state(path, make_large())
    return path


@pytest.fixture
def path(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(whole, tmp_path / "copy")


@pytest.mark.parametrize("options", [ReaderOptions(), ReaderOptions(threads=1), BLOCKS])
def test_every_byte_is_read_once(whole: Path, options: ReaderOptions) -> None:
    """All records are compared, all items are read, hardly any byte twice."""
    checkpoint = RecordingCheckpoint(whole)
    report = verify(checkpoint, options=options)
    assert report.ok
    assert (report.tensors, report.chunks, report.objects, report.files) == (2, 2, 1, 1)
    assert report.records_verified == 20
    assert report.records_unverified == 0
    size = (whole / "__0_0.distcp").stat().st_size
    assert size - 4096 <= checkpoint.data_bytes <= size + 4 * 4096
    assert max(request.length for request in checkpoint.data_requests) <= options.max_request_bytes


def test_memory_stays_in_the_budget(whole: Path) -> None:
    """A large chunk goes through a few small buffers."""
    tracemalloc.start()
    assert verify(whole, options=BLOCKS).ok
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * BLOCKS.memory_budget


def test_progress_is_told_to_the_end(whole: Path) -> None:
    """Bytes done grow up to all bytes of all items."""
    told: list[tuple[int, int]] = []
    verify(whole, options=BLOCKS, on_progress=lambda done, total: told.append((done, total)))
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    assert told[-1][0] == told[-1][1] == (whole / "__0_0.distcp").stat().st_size
    assert len(told) > 5


@pytest.mark.parametrize("key", ["large", "small", "step"])
def test_a_flipped_bit_is_found_and_named(path: Path, key: str) -> None:
    """Damage to a large tensor, a small one, or an object, is a problem with its place."""
    metadata = pickle.loads((path / ".metadata").read_bytes())
    [place] = [place for index, place in metadata.storage_data.items() if index.fqn == key]
    data = bytearray((path / "__0_0.distcp").read_bytes())
    value = make_large()[key]
    contents = b"K\x07." if key == "step" else value.numpy().tobytes()
    data[data.index(contents, place.offset) + len(contents) // 2] ^= 0x40
    (path / "__0_0.distcp").write_bytes(data)
    report = verify(path, options=BLOCKS)
    assert not report.ok
    [problem] = report.problems
    assert (problem.fqn, problem.file) == (key, "__0_0.distcp")
    assert problem.kind in ("checksum", "item")
    assert problem.start == place.offset
    assert problem.end == place.offset + place.length
    assert problem.message in str(report)


def test_all_that_is_wrong_is_named(tmp_path: Path) -> None:
    """A missing file, damage in another and a hole in a tensor are three kinds of problems."""
    save_world(tmp_path, 3, lambda rank: make_state() | {f"t{rank}": indexed_tensor((9,)) + rank})
    (tmp_path / "__2_0.distcp").unlink()
    data = (tmp_path / SECOND).read_bytes()
    (tmp_path / SECOND).write_bytes(data[:100] + b"XX" + data[102:-1])
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["t0"].size = torch.Size((12,))
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    report = verify(tmp_path, options=ReaderOptions(retry=RetryPolicy(tries=1)))
    assert {problem.kind for problem in report.problems} == {"coverage", "file", "item"}
    assert any("t0" in p.message and "9:12" in p.message for p in report.problems)
    assert any(p.file == "__2_0.distcp" for p in report.problems)
    assert report.num_problems == len(report.problems) >= 4


def test_records_without_checksums_count(tmp_path: Path) -> None:
    """They are problems only if checksums are required."""
    torch.serialization.set_crc32_options(False)
    try:
        save_state(tmp_path, make_large())
    finally:
        torch.serialization.set_crc32_options(True)
    report = verify(tmp_path)
    assert report.ok
    assert (report.records_verified, report.records_unverified) == (0, 20)
    report = verify(tmp_path, options=ReaderOptions(verify="required"))
    assert report.num_problems == 20
    assert verify(tmp_path, options=ReaderOptions(verify="off")).ok


def test_what_is_unusual_is_noted(path: Path) -> None:
    """Bytes behind the last item and files of no key are notes."""
    with (path / "__0_0.distcp").open("ab") as file:
        file.write(b"more")
    (path / "README").write_text("hello")
    report = verify(path)
    assert report.ok
    assert any("4 bytes after the last item" in note for note in report.notes)
    assert any("README" in note for note in report.notes)


class Config:
    """A class of the program that saved."""


def test_objects_of_other_classes(tmp_path: Path) -> None:
    """Values that a load would refuse are problems, unless their class is allowed."""
    save_state(tmp_path, {"config": Config(), "w": torch.zeros(3)})
    [problem] = verify(tmp_path).problems
    assert problem.fqn == "config"
    assert "Config" in problem.message
    assert verify(tmp_path, allowed_classes=[Config]).ok


def test_broken_metadata_are_a_problem_and_missing_ones_an_error(path: Path) -> None:
    """A checkpoint whose metadata make no sense is not whole; a folder without any is none."""
    (path / ".metadata").write_bytes(b"\x80\x04]." + bytes(9))
    report = verify(path)
    assert [problem.kind for problem in report.problems] == ["metadata"]
    (path / ".metadata").unlink()
    with pytest.raises(StorageError, match=r"no `\.metadata`"):
        verify(path)


def test_faults_are_retried_and_counted(whole: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors that pass are retried; one that stays is a problem with that file alone."""
    monkeypatch.setattr("dcp_reshard.local_files.os", FaultyOs(at=6, error=5))
    report = verify(whole, options=patient())
    assert report.ok
    assert report.retries == 1
    assert "retried" in str(report)
    broken = FaultyOs(only=["preadv"], at=2, times=10**6, error=5)
    monkeypatch.setattr("dcp_reshard.local_files.os", broken)
    report = verify(whole, options=patient())
    assert [problem.kind for problem in report.problems] == ["file"]


def test_a_file_that_changes_meanwhile(path: Path) -> None:
    """A file that is written to while it is read is a problem."""
    touched = []

    def touch(done: int, total: int) -> None:
        if not touched:
            os.utime(path / "__0_0.distcp", ns=(1, 1))
        touched.append(done)

    report = verify(path, options=BLOCKS, on_progress=touch)
    assert any("changed" in problem.message for problem in report.problems)


def test_reports_are_plain(tmp_path: Path) -> None:
    """A report is JSON, and a table of lines."""
    save_good(tmp_path)
    (tmp_path / SECOND).unlink()
    report = verify(tmp_path, options=ReaderOptions(retry=RetryPolicy(tries=1)))
    plain = json.loads(json.dumps(report.to_dict()))
    assert plain["ok"] is False
    assert plain["save_identity"] == "unproven"
    assert plain["problems"][0]["file"] == SECOND
    lines = str(report).splitlines()
    assert lines[1].split() == ["result", "1", "problems"]
