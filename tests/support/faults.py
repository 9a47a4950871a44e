"""Faults of a file system, at the calls that `LocalSource` makes, and exceptions of every kind."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from dcp_reshard import ReaderOptions, RetryPolicy

__all__ = ["EXCEPTIONS", "FaultyOs", "patient"]

_WATCHED = ("open", "fstat", "preadv", "listdir", "stat")


def patient(**options: Any) -> ReaderOptions:
    """Options for a load that retries without really waiting, in one thread."""
    retry = RetryPolicy(sleep=lambda _: None, **options.pop("retry", {}))
    return ReaderOptions(**{"threads": 1, "retry": retry} | options)


class FaultyOs:
    """Stands in for the module `os` in `local_files`: numbers its calls, and spoils some of them.

    Attributes:
        calls: Names of the calls made.
        spoiled: How many of them were spoiled.
    """

    def __init__(
        self,
        *,
        only: Sequence[str] = _WATCHED,
        at: int | None = None,
        times: int = 1,
        error: int | None = None,
        before: Callable[[], object] | None = None,
        spoil: Callable[[Callable[..., Any], Sequence[memoryview], int, int], int] | None = None,
    ) -> None:
        """Say which calls are spoiled, and how.

        Args:
            only: Names of calls that count.
            at: Number of the first call spoiled, from 0; None for none.
            times: How many in a row.
            error: Number of the `OSError` that they raise.
            before: Called before each of them.
            spoil: Takes the place of `os.preadv`, which it is given with its arguments: buffers,
                descriptor and offset.
        """
        self.calls: list[str] = []
        self.spoiled = 0
        self._only = only
        self._range = range(0) if at is None else range(at, at + times)
        self._error = error
        self._before = before
        self._spoil = spoil
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        """The function of `os`, watched if it is a call to the file system."""
        real = getattr(os, name)
        return partial(self._call, name, real) if name in _WATCHED else real

    def _call(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            number = len(self.calls)
            if name in self._only:
                self.calls.append(name)
        if name not in self._only or number not in self._range:
            return real(*args, **kwargs)
        self.spoiled += 1
        if self._before is not None:
            self._before()
        if self._error is not None:
            raise OSError(self._error, os.strerror(self._error))
        if self._spoil is not None and name == "preadv":
            fd, buffers, offset = args
            return self._spoil(real, buffers, fd, offset)
        return real(*args, **kwargs)


class UnpicklableError(Exception):
    """Holds what cannot be pickled."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class UnbuildableError(Exception):
    """Is pickled, and cannot be built from the pickle."""

    def __init__(self, message: str, _: object) -> None:
        super().__init__(message)


class NoTextError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise ValueError("no text")


class Outside(BaseException):
    """Is no `Exception`."""


def _local() -> Exception:
    class LocalError(Exception):
        """Cannot be found by its name."""

    return LocalError("told to fail")


EXCEPTIONS: dict[str, Callable[[], BaseException]] = {
    "value": lambda: ValueError("told to fail"),
    "unpicklable": lambda: UnpicklableError("told to fail"),
    "unbuildable": lambda: UnbuildableError("told to fail", None),
    "local": _local,
    "no text": NoTextError,
    "100 MB": lambda: ValueError("told to fail" + "x" * (100 << 20)),
    "bytes": lambda: ValueError(b"told to fail\xff"),
    "group": lambda: ExceptionGroup("told to fail", [UnpicklableError("one"), KeyError("two")]),
    "base": lambda: Outside("told to fail"),
    "exit": lambda: SystemExit("told to fail"),
    "interrupt": lambda: KeyboardInterrupt("told to fail"),
    "generator exit": lambda: GeneratorExit("told to fail"),
    "memory": lambda: MemoryError("told to fail"),
    "stop": lambda: StopIteration("told to fail"),
    "os": lambda: OSError(28, "told to fail"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "told to fail"),
}
"""What a hook may raise, by name."""
