"""A folder that is not trusted: its own regular files alone are read, in full, and unchanged."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from dcp_reshard.errors import StorageError, UnsafeCheckpointError
from dcp_reshard.storage import CountingSource, LocalSource, open_source, read_bytes

DATA = bytes(i * i % 251 for i in range(5000))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a file, beside a file that is not in it."""
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "f").write_bytes(DATA)
    (tmp_path / "outside").write_bytes(b"secret")
    return tmp_path / "inside"


@pytest.fixture(autouse=True)
def _no_file_left_open() -> Iterator[None]:
    """Whatever fails, no descriptor is lost."""
    before = open_files()
    yield
    assert open_files() == before


def open_files() -> set[str]:
    """What this process has open, but for what listing that takes."""
    links = list(Path("/proc/self/fd").iterdir())
    return {f"{link.name} {link.readlink()}" for link in links if link.is_symlink()}


class ShortSource(LocalSource):
    """Reads a few bytes at a time, as a network file system may."""

    step = 1

    def _read(self, file: Any, name: str, buffers: Sequence[memoryview], offset: int) -> int:
        left = self.step
        some = []
        for buffer in buffers:
            some.append(buffer[:left])
            left -= len(some[-1])
        return super()._read(file, name, some, offset)


@hypothesis.given(
    st.integers(0, len(DATA)), st.lists(st.integers(0, 40), max_size=8), st.integers(1, 50)
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_buffers_are_filled_one_after_the_other(
    folder: Path, offset: int, sizes: list[int], step: int
) -> None:
    """All bytes arrive, in order, however few come at a time; past the end is an error."""
    total = sum(sizes)
    for source in (LocalSource(folder), ShortSource(folder)):
        ShortSource.step = step
        buffers = [memoryview(bytearray(size)) for size in sizes]
        if offset + total <= len(DATA):
            source.read_into("f", offset, buffers)
            assert b"".join(buffers) == DATA[offset : offset + total]
        else:
            with pytest.raises(StorageError, match=f"ends at byte {len(DATA)}") as info:
                source.read_into("f", offset, buffers)
            error = info.value
            assert (error.file, error.start, error.end) == ("f", offset, offset + total)
        source.close()


def test_any_number_of_buffers_is_filled(folder: Path) -> None:
    """More buffers than one system call takes."""
    source = LocalSource(folder)
    buffers = [memoryview(bytearray(1 + i % 2)) for i in range(3000)]
    source.read_into("f", 7, buffers)
    assert b"".join(buffers) == DATA[7 : 7 + 4500]
    source.close()


def test_names_sizes_and_bytes(folder: Path) -> None:
    """The folder's entries, sorted; a file's size; some of its bytes; the same after `close`."""
    (folder / "e").mkdir()
    source = open_source(str(folder))
    for _ in range(2):
        assert source.names() == ["e", "f"]
        assert source.size("f") == len(DATA)
        assert read_bytes(source, "f", 3, 9) == DATA[3:9]
        assert read_bytes(source, "f", 5000, 5000) == b""
        source.close()
    source.close()


@pytest.mark.parametrize(
    "name", ["../outside", "..", ".", "", "./f", "a/f", "a\\f", "f\0", "C:f", "f\n", "x" * 256]
)
def test_no_name_leads_out_of_the_folder(folder: Path, name: str) -> None:
    """What is no bare file name is refused before anything is opened."""
    source = LocalSource(folder)
    for name_or_path in (name, f"{folder.parent}/outside"):
        with pytest.raises(UnsafeCheckpointError, match="not a bare name"):
            source.size(name_or_path)
        with pytest.raises(UnsafeCheckpointError, match="not a bare name"):
            source.read_into(name_or_path, 0, [memoryview(bytearray(1))])
    source.close()


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: p.symlink_to("f"), UnsafeCheckpointError, "symbolic link"),
        (lambda p: p.symlink_to(p.parent.parent / "outside"), UnsafeCheckpointError, "symbolic"),
        (lambda p: p.symlink_to("nowhere"), UnsafeCheckpointError, "symbolic link"),
        (lambda p: p.symlink_to(p.name), UnsafeCheckpointError, "symbolic link"),
        (lambda p: p.symlink_to("/dev/zero"), UnsafeCheckpointError, "symbolic link"),
        (os.mkfifo, StorageError, "not a regular file"),
        (Path.mkdir, StorageError, "not a regular file"),
        (make_socket, StorageError, "ENXIO"),
        (lambda p: None, StorageError, "ENOENT"),
    ],
    ids=["link", "link out", "dangling", "loop", "device", "fifo", "folder", "socket", "nothing"],
)
def test_only_regular_files_are_opened(
    folder: Path,
    make: Callable[[Path], object],
    error: type[Exception],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Links are not followed, and nothing that could block is waited for."""
    monkeypatch.chdir(folder)
    make(folder / "odd")
    source = LocalSource(folder)
    for call in (lambda: source.size("odd"), lambda: read_bytes(source, "odd", 0, 1)):
        with pytest.raises(error, match=message) as info:
            call()
        assert info.value.file == "odd"
    source.close()


def test_hard_links_are_files_like_any_other(folder: Path) -> None:
    """Tools that keep several versions of a folder make them."""
    (folder / "g").hardlink_to(folder / "f")
    source = LocalSource(folder)
    assert read_bytes(source, "g", 0, 9) == DATA[:9]
    source.close()


@pytest.mark.parametrize("root", ["nowhere", "inside/f"])
def test_a_folder_that_is_none(folder: Path, root: str) -> None:
    """The message names the folder, whichever call comes first."""
    source = LocalSource(folder.parent / root)
    for call in (source.names, lambda: source.size("f")):
        with pytest.raises(StorageError, match=f"folder '.*{root}'.*(ENOENT|ENOTDIR)"):
            call()
    source.close()
    with pytest.raises(StorageError, match="not URLs"):
        open_source("s3://bucket/checkpoint")


def test_requests_are_counted(folder: Path) -> None:
    """Calls and bytes that succeeded; everything else is passed on."""
    source = CountingSource(LocalSource(folder))
    source.read_into("f", 0, [memoryview(bytearray(3)), memoryview(bytearray(4))])
    source.read_into("f", 0, [])
    with pytest.raises(StorageError):
        read_bytes(source, "f", 4999, 5002)
    assert (source.requests, source.bytes_read) == (2, 7)
    assert (source.names(), source.size("f")) == (["f"], 5000)
    source.close()
