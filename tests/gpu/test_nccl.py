"""The round trip on GPUs: NCCL under torchrun, and CUDA destinations through pinned staging.

Each test is skipped, with the number of devices that it needs, where these are not there.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import dcp_reshard
from dcp_reshard import ReaderOptions
from tests.support.tensors import indexed_tensor

pytestmark = pytest.mark.gpu

RANK_PROGRAM = Path(__file__).with_name("nccl_rank.py")


def needs_gpus(count: int) -> None:
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} CUDA devices, there are {torch.cuda.device_count()}")


def torchrun(ranks: int, *args: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={ranks}", str(RANK_PROGRAM), *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_cuda_destinations_are_filled_through_pinned_staging(tmp_path: Path) -> None:
    """Whole tensors, row parts, columns and casts arrive bit for bit on a GPU."""
    needs_gpus(1)
    full = indexed_tensor((4096, 1024))
    dcp.save({"w": full, "small": full[:3].clone(), "half": full.half()}, checkpoint_id=tmp_path)
    state = {
        "w": torch.full((4096, 1024), -1.0, device="cuda"),
        "small": torch.full((1024, 3), -1.0, device="cuda").t(),
        "half": torch.full((4096, 1024), -1.0, device="cuda"),
    }
    # A budget far below the tensors: every staging buffer is used again and must be drained.
    options = ReaderOptions(memory_budget=2 * 2**20, threads=4)
    report = dcp_reshard.load(state, tmp_path, no_dist=True, dtype_policy="widen", options=options)
    assert torch.equal(state["w"].cpu(), full)
    assert torch.equal(state["small"].cpu(), full[:3])
    assert torch.equal(state["half"].cpu(), full.half().float())
    assert report.bytes_direct == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_with_its_optimizer_resumes_under_nccl(ranks: int, tmp_path: Path) -> None:
    """FSDP2 on N GPUs saves; rows, columns and replicas on N GPUs load the same bits."""
    needs_gpus(ranks)
    torchrun(ranks, "save", str(tmp_path))
    torchrun(ranks, "load", str(tmp_path))
