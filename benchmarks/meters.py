"""What one load costs one process: seconds, and what the kernel counts of it.

Bytes read are ``rchar`` of ``/proc/self/io``: all that read calls returned, from the page cache
too. Bytes from the disk are its ``read_bytes``. Peak memory is ``VmHWM``, which is set back before
each load through ``/proc/self/clear_refs``, minus the memory there was before.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

__all__ = ["Sample", "drop_page_cache", "measure"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One load by one rank."""

    wall: float
    """Seconds."""

    cpu: float
    """Seconds of CPU time, of all threads."""

    bytes_read: int
    """Bytes that read calls returned."""

    disk_bytes: int
    """Bytes that had to come from the disk for it."""

    peak_bytes: int | None
    """Memory in use at most, minus what was in use before; None where it cannot be known."""

    phases: Mapping[str, float]
    """Seconds by phase, as the loader reports them."""


def measure(load: Callable[[], Mapping[str, float]]) -> Sample:
    """Run one load on all ranks, and say what it cost this one."""
    gc.collect()
    _trim_memory()
    resettable = _reset_peak()
    memory, before = _status("VmRSS"), _io_counters()
    dist.barrier()
    cpu, wall = time.process_time(), time.perf_counter()
    phases = load()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    after = _io_counters()
    return Sample(
        wall=wall,
        cpu=cpu,
        bytes_read=after["rchar"] - before["rchar"],
        disk_bytes=after["read_bytes"] - before["read_bytes"],
        peak_bytes=_status("VmHWM") - memory if resettable else None,
        phases=phases,
    )


def drop_page_cache(path: str) -> None:
    """Ask the kernel to forget the files of a folder; a collective call.

    Needs no privilege. Pages that are not on disk yet cannot be dropped, so the files are synced
    first. A file system in memory ignores all of this: `Sample.disk_bytes` tells.
    """
    dist.barrier()
    if dist.get_rank() == 0:
        for file in Path(path).iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
    dist.barrier()


def _trim_memory() -> None:
    # Memory that an earlier load has freed but the allocator kept would be used again, unseen, and
    # the loader that comes second would seem to need less.
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return 0


def _io_counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {name: int(value) for name, value in (line.split(": ") for line in lines)}
