"""Is an item what the metadata say? What direct and cooperative reading check alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dcp_reshard.container import Record, read_directory, read_record
from dcp_reshard.errors import CheckpointFormatError, ReshardError
from dcp_reshard.objects import MAX_OBJECT_BYTES, MAX_OBJECT_RECORDS, load_data
from dcp_reshard.payload import Payload
from dcp_reshard.probe import Item

__all__ = [
    "check_object_size",
    "check_payload",
    "check_records_of",
    "item_context",
    "load_unknown",
]


@contextmanager
def item_context(kind: str, fqn: str, item: Item) -> Iterator[None]:
    """Say in an error which value it is about, and where in which file."""
    try:
        yield
    except ReshardError as error:
        end = item.start + item.length
        raise type(error)(
            f"{kind} `{fqn}`, file {item.file!r}, bytes {item.start} to {end}: {error}",
            fqn=fqn,
            file=item.file,
            start=item.start,
            end=end,
        ) from error


def check_object_size(length: int) -> None:
    """Check that a value which is not a tensor is not unreasonably large.

    Raises:
        CheckpointFormatError: It is.
    """
    if length > MAX_OBJECT_BYTES:
        raise CheckpointFormatError(
            f"{length} bytes for a value that is not a tensor, allowed are {MAX_OBJECT_BYTES}"
        )


def check_payload(payload: Payload, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check that the file holds a tensor of the shape and the dtype that the metadata say.

    Raises:
        CheckpointFormatError: It holds another.
    """
    if payload.shape != sizes or payload.dtype != dtype:
        raise CheckpointFormatError(
            f"the file holds shape {payload.shape!r} of {payload.dtype}, the metadata say "
            f"{sizes!r} of {dtype}"
        )


def check_records_of(contents: memoryview) -> list[Record]:
    """The records of a container that is at hand, each compared with its checksum.

    Raises:
        CheckpointFormatError: The container is not what `torch.save` writes.
        CorruptRecordError: A record does not have its checksum.
    """
    records = read_directory(
        len(contents), lambda a, b: bytes(contents[a:b]), max_records=MAX_OBJECT_RECORDS
    )
    for record in records:
        read_record(record, lambda a, b: bytes(contents[a:b]))
    return records


def load_unknown(contents: memoryview, sizes: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a form that `payload` does not know, loaded by torch as data only.

    Raises:
        CheckpointFormatError: It cannot be loaded, or is not of this shape and dtype.
    """
    value = load_data(contents, max_bytes=len(contents))
    if not isinstance(value, torch.Tensor):
        raise CheckpointFormatError(
            f"the file holds a {type(value).__name__}, which cannot be resharded"
        )
    if value.layout is not torch.strided or value.is_meta:
        kind = "tensor without elements (meta)" if value.is_meta else str(value.layout)
        raise CheckpointFormatError(f"the file holds a {kind}, which cannot be resharded")
    if tuple(value.shape) != sizes or value.dtype != dtype:
        raise CheckpointFormatError(
            f"the file holds shape {tuple(value.shape)!r} of {value.dtype}, the metadata say "
            f"{sizes!r} of {dtype}"
        )
    return value.detach()
