"""What does a planner want of the checkpoint, and how does it get it?

Its read items become parts of stored chunks with the memory that they go to, and objects. When all
is read the planner is given the objects, and told of the parts. Works with any planner.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from dcp_reshard.catalog import Catalog, StoredObject
from dcp_reshard.errors import CheckpointFormatError, PlanError
from dcp_reshard.objects import check_data_only
from dcp_reshard.parts import WantedPart

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

    seconds: float = 0.0
    """Time in which it was asked for memory."""

    _parts: list[tuple[ReadItem, WantedPart]] = field(default_factory=list, init=False)
    _objects: list[tuple[ReadItem, StoredObject]] = field(default_factory=list, init=False)
    _known: dict[str, bytes] = field(default_factory=dict, init=False)
    _own: tuple[list[WantedPart], list[StoredObject]] = field(
        default_factory=lambda: ([], []), init=False
    )

    @property
    def num_chunks(self) -> int:
        """Number of stored chunks of which at least part is wanted."""
        return len({(part.stored.fqn, part.chunk) for _, part in self._parts})

    def resolve(self, items: Sequence[ReadItem]) -> tuple[list[WantedPart], list[StoredObject]]:
        """Ask the planner for memory.

        Args:
            items: The read items of its plan.

        Returns:
            The parts, and the objects of which the catalog does not know the contents; without
            `own_copies`.

        Raises:
            PlanError: An item is not in the checkpoint, or the memory has not its shape.
            CheckpointFormatError: A value is known to be of no use.
        """
        started = time.perf_counter()
        for item in items:
            if item.type == LoadItemType.BYTE_IO:
                self._objects.append((item, self._find_object(item)))
            else:
                part = self._resolve_tensor(item)
                if part.dest.numel():
                    self._parts.append((item, part))
        self.seconds += time.perf_counter() - started
        shared: tuple[list[WantedPart], list[StoredObject]] = ([], [])
        tensors, objects = (self.own.tensors, self.own.objects) if self.own else ({}, {})
        for _, part in self._parts:
            is_own = part.stored is tensors.get(part.stored.fqn)
            (self._own if is_own else shared)[0].append(part)
        for _, stored in self._objects:
            if stored.fqn not in self._known:
                is_own = stored is objects.get(stored.fqn)
                (self._own if is_own else shared)[1].append(stored)
        return shared

    @property
    def own_copies(self) -> tuple[Sequence[WantedPart], Sequence[StoredObject]]:
        """Of what was resolved, that which only this rank may want of the place where it is."""
        return self._own

    def _find_object(self, item: ReadItem) -> StoredObject:
        fqn = item.storage_index.fqn
        if fqn not in self.catalog.objects:
            raise PlanError(f"key `{fqn}`: not an object of the checkpoint", fqn=fqn)
        stored = self.catalog.objects[fqn]
        if stored.known is not None:
            self._known[fqn] = stored.known.contents(fqn)
        return self.own.objects.get(fqn, stored) if self.own else stored

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
        if self.own and index.fqn in self.own.tensors and tuple(dest.size()) == stored.shape:
            stored = self.own.tensors[index.fqn]
        return WantedPart(item.dest_index.fqn, stored, chunk, tuple(item.storage_offsets), dest)

    def deliver(self, objects: Mapping[str, bytes], *, allow_unsafe_pickle: bool) -> None:
        """Give the planner the objects, and tell it that the parts are in place.

        Args:
            objects: Items of the objects that `resolve` has returned, by key.
            allow_unsafe_pickle: Whether a planner that unpickles may be given more than data.

        Raises:
            CheckpointFormatError: An object is not plain data.
        """
        # torch's planner unpickles whatever it is given, and so runs it.
        trusted = allow_unsafe_pickle or getattr(self.planner, "checks_objects", False)
        objects = {**objects, **self._known}
        for item, stored in self._objects:
            fqn, contents = stored.fqn, objects[stored.fqn]
            if not trusted:
                _check_object(fqn, contents)
            self.planner.load_bytes(item, io.BytesIO(contents))
        for item, part in self._parts:
            self.planner.commit_tensor(item, part.dest)


def _check_object(fqn: str, contents: bytes) -> None:
    try:
        check_data_only(memoryview(contents))
    except CheckpointFormatError as error:
        raise type(error)(f"object `{fqn}`: {error}", fqn=fqn) from error
