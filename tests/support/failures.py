"""What a load that fails has raised, out of the wrapping that torch puts around it."""

from __future__ import annotations

from collections.abc import Callable

from torch.distributed.checkpoint.api import CheckpointException

from dcp_reshard.errors import ReshardError

__all__ = ["catch_failure", "catch_failures", "find_failures"]


def find_failures(load: Callable[[], object]) -> dict[int, BaseException]:
    """The errors of a load by rank (of rank 0 if that is not known); none if it succeeds."""
    try:
        load()
    except CheckpointException as error:
        return {rank: failure for rank, (failure, _) in error.failures.items()}
    except ReshardError as error:
        return {0: error}
    return {}


def catch_failures(load: Callable[[], object]) -> dict[int, BaseException]:
    """The errors of a load that must fail, by rank."""
    failures = find_failures(load)
    assert failures, "the load did not fail"
    return failures


def catch_failure(load: Callable[[], object]) -> ReshardError:
    """The error of a load that must fail on one rank, for a reason that this package knows."""
    failures = list(catch_failures(load).values())
    assert len(failures) == 1, failures
    (failure,) = failures
    assert isinstance(failure, ReshardError), repr(failure)
    return failure
