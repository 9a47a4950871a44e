"""What has to be copied from where, and proof that it is all there. Pure: no process group, no I/O.

`plan_reads` takes the catalog and what a rank wants (global shape, dtype and boxes of each tensor),
so that it answers for any rank of any mesh, real or imagined. For each wanted tensor:

1. Its key is looked up, renamed if the options say so. All missing keys are collected, not the
first.
2. Stored and wanted shape and dtype are compared; the dtype policy decides about casts.
3. The stored chunks are checked to tile the tensor; then any box of it is covered exactly once.
4. Each wanted box is intersected with all chunks at once; every overlap is one `ReadPart`.

Decides nothing about files or requests: that is the reader's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from dcp_reshard.box import Box
from dcp_reshard.catalog import Catalog, StoredTensor
from dcp_reshard.dtypes import can_cast, is_lossless
from dcp_reshard.errors import (
    DtypeMismatchError,
    MissingTensorError,
    PlanError,
    ShapeMismatchError,
)
from dcp_reshard.nearest_names import find_nearest, shorten
from dcp_reshard.report import HyperParameter

__all__ = [
    "Cast",
    "DtypePolicy",
    "PlanOptions",
    "ReadPart",
    "ReadPlan",
    "Rename",
    "TensorPlan",
    "Want",
    "plan_reads",
]

DtypePolicy = Literal["exact", "widen", "cast"]
Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """How a checkpoint and a state dict that do not match exactly are brought together.

    Example:
        >>> PlanOptions(on_missing="ignore")
        Traceback (most recent call last):
            ...
        ValueError: `on_missing` must be 'error' or 'keep', got 'ignore'
    """

    on_missing: Literal["error", "keep"] = "error"
    """A key that the checkpoint lacks fails the load, or keeps the value it has."""

    on_unexpected: Literal["report", "error"] = "report"
    """A key that only the checkpoint has is reported, or fails the load."""

    dtype_policy: DtypePolicy = "exact"
    """Stored and wanted dtype must be equal (``"exact"``), may be cast without loss
    (``"widen"``), or may be cast from any floating type to any other (``"cast"``; a value that does
    not fit is an error)."""

    rename: Rename | None = None
    """Gives the key in the checkpoint for a key of the state dict: a mapping (other keys keep their
    name) or a function. Parts of names that wrappers add need no renaming."""

    groups: Mapping[str, int | str | None] | None = None
    """Hyper-parameters of a parameter group of the state dict (by its key, such as
    ``"optimizer.param_groups.0"``; flattened, that of any of its parameters, such as
    ``"optimizer.param_groups.up.weight"``) are those of a saved group (by number), or of the saved
    group of a parameter (by its name in the checkpoint), or the ones it has (None). For groups not
    named here they follow from the parameters."""

    keep_hyper_parameters: Collection[str] = ()
    """Names of hyper-parameters of parameter groups that keep their value, such as ``lr``."""

    def __post_init__(self) -> None:
        """Check the choices."""
        for name, choices in (
            ("on_missing", ("error", "keep")),
            ("on_unexpected", ("report", "error")),
            ("dtype_policy", ("exact", "widen", "cast")),
        ):
            if getattr(self, name) not in choices:
                wanted = " or ".join(map(repr, choices))
                raise ValueError(f"`{name}` must be {wanted}, got {getattr(self, name)!r}")

    def stored_key(self, fqn: str) -> str:
        """The key in the checkpoint for a key of the state dict."""
        if self.rename is None:
            return fqn
        return self.rename(fqn) if callable(self.rename) else self.rename.get(fqn, fqn)


@dataclass(frozen=True, slots=True)
class Want:
    """What a rank wants of one global tensor."""

    shape: tuple[int, ...]
    """Global shape."""

    dtype: torch.dtype
    """dtype of the destination."""

    boxes: tuple[Box, ...]
    """Boxes in global coordinates, none of them empty."""


@dataclass(frozen=True, slots=True)
class ReadPart:
    """One overlap of a stored chunk with a wanted box."""

    chunk: int
    """Number of the chunk in the stored tensor."""

    shard: int
    """Number of the box in the want."""

    region: Box
    """The overlap, in global coordinates."""


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """The parts that make up what is wanted of one tensor."""

    fqn: str
    """Key in the state dict."""

    stored: StoredTensor
    """The tensor in the checkpoint."""

    want: Want
    """What was asked for."""

    parts: tuple[ReadPart, ...]
    """They tile the boxes of the want."""


@dataclass(frozen=True, slots=True)
class Cast:
    """A tensor whose stored dtype is not that of its destination."""

    fqn: str
    """Key in the state dict."""

    stored: torch.dtype
    """dtype in the checkpoint."""

    wanted: torch.dtype
    """dtype of the destination."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All that one rank copies, and what does not match."""

    tensors: tuple[TensorPlan, ...]
    """Tensors to fill."""

    objects: tuple[tuple[str, str], ...]
    """Key in the state dict and key in the checkpoint of each value that is not a tensor."""

    missing: tuple[str, ...]
    """Keys of the state dict that the checkpoint does not have."""

    unexpected: tuple[str, ...]
    """Keys of the checkpoint that the state dict does not ask for."""

    casts: tuple[Cast, ...]
    """Casts that the dtype policy allowed."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Key in the state dict and in the checkpoint, where they differ by what wrappers add."""

    hyper_parameters: tuple[HyperParameter, ...] = ()
    """What the parameter groups got that they did not have, and what they did not get."""

    read: tuple[str, ...] = ()
    """Keys of the checkpoint that were read to make the plan."""

    @property
    def bytes_wanted(self) -> int:
        """Bytes of all destination boxes, in the stored dtype."""
        return sum(
            box.numel * tensor.stored.dtype.itemsize
            for tensor in self.tensors
            for box in tensor.want.boxes
        )


