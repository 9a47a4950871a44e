"""Stock `dcp.load`, direct and cooperative reading of a storage of limited bandwidth, in one table.

The storage is shared by all ranks of the job (see `bucket`), as that of a cluster is: what ranks
read twice, the job pays twice. For each pair of layouts a checkpoint is written by stock `dcp.save`
and loaded by one job of real processes with each loader in turn, A B C A B C. Before, the result of
each of ours is compared element by element, without the throttle. Two more columns are from the
local page cache: what ``mode="auto"`` chooses there, and what that costs against direct reading.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.bucket import Bucket, ThrottledCheckpoint, ThrottledFileSystem
from benchmarks.layouts import parse_layout
from benchmarks.meters import Sample, measure
from benchmarks.ranks import save_rank
from benchmarks.states import PRESETS, State, check_state, checkpoint_bytes, clear_state, make_state
from benchmarks.table import Column, Figures, line
from dcp_reshard import ReshardLoadPlanner, ReshardStorageReader
from tests.support.worlds import gloo_world

PAIRS = (
    "fsdp2:hsdp2x1 fsdp4:hsdp4x1 fsdp8:hsdp8x1 fsdp4:hsdp2x2 fsdp8:hsdp4x2 "
    "fsdp4:col4 fsdp8:col8 fsdp1:fsdp8 fsdp4_tp2:fsdp2_tp4 fsdp8:fsdp8"
)
LOADERS = ("stock", "direct", "cooperative")
# They take a fraction of a second, and are to be told from each other.
_LOCAL_LOADS = 3
LEGEND = """\
stock s     seconds of stock dcp.load: slowest rank, median of the repeats
direct      dcp_reshard with mode="direct", times faster than stock; coop: with "cooperative"
read/unique bytes served to the job over bytes that anyone needs, metadata included
imbalance   bytes served to the rank that read most over the mean, cooperative
peak MB     memory beyond what was there before, worst rank
auto local  without the throttle: what "auto" chooses, and its seconds over those of direct,
            median of loads in turn"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A job that loads."""

    path: str
    """Folder of the checkpoint."""

    bucket: str
    """File of the token bucket."""

    preset: str
    """Name of the sizes."""

    layout: str
    """Name of the layout to load into."""

    repeats: int
    """Timed loads by each loader."""

    bytes_per_second: float
    """Bandwidth of the storage."""

    latency: float
    """Seconds that every request takes beside."""


