"""One open per file: counted where files are opened."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import ReaderOptions
from dcp_reshard.storage import LocalSource
from tests.support.checkpoints import save_world
from tests.support.tensors import indexed_tensor
from tests.support.worlds import thread_world

SHAPE = (400, 300)


def make_state(rank: int) -> dict[str, object]:
    """A large tensor in rows, a small one, and an object."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": distribute_tensor(indexed_tensor(SHAPE), mesh, [Shard(0)], src_data_rank=None),
        "b": distribute_tensor(indexed_tensor((9,)), mesh, [Shard(0)], src_data_rank=None),
        "text": "stored",
    }


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_one_open_per_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Small and large tensors, objects and checksums of a file are read through one open of it."""
    save_world(tmp_path, 4, make_state)
    opens: Counter[tuple[int, str]] = Counter()
    real = LocalSource._open_at
    options = ReaderOptions(threads=2)

    def count(self: LocalSource, root: int, name: str) -> int:
        opens[id(self), name] += 1
        return real(self, root, name)

    monkeypatch.setattr(LocalSource, "_open_at", count)

    def load(rank: int) -> int:
        mesh = init_device_mesh("cpu", (3,))
        full = torch.full(SHAPE, -1.0)
        state = {
            "w": distribute_tensor(full, mesh, [Shard(1)], src_data_rank=None),
            "b": torch.full((9,), -1.0),
            "text": "",
        }
        report = dcp_reshard.load(state, tmp_path, mode=mode, options=options)
        want = distribute_tensor(indexed_tensor(SHAPE), mesh, [Shard(1)], src_data_rank=None)
        assert torch.equal(state["w"].to_local(), want.to_local())
        assert torch.equal(state["b"], indexed_tensor((9,)))
        assert state["text"] == "stored"
        return report.requests

    requests = thread_world(3, load)
    data = {key: count for key, count in opens.items() if key[1].endswith(".distcp")}
    assert set(data.values()) == {1}
    assert {name for _, name in data} == {f"__{rank}_0.distcp" for rank in range(4)}
    # Each is asked for more than once.
    assert sum(requests) > len(data)
    # Each rank needs columns of all four files; together, they need not open all.
    assert len(data) == 12 if mode == "direct" else len(data) < 12
