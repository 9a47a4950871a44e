"""Optimizers saved by real processes of one layout, and restored by those of another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dcp_reshard import load_optimizer
from tests.support.training import (
    LAYOUTS,
    Net,
    load_model,
    losses_of,
    make_optimizer,
    read_whole,
    same,
    save_training,
    train,
)
from tests.support.worlds import gloo_world

pytestmark = [
    pytest.mark.dist,
    # What torch's own FSDP1 warns of when it saves, and what it deprecates.
    pytest.mark.filterwarnings("ignore::UserWarning:torch[.]distributed[.].*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:torch[.]distributed[.].*"),
    pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy:FutureWarning"),
    pytest.mark.filterwarnings("ignore:When using ``NO_SHARD``:UserWarning"),
]

PAIRS = [
    ("fsdp2-4", "fsdp2-3", "nested"),
    ("fsdp2-4", "fsdp2-3", "flattened"),
    ("fsdp1-2", "fsdp1-3", "nested"),
    ("fsdp1-2", "fsdp1-3", "flattened"),
    ("fsdp1-2-flat", "fsdp1-3-flat", "nested"),
    ("fsdp1-2-flat", "fsdp1-3", "nested"),
    ("fsdp1-2", "fsdp1-hybrid", "nested"),
    ("fsdp1-hybrid", "fsdp1-ddp-flat", "nested"),
    ("fsdp2xtp-2x2", "fsdp2xtp-4x1", "nested"),
    ("hsdp-2x2", "fsdp2-3", "nested"),
    ("fsdp1-2", "fsdp2xtp-2x2", "nested"),
]
"""Layout that saves, layout that loads, and form of the optimizer's state dict."""

# Two halves of a sum of two equal numbers are exact, so these compute what one process does.
EXACT = [
    ("adamw", "fsdp2-2", "one"),
    ("adamw", "one", "fsdp2-2"),
    ("sgd", "fsdp2-2", "fsdp1-2"),
    ("sgd", "fsdp1-2", "one"),
    # Factored moments. torch 2.13 cannot step with a sharded DTensor of two dims.
    ("adafactor", "one", "one"),
    ("adafactor", "one", "fsdp1-ddp"),
    ("adafactor", "fsdp1-ddp", "one"),
]
"""Optimizer, layout that saves, layout that loads."""

STEPS = 3


@dataclass(frozen=True, slots=True)
class Run:
    """A training by the ranks of one layout, cut short; pickled to them."""

    layout: str
    optimizer: str = "adamw"
    grouped: bool = True
    flattened: bool = False

    @property
    def size(self) -> int:
        return LAYOUTS[self.layout][0]

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = LAYOUTS[self.layout][1](Net())
        return model, make_optimizer(self.optimizer, model, grouped=self.grouped)


def save(rank: int, run: Run, path: str) -> list[float]:
    model, optimizer = run.build()
    losses = train(model, optimizer, start=0, steps=STEPS)
    save_training(path, model, optimizer, flattened=run.flattened)
    return losses


def resume(rank: int, run: Run, path: str, again: str) -> list[float]:
    model, optimizer = run.build()
    load_model(path, model)
    load_optimizer(model, optimizer, path, optimizer_key="train.optim")
    save_training(again, model, optimizer, flattened=run.flattened)
    return train(model, optimizer, start=STEPS, steps=STEPS)


def optimizer_of(path: str) -> dict[str, Any]:
    """What a checkpoint holds of the optimizer; names in groups sorted, as no order is kept."""
    saved: dict[str, Any] = read_whole(path)["train"]["optim"]
    for group in saved.get("param_groups", ()):
        group["params"] = sorted(group["params"])
    return saved


@pytest.mark.parametrize(("source", "dest", "form"), PAIRS)
def test_what_was_saved_is_there_again_and_training_goes_on(
    source: str, dest: str, form: str, tmp_path: Path
) -> None:
    """Saved again from the new layout, a checkpoint holds the same bits, and losses continue."""
    grouped = "flat" not in source + dest
    flattened = form == "flattened"
    one, other = (Run(layout, grouped=grouped, flattened=flattened) for layout in (source, dest))
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    gloo_world(one.size, save, one, first)
    losses = gloo_world(other.size, resume, other, first, again)
    assert same(optimizer_of(first), optimizer_of(again))
    wanted = losses_of("adamw", 2 * STEPS, grouped=grouped)[STEPS:]
    for own in losses:
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("optimizer", "source", "dest"), EXACT)
def test_losses_are_those_of_a_training_that_was_never_interrupted(
    optimizer: str, source: str, dest: str, tmp_path: Path
) -> None:
    """Where two layouts compute the same sums, every later loss is the same to the last bit."""
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    gloo_world(LAYOUTS[source][0], save, Run(source, optimizer), first)
    losses = gloo_world(LAYOUTS[dest][0], resume, Run(dest, optimizer), first, again)
    assert all(own == losses_of(optimizer, 2 * STEPS)[STEPS:] for own in losses)


def train_through(rank: int, run: Run) -> list[float]:
    return train(*run.build(), start=0, steps=2 * STEPS)[STEPS:]


def test_factored_moments_of_pieces_go_on_in_the_layout_that_has_the_pieces(tmp_path: Path) -> None:
    """Adafactor over FSDP1 sees pieces without rows, and resumes with them bit for bit."""
    run = Run("fsdp1-2", "adafactor")
    first, again = str(tmp_path / "first"), str(tmp_path / "again")
    gloo_world(2, save, run, first)
    assert gloo_world(2, resume, run, first, again) == gloo_world(2, train_through, run)
