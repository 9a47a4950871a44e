"""Files that change, or run out, while they are read: noticed, or of no consequence."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dcp_reshard.errors import StorageError, UnsafeCheckpointError
from dcp_reshard.storage import LocalSource, read_bytes

DATA = bytes(i * i % 251 for i in range(5000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "f").write_bytes(DATA)
    return tmp_path / "inside"


def count_open_files() -> int:
    """How many descriptors this process has open, and one."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def _no_file_left_open() -> Iterator[None]:
    """Whatever fails, no descriptor is lost."""
    before = count_open_files()
    yield
    assert count_open_files() == before


def grow(file: Path) -> None:
    with file.open("ab") as f:
        f.write(b"more")


def rewrite(file: Path) -> None:
    file.write_bytes(DATA)
    os.utime(file, ns=(1, 1))


def replace(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(DATA)
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)


def link(file: Path) -> None:
    file.rename(file.with_name("g"))
    file.symlink_to("g")


CHANGES = [grow, rewrite, replace, link, lambda file: os.truncate(file, 10)]


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_during_a_load_is_noticed(
    folder: Path, change: Callable[[Path], None]
) -> None:
    """Size, modification time and inode are those of the first opening until the end."""
    source = LocalSource(folder)
    source.size("f")
    change(folder / "f")
    with pytest.raises(StorageError, match=r"'f'.*changed during the load"):
        source.close()
    with pytest.raises(StorageError if change is not link else UnsafeCheckpointError):
        source.size("f")
    with pytest.raises(StorageError, match="changed during the load"):
        source.close()


def test_a_file_that_is_replaced_between_two_openings_is_noticed(folder: Path) -> None:
    """A file that had to be closed in between is not read on in another one."""
    (folder / "g").write_bytes(b"")
    source = LocalSource(folder, max_open_files=1)
    source.size("f")
    source.size("g")
    replace(folder / "f")
    with pytest.raises(StorageError, match=r"'f'.*was replaced during the load"):
        read_bytes(source, "f", 0, 1)
    (folder / "f").unlink()
    source.close()


def test_a_file_that_is_deleted_while_open_stays_readable(folder: Path) -> None:
    """Nothing that was read of it is in doubt."""
    source = LocalSource(folder)
    source.size("f")
    (folder / "f").unlink()
    assert read_bytes(source, "f", 0, 9) == DATA[:9]
    source.close()


def test_a_folder_that_is_switched_is_read_on_or_noticed(folder: Path) -> None:
    """Behind a link such as `latest`, all files are from one folder, or the load fails."""
    other = folder.parent / "other"
    other.mkdir()
    (other / "f").write_bytes(b"other")
    latest = folder.parent / "latest"
    latest.symlink_to("inside")
    source = LocalSource(latest)
    assert source.names() == ["f"]
    latest.unlink()
    latest.symlink_to("other")
    assert read_bytes(source, "f", 0, 9) == DATA[:9]
    source.close()
    for call in (source.names, lambda: source.size("f")):
        with pytest.raises(StorageError, match="another one than at the start"):
            call()


def make_files(folder: Path, count: int) -> dict[str, bytes]:
    files = {f"{i:03}": DATA[i : i + 2000] for i in range(count)}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return files


def test_few_files_are_open_at_once(folder: Path) -> None:
    """The files used last stay open, up to the limit."""
    files = make_files(folder, 10)
    before = count_open_files()
    source = LocalSource(folder, max_open_files=3)
    for name, data in files.items():
        assert source.size(name) == len(data)
        assert count_open_files() - before <= 1 + 3
    assert list(source._files) == ["007", "008", "009"]
    source.size("008")
    source.size("000")
    assert list(source._files) == ["009", "008", "000"]
    source.close()


def test_threads_share_files(folder: Path) -> None:
    """No file is closed, or given to another, while a thread reads from it."""
    files = make_files(folder, 12)
    source = LocalSource(folder, max_open_files=2)
    barrier = threading.Barrier(6)

    def read_all(first: int) -> None:
        barrier.wait(10)
        for i in range(240):
            name = f"{(first * 5 + i * 7) % 12:03}"
            assert read_bytes(source, name, i, i + 50) == files[name][i : i + 50]

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read_all, range(6)))
    assert all(file.users == 0 for file in source._files.values())
    source.size("000")
    assert len(source._files) <= 2
    source.close()


def test_descriptors_that_run_out_are_taken_from_idle_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit of the process reached, files kept for later are closed first."""
    make_files(folder, 3)
    source = LocalSource(folder)
    source.size("000")
    source.size("001")
    real_open = os.open

    def open_few(*args: Any, **kwargs: Any) -> int:
        if source._files and list(source._files) != ["002"]:
            raise OSError(errno.EMFILE, "too many open files")
        return real_open(*args, **kwargs)

    monkeypatch.setattr(os, "open", open_few)
    assert source.size("002") == 2000
    assert list(source._files) == ["002"]
    source.close()


def test_a_handle_that_failed_is_not_used_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error the file is opened anew, so that a retry can get over a stale handle."""
    source = LocalSource(folder)
    source.size("f")
    stale = source._files["f"].fd
    real_read = os.preadv

    def fail(fd: int, *args: Any) -> int:
        if fd == stale:
            raise OSError(errno.ESTALE, "stale file handle")
        return real_read(fd, *args)

    monkeypatch.setattr(os, "preadv", fail)
    keep = os.dup(stale)
    with pytest.raises(StorageError, match=r"'f'.* at byte 5: .*ESTALE") as info:
        read_bytes(source, "f", 5, 6)
    assert (info.value.file, info.value.start) == ("f", 5)
    stale = -1
    assert read_bytes(source, "f", 5, 6) == DATA[5:6]
    os.close(keep)
    source.close()
