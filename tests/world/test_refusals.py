"""What is refused, as docs/layouts.md lists it: each row is run, and says what is said there."""

from __future__ import annotations

import dataclasses
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import dcp_reshard
from dcp_reshard.errors import ReshardError
from tests.support.checkpoints import save_world
from tests.support.failures import catch_failure
from tests.support.strided import fsdp_over_tp
from tests.support.tensors import indexed_tensor
from tests.support.worlds import fake_world

State = dict[str, Any]
FULL = indexed_tensor((8, 3))
DOCS = Path(__file__).parents[2] / "docs" / "layouts.md"


def read_table() -> dict[str, tuple[str, list[str]]]:
    """What is refused: the error, and the phrases of its message."""
    rows = {}
    for line in DOCS.read_text().split("## What is refused")[1].splitlines():
        if line.startswith("| ") and not line.startswith(("| what |", "| --- |")):
            what, error, message = (cell.strip() for cell in line.strip("|").split(" | "))
            rows[what] = (error.strip("`"), message.split("; "))
    return rows


def load(path: Path, state: State) -> ReshardError:
    """The error of a load, which has written nothing."""
    state = {"fine": torch.full((5,), -1.0)} | state
    error = catch_failure(lambda: dcp_reshard.load(state, path, no_dist=True))
    assert bool((state["fine"] == -1).all())
    return error


def load_on_two(path: Path, make: Callable[[], State]) -> ReshardError:
    with fake_world(1, 2):
        return load(path, make())


def sharded(*, rows: int = 4, placement: Placement | None = None) -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    local, where = torch.zeros(rows, 3), placement or Shard(0)
    return DTensor.from_local(local, mesh, [where], run_check=False, shape=(8, 3), stride=(3, 1))


def of_another_dim() -> torch.Tensor:
    meta = TensorMeta(torch.Size((8, 3)), (3, 1), torch.float32)
    spec = DTensorSpec(init_device_mesh("cpu", (2,)), (Shard(2),), meta)
    return DTensor(torch.zeros(8, 3), spec, requires_grad=False)


def a_piece() -> State:
    shard = sharded()
    return {"w": shard, "piece": shard.to_local()[1]}


def inside_a_dtensor() -> torch.Tensor:
    mesh = init_device_mesh("cpu", (2,))
    inner = distribute_tensor(torch.zeros(8, 3), mesh, [Shard(0)], src_data_rank=None)
    meta = TensorMeta(torch.Size((16, 3)), (3, 1), torch.float32)
    spec = DTensorSpec(mesh, (Shard(0),), meta)
    return DTensor(inner, spec, requires_grad=False)


STORED: State = {
    "fine": indexed_tensor((5,)),
    "w": FULL,
    "piece": FULL[0].clone(),
    "pair": (torch.ones(2), 1),
    "half": 0.5,
    "step": torch.tensor(2.5),
    "text": "a",
    "none": None,
}


def quantized() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.13: they are deprecated
        return torch.quantize_per_tensor(torch.zeros(8, 3), 0.1, 0, torch.quint8)


ON_TWO: dict[str, Callable[[], State]] = {
    "`Partial` placements": lambda: {"w": sharded(rows=8, placement=Partial())},
    "a local tensor whose shape does not follow": lambda: {"w": sharded(rows=3)},
    "a placement on a dim that is not there": lambda: {"w": of_another_dim()},
    "a `DTensor` inside of a `DTensor`": lambda: {"w": inside_a_dtensor()},
    "sharded tensors inside a tuple": lambda: {"pair": (sharded(), 1)},
    "a plain tensor in the memory of a shard": a_piece,
    "expanded or overlapping memory": lambda: {"w": torch.zeros(8, 1).expand(8, 3)},
    "another global shape": lambda: {"w": torch.zeros(8, 4)},
    "two keys of one flattened name": lambda: {"a.b": torch.zeros(1), "a": {"b": torch.zeros(1)}},
}


def of_strange_layouts(path: Path) -> Iterator[ReshardError]:
    for strange in (torch.zeros(8, 3).to_sparse(), quantized()):
        yield load(path, {"w": strange})


def of_tuples(path: Path) -> Iterator[ReshardError]:
    for mine in ((torch.zeros(3), 1), (torch.zeros(2), 1, 2), (torch.zeros(2).double(), 1)):
        yield load(path, {"pair": mine})


