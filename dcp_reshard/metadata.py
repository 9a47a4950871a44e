"""The metadata layer: how is the catalog of a DCP checkpoint read?

`read_catalog` reads ``.metadata`` (or merges the ``__<rank>.metadata`` files of a save without
collectives) through the restricted unpickler and turns its records into a `Catalog`.

Checked here, for every entry: types and bounds of all numbers, chunks inside their tensor, exactly
one storage entry per chunk and object, no two entries on the same bytes, bare file names. That the
chunks tile their tensor is `StoredTensor.check_coverage`, asked for each tensor that is to be
loaded.

`read_own_copies` says what a rank of a save without collectives stored under keys that others
stored, too.

Reads no data file, and makes no torch object but dtypes.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dcp_reshard.catalog import Catalog, StoredTensor
from dcp_reshard.catalog_builder import build_catalog
from dcp_reshard.errors import CheckpointFormatError, StorageError
from dcp_reshard.garbage import paused_gc
from dcp_reshard.metadata_entries import MetadataEntry
from dcp_reshard.repair import repair_catalog
from dcp_reshard.storage import ByteSource, open_source, read_bytes
from dcp_reshard.unpickle import MAX_METADATA_BYTES, unpickle_metadata

__all__ = ["DcpCheckpoint", "read_catalog", "read_own_copies"]

METADATA_FILE = ".metadata"
_RANK_METADATA_FILE = re.compile(r"__(\d{1,7})\.metadata")


@dataclass(frozen=True, slots=True)
class DcpCheckpoint:
    """A checkpoint folder as `dcp.save` wrote it: a `CatalogSource`."""

    path: str | os.PathLike[str]
    """The folder."""

    def open(self) -> ByteSource:
        """Its files."""
        return open_source(self.path)

    def read_catalog(self, source: ByteSource) -> Catalog:
        """What they hold; see `read_catalog` and `repair_catalog`."""
        return repair_catalog(read_catalog(source), source)

    def __str__(self) -> str:
        """The path."""
        return os.fspath(self.path)


@paused_gc()
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
    if not parts and _appears(source):
        parts = [METADATA_FILE]
    if not parts:
        shown = ", ".join(names[:8]) or "nothing"
        raise StorageError(
            f"no `{METADATA_FILE}` in the checkpoint; it holds {shown}"
            f"{' and more' if len(names) > 8 else ''}. DCP writes this file last: without it the "
            f"save was interrupted, or this is not the folder of a checkpoint",
            file=METADATA_FILE,
        )
    catalog = _read_files(source, parts)
    return replace(catalog, read_from=tuple(parts))


@paused_gc()
def read_own_copies(source: ByteSource, catalog: Catalog, *, rank: int) -> Catalog | None:
    """What a rank of a save without collectives stored under keys of which the catalog has one.

    Such a save keeps each rank's copy of a plain tensor or an object, of which `read_catalog` takes
    the lowest rank's. They may differ (a generator's state), and with as many ranks as saved, torch
    gives each its own.

    Args:
        source: The files that `catalog` was read from.
        catalog: What they hold.
        rank: The rank that loads.

    Returns:
        The copies of the rank of this number, in files numbered as in `catalog`; None if there was
        no such rank, or if the save has one copy of each key, whichever rank wrote it.

    Raises:
        CheckpointFormatError: The rank's metadata are not what they were.
        StorageError: The file could not be read.
    """
    name = f"__{rank}.metadata"
    if name not in catalog.read_from[1:]:  # the lowest rank's are those of the catalog
        return None
    own = _read_files(source, [name])
    numbers = {file: number for number, file in enumerate(catalog.files)}
    if not numbers.keys() >= set(own.files):
        raise CheckpointFormatError(f"`{name}` has changed while it was loaded from", file=name)
    moved = np.array([numbers[file] for file in own.files], np.int32)
    return replace(
        catalog,
        tensors={
            fqn: replace(stored, files=moved[stored.files])
            for fqn, stored in own.tensors.items()
            if _is_copy(stored, catalog.tensors.get(fqn))
        },
        objects={
            fqn: replace(stored, file=int(moved[stored.file]))
            for fqn, stored in own.objects.items()
            if fqn in catalog.objects
        },
    )


def _is_copy(own: StoredTensor, shared: StoredTensor | None) -> bool:
    """Whether both are all of one tensor."""
    if shared is None or (own.shape, own.dtype) != (shared.shape, shared.dtype):
        return False
    return len(own.chunks) == len(shared.chunks) == 1 and not shared.defect


def _read_files(source: ByteSource, names: Sequence[str]) -> Catalog:
    digest = hashlib.blake2b(digest_size=16)
    entries: list[MetadataEntry] = []
    for name in names:
        size = source.size(name)
        if size > MAX_METADATA_BYTES:
            raise CheckpointFormatError(
                f"file {name!r}: {size} bytes of metadata, allowed are {MAX_METADATA_BYTES}",
                file=name,
            )
        data = read_bytes(source, name, 0, size)
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
        entries.append(unpickle_metadata(data, file=name))
        del data
    return build_catalog(entries, digest=digest.hexdigest())


def _appears(source: ByteSource) -> bool:
    """Whether there is a metadata file that the list of names does not have.

    A client of NFS may hold an old list, of a folder into which another node has just saved; asking
    for the file itself makes it look.
    """
    try:
        source.size(METADATA_FILE)
    except StorageError:
        return False
    return True
