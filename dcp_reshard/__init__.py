"""Restore distributed checkpoints into jobs of another shape.

`ReshardLoadPlanner` and `ReshardStorageReader` plug into `torch.distributed.checkpoint.load`;
`load` uses both and returns a report. A checkpoint that stock `dcp.save` wrote under one mesh is
read into another, each rank reading the byte ranges that it needs.
"""

from __future__ import annotations

from dcp_reshard.api import load
from dcp_reshard.catalog import Catalog, CatalogSource
from dcp_reshard.errors import (
    CheckpointFormatError,
    ChunkCoverageError,
    CorruptRecordError,
    DtypeMismatchError,
    InconsistentRanksError,
    LayoutError,
    MissingExtraError,
    MissingParameterError,
    MissingTensorError,
    OptimizerStateError,
    PeerFailedError,
    PlanError,
    ReshardError,
    ShapeMismatchError,
    StorageError,
    UnsafeCheckpointError,
)
from dcp_reshard.fused import FusedBlocks
from dcp_reshard.optimizer import load_sharded_optimizer_state_dict
from dcp_reshard.optimizer_load import load_optimizer
from dcp_reshard.optimizer_options import OptimizerOptions
from dcp_reshard.options import ReaderOptions, RetryPolicy
from dcp_reshard.plan import PlanOptions, ReadPlan, Want, plan_reads
from dcp_reshard.planner import ReshardLoadPlanner
from dcp_reshard.rank_files import RankGrid
from dcp_reshard.rank_values import RankValueWarning
from dcp_reshard.reader import ReshardStorageReader
from dcp_reshard.report import HyperParameter, LoadReport, OptimizerReport
from dcp_reshard.reshard import LazySplit, reshard_tensor
from dcp_reshard.save_planner import ReshardSavePlanner
from dcp_reshard.shard_orders import ShardOrderWarning
from dcp_reshard.sharded_parameter import shard_parameter
from dcp_reshard.verify import verify
from dcp_reshard.verify_report import Problem, VerifyReport

__version__ = "0.1.0"

__all__ = [
    "Catalog",
    "CatalogSource",
    "CheckpointFormatError",
    "ChunkCoverageError",
    "CorruptRecordError",
    "DtypeMismatchError",
    "FusedBlocks",
    "HyperParameter",
    "InconsistentRanksError",
    "LayoutError",
    "LazySplit",
    "LoadReport",
    "MissingExtraError",
    "MissingParameterError",
    "MissingTensorError",
    "OptimizerOptions",
    "OptimizerReport",
    "OptimizerStateError",
    "PeerFailedError",
    "PlanError",
    "PlanOptions",
    "Problem",
    "RankGrid",
    "RankValueWarning",
    "ReadPlan",
    "ReaderOptions",
    "ReshardError",
    "ReshardLoadPlanner",
    "ReshardSavePlanner",
    "ReshardStorageReader",
    "RetryPolicy",
    "ShapeMismatchError",
    "ShardOrderWarning",
    "StorageError",
    "UnsafeCheckpointError",
    "VerifyReport",
    "Want",
    "load",
    "load_optimizer",
    "load_sharded_optimizer_state_dict",
    "plan_reads",
    "reshard_tensor",
    "shard_parameter",
    "verify",
]