def of_numbers(path: Path) -> Iterator[ReshardError]:
    yield load(path, {"half": torch.tensor(0)})
    yield load(path, {"step": 1})


def of_several_elements(path: Path) -> Iterator[ReshardError]:
    yield load(path, {"text": torch.zeros(2)})
    yield load(path, {"w": "a"})


def of_dicts(path: Path) -> Iterator[ReshardError]:
    yield load(path, {"none": {"a": 1}})
    yield load(path, {"text": [{"a": 1}]})


def of_wrong_records(path: Path) -> Iterator[ReshardError]:
    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", (5, 2))
        return {"w": fsdp_over_tp(indexed_tensor((11, 2)), mesh), "fine": STORED["fine"]}

    save_world(path / "wrong", 10, make)
    yield load(path / "wrong", {"w": torch.zeros(11, 2)})


def of_holes(path: Path) -> Iterator[ReshardError]:
    def make(rank: int) -> State:
        mesh = init_device_mesh("cpu", (2,))
        rows = distribute_tensor(FULL, mesh, [Shard(0)], src_data_rank=None)
        return {"w": rows, "fine": STORED["fine"]}

    metadata = save_world(path / "hole", 2, make)
    entry = metadata.state_dict_metadata["w"]
    assert isinstance(entry, TensorStorageMetadata)
    lost = entry.chunks[1]
    places = {
        index: place
        for index, place in metadata.storage_data.items()
        if (index.fqn, index.offset) != ("w", lost.offsets)
    }
    less = dataclasses.replace(
        metadata,
        state_dict_metadata=metadata.state_dict_metadata
        | {"w": dataclasses.replace(entry, chunks=entry.chunks[:1])},
        storage_data=places,
    )
    (path / "hole" / ".metadata").write_bytes(pickle.dumps(less))
    yield load(path / "hole", {"w": torch.zeros(8, 3)})


def of_ranks_that_differ(path: Path) -> Iterator[ReshardError]:
    def make(rank: int) -> State:
        return {"w": torch.zeros(rank + 1), "fine": STORED["fine"]}

    save_world(path / "differ", 2, make, use_collectives=False)
    yield load(path / "differ", {"w": torch.zeros(1)})


def of_lost_metadata(path: Path) -> Iterator[ReshardError]:
    save_world(path / "ranks", 4, lambda _: {"fine": STORED["fine"]}, use_collectives=False)
    (path / "ranks" / "__2.metadata").unlink()
    yield load(path / "ranks", {})


ALONE: dict[str, Callable[[Path], Iterator[ReshardError]]] = {
    "sparse and quantized tensors": of_strange_layouts,
    "tensors in a tuple that do not fit": of_tuples,
    "a number that a tensor of one element cannot have": of_numbers,
    "several elements where an object is stored": of_several_elements,
    "a dict or a list of dicts": of_dicts,
    "a tensor that stock recorded wrongly": of_wrong_records,
    "chunks that overlap or leave a hole": of_holes,
    "one key of several shapes": of_ranks_that_differ,
    "metadata of a rank missing": of_lost_metadata,
}


@pytest.mark.parametrize("what", read_table())
def test_a_row_of_the_table(tmp_path: Path, what: str) -> None:
    """The error is of the class that the docs say, with the words that they say, and a name."""
    dcp.save(STORED, checkpoint_id=tmp_path, no_dist=True)
    (start,) = [start for start in (*ON_TWO, *ALONE) if what.startswith(start)]
    if start in ON_TWO:
        errors = [load_on_two(tmp_path, ON_TWO[start])]
    else:
        errors = list(ALONE[start](tmp_path))
    kind, phrases = read_table()[what]
    patterns = [".*".join(map(re.escape, phrase.strip("`").split("..."))) for phrase in phrases]
    for error in errors:
        assert type(error).__name__ == kind, error
        assert any(re.search(pattern, str(error)) for pattern in patterns), error
        assert error.fqn is not None or "`" in str(error)
    for pattern in patterns:
        assert any(re.search(pattern, str(error)) for error in errors), (pattern, errors)


def test_all_that_is_listed_here_is_in_the_table() -> None:
    """No row was taken out of the docs while it is still refused."""
    rows = list(read_table())
    assert all(any(row.startswith(start) for row in rows) for start in (*ON_TWO, *ALONE))
    assert len(rows) == len(ON_TWO) + len(ALONE)
