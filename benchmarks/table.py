"""From samples of all ranks to the figures of a pair of layouts, and from these to a table."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from operator import truediv
from typing import Any

from benchmarks.meters import Sample
from benchmarks.ranks import LOADERS, RankResult

__all__ = ["LEGEND", "MAIN_TABLE", "VERIFICATION_TABLE", "Column", "figures_of", "line", "summary"]

Figures = dict[str, Any]
Column = tuple[str, int, Callable[[Figures], str]]

LEGEND = """\
stock s     seconds of stock dcp.load: slowest rank, median of the repeats
off, avail  dcp_reshard with verify="off" and verify="available", times faster than stock;
            cpu: the same for CPU seconds, summed over the ranks
read/wanted bytes that read calls returned over bytes of all ranks' tensors, metadata included
peak/dest   memory beyond what was there before over bytes of the rank's tensors, worst rank
off/floor   seconds of verify="off" over those of bare preadv of the same ranges
disk        cold only: bytes from the disk over bytes of the checkpoint, stock and verify="off" """


def figures_of(results: Sequence[RankResult], *, unique_bytes: int) -> Figures:
    """All figures of one pair, and the samples that they are made of."""
    figures: Figures = {
        "ranks": len(results),
        "wanted_bytes": sum(result.dest_bytes for result in results),
        "unique_bytes": unique_bytes,
        "mode": results[0].mode,
    }
    for name in LOADERS:
        rounds = list(zip(*(result.samples[name] for result in results), strict=True))
        figures[name] = _figures_of_rounds(rounds, results)
    return figures


def _figures_of_rounds(
    rounds: Sequence[Sequence[Sample]], results: Sequence[RankResult]
) -> Figures:
    seconds = [max(s.wall for s in round_) for round_ in rounds]
    phases = {phase for round_ in rounds for s in round_ for phase in s.phases}
    dests = [result.dest_bytes for result in results]
    peaks = [[s.peak_bytes for s in round_ if s.peak_bytes is not None] for round_ in rounds]
    known = all(len(round_) == len(dests) for round_ in peaks)
    return {
        "seconds": statistics.median(seconds),
        "seconds_min": min(seconds),
        "cpu_seconds": statistics.median(sum(s.cpu for s in round_) for round_ in rounds),
        "bytes_read": statistics.median(sum(s.bytes_read for s in round_) for round_ in rounds),
        "disk_bytes": statistics.median(sum(s.disk_bytes for s in round_) for round_ in rounds),
        "peak_bytes": statistics.median(max(r) for r in peaks) if known else None,
        "peak_over_dest": (
            statistics.median(max(map(truediv, r, dests)) for r in peaks) if known else None
        ),
        "phases": {
            phase: statistics.median(max(s.phases.get(phase, 0) for s in r) for r in rounds)
            for phase in sorted(phases)
        },
        "samples": [[asdict(sample) for sample in round_] for round_ in rounds],
    }


def _times(name: str, quantity: str) -> Callable[[Figures], str]:
    return lambda f: f"{f['stock'][quantity] / f[name][quantity]:.2f}x"


def _read(name: str) -> Callable[[Figures], str]:
    return lambda f: f"{f[name]['bytes_read'] / f['wanted_bytes']:.2f}"


def _peak(name: str) -> Callable[[Figures], str]:
    def cell(figures: Figures) -> str:
        peak = figures[name]["peak_over_dest"]
        return "-" if peak is None else f"{peak:.2f}"

    return cell


def _cpu_per_gb(name: str) -> Callable[[Figures], str]:
    return lambda f: f"{f[name]['cpu_seconds'] / (f['wanted_bytes'] / 1e9):.2f}"


def _disk(figures: Figures) -> str:
    unique = figures["unique_bytes"]
    return "/".join(
        f"{figures[name]['disk_bytes'] / unique:.2f}" for name in ("stock", "unverified")
    )


def _verification(figures: Figures) -> str:
    cost = figures["verified"]["cpu_seconds"] - figures["unverified"]["cpu_seconds"]
    return f"{cost / (figures['wanted_bytes'] / 1e9):+.2f}"


def _over_stock(figures: Figures) -> str:
    return f"{figures['verified']['cpu_seconds'] / figures['stock']['cpu_seconds']:.2f}"


_PAIR: tuple[Column, ...] = (
    ("pair", -21, lambda f: f["pair"]),
    ("MB", 6, lambda f: f"{f['wanted_bytes'] / 1e6:.0f}"),
)

MAIN_TABLE: tuple[Column, ...] = (
    *_PAIR,
    ("stock s", 8, lambda f: f"{f['stock']['seconds']:.3f}"),
    ("off", 7, _times("unverified", "seconds")),
    ("avail", 7, _times("verified", "seconds")),
    ("cpu off", 8, _times("unverified", "cpu_seconds")),
    ("avail", 7, _times("verified", "cpu_seconds")),
    ("read/wanted stock", 18, _read("stock")),
    ("off", 5, _read("unverified")),
    ("avail", 6, _read("verified")),
    ("peak/dest stock", 16, _peak("stock")),
    ("off", 6, _peak("unverified")),
    ("avail", 6, _peak("verified")),
    ("off/floor", 10, lambda f: f"{f['unverified']['seconds'] / f['floor']['seconds']:.2f}"),
    ("disk", 10, _disk),
)

VERIFICATION_TABLE: tuple[Column, ...] = (
    *_PAIR,
    ("CPU s/GB: stock", 16, _cpu_per_gb("stock")),
    ("off", 7, _cpu_per_gb("unverified")),
    ("avail", 7, _cpu_per_gb("verified")),
    ("floor", 7, _cpu_per_gb("floor")),
    ("avail - off", 12, _verification),
    ("avail / stock", 14, _over_stock),
)


def line(columns: Iterable[Column], figures: Figures | None = None) -> str:
    """A line of a table; its head, without figures."""
    cells = [(title if figures is None else cell(figures), width) for title, width, cell in columns]
    return " ".join(
        f"{text:>{width}}" if width > 0 else f"{text:{-width}}" for text, width in cells
    )


def summary(rows: Sequence[Figures]) -> str:
    """Median and best over all pairs, for each way of ours."""
    texts = []
    for name, label in (("unverified", 'verify="off"'), ("verified", 'verify="available"')):
        ratios = [row["stock"]["seconds"] / row[name]["seconds"] for row in rows]
        texts.append(
            f"{label}: {statistics.median(ratios):.2f}x in the median pair, {max(ratios):.2f}x in "
            f"the best, {min(ratios):.2f}x in the worst"
        )
    return "\n".join(texts)
