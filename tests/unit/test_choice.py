"""``mode="auto"``: the rule, on the numbers of a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import StoredObject, StoredTensor
from dcp_reshard.choice import (
    Storage,
    _file_system,
    choose_by_bytes,
    choose_by_place,
    estimate_bytes,
    find_place,
)
from dcp_reshard.options import ReaderOptions
from dcp_reshard.parts import WantedPart
from dcp_reshard.storage import CountingSource, LocalSource
from tests.support.sources import RecordingSource

MIB = 2**20
OPTIONS = ReaderOptions(auto_ratio=1.5, auto_bytes=10 * MIB)


def places(*rows: tuple[int, Storage]) -> Any:
    return np.array(rows, dtype=np.int64)


@pytest.mark.parametrize("hosts", [(1, 1), (1, 2)])
def test_a_disk_of_the_host_is_read_directly(hosts: tuple[int, int]) -> None:
    """However many hosts there are: each has its own."""
    choice = choose_by_place(places(*((host, Storage.LOCAL) for host in hosts)))
    assert choice is not None
    assert choice.mode == "direct"


def test_shared_storage_on_one_host_is_read_directly() -> None:
    """The host's page cache serves its ranks; with a second host it depends on the bytes."""
    choice = choose_by_place(places((1, Storage.SHARED), (1, Storage.SHARED)))
    assert choice is not None
    assert choice.mode == "direct"
    assert choose_by_place(places((1, Storage.SHARED), (2, Storage.SHARED))) is None


def test_one_rank_without_a_cache_counts_for_all() -> None:
    """Ranks that see different kinds of storage still decide alike, by the slowest kind."""
    assert choose_by_place(places((1, Storage.LOCAL), (1, Storage.REMOTE))) is None


def choose(storage: Storage, hosts: list[int], wanted: list[int], unique: int) -> str:
    rows = places(*((host, storage) for host in hosts))
    sizes = np.array(wanted, dtype=np.int64) * MIB
    return choose_by_bytes(rows, sizes, unique_bytes=unique * MIB, options=OPTIONS).mode


@pytest.mark.parametrize(
    ("storage", "hosts", "wanted", "unique", "mode"),
    [
        # Replicas of an object store's data; shards of it.
        (Storage.REMOTE, [1, 1], [100, 100], 100, "cooperative"),
        (Storage.REMOTE, [1, 1], [50, 50], 100, "direct"),
        # The ratio, and the least saving.
        (Storage.REMOTE, [1, 1], [70, 70], 100, "direct"),
        (Storage.REMOTE, [1, 1], [75, 75], 100, "cooperative"),
        (Storage.REMOTE, [1, 1], [9, 9], 9, "direct"),
        (Storage.REMOTE, [1, 1], [10, 10], 10, "cooperative"),
        # On shared storage a host reads nothing twice: what counts is replicas across hosts.
        (Storage.SHARED, [1, 1, 2, 2], [100, 100, 0, 0], 100, "direct"),
        (Storage.SHARED, [1, 1, 2, 2], [100, 100, 100, 100], 100, "cooperative"),
        (Storage.SHARED, [1, 1, 2, 2], [40, 40, 40, 40], 100, "cooperative"),
        (Storage.SHARED, [1, 1, 2, 2], [25, 25, 25, 25], 100, "direct"),
    ],
)
def test_the_job_cooperates_where_that_saves_enough(
    storage: Storage, hosts: list[int], wanted: list[int], unique: int, mode: str
) -> None:
    """By what all ranks would read, each for itself, against what is needed once."""
    assert choose(storage, hosts, wanted, unique) == mode


def test_the_reason_has_the_numbers() -> None:
    """It is logged, and in the report."""
    choice = choose_by_bytes(
        places((1, Storage.REMOTE), (7, Storage.REMOTE)),
        np.array([20 * MIB, 30 * MIB]),
        unique_bytes=30 * MIB,
        options=OPTIONS,
    )
    assert choice.reason == (
        "2 ranks on 2 hosts would read 52428800 bytes from remote storage, each for itself, of "
        "which 31457280 are needed once"
    )


MOUNTS = """\
rootfs / rootfs rw 0 0
/dev/vda / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/vdb /home/ann/my\\040disk xfs rw 0 0
tmpfs /homes tmpfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/data/x", "ext4"),
        ("/home", "nfs4"),
        ("/home/bob/x", "nfs4"),
        ("/home/ann/my disk/x", "xfs"),
        ("/home/ann/my diskette", "nfs4"),
        ("/homes/x", "tmpfs"),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount(path: str, kind: str) -> None:
    """Of two mounts on one point, the last; names of which another begins are told apart."""
    assert _file_system(path, MOUNTS) == kind


def test_wrappers_of_the_reader_are_looked_through(tmp_path: Path) -> None:
    """A folder is a folder behind a counter; a source that nobody knows is remote."""
    folder = LocalSource(tmp_path)
    host, kind = find_place(CountingSource(folder))
    assert find_place(folder) == (host, kind)
    assert kind < Storage.REMOTE
    assert find_place(CountingSource(RecordingSource(folder))) == (host, Storage.REMOTE)


def test_what_a_rank_would_read_for_itself() -> None:
    """Rows cost themselves, short runs of columns whole rows, long runs themselves."""
    stored = StoredTensor(
        "w",
        (4, 65536),
        torch.float32,
        BoxArray.from_boxes([Box((0, 0), (4, 65536))], ndim=2),
        np.zeros(1, dtype=np.int32),
        np.zeros(1, dtype=np.int64),
        np.array([2 * MIB]),
    )

    def part(rows: int, columns: int) -> WantedPart:
        return WantedPart("w", stored, 0, (0, 0), torch.empty(rows, columns))

    options = ReaderOptions()
    row = 4 * 65536
    assert estimate_bytes([part(3, 65536)], [], options) == 3 * row
    assert estimate_bytes([part(4, 8192)], [], options) == 4 * 4 * 8192
    assert estimate_bytes([part(4, 60000)], [], options) == 4 * row
    assert estimate_bytes([part(1, 1), part(1, 1)], [StoredObject("o", 0, 0, 99)], options) == 107
