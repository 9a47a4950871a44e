"""Memory in any order, on both sides: strides, views, parameters, no memory at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import LayoutError
from tests.support.checkpoints import save_state
from tests.support.failures import catch_failure
from tests.support.tensors import check_same, indexed_tensor, snapshot
from tests.support.worlds import fake_world

SHAPE = (6, 8, 40, 24)
"""Large enough to be read by range, and with the four dims that `channels_last` needs."""


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with the bytes in the order of the reversed dims."""
    dims = tuple(reversed(range(tensor.ndim)))
    return tensor.permute(dims).contiguous().permute(dims)


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def every_other(tensor: torch.Tensor) -> torch.Tensor:
    """The same values in every other column of wider memory."""
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.shape[-1]), 77)
    wide[..., ::2] = tensor
    return wide[..., ::2]


def windowed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values inside of a frame."""
    frame = tensor.new_full([side + 2 for side in tensor.shape], 77)
    window = frame[tuple(slice(1, side + 1) for side in tensor.shape)]
    window.copy_(tensor)
    return window


MEMORY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": torch.Tensor.contiguous,
    "transposed": transposed,
    "channels_last": channels_last,
    "every_other": every_other,
    "windowed": windowed,
}


@pytest.mark.parametrize("dest", MEMORY.values(), ids=MEMORY)
@pytest.mark.parametrize("stored", MEMORY.values(), ids=MEMORY)
def test_any_memory_order_on_both_sides(
    tmp_path: Path,
    stored: Callable[[torch.Tensor], torch.Tensor],
    dest: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Values land by index, whatever the strides stored and wanted; other memory is left alone."""
    shapes = {"large": SHAPE, "small": (2, 3, 4, 2)}
    full = {name: indexed_tensor(shape) for name, shape in shapes.items()}
    save_state(tmp_path, {name: stored(tensor) for name, tensor in full.items()})
    state = {name: dest(torch.full(shape, -1.0)) for name, shape in shapes.items()}
    memory = {name: (t.data_ptr(), t.stride()) for name, t in state.items()}
    storages = {
        name: torch.as_strided(t, (t.untyped_storage().nbytes() // 4,), (1,), 0)
        for name, t in state.items()
    }
    dcp_reshard.load(state, tmp_path, no_dist=True)
    for name, tensor in state.items():
        assert torch.equal(tensor, full[name]), name
        assert (tensor.data_ptr(), tensor.stride()) == memory[name]
        around = storages[name].numel() - tensor.numel()
        assert int((storages[name] == 77).sum()) == around + int((full[name] == 77).sum()), name


def test_sharded_dest_with_memory_in_another_order(tmp_path: Path) -> None:
    """Column shards whose local memory is transposed, of a tensor that was stored transposed."""
    full = indexed_tensor((260, 90), torch.float64)
    save_state(tmp_path, {"rows": full, "columns": transposed(full)})
    for rank in range(4):
        with fake_world(rank, 4):
            mesh = init_device_mesh("cpu", (4,))
            part = full.chunk(4, 1)[rank]
            state = {
                name: DTensor.from_local(
                    transposed(torch.full_like(part, -1)),
                    mesh,
                    [Shard(1)],
                    run_check=False,
                    shape=full.shape,
                    stride=(1, full.shape[0]),
                )
                for name in ("rows", "columns")
            }
            report = dcp_reshard.load(state, tmp_path, no_dist=True)
            for name, tensor in state.items():
                assert torch.equal(tensor.to_local(), part), (name, rank)
            # Where both sides have columns as lines of memory, no other copy is made.
            assert report.bytes_direct == part.numel() * 8


def test_views_and_lazy_conjugates(tmp_path: Path) -> None:
    """Destinations that negate or conjugate on the fly hold the stored values afterwards."""
    full = indexed_tensor((3, 5), torch.complex64)
    save_state(tmp_path, {"conj": full, "imag": full.imag.clone()})
    state = {
        "conj": torch.zeros(3, 5, dtype=torch.complex64).conj(),
        "imag": torch.zeros(3, 5, dtype=torch.complex64).conj().imag,
    }
    assert state["conj"].is_conj()
    assert state["imag"].is_neg()
    dcp_reshard.load(state, tmp_path, no_dist=True)
    check_same(snapshot(state), {"conj": full, "imag": full.imag})


def test_parameters_are_filled_without_autograd(tmp_path: Path) -> None:
    """Leaves that require gradients, and tensors of inference mode, are filled in place."""
    full = indexed_tensor((90, 70))
    save_state(tmp_path, {"leaf": full, "view": full, "inference": full})
    with torch.inference_mode():
        inference = torch.zeros(90, 70)
    leaf = torch.nn.Parameter(torch.zeros(90, 70))
    base = torch.nn.Parameter(torch.zeros(70, 90))
    state = {"leaf": leaf, "view": base.t(), "inference": inference}
    dcp_reshard.load(state, tmp_path, no_dist=True)
    assert torch.equal(leaf, full)
    assert torch.equal(base.t(), full)
    assert torch.equal(inference, full)
    assert leaf.requires_grad
    assert leaf.grad_fn is None


@pytest.mark.row("B49")
def test_meta_tensors_are_replaced(tmp_path: Path) -> None:
    """Destinations without memory get some, plain and sharded, nested and not."""
    full = indexed_tensor((30, 4), torch.bfloat16)
    save_state(tmp_path, {"model": {"w": full}, "list": [full], "few": full[:2].clone()})
    for rank in range(3):
        with fake_world(rank, 3):
            mesh = init_device_mesh("cpu", (3,))
            meta = distribute_tensor(full.to("meta"), mesh, [Shard(0)], src_data_rank=None)
            few = distribute_tensor(full[:2].to("meta"), mesh, [Shard(0)], src_data_rank=None)
            state: dict[str, Any] = {
                "model": {"w": meta},
                "list": [full.to("meta")],
                "few": few,
            }
            dcp_reshard.load(state, tmp_path, no_dist=True)
            loaded = state["model"]["w"]
            assert isinstance(loaded, DTensor)
            assert loaded.placements == meta.placements
            assert loaded.shape == full.shape
            assert torch.equal(loaded.to_local(), full.chunk(3)[rank])
            assert torch.equal(state["list"][0], full)
            assert not state["few"].to_local().is_meta
            assert torch.equal(state["few"].to_local(), full[:2][rank : rank + 1])


def test_meta_tensors_stay_if_the_plan_fails(tmp_path: Path) -> None:
    """A load that fails before its plan is made leaves the caller's state dict as it was."""
    save_state(tmp_path, {"w": indexed_tensor((3,))})
    state = {"w": torch.empty(3, device="meta"), "absent": torch.zeros(1)}
    before = dict(state)
    assert "absent" in str(catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True)))
    assert all(state[key] is before[key] for key in before)


@pytest.mark.row("B49")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(4, 1).expand(4, 3),
        lambda: torch.zeros(6).as_strided((4, 3), (1, 1)),
        lambda: torch.zeros(9).unfold(0, 3, 2),
    ],
    ids=["expanded", "strided", "unfolded"],
)
def test_elements_that_share_memory_are_refused(
    tmp_path: Path, make: Callable[[], torch.Tensor]
) -> None:
    """A destination in which two elements are one place in memory cannot hold two values."""
    save_state(tmp_path, {"fine": indexed_tensor((5,)), "shared": indexed_tensor((4, 3))})
    state = {"fine": torch.zeros(5), "shared": make()}
    error = catch_failure(lambda: dcp_reshard.load(state, tmp_path, no_dist=True))
    assert isinstance(error, LayoutError)
    assert error.fqn == "shared"
    assert "share memory" in str(error)
    assert not state["fine"].any()
