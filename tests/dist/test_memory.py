"""Memory that a read takes beyond the destinations, measured in real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_reshard
from dcp_reshard import ReaderOptions
from tests.support.tensors import indexed_tensor
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

SHAPE = (3072, 4096)  # 48 MiB
BUDGET = 12 * 2**20
# What the process itself takes while it works: stacks of threads, gloo's, small objects.
SLACK = 2 * 2**20


def vm(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def save(rank: int, path: str) -> None:
    dcp.save({"w": indexed_tensor(SHAPE), "small": torch.ones(10)}, checkpoint_id=path)


def load(
    rank: int, path: str, mode: str, dtype: torch.dtype, wants: list[int]
) -> tuple[int, int]:
    options = ReaderOptions(memory_budget=BUDGET, threads=2)

    def run(state: dict[str, torch.Tensor]) -> int:
        report = dcp_reshard.load(
            state, path, mode=mode, dtype_policy="cast", options=options
        )
        return report.cooperation.rounds

    # Once on a small scale, so that all that is made once is there.
    run({"small": torch.zeros(10, dtype=dtype)})
    state = {"w": torch.full(SHAPE, -1, dtype=dtype)} if rank in wants else {}
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = vm("VmRSS")
    rounds = run(state)
    grown = vm("VmHWM") - before
    for tensor in state.values():
        assert torch.equal(tensor, indexed_tensor(SHAPE).to(dtype))
    return grown, rounds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("mode", "wants"),
    [("cooperative", [0, 1, 2, 3]), ("cooperative", [0]), ("direct", [0])],
    ids=["cooperative", "one", "direct"],
)
def test_memory_stays_in_the_budget(
    tmp_path: Path, mode: str, wants: list[int], dtype: torch.dtype
) -> None:
    """What is read, sent, received, and cast, on all ranks, also where one receives all."""
    gloo_world(1, save, str(tmp_path))
    for grown, rounds in gloo_world(4, load, str(tmp_path), mode, dtype, wants):
        assert rounds > 4 or mode == "direct"
        assert grown <= BUDGET + SLACK
