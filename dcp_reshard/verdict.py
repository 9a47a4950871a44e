"""Did the bytes that were read have the checksums that were stored with them?

1. A record that this rank has read from end to end, in however many parts, is compared here.
2. Of the others each rank knows the checksums of its parts. These are sent to one rank per record
   (its owner, by the record's place in the checkpoint), which puts the parts of all ranks together
   and compares. No byte is read twice for it: a resharding load reads every row on some rank.
3. Records without a stored checksum, and such of which no chain of parts covers all, stay
   unverified.

Before anything is sent, the ranks agree that all of them have come this far: a rank whose read
failed takes part in the agreement, and no other waits for its parts. For the same reason nothing is
compared, and no error raised, before the parts have been sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from dcp_reshard.catalog import Catalog
from dcp_reshard.collectives import collective_device
from dcp_reshard.crc import CrcPart, find_crc, merge_parts
from dcp_reshard.errors import CorruptRecordError
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
    exchange: bool,
    group: dist.ProcessGroup | None,
) -> Verdict:
    """Compare the checksums of all records that were read.

    Args:
        records: What this rank has read.
        catalog: The checkpoint; the same on all ranks.
        verify: What to compare.
        exchange: Whether all ranks of the group are here, so that parts can be put together. Then
            this is a collective call.
        group: The ranks that load together.

    Raises:
        CorruptRecordError: A record does not have its stored checksum, or could not be compared
            although `verify` is ``"required"``.
    """
    if verify == "off":
        return Verdict(0, len(records))
    found = [
        (key, use, find_crc(use.parts, use.length) if _has_crc(use) else None)
        for key, use in records.items()
    ]
    if exchange:
        partial = {key: use for key, use, crc in found if crc is None and use.crc}
        found = [(key, use, crc) for key, use, crc in found if key not in partial]
        for key, use in _gather_parts(partial, catalog, group).items():
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
                f"and {part.crc:#010x}); the destination is undefined now",
            )


def _gather_parts(
    partial: Mapping[RecordKey, RecordUse], catalog: Catalog, group: dist.ProcessGroup | None
) -> dict[RecordKey, RecordUse]:
    """Parts of all ranks of the records that this rank owns; a collective call."""
    size = dist.get_world_size(group)
    numbers = {name: i for i, name in enumerate(catalog.files)}
    outgoing: list[list[int]] = [[] for _ in range(size)]
    for (file, start), use in partial.items():
        head = (numbers[file], start, use.length, use.crc)
        owner = (numbers[file] + start // 64) % size
        for part in merge_parts(use.parts):
            outgoing[owner] += (*head, part.start, part.end, part.crc)
    owned: dict[RecordKey, RecordUse] = {}
    for row in _exchange_rows(outgoing, group):
        file_number, start, length, crc, first, end, part_crc = row
        key = (catalog.files[file_number], start)
        use = owned.setdefault(key, RecordUse("", length, crc))
        use.parts.append(CrcPart(first, end, part_crc))
    return owned


def _exchange_rows(
    outgoing: Sequence[Sequence[int]], group: dist.ProcessGroup | None
) -> list[list[int]]:
    device = collective_device(group)
    counts_out = torch.tensor([len(rows) for rows in outgoing], device=device)
    counts_in = torch.empty_like(counts_out)
    dist.all_to_all_single(counts_in, counts_out, group=group)
    splits_in, splits_out = counts_in.tolist(), counts_out.tolist()
    flat = torch.tensor([n for rows in outgoing for n in rows], dtype=torch.int64, device=device)
    received = torch.empty(sum(splits_in), dtype=torch.int64, device=device)
    dist.all_to_all_single(received, flat, splits_in, splits_out, group=group)
    rows: list[list[int]] = received.view(-1, _ROW).tolist()
    return rows


def _compare(key: RecordKey, length: int, stored: int, found: int, catalog: Catalog) -> None:
    if found != stored:
        raise _error(
            key,
            length,
            catalog,
            f"CRC-32 is {found:#010x}, recorded was {stored:#010x}; the destination is undefined "
            f"now",
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
