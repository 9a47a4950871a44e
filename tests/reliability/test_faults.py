"""The table of faults, first part: what a file system can do to a load in one process.

Every call to the file system that a load makes is spoiled in turn.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dcp_reshard
from dcp_reshard import LoadReport, ReaderOptions, StorageError
from tests.support.bad_checkpoints import SECOND, make_state, save_good
from tests.support.failures import catch_failure, find_failures
from tests.support.faults import FaultyOs, patient
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot

Read = Callable[..., int]

# The metadata are read first, then their end again: do all ranks see the same? Before the read of
# this number, the data file has been opened.
FIRST_DATA_READ = 2


def make_all() -> dict[str, Any]:
    return make_state() | {"large": indexed_tensor((200, 30)), "turned": indexed_tensor((30, 40))}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("good")
    torch.distributed.checkpoint.save(make_all(), checkpoint_id=path)
    return path


def load(path: Path, faults: FaultyOs, options: ReaderOptions | None = None) -> LoadReport:
    """Load under faults, and compare with what was saved."""
    state = make_all()
    wanted = snapshot(state)
    state["turned"] = state["turned"].t().contiguous().t()
    fill_with_sentinel(state)
    state |= {"note": None, "opt": {"lr": None}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dcp_reshard.local_files.os", faults)
        report = dcp_reshard.load(state, path, no_dist=True, options=options or patient())
    check_same(snapshot(state), wanted)
    assert (state["note"], state["opt"]) == ("text", {"lr": 0.5})
    return report


def count_calls(path: Path, **only: Any) -> int:
    faults = FaultyOs(**only)
    load(path, faults)
    return len(faults.calls)


PASSING = [errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET]


@pytest.mark.parametrize("number", PASSING, ids=lambda number: errno.errorcode[number])
def test_f01_an_error_that_passes(good: Path, number: int) -> None:
    """Any call that fails once is made again; the load is right, and says how often."""
    for at in range(count_calls(good)):
        faults = FaultyOs(at=at, error=number)
        assert load(good, faults).retries == 1, (at, faults.calls[at])


@pytest.mark.parametrize("number", [*PASSING, errno.EACCES], ids=lambda n: errno.errorcode[n])
def test_f02_an_error_that_stays(good: Path, number: int) -> None:
    """From any call on: an error of ours after the tries, which has the errno and the file."""
    for at in range(count_calls(good)):
        faults = FaultyOs(at=at, times=10**6, error=number)
        error = catch_failure(lambda faults=faults: load(good, faults))
        assert isinstance(error, StorageError)
        assert errno.errorcode[number] in str(error)
        assert "file" in str(error) or "folder" in str(error)
        assert ("given up after 5 tries" in str(error)) == (number in PASSING)


@pytest.mark.parametrize("most", [1, 2, 3, 7, 64, 511, 4096])
def test_f03_short_reads(good: Path, most: int) -> None:
    """Reads that return less than was asked for are gone on with, a byte at a time if need be."""

    def shorten(read: Read, buffers: Sequence[memoryview], fd: int, offset: int) -> int:
        return read(fd, [next(b for b in buffers if b.nbytes)[:most]], offset)

    report = load(good, FaultyOs(at=0, times=10**9, spoil=shorten))
    assert (report.retries, report.rereads) == (0, 0)


def end_early(read: Read, buffers: Sequence[memoryview], fd: int, offset: int) -> int:
    return 0


def test_f05_a_file_that_ends_early(good: Path) -> None:
    """A read that finds nothing is made again; if nothing ever comes, the file is short."""
    for at in range(count_calls(good, only=["preadv"])):
        assert load(good, FaultyOs(only=["preadv"], at=at, spoil=end_early)).retries == 1
        faults = FaultyOs(only=["preadv"], at=at, times=10**6, spoil=end_early)
        error = catch_failure(lambda faults=faults: load(good, faults))
        with pytest.raises(StorageError, match=r"ends at byte \d+.*given up after 5 tries"):
            raise error


def flip(read: Read, buffers: Sequence[memoryview], fd: int, offset: int) -> int:
    count = read(fd, buffers, offset)
    # A byte that matters, in each read of the loads below; half of the way lies padding in one.
    buffers[0][len(buffers[0]) * 3 // 5] ^= 4
    return count


def read_elsewhere(read: Read, buffers: Sequence[memoryview], fd: int, offset: int) -> int:
    return read(fd, buffers, 0) if offset else flip(read, buffers, fd, offset)


@pytest.mark.parametrize("spoil", [flip, read_elsewhere], ids=["F06", "F07"])
def test_wrong_bytes(good: Path, spoil: Any) -> None:
    """A bit or a place that is wrong once is found, and right when read again; else an error."""
    right = 0
    for at in range(FIRST_DATA_READ, count_calls(good, only=["preadv"])):
        report = load(good, FaultyOs(only=["preadv"], at=at, spoil=spoil))
        right += report.rereads
        faults = FaultyOs(only=["preadv"], at=at, times=10**6, spoil=spoil)
        assert find_failures(lambda faults=faults: load(good, faults))
    assert right >= count_calls(good, only=["preadv"]) - FIRST_DATA_READ


def test_f06_wrong_metadata(good: Path) -> None:
    """A bit of the metadata that is wrong is an error, or does not matter."""
    find_failures(lambda: load(good, FaultyOs(only=["preadv"], at=0, spoil=flip)))


def overwrite(path: Path) -> None:
    """What a save into the same folder does to a file: other bytes, in place."""
    contents = path.read_bytes()
    path.write_bytes(contents[:-1] + bytes([contents[-1] ^ 1]))


def replace(path: Path) -> None:
    contents = path.read_bytes()
    path.unlink()
    (path.parent / "new").write_bytes(contents)
    (path.parent / "new").rename(path)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


CHANGES: dict[str, tuple[Callable[[Path], object], str | None]] = {
    "truncated": (lambda path: os.truncate(path, 1000), "changed|replaced|ends"),
    "grown": (grow, "changed"),
    "overwritten": (overwrite, "changed"),
    "replaced": (replace, "changed"),
    "deleted": (Path.unlink, None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_f08_a_file_that_changes_after_it_was_opened(
    good: Path, tmp_path: Path, change: str
) -> None:
    """At any read, a data file that changes is noticed; one that is deleted stays readable."""
    make, match = CHANGES[change]
    for at in range(FIRST_DATA_READ, count_calls(good, only=["preadv"])):
        path = shutil.copytree(good, tmp_path / str(at))
        data = path / "__0_0.distcp"
        faults = FaultyOs(only=["preadv"], at=at, before=lambda data=data: make(data))
        if match is None:
            load(path, faults)
            continue
        error = catch_failure(lambda path=path, faults=faults: load(path, faults))
        with pytest.raises(StorageError, match=match):
            raise error


def test_f08_metadata_that_change_during_the_load(good: Path, tmp_path: Path) -> None:
    """A save that ends while the load reads replaces the metadata: the load fails."""
    path = shutil.copytree(good, tmp_path / "checkpoint")
    faults = FaultyOs(only=["preadv"], at=1, before=lambda: replace(path / ".metadata"))
    error = catch_failure(lambda: load(path, faults))
    with pytest.raises(StorageError, match=r"'\.metadata': changed during the load"):
        raise error


@pytest.mark.parametrize("at", range(3))
def test_f09_a_link_to_the_folder_that_is_switched(good: Path, tmp_path: Path, at: int) -> None:
    """A rank goes on in the folder that it began with, or fails; it never reads from both."""
    other = shutil.copytree(good, tmp_path / "other")
    link = tmp_path / "latest"
    link.symlink_to(good)

    def switch() -> None:
        link.unlink()
        link.symlink_to(other)

    faults = FaultyOs(only=["preadv"], at=at, before=switch)
    if at:
        load(link, faults)
        return
    error = catch_failure(lambda: load(link, faults))
    with pytest.raises(StorageError, match="another one than at the start"):
        raise error


@pytest.mark.parametrize("times", [1, 4, 5])
def test_f10_a_file_that_is_not_there_yet(good: Path, times: int) -> None:
    """A file that this client of NFS does not see at first is asked for five times."""
    # Call 0 opens the folder.
    for at in (1, 3):
        faults = FaultyOs(only=["open"], at=at, times=times, error=errno.ENOENT)
        if times < 5:
            assert load(good, faults).retries == times
        else:
            error = catch_failure(lambda faults=faults: load(good, faults))
            with pytest.raises(StorageError, match=r"ENOENT.*given up after 5 tries"):
                raise error


class Clock:
    """A clock that a call moves on."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("seconds", [100.0, 130.0])
