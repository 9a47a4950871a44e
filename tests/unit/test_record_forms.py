"""Records of known forms are taken in one step each, and are what their opcodes make of them."""

from __future__ import annotations

import pickle
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_reshard import metadata_machine
from dcp_reshard.catalog_builder import build_catalog
from dcp_reshard.errors import CheckpointFormatError
from dcp_reshard.metadata_entries import MetadataEntry
from dcp_reshard.metadata_machine import run_metadata
from dcp_reshard.unpickle import find_class, unpickle_metadata
from tests.unit.test_unpickle import describe

NUMBERS = [0, 1, 255, 256, 65535, 65536, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 55]


def make_metadata(shapes: list[list[int]], names: list[str], *, share: bool = False) -> Metadata:
    """A tensor of four chunks along dim 0, and an object, for each name."""
    described: dict[str, Any] = {}
    stored: dict[MetadataIndex, _StorageInfo] = {}
    for n, name in enumerate(names):
        shape = shapes[n % len(shapes)]
        dtype = [torch.float32, torch.int8][n % 2]
        offsets = [
            torch.Size([i * side for side in shape[:1]] + [0] * len(shape[1:])) for i in range(4)
        ]
        chunks = [ChunkStorageMetadata(offset, torch.Size(shape)) for offset in offsets]
        whole = torch.Size([side * 4 for side in shape[:1]] + shape[1:])
        described[name] = TensorStorageMetadata(TensorProperties(dtype), whole, chunks)
        described[f"{name}.o"] = BytesStorageMetadata()
        for i, offset in enumerate(offsets[: 4 if shape else 1]):
            fqn = name if share else "".join(list(name))
            at = offset if share else torch.Size(list(offset))
            stored[MetadataIndex(fqn, at, i)] = _StorageInfo(f"__{i}_0.distcp", n << 33, 7 + n)
        stored[MetadataIndex(f"{name}.o")] = _StorageInfo("__9_0.distcp", n * 8, 8)
    return Metadata(described, {name: (name, 0) for name in names}, stored, None, "1.0.0")


def both(data: bytes) -> list[Any]:
    """What the pickle says, or what is wrong with it, with steps and without."""
    found: list[Any] = []
    for steps in (True, False):
        try:
            found.append(describe(run_metadata(data, find_class, steps=steps)))
        except (CheckpointFormatError, UnicodeDecodeError, TypeError) as error:
            found.append((type(error), str(error)))
    return found


@hypothesis.given(
    shapes=st.lists(st.lists(st.sampled_from(NUMBERS), max_size=6), min_size=1, max_size=3),
    names=st.lists(st.text(max_size=40), min_size=2, max_size=6, unique=True),
    share=st.booleans(),
    protocol=st.integers(2, 5),
)
def test_steps_make_what_opcodes_make(
    *, shapes: list[list[int]], names: list[str], share: bool, protocol: int
) -> None:
    """The same records as opcode by opcode, and as torch's own classes, whatever is shared."""
    metadata = make_metadata(shapes, names, share=share)
    fast, slow = both(pickle.dumps(metadata, protocol))
    assert fast == slow == describe(metadata)


DATA = pickle.dumps(make_metadata([[3, 300], [70000], []], ["w", "é" * 10, "s", "t" * 10, "u"]))


@hypothesis.given(st.data())
@hypothesis.settings(max_examples=400)
def test_steps_make_what_opcodes_make_of_damaged_files(data: st.DataObject) -> None:
    """Any bytes in place of a few others: the same value, or the same error."""
    start = data.draw(st.integers(2, len(DATA)))
    end = data.draw(st.integers(start, min(start + 6, len(DATA))))
    opcodes = st.sampled_from(
        list(b"(hjKMJ\x8a\x8c\x94)}]ubaestR\x85\x86\x87\x81\x88\x89N\x93q\x95.")
    )
    spliced = bytes(data.draw(st.lists(st.one_of(opcodes, st.integers(0, 255)), max_size=6)))
    fast, slow = both(DATA[:start] + spliced + DATA[end:])
    assert fast == slow


@pytest.mark.parametrize("share", [False, True])
def test_a_record_is_one_step(monkeypatch: pytest.MonkeyPatch, *, share: bool) -> None:
    """Once a form is known, no opcode inside such a record is carried out by itself."""
    steps = 0

    def counted(step: Any) -> Any:
        def count(machine: Any) -> None:
            nonlocal steps
            steps += 1
            step(machine)

        return count

    table = {op: counted(step) for op, step in metadata_machine._STEPS.items()}
    monkeypatch.setattr(metadata_machine, "_STEPS", table)
    counts = []
    for tensors in (10, 110):
        names = [f"layers.{n}.weight" for n in range(tensors)]
        metadata = make_metadata([[3, 300]], names, share=share)
        metadata.planner_data = None
        for name in names:
            del metadata.state_dict_metadata[f"{name}.o"]
            del metadata.storage_data[MetadataIndex(f"{name}.o")]
        steps = 0
        run_metadata(pickle.dumps(metadata), find_class)
        counts.append(steps)
    # Per tensor: its key, head, mark, run of chunks, and three that close them; a run of places.
    # A frame may end inside a record, which is then taken by its opcodes.
    assert counts[1] - counts[0] < 100 * 9 + 400


def test_what_a_step_left_out_of_the_memo_may_be_referred_to() -> None:
    """The machine starts again without steps: an index that is that of a chunk is no error."""
    metadata = make_metadata([[2]], ["a", "b", "c"])
    index = list(metadata.storage_data)[-2]
    metadata.planner_data = {"c": ("c",), "other": [index, index]}
    metadata = Metadata(metadata.state_dict_metadata, None, metadata.storage_data, None, "1.0.0")
    chunk = metadata.state_dict_metadata["b"].chunks[3]
    metadata.storage_meta = [chunk, chunk.offsets]
    data = pickle.dumps(metadata)
    with pytest.raises(metadata_machine._SkippedError):
        metadata_machine._Machine(data, find_class, steps=True).run()
    entry = unpickle_metadata(data, file="f")
    assert isinstance(entry, MetadataEntry)
    assert entry.storage_meta[0] is entry.state_dict_metadata["b"].chunks[3]
    assert list(build_catalog([entry], digest="").tensors) == ["a", "b", "c"]


def test_memo_indices_count_up() -> None:
    """A memo index that is not the next one is refused, before anything is allocated for it."""
    for data in (b"Nq\x01", b"Nq\x00Nq\x00", b"Nr\xff\xff\xff\x7f", b"N\x94Nq\x05"):
        with pytest.raises(CheckpointFormatError, match=r"memo index .* is the next"):
            unpickle_metadata(b"\x80\x04" + data + b".", file="f")
