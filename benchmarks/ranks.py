"""One rank of a measured job: saves, or loads with each loader in turn and measures itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.states import PRESETS, check_state, make_state, parse_layout
from dcp_reshard import ReaderOptions, ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.catalog import Catalog
from dcp_reshard.metadata import DcpCheckpoint
from dcp_reshard.storage import ByteSource

__all__ = ["LOADERS", "Sample", "load_rank", "save_rank"]

LOADERS = ("stock", "unverified", "verified", "floor")


@dataclass(frozen=True, slots=True)
class Sample:
    """One load by one rank."""

    wall: float
    cpu: float
    bytes_read: int
    peak_bytes: int


@dataclass(slots=True)
class _Recorder:
    """A checkpoint that notes which ranges are asked for; a `CatalogSource` and a `ByteSource`."""

    checkpoint: DcpCheckpoint
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    source: ByteSource | None = None

    def open(self) -> ByteSource:
        self.source = self.checkpoint.open()
        return self

    def read_catalog(self, source: ByteSource) -> Catalog:
        return self.checkpoint.read_catalog(source)

    def names(self) -> list[str]:
        return self._inner.names()

    def size(self, name: str) -> int:
        return self._inner.size(name)

    def read_into(self, name: str, offset: int, buffers: Any) -> None:
        self.ranges.append((name, offset, sum(b.nbytes for b in buffers)))
        self._inner.read_into(name, offset, buffers)

    def close(self) -> None:
        self._inner.close()

    @property
    def _inner(self) -> ByteSource:
        assert self.source is not None
        return self.source


def save_rank(rank: int, path: str, preset: str, layout: str) -> None:
    """Save with stock `dcp.save`."""
    state = make_state(PRESETS[preset], parse_layout(layout), filled=True)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=False))


def load_rank(
    rank: int, path: str, preset: str, layout: str, repeats: int, *, cold: bool
) -> tuple[int, dict[str, list[Sample]]]:
    """Load with each loader in turn, `repeats` times after a first round that is checked.

    Returns:
        Bytes of this rank's tensors, and samples by loader.
    """
    model, place = PRESETS[preset], parse_layout(layout)
    state = make_state(model, place, filled=False)
    wanted = 4 * check_after(_loader("stock", path, state), model, place, state)
    check_after(_loader("unverified", path, state), model, place, state)
    check_after(_loader("verified", path, state), model, place, state)
    recorder = _Recorder(DcpCheckpoint(path))
    dcp.load(state, storage_reader=ReshardStorageReader(recorder), planner=ReshardLoadPlanner())
    floor = _floor(path, recorder.ranges)
    samples: dict[str, list[Sample]] = {name: [] for name in LOADERS}
    for _ in range(repeats):
        for name in LOADERS:
            load = floor if name == "floor" else _loader(name, path, state)
            if cold:
                _drop_page_cache(path)
            samples[name].append(_measure(load))
    return wanted, samples


def check_after(load: Callable[[], None], model: Any, place: Any, state: dict[str, Any]) -> int:
    """Load into elements set to -1, and compare them all."""
    for values in (state["model"], *state["optimizer"]["state"].values()):
        for value in values.values():
            (value.to_local() if hasattr(value, "to_local") else value).fill_(-1.0)
    load()
    return check_state(model, place, state)


def _loader(name: str, path: str, state: dict[str, Any]) -> Callable[[], None]:
    if name == "stock":
        return lambda: dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    options = ReaderOptions(verify="available" if name == "verified" else "off")
    return lambda: dcp.load(
        state,
        storage_reader=ReshardStorageReader(path, options=options),
        planner=ReshardLoadPlanner(),
    )


def _floor(path: str, ranges: list[tuple[str, int, int]]) -> Callable[[], None]:
    """The same ranges by bare `preadv` into memory that is there already."""
    buffers = [memoryview(bytearray(length)) for _, _, length in ranges]
    threads = ReaderOptions().num_threads

    def read() -> None:
        files = {name: os.open(Path(path, name), os.O_RDONLY) for name, _, _ in ranges}

        def read_one(job: tuple[tuple[str, int, int], memoryview]) -> None:
            (name, offset, _), buffer = job
            os.preadv(files[name], [buffer], offset)

        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read_one, zip(ranges, buffers, strict=True)))
        for descriptor in files.values():
            os.close(descriptor)

    return read


def _measure(load: Callable[[], None]) -> Sample:
    Path("/proc/self/clear_refs").write_text("5")  # peak memory counts from now
    memory, rchar = _status("VmRSS"), _rchar()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    load()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Sample(wall, cpu, _rchar() - rchar, _status("VmHWM") - memory)


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _rchar() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


def _drop_page_cache(path: str) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        for file in Path(path).iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    dist.barrier()


torch.set_num_threads(1)
