"""State dicts that are made when the metadata have been read."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem

from dcp_reshard import PlanError, ReshardLoadPlanner, ReshardStorageReader
from dcp_reshard.deferred import DeferredPlanner, read_now

SAVED = {"a": 1, "b": 1, "c": (1, 2), "d": (1, 2), "e": [1], "f": [1], "t": torch.arange(3.0)}


class Counting(ReshardLoadPlanner):
    """Notes the keys of objects that it was given."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False)
        self.keys: list[str] = []

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.keys.append(read_item.dest_index.fqn)
        super().load_bytes(read_item, value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    dcp.save(SAVED, checkpoint_id=tmp_path)
    return tmp_path


def load(path: Path, planner: DeferredPlanner) -> None:
    dcp.load({}, storage_reader=ReshardStorageReader(path), planner=planner)


@pytest.mark.parametrize("share_equal", [False, True])
def test_equal_values_are_read_once_if_they_cannot_be_changed(
    path: Path,
    share_equal: bool,  # noqa: FBT001
) -> None:
    """Numbers and tuples are shared by those that are stored alike, lists are not."""
    inner = Counting()
    made: dict[str, Any] = dict.fromkeys(SAVED) | {"t": torch.zeros(3)}
    load(path, DeferredPlanner(lambda metadata: (made, inner), share_equal=share_equal))
    assert torch.equal(made.pop("t"), SAVED["t"])
    assert made == {key: value for key, value in SAVED.items() if key != "t"}
    assert made["e"] is not made["f"]
    assert len(inner.keys) == (4 if share_equal else 6)


def test_the_state_dict_follows_from_the_metadata(path: Path) -> None:
    """What is asked for is decided by what is there, in one reading of the metadata."""
    made: dict[str, Any] = {}

    def plan(metadata: Metadata) -> tuple[dict[str, Any], LoadPlanner]:
        made.update(dict.fromkeys(key for key in metadata.state_dict_metadata if key < "c"))
        return made, dcp.DefaultLoadPlanner()

    load(path, DeferredPlanner(plan))
    assert made == {"a": 1, "b": 1}


def test_a_few_values_can_be_read_while_the_load_is_planned(path: Path) -> None:
    """They are there before the plan is made, and the load goes on with the same reader."""
    reader = ReshardStorageReader(path)
    made: dict[str, Any] = {"t": torch.zeros(3)}

    def plan(metadata: Metadata) -> tuple[dict[str, Any], LoadPlanner]:
        early: dict[str, Any] = {"c": None}
        inner = ReshardLoadPlanner(flatten_state_dict=False)
        read_now(early, storage_reader=reader, planner=inner, metadata=metadata)
        assert early == {"c": (1, 2)}
        return made, ReshardLoadPlanner()

    dcp.load({}, storage_reader=reader, planner=DeferredPlanner(plan))
    assert torch.equal(made["t"], SAVED["t"])


def test_an_error_of_the_plan_is_an_error_of_the_load(path: Path) -> None:
    """What the function raises is what the load fails with."""

    def plan(metadata: Metadata) -> tuple[dict[str, Any], LoadPlanner]:
        raise PlanError("not today")

    with pytest.raises(BaseException, match="not today"):
        load(path, DeferredPlanner(plan))
