"""Every dtype, bit for bit, and every policy about casts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

import dcp_reshard
from dcp_reshard import (
    DtypeMismatchError,
    PlanOptions,
    ReshardError,
    ReshardLoadPlanner,
    ReshardStorageReader,
)
from tests.support.checkpoints import save_state, save_world
from tests.support.failures import catch_failure
from tests.support.tensors import check_same, fill_with_sentinel, indexed_tensor, snapshot
from tests.support.worlds import fake_world

FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FLOATS_8 = [
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]
INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]
COMPLEX = [torch.complex64, torch.complex128]
DTYPES = [*FLOATS, *FLOATS_8, *INTEGERS, *COMPLEX, torch.bool]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def random_bits(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Any bit pattern: NaNs with payloads, infinities, subnormal numbers, negative zeros."""
    generator = torch.Generator().manual_seed(math.prod(shape))
    high = 2 if dtype == torch.bool else 256
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.randint(high, (nbytes,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def load_failing(state: dict[str, Any], path: Path, **options: Any) -> ReshardError:
    """The error of a load that fails."""
    return catch_failure(lambda: dcp_reshard.load(state, path, no_dist=True, **options))


@pytest.mark.row("B47-B48")
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_bit_pattern_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    """Small and large tensors of the dtype come back with every bit, in whole and in parts."""
    full = {
        "scalar": random_bits((), dtype),
        "small": random_bits((7, 9), dtype),
        "large": random_bits((300, 123), dtype),
    }
    save_state(tmp_path, full)
    for dim, size in ((0, 1), (0, 7), (1, 2)):
        for rank in (0, size - 1):
            with fake_world(rank, size):
                mesh = init_device_mesh("cpu", (size,))
                state: dict[str, Any] = {"scalar": full["scalar"].clone()}
                for name in ("small", "large"):
                    part = full[name].chunk(size, dim)[rank].contiguous()
                    state[name] = DTensor.from_local(
                        part,
                        mesh,
                        [Shard(dim)],
                        run_check=False,
                        shape=full[name].shape,
                        stride=full[name].stride(),
                    )
                wanted = snapshot(state)
                fill_with_sentinel(state)
                dcp_reshard.load(state, tmp_path, no_dist=True)
                check_same(snapshot(state), wanted, where=f"dim {dim}, rank {rank} of {size}")


def load_as(path: Path, dtype: torch.dtype, policy: Any, numel: int) -> torch.Tensor:
    state = {"w": torch.zeros(numel, dtype=dtype)}
    report = dcp_reshard.load(state, path, no_dist=True, dtype_policy=policy)
    stored = report.casts[0][1]
    assert report.casts == (("w", stored, str(dtype)),)
    return state["w"]


WIDENED = [
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float64),
    (torch.float32, torch.float64),
    (torch.uint8, torch.int16),
    (torch.int16, torch.int64),
    (torch.uint16, torch.int32),
    (torch.uint32, torch.uint64),
    (torch.float8_e4m3fn, torch.float32),
    (torch.float8_e5m2, torch.float16),
    (torch.complex64, torch.complex128),
]
NARROWED = [
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float16),
    (torch.bfloat16, torch.float16),
    (torch.float16, torch.float8_e5m2),
    (torch.float8_e4m3fn, torch.float8_e5m2),
]
NEVER = [
    (torch.float32, torch.int64),
    (torch.int64, torch.float64),
    (torch.int64, torch.int32),
    (torch.complex64, torch.float32),
    (torch.float32, torch.complex64),
    (torch.bool, torch.uint8),
    (torch.uint8, torch.int8),
    (torch.uint64, torch.int64),
    (torch.int8, torch.uint16),
    (torch.int16, torch.float32),
    (torch.bool, torch.int32),
]


def pair_id(value: object) -> str:
    return name_of(value) if isinstance(value, torch.dtype) else str(value)


