"""What does a planner want of the checkpoint, and how does it get it?

Its read items become parts of stored chunks with the memory that they go to, and objects; a plan of
ours says itself what they would become (see `read_items`). What is not a tensor in the state dict
is read first, and looked at by the planner. When all is read the planner is given the objects, and
told of the parts. Works with any planner.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from dcp_reshard.catalog import Catalog, StoredObject
from dcp_reshard.errors import CheckpointFormatError, PlanError
from dcp_reshard.objects import check_data_only
from dcp_reshard.parts import ReadList, WantedPart
from dcp_reshard.read_items import find_planned

__all__ = ["Wanted"]


@dataclass(slots=True, eq=False)
class Wanted:
    """What the planner of this rank wants. Not frozen: it is filled by `resolve`."""

    catalog: Catalog
    """What the checkpoint holds."""

    planner: LoadPlanner
    """The planner."""

    own: Catalog | None = None
    """Copies that this rank has stored itself, if each did; it gets these, not the first rank's."""

    allow_unsafe_pickle: bool = False
    """Whether a planner that unpickles may be given more than data."""

    seconds: float = 0.0
    """Time in which it was asked for memory."""

    _parts: list[tuple[ReadItem | None, WantedPart]] = field(default_factory=list, init=False)
    _objects: list[tuple[ReadItem, StoredObject]] = field(default_factory=list, init=False)
    _known: dict[str, bytes] = field(default_factory=dict, init=False)
    _values: list[tuple[ReadItem, WantedPart]] = field(default_factory=list, init=False)

    @property
    def num_chunks(self) -> int:
        """Number of stored chunks of which at least part is wanted."""
        return len({(part.stored.fqn, part.chunk) for _, part in self._parts})

    def resolve(self, plan: LoadPlan) -> tuple[ReadList, ReadList]:
        """Ask the planner for memory, unless it has said already where there is some.

        Args:
            plan: Its plan.

        Returns:
            What is to be read, and what only this rank may want of the place where it is: copies
            of its own. Not the objects of which the catalog knows the contents.

        Raises:
            PlanError: An item is not in the checkpoint, or the memory has not its shape.
            CheckpointFormatError: A value is known to be of no use.
        """
        started = time.perf_counter()
        planned = find_planned(plan)
        if planned is not None and planned.planner is self.planner:
            self._objects += [(item, self._find_object(item)) for item in planned.object_items()]
            self._parts += planned.parts()
        else:
            for item in plan.items:
                self._resolve(item)
        self.seconds += time.perf_counter() - started
        keys: Set[str] = getattr(self.planner, "value_keys", frozenset())
        shared, own = ReadList([], [], []), ReadList([], [], [])
        tensors, objects = (self.own.tensors, self.own.objects) if self.own else ({}, {})
        for told, part in self._parts:
            copy = tensors.get(part.stored.fqn)
            if copy is not None and tuple(part.dest.size()) == copy.shape:
                wanted, chosen = own, replace(part, stored=copy)
            else:
                wanted, chosen = shared, part
            if part.fqn in keys:
                assert told is not None
                wanted.values.append(chosen)
                self._values.append((told, part))
            else:
                wanted.tensors.append(chosen)
        for _, stored in self._objects:
            if stored.fqn not in self._known:
                wanted = own if stored.fqn in objects else shared
                wanted.objects.append(objects.get(stored.fqn, stored))
        return shared, own

    def _resolve(self, item: ReadItem) -> None:
        if item.type == LoadItemType.BYTE_IO:
            self._objects.append((item, self._find_object(item)))
            return
        part = self._resolve_tensor(item)
        if part.dest.numel():
            self._parts.append((item, part))

    def _find_object(self, item: ReadItem) -> StoredObject:
        fqn = item.storage_index.fqn
        if fqn not in self.catalog.objects:
            raise PlanError(f"key `{fqn}`: not an object of the checkpoint", fqn=fqn)
        stored = self.catalog.objects[fqn]
        if stored.known is not None:
            self._known[fqn] = stored.known.contents(fqn)
        return stored

    def _resolve_tensor(self, item: ReadItem) -> WantedPart:
        index = item.storage_index
        stored = self.catalog.tensors.get(index.fqn)
        chunk = None
        if stored is not None:
            chunk = stored.find_chunk(tuple(index.offset or ()), index.index)
        if stored is None or chunk is None:
            raise PlanError(
                f"key `{index.fqn}`: the checkpoint has no chunk at {index.offset!r}",
                fqn=index.fqn,
            )
        # Planners other than ours do not ask.
        stored.check_usable()
        dest = self.planner.resolve_tensor(item)
        if dest.requires_grad:
            dest = dest.detach()
        if tuple(dest.size()) != tuple(item.lengths):
            raise PlanError(
                f"tensor `{item.dest_index.fqn}`: the planner gave memory of shape "
                f"{tuple(dest.size())!r} for a part of shape {tuple(item.lengths)!r}",
                fqn=item.dest_index.fqn,
            )
        return WantedPart(item.dest_index.fqn, stored, chunk, tuple(item.storage_offsets), dest)

    def check_values(self, objects: Mapping[str, bytes]) -> None:
        """Let the planner look at the values that `resolve` has named; nothing is written.

        Args:
            objects: Items of the objects, by key.

        Raises:
            CheckpointFormatError: An object is not plain data.
            PlanError: The state dict cannot take a value.
        """
        self._known |= objects
        planner: Any = self.planner
        looks = hasattr(planner, "check_value")
        # torch's planner unpickles whatever it is given, and so runs it.
        trusted = self.allow_unsafe_pickle or getattr(planner, "checks_objects", False)
        for item, stored in self._objects:
            contents = self._known[stored.fqn]
            if looks:
                planner.check_value(item, io.BytesIO(contents))
            elif not trusted:
                _check_object(stored.fqn, contents)
        for item, part in self._values:
            planner.check_value(item, part.dest)

    def deliver(self) -> None:
        """Give the planner the objects, and tell it that the parts are in place."""
        commit_plan: Callable[[], None] | None = getattr(self.planner, "commit_plan", None)
        if commit_plan is not None:
            commit_plan()
        for item, stored in self._objects:
            self.planner.load_bytes(item, io.BytesIO(self._known[stored.fqn]))
        for told, part in self._parts:
            if told is not None:
                self.planner.commit_tensor(told, part.dest)


def _check_object(fqn: str, contents: bytes) -> None:
    try:
        check_data_only(memoryview(contents))
    except CheckpointFormatError as error:
        raise type(error)(f"object `{fqn}`: {error}", fqn=fqn) from error
