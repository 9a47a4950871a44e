"""What a load that fails leaves of its destination, and what its error says about that."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import dcp_reshard
from dcp_reshard import (
    CorruptRecordError,
    PlanError,
    ReaderOptions,
    ReshardError,
    ReshardLoadPlanner,
    ReshardStorageReader,
    RetryPolicy,
    StorageError,
    UnsafeCheckpointError,
)
from dcp_reshard.destination import Destination, before_writing
from tests.support.checkpoints import save_state
from tests.support.failing import Failing
from tests.support.failures import catch_failures
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import thread_world

ONCE = RetryPolicy(tries=1)
# Small tensors do not fit into their part of the budget: they are copied in several batches.
TIGHT = ReaderOptions(memory_budget=2**17, threads=1, retry=ONCE)
WIDE = ReaderOptions(retry=ONCE, threads=2)
UNVERIFIED = ReaderOptions(retry=ONCE, threads=2, verify="off")
LARGE = 40_000


class Custom:
    """A class that no checkpoint may hold unless it is named."""


def make_state() -> dict[str, Any]:
    small = {f"small{i:02}": indexed_tensor((30, 30)) for i in range(30)}
    return small | {"large": indexed_tensor((LARGE,))}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved")
    values = {"zz": Custom(), "pair": (torch.ones(3), 1), "text": "text", "number": 0.1}
    numbers = {"step": torch.tensor(2.5), "other": torch.tensor(3.0)}
    save_state(path, make_state() | values | numbers)
    return path


def make_dest(**values: Any) -> dict[str, Any]:
    state = make_state()
    fill_with_sentinel(state)
    return state | values


def fail_together(
    size: int, load: Callable[[dict[str, Any]], object], **values: Any
) -> list[dict[int, BaseException]]:
    """The errors that each of several ranks is told of; checks that all is as it was."""

    def run(_: int) -> dict[int, BaseException]:
        state = make_dest(**values)
        before = snapshot(state)
        failures = catch_failures(lambda: load(state))
        check_same(snapshot(state), before)
        assert all(state[name] is value for name, value in values.items())
        return failures

    return thread_world(size, run)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("mode", ["direct", "cooperative"])
@pytest.mark.parametrize("options", [TIGHT, WIDE, UNVERIFIED], ids=["tight", "wide", "unverified"])
@pytest.mark.parametrize(
    ("values", "error", "match"),
    [
        pytest.param({"zz": None}, UnsafeCheckpointError, "Custom", id="class"),
        pytest.param({"pair": (torch.zeros(4), 0)}, PlanError, r"\(4,\).*\(3,\)", id="tuple"),
        pytest.param({"text": torch.zeros(1)}, PlanError, "'text'", id="tensor"),
        pytest.param({"number": torch.zeros(1)}, PlanError, "cannot have this value", id="rounded"),
        pytest.param({"step": 7}, PlanError, r"2\.5, and the state dict a int", id="number"),
    ],
)
def test_a_value_that_is_refused_is_refused_before_any_tensor_is_written(
    path: Path,
    size: int,
    mode: str,
    options: ReaderOptions,
    values: dict[str, Any],
    error: type[ReshardError],
    match: str,
) -> None:
    """Values that are not tensors are checked first: all destinations are as they were."""

    def load(state: dict[str, Any]) -> None:
        dcp_reshard.load(state, path, mode=mode, options=options)

    for failures in fail_together(size, load, **values):
        assert len(failures) == size
        for failure in failures.values():
            assert isinstance(failure, error)
            assert failure.destination == "untouched"
            assert str(failure).endswith("; the destination is untouched")
            with pytest.raises(error, match=match):
                raise failure


def test_torchs_planner_gets_no_tensor_before_all_values_are_known_to_be_data(path: Path) -> None:
    """Our reader with torch's planner refuses what is not data before it writes."""
    reader = ReshardStorageReader(path, options=TIGHT)
    [failures] = fail_together(1, lambda state: dcp.load(state, storage_reader=reader), zz=Custom())
    assert isinstance(failures[0], UnsafeCheckpointError)


