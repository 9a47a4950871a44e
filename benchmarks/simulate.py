"""Planning at scale, with no process group and no files: what does one rank of a large job do?

A checkpoint of a Llama-70B-like model with Adam state, saved by N ranks in rows, is described by a
catalog made up on the spot, and one rank of M plans its load from it: `plan_reads` and `plan_spans`
are pure, and answer for any rank of any mesh. For checkpoints of up to `--metadata` ranks a real
``.metadata`` file is written too, and read as a load does. Seconds are CPU seconds of one core.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import pickle
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan

from dcp_reshard import Catalog, ReaderOptions, Want, plan_reads
from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import StoredTensor
from dcp_reshard.metadata import DcpCheckpoint
from dcp_reshard.plan import ReadPlan
from dcp_reshard.ranges import plan_spans
from dcp_reshard.reader import ReshardStorageReader
from dcp_reshard.sharding import Cut, plan_shard_boxes
from dcp_reshard.torch_metadata import to_torch_metadata

Shape = tuple[int, ...]
# What `torch.save` adds to the elements of a tensor, about.
_CONTAINER_BYTES = 1600


@dataclass(frozen=True, slots=True)
class Row:
    """One simulated load."""

    saved_ranks: int
    loading_ranks: int
    chunks: int
    catalog_mb: float
    plan_seconds: float
    plan_peak_mb: float
    parts: int
    requests: int
    bytes_wanted_mb: float
    job_wanted_mb: float
    gathered_bytes: int
    metadata: tuple[float, float] | None = None
    """MB of a real metadata file, and seconds to read it."""


_COLUMNS = (
    ("saved:loaded", 14),
    ("chunks", 10),
    ("catalog MB", 10),
    ("plan s", 7),
    ("peak MB", 8),
    ("parts", 8),
    ("requests", 8),
    ("wanted MB", 10),
    ("job MB", 10),
    ("gathered B", 10),
    (".metadata MB", 12),
    ("read s", 7),
)


def cells(row: Row) -> list[str]:
    """A row as the texts of its cells."""
    size, seconds = row.metadata or (None, None)
    return [
        f"{row.saved_ranks}:{row.loading_ranks}",
        f"{row.chunks:,}",
        f"{row.catalog_mb:.1f}",
        f"{row.plan_seconds:.2f}",
        f"{row.plan_peak_mb:.1f}",
        f"{row.parts:,}",
        f"{row.requests:,}",
        f"{row.bytes_wanted_mb:,.0f}",
        f"{row.job_wanted_mb:,.0f}",
        f"{row.gathered_bytes}",
        "" if size is None else f"{size:.1f}",
        "" if seconds is None else f"{seconds:.2f}",
    ]


def llama_70b() -> dict[str, Shape]:
    """Names and shapes of the parameters."""
    width, hidden, vocabulary, kv = 8192, 28672, 128256, 1024
    shapes: dict[str, Shape] = {
        "tok_embeddings.weight": (vocabulary, width),
        "output.weight": (vocabulary, width),
        "norm.weight": (width,),
    }
    for layer in range(80):
        for name, shape in {
            "attention.wq": (width, width),
            "attention.wk": (kv, width),
            "attention.wv": (kv, width),
            "attention.wo": (width, width),
            "feed_forward.w1": (hidden, width),
            "feed_forward.w2": (width, hidden),
            "feed_forward.w3": (hidden, width),
            "attention_norm": (width,),
            "ffn_norm": (width,),
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    return shapes


def keys_of(fqn: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    """Keys of a parameter and of its Adam state."""
    yield f"model.{fqn}", shape
    yield f"optimizer.state.{fqn}.exp_avg", shape
    yield f"optimizer.state.{fqn}.exp_avg_sq", shape
    yield f"optimizer.state.{fqn}.step", ()


def make_catalog(ranks: int) -> Catalog:
    """The catalog of a checkpoint saved in rows by this many ranks."""
    tensors: dict[str, StoredTensor] = {}
    used = np.zeros(ranks, np.int64)
    for fqn, param_shape in llama_70b().items():
        for key, shape in keys_of(fqn, param_shape):
            rows = shape[0] if shape else 1
            step = -(-rows // ranks)
            starts = np.arange(0, rows, step)
            count = len(starts)
            offsets = np.zeros((count, len(shape)), np.int64)
            sizes = np.tile(np.array(shape, np.int64), (count, 1))
            if shape:
                offsets[:, 0] = starts
                sizes[:, 0] = np.minimum(step, rows - starts)
            lengths = sizes.prod(axis=1) * 4 + _CONTAINER_BYTES
            files = np.arange(count, dtype=np.int32)
            tensors[key] = StoredTensor(
                key,
                shape,
                torch.float32,
                BoxArray(offsets, sizes),
                files,
                used[:count].copy(),
                lengths,
            )
            used[:count] += lengths
    return Catalog(tensors, {}, tuple(f"__{rank}_0.distcp" for rank in range(ranks)))


def make_wants(catalog: Catalog, ranks: int, rank: int) -> dict[str, Want]:
    """What a rank wants that holds rows of every tensor."""
    wants = {}
    for key, stored in catalog.tensors.items():
        boxes = [Box((), ())]
        if stored.shape:
            _, shards = plan_shard_boxes(stored.shape, (Cut(0, ranks, rank),))
            boxes = [shard.box for shard in shards]
        wants[key] = Want(stored.shape, stored.dtype, tuple(boxes))
    return wants


def count_requests(plan: ReadPlan, options: ReaderOptions) -> int:
    """Requests for the elements alone: chunks are taken to be stored in the order of their dims."""
    requests = 0
    for tensor in plan.tensors:
        for part in tensor.parts:
            chunk = tensor.stored.chunks[part.chunk]
            strides = [4 * math.prod(chunk.sizes[d + 1 :]) for d in range(chunk.ndim)]
            spans = plan_spans(
                part.region.relative_to(chunk.offsets).offsets,
                part.region.sizes,
                strides=strides,
                itemsize=4,
                extent=4 * chunk.numel,
                request_bytes=options.request_bytes,
                max_bytes=options.max_request_bytes,
            )
            requests += sum(1 for _ in spans)
    return requests


def job_bytes(catalog: Catalog, ranks: int) -> int:
    """Bytes that all ranks want: each row of a tensor is wanted by one, a scalar by all."""
    shapes = [stored.shape for stored in catalog.tensors.values()]
    return sum(4 * math.prod(shape) * (1 if shape else ranks) for shape in shapes)


def gathered_bytes(catalog: Catalog) -> int:
    """Bytes that one rank's plan is for the coordinator."""
    reader = ReshardStorageReader("unused")
    reader.set_up_storage_reader(to_torch_metadata(catalog), is_coordinator=False)
    return len(pickle.dumps(reader.prepare_local_plan(LoadPlan([]))))


