"""Stock `dcp.load` against `dcp_reshard`: one command, one table.

For each pair of layouts a checkpoint is written by stock `dcp.save`, and loaded by one job of real
processes with each loader in turn, A B C D A B C D, so that whatever else the machine does hits all
of them. Before, every loader's result is compared element by element; that is the warm-up.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.layouts import parse_layout
from benchmarks.ranks import Job, load_rank, save_rank
from benchmarks.states import PRESETS, checkpoint_bytes
from benchmarks.table import (
    LEGEND,
    MAIN_TABLE,
    VERIFICATION_TABLE,
    Column,
    Figures,
    figures_of,
    line,
    summary,
)
from tests.support.worlds import gloo_world

DEFAULT_PAIRS = "fsdp1:fsdp8 fsdp4:fsdp8 fsdp8:fsdp4 fsdp4:fsdp4 fsdp4:hsdp2x2 fsdp4:col4"
ALL_PAIRS = (
    f"{DEFAULT_PAIRS} fsdp8:fsdp1 fsdp8:fsdp3 tp8:fsdp8 fsdp8:tp8 fsdp8:col8 fsdp4_tp2:fsdp2_tp4 "
    "small@fsdp1:fsdp2"
)
# Free space wanted beyond the checkpoint: other people write to this disk too.
_SPARE_BYTES = 10**9
_ERROR_CHARS = 3000


class Pair(NamedTuple):
    """One row of the table."""

    preset: str
    source: str
    dest: str

    @property
    def saved(self) -> tuple[str, str]:
        """What is saved: pairs that have it in common share a checkpoint."""
        return self.preset, self.source


def parse_pair(text: str, *, preset: str) -> Pair:
    """A pair from ``saved:loaded``, of `preset`, or ``preset@saved:loaded``.

    Raises:
        ValueError: It is not of this form, or one of the names is not known.
    """
    own, _, layouts = text.rpartition("@")
    source, colon, dest = layouts.partition(":")
    if not colon:
        raise ValueError(f"pair {text!r} is not `saved:loaded`")
    pair = Pair(own or preset, source, dest)
    if pair.preset not in PRESETS:
        raise ValueError(f"pair {text!r}: there is no preset {pair.preset!r}")
    parse_layout(pair.source), parse_layout(pair.dest)
    return pair


def measure_pairs(pairs: Sequence[Pair], options: argparse.Namespace) -> Iterator[Figures]:
    """All figures of each pair, those of one checkpoint after one another."""
    for saved in dict.fromkeys(pair.saved for pair in pairs):
        preset, source = saved
        size = checkpoint_bytes(PRESETS[preset])
        check_space(options.dir, size)
        with tempfile.TemporaryDirectory(prefix="dcp_reshard_bench_", dir=options.dir) as path:
            ranks = parse_layout(source).ranks
            gloo_world(
                ranks, save_rank, path, preset, source, options.cold, timeout=options.timeout
            )
            for pair in pairs:
                if pair.saved == saved:
                    yield measure_pair(pair, path, options)


def measure_pair(pair: Pair, path: str, options: argparse.Namespace) -> Figures:
    """All figures of one pair, whose checkpoint is there."""
    job = Job(
        path=path,
        preset=pair.preset,
        layout=pair.dest,
        repeats=options.repeats,
        mode=options.mode,
        cold=options.cold,
        profile=options.profile,
    )
    ranks = parse_layout(pair.dest).ranks
    results = gloo_world(ranks, load_rank, job, timeout=options.timeout)
    prefix = "" if pair.preset == options.preset else f"{pair.preset}@"
    return {
        "pair": f"{prefix}{pair.source}:{pair.dest}",
        "preset": pair.preset,
        "load_average": os.getloadavg()[0],
        "profile": results[0].profile,
        **figures_of(results, unique_bytes=checkpoint_bytes(PRESETS[pair.preset])),
    }


def check_space(folder: Path, size: int) -> None:
    """Exit unless a checkpoint of this size fits into a folder."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.1 + _SPARE_BYTES:
        raise SystemExit(
            f"{folder} has {free / 1e9:.1f} GB free, a checkpoint of {size / 1e9:.1f} GB and some "
            f"room are needed: try --dir"
        )


def environment(options: argparse.Namespace) -> dict[str, object]:
    """What the figures depend on."""
    return {
        "preset": options.preset,
        "repeats": options.repeats,
        "page_cache": "cold" if options.cold else "warm",
        "mode": options.mode,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpus": os.cpu_count(),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        epilog=LEGEND,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--preset", choices=PRESETS, default="s", help="sizes (s: 0.46 GB)")
    parser.add_argument("--pairs", default=DEFAULT_PAIRS, help="as in 'fsdp4:col4 s@fsdp8:fsdp3'")
    parser.add_argument("--all", action="store_true", help="all pairs, many small tensors too")
    parser.add_argument("--repeats", type=int, default=5, help="timed loads by each loader")
    parser.add_argument("--mode", choices=("auto", "direct", "cooperative"), default="auto")
    parser.add_argument("--cold", action="store_true", help="drop the page cache before each load")
    parser.add_argument(
        "--verification-cost", action="store_true", help="a second table: CPU seconds per GB"
    )
    parser.add_argument(
        "--profile", type=int, default=0, metavar="LINES", help="profile rank 0, verified"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all samples")
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="for files")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one job")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    texts = (ALL_PAIRS if options.all else options.pairs).split()
    try:
        options.pairs = [parse_pair(text, preset=options.preset) for text in texts]
    except ValueError as error:
        parser.error(f"--pairs: {error}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, and write JSON."""
    options = _parse(arguments)
    try:
        return _run(options)
    except BaseExceptionGroup as group:
        # Every rank tells of the failures of all: one of them, and its end, is enough.
        text = "".join(traceback.format_exception(group.exceptions[0]))
        print(f"scripts/bench: {group.message}\n{text[-_ERROR_CHARS:]}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace) -> int:
    # So that the temporary folder is removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    head = environment(options)
    print(", ".join(f"{name} {value}" for name, value in head.items()))
    columns: Sequence[Column] = MAIN_TABLE if options.cold else MAIN_TABLE[:-1]
    print(line(columns), flush=True)
    rows = []
    for figures in measure_pairs(options.pairs, options):
        rows.append(figures)
        print(line(columns, figures), flush=True)
        if figures["profile"]:
            print(figures["profile"])
    print(summary(rows))
    if options.verification_cost:
        print(line(VERIFICATION_TABLE))
        for figures in rows:
            print(line(VERIFICATION_TABLE, figures))
    if options.json:
        options.json.write_text(json.dumps({"environment": head, "pairs": rows}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