@pytest.mark.parametrize("options", [WIDE, UNVERIFIED], ids=["verified", "unverified"])
@pytest.mark.parametrize("mode", ["direct", "cooperative"])
@pytest.mark.parametrize("refused", [{"zz": None}, {"step": 7}], ids=["class", "number"])
def test_one_rank_that_refuses_a_value_leaves_those_of_all_ranks(
    path: Path, mode: str, options: ReaderOptions, refused: dict[str, Any]
) -> None:
    """A value that only one rank asks for, and refuses, keeps the others from writing, too."""

    def run(rank: int) -> dict[int, str]:
        state = make_dest(**(refused if rank == 1 else {}))
        before = snapshot(state)
        failures = catch_failures(lambda: dcp_reshard.load(state, path, mode=mode, options=options))
        check_same(snapshot(state), before)
        return {rank: str(failure) for rank, failure in failures.items()}

    for told in thread_world(3, run):
        assert "Custom" in told[1] or "2.5" in told[1]
        assert len(told) == 3
        assert all(t.endswith("; the destination is untouched") for t in told.values())


@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_a_tensor_that_is_a_number_on_one_rank_only(path: Path, mode: str) -> None:
    """One rank takes a stored tensor as a number, which is read first, and others as a tensor."""

    def run(rank: int) -> object:
        state: dict[str, Any] = make_dest(other=0 if rank == 1 else torch.zeros(()))
        report = dcp_reshard.load(state, path, mode=mode, options=WIDE)
        assert report.records_unverified == 0
        check_same({"large": state["large"]}, {"large": indexed_tensor((LARGE,))})
        return state["other"]

    first, number, last = thread_world(3, run)
    assert (number, type(number)) == (3, int)
    assert isinstance(first, torch.Tensor)
    assert isinstance(last, torch.Tensor)
    assert (first.item(), last.item()) == (3.0, 3.0)


@pytest.mark.parametrize("options", [WIDE, UNVERIFIED], ids=["verified", "unverified"])
@pytest.mark.parametrize("mode", ["direct", "cooperative"])
def test_every_rank_says_what_a_failed_read_leaves_of_its_destination(
    path: Path, mode: str, options: ReaderOptions
) -> None:
    """Whichever read of one rank fails: no rank has written if its error says so, and all agree."""
    # A plan that fails is told by the rank whose plan it is, a read by all.
    seen = set()

    def run(rank: int, victim: int, at: int) -> tuple[dict[int, str], bool]:
        state = make_dest(text="", other=0)
        before = snapshot(state)

        def fail() -> None:
            raise StorageError("told to fail")

        checkpoint = Failing(path, "read_into" if rank == victim else "none", at, fail)
        try:
            failures = catch_failures(
                lambda: dcp_reshard.load(state, checkpoint, mode=mode, options=options)
            )
        except AssertionError:  # this rank makes no such read
            return {}, False
        after = snapshot(state)
        changed = any(not torch.equal(after[name], before[name]) for name in before)
        changed |= (state["text"], state["other"]) != ("", 0)
        return {rank: str(failure) for rank, failure in failures.items()}, changed

    for victim in range(3):
        for at in itertools.count():
            ranks = thread_world(3, run, victim, at)
            if not ranks[0][0]:
                break
            for told, changed in ranks:
                assert "told to fail" in told[victim]
                [state] = {text.rpartition("; the destination is ")[2] for text in told.values()}
                assert state in ("untouched", "undefined now")
                assert not (changed and state == "untouched")
                seen.add((state, len(told)))
    assert seen == {("untouched", 1), ("untouched", 3), ("undefined now", 3)}


def test_a_wrong_checksum_leaves_a_destination_that_is_undefined(
    path: Path, tmp_path: Path
) -> None:
    """A large record has been written before its checksum is known; the error says so."""
    copy = shutil.copytree(path, tmp_path / "copy")
    data = bytearray((copy / "__0_0.distcp").read_bytes())
    data[data.rindex(torch.arange(LARGE - 9, LARGE).float().numpy().tobytes())] ^= 1
    (copy / "__0_0.distcp").write_bytes(data)
    failures = catch_failures(lambda: dcp_reshard.load(make_dest(), copy, options=WIDE))
    assert isinstance(failures[0], CorruptRecordError)
    assert str(failures[0]).endswith("; the destination is undefined now")


