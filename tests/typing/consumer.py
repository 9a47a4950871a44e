"""What a user's code may say of this package's types; checked by mypy, never run.

An ignored error must be one: under ``--strict`` a comment that is not needed is an error itself, so
each shows that the annotations ship (`py.typed`) and are as narrow as they claim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import dcp_reshard
from dcp_reshard import (
    LoadReport,
    PlanOptions,
    ReaderOptions,
    ReshardLoadPlanner,
    ReshardStorageReader,
)


def load(state: dict[str, Any], path: Path) -> None:
    """The ways to load."""
    assert_type(dcp_reshard.load(state, path, dtype_policy="cast"), LoadReport)
    planner = ReshardLoadPlanner(options=PlanOptions(on_missing="keep"))
    reader = ReshardStorageReader(path, options=ReaderOptions(verify="required"))
    dcp_load(state, storage_reader=reader, planner=planner)
    assert_type(
        dcp_reshard.load_sharded_optimizer_state_dict(state, "optimizer", reader), dict[str, Any]
    )


def load_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: str) -> None:
    """The optimizer in one call."""
    report = dcp_reshard.load_optimizer(model, optimizer, path)
    assert_type(report.bytes_read, int)


def mistakes(state: dict[str, Any]) -> None:
    """Each is found before the program runs."""
    dcp_reshard.load(state, 3)  # type: ignore[arg-type]
    dcp_reshard.load(state, "path", dtype_policy="lossy")  # type: ignore[arg-type]
    PlanOptions(on_missing="ignore")  # type: ignore[arg-type]
    ReaderOptions(threads="four")  # type: ignore[arg-type]
