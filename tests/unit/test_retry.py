"""Retries: which errors are asked again, how often, after how long."""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable, Sequence

import pytest

from dcp_reshard.errors import CheckpointFormatError, StorageError, UnsafeCheckpointError
from dcp_reshard.options import RetryPolicy
from dcp_reshard.retry import RetryingSource


class Unsteady:
    """A source whose calls raise what they are told to, one after the other, then succeed."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors = list(errors)
        self.calls = 0

    def _call(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    def names(self) -> list[str]:
        self._call()
        return ["a"]

    def size(self, name: str) -> int:
        self._call()
        return 7

    def read_into(self, name: str, offset: int, buffers: Sequence[memoryview]) -> None:
        self._call()

    def close(self) -> None:
        self._call()


def os_error(number: int) -> OSError:
    return OSError(number, "told to fail")


def wrapped(cause: BaseException) -> StorageError:
    error = StorageError("file 'a': broken", file="a")
    error.__cause__ = cause
    return error


def source(
    *errors: BaseException, waits: list[float] | None = None, **policy: float
) -> tuple[RetryingSource, Unsteady]:
    inner = Unsteady(*errors)
    options = {"sleep": (waits if waits is not None else []).append} | policy
    return RetryingSource(inner, RetryPolicy(**options)), inner  # type: ignore[arg-type]


CALLS: dict[str, Callable[[RetryingSource], object]] = {
    "names": lambda s: s.names(),
    "size": lambda s: s.size("a"),
    "read_into": lambda s: s.read_into("a", 5, [memoryview(bytearray(3))]),
    "close": lambda s: s.close(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error", [os_error(errno.EIO), wrapped(os_error(errno.ESTALE)), wrapped(EOFError("end"))]
)
def test_an_error_that_may_pass_is_asked_again(call: str, error: BaseException) -> None:
    """Every method is called again, whether the error or its cause is the system's."""
    retrying, inner = source(error)
    CALLS[call](retrying)
    assert (inner.calls, retrying.retries) == (2, 1)


def test_waits_double_up_to_a_limit() -> None:
    """The first wait is that of the policy, each further one twice as long, up to a limit."""
    waits: list[float] = []
    retrying, _ = source(
        *(os_error(errno.EIO) for _ in range(6)), waits=waits, tries=7, backoff=0.5, max_backoff=3
    )
    retrying.size("a")
    assert waits == [0.5, 1, 2, 3, 3, 3]
    assert retrying.retries == 6


@pytest.mark.parametrize("tries", [1, 3])
def test_a_call_is_given_up(tries: int) -> None:
    """After the last try the error says what was read, why not, and how often it was tried."""
    retrying, inner = source(*(os_error(errno.EIO) for _ in range(9)), tries=tries)
    with pytest.raises(StorageError, match=rf"bytes 5 to 8: .*given up after {tries} tries") as e:
        CALLS["read_into"](retrying)
    assert (e.value.file, e.value.start, e.value.end) == ("a", 5, 8)
    assert inner.calls == tries


@pytest.mark.parametrize(
    "error",
    [
        UnsafeCheckpointError("a link"),
        CheckpointFormatError("broken"),
        StorageError("file 'a': was replaced"),
        wrapped(os_error(errno.EACCES)),
        ValueError("of the source's own"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_final(error: BaseException) -> None:
    """Whatever will not pass is raised at once, as it is."""
    retrying, inner = source(error)
    with pytest.raises(type(error)) as caught:
        retrying.size("a")
    assert caught.value is error
    assert inner.calls == 1


def test_an_error_of_the_system_gets_a_name() -> None:
    """An `OSError` of someone else's source that will not pass becomes a `StorageError`."""
    retrying, _ = source(os_error(errno.EACCES))
    with pytest.raises(StorageError, match="file 'a': PermissionError"):
        retrying.size("a")


def test_a_folder_that_is_missing_is_final_and_a_file_is_not() -> None:
    """ENOENT may be a stale cache for a file; for the folder it is a wrong path."""
    retrying, inner = source(os_error(errno.ENOENT))
    assert retrying.size("a") == 7
    assert inner.calls == 2
    retrying, inner = source(os_error(errno.ENOENT))
    with pytest.raises(StorageError):
        retrying.names()
    assert inner.calls == 1


@pytest.mark.parametrize(("step", "tries"), [(10.0, 5), (50.0, 4), (200.0, 2)])
def test_the_deadline_counts_from_the_latest_progress(step: float, tries: int) -> None:
    """Without any success for as long as the deadline, no call is made again."""
    clock = itertools.count(0.0, step)
    retrying, inner = source(
        *(os_error(errno.EIO) for _ in range(9)), clock=lambda: next(clock), deadline=130
    )
    with pytest.raises(StorageError, match="given up"):
        retrying.size("a")
    assert inner.calls <= tries


@pytest.mark.parametrize("bad", [{"tries": 0}, {"backoff": -1}, {"deadline": float("nan")}])
def test_policies_are_checked(bad: dict[str, float]) -> None:
    """Values that make no sense are refused, by name."""
    with pytest.raises(ValueError, match=f"`{next(iter(bad))}`"):
        RetryPolicy(**bad)  # type: ignore[arg-type]
