"""Faults of one rank among several: all ranks get the same error, and none waits for ever."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import dcp_reshard
from dcp_reshard import (
    PeerFailedError,
    ReaderOptions,
    ReshardError,
    ReshardStorageReader,
    RetryPolicy,
)
from tests.support.bad_checkpoints import METADATA_CASES, SECOND, Case, make_state, save_good
from tests.support.bad_files import FILE_CASES
from tests.support.checkpoints import save_world
from tests.support.failing import Failing
from tests.support.faults import EXCEPTIONS
from tests.support.tensors import check_same, indexed_tensor, snapshot
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

CASES = [*METADATA_CASES, *FILE_CASES]
ONCE = ReaderOptions(retry=RetryPolicy(tries=1))
State = dict[str, Any]


def find_failure(load: Callable[[], object]) -> dict[int, str]:
    """Class and text of what each failing rank has raised, as this rank was told."""
    try:
        load()
    except CheckpointException as error:
        return {rank: f"{type(e).__name__}: {e}" for rank, (e, _) in error.failures.items()}
    except PeerFailedError as error:
        return {-1: f"{type(error).__name__}: {error}"}
    return {}


def load_cases(rank: int, folder: str) -> list[dict[int, str]]:
    found = []
    for number, case in enumerate(CASES):
        state = make_state() | {"note": None, "opt": {"lr": None}}
        options = ReaderOptions(**{"retry": ONCE.retry} | case.options)
        found.append(
            find_failure(
                lambda state=state, number=number, options=options: dcp_reshard.load(
                    state, f"{folder}/{number}", options=options
                )
            )
        )
        if case.error is None:
            check_same(snapshot(state), snapshot(make_state()))
    return found


def test_every_bad_checkpoint_is_the_same_error_on_three_ranks(tmp_path: Path) -> None:
    """All rows of the table of bad inputs: each rank is told of the same failures, or loads."""
    good = save_good(tmp_path / "good")
    for number, case in enumerate(CASES):
        case.damage(shutil.copytree(good, tmp_path / str(number)))
    ranks = gloo_world(3, load_cases, str(tmp_path), timeout=90.0)
    kinds: dict[type[ReshardError] | None, set[str]] = {}
    for case, *found in zip(CASES, *ranks, strict=True):
        assert found[0] == found[1] == found[2], case
        check_told(case, found[0])
        kinds.setdefault(case.error, set()).update(m.partition(":")[0] for m in found[0].values())
    assert kinds[None] == set()


def check_told(case: Case, found: dict[int, str]) -> None:
    """Those ranks that look at what is wrong say so; others may only know that a peer failed."""
    assert bool(found) == (case.error is not None), case
    told = [text for text in found.values() if not text.startswith("PeerFailedError")]
    if case.error is not None:
        names = {cls.__name__ for cls in [case.error, *case.error.__subclasses__()]}
        assert told, (case, found)
        assert all(text.partition(":")[0] in names for text in told), (case, found)


def make_rows() -> State:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    full = {"large": indexed_tensor((500, 64)), "small": indexed_tensor((6, 5))}
    state: State = {
        name: distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
        for name, tensor in full.items()
    }
    return state | {"note": "text"}


HOOKS = ["open", "size", "read_into", "close", "resolve_tensor", "load_bytes", "commit_tensor"]


def load_failing(rank: int, path: str, mode: str) -> int:
    """Fail with each exception at each hook, on rank 1 or on the coordinator in turn."""
    loads = 0
    for number, hook in enumerate(HOOKS):
        for bad_rank in (1, 0):
            for kind, make in list(EXCEPTIONS.items())[(number + bad_rank) % 2 :: 2]:

                def fail(make: Callable[[], BaseException] = make) -> None:
                    raise make()

                checkpoint = Failing(Path(path), hook if rank == bad_rank else "none", 0, fail)
                reader = ReshardStorageReader(
                    checkpoint, options=ONCE, mode=mode, process_group=dist.group.WORLD
                )
                planner = checkpoint.planner()
                found = find_failure(
                    lambda reader=reader, planner=planner: dcp.load(
                        make_rows(), storage_reader=reader, planner=planner
                    )
                )
                everyone: list[Any] = [None] * dist.get_world_size()
                dist.all_gather_object(everyone, found)
                where = (bad_rank, hook, kind, everyone)
                assert all(other == found for other in everyone), where
                assert bad_rank in found, where
                assert kind in ("no text", "bytes", "os") or "told to fail" in found[bad_rank]
                assert len(str(found)) < 2**16, where
                loads += 1
    state = make_rows()
    dcp_reshard.load(state, path)
    check_same(snapshot(state), snapshot(make_rows()))
    return loads


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_f15_any_exception_of_one_rank_reaches_all(tmp_path: Path, mode: str) -> None:
    """Whatever one rank raises, wherever: all are told the same, and can load again."""
    save_world(tmp_path, 2, lambda rank: make_rows())
    loads = gloo_world(3, load_failing, str(tmp_path), mode, timeout=100.0)
    assert loads == [len(HOOKS) * len(EXCEPTIONS)] * 3


class Troubled:
    """A value whose `state_dict` fails."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def state_dict(self) -> State:
        raise self.make()

    def load_state_dict(self, state: State) -> None:
        raise AssertionError


