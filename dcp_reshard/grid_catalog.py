"""What the files of a grid of ranks hold, put together into one `Catalog`.

For each key, what is found in the files is one of these, as its rule says:

* a tensor cut by tensor parallelism along a dim, and by data parallelism along dim 0: each file's
  part is a chunk (several for fused blocks);
* a tensor, or part of one, that several files hold: one is taken, the others are compared with it;
* a value that is not a tensor: all files must have the same.

What cannot be put together (a rank lacks its part, copies differ, a value is not data) is no error
as long as nobody asks for it: files of ranks hold things that belong to a rank alone. The catalog
says for each such key why it cannot be loaded, and its notes count them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import KnownValue, StoredObject, StoredTensor
from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.fused import FusedBlocks
from dcp_reshard.grid import Grid, plan_grid
from dcp_reshard.payload import Payload
from dcp_reshard.replicas import Replica, compare_elements, compare_records
from dcp_reshard.storage import ByteSource
from dcp_reshard.torch_files import NotData

__all__ = ["CompareReplicas", "GridMerge", "KeyRule"]

CompareReplicas = Literal["recorded", "elements", "off"]

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class KeyRule:
    """How the ranks of a grid hold one tensor."""

    dim: int | None = None
    """The dim that tp cuts; None if all tp ranks hold the same."""

    dp: bool = False
    """Whether dp ranks hold parts along dim 0; otherwise all hold the same."""

    fused: FusedBlocks | None = None
    """Blocks fused along the dim."""

    true_size: int | None = None
    """Indices along the dim (dim 0, if none is cut) without padding at the end."""


Rank = tuple[int, int]
"""tp rank and dp rank."""


@dataclass(slots=True, eq=False)
class GridMerge:
    """Puts keys together one by one. Not frozen: it collects notes."""

    files: Mapping[Rank, str]
    """Name of each rank's file."""

    sizes: tuple[int, int]
    """Number of tp and of dp ranks."""

    source: ByteSource
    """The files."""

    compare: CompareReplicas
    """How to compare copies."""

    numbers: Mapping[str, int]
    """Number of each file in the catalog."""

    padded: list[str] = field(default_factory=list)
    """Notes on padding that was left out."""

    useless: list[str] = field(default_factory=list)
    """Keys that cannot be loaded."""

    uncompared: list[str] = field(default_factory=list)
    """Keys of which copies were not compared."""

    def notes(self) -> tuple[str, ...]:
        """What whoever loads should know."""
        notes = list(self.padded)
        if self.useless:
            notes.append(f"not loadable, each for its own reason: {_names(self.useless)}")
        if self.uncompared:
            notes.append(
                f"held by several files without checksums that could be compared, the first is "
                f"taken: {_names(self.uncompared)}"
            )
        return tuple(notes)

    def merge_object(self, fqn: str, values: Mapping[Rank, object]) -> StoredObject:
        """One value of several files."""
        first, *others = values
        known = KnownValue(values[first])
        for rank in others:
            # `repr` tells 1 from True and 1.0, and NaN from nothing else.
            if repr(values[rank]) != repr(values[first]):
                known = KnownValue(
                    refusal=CheckpointFormatError(
                        f"the rank files differ: {values[first]!r:.100} in {self.files[first]!r}, "
                        f"{values[rank]!r:.100} in {self.files[rank]!r}"
                    )
                )
        odd = next((value for value in values.values() if isinstance(value, NotData)), None)
        if odd is not None:
            known = KnownValue(
                refusal=UnsafeCheckpointError(
                    f"a {odd.kind} is not data, and was not unpickled", file=self.files[first]
                )
            )
        if known.refusal is not None:
            self.useless.append(fqn)
        return StoredObject(fqn, self.numbers[self.files[first]], 0, 0, known)

    def merge_tensor(
        self, fqn: str, payloads: Mapping[Rank, Payload], rule: KeyRule
    ) -> StoredTensor:
        """One tensor of several files."""
        place, first = next(iter(payloads.items()))
        try:
            for rank, payload in payloads.items():
                if payload.dtype != first.dtype:
                    raise ValueError(
                        f"file {self.files[rank]!r} holds {payload.dtype}, another {first.dtype}"
                    )
            shape, chunks = self._join_copies(fqn, payloads, rule)
            shape, chunks = self._leave_out_padding(fqn, shape, chunks, rule)
        except ValueError as error:
            self.useless.append(fqn)
            # A chunk, for planners that would find nothing to read, and think nothing of it.
            chunks = {Box.full(first.shape): Replica(self.files[place], first)}
            return self._stored_tensor(fqn, first.shape, first, chunks, defect=str(error))
        return self._stored_tensor(fqn, shape, first, chunks)

    def _join_copies(
        self, fqn: str, payloads: Mapping[Rank, Payload], rule: KeyRule
    ) -> tuple[tuple[int, ...], dict[Box, Replica]]:
        """Global shape and chunks, from all copies of the tensor that the grid holds.

        Raises:
            ValueError: A copy is incomplete, or copies differ.
        """
        grids = [
            (self._plan_copy(ranks, payloads, rule), ranks)
            for ranks in self._copies(payloads, rule)
        ]
        (whole, place), *others = grids
        for grid, ranks in others:
            if grid.shape != whole.shape:
                raise ValueError(
                    f"shape {grid.shape!r} in {self._files_of(ranks)}, {whole.shape!r} in "
                    f"{self._files_of(place)}{_hint(rule)}"
                )
        chunks: dict[Box, Replica] = {}
        for grid, ranks in grids:
            for box, replica in self._parts(grid, ranks, payloads):
                known = chunks.get(box)
                if known is not None:
                    self._check_same(fqn, box, known, replica, rule)
                elif grid is whole:
                    chunks[box] = replica
                else:
                    self._note_uncompared(fqn)
        return whole.shape, chunks

    def _copies(
        self, payloads: Mapping[Rank, Payload], rule: KeyRule
    ) -> Iterable[list[list[Rank]]]:
        """The groups of ranks that hold the whole tensor together, and of which some hold any."""
        tp, dp = range(self.sizes[0]), range(self.sizes[1])
        rows = [list(tp)] if rule.dim is not None else [[t] for t in tp]
        columns = [list(dp)] if rule.dp else [[d] for d in dp]
        for ts, ds in itertools.product(rows, columns):
            copy = [[(t, d) for d in ds] for t in ts]
            if any(rank in payloads for row in copy for rank in row):
                yield copy

    def _plan_copy(
        self, ranks: list[list[Rank]], payloads: Mapping[Rank, Payload], rule: KeyRule
    ) -> Grid:
        missing = [self.files[rank] for row in ranks for rank in row if rank not in payloads]
        if missing:
            raise ValueError(f"not in {_names(missing)}, whose part of it is needed")
        shapes = [[payloads[rank].shape for rank in row] for row in ranks]
        try:
            return plan_grid(shapes, dim=rule.dim, fused=rule.fused)
        except ValueError as error:
            raise ValueError(f"{error}, in {self._files_of(ranks)}{_hint(rule)}") from None

    def _parts(
        self, grid: Grid, ranks: list[list[Rank]], payloads: Mapping[Rank, Payload]
    ) -> Iterable[tuple[Box, Replica]]:
        for row, splits in zip(ranks, grid.splits, strict=True):
            for rank, held in zip(row, splits, strict=True):
                for part in held.boxes:
                    payload = _narrow(payloads[rank], part.local_offsets, part.box.sizes)
                    yield part.box, Replica(self.files[rank], payload)

    def _check_same(self, fqn: str, box: Box, one: Replica, other: Replica, rule: KeyRule) -> None:
        same = None if self.compare == "off" else compare_records(one, other)
        if same is None and self.compare == "elements":
            same = compare_elements(self.source, one, other)
        if same is None:
            self._note_uncompared(fqn)
        elif not same:
            raise ValueError(
                f"files {one.file!r} and {other.file!r} hold different elements of {box}"
                f"{_hint(rule)}"
            )

    def _note_uncompared(self, fqn: str) -> None:
        if fqn not in self.uncompared[-1:]:
            self.uncompared.append(fqn)

    def _files_of(self, ranks: list[list[Rank]]) -> str:
        return _names(list(dict.fromkeys(self.files[rank] for row in ranks for rank in row)))

    def _leave_out_padding(
        self, fqn: str, shape: tuple[int, ...], chunks: dict[Box, Replica], rule: KeyRule
    ) -> tuple[tuple[int, ...], dict[Box, Replica]]:
        if rule.true_size is None:
            return shape, chunks
        dim = rule.dim or 0
        if rule.true_size > shape[dim]:
            raise ValueError(
                f"has {shape[dim]} indices in dim {dim}, not {rule.true_size} and more"
            )
        true_shape = (*shape[:dim], rule.true_size, *shape[dim + 1 :])
        self.padded.append(f"`{fqn}`: stored shape {shape!r} without padding is {true_shape!r}")
        kept: dict[Box, Replica] = {}
        for box, replica in chunks.items():
            inside = box.intersect(Box.full(true_shape))
            if inside is not None:
                start = inside.relative_to(box.offsets).offsets
                payload = _narrow(replica.payload, start, inside.sizes)
                kept[inside] = Replica(replica.file, payload)
        return true_shape, kept

    def _stored_tensor(
        self,
        fqn: str,
        shape: tuple[int, ...],
        first: Payload,
        chunks: Mapping[Box, Replica],
        *,
        defect: str = "",
    ) -> StoredTensor:
        replicas = list(chunks.values())
        records = [replica.payload.record for replica in replicas]
        files = [self.numbers[replica.file] for replica in replicas]
        return StoredTensor(
            fqn,
            shape,
            first.dtype,
            BoxArray.from_boxes(chunks, ndim=len(shape)),
            np.array(files, dtype=np.int32),
            np.array([record.start for record in records], dtype=np.int64),
            np.array([record.length for record in records], dtype=np.int64),
            tuple(_count_from_record(replica.payload) for replica in replicas),
            defect,
        )


def _narrow(payload: Payload, offsets: Sequence[int], sizes: tuple[int, ...]) -> Payload:
    """Part of a strided array."""
    start = payload.start + sum(o * st for o, st in zip(offsets, payload.strides, strict=True))
    return replace(payload, start=start, shape=sizes)


def _count_from_record(payload: Payload) -> Payload:
    """The same elements, with the record as the item: then the item's bytes are the tensor's."""
    record = replace(payload.record, start=0)
    return replace(payload, start=payload.start - payload.record.start, record=record)


def _hint(rule: KeyRule) -> str:
    if rule.dim is None:
        return "; no rule says that tp ranks hold parts of it (`shard_dims`, `param_names`)"
    return ""


def _names(names: Sequence[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:_SHOWN])
    return shown + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
