"""Reads that fail for a reason that may pass are tried again: for which reasons, and for how long?

Tried again are the errors of a busy or failing-over file server (EIO, ESTALE, EAGAIN, ETIMEDOUT,
ECONNRESET), a file that ends early, and a file that is not there: a client of NFS may believe for
seconds that a file which another node has just written does not exist. Everything else is final: a
link, a file that has changed, a name that is refused.

A call is given up after some tries, or when nothing at all could be read for some time: the
deadline is on progress, so a slow read that goes on is never given up. Time is that of the
monotonic clock.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from dcp_reshard.errors import ReshardError, StorageError
from dcp_reshard.options import RetryPolicy
from dcp_reshard.storage import ByteSource

__all__ = ["RetryingSource"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

_TRANSIENT = frozenset(
    {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.ETIMEDOUT, errno.ECONNRESET, errno.ENOENT}
)


@dataclass(slots=True, eq=False)
class RetryingSource:
    """Another source, asked again after errors that may pass. Not frozen: it counts."""

    source: ByteSource
    """Where the bytes come from."""

    policy: RetryPolicy
    """How often, and for how long."""

    retries: int = 0
    """Calls made again."""

    _progress: float = field(default=float("-inf"), init=False, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)

    def names(self) -> list[str]:
        """Names of the files there are, sorted. A folder that is not there is final."""
        return self._call(self.source.names, "the folder", final=(errno.ENOENT,))

    def size(self, name: str) -> int:
        """Size of a file in bytes."""
        return self._call(lambda: self.source.size(name), f"file {name!r}", file=name)

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill the buffers with the bytes that start at `offset`."""
        end = offset + sum(buffer.nbytes for buffer in buffers)
        self._call(
            lambda: self.source.read_into(name, offset, buffers),
            f"file {name!r}, bytes {offset} to {end}",
            file=name,
            start=offset,
            end=end,
        )

    def close(self) -> None:
        """Release what is held open, and check that no file changed."""
        self._call(self.source.close, "closing the files")

    def _call(
        self,
        function: Callable[[], Result],
        what: str,
        *,
        final: Sequence[int] = (),
        file: str | None = None,
        start: int | None = None,
        end: int | None = None,
    ) -> Result:
        clock, tries = self.policy.clock, 1
        started = clock()
        while True:
            try:
                result = function()
            except OSError as error:
                idle = clock() - max(started, self._progress)
                if not _is_transient(error, final):
                    if isinstance(error, ReshardError):
                        raise
                    why = ""
                elif tries < self.policy.tries and idle < self.policy.deadline:
                    self._wait(what, error, tries)
                    tries += 1
                    continue
                else:
                    why = f"; given up after {tries} tries and {idle:.1f} s without progress"
                message = str(error) if isinstance(error, StorageError) else f"{what}: {error!r}"
                raise StorageError(f"{message}{why}", file=file, start=start, end=end) from error
            self._progress = clock()
            return result

    def _wait(self, what: str, error: OSError, tries: int) -> None:
        seconds = min(self.policy.max_backoff, self.policy.backoff * 2 ** (tries - 1))
        logger.warning("%s: %s; try %d follows in %.1f s", what, error, tries + 1, seconds)
        with self._lock:
            self.retries += 1
        self.policy.sleep(seconds)


def _is_transient(error: OSError, final: Sequence[int]) -> bool:
    """Whether the error, or what caused it, may pass."""
    cause: BaseException | None = error
    for _ in range(4):
        if isinstance(cause, EOFError):
            return True
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno in _TRANSIENT and cause.errno not in final
        if cause is None:
            break
        cause = cause.__cause__
    return False
