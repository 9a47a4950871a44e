"""What a load did: for a person at a terminal, and as a dict for a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

__all__ = [
    "Cooperation",
    "HyperParameter",
    "LoadReport",
    "OptimizerReport",
    "ReadStats",
    "format_bytes",
]

_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Cooperation:
    """How the ranks of a load have read, and what they have exchanged."""

    mode: Literal["direct", "cooperative"] = "direct"
    """``"direct"``: each for itself; ``"cooperative"``: each byte once for all."""

    reason: str = ""
    """Why."""

    bytes_sent: int = 0
    """Bytes that this rank has sent to others."""

    bytes_received: int = 0
    """Bytes that this rank has received from others."""

    rounds: int = 0
    """Rounds of reading and exchanging."""

    buffer_bytes: int = 0
    """Bytes of the buffers that windows were read into, and pieces sent from and received in."""

    imbalance: float = 1.0
    """Bytes read by the rank that has read most, over the mean of all ranks."""

    def plus(self, more: Cooperation) -> Cooperation:
        """What was read first, and then more of it in the same way."""
        return replace(
            self,
            bytes_sent=self.bytes_sent + more.bytes_sent,
            bytes_received=self.bytes_received + more.bytes_received,
            rounds=self.rounds + more.rounds,
            buffer_bytes=max(self.buffer_bytes, more.buffer_bytes),
            imbalance=more.imbalance,
        )


@dataclass(slots=True)
class ReadStats:
    """Counters of one `read_data`, filled while it runs (which is why it is not frozen)."""

    bytes_read: int = 0
    """Bytes requested from the storage, metadata included."""

    requests: int = 0
    """Requests made to the storage."""

    bytes_direct: int = 0
    """Bytes read straight into their destination."""

    retries: int = 0
    """Calls to the storage that were made again after an error."""

    rereads: int = 0
    """Items and records read a second time because they were not as they should be."""

    chunks_read: int = 0
    """Stored chunks of which at least part was read."""

    chunks_read_whole: tuple[str, ...] = ()
    """Keys of chunks of unknown form, which were read whole through `torch.load`."""

    records_verified: int = 0
    """Records whose checksum was recomputed and agrees."""

    records_unverified: int = 0
    """Records that were read without their checksum being compared."""

    cooperation: Cooperation = field(default_factory=Cooperation)
    """How the ranks of the load have read together."""

    notes: tuple[str, ...] = ()
    """What the catalog says of how the checkpoint's files were understood."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds by phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperParameter:
    """One hyper-parameter of one parameter group that is not what it was, or not what was saved."""

    group: int | str
    """Number of the group in the optimizer; in a flattened template, its first parameter."""

    name: str
    """Name of the hyper-parameter."""

    what: str
    """``"restored"``: has the saved value, not the one it had; ``"added"``: only the checkpoint has
    it; ``"kept"``: not the saved value, by option or because none was saved; ``"moved"``: not the
    value that parameters of the group were trained with, because `groups` says so."""

    value: str
    """What it is now, as text."""

    instead_of: str
    """What it is not any more, or what was saved."""

    def __str__(self) -> str:
        """In a line."""
        return f"group {self.group} `{self.name}` {self.what}: {self.value}, not {self.instead_of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerReport:
    """What a load did with each parameter of an optimizer.

    Names are those of the model, without the parts that wrappers add; from
    `load_sharded_optimizer_state_dict`, those of its `model_state_dict`.
    """

    restored: tuple[str, ...] = ()
    """Parameters whose state is as it was saved."""

    without_state: tuple[str, ...] = ()
    """Parameters that had no state when they were saved: none is restored."""

    new: tuple[str, ...] = ()
    """Parameters that the checkpoint does not know, and that kept what they had."""

    extra: tuple[str, ...] = ()
    """Parameters that only the checkpoint has, by their names there."""

    frozen: tuple[str, ...] = ()
    """Parameters with saved state that are frozen now: among `restored`, or left out by option."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Name in the model and in the checkpoint, where they differ by more than wrappers."""

    hyper_parameters: tuple[HyperParameter, ...] = ()
    """What the groups got that they did not have, and what they did not get."""

    def rows(self) -> list[tuple[str, list[str]]]:
        """What is out of the ordinary, by label."""
        return [
            ("state restored", list(self.restored)),
            ("without state", list(self.without_state)),
            ("new parameters", list(self.new)),
            ("extra parameters", list(self.extra)),
            ("frozen", list(self.frozen)),
            ("renamed", [f"{name} (was {stored})" for name, stored in self.renamed]),
            ("hyper-parameters", list(map(str, self.hyper_parameters))),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What one load did on one rank.

    ``str(report)`` is a table, `to_dict` is for JSON.
    """

    checkpoint: str
    """The checkpoint, as it was given."""

    rank: int
    """This rank."""

    tensors: int
    """Tensors filled, in whole or in part."""

    objects: int
    """Other values loaded."""

    bytes_wanted: int
    """Bytes of this rank's destinations, in the stored dtype."""

    bytes_read: int
    """Bytes requested from the storage, metadata included."""

    bytes_direct: int
    """Of these, bytes read straight into their destination."""

    requests: int
    """Requests made to the storage."""

    retries: int
    """Calls to the storage that were made again after an error."""

    rereads: int
    """Items and records read a second time because they were not as they should be."""

    chunks_read: int
    """Stored chunks of which at least part was read."""

    chunks_read_whole: tuple[str, ...]
    """Keys of chunks of unknown form, which were read whole."""

    records_verified: int
    """Records whose checksum was recomputed and agrees."""

    records_unverified: int
    """Records that were read without their checksum being compared."""

    casts: tuple[tuple[str, str, str], ...]
    """Key, stored dtype and destination dtype of each cast."""

    missing: tuple[str, ...]
    """Keys that the checkpoint does not have, and that kept their values."""

    unexpected: tuple[str, ...]
    """Keys of the checkpoint that were not asked for."""

    cooperation: Cooperation
    """How the ranks of the load have read together."""

    seconds: Mapping[str, float]
    """Seconds by phase, ``"total"`` among them."""

    repaired: tuple[str, ...] = ()
    """Keys of tensors that lie elsewhere in their chunks than the metadata say."""

    renamed: tuple[tuple[str, str], ...] = ()
    """Key in the state dict and in the checkpoint, where they differ by what wrappers add."""

    hyper_parameters: tuple[HyperParameter, ...] = ()
    """What the parameter groups of templates got that they did not have, and what they did not."""

    optimizer: OptimizerReport | None = None
    """What became of each parameter, if the state of an optimizer was loaded by name."""

    notes: tuple[str, ...] = ()
    """How the checkpoint's files were understood, where that is not plain."""

    save_identity: str = "unproven"
    """Whether all files are of one save: without a manifest nothing binds them together."""

    @property
    def read_amplification(self) -> float:
        """Bytes read over bytes wanted; 0 if nothing was wanted."""
        return self.bytes_read / self.bytes_wanted if self.bytes_wanted else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The report as plain numbers, strings, lists and dicts."""
        return {**_plain(asdict(self)), "read_amplification": self.read_amplification}

    def __str__(self) -> str:
        """A table of two columns."""
        rows = [
            ("checkpoint", f"{self.checkpoint} (rank {self.rank})"),
            ("loaded", f"{self.tensors} tensors, {self.objects} other values"),
            ("wanted", format_bytes(self.bytes_wanted)),
            (
                "read",
                f"{format_bytes(self.bytes_read)} ({self.read_amplification:.2f} x wanted) in "
                f"{self.requests} "
                f"requests, {format_bytes(self.bytes_direct)} straight into place",
            ),
            (
                "verified",
                f"{self.records_verified} records by checksum, {self.records_unverified} not",
            ),
            ("mode", f"{self.cooperation.mode} ({self.cooperation.reason})"),
            ("seconds", ", ".join(f"{name} {s:.3f}" for name, s in self.seconds.items())),
        ]
        if self.cooperation.rounds:
            rows.insert(-1, ("exchanged", _exchanged(self.cooperation)))
        if self.retries or self.rereads:
            rows.append(
                (
                    "retried",
                    f"{self.retries} calls to the storage, after errors; {self.rereads} items or "
                    f"records read twice, because of wrong contents",
                )
            )
        casts = [f"{fqn} ({stored} to {wanted})" for fqn, stored, wanted in self.casts]
        renamed = [f"{fqn} (was {stored})" for fqn, stored in self.renamed]
        rows += [("note", note) for note in self.notes]
        for label, names in (
            ("cast", casts),
            ("repaired", self.repaired),
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("renamed", renamed),
            ("hyper-parameters", list(map(str, self.hyper_parameters))),
            ("read whole", self.chunks_read_whole),
            *(self.optimizer.rows() if self.optimizer is not None else ()),
        ):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                rows.append((label, f"{len(names)}: {', '.join(names[:_SHOWN])}{more}"))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {text}" for label, text in rows)


def _exchanged(cooperation: Cooperation) -> str:
    sent, received = cooperation.bytes_sent, cooperation.bytes_received
    return (
        f"{format_bytes(sent)} sent, {format_bytes(received)} received in {cooperation.rounds} "
        f"rounds; the rank that read most read {cooperation.imbalance:.2f} x the mean"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def format_bytes(count: int) -> str:
    """A number of bytes for a person to read."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if round(size, 1) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
