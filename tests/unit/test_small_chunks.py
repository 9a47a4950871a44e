"""Small chunks: those of one form are compared with one template, and copied together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import dcp_reshard
from dcp_reshard import CorruptRecordError, ReaderOptions, template
from dcp_reshard.box import Box
from dcp_reshard.layout import LocalShard, TensorLayout
from tests.support.checkpoints import save_state

COUNT = 40
FORMS = [
    torch.arange(6, dtype=torch.float32).view(2, 3),
    torch.arange(6, dtype=torch.float32).view(3, 2).t(),
    torch.arange(7, dtype=torch.bfloat16)[1:],
    torch.arange(5, dtype=torch.int16),
    torch.tensor(3, dtype=torch.complex64),
    torch.zeros(0, 4),
]


def make_state() -> dict[str, torch.Tensor]:
    """Tensors of each form, no two with equal contents."""
    return {f"t{i}.{j}": form + i for i in range(COUNT) for j, form in enumerate(FORMS)}


def make_dest() -> dict[str, torch.Tensor]:
    return {key: torch.full_like(value, -1) for key, value in make_state().items()}


def options(**more: object) -> ReaderOptions:
    return ReaderOptions(threads=1, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("verify", ["available", "off"])
def test_forms_in_turn(tmp_path: Path, verify: str) -> None:
    """Chunks of several forms, one after the other in a file, each get their own contents."""
    save_state(tmp_path, make_state())
    dest = make_dest()
    report = dcp_reshard.load(dest, tmp_path, no_dist=True, options=options(verify=verify))
    for key, value in make_state().items():
        assert torch.equal(dest[key], value), key
    # One request for the metadata, one for its end, one for all chunks.
    assert report.requests <= 4


def test_each_form_is_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container is parsed for each form, not for each chunk."""
    parsed: list[int] = []
    real = template.find_payload

    def count(*args: object) -> object:
        parsed.append(1)
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(template, "find_payload", count)
    state = {f"t{i}": torch.full((6,), i) for i in range(COUNT)}
    save_state(tmp_path, state)
    dest = {key: torch.full_like(value, -1) for key, value in state.items()}
    dcp_reshard.load(dest, tmp_path, no_dist=True, options=options())
    assert torch.equal(torch.stack(list(dest.values())), torch.stack(list(state.values())))
    assert len(parsed) == 1


def test_parts_of_small_chunks(tmp_path: Path) -> None:
    """A destination of part of a small chunk gets that part, beside one of all of it."""
    full = torch.arange(COUNT * 6, dtype=torch.float32).view(COUNT, 2, 3)
    save_state(tmp_path, {f"t{i}": full[i].clone() for i in range(COUNT)})
    memory = torch.full((COUNT, 2, 2), -1.0)
    state = {
        f"t{i}": TensorLayout(
            f"t{i}", (2, 3), torch.float32, (LocalShard(Box((0, 1), (2, 2)), memory[i]),)
        )
        for i in range(0, COUNT, 2)
    }
    whole = {f"t{i}": torch.full((2, 3), -1.0) for i in range(1, COUNT, 2)}
    dcp_reshard.load({**state, **whole}, tmp_path, no_dist=True, options=options())
    assert torch.equal(memory[::2], full[::2, :, 1:])
    assert torch.equal(torch.stack(list(whole.values())), full[1::2])


def test_casts_among_others(tmp_path: Path) -> None:
    """Chunks that are cast and chunks that are not may be of one form."""
    save_state(tmp_path, {f"t{i}": torch.full((3,), float(i)) for i in range(COUNT)})
    dest = {
        f"t{i}": torch.full((3,), -1.0, dtype=torch.float32 if i % 2 else torch.bfloat16)
        for i in range(COUNT)
    }
    dcp_reshard.load(dest, tmp_path, no_dist=True, dtype_policy="cast", options=options())
    assert [value.tolist() for value in dest.values()] == [[float(i)] * 3 for i in range(COUNT)]


@pytest.mark.parametrize("number", [0, 17, COUNT - 1])
def test_one_of_many_is_damaged(tmp_path: Path, number: int) -> None:
    """A flipped bit in one of many chunks of one form is found, and named; nothing is copied."""
    save_state(tmp_path, {f"t{i:02}": torch.full((64,), 1000.0 + i) for i in range(COUNT)})
    (file,) = tmp_path.glob("*.distcp")
    contents = file.read_bytes()
    at = contents.index(torch.full((64,), 1000.0 + number).numpy().tobytes())
    file.write_bytes(contents[:at] + bytes([contents[at] ^ 1]) + contents[at + 1 :])
    dest = {f"t{i:02}": torch.full((64,), -1.0) for i in range(COUNT)}
    with pytest.raises(CorruptRecordError, match=f"tensor `t{number:02}`, file "):
        dcp_reshard.load(dest, tmp_path, no_dist=True, options=options())
    assert all(bool((value == -1).all()) for value in dest.values())
