"""A progress bar on stderr, that never makes a load fail."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from tqdm import tqdm

__all__ = ["progress_bar"]


@contextmanager
def progress_bar(*, show: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A progress bar for the `on_progress` of a reader, or None if it is not to be shown."""
    # None: the process was started with the stream closed.
    if not show or sys.stderr is None:
        yield None
        return
    stream: Any = _Forgiving(sys.stderr)
    with tqdm(file=stream, unit="B", unit_scale=True, unit_divisor=1024, desc="load") as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield on_progress


class _Forgiving:
    """A stream of which no one minds that it is closed, or that its reader has gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
