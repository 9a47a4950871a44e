"""Small chunks, read whole: kept until all are known to be sound, then copied together.

A call of torch costs more than copying a kilobyte, so chunks of one form (dtype, shape, strides and
place in their record) become rows of one array first: their elements are views made by one call,
and their copies are made by another.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from dcp_reshard.copying import Copy, copy_all
from dcp_reshard.parts import WantedPart
from dcp_reshard.payload import Payload

__all__ = ["SmallChunk", "SmallChunks"]


class _Form(NamedTuple):
    """What is alike in chunks that are copied together."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    """Byte of element 0, counted from the start of the record."""
    length: int
    """Bytes of the record."""


class SmallChunk(NamedTuple):
    """A chunk that has been read."""

    contents: bytes
    """Contents of its record."""

    wanted: Sequence[WantedPart]
    """What is wanted of its elements."""


@dataclass(slots=True, eq=False)
class SmallChunks:
    """Contents of records that wait to be copied. Several threads may use it at once."""

    max_bytes: int
    """Contents that are kept, at most; beyond it, what there is is copied."""

    _waiting: dict[_Form, list[SmallChunk]] = field(default_factory=dict, init=False)
    _bytes: int = field(default=0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def add(self, payload: Payload, chunks: Sequence[SmallChunk]) -> None:
        """Keep chunks whose elements lie alike in their records.

        Raises:
            DtypeMismatchError: A cast overflowed.
        """
        if not chunks:
            return
        record = payload.record
        form = _Form(
            payload.dtype,
            payload.shape,
            payload.strides,
            payload.start - record.start,
            record.length,
        )
        with self._lock:
            self._waiting.setdefault(form, []).extend(chunks)
            self._bytes += record.length * len(chunks)
            full = self._bytes > self.max_bytes
        if full:
            self.copy()

    def copy(self) -> None:
        """Copy everything that is kept into place, and forget it.

        Raises:
            DtypeMismatchError: A cast overflowed.
        """
        with self._lock:
            waiting, self._waiting, self._bytes = self._waiting, {}, 0
        for form, chunks in waiting.items():
            copy_all(_copies(form, chunks))


def _copies(form: _Form, chunks: Sequence[SmallChunk]) -> Iterator[Copy]:
    itemsize = form.dtype.itemsize
    rows = np.frombuffer(bytearray().join([chunk.contents for chunk in chunks]), np.uint8)
    # torch takes bytes for elements only if each row is a whole number of them.
    end = form.length - (form.length - form.first) % itemsize
    rows = np.ascontiguousarray(rows.reshape(len(chunks), form.length)[:, form.first : end])
    table = torch.from_numpy(rows).view(form.dtype)
    strides = (table.size(1), *(stride // itemsize for stride in form.strides))
    sources = torch.as_strided(table, (len(chunks), *form.shape), strides).unbind(0)
    for chunk, source in zip(chunks, sources, strict=True):
        for part in chunk.wanted:
            yield Copy(part.fqn, part.dest, part.select(source))