@pytest.mark.row("B32")
@pytest.mark.parametrize("numel", [9, 20_000])
@pytest.mark.parametrize(("stored", "wanted"), [*WIDENED, *NARROWED], ids=pair_id)
def test_casts_need_the_policy_that_allows_them(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, numel: int
) -> None:
    """Widening needs ``"widen"``, other casts between floats ``"cast"``; the values are torch's."""
    full = (
        indexed_tensor((numel,), stored)
        if numel < 100
        else indexed_tensor((100,), stored).repeat(numel // 100)
    )
    save_state(tmp_path, {"w": full})
    widens = (stored, wanted) in WIDENED
    for policy in ("exact",) if widens else ("exact", "widen"):
        state = {"w": torch.zeros(numel, dtype=wanted)}
        error = load_failing(state, tmp_path, dtype_policy=policy)
        assert isinstance(error, DtypeMismatchError)
        assert all(word in str(error) for word in ("`w`", str(stored), str(wanted), policy))
        assert not state["w"].to(torch.complex128).any()
    for policy in ("widen", "cast") if widens else ("cast",):
        loaded = load_as(tmp_path, wanted, policy, numel)
        check_same({"w": loaded}, {"w": full.to(wanted)}, where=policy)


@pytest.mark.parametrize(("stored", "wanted"), NEVER, ids=pair_id)
def test_casts_between_kinds_are_never_made(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    """No policy turns floats into integers, drops imaginary parts, or narrows integers."""
    save_state(tmp_path, {"w": indexed_tensor((5,), stored)})
    for policy in ("exact", "widen", "cast"):
        error = load_failing({"w": torch.zeros(5, dtype=wanted)}, tmp_path, dtype_policy=policy)
        assert isinstance(error, DtypeMismatchError), policy


def test_casts_that_torch_cannot_make_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    """Of float4 there is no cast, and the plan says so: the tensor before it is untouched."""
    packed = random_bits((5,), torch.uint8).view(torch.float4_e2m1fn_x2)
    save_state(tmp_path, {"a": torch.ones(3), "w": packed})
    for policy in ("widen", "cast"):
        state = {"a": torch.zeros(3), "w": torch.zeros(5)}
        error = load_failing(state, tmp_path, dtype_policy=policy)
        assert isinstance(error, DtypeMismatchError)
        assert error.fqn == "w"
        assert "torch.float4_e2m1fn_x2" in str(error)
        assert not state["a"].any()


@pytest.mark.parametrize("numel", [9, 20_000])
@pytest.mark.parametrize(
    ("stored", "wanted", "value"),
    [
        (torch.float32, torch.float16, 70000.0),
        (torch.float64, torch.float32, -1e300),
        (torch.float32, torch.bfloat16, 3.4e38),
        (torch.bfloat16, torch.float16, 1e5),
        # torch makes these 448, 448, 1.0 and NaN without a word.
        (torch.float32, torch.float8_e4m3fn, 500.0),
        (torch.float32, torch.float8_e4m3fn, float("inf")),
        (torch.float16, torch.float8_e8m0fnu, -1.0),
        (torch.float8_e5m2, torch.float8_e5m2fnuz, float("-inf")),
        (torch.float16, torch.float8_e5m2, 65000.0),
    ],
    ids=pair_id,
)
def test_casts_that_lose_a_value_are_errors(
    tmp_path: Path, stored: torch.dtype, wanted: torch.dtype, value: float, numel: int
) -> None:
    """A value that the wanted dtype has nothing near is an error that names value and tensor."""
    full = torch.ones(numel).to(stored)
    full[5] = value
    save_state(tmp_path, {"w": full})
    error = load_failing({"w": torch.zeros(numel, dtype=wanted)}, tmp_path, dtype_policy="cast")
    assert isinstance(error, DtypeMismatchError)
    assert f"1 values of {stored} do not fit into {wanted}" in str(error)
    assert repr(full[5].item()) in str(error)
    assert error.fqn == "w"


def test_infinities_and_nan_are_cast(tmp_path: Path) -> None:
    """What was not finite when stored is no overflow."""
    full = torch.tensor([float("inf"), -float("inf"), float("nan"), 1.0, 65504.0])
    save_state(tmp_path, {"w": full})
    loaded = load_as(tmp_path, torch.float16, "cast", 5)
    assert torch.equal(loaded.nan_to_num(nan=7.0), full.half().nan_to_num(nan=7.0))


def make_uneven(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (3,))
    full = indexed_tensor((100, 31), torch.bfloat16)
    return {"w": distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)}


def test_casts_of_sharded_tensors(tmp_path: Path) -> None:
    """A cast is made part by part, for any pair of layouts, through either reader."""
    save_world(tmp_path, 3, make_uneven)
    full = indexed_tensor((100, 31), torch.bfloat16).float()
    for reader in (ReshardStorageReader, dcp.FileSystemReader):
        for rank in range(4):
            with fake_world(rank, 4):
                mesh = init_device_mesh("cpu", (4,))
                state = {
                    "w": distribute_tensor(
                        torch.zeros(100, 31), mesh, [Shard(1)], src_data_rank=None
                    )
                }
                options = PlanOptions(dtype_policy="widen")
                planner = ReshardLoadPlanner(options=options)
                dcp.load(state, storage_reader=reader(tmp_path), planner=planner, no_dist=True)
                assert torch.equal(state["w"].to_local(), full.chunk(4, 1)[rank])
