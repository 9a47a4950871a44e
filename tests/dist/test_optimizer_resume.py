"""Optimizers saved by real processes of one layout, and restored by those of another."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

import dcp_reshard
from dcp_reshard import (
    ReshardStorageReader,
    load_optimizer,
    load_sharded_optimizer_state_dict,
)
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

CHANGES = [
    ("fsdp2-4", "fsdp2-3"),
    ("fsdp1-2", "fsdp1-3"),
    ("fsdp2xtp-2x2", "fsdp2xtp-4x1"),
    ("hsdp-2x2", "fsdp2-3"),
]
"""Layout that saves, and layout that loads, in every way there is, for every optimizer."""

PAIRS = [
    ("fsdp1-2-flat", "fsdp1-3-flat"),
    ("fsdp1-2-flat", "fsdp1-3"),
    ("fsdp1-2", "fsdp1-hybrid"),
    ("fsdp1-hybrid", "fsdp1-ddp-flat"),
    ("fsdp1-2", "fsdp2xtp-2x2"),
]
"""More layouts that save, and that load."""

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
FORMS = ["nested", "flattened"]


@dataclass(frozen=True, slots=True)
class Run:
    """A training by the ranks of one layout, cut short; pickled to them."""

    layout: str
    optimizer: str = "adamw"
    grouped: bool = True

    @property
    def size(self) -> int:
        return LAYOUTS[self.layout][0]

    def build(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = LAYOUTS[self.layout][1](Net())
        if self.optimizer == "adafactor":
            freeze_what_it_cannot_step(model)
        return model, make_optimizer(self.optimizer, model, grouped=self.grouped)


def freeze_what_it_cannot_step(model: nn.Module) -> None:
    """Adafactor of torch 2.13 fails on a sharded DTensor of two dims: norms of its factors."""
    for param in model.parameters():
        param.requires_grad_(not (isinstance(param, DTensor) and param.ndim > 1))


def save(rank: int, run: Run, path: str) -> list[float]:
    model, optimizer = run.build()
    losses = train(model, optimizer, start=0, steps=STEPS)
    save_training(path, model, optimizer)
    return losses


def save_both_forms(rank: int, run: Run, path: str) -> None:
    model, optimizer = run.build()
    train(model, optimizer, start=0, steps=STEPS)
    for form in FORMS:
        save_training(path + form, model, optimizer, flattened=form == "flattened")


def resume(rank: int, run: Run, path: str, again: str) -> list[float]:
    model, optimizer = run.build()
    load_model(path, model)
    load_optimizer(model, optimizer, path, optimizer_key="train.optim")
    save_training(again, model, optimizer)
    return train(model, optimizer, start=STEPS, steps=STEPS)


def optimizer_of(path: str) -> dict[str, Any]:
    """What a checkpoint holds of the optimizer; names in groups sorted, as no order is kept."""
    saved: dict[str, Any] = read_whole(path)["train"]["optim"]
    for group in saved.get("param_groups", ()):
        group["params"] = sorted(group["params"])
    return saved


def load_live(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, form: str) -> None:
    load_optimizer(model, optimizer, path + form, optimizer_key="train.optim")


def load_template(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, form: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    template = get_optimizer_state_dict(model, optimizer, options=options)
    dcp_reshard.load({"train": {"optim": template}}, path + form)
    set_optimizer_state_dict(model, optimizer, template, options=options)


def load_sharded(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, form: str) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=form == "flattened")
    params, reader = get_model_state_dict(model), ReshardStorageReader(path + form)
    loaded = load_sharded_optimizer_state_dict(params, "train.optim", reader)
    set_optimizer_state_dict(model, optimizer, loaded["train"]["optim"], options=options)


def load_whole(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, form: str) -> None:
    """What torch makes of the state that every rank has in full; it can do that nested only."""
    whole = read_whole(path + "nested")["train"]["optim"]
    if isinstance(model, FullyShardedDataParallel):
        optimizer.load_state_dict(
            FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, whole)
        )
        return
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, whole, options=options)


def resume_in_every_way(rank: int, run: Run, path: str, again: str) -> list[list[float]]:
    """Losses in each form and way; with Adafactor, the first are those of the oracle."""
    ways = [load_live, load_template, load_sharded]
    if run.optimizer == "adafactor":
        # In torch 2.13 an Adafactor without state cannot be stepped, as its templates are, by a
        # rank that FSDP1 has left without elements: it divides by their number.
        ways = [load_whole, load_live] if "fsdp1" in run.layout else [load_whole, *ways]
    losses = []
    for form in FORMS:
        for way in ways:
            model, optimizer = run.build()
            load_model(path + form, model)
            way(model, optimizer, path, form)
            if way is load_live:
                save_training(again + form, model, optimizer, flattened=form == "flattened")
            losses.append(train(model, optimizer, start=STEPS, steps=STEPS))
    return losses


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize(("source", "dest"), CHANGES)
def test_every_way_to_load_goes_on_as_if_never_interrupted(
    source: str, dest: str, optimizer: str, tmp_path: Path
) -> None:
    """Saved again from the new layout, a checkpoint holds the same bits, and losses continue.

    Adafactor takes norms of what a rank holds, so with torch its losses are those of a layout: here
    those of the new layout, given the whole state by torch. It trains what `Run.build` leaves it.
    """
    first, again = str(tmp_path / "first-"), str(tmp_path / "again-")
    one, other = Run(source, optimizer), Run(dest, optimizer)
    gloo_world(one.size, save_both_forms, one, first)
    ranks = gloo_world(other.size, resume_in_every_way, other, first, again)
    for form in FORMS:
        assert same(optimizer_of(first + form), optimizer_of(again + form))
    wanted = losses_of(optimizer, 2 * STEPS)[STEPS:]
    for losses in ranks:
        for own in losses:
            if optimizer == "adafactor":
                assert own == losses[0]
            else:
                torch.testing.assert_close(own, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("source", "dest"), PAIRS)
def test_what_was_saved_is_there_again_and_training_goes_on(
    source: str, dest: str, tmp_path: Path
) -> None:
    """Saved again from the new layout, a checkpoint holds the same bits, and losses continue."""
    grouped = "flat" not in source + dest
    one, other = (Run(layout, grouped=grouped) for layout in (source, dest))
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


def step_with_factors(rank: int, path: str) -> None:
    model = LAYOUTS["fsdp2-3"][1](Net())
    optimizer = make_optimizer("adafactor", model)
    load_optimizer(model, optimizer, path, optimizer_key="train.optim")
    saved = read_whole(path)["train"]["optim"]["state"]
    for name, param in model.named_parameters():
        state = optimizer.state[param]
        for kind in ("row_var", "col_var") if param.ndim > 1 else ("variance",):
            assert torch.equal(state[kind].full_tensor(), saved[name][kind])
    with pytest.raises(RuntimeError, match="in-place operations that require placement changes"):
        train(model, optimizer, start=STEPS, steps=1)


def test_factored_moments_are_restored_where_torch_cannot_step_with_them(tmp_path: Path) -> None:
    """Each is whole on every rank, though an Adafactor of torch 2.13 has no use for that yet."""
    gloo_world(1, save, Run("one", "adafactor"), str(tmp_path))
    gloo_world(3, step_with_factors, str(tmp_path))


def resume_over_tp(rank: int, run: Run, path: str) -> list[float]:
    trained, its_optimizer = run.build()
    train(trained, its_optimizer, start=0, steps=STEPS)
    model, optimizer = run.build()
    load_model(path, model)
    load_optimizer(model, optimizer, path, optimizer_key="train.optim")
    for param, own in zip(trained.parameters(), model.parameters(), strict=True):
        wanted, found = its_optimizer.state[param], optimizer.state[own]
        assert wanted.keys() == found.keys()
        for kind, value in wanted.items():
            torch.testing.assert_close(found[kind], value, rtol=1e-4, atol=1e-6)
    return train(model, optimizer, start=STEPS, steps=STEPS)


@pytest.mark.parametrize("dest", ["fsdp1xtp-2x2", "fsdp1xtp-2x2-flat"])
@pytest.mark.parametrize("source", ["fsdp2xtp-2x2", "fsdp2-3"])
def test_fsdp1_over_tensor_parallelism_goes_on(source: str, dest: str, tmp_path: Path) -> None:
    """Row 27: each rank has the state that it would have if it had trained from the start.

    What torch does is not run here: its `get_optimizer_state_dict` may not end in this layout.
    """
    grouped = "flat" not in dest
    one, other = (Run(layout, grouped=grouped) for layout in (source, dest))
    gloo_world(one.size, save, one, str(tmp_path))
    losses = gloo_world(other.size, resume_over_tp, other, str(tmp_path))
    wanted = losses_of("adamw", 2 * STEPS, grouped=grouped)[STEPS:]
    for own in losses:
        torch.testing.assert_close(own, wanted, rtol=1e-5, atol=0)


class Convolution(nn.Module):
    def __init__(self, memory: torch.memory_format) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 2).to(memory_format=memory)


def load_convolution(rank: int, path: str, memory: torch.memory_format) -> str:
    model = FullyShardedDataParallel(Convolution(memory), device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters())
    try:
        load_optimizer(model, optimizer, path)
    except CheckpointException as error:
        return str(error)
    return ""


def test_parameters_that_fsdp1_flattens_in_another_order_are_refused(tmp_path: Path) -> None:
    """torch saves their state in the order of memory, and others save it in that of the dims."""
    model = Convolution(torch.contiguous_format)
    optimizer = torch.optim.AdamW(model.parameters())
    osd = get_optimizer_state_dict(model, optimizer)
    dcp.save({"optimizer": osd}, checkpoint_id=tmp_path)
    for memory, says in ((torch.contiguous_format, ""), (torch.channels_last, "`layer.weight`")):
        for message in gloo_world(2, load_convolution, str(tmp_path), memory):
            assert says in message if says else not message
