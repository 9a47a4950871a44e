"""What has a load that fails left of its destination? It is said in the error.

Nothing is written before all ranks have planned, have read the values that are not tensors, and
have found that these fit. An error until then leaves every destination as it was. After a later one
some of it may be new, on some rank.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

from dcp_reshard.errors import ReshardError
from dcp_reshard.portable import to_portable

__all__ = ["Destination", "before_writing"]

Params = ParamSpec("Params")
Result = TypeVar("Result")


@dataclass(slots=True)
class Destination:
    """The memory that a load fills, and the values that it replaces. Not frozen: it changes.

    Example:
        >>> Destination().state, Destination(touched=True).state
        ('untouched', 'undefined now')
    """

    touched: bool = False
    """Whether any rank may have written to it; set before the first write."""

    @property
    def state(self) -> str:
        """What is left of it if the load fails now."""
        return "undefined now" if self.touched else "untouched"

    @contextmanager
    def said_in_errors(self) -> Iterator[None]:
        """Errors of the block are portable, and tell the state; in a note if they are not ours."""
        try:
            yield
        except BaseException as error:
            sent = to_portable(error)
            # A load inside of another's planning has its own destination: the last word counts.
            if isinstance(sent, ReshardError):
                sent.destination = self.state
            else:
                note = "the destination is "
                notes = [n for n in getattr(sent, "__notes__", ()) if not n.startswith(note)]
                sent.__notes__ = [*notes, note + self.state]
            if sent is error:
                raise
            raise sent from error


def before_writing(hook: Callable[Params, Result]) -> Callable[Params, Result]:
    """A hook of a load, before anything is written: its errors are portable, and say so."""

    @functools.wraps(hook)
    def guarded(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        with Destination().said_in_errors():
            return hook(*args, **kwargs)

    return guarded
