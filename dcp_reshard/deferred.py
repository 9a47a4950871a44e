"""Loads whose state dict follows from the checkpoint: what is there decides what is asked for.

`dcp.load` is given a state dict before the metadata have been read. Reading them first, as torch's
own `load_sharded_optimizer_state_dict` does, means reading them twice, and outside of the steps
whose errors `dcp.load` brings to all ranks: a rank that fails there leaves the others waiting.

`DeferredPlanner` makes the state dict when it is set up, which is such a step. `read_now` reads a
few values at that point already, on this rank alone.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader

from dcp_reshard.destination import before_writing
from dcp_reshard.garbage import paused_gc

__all__ = ["DeferredPlanner", "read_now"]

_SHARED = (int, float, str, tuple, type(None))


class DeferredPlanner(LoadPlanner):
    """Makes a state dict and a planner from the metadata, and leaves the rest to that planner."""

    fills_own_memory = True
    """Tells the reader that what it fills is not the caller's."""

    def __init__(
        self,
        plan: Callable[[Metadata], tuple[dict[str, Any], LoadPlanner]],
        *,
        share_equal: bool = False,
    ) -> None:
        """Keep the function.

        Args:
            plan: Gives the state dict to load, flat, and the planner of the load.
            share_equal: Ask the planner once for a number, text or tuple that is stored several
                times. Flattened, an optimizer has each hyper-parameter as often as it has
                parameters, and to unpickle one takes longer than all else that is done with it.
        """
        self._plan = plan
        self._planner: LoadPlanner | None = None
        self._share_equal = share_equal
        self._made: dict[str, Any] = {}
        self._known: dict[bytes, Any] = {}

    @property
    def planner(self) -> LoadPlanner:
        """The planner of the load; there is one once the metadata have been read."""
        assert self._planner is not None
        return self._planner

    @property
    def checks_objects(self) -> bool:
        """As the planner does; see `ReshardLoadPlanner`."""
        return bool(getattr(self.planner, "checks_objects", False))

    @before_writing
    @paused_gc()
    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Make the state dict; the one given is ignored."""
        assert metadata is not None
        self._made, self._planner = self._plan(metadata)
        self._known = {}
        self._planner.set_up_planner(self._made, metadata, is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """As the planner does."""
        return self.planner.create_local_plan()

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As the planner does."""
        return self.planner.create_global_plan(global_plan)

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As the planner does."""
        return self.planner.finish_plan(central_plan)

    def commit_plan(self) -> None:
        """As the planner does, if it has to."""
        commit_plan: Callable[[], None] | None = getattr(self.planner, "commit_plan", None)
        if commit_plan is not None:
            commit_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """As the planner does."""
        contents, fqn = value.getvalue() if self._share_equal else b"", read_item.dest_index.fqn
        if contents in self._known:
            self._made[fqn] = self._known[contents]
            return
        self.planner.load_bytes(read_item, value)
        if self._share_equal and isinstance(self._made[fqn], _SHARED):
            self._known[contents] = self._made[fqn]

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """As the planner does."""
        return self.planner.resolve_bytes(read_item)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """As the planner does."""
        return self.planner.resolve_tensor(read_item)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """As the planner does."""
        self.planner.commit_tensor(read_item, tensor)


def read_now(
    state_dict: dict[str, Any],
    *,
    storage_reader: StorageReader,
    planner: LoadPlanner,
    metadata: Metadata,
) -> None:
    """Load a few values on this rank alone, with metadata that have been read already.

    The steps of `dcp.load` in one process, without its reading of the metadata.

    Args:
        state_dict: What to load, by key. Equal numbers, texts and tuples may be one object.
        storage_reader: Reads the checkpoint.
        planner: Plans the load, without flattening.
        metadata: What the reader has read.
    """
    deferred = DeferredPlanner(lambda _: (state_dict, planner), share_equal=True)
    deferred.set_up_planner({}, metadata, True)  # noqa: FBT003
    storage_reader.set_up_storage_reader(metadata, True)  # noqa: FBT003
    plan = storage_reader.prepare_local_plan(deferred.create_local_plan())
    [plan] = storage_reader.prepare_global_plan(deferred.create_global_plan([plan]))
    storage_reader.read_data(deferred.finish_plan(plan), deferred).wait()
