"""Did the bytes that were read have the checksums that were stored with them?

A record that this rank has read from end to end, in however many parts, is compared here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dcp_reshard.crc import find_crc
from dcp_reshard.direct import RecordUse
from dcp_reshard.errors import CorruptRecordError
from dcp_reshard.options import Verify
from dcp_reshard.transfer import RecordKey

__all__ = ["Verdict", "check_records"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """How many records were compared."""

    verified: int
    """Records whose checksum was recomputed and agrees."""

    unverified: int
    """Records without a stored checksum, or of which not all was read."""


def check_records(records: Mapping[RecordKey, RecordUse], *, verify: Verify) -> Verdict:
    """Compare the checksums of all records.

    Raises:
        CorruptRecordError: A record does not have its stored checksum, or could not be compared
            although `verify` is ``"required"``.
    """
    verified = 0
    for (file, start), use in records.items():
        crc = (
            find_crc(use.parts, use.length)
            if verify != "off" and (use.crc or not use.length)
            else None
        )
        end = start + use.length
        if crc is None:
            if verify == "required":
                raise CorruptRecordError(
                    f"tensor `{use.fqn}`, file {file!r}, bytes {start} to {end}: its checksum could not be "
                    f"compared ({'none was stored' if not use.crc else 'only part of it was read'})",
                    fqn=use.fqn,
                    file=file,
                    start=start,
                    end=end,
                )
            continue
        if crc != use.crc:
            raise CorruptRecordError(
                f"tensor `{use.fqn}`, file {file!r}, bytes {start} to {end}: CRC-32 is {crc:#010x}, "
                f"recorded was {use.crc:#010x}; the destination is undefined now",
                fqn=use.fqn,
                file=file,
                start=start,
                end=end,
            )
        verified += 1
    return Verdict(verified, len(records) - verified)
