"""Did the bytes that were read have the checksums that were stored with them?

1. A record that this rank has read from end to end, in however many parts, is compared here.
2. Of the others each rank knows the checksums of its parts. These are sent to one rank per record
   (its owner, by the record's place in the checkpoint), which puts the parts of all ranks together
   and compares. No byte is read twice for it: a resharding load reads every row on some rank.
   Parts that overlap are held against each other.
3. Records without a stored checksum, of which not all was read, or of which some part overlaps
   others so that nothing tells whether it is right, stay unverified.

Nothing is raised here: storage may give wrong bytes once, so records that are not what was stored
are named to all ranks, which read them again (`job_read`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np

from dcp_reshard.catalog import Catalog
from dcp_reshard.crc import CrcPart, Joined, join_parts, merge_parts
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
    """What the checksums say; each record is counted on one rank of the job."""

    verified: int
    """Records whose checksum was recomputed and agrees."""

    unverified: int
    """Records without a stored checksum, or of which not all parts could be compared."""

    errors: Mapping[RecordKey, CorruptRecordError]
    """What is wrong with the records that this rank has compared."""

    damaged: Set[RecordKey]
    """Records of which any rank has found that they are not what was stored."""


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
        CorruptRecordError: A record could not be compared although `verify` is ``"required"``.
        PeerFailedError: Another rank failed.
    """
    if verify == "off":
        return Verdict(0, len(records), {}, frozenset())
    if lockstep is None:
        return _compare(_sum_up(records), catalog, verify)
    with lockstep.phase("adding up checksums") as told:
        found = _sum_up(records)
        partial = {key: use for key, use, joined in found if joined.crc is None and use.crc}
        outgoing = _list_parts(partial, catalog, lockstep.size)
        told.counts, told.own = [len(rows) for rows in outgoing], (len(partial),)
    tables = []
    if told.all.any():
        tables = lockstep.exchange_rows(outgoing, told, what="checksums of what they have read")
    with lockstep.phase("comparing checksums") as told:
        # What contradicts itself here may not do so when neighbours have been merged.
        whole = [one for one in found if one[0] not in partial or one[2].conflict]
        owned = _sum_up(_collect_parts(tables, catalog))
        verdict = _compare([*whole, *owned], catalog, verify)
        numbers = {name: i for i, name in enumerate(catalog.files)}
        rows = [(numbers[file], start) for file, start in verdict.errors]
        outgoing = [np.array(rows, dtype=np.int64).reshape(-1, 2)] * lockstep.size
        told.counts, told.own = [len(rows)] * lockstep.size, (len(rows),)
    if not told.all.any():
        return verdict
    tables = lockstep.exchange_rows(outgoing, told, what="which records are damaged")
    damaged = {(catalog.files[file], start) for table in tables for file, start in table.tolist()}
    return replace(verdict, damaged=damaged)


def _sum_up(
    records: Mapping[RecordKey, RecordUse],
) -> list[tuple[RecordKey, RecordUse, Joined]]:
    """What the parts of each record say together, if a checksum was stored."""
    unknown = Joined(None, None)
    return [
        (key, use, join_parts(use.parts, use.length) if _has_crc(use) else unknown)
        for key, use in records.items()
    ]


def _has_crc(use: RecordUse) -> bool:
    # `torch.serialization.set_crc32_options(False)` stores 0 for every record; the CRC-32 of no
    # bytes is 0.
    return use.crc != 0 or use.length == 0


def _compare(
    found: Iterable[tuple[RecordKey, RecordUse, Joined]], catalog: Catalog, verify: Verify
) -> Verdict:
    verified = unverified = 0
    errors: dict[RecordKey, CorruptRecordError] = {}
    for key, use, (crc, conflict) in found:
        if conflict is not None:
            part, other = conflict
            what = (
                f"bytes {part.start} to {part.end} of it were different when they were read twice, "
                f"or by two ranks (CRC-32 {part.crc:#010x} and {other:#010x})"
            )
            errors[key] = _error(key, use.length, catalog, what)
        elif crc is None:
            _refuse_unverified(key, use.length, use.crc, catalog, verify)
            unverified += 1
        elif crc != use.crc:
            what = f"CRC-32 is {crc:#010x}, recorded was {use.crc:#010x}"
            errors[key] = _error(key, use.length, catalog, what)
        else:
            verified += 1
    return Verdict(verified, unverified, errors, errors.keys())


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


def _collect_parts(tables: Sequence[IntArray], catalog: Catalog) -> dict[RecordKey, RecordUse]:
    """The records that this rank owns, with the parts that all ranks have read of them."""
    owned: dict[RecordKey, RecordUse] = {}
    for row in (row for table in tables for row in table.tolist()):
        file_number, start, length, crc, first, end, part_crc = row
        key = (catalog.files[file_number], start)
        use = owned.setdefault(key, RecordUse("", length, crc))
        use.parts.append(CrcPart(first, end, part_crc))
    return owned


def _refuse_unverified(
    key: RecordKey, length: int, stored: int, catalog: Catalog, verify: Verify
) -> None:
    if verify == "required":
        part = "only part of it was read, or nothing confirms a part that overlaps others"
        why = part if stored else "none was stored"
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
