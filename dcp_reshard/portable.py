"""Errors that every rank can receive: what does a rank raise so that the others hear of it?

`torch.distributed.checkpoint` pickles what a hook of the reader or the planner raises, and sends it
to all ranks. torch 2.13 does so outside of any `try`: an exception that cannot be pickled, or not
be rebuilt by the receiver, ends the collective call on one rank, and the others wait in it for
ever.

`portable` wraps a hook. What the hook raises goes through if each rank can rebuild it: errors of
this package, of Python itself, and of torch. Anything else becomes a `ReshardError` with the class,
the text and the causes of the original in its message. An interrupt stays an interrupt.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from dcp_reshard import errors
from dcp_reshard.errors import ReshardError

__all__ = ["STOPS", "describe", "portable", "to_portable"]

Params = ParamSpec("Params")
Result = TypeVar("Result")

STOPS = (KeyboardInterrupt, SystemExit, GeneratorExit)
"""What stops a process, not only a load."""

_MAX_PICKLED_BYTES = 256 * 2**10
_MAX_TEXT = 8 * 2**10
_MAX_CAUSES = 4
# `torch._C` has those that torch raises from C++.
_KNOWN_MODULES = ("builtins", errors.__name__, "torch", "torch._C", "torch._C._distributed_c10d")


def portable(hook: Callable[Params, Result]) -> Callable[Params, Result]:
    """The hook, made to raise only what every rank can rebuild."""

    @functools.wraps(hook)
    def guarded(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        try:
            return hook(*args, **kwargs)
        except BaseException as error:
            sent = to_portable(error)
            if sent is error:
                raise
            raise sent from error

    return guarded


def to_portable(error: BaseException) -> BaseException:
    """The error itself if every rank can rebuild it, else another one that says the same."""
    # A `StopIteration` would be another error by the time it has left a generator.
    changes = isinstance(error, (BaseExceptionGroup, StopIteration, StopAsyncIteration))
    known = type(error).__module__ in _KNOWN_MODULES and not changes
    if known and _survives(error):
        return error
    text = describe(error)
    if isinstance(error, STOPS):
        # What stops a process has to stop it on the rank where it came up.
        return next(kind for kind in STOPS if isinstance(error, kind))(text)
    if known and isinstance(error, ReshardError):
        context = {name: getattr(error, name) for name in ("fqn", "file", "start", "end")}
        return type(error)(text, **context)
    return ReshardError(text)


def describe(error: BaseException) -> str:
    """Class and text of an error and of what caused it, of bounded length."""
    lines: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(lines) < _MAX_CAUSES:
        lines.append(_describe_one(cause))
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "; caused by ".join(lines)


def _describe_one(error: BaseException) -> str:
    try:
        text = str(error)
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", ())[:_MAX_CAUSES])
    except Exception as failure:
        text, notes = f"(its text is not to be had: {type(failure).__name__})", ""
    if isinstance(error, BaseExceptionGroup):
        parts = "; ".join(_describe_one(e) for e in error.exceptions[:_MAX_CAUSES])
        text = f"{text} [{parts}]"
    text = _shorten(text + notes)
    if type(error).__module__ == errors.__name__:
        return text
    return f"{type(error).__qualname__}: {text}" if text else type(error).__qualname__


def _shorten(text: str) -> str:
    if len(text) <= _MAX_TEXT:
        return text
    half = _MAX_TEXT // 2
    return f"{text[:half]} ... ({len(text) - 2 * half} characters left out) ... {text[-half:]}"


def _survives(error: BaseException) -> bool:
    """Whether the error comes back from a pickle of moderate size as it was."""
    try:
        pickled = pickle.dumps(error)
        if len(pickled) > _MAX_PICKLED_BYTES:
            return False
        other = pickle.loads(pickled)  # noqa: S301  made in the line before
        return type(other) is type(error) and str(other) == str(error)
    except Exception:
        return False