def test_f14_slow_storage(good: Path, seconds: float) -> None:
    """However long reads take, the load goes on; only an error after the deadline is final."""
    clock = Clock()
    options = patient(retry={"clock": clock, "deadline": 120.0})
    slow = FaultyOs(at=0, times=10**6, before=lambda: clock.move(seconds))
    assert load(good, slow, options).retries == 0
    failing = FaultyOs(at=3, error=errno.EIO, before=lambda: clock.move(seconds))
    if seconds < 120:
        assert load(good, failing, options).retries == 1
        return
    error = catch_failure(lambda: load(good, failing, options))
    with pytest.raises(StorageError, match=r"given up after 1 tries and 130\.0 s"):
        raise error


def test_f19_the_wall_clock_may_jump(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines do not depend on the time of day."""
    jumps = itertools.cycle([0.0, 1e9, -1e9])
    monkeypatch.setattr(time, "time", lambda: next(jumps))
    assert load(good, FaultyOs(at=2, times=3, error=errno.EIO)).retries == 3


def test_saved_by_two_ranks(tmp_path: Path) -> None:
    """A fault in one of several files is told from the other files."""
    save_good(tmp_path)
    (tmp_path / SECOND).chmod(0)
    if os.access(tmp_path / SECOND, os.R_OK):
        pytest.skip("this user may read everything")
    error = catch_failure(lambda: dcp_reshard.load(make_state(), tmp_path, no_dist=True))
    assert error.file == SECOND
