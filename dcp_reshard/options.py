"""Options of the reader; the only place where its tuning defaults live."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["ReaderOptions", "RetryPolicy", "Verify"]

Verify = Literal["available", "required", "off"]

_MAX_REQUEST_BYTES = 8 * 2**20
_MIN_REQUEST_BYTES = 64 * 2**10
# Ranks tell each other these as integers of 64 bits.
_TOLD = ("memory_budget", "whole_item_bytes", "shared_item_bytes", "block_bytes", "auto_bytes")
_MOST = 2**62
_MOST_RATIO = 2.0**32


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """How often a call to the storage is made again after an error that may pass.

    Example:
        >>> RetryPolicy(tries=1).tries  # never again
        1
    """

    tries: int = 5
    """Calls in all, the first one included."""

    backoff: float = 0.1
    """Seconds to wait before the second call; twice as long before each that follows."""

    max_backoff: float = 5.0
    """Longest wait, in seconds."""

    deadline: float = 120.0
    """Seconds without progress after which no call is made again: progress is any call of the load
    that succeeds."""

    sleep: Callable[[float], None] = time.sleep
    """Waits; a test puts something faster here."""

    clock: Callable[[], float] = time.monotonic
    """Tells the time in seconds, from any start. Not the wall clock, which may jump."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.tries < 1:
            raise ValueError(f"`tries` must be at least 1, got {self.tries!r}")
        for name in ("backoff", "max_backoff", "deadline"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderOptions:
    """How `ReshardStorageReader` reads.

    Example:
        >>> ReaderOptions(memory_budget=64 * 2**20, threads=4).max_request_bytes
        8388608
    """

    verify: Verify = "available"
    """Compare the checksum that `torch.save` stored with each record: where there is one
    (``"available"``), for every record or fail (``"required"``), or never (``"off"``)."""

    memory_budget: int = 256 * 2**20
    """Bytes of buffers beyond the destination, at most."""

    threads: int | None = None
    """Threads that read; None for one per CPU, up to 8, shared by the ranks of a host."""

    request_bytes: int = 64 * 2**10
    """What a request costs, in bytes that could be read in the same time: runs shorter than this
    are read together with gaps up to this."""

    whole_item_bytes: int = 16 * 2**10
    """Stored chunks up to this size are read whole, in one request with their container."""

    shared_item_bytes: int = 2**20
    """Cooperative reading: a stored chunk up to this size of which at least half is wanted is read
    whole by one rank. Larger ones are shared out in blocks, after their containers were read."""

    block_bytes: int = 64 * 2**10
    """Cooperative reading: the ranks agree on what is needed in blocks of this size (larger ones if
    there would be more than a million)."""

    auto_ratio: float = 1.25
    """``mode="auto"`` reads cooperatively if the ranks would together read this many times what
    they need, each for itself; on storage that several hosts share, or that keeps no cache."""

    auto_bytes: int = 64 * 2**20
    """... and if they would read at least this many bytes more."""

    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """What is done about calls to the storage that fail for a reason that may pass."""

    allow_unsafe_pickle: bool = False
    """Hand values that are not plain data to a planner that unpickles whatever it is given, as
    torch's own does. This runs any code that the checkpoint contains. `ReshardLoadPlanner` has an
    option of its own."""

    keep_plan_local: bool = True
    """Send the coordinator a digest of this rank's plan, not the plan. Turn it off for a planner
    whose `create_global_plan` changes plans."""

    require_same_keys: bool = False
    """Fail if the ranks of a load ask for different keys (as pipeline stages rightly do)."""

    def __post_init__(self) -> None:
        """Check the values."""
        if self.verify not in ("available", "required", "off"):
            raise ValueError(
                f"`verify` must be 'available', 'required' or 'off', got {self.verify!r}"
            )
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"`threads` must be at least 1, got {self.threads!r}")
        for name in ("request_bytes", "whole_item_bytes", "shared_item_bytes", "auto_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` must not be negative, got {getattr(self, name)!r}")
        if self.block_bytes < 64 or self.block_bytes % 64:
            raise ValueError(f"`block_bytes` must be a multiple of 64, got {self.block_bytes!r}")
        if not self.auto_ratio >= 1:
            raise ValueError(f"`auto_ratio` must be at least 1, got {self.auto_ratio!r}")
        for name, most in (*((name, _MOST) for name in _TOLD), ("auto_ratio", _MOST_RATIO)):
            if getattr(self, name) > most:
                raise ValueError(f"`{name}` must be at most {most}, got {getattr(self, name)!r}")
        if self.max_request_bytes < _MIN_REQUEST_BYTES:
            raise ValueError(
                f"`memory_budget` must be at least {2 * self.num_threads * _MIN_REQUEST_BYTES} for "
                f"{self.num_threads} threads, got {self.memory_budget!r}"
            )

    @property
    def num_threads(self) -> int:
        """Threads that read."""
        if self.threads is not None:
            return self.threads
        # torchrun says how many ranks share this host.
        ranks = os.environ.get("LOCAL_WORLD_SIZE", "1")
        cpus = (os.cpu_count() or 1) // max(1, int(ranks) if ranks.isdecimal() else 1)
        return min(8, max(1, cpus))

    @property
    def max_request_bytes(self) -> int:
        """Largest request: each thread has up to two buffers of this size."""
        return min(_MAX_REQUEST_BYTES, self.memory_budget // (2 * self.num_threads))
