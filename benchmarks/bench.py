"""Stock `dcp.load` against `dcp_reshard`: one command, one table.

For each pair of layouts a checkpoint is written by stock `dcp.save`, and loaded by one job of real
processes with each loader in turn, A B C D A B C D, so that whatever else the machine does hits all
of them. Before, every loader's result is compared element by element.

The columns: seconds of the slowest rank (median of the repeats) of stock; how many times faster
ours is, without and with checksums; bytes read over bytes wanted, of the whole job, as the kernel
counts them (``rchar``); peak memory over the destinations, worst rank; and ours (unverified) over
the floor, which is the same byte ranges by bare `preadv` into ready buffers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ranks import LOADERS, Sample, load_rank, save_rank
from benchmarks.states import PRESETS, parse_layout
from tests.support.worlds import gloo_world

DEFAULT_PAIRS = "fsdp1:fsdp8 fsdp4:fsdp8 fsdp8:fsdp4 fsdp4:fsdp4 fsdp4:hsdp2x2 fsdp4:col4"
ALL_PAIRS = (
    f"{DEFAULT_PAIRS} fsdp8:fsdp1 fsdp8:fsdp3 tp8:fsdp8 fsdp8:tp8 fsdp8:col8 fsdp4_tp2:fsdp2_tp4"
)

_COLUMNS = (
    ("pair", 20),
    ("MB", 7),
    ("stock s", 8),
    ("unverified", 11),
    ("verified", 9),
    ("stock read", 11),
    ("ours read", 10),
    ("stock peak", 11),
    ("ours peak", 10),
    ("over floor", 11),
    ("cpu s/GB", 17),
)


def _load(
    rank: int,
    path: str,
    preset: str,
    layout: str,
    repeats: int,
    cold: bool,  # noqa: FBT001
) -> tuple[int, dict[str, list[Sample]]]:
    return load_rank(rank, path, preset, layout, repeats, cold=cold)


def measure(preset: str, pair: str, repeats: int, *, cold: bool) -> dict[str, Any]:
    """All figures of one pair."""
    source, dest = pair.split(":")
    with tempfile.TemporaryDirectory() as path:
        gloo_world(parse_layout(source).ranks, save_rank, path, preset, source, timeout=600)
        ranks = gloo_world(
            parse_layout(dest).ranks, _load, path, preset, dest, repeats, cold, timeout=600
        )
    wanted = sum(w for w, _ in ranks)
    figures: dict[str, Any] = {"pair": pair, "wanted_bytes": wanted}
    for name in LOADERS:
        rounds = list(zip(*(samples[name] for _, samples in ranks), strict=True))
        figures[name] = {
            "seconds": statistics.median(max(s.wall for s in r) for r in rounds),
            "cpu_seconds": statistics.median(sum(s.cpu for s in r) for r in rounds),
            "bytes_read": statistics.median(sum(s.bytes_read for s in r) for r in rounds),
            "peak_bytes": statistics.median(max(s.peak_bytes for s in r) for r in rounds),
        }
    return figures


def cells(figures: dict[str, Any]) -> list[str]:
    """A line of the table."""
    stock, off, crc = figures["stock"], figures["unverified"], figures["verified"]
    wanted, giga = figures["wanted_bytes"], figures["wanted_bytes"] / 1e9
    cpu = "/".join(f"{f['cpu_seconds'] / giga:.2f}" for f in (stock, off, crc))
    return [
        figures["pair"],
        f"{wanted / 1e6:.0f}",
        f"{stock['seconds']:.3f}",
        f"{stock['seconds'] / off['seconds']:.2f}x",
        f"{stock['seconds'] / crc['seconds']:.2f}x",
        f"{stock['bytes_read'] / wanted:.2f}",
        f"{crc['bytes_read'] / wanted:.2f}",
        f"{stock['peak_bytes'] / 1e6:.0f} MB",
        f"{crc['peak_bytes'] / 1e6:.0f} MB",
        f"{off['seconds'] / figures['floor']['seconds']:.2f}",
        cpu,
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="s")
    parser.add_argument("--pairs", default=DEFAULT_PAIRS, help="as in 'fsdp4:col4 fsdp8:fsdp3'")
    parser.add_argument("--all", action="store_true", help="all pairs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each load")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    pairs = (ALL_PAIRS if options.all else options.pairs).split()
    results = []
    print(" ".join(f"{title:>{width}}" for title, width in _COLUMNS))
    for pair in pairs:
        figures = measure(options.preset, pair, options.repeats, cold=options.cold)
        results.append(figures)
        line = zip(cells(figures), _COLUMNS, strict=True)
        print(" ".join(f"{text:>{width}}" for text, (_, width) in line))
        sys.stdout.flush()
    for name in ("unverified", "verified"):
        ratios = [r["stock"]["seconds"] / r[name]["seconds"] for r in results]
        print(f"{name}: median {statistics.median(ratios):.2f}x, best {max(ratios):.2f}x")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
