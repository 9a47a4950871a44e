"""What `verify` has found: for a person at a terminal, and as a dict for a log."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from dcp_reshard.report import format_bytes

__all__ = ["Problem", "VerifyReport"]

_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with a checkpoint."""

    kind: str
    """``"metadata"``, ``"coverage"``, ``"file"`` (missing, cut, unreadable), ``"item"`` (not what
    the metadata say), or ``"checksum"``."""

    message: str
    """What, where, and both values."""

    fqn: str | None = None
    """The tensor or object concerned, if it is one."""

    file: str | None = None
    """The file concerned, if it is one."""

    start: int | None = None
    """First byte concerned."""

    end: int | None = None
    """One past the last byte concerned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a checkpoint holds, and all that is wrong with it.

    ``str(report)`` is a table, `to_dict` is for JSON.
    """

    checkpoint: str
    """The checkpoint, as it was given."""

    tensors: int
    """Tensors that the metadata describe."""

    objects: int
    """Other values."""

    chunks: int
    """Chunks of all tensors."""

    files: int
    """Data files."""

    bytes_read: int
    """Bytes requested from the storage, metadata included."""

    requests: int
    """Requests made to the storage."""

    retries: int
    """Calls to the storage that were made again after an error."""

    records_verified: int
    """Records with a checksum, compared with it."""

    records_unverified: int
    """Records without one."""

    problems: tuple[Problem, ...]
    """What is wrong; the first thousand."""

    num_problems: int
    """How much is wrong in all."""

    notes: tuple[str, ...]
    """What is unusual, but not wrong."""

    seconds: float
    """Time taken."""

    save_identity: str = "unproven"
    """Whether all files are of one save: without a manifest nothing binds them together."""

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.num_problems

    def to_dict(self) -> dict[str, Any]:
        """The report as plain numbers, strings, lists and dicts."""
        plain = asdict(self)
        plain["problems"] = [dict(problem) for problem in plain["problems"]]
        plain["notes"] = list(self.notes)
        plain["ok"] = self.ok
        return plain

    def __str__(self) -> str:
        """A table of two columns, and a line for each problem."""
        rows = [
            ("checkpoint", self.checkpoint),
            ("result", "ok" if self.ok else f"{self.num_problems} problems"),
            (
                "holds",
                f"{self.tensors} tensors in {self.chunks} chunks, {self.objects} other values, "
                f"in {self.files} files",
            ),
            ("read", f"{format_bytes(self.bytes_read)} in {self.requests} requests"),
            (
                "verified",
                f"{self.records_verified} records by checksum, {self.records_unverified} have none",
            ),
            ("identity", f"{self.save_identity}: no manifest says that the files are of one save"),
            ("seconds", f"{self.seconds:.3f}"),
        ]
        if self.retries:
            rows.append(("retried", f"{self.retries} calls to the storage, after errors"))
        rows += [("note", note) for note in self.notes[:_SHOWN]]
        rows += [(problem.kind, problem.message) for problem in self.problems[:_SHOWN]]
        if self.num_problems > _SHOWN:
            rows.append(("", f"and {self.num_problems - _SHOWN} more problems"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)
