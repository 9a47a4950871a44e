"""Errors that every rank can receive."""

from __future__ import annotations

import pickle
from typing import NoReturn

import hypothesis
import pytest
from hypothesis import strategies as st

from dcp_reshard import errors
from dcp_reshard.errors import ReshardError, StorageError
from dcp_reshard.portable import portable, to_portable
from tests.support.faults import EXCEPTIONS


@pytest.mark.parametrize("kind", EXCEPTIONS)
def test_what_is_sent_can_be_received(kind: str) -> None:
    """It comes out of its pickle as it was, is small, and names the class it stands for."""
    error = EXCEPTIONS[kind]()
    sent = to_portable(error)
    again = pickle.loads(pickle.dumps(sent))
    assert (type(again), str(again)) == (type(sent), str(sent))
    assert len(pickle.dumps(sent)) < 2**18
    assert type(error).__name__ in f"{type(sent).__name__} {sent}"
    assert isinstance(sent, Exception) or isinstance(error, (type(sent), BaseException))


@pytest.mark.parametrize("kind", ["exit", "interrupt", "generator exit"])
def test_what_stops_a_process_stays_that(kind: str) -> None:
    """An interrupt goes through, also of a class that others do not have."""

    class Stop(type(EXCEPTIONS[kind]())):  # type: ignore[misc]
        pass

    assert type(to_portable(EXCEPTIONS[kind]())) is type(EXCEPTIONS[kind]())
    assert type(to_portable(Stop("now"))) is type(EXCEPTIONS[kind]())


@pytest.mark.parametrize("name", errors.__all__)
def test_our_errors_go_through(name: str) -> None:
    """Errors of this package keep their class, text and context."""
    error = getattr(errors, name)("what", fqn="w", file="f", start=1, end=2)
    assert to_portable(error) is error


def test_our_errors_are_cut_if_they_are_long() -> None:
    """A message of megabytes loses its middle, and nothing else."""
    error = StorageError("begin" + "x" * 10**7 + "end", file="f", start=3)
    sent = to_portable(error)
    assert isinstance(sent, StorageError)
    assert (sent.file, sent.start) == ("f", 3)
    assert str(sent).startswith("begin")
    assert str(sent).endswith("end")
    assert "characters left out" in str(sent)


def test_causes_are_named() -> None:
    """What caused the error, and what it came up in, are part of the text; not without end."""

    def nested(levels: int) -> NoReturn:
        try:
            if levels:
                nested(levels - 1)
            raise KeyError("the cause")
        except Exception as error:
            raise EXCEPTIONS["unpicklable"]() from error

    with pytest.raises(Exception, match="told to fail") as caught:
        nested(0)
    assert str(to_portable(caught.value)).endswith("caused by KeyError: 'the cause'")
    with pytest.raises(Exception, match="told to fail") as caught:
        nested(50)
    assert str(to_portable(caught.value)).count("caused by") == 3


def test_notes_are_kept() -> None:
    """Notes that were added to the original are in the text."""
    error = EXCEPTIONS["unpicklable"]()
    error.add_note("on rank 3")
    assert "on rank 3" in str(to_portable(error))


def test_hooks_are_what_they_were() -> None:
    """A wrapped hook returns what it returned, and has its signature and name."""

    @portable
    def hook(value: int, *, twice: bool = False) -> int:
        """Do it."""
        return value * (2 if twice else 1)

    assert hook(3, twice=True) == 6
    assert (hook.__name__, hook.__doc__) == ("hook", "Do it.")


def test_the_original_is_the_cause() -> None:
    """On the rank where it came up, the original is there, with its traceback."""

    @portable
    def hook() -> None:
        raise EXCEPTIONS["unpicklable"]()

    with pytest.raises(ReshardError, match="UnpicklableError: told to fail") as caught:
        hook()
    assert type(caught.value.__cause__).__name__ == "UnpicklableError"
    assert caught.value.__cause__.__traceback__ is not None


@hypothesis.given(st.lists(st.text() | st.binary() | st.integers() | st.none(), max_size=3))
def test_arguments_of_any_kind(arguments: list[object]) -> None:
    """Builtin exceptions go through with their arguments."""
    for cls in (ValueError, KeyError, OSError, RuntimeError):
        sent = to_portable(cls(*arguments))
        assert pickle.loads(pickle.dumps(sent)).args == sent.args
