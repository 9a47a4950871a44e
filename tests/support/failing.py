"""A checkpoint, and a planner for it, of which one hook fails in one of its calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import ReadItem

from dcp_reshard import Catalog, ReshardLoadPlanner
from dcp_reshard.metadata import read_catalog
from dcp_reshard.storage import ByteSource, LocalSource

__all__ = ["HOOKS", "Failing"]

HOOKS = [
    *("open", "read_catalog", "names", "size", "read_into", "close"),
    *("on_progress", "resolve_tensor", "load_bytes", "commit_tensor"),
]
"""What a load calls: the checkpoint, its files, its caller, the planner."""


class Failing:
    """A checkpoint, and a planner, of which one hook fails in one of its calls."""

    def __init__(self, path: Path, hook: str, at: int, fail: Callable[[], object]) -> None:
        self.inner = LocalSource(path)
        self.hook, self.at, self.fail = hook, at, fail
        self.calls = 0

    def _count(self, hook: str) -> None:
        if hook == self.hook:
            self.calls += 1
            if self.calls - 1 == self.at:
                self.fail()

    def open(self) -> ByteSource:
        self._count("open")
        return self

    def read_catalog(self, source: ByteSource) -> Catalog:
        self._count("read_catalog")
        return read_catalog(source)

    def names(self) -> list[str]:
        self._count("names")
        return self.inner.names()

    def size(self, name: str) -> int:
        self._count("size")
        return self.inner.size(name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._count("read_into")
        self.inner.read_into(name, offset, buffers)

    def close(self) -> None:
        self._count("close")
        self.inner.close()

    def on_progress(self, done: int, total: int) -> None:
        self._count("on_progress")

    def planner(self) -> ReshardLoadPlanner:
        count = self._count

        class Planner(ReshardLoadPlanner):
            def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
                count("resolve_tensor")
                return super().resolve_tensor(read_item)

            def load_bytes(self, read_item: ReadItem, value: Any) -> None:
                count("load_bytes")
                super().load_bytes(read_item, value)

            def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
                count("commit_tensor")
                super().commit_tensor(read_item, tensor)

        return Planner()