def simulate(saved: int, loading: int) -> Row:
    """One rank in the middle of the job."""
    options = ReaderOptions()
    catalog = make_catalog(saved)
    wants = make_wants(catalog, loading, loading // 2)
    gc.collect()
    started = time.process_time()
    plan = plan_reads(catalog, wants)
    seconds = time.process_time() - started
    del plan
    tracemalloc.start()  # numpy reports its arrays to it; it slows planning down, so not above
    plan = plan_reads(catalog, wants)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    columns = sum(
        t.chunks.offsets.nbytes
        + t.chunks.sizes.nbytes
        + t.files.nbytes
        + t.starts.nbytes
        + t.lengths.nbytes
        for t in catalog.tensors.values()
    )
    return Row(
        saved_ranks=saved,
        loading_ranks=loading,
        chunks=sum(len(t.chunks) for t in catalog.tensors.values()),
        catalog_mb=columns / 1e6,
        plan_seconds=seconds,
        plan_peak_mb=peak / 1e6,
        parts=sum(len(t.parts) for t in plan.tensors),
        requests=count_requests(plan, options),
        bytes_wanted_mb=plan.bytes_wanted / 1e6,
        job_wanted_mb=job_bytes(catalog, loading) / 1e6,
        gathered_bytes=gathered_bytes(catalog),
    )


def read_real_metadata(saved: int) -> tuple[float, float]:
    """MB of the ``.metadata`` of such a checkpoint, and seconds to read it."""
    catalog = make_catalog(saved)
    described: dict[str, TensorStorageMetadata] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for key, stored in catalog.tensors.items():
        offsets = [torch.Size(o) for o in stored.chunks.offsets.tolist()]
        sizes = [torch.Size(s) for s in stored.chunks.sizes.tolist()]
        chunks = [ChunkStorageMetadata(o, s) for o, s in zip(offsets, sizes, strict=True)]
        described[key] = TensorStorageMetadata(
            TensorProperties(torch.float32), torch.Size(stored.shape), chunks
        )
        for i, offset in enumerate(offsets):
            # A name of its own for each chunk: the index of every rank was pickled by itself.
            index = MetadataIndex("".join(list(key)), offset, i)
            name = catalog.files[int(stored.files[i])]
            storage[index] = _StorageInfo(name, int(stored.starts[i]), int(stored.lengths[i]))
    metadata = Metadata(
        described, {key: (key,) for key in described}, storage, StorageMeta("/ckpt", "id"), "1.0.0"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, ".metadata")
        with path.open("wb") as file:
            pickle.dump(metadata, file)
        del metadata, described, storage, catalog
        gc.collect()
        checkpoint = DcpCheckpoint(folder)
        source = checkpoint.open()
        started = time.process_time()
        checkpoint.read_catalog(source)
        seconds = time.process_time() - started
        source.close()
        return path.stat().st_size / 1e6, seconds


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", default="8,64,512,1024,4096,16384")
    parser.add_argument("--metadata", type=int, default=64, help="largest real .metadata to read")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ranks = [int(n) for n in options.ranks.split(",")]
    # A checkpoint of many ranks into few is the case of most parts.
    pairs = [(n, n) for n in ranks] + [(n, 8) for n in ranks if 8 < n <= 1024]
    rows = []
    print(" ".join(f"{title:>{width}}" for title, width in _COLUMNS))
    for saved, loading in pairs:
        row = simulate(saved, loading)
        if saved == loading and saved <= options.metadata:
            row = replace(row, metadata=read_real_metadata(saved))
        rows.append(asdict(row))
        print(" ".join(f"{v:>{width}}" for v, (_, width) in zip(cells(row), _COLUMNS, strict=True)))
        sys.stdout.flush()
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
