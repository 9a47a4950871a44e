"""One rank of a measured job: saves, or loads with each loader in turn and measures itself."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.floor import Recorder, make_floor
from benchmarks.layouts import parse_layout
from benchmarks.meters import Sample, drop_page_cache, measure
from benchmarks.states import (
    PRESETS,
    State,
    check_state,
    clear_state,
    local_tensors,
    make_state,
)
from dcp_reshard import ReaderOptions, ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.metadata import DcpCheckpoint
from dcp_reshard.options import Verify

__all__ = ["LOADERS", "Job", "RankResult", "load_rank", "save_rank"]

LOADERS = ("stock", "unverified", "verified", "floor")
_VERIFY: dict[str, Verify] = {"unverified": "off", "verified": "available"}

Load = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that loads."""

    path: str
    """Folder of the checkpoint."""

    preset: str
    """Name of the sizes."""

    layout: str
    """Name of the layout to load into."""

    repeats: int
    """Timed loads by each loader."""

    mode: str
    """Mode of our reader."""

    cold: bool
    """Whether the page cache is dropped before each timed load."""

    profile: int
    """Lines of a profile of one more load by rank 0, which is not timed; 0 for none."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank has measured."""

    dest_bytes: int
    """Bytes of this rank's tensors."""

    samples: Mapping[str, list[Sample]]
    """Samples by loader, one per round."""

    mode: str
    """The mode in which ours has read."""

    profile: str
    """A profile, as text."""


def save_rank(
    rank: int,
    path: str,
    preset: str,
    layout: str,
    sync: bool,  # noqa: FBT001
) -> None:
    """Save with stock `dcp.save`."""
    state = make_state(PRESETS[preset], parse_layout(layout))
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, sync_files=sync))


def load_rank(rank: int, job: Job) -> RankResult:
    """Load with each loader in turn, `repeats` times after a round that is checked, not timed."""
    preset, layout = PRESETS[job.preset], parse_layout(job.layout)
    state = make_state(preset, layout)
    dests = local_tensors(state)
    loads: dict[str, Load] = {"stock": lambda: _load_stock(job.path, state)}
    for name, verify in _VERIFY.items():
        loads[name] = _our_loader(job.path, state, mode=job.mode, verify=verify)
    for name, load in loads.items():
        clear_state(state)
        load()
        check_state(preset, layout, state, loader=name)
    recorder = Recorder(DcpCheckpoint(job.path), dests)
    reader = ReshardStorageReader(recorder, mode=job.mode, options=ReaderOptions(verify="off"))
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    loads["floor"] = make_floor(job.path, recorder.reads, threads=ReaderOptions().num_threads)
    loads["floor"]()
    samples: dict[str, list[Sample]] = {name: [] for name in LOADERS}
    for _ in range(job.repeats):
        for name in LOADERS:
            if job.cold:
                drop_page_cache(job.path)
            samples[name].append(measure(loads[name]))
    # A timed load that put something into a wrong place would show here, unless a later one mended
    # it. That it filled everything was seen above.
    check_state(preset, layout, state, loader="timed loads")
    return RankResult(
        dest_bytes=sum(tensor.nbytes for tensor in dests),
        samples=samples,
        mode=reader.stats.cooperation.mode,
        profile=_profile(loads["verified"], lines=job.profile) if job.profile else "",
    )


def _load_stock(path: str, state: State) -> Mapping[str, float]:
    dcp.load(state, storage_reader=dcp.FileSystemReader(path))
    return {}


def _our_loader(path: str, state: State, *, mode: str, verify: Verify) -> Load:
    def load() -> Mapping[str, float]:
        reader = ReshardStorageReader(path, mode=mode, options=ReaderOptions(verify=verify))
        dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
        return reader.stats.seconds

    return load


def _profile(load: Load, *, lines: int) -> str:
    """Where the main thread of rank 0 spends its CPU time; the other ranks just load."""
    if dist.get_rank() != 0:
        load()
        return ""
    # CPU time, as there are more ranks than cores: by the clock most of it would be waiting.
    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(load)
    text = io.StringIO()
    for order in ("tottime", "cumulative"):
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats(order).print_stats(lines)
    return text.getvalue()