def load_troubled(rank: int, path: str) -> list[dict[int, str]]:
    found = []
    for kind in ("value", "unpicklable", "base"):
        state = {"a": Troubled(EXCEPTIONS[kind])} if rank == 1 else make_rows()
        found.append(find_failure(lambda state=state: dcp_reshard.load(state, path)))
    return found


def test_f15_a_state_dict_that_fails_on_one_rank(tmp_path: Path) -> None:
    """What a value raises before the load begins reaches the other ranks, too."""
    save_world(tmp_path, 2, lambda rank: make_rows())
    found = gloo_world(3, load_troubled, str(tmp_path))
    assert found[0] == found[1] == found[2]
    assert all("told to fail" in failures[1] for failures in found[0])


def interrupt_one(rank: int, path: str) -> str:
    fail = (lambda: signal.raise_signal(signal.SIGINT)) if rank == 1 else (lambda: None)
    checkpoint = Failing(Path(path), "read_into", 1, fail)
    try:
        dcp_reshard.load(make_rows(), checkpoint, mode="direct")
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "loaded"


def test_f16_an_interrupt_of_one_rank(tmp_path: Path) -> None:
    """Ctrl-C on one rank stops all; that rank gets its interrupt, the others hear of it."""
    save_world(tmp_path, 2, lambda rank: make_rows())
    ranks = gloo_world(3, interrupt_one, str(tmp_path))
    assert ranks[1].startswith("KeyboardInterrupt")
    for other in (ranks[0], ranks[2]):
        assert other.startswith("CheckpointException")
        assert "KeyboardInterrupt" in other
        assert "(RANK 1)" in other


def load_without_group(rank: int, path: str) -> str:
    group = dist.new_group([0, 1, 2])
    dist.destroy_process_group(group)
    state = make_rows()
    before = snapshot(state)
    try:
        dcp_reshard.load(state, path, process_group=group)
    except Exception as error:
        check_same(snapshot(state), before)
        return str(error)
    return "loaded"


def test_f23_a_process_group_that_is_gone(tmp_path: Path) -> None:
    """A group that has been destroyed is an error at once, on every rank, before any read."""
    save_world(tmp_path, 2, lambda rank: make_rows())
    for message in gloo_world(3, load_without_group, str(tmp_path)):
        assert "group" in message.lower()


def load_switched(rank: int, folder: str) -> dict[int, str]:
    path = Path(folder, "other" if rank == 2 else "good")
    return find_failure(lambda: dcp_reshard.load(make_state(), path, options=ONCE))


def test_f09_f10_a_rank_that_sees_another_folder(tmp_path: Path) -> None:
    """A rank that sees an older checkpoint, or no file, is named; all ranks fail."""
    save_good(tmp_path / "good")
    save_good(tmp_path / "other")
    found = gloo_world(3, load_switched, str(tmp_path))
    assert found[0] == found[1] == found[2]
    assert "ranks 0, 1 one; ranks 2 one" in next(iter(found[0].values()))
    (tmp_path / "other" / SECOND).unlink()
    (tmp_path / "other" / ".metadata").write_bytes((tmp_path / "good/.metadata").read_bytes())
    found = gloo_world(3, load_switched, str(tmp_path))
    assert found[0] == found[1] == found[2]
    assert "ENOENT" in found[0][2]
