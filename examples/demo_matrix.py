"""Trains on four processes, resumes on seven layouts, and checks every bit. Run by `scripts/demo`.

1. Four gloo processes train a small GPT with FSDP2 and save with stock `dcp.save`. The same job
   then makes two more steps; these are the losses to meet. The first shows that the parameters are
   right; the second, which comes after an update, that the optimizer is.
2. For each layout a new job loads the checkpoint, by turns with stock `dcp.load` and with
   `dcp_reshard.load`, into tensors full of NaN; every load is compared with the saved tensors
   (`demo_check`). Then it resumes as a user would, with `Trainer.resume`, and makes two steps.

Every job has processes of its own. They are forked from this one, which has imported torch but
never computes: to start an interpreter and import torch in each rank would cost more than the rest.

What the last table counts: "wanted" and "read" are the load report's, summed over ranks. "process
read" is what the kernel counted for the ranks during the load, in the same way for both loaders:
`rchar` of `/proc/self/io`, the bytes returned by reads, from the page cache or not. Seconds are
those of the slowest rank. Of three turns the smallest number counts: the first one also imports
modules, and others may be using the machine.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from demo_check import Reference, Tally, fill_with_garbage, write_reference
from gpt import GPTConfig
from train_fsdp import TrainConfig, Trainer, make_mesh

import dcp_reshard

SAVING_RANKS = 4
LAYOUTS = [
    ("FSDP2, 1 rank", "fsdp", 1),
    ("FSDP2, 2 ranks", "fsdp", 2),
    ("FSDP2, 3 ranks", "fsdp", 3),
    ("FSDP2, 6 ranks", "fsdp", 6),
    ("TP 2", "tp", 2),
    ("FSDP2 x TP, 2 x 2", "fsdp_tp=2x2", 4),
    ("HSDP, 2 x 2", "hsdp=2x2", 4),
]
CONFIG = TrainConfig(global_batch=12)
"""12 sequences: 1, 2, 3, 4 and 6 data-parallel ranks divide them."""
LOSS_TOLERANCE = 1e-4
"""Other layouts add floating-point numbers in another order: a difference of about 1e-6 here. An
optimizer that has lost its state is off by more than 1e-2."""
JOB_TIMEOUT = 90.0
"""Seconds that a job may take."""
TURNS = 3
"""Timed loads with each of the two loaders, for every layout."""


class JobError(Exception):
    """A rank failed or did not end in time."""


@dataclass(slots=True)
class Loader:
    """What one way to load did on one rank."""

    seconds: float = float("inf")
    process_read: int | None = None
    parameters: Tally = field(default_factory=Tally)
    optimizer: Tally = field(default_factory=Tally)
    failure: str | None = None


@dataclass(slots=True)
class Resumed:
    """What one rank of a resumed job found."""

    losses: list[float]
    parameters: Tally
    optimizer: Tally
    wanted: int
    read: int
    ours: Loader
    stock: Loader


# Work of one rank.


def train_and_save(folder: Path, steps: int) -> list[float]:
    """Trains, saves after `steps` steps, goes on for two more; returns all losses."""
    trainer = Trainer(GPTConfig(), CONFIG, make_mesh("fsdp", "cpu"))
    losses = [trainer.train_step() for _ in range(steps)]
    trainer.save(folder / "checkpoint")
    write_reference(trainer, folder / "reference")
    return losses + [trainer.train_step() for _ in range(2)]


def resume_and_compare(folder: Path, mesh: str) -> Resumed:
    """Loads the checkpoint on this job's mesh in every way, compares, and makes two steps."""
    path = folder / "checkpoint"
    trainer = Trainer(GPTConfig(), CONFIG, make_mesh(mesh, "cpu"))
    # This gives the optimizer its state, so that it can be filled with garbage too.
    trainer.state()
    reference = Reference(folder / "reference")

    stock, ours = Loader(), Loader()
    for _ in range(TURNS):
        try:
            take_turn(stock, trainer, reference, lambda state: dcp.load(state, checkpoint_id=path))
        # `CheckpointException`, which torch raises for a failure on any rank, is no `Exception`.
        except (Exception, dcp.CheckpointException) as error:
            stock.failure = f"{type(error).__name__}: {error}"
        take_turn(ours, trainer, reference, lambda state: dcp_reshard.load(state, path))

    fill_with_garbage(trainer)
    report = trainer.resume(path)
    parameters, optimizer = reference.compare(trainer, dist.get_world_size())
    return Resumed(
        losses=[trainer.train_step() for _ in range(2)],
        parameters=parameters,
        optimizer=optimizer,
        wanted=report.bytes_wanted,
        read=report.bytes_read,
        ours=ours,
        stock=stock,
    )