def test_metadata_and_plans_that_fail_leave_the_destination(path: Path, tmp_path: Path) -> None:
    """Errors before the read say that nothing was written, whatever raised them."""
    nowhere = catch_failures(lambda: dcp_reshard.load(make_dest(), tmp_path, options=WIDE))
    missing = catch_failures(lambda: dcp_reshard.load(make_dest(x=torch.ones(1)), path))
    for failures in (nowhere, missing):
        assert str(failures[0]).endswith("; the destination is untouched")


@pytest.mark.parametrize("refused", [{"large": torch.zeros(LARGE + 1)}, {"zz": None}])
def test_meta_tensors_stay_until_all_ranks_have_agreed(path: Path, refused: dict[str, Any]) -> None:
    """A rank whose own part is fine keeps its meta tensors if that of another is not."""

    def run(rank: int) -> bool:
        state: dict[str, Any] = {"small00": torch.zeros(30, 30, device="meta")}
        catch_failures(
            lambda: dcp.load(
                state | (refused if rank else {}),
                storage_reader=ReshardStorageReader(path, process_group=dist.group.WORLD),
                planner=ReshardLoadPlanner(),
            )
        )
        return state["small00"].is_meta

    assert thread_world(2, run) == [True, True]


def test_hyper_parameters_stay_if_a_value_is_refused(tmp_path: Path) -> None:
    """Groups of a template, known from planning on, are set no earlier than anything else."""
    name = "weight"

    def make_template(lr: float, value: object) -> dict[str, Any]:
        groups = [{"params": [name], "lr": lr}]
        state = {name: {"exp_avg": torch.full((4,), lr)}}
        return {"optimizer": {"state": state, "param_groups": groups}, "value": value}

    save_state(tmp_path, make_template(0.5, Custom()))
    dest = make_template(0.25, None)
    [failure] = catch_failures(lambda: dcp_reshard.load(dest, tmp_path)).values()
    assert str(failure).endswith("; the destination is untouched")
    assert dest["optimizer"]["param_groups"][0]["lr"] == 0.25
    dcp_reshard.load(dest, tmp_path, allowed_classes=(Custom,))
    assert dest["optimizer"]["param_groups"][0]["lr"] == 0.5


def test_an_optimizer_that_is_not_reached_is_untouched(tmp_path: Path) -> None:
    """What `load_optimizer` fills before it sets anything is not the caller's."""
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 200)).sum().backward()
    optimizer.step()
    state = {"state": optimizer.state_dict()["state"], "param_groups": optimizer.param_groups}
    groups = [
        {**g, "params": [n for n, _ in model.named_parameters()]} for g in optimizer.param_groups
    ]
    named = {n: state["state"][i] for i, (n, _) in enumerate(model.named_parameters())}
    save_state(tmp_path, {"optimizer": {"state": named, "param_groups": groups}})
    data = bytearray((tmp_path / "__0_0.distcp").read_bytes())
    moments = named["weight"]["exp_avg"].numpy().tobytes()
    data[data.index(moments) + len(moments) // 2] ^= 1
    (tmp_path / "__0_0.distcp").write_bytes(data)
    fresh = torch.optim.AdamW(model.parameters(), lr=0.25)
    [failure] = catch_failures(lambda: dcp_reshard.load_optimizer(model, fresh, tmp_path)).values()
    assert isinstance(failure, CorruptRecordError)
    assert str(failure).endswith("; the destination is untouched")
    assert not fresh.state
    assert fresh.param_groups[0]["lr"] == 0.25


def test_what_is_not_ours_has_a_note() -> None:
    """Errors of Python keep their text; a load inside of a plan does not speak for that around."""

    @before_writing
    def fail(error: BaseException) -> None:
        with Destination(touched=True).said_in_errors():
            raise error

    with pytest.raises(MemoryError) as caught:
        fail(MemoryError("none left"))
    assert str(caught.value) == "none left"
    assert caught.value.__notes__ == ["the destination is untouched"]
    with pytest.raises(PlanError) as told:
        fail(PlanError("no; such plan"))
    assert str(told.value) == "no; such plan; the destination is untouched"
