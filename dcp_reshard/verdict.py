"""Did the bytes that were read have the checksums that were stored with them?

1. A record that this rank has read from end to end, in however many parts, is compared here.
2. Of the others each rank knows the checksums of its parts. These are sent to one rank per record
   (its owner, by the record's place in the checkpoint), which puts the parts of all ranks together
   and compares. No byte is read twice for it: a resharding load reads every row on some rank.
3. Records without a stored checksum, and such of which no chain of parts covers all, stay
   unverified.

Nothing is compared before the parts have been sent, so that each rank can say what is wrong with
the records that it owns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dcp_reshard.catalog import Catalog
from dcp_reshard.crc import CrcPart, find_crc, merge_parts
from dcp_reshard.domains import IntArray
from dcp_reshard.errors import CorruptRecordError
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.options import Verify
from dcp_reshard.parts import RecordUse
from dcp_reshard.transfer import RecordKey

__all__ = ["Verdict", "check_records"]

# File, start and length of the record, its stored checksum; start, end and checksum of the part.
_ROW = 7


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many records were compared, each counted on one rank of the job."""

    verified: int
    """Records whose checksum was recomputed and agrees."""

    unverified: int
    """Records without a stored checksum, or of which not all was read."""


def check_records(
    records: Mapping[RecordKey, RecordUse],
    catalog: Catalog,
    *,
    verify: Verify,
    lockstep: Lockstep | None,
) -> Verdict:
    """Compare the checksums of all records that were read; a collective call, if with others.

    Args:
        records: What this rank has read.
        catalog: The checkpoint; the same on all ranks.
        verify: What to compare.
        lockstep: The ranks that load together, whose parts are put together; None if this rank
            loads alone.

    Raises:
        CorruptRecordError: A record does not have its stored checksum, or could not be compared
            although `verify` is ``"required"``.
        PeerFailedError: Another rank failed before the parts were sent.
    """
    if verify == "off":
        return Verdict(0, len(records))
    if lockstep is None:
        found = _sum_up(records)
    else:
        with lockstep.phase("adding up checksums") as told:
            found = _sum_up(records)
            partial = {key: use for key, use, crc in found if crc is None and use.crc}
            outgoing = _list_parts(partial, catalog, lockstep.size)
            told.counts = [len(rows) for rows in outgoing]
        tables = lockstep.exchange_rows(outgoing, told, what="checksums of what they have read")
        found = [(key, use, crc) for key, use, crc in found if key not in partial]
        for key, use in _join_parts(tables, catalog).items():
            _check_replicas(key, use, catalog)
            found.append((key, use, find_crc(use.parts, use.length)))
    verified = 0
    for key, use, crc in found:
        if crc is None:
            _refuse_unverified(key, use.length, use.crc, catalog, verify)
        else:
            _compare(key, use.length, use.crc, crc, catalog)
            verified += 1
    return Verdict(verified, len(found) - verified)


def _sum_up(
    records: Mapping[RecordKey, RecordUse],
) -> list[tuple[RecordKey, RecordUse, int | None]]:
    """The checksum of each record, if this rank has read all of it and one was stored."""
    return [
        (key, use, find_crc(use.parts, use.length) if _has_crc(use) else None)
        for key, use in records.items()
    ]


def _has_crc(use: RecordUse) -> bool:
    # `torch.serialization.set_crc32_options(False)` stores 0 for every record; the CRC-32 of no
    # bytes is 0.
    return use.crc != 0 or use.length == 0


def _check_replicas(key: RecordKey, use: RecordUse, catalog: Catalog) -> None:
    # Replicas read the same part. Only one of them is put together with the others below, and would
    # speak for all.
    crcs: dict[tuple[int, int], int] = {}
    for part in use.parts:
        crc = crcs.setdefault((part.start, part.end), part.crc)
        if crc != part.crc:
            raise _error(
                key,
                use.length,
                catalog,
                f"ranks read different bytes {part.start} to {part.end} of it (CRC-32 {crc:#010x} "
                f"and {part.crc:#010x})",
            )


def _list_parts(
    partial: Mapping[RecordKey, RecordUse], catalog: Catalog, num_ranks: int
) -> list[IntArray]:
    """What each rank has to know of the records that it owns."""
    numbers = {name: i for i, name in enumerate(catalog.files)}
    outgoing: list[list[tuple[int, ...]]] = [[] for _ in range(num_ranks)]
    for (file, start), use in partial.items():
        head = (numbers[file], start, use.length, use.crc)
        owner = (numbers[file] + start // 64) % num_ranks
        outgoing[owner] += [(*head, p.start, p.end, p.crc) for p in merge_parts(use.parts)]
    return [np.array(rows, dtype=np.int64).reshape(-1, _ROW) for rows in outgoing]


def _join_parts(tables: Sequence[IntArray], catalog: Catalog) -> dict[RecordKey, RecordUse]:
    """The records that this rank owns, with the parts that all ranks have read of them."""
    owned: dict[RecordKey, RecordUse] = {}
    for row in (row for table in tables for row in table.tolist()):
        file_number, start, length, crc, first, end, part_crc = row
        key = (catalog.files[file_number], start)
        use = owned.setdefault(key, RecordUse("", length, crc))
        use.parts.append(CrcPart(first, end, part_crc))
    return owned


def _compare(key: RecordKey, length: int, stored: int, found: int, catalog: Catalog) -> None:
    if found != stored:
        raise _error(
            key,
            length,
            catalog,
            f"CRC-32 is {found:#010x}, recorded was {stored:#010x}",
        )


def _refuse_unverified(
    key: RecordKey, length: int, stored: int, catalog: Catalog, verify: Verify
) -> None:
    if verify == "required":
        why = "only part of it was read" if stored else "none was stored"
        raise _error(key, length, catalog, f"its checksum could not be compared ({why})")


def _error(key: RecordKey, length: int, catalog: Catalog, what: str) -> CorruptRecordError:
    file, start = key
    fqn = catalog.find_key(file, start)
    return CorruptRecordError(
        f"`{fqn}`, file {file!r}, bytes {start} to {start + length}: {what}",
        fqn=fqn,
        file=file,
        start=start,
        end=start + length,
    )
