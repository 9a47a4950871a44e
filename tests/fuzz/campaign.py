"""Damage a checkpoint in every way of a kind, or lose ranks again and again, and count.

::

    python -m tests.fuzz.campaign metadata-flips payload-flips truncations kills --kills 60

* ``metadata-flips``: each bit of a small ``.metadata``, and the most that a load added to the
  memory of the process.
* ``payload-flips``: each bit of each data file, those of payloads and of containers apart.
* ``truncations``: ``.metadata`` and each data file, cut at every length.
* ``kills``: loads of three gloo processes of which one is killed, or stopped, somewhere.

A damaged checkpoint may fail with an error of ours, or load what was saved. Anything else is a
finding: it is printed, and the command fails. The first two work in a file system in memory if
``TMPDIR`` is in one, and take minutes.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import dcp_reshard
from dcp_reshard import ReaderOptions, ReshardError, RetryPolicy
from dcp_reshard.container import read_directory
from dcp_reshard.metadata import read_catalog
from dcp_reshard.storage import LocalSource
from tests.dist.test_lost_ranks import lose
from tests.support.bad_checkpoints import make_state, save_good
from tests.support.failures import find_failures
from tests.support.items import reader
from tests.support.tensors import check_same, fill_with_sentinel, snapshot

__all__ = ["CAMPAIGNS", "find_payload_bytes", "flip_bits", "load_damaged"]

OPTIONS = ReaderOptions(threads=1, retry=RetryPolicy(tries=1))


def load_damaged(path: Path) -> str:
    """Load a checkpoint that may be damaged: ``"found"``, or ``"right"``.

    Raises:
        AssertionError: What was loaded is not what was saved, or the error is none of ours.
    """
    state = make_state() | {"note": None, "opt": {"lr": None}}
    fill_with_sentinel(state)
    failures = find_failures(lambda: dcp_reshard.load(state, path, no_dist=True, options=OPTIONS))
    if failures:
        assert all(isinstance(error, ReshardError) for error in failures.values()), failures
        return "found"
    wanted = make_state()
    check_same(snapshot(state), snapshot(wanted))
    assert (state["note"], state["opt"]) == (wanted["note"], wanted["opt"])
    return "right"


def flip_bits(file: Path, *, step: int = 1) -> Iterator[int]:
    """Flip each bit of a file (each `step`-th) in turn; gives the number of its byte meanwhile."""
    data = file.read_bytes()
    for bit in range(0, 8 * len(data), step):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        yield bit // 8
    file.write_bytes(data)


def find_payload_bytes(path: Path) -> dict[str, set[int]]:
    """Of each data file, the bytes of what was saved: of elements, and of pickles.

    That is ``data.pkl`` and ``data/*``; not the other records of the container, ``version`` say.
    """
    found: dict[str, set[int]] = {}
    catalog = read_catalog(LocalSource(path))
    items = [
        (catalog.files[int(file)], int(start), int(length))
        for stored in catalog.tensors.values()
        for file, start, length in zip(stored.files, stored.starts, stored.lengths, strict=True)
    ]
    items += [(catalog.files[o.file], o.start, o.length) for o in catalog.objects.values()]
    for name, start, length in items:
        item = (path / name).read_bytes()[start : start + length]
        for record in read_directory(length, reader(item)):
            if record.name == "data.pkl" or record.name.startswith("data/"):
                first = start + record.start
                found.setdefault(name, set()).update(range(first, first + record.length))
    return found


def _peak_bytes(function: Callable[[], str]) -> tuple[str, int]:
    """The result of a call, and by how much it has raised the memory of this process."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _vm("VmRSS")
    result = function()
    return result, _vm("VmHWM") - before


def _vm(name: str) -> int:
    [line] = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(name)]
    return int(line.split()[1]) * 1024


def flip_metadata(path: Path, _: int) -> Counter[str]:
    """Each bit of the metadata."""
    counts: Counter[str] = Counter()
    most = 0
    for _ in flip_bits(path / ".metadata"):
        outcome, extra = _peak_bytes(lambda: load_damaged(path))
        counts[outcome] += 1
        most = max(most, extra)
    assert most < 64 * 2**20, f"{most} bytes for a load of damaged metadata"
    counts["KiB of memory at most"] = most // 1024
    return counts


def flip_payloads(path: Path, _: int) -> Counter[str]:
    """Each bit of the data files."""
    counts: Counter[str] = Counter()
    for name, payload in find_payload_bytes(path).items():
        for byte in flip_bits(path / name):
            outcome = load_damaged(path)
            kind = "payload" if byte in payload else "container"
            assert (kind, outcome) != ("payload", "right"), f"{name}, byte {byte}: not found"
            counts[f"{kind}: {outcome}"] += 1
    return counts


def truncate(path: Path, _: int) -> Counter[str]:
    """Every length of every file."""
    counts: Counter[str] = Counter()
    for file in sorted(path.iterdir()):
        data = file.read_bytes()
        for length in range(len(data)):
            file.write_bytes(data[:length])
            outcome = load_damaged(path)
            assert outcome == "found", f"{file.name} cut at byte {length}: not found"
            counts[f"{'metadata' if file.name == '.metadata' else 'data'}: {outcome}"] += 1
        file.write_bytes(data)
    return counts


def kill_ranks(path: Path, times: int) -> Counter[str]:
    """Each rank in each phase of each mode in turn, killed, and stopped every eighth time."""
    phases = ["before plan", "in plan", "in read", "before verdict", "in commit"]
    cases = itertools.cycle(itertools.product(phases, range(3), ["direct", "cooperative"]))
    counts: Counter[str] = Counter()
    for number, (phase, victim, mode) in enumerate(itertools.islice(cases, times)):
        kind = signal.SIGSTOP if number % 8 == 7 else signal.SIGKILL
        lose(path / str(number), victim, phase, mode, kind)
        counts[f"{kind.name}: survivors told, no hang"] += 1
    return counts


CAMPAIGNS: dict[str, Callable[[Path, int], Counter[str]]] = {
    "metadata-flips": flip_metadata,
    "payload-flips": flip_payloads,
    "truncations": truncate,
    "kills": kill_ranks,
}
"""By name."""


def main() -> None:
    """Run what is asked for, and print what came of it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", choices=[*CAMPAIGNS], metavar="CAMPAIGN")
    parser.add_argument("--kills", type=int, default=60, help="loads in which a rank is lost")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    failed = False
    for name in options.names or CAMPAIGNS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="campaign_") as folder:
            path = Path(folder)
            if name != "kills":
                save_good(path)
            try:
                counts = CAMPAIGNS[name](path, options.kills)
            except Exception:
                failed = True
                print(f"{name}: FINDING\n{traceback.format_exc()}", flush=True)
                continue
        for outcome, count in sorted(counts.items()):
            print(f"{name}: {count} {outcome}", flush=True)
        print(f"{name}: {time.monotonic() - started:.0f} seconds", flush=True)
    sys.stdout.flush()
    # Threads of lost worlds may still wait.
    os._exit(int(failed))


if __name__ == "__main__":
    main()