def take_turn(
    loader: Loader, trainer: Trainer, reference: Reference, load: Callable[[dict[str, Any]], object]
) -> None:
    """Loads into garbage, compares what came, and notes in `loader` what it cost."""
    fill_with_garbage(trainer)
    state = trainer.state()
    dist.barrier()
    bytes_before, start = bytes_read_by_process(), time.perf_counter()
    load(state)
    seconds, bytes_after = time.perf_counter() - start, bytes_read_by_process()
    trainer.restore(state)
    parameters, optimizer = reference.compare(trainer, dist.get_world_size())
    loader.parameters += parameters
    loader.optimizer += optimizer
    loader.seconds = min(loader.seconds, seconds)
    if bytes_before is not None and bytes_after is not None:
        loader.process_read = min(bytes_after - bytes_before, loader.process_read or sys.maxsize)


def bytes_read_by_process() -> int | None:
    """Returns the bytes that this process has read, or None where the kernel does not count."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(text.split("rchar:")[1].split()[0])


# Jobs: one process for each rank.


def run_job(work: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Calls `work(*arguments)` on the ranks of a new process group; returns what they returned."""
    sys.stdout.flush()
    context = multiprocessing.get_context("fork")
    pipes = [context.Pipe(duplex=False) for _ in range(world_size)]
    with tempfile.TemporaryDirectory(prefix="dcp-reshard-job-") as name:
        processes = [
            context.Process(target=run_rank, args=(work, rank, world_size, name, sender, arguments))
            for rank, (_, sender) in enumerate(pipes)
        ]
        for process in processes:
            process.start()
        culprit = await_ranks(processes)
    if culprit is not None:
        receiver = pipes[culprit][0]
        detail = f"exit code {processes[culprit].exitcode}" + (
            f"\n{receiver.recv()}" if receiver.poll() else ", no message"
        )
        raise JobError(f"rank {culprit} of {world_size} failed: {detail}")
    return [receiver.recv() for receiver, _ in pipes]


def await_ranks(processes: Sequence[BaseProcess]) -> int | None:
    """Waits until all have ended; returns the first that failed, or that did not end in time.

    When one has failed, the others get a little time to notice.
    """
    culprit: int | None = None
    deadline = time.monotonic() + JOB_TIMEOUT
    running = list(processes)
    while running and time.monotonic() < deadline:
        wait([process.sentinel for process in running], timeout=deadline - time.monotonic())
        running = [process for process in running if process.is_alive()]
        failed = [rank for rank, process in enumerate(processes) if process.exitcode]
        if failed and culprit is None:
            culprit = failed[0]
            deadline = min(deadline, time.monotonic() + 5)
    if running and culprit is None:
        culprit = processes.index(running[0])
    for process in running:
        process.kill()
    for process in processes:
        process.join()
    return culprit


def run_rank(
    work: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: str,
    sender: Connection,
    arguments: tuple[Any, ...],
) -> None:
    """The main function of a rank's process: sends the result, or a traceback, to the parent."""
    torch.set_num_threads(1)
    # A hint about speed from every rank: clipping reduces a norm over two mesh axes, one by one.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    try:
        # A file as the meeting point: no port that another program might have taken.
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size
        )
        sender.send(work(*arguments))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        sender.send(traceback.format_exc())
        os._exit(1)


# The tables.


def total(tallies: list[Tally]) -> Tally:
    """Returns the sum over ranks; all of them know how much there is to compare."""
    return Tally(
        differ=sum(tally.differ for tally in tallies),
        compared=sum(tally.compared for tally in tallies),
        full=max(tally.full for tally in tallies),
    )


def is_complete(tally: Tally) -> bool:
    """Returns whether everything was compared, and nothing differs."""
    return tally.differ == 0 and tally.compared == tally.full > 0


def tally_text(tally: Tally) -> str:
    """Returns the tally as it stands in a table."""
    text = f"{tally.differ:,} of {tally.compared:,}"
    return text if tally.compared == tally.full else f"{text} (must be {tally.full:,})"


def find_faults(ranks: list[Resumed], expected: list[float]) -> list[str]:
    """Returns what is wrong with a resumed job, in words."""
    faults = []
    for what, tallies in {
        "parameters, resumed": [result.parameters for result in ranks],
        "optimizer, resumed": [result.optimizer for result in ranks],
        "parameters, timed loads": [result.ours.parameters for result in ranks],
        "optimizer, timed loads": [result.ours.optimizer for result in ranks],
    }.items():
        if not is_complete(total(tallies)):
            faults.append(f"{what}: differ {tally_text(total(tallies))}")
    for result in ranks:
        for loss, wanted in zip(result.losses, expected, strict=True):
            # Not `>`: a loss that is NaN must fail.
            if not abs(loss - wanted) <= LOSS_TOLERANCE:
                faults.append(f"loss {loss:.6f}, uninterrupted {wanted:.6f}")
    return list(dict.fromkeys(faults))


def megabytes(count: int | None) -> str:
    """Returns a number of bytes in MB (millions), or a dash where it is not known."""
    return "-" if count is None else f"{count / 1e6:.2f}"


