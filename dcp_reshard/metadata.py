"""The metadata layer: how is the catalog of a DCP checkpoint read?

`read_catalog` reads ``.metadata`` (or merges the ``__<rank>.metadata`` files of a save without
collectives) through the restricted unpickler and turns its records into a `Catalog`.

Checked here, for every entry: types and bounds of all numbers, chunks inside their tensor, exactly
one storage entry per chunk and object, no two entries on the same bytes, bare file names. That the
chunks tile their tensor is `StoredTensor.check_coverage`, asked for each tensor that is to be
loaded.

Reads no data file, and makes no torch object but dtypes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import Catalog, KeyPath, StoredObject, StoredTensor
from dcp_reshard.errors import CheckpointFormatError, StorageError
from dcp_reshard.storage import ByteSource, check_file_name, open_source, read_bytes
from dcp_reshard.unpickle import (
    BytesEntry,
    ChunkEntry,
    IndexEntry,
    MetadataEntry,
    StorageEntry,
    TensorEntry,
    unpickle_metadata,
)

__all__ = ["DcpCheckpoint", "build_catalog", "read_catalog"]

METADATA_FILE = ".metadata"
_RANK_METADATA_FILE = re.compile(r"__(\d{1,7})\.metadata")
_MAX_DIMS = 16
_MAX_NAME_BYTES = 4096
_MAX_CHUNKS = 8_000_000
_SUPPORTED_VERSIONS = (None, "1.0.0")


@dataclass(frozen=True, slots=True)
class DcpCheckpoint:
    """A checkpoint folder as `dcp.save` wrote it: a `CatalogSource`."""

    path: str | os.PathLike[str]
    """The folder."""

    def open(self) -> ByteSource:
        """Its files."""
        return open_source(self.path)

    def read_catalog(self, source: ByteSource) -> Catalog:
        """What they hold; see `read_catalog`."""
        return read_catalog(source)

    def __str__(self) -> str:
        """The path."""
        return os.fspath(self.path)


def read_catalog(source: ByteSource) -> Catalog:
    """Read the metadata of a checkpoint.

    A global ``.metadata`` counts alone. Only where there is none, the files of a save without
    collectives are merged; they must be there for ranks 0 to n-1 without a gap.

    Raises:
        CheckpointFormatError: The metadata is missing, broken, inconsistent, or not safe to read.
        StorageError: The folder or the file could not be read.
    """
    names = source.names()
    if METADATA_FILE in names:
        parts = [METADATA_FILE]
    else:
        ranks = sorted(int(m[1]) for n in names if (m := _RANK_METADATA_FILE.fullmatch(n)))
        if ranks != list(range(len(ranks))):
            missing = next(r for r in range(len(ranks)) if r not in ranks)
            raise CheckpointFormatError(
                f"`__{missing}.metadata` is missing, but there are metadata files of ranks up to "
                f"{ranks[-1]}; the checkpoint is incomplete"
            )
        parts = [f"__{r}.metadata" for r in ranks]
    if not parts:
        shown = ", ".join(names[:8]) or "nothing"
        raise StorageError(
            f"no `{METADATA_FILE}` in the checkpoint; it holds {shown}"
            f"{' and more' if len(names) > 8 else ''}. DCP writes this file last: without it the "
            f"save "
            f"was interrupted, or this is not the folder of a checkpoint",
            file=METADATA_FILE,
        )
    digest = hashlib.blake2b(digest_size=16)
    entries = []
    for name in parts:
        data = read_bytes(source, name, 0, source.size(name))
        digest.update(len(data).to_bytes(8, "little") + data)
        entries.append(unpickle_metadata(data, file=name))
    return build_catalog(entries, digest=digest.hexdigest())


def build_catalog(entries: Iterable[MetadataEntry], *, digest: str) -> Catalog:
    """Columns from the records of one metadata file, or of one per rank.

    Where ranks without collectives each stored the same box (replicas, objects), the lowest rank's
    copy is taken.

    Raises:
        CheckpointFormatError: The records are inconsistent.
    """
    builder = _CatalogBuilder()
    for entry in entries:
        builder.add(entry)
    return builder.build(digest)


@dataclass(slots=True)
class _CatalogBuilder:
    """Collects entries file by file; a plain value would have to be rebuilt for each."""

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    chunks: dict[str, dict[Box, StorageEntry]] = field(default_factory=dict)
    objects: dict[str, StorageEntry] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    key_paths: dict[str, KeyPath] = field(default_factory=dict)

    def add(self, metadata: MetadataEntry) -> None:
        if metadata.version not in _SUPPORTED_VERSIONS:
            raise CheckpointFormatError(
                f"metadata of version {metadata.version!r:.100} is not supported, only '1.0.0' is"
            )
        described = _mapping(metadata.state_dict_metadata, "state_dict_metadata")
        places = self._places(_mapping(metadata.storage_data, "storage_data"))
        for fqn, entry in described.items():
            _check_name(fqn)
            if isinstance(entry, TensorEntry):
                self._add_tensor(fqn, entry, places)
            elif isinstance(entry, BytesEntry):
                place = places.pop((fqn, None), None)
                if place is None or fqn in self.shapes:
                    raise CheckpointFormatError(
                        f"object `{fqn}`: not stored, or also a tensor", fqn=fqn
                    )
                self.objects.setdefault(fqn, place)
            else:
                raise CheckpointFormatError(
                    f"key `{fqn}`: described by a {type(entry).__name__}", fqn=fqn
                )
        if places:
            fqn, offset = next(iter(places))
            raise CheckpointFormatError(
                f"key `{fqn}`: {len(places)} storage entries belong to no chunk, the first at "
                f"{offset!r}",
                fqn=fqn,
            )
        self._add_key_paths(metadata.planner_data, described)

    def build(self, digest: str) -> Catalog:
        if sum(map(len, self.chunks.values())) > _MAX_CHUNKS:
            raise CheckpointFormatError(f"more than {_MAX_CHUNKS} chunks")
        tensors = {fqn: self._stored_tensor(fqn) for fqn in self.shapes}
        objects = {
            fqn: StoredObject(fqn, self.files[p.relative_path], p.offset, p.length)
            for fqn, p in self.objects.items()
        }
        catalog = Catalog(tensors, objects, tuple(self.files), self.key_paths, digest)
        catalog.check_disjoint()
        return catalog

    def _places(
        self, storage: Mapping[object, object]
    ) -> dict[tuple[str, tuple[int, ...] | None], StorageEntry]:
        places: dict[tuple[str, tuple[int, ...] | None], StorageEntry] = {}
        for index, place in storage.items():
            if not isinstance(index, IndexEntry) or not isinstance(place, StorageEntry):
                raise CheckpointFormatError("storage_data does not map indices to storage entries")
            key = (index.fqn, index.offset)
            if key in places:
                raise CheckpointFormatError(
                    f"key `{index.fqn}`: two storage entries for the chunk at {index.offset!r}"
                )
            self._check_place(index.fqn, place)
            places[key] = place
        return places

    def _check_place(self, fqn: object, place: StorageEntry) -> None:
        name = check_file_name(place.relative_path)
        for number, least in ((place.offset, 0), (place.length, 1)):
            if type(number) is not int or not least <= number < 1 << 62:
                raise CheckpointFormatError(
                    f"key `{fqn}`: offset {place.offset!r:.100}, length {place.length!r:.100} in "
                    f"file "
                    f"{name!r} are not a range of bytes",
                    file=name,
                )
        if place.transform_descriptors:
            raise CheckpointFormatError(
                f"key `{fqn}`: stored through stream transforms "
                f"{place.transform_descriptors!r:.200}, "
                f"which are not supported",
                file=name,
            )
        self.files.setdefault(name, len(self.files))

    def _add_tensor(
        self,
        fqn: str,
        entry: TensorEntry,
        places: dict[tuple[str, tuple[int, ...] | None], StorageEntry],
    ) -> None:
        shape, dtype = entry.size, getattr(entry.properties, "dtype", None)
        if type(shape) is not tuple or len(shape) > _MAX_DIMS or not isinstance(dtype, torch.dtype):
            raise CheckpointFormatError(
                f"tensor `{fqn}`: shape {shape!r:.200} or dtype {dtype!r:.100} is not understood "
                f"(up to "
                f"{_MAX_DIMS} dims are)",
                fqn=fqn,
            )
        known = self.shapes.setdefault(fqn, (shape, dtype))
        if known != (shape, dtype) or fqn in self.objects:
            raise CheckpointFormatError(
                f"tensor `{fqn}`: {known!r} in one metadata file, {(shape, dtype)!r} in another",
                fqn=fqn,
            )
        chunks = self.chunks.setdefault(fqn, {})
        whole = Box.full(shape)
        if type(entry.chunks) is not list:
            raise CheckpointFormatError(f"tensor `{fqn}`: its chunks are not a list", fqn=fqn)
        for chunk in entry.chunks:
            if type(chunk) is not ChunkEntry or type(getattr(chunk, "offsets", None)) is not tuple:
                raise CheckpointFormatError(f"tensor `{fqn}`: chunk {chunk!r:.100}", fqn=fqn)
            box = Box(chunk.offsets, chunk.sizes)
            if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
                raise CheckpointFormatError(
                    f"tensor `{fqn}`: a chunk of {len(box.offsets)} dims in a tensor of "
                    f"{len(shape)}",
                    fqn=fqn,
                )
            if not whole.contains(box):
                raise CheckpointFormatError(
                    f"tensor `{fqn}`: chunk {box} lies outside of shape {shape!r}", fqn=fqn
                )
            place = places.pop((fqn, box.offsets), None)
            if place is None:
                raise CheckpointFormatError(
                    f"tensor `{fqn}`: chunk {box} is described but not stored", fqn=fqn
                )
            chunks.setdefault(box, place)

    def _stored_tensor(self, fqn: str) -> StoredTensor:
        shape, dtype = self.shapes[fqn]
        chunks = self.chunks[fqn]
        places = list(chunks.values())
        count = len(places)
        return StoredTensor(
            fqn,
            shape,
            dtype,
            BoxArray.from_boxes(chunks, ndim=len(shape)),
            np.fromiter((self.files[p.relative_path] for p in places), np.int32, count),
            np.fromiter((p.offset for p in places), np.int64, count),
            np.fromiter((p.length for p in places), np.int64, count),
        )

    def _add_key_paths(self, planner_data: object, described: Mapping[str, object]) -> None:
        # Other planners keep other things here; only paths of this checkpoint's own keys are taken.
        if not isinstance(planner_data, dict):
            return
        for fqn, path in planner_data.items():
            parts = type(path) is tuple and path
            if parts and fqn in described and all(type(p) in (str, int) for p in parts):
                self.key_paths.setdefault(fqn, parts)


def _mapping(value: object, name: str) -> dict[Any, object]:
    if type(value) is not dict:
        raise CheckpointFormatError(f"{name} is a {type(value).__name__}, not a dict")
    return value


def _check_name(fqn: object) -> None:
    if type(fqn) is not str or len(fqn.encode(errors="surrogatepass")) > _MAX_NAME_BYTES:
        raise CheckpointFormatError(
            f"key {fqn!r:.100} is not a string of up to {_MAX_NAME_BYTES} bytes"
        )
    if "\0" in fqn:
        raise CheckpointFormatError(f"key {fqn!r:.100} has a NUL character")