@dataclass(frozen=True, slots=True)
class Served:
    """One load by one rank."""

    sample: Sample
    """Time and memory."""

    bytes_served: int
    """Bytes from the storage."""

    requests: int
    """Requests to the storage."""


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank has measured."""

    samples: Mapping[str, list[Served]]
    """By loader, one per round."""

    local: Mapping[str, list[float]]
    """Seconds without the throttle, by mode."""

    auto: str
    """The mode that was chosen without the throttle."""


def load_rank(rank: int, job: Job) -> RankResult:
    """Load with each loader in turn."""
    preset, layout = PRESETS[job.preset], parse_layout(job.layout)
    state = make_state(preset, layout)
    bucket = Bucket(job.bucket, bytes_per_second=job.bytes_per_second, latency=job.latency)
    for mode in ("direct", "cooperative"):
        clear_state(state)
        _load_local(job.path, state, mode=mode)
        check_state(preset, layout, state, loader=mode)
    loads: dict[str, Callable[[], Mapping[str, float]]] = {
        "stock": lambda: _load_stock(job.path, state, bucket),
        "direct": lambda: _load_throttled(job.path, state, bucket, mode="direct"),
        "cooperative": lambda: _load_throttled(job.path, state, bucket, mode="cooperative"),
    }
    samples: dict[str, list[Served]] = {name: [] for name in LOADERS}
    local: dict[str, list[float]] = {"direct": [], "auto": []}
    for _ in range(job.repeats):
        for name in LOADERS:
            before, requests = bucket.bytes_served, bucket.requests
            sample = measure(loads[name])
            samples[name].append(
                Served(sample, bucket.bytes_served - before, bucket.requests - requests)
            )
        for _ in range(_LOCAL_LOADS):
            for mode, seconds in local.items():
                seconds.append(measure(lambda m=mode: _load_local(job.path, state, mode=m)).wall)
    check_state(preset, layout, state, loader="timed loads")
    reader = ReshardStorageReader(job.path, process_group=dist.group.WORLD)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    bucket.close()
    return RankResult(samples, local, reader.stats.cooperation.mode)


def _load_stock(path: str, state: State, bucket: Bucket) -> Mapping[str, float]:
    reader = dcp.FileSystemReader(path)
    reader.fs = ThrottledFileSystem(bucket)
    dcp.load(state, storage_reader=reader)
    return {}


def _load_throttled(path: str, state: State, bucket: Bucket, *, mode: str) -> Mapping[str, float]:
    return _load(ThrottledCheckpoint(path, bucket), state, mode=mode)


def _load_local(path: str, state: State, *, mode: str) -> Mapping[str, float]:
    return _load(path, state, mode=mode)


def _load(checkpoint: Any, state: State, *, mode: str) -> Mapping[str, float]:
    reader = ReshardStorageReader(checkpoint, mode=mode, process_group=dist.group.WORLD)
    dcp.load(state, storage_reader=reader, planner=ReshardLoadPlanner())
    return reader.stats.seconds


def figures_of(pair: str, results: Sequence[RankResult], *, unique_bytes: int) -> Figures:
    """All figures of one pair."""
    figures: Figures = {"pair": pair, "ranks": len(results), "auto": results[0].auto}
    for name in LOADERS:
        rounds = list(zip(*(result.samples[name] for result in results), strict=True))
        served = [[s.bytes_served for s in round_] for round_ in rounds]
        peaks = [max(s.sample.peak_bytes or 0 for s in round_) for round_ in rounds]
        figures[name] = {
            "seconds": statistics.median(max(s.sample.wall for s in r) for r in rounds),
            "cpu_seconds": statistics.median(sum(s.sample.cpu for s in r) for r in rounds),
            "read_over_unique": statistics.median(map(sum, served)) / unique_bytes,
            "requests": statistics.median(sum(s.requests for s in r) for r in rounds),
            "imbalance": statistics.median(max(r) * len(r) / sum(r) for r in served),
            "peak_bytes": statistics.median(peaks),
            "samples": [[asdict(s) for s in round_] for round_ in rounds],
        }
    local = {
        mode: [max(r) for r in zip(*(result.local[mode] for result in results), strict=True)]
        for mode in ("direct", "auto")
    }
    ratios = [auto / direct for direct, auto in zip(local["direct"], local["auto"], strict=True)]
    return figures | {"local": local, "local_auto_over_direct": statistics.median(ratios)}


def _times(name: str) -> Callable[[Figures], str]:
    return lambda f: f"{f['stock']['seconds'] / f[name]['seconds']:.2f}x"


def _read(name: str) -> Callable[[Figures], str]:
    return lambda f: f"{f[name]['read_over_unique']:.2f}"


TABLE: tuple[Column, ...] = (
    ("pair", -22, lambda f: f["pair"]),
    ("stock s", 8, lambda f: f"{f['stock']['seconds']:.2f}"),
    ("direct", 7, _times("direct")),
    ("coop", 7, _times("cooperative")),
    ("read/unique stock", 18, _read("stock")),
    ("direct", 7, _read("direct")),
    ("coop", 6, _read("cooperative")),
    ("imbalance", 10, lambda f: f"{f['cooperative']['imbalance']:.2f}"),
    ("peak MB coop", 13, lambda f: f"{f['cooperative']['peak_bytes'] / 1e6:.0f}"),
    (
        "auto local",
        18,
        lambda f: f"{f['auto']} {f['local_auto_over_direct']:.2f}",
    ),
)


def measure_pair(pair: str, options: argparse.Namespace) -> Figures:
    """Save, load, and say what it took."""
    source, dest = pair.split(":")
    with tempfile.TemporaryDirectory(prefix="dcp_reshard_bench_", dir=options.dir) as folder:
        path, bucket = f"{folder}/checkpoint", f"{folder}/bucket"
        arguments = (path, options.preset, source, False)
        gloo_world(parse_layout(source).ranks, save_rank, *arguments, timeout=options.timeout)
        job = Job(
            path=path,
            bucket=bucket,
            preset=options.preset,
            layout=dest,
            repeats=options.repeats,
            bytes_per_second=options.bandwidth * 1e6,
            latency=options.latency / 1e3,
        )
        results = gloo_world(parse_layout(dest).ranks, load_rank, job, timeout=options.timeout)
    return figures_of(pair, results, unique_bytes=checkpoint_bytes(PRESETS[options.preset]))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench --throttle",
        description=__doc__,
        epilog=LEGEND,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="t", help="sizes (t: 0.12 GB)")
    parser.add_argument("--pairs", default=PAIRS, help="as in 'fsdp8:hsdp8x1 fsdp8:col8'")
    parser.add_argument("--bandwidth", type=float, default=100, help="MB/s, of all ranks together")
    parser.add_argument("--latency", type=float, default=0.5, help="ms per request")
    parser.add_argument("--repeats", type=int, default=2, help="timed loads by each loader")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for files")
    parser.add_argument("--timeout", type=float, default=3600, help="seconds for one job")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.bandwidth <= 0 or options.latency < 0:
        parser.error("--repeats and --bandwidth must be positive, --latency not negative")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    options = _parse(arguments)
    print(
        f"preset {options.preset}, {options.bandwidth:g} MB/s, {options.latency:g} ms, "
        f"{options.repeats} repeats"
    )
    print(line(TABLE), flush=True)
    rows = []
    for pair in options.pairs.split():
        rows.append(measure_pair(pair, options))
        print(line(TABLE, rows[-1]), flush=True)
    if options.json:
        environment = {
            name: getattr(options, name) for name in ("preset", "bandwidth", "latency", "repeats")
        }
        options.json.write_text(json.dumps({"environment": environment, "pairs": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