def plan_reads(
    catalog: Catalog,
    wants: Mapping[str, Want],
    *,
    objects: Iterable[str] = (),
    options: PlanOptions | None = None,
    read: Collection[str] = (),
) -> ReadPlan:
    """Plan the reads of one rank.

    Args:
        catalog: What the checkpoint holds.
        wants: What the rank wants of each tensor, by key of its state dict.
        objects: Keys of its values that are not tensors.
        options: How to treat what does not match.
        read: Keys of the checkpoint that have been read already.

    Raises:
        MissingTensorError: Keys are missing, and `on_missing` is ``"error"``; all are named.
        ShapeMismatchError: Stored and wanted global shapes differ.
        DtypeMismatchError: Stored and wanted dtypes differ, and the policy does not allow the cast.
        ChunkCoverageError: The checkpoint does not hold all of a wanted tensor.
        PlanError: A tensor is stored where an object is wanted, or the reverse; a box lies outside
            of its tensor; keys are unexpected.
    """
    options = options or PlanOptions()
    objects = list(objects)
    keys = {fqn: options.stored_key(fqn) for fqn in (*wants, *objects)}
    missing = tuple(fqn for fqn, key in keys.items() if key not in catalog)
    if missing and options.on_missing == "error":
        raise _missing_error(missing, keys, catalog)
    used = {*keys.values(), *read}
    unexpected = tuple(key for key in catalog.keys if key not in used)
    if unexpected and options.on_unexpected == "error":
        raise PlanError(
            f"{len(unexpected)} keys of the checkpoint are not in the state dict: "
            f"{shorten(unexpected)}"
        )
    tensors: list[TensorPlan] = []
    casts: list[Cast] = []
    for fqn, want in wants.items():
        key = keys[fqn]
        if key not in catalog:
            continue
        stored = catalog.tensors.get(key)
        if stored is None:
            raise PlanError(
                f"key `{fqn}`: the state dict has a tensor of shape {want.shape!r}, but the "
                f"checkpoint "
                f"has an object that is not a tensor",
                fqn=fqn,
            )
        stored.check_usable()
        cast = _check_match(fqn, stored, want, options.dtype_policy)
        if cast is not None:
            casts.append(cast)
        stored.check_coverage()
        tensors.append(TensorPlan(fqn, stored, want, tuple(_plan_parts(fqn, stored, want))))
    wanted_objects = tuple((fqn, keys[fqn]) for fqn in objects if keys[fqn] in catalog)
    for fqn, key in wanted_objects:
        if key in catalog.tensors:
            raise PlanError(
                f"key `{fqn}`: the checkpoint has a tensor of shape "
                f"{catalog.tensors[key].shape!r}, but "
                f"the state dict has a value that is not a tensor; put a tensor of that shape "
                f"there",
                fqn=fqn,
            )
    return ReadPlan(
        tuple(tensors), wanted_objects, missing, unexpected, tuple(casts), read=tuple(read)
    )


def _plan_parts(fqn: str, stored: StoredTensor, want: Want) -> Iterable[ReadPart]:
    whole = Box.full(stored.shape)
    for shard, box in enumerate(want.boxes):
        if not whole.contains(box):
            raise PlanError(
                f"tensor `{fqn}`: {box} was asked for, of a tensor of shape {stored.shape!r}",
                fqn=fqn,
            )
        if len(stored.chunks) == 1:
            # It tiles the tensor, so it is all of it; most small tensors are stored like that.
            yield ReadPart(0, shard, box)
            continue
        index, parts = stored.chunks.intersect(box)
        for i, chunk in enumerate(index.tolist()):
            yield ReadPart(chunk, shard, parts[i])


def _check_match(fqn: str, stored: StoredTensor, want: Want, policy: DtypePolicy) -> Cast | None:
    if stored.shape != want.shape:
        raise ShapeMismatchError(
            f"tensor `{fqn}`: stored shape {stored.shape!r}, wanted {want.shape!r}", fqn=fqn
        )
    if stored.dtype == want.dtype:
        return None
    if not _allows(policy, stored.dtype, want.dtype):
        raise DtypeMismatchError(
            f"tensor `{fqn}`: stored dtype {stored.dtype}, wanted {want.dtype}; the dtype policy "
            f"{policy!r} does not allow this cast",
            fqn=fqn,
        )
    return Cast(fqn, stored.dtype, want.dtype)


def _allows(policy: DtypePolicy, stored: torch.dtype, wanted: torch.dtype) -> bool:
    if policy == "cast" and stored.is_floating_point and wanted.is_floating_point:
        return can_cast(stored, wanted)
    return policy != "exact" and is_lossless(stored, wanted)


def _missing_error(
    missing: tuple[str, ...], keys: Mapping[str, str], catalog: Catalog
) -> MissingTensorError:
    nearest = {fqn: find_nearest(keys[fqn], catalog.keys) for fqn in missing[:3]}
    hints = "; ".join(
        f"nearest to `{fqn}`: {shorten(near)}" for fqn, near in nearest.items() if near
    )
    return MissingTensorError(
        f"{len(missing)} keys of the state dict are not in the checkpoint: {shorten(missing)}"
        + (f" ({hints})" if hints else ""),
        fqn=missing[0],
    )
