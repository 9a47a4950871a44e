"""The benchmark's throttled storage: nobody gets more than the bandwidth, and bytes are right."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_reshard
from benchmarks.bucket import Bucket, ThrottledCheckpoint, ThrottledFileSystem
from dcp_reshard.choice import Storage, find_place
from tests.support.checkpoints import save_state
from tests.support.tensors import indexed_tensor


def test_all_who_share_a_bucket_share_its_bandwidth(tmp_path: Path) -> None:
    """Two openings of one file, two threads each: together they take at least bytes over rate."""
    buckets = [Bucket(tmp_path / "bucket", bytes_per_second=20e6, latency=0.001) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda b=bucket: [b.serve(100_000) for _ in range(3)])
        for bucket in buckets
        for _ in range(2)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - started >= 12 * 100_000 / 20e6
    for bucket in buckets:
        assert (bucket.requests, bucket.bytes_served) == (6, 600_000)
        bucket.close()


def test_a_long_request_takes_its_time_and_the_latency(tmp_path: Path) -> None:
    """Slice by slice, but with one latency."""
    bucket = Bucket(tmp_path / "bucket", bytes_per_second=200e6, latency=0.02)
    started = time.monotonic()
    bucket.serve(3_000_000)
    assert time.monotonic() - started >= 3_000_000 / 200e6 + 0.02
    assert bucket.requests == 1
    bucket.close()


@pytest.mark.parametrize("loader", ["stock", "ours"])
def test_a_load_from_behind_a_bucket(loader: str, tmp_path: Path) -> None:
    """Both loaders get the right bytes, and all they get is counted."""
    full = indexed_tensor((200, 300))
    save_state(tmp_path / "saved", {"w": full})
    bucket = Bucket(tmp_path / "bucket", bytes_per_second=1e9, latency=0)
    state = {"w": torch.zeros(200, 300)}
    if loader == "stock":
        reader = dcp.FileSystemReader(tmp_path / "saved")
        reader.fs = ThrottledFileSystem(bucket)
        dcp.load(state, storage_reader=reader)
    else:
        checkpoint = ThrottledCheckpoint(tmp_path / "saved", bucket)
        dcp_reshard.load(state, checkpoint)
        # The reader must not see the local folder behind it.
        assert find_place(checkpoint.open())[1] == Storage.REMOTE
    assert torch.equal(state["w"], full)
    assert full.nbytes < bucket.bytes_served < 1.2 * full.nbytes
    bucket.close()


def test_a_throttled_file_can_be_read_anywhere(tmp_path: Path) -> None:
    """It seeks and tells like the file that it is."""
    (tmp_path / "file").write_bytes(bytes(range(256)) * 100)
    bucket = Bucket(tmp_path / "bucket", bytes_per_second=1e9, latency=0)
    with ThrottledFileSystem(bucket).create_stream(tmp_path / "file", "rb") as stream:
        assert stream.seek(-3, io.SEEK_END) == 25597
        assert stream.read() == b"\xfd\xfe\xff"
        stream.seek(1000)
        assert stream.read(2) == bytes([1000 % 256, 1001 % 256])
        assert stream.tell() == 1002
    bucket.close()