def process_read(loaders: list[Loader]) -> int | None:
    """Returns the bytes that the kernel counted, over all ranks."""
    counts = [loader.process_read for loader in loaders]
    return None if None in counts else sum(count or 0 for count in counts)


def stock_text(ranks: list[Resumed]) -> str:
    """Returns what came of stock `dcp.load`, in words."""
    failures = [result.stock.failure for result in ranks if result.stock.failure]
    if failures:
        return "FAILED: " + failures[0].splitlines()[0][:60]
    tallies = [total([result.stock.parameters for result in ranks])]
    tallies.append(total([result.stock.optimizer for result in ranks]))
    differ = sum(tally.differ for tally in tallies)
    return "same bits" if all(map(is_complete, tallies)) else f"WRONG: {differ:,} differ"


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Prints rows of text under a header: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in [header, ["-" * width for width in widths], *rows]:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join(cells))
    print()


def print_results(results: dict[str, list[Resumed]], expected: list[float], steps: int) -> None:
    """Prints the two tables: is it the same, and what did it cost."""
    print(
        "\nIs it the same? Elements that differ from the saved ones, as bits, of those compared:\n"
    )
    rows = [["uninterrupted", "", "", *(f"{loss:.6f}" for loss in expected)]]
    for label, _, _ in LAYOUTS:
        if label not in results:
            rows.append([label, "FAILED", "FAILED", "-", "-"])
            continue
        ranks = results[label]
        parameters = total([result.parameters for result in ranks])
        optimizer = total([result.optimizer for result in ranks])
        losses = [f"{loss:.6f}" for loss in ranks[0].losses]
        rows.append([label, tally_text(parameters), tally_text(optimizer), *losses])
    print_table(
        ["layout", "parameters", "optimizer", f"loss, step {steps + 1}", f"loss, step {steps + 2}"],
        rows,
    )

    print(
        "What did it cost? MB of all ranks together, seconds of the slowest. `wanted` and `read`\n"
        "are the load report's; `process read` is what the kernel counted, the same for both:\n"
    )
    rows = []
    for label, ranks in results.items():
        ours, stock = [result.ours for result in ranks], [result.stock for result in ranks]
        rows.append(
            [
                label,
                megabytes(sum(result.wanted for result in ranks)),
                megabytes(sum(result.read for result in ranks)),
                megabytes(process_read(ours)),
                f"{max(loader.seconds for loader in ours):.3f}",
                megabytes(process_read(stock)),
                f"{max(loader.seconds for loader in stock):.3f}",
                stock_text(ranks),
            ]
        )
    print_table(
        [
            "layout",
            "wanted",
            "read",
            "process read",
            "seconds",
            "stock: process read",
            "seconds",
            "result",
        ],
        rows,
    )


def main() -> int:
    """Runs the matrix and returns the exit status: 0 if everything is the same, else 1."""
    parser = argparse.ArgumentParser(description="Save on four ranks, resume on seven layouts.")
    parser.add_argument("--steps", type=int, default=12, help="training steps before the save")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error("`--steps` must be at least 1")
    begin = time.monotonic()
    faults: dict[str, list[str]] = {}
    results: dict[str, list[Resumed]] = {}

    with tempfile.TemporaryDirectory(prefix="dcp-reshard-demo-") as name:
        folder = Path(name)
        print(
            f"training: FSDP2 on {SAVING_RANKS} processes, {steps} steps, save, 2 more", flush=True
        )
        try:
            losses = run_job(train_and_save, SAVING_RANKS, folder, steps)[0]
        except JobError as error:
            print(f"{error}\nFAILED before anything could be resumed")
            return 1
        expected = losses[steps:]
        size = sum(path.stat().st_size for path in (folder / "checkpoint").iterdir())
        print(f"  loss {losses[0]:.3f} -> {losses[steps - 1]:.3f}; checkpoint {megabytes(size)} MB")
        for label, mesh, world_size in LAYOUTS:
            start = time.monotonic()
            try:
                results[label] = run_job(resume_and_compare, world_size, folder, mesh)
                faults[label] = find_faults(results[label], expected)
                verdict = "DIFFERS" if faults[label] else "same"
            except JobError as error:
                faults[label] = [str(error)]
                verdict = "FAILED"
            print(f"resuming: {label:18}  {verdict}  {time.monotonic() - start:.1f} s", flush=True)

    print_results(results, expected, steps)
    for label, found in faults.items():
        for fault in found:
            print(f"{label}: {fault}")
    seconds = time.monotonic() - begin
    compared = sum(
        result.parameters.compared + result.optimizer.compared
        for ranks in results.values()
        for result in ranks
    )
    failed = sum(bool(found) for found in faults.values())
    if failed:
        print(f"FAILED on {failed} of {len(LAYOUTS)} layouts, after {seconds:.0f} s")
        return 1
    print(
        f"PASSED: {len(LAYOUTS)} layouts, {compared:,} elements compared, 0 differ; losses within "
        f"{LOSS_TOLERANCE:g} of the uninterrupted run's; {seconds:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
