"""`shard_parameter` with real processes, against torch's own function."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch.distributed._shard import shard_parameter as torch_shard_parameter
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from dcp_reshard import LayoutError, shard_parameter, sharded_parameter
from tests.support.tensors import indexed_tensor
from tests.support.worlds import gloo_world

pytestmark = pytest.mark.dist

SHAPES = [(6, 4), (7, 3), (5, 9), (1, 2), (3,), (2, 3, 5), (4, 0)]


def make_module(
    shape: tuple[int, ...], *, values: bool, dtype: torch.dtype = torch.float32
) -> torch.nn.Module:
    module = torch.nn.Module()
    full = indexed_tensor(shape, dtype)
    tensor = full if values else torch.full_like(full, -1)
    module.weight = torch.nn.Parameter(tensor, requires_grad=dtype.is_floating_point)
    return module


def make_spec(dim: int, ranks: list[int]) -> ChunkShardingSpec:
    return ChunkShardingSpec(dim=dim, placements=[f"rank:{rank}/cpu" for rank in ranks])


def describe(sharded: Any) -> tuple[Any, ...]:
    """All that can be said of a ShardedTensor but whether it wants a gradient."""
    assert isinstance(sharded, ShardedTensor)
    [shard] = sharded.local_shards()
    shards = sharded.metadata().shards_metadata
    return (
        [(m.shard_offsets, m.shard_sizes, str(m.placement)) for m in shards],
        tuple(sharded.size()),
        sharded.dtype,
        shard.tensor.tolist(),
        shard.tensor.is_leaf,
        shard.metadata.shard_offsets,
        str(sharded.sharding_spec()),
        shard.tensor.untyped_storage().nbytes() >= shard.tensor.nbytes,
    )


def compare(rank: int, size: int) -> tuple[int, int]:
    """Shard by both functions, in all cases: a world of ranks costs more than they do."""
    compared = refused = 0
    orders = {0: list(range(size)), size - 1: list(range(size))[::-1]}
    for shape in SHAPES:
        for dim, (src_rank, ranks) in itertools.product(range(-1, len(shape)), orders.items()):
            module = make_module(shape, values=rank == src_rank)
            before = module.weight
            if -(-shape[dim] // size) * (size - 1) > shape[dim]:
                # torch's function breaks here on the source rank, and the others wait for it.
                with pytest.raises(LayoutError, match=r"cannot be cut along dim -?\d into"):
                    shard_parameter(module, "weight", make_spec(dim, ranks), src_rank)
                assert module.weight is before
                refused += 1
                continue
            shard_parameter(module, "weight", make_spec(dim, ranks), src_rank)
            other = make_module(shape, values=rank == src_rank)
            torch_shard_parameter(other, "weight", make_spec(dim, ranks), src_rank)
            assert isinstance(module.weight, torch.nn.Parameter)
            assert describe(module.weight) == describe(other.weight), (shape, dim, src_rank)
            full = indexed_tensor(shape)
            parts = [*full.chunk(size, dim), *[full.narrow(dim, 0, 0)] * size]
            [shard] = module.weight.local_shards()
            assert torch.equal(shard.tensor, parts[ranks.index(rank)])
            compared += 1
    return compared, refused


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_shards_are_those_of_torchs_own_function(size: int) -> None:
    """Metadata and values of every shard are torch's, for uneven sizes, any dim and any source."""
    counts = gloo_world(size, compare, size)
    assert len(set(counts)) == 1
    compared, refused = counts[0]
    assert compared >= 20
    assert bool(refused) is (size > 2)


def shard_in_small_rounds(rank: int) -> None:
    sharded_parameter._ROUND_BYTES = 64
    for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool, torch.int16):
        for dim in (0, 1, 2):
            module = make_module((3, 7, 5), values=rank == 2, dtype=dtype)
            module.weight.requires_grad_(False)
            shard_parameter(module, "weight", make_spec(dim, [1, 0, 2]), 2)
            [shard] = module.weight.local_shards()
            wanted = indexed_tensor((3, 7, 5), dtype).chunk(3, dim)[[1, 0, 2].index(rank)]
            assert shard.tensor.dtype == dtype
            assert torch.equal(
                shard.tensor.view(torch.uint8), wanted.contiguous().view(torch.uint8)
            )
            assert not module.weight.requires_grad
            assert not shard.tensor.requires_grad


def test_small_rounds_and_any_dtype() -> None:
    """Sent a few elements at a time, shards of all dtypes arrive; frozen parameters stay frozen."""
    gloo_world(3, shard_in_small_rounds)


def shard_in_a_subgroup(rank: int) -> list[float] | None:
    group = dist.new_group([2, 1])
    if rank == 0:
        return None
    # Ranks of a spec are global; the source is a rank of the group, whose order is 1, 2.
    module = make_module((5, 2), values=rank == 2)
    shard_parameter(module, "weight", make_spec(0, [2, 1]), 1, group)
    [shard] = module.weight.local_shards()
    return shard.tensor[:, 0].tolist()


def test_a_subgroup_shards_by_itself() -> None:
    """Within a process group the source is counted in the group, placements are global ranks."""
    assert gloo_world(3, shard_in_a_subgroup) == [None, [6.0, 8.0], [0.0, 2.0, 4.0]]


class NoScatter(dist.ProcessGroup):
    """A backend that can gather and broadcast, and has no scatter."""

    def __init__(self, inner: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.inner = inner

    def allgather(self, *args: Any) -> Any:
        return self.inner.allgather(*args)

    def broadcast(self, *args: Any) -> Any:
        return self.inner.broadcast(*args)

    def scatter(self, *args: Any) -> Any:
        del args
        raise RuntimeError("Backend noscatter does not support scatter")

    def getBackendName(self) -> str:  # noqa: N802  torch's name
        return "noscatter"


def shard_without_scatter(rank: int) -> list[float]:
    def create(store: Any, rank: int, size: int, timeout: Any) -> NoScatter:
        return NoScatter(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)

    dist.Backend.register_backend("noscatter", create, devices=["cpu"])
    group = dist.new_group(backend="noscatter")
    sharded_parameter._ROUND_BYTES = 32
    module = make_module((5, 2), values=rank == 1)
    shard_parameter(module, "weight", make_spec(0, [0, 1, 2]), 1, group)
    [shard] = module.weight.local_shards()
    return shard.tensor[:, 0].tolist()


def test_a_backend_without_scatter_broadcasts() -> None:
    """Where there is no scatter, pieces are broadcast, and the shards are the same."""
    assert gloo_world(3, shard_without_scatter) == [[0.0, 2.0], [4.0, 6.0], [8.0]]


def with_weight(tensor: torch.Tensor) -> torch.nn.Module:
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(tensor)
    return module


W = torch.zeros(4, 3)
Change = Callable[[bool], dict[str, Any]]
# What is changed of a call that would succeed, given whether this is rank 1, and what all are told.
CASES: dict[str, tuple[Change, str]] = {
    "spec": (
        lambda odd: {"sharding_spec": make_spec(1 if odd else 0, [0, 1, 2])},
        r"`weight`: ranks differ in the `sharding_spec`: .*dim=0.* on ranks \[0, 2\]; .*dim=1",
    ),
    "placements": (
        lambda odd: {"sharding_spec": make_spec(0, [0, 2, 1] if odd else [0, 1, 2])},
        r"'rank:2/cpu'\]\) on ranks \[0, 2\]; .*'rank:1/cpu'\]\) on ranks \[1\]",
    ),
    "source": (
        lambda odd: {"src_rank": 2 if odd else 0},
        r"ranks differ in the `src_rank`: 0 on ranks \[0, 2\]; 2 on ranks \[1\]",
    ),
    "shape": (
        lambda odd: {"module": with_weight(torch.zeros(4, 4) if odd else W)},
        r"shape \(4, 3\) of .* on ranks \[0, 2\]; shape \(4, 4\) of .* on ranks \[1\]",
    ),
    "dtype": (
        lambda odd: {"module": with_weight(W.double() if odd else W)},
        r"float32, .* on ranks \[0, 2\]; .*float64, .* on ranks \[1\]",
    ),
    "requires_grad": (
        lambda odd: {"module": with_weight(W).requires_grad_(not odd)},
        r"requires_grad=True on ranks \[0, 2\]; .*=False on ranks \[1\]",
    ),
    "missing": (
        lambda odd: {"param_name": "bias" if odd else "weight"},
        r"Module has no parameter `bias`",
    ),
    "buffer": (
        lambda odd: (
            {"module": torch.nn.BatchNorm1d(3), "param_name": "running_mean"} if odd else {}
        ),
        r"`running_mean` of BatchNorm1d is a Tensor, not a parameter",
    ),
    "not a tensor": (
        lambda odd: {"param_name": "training" if odd else "weight"},
        r"`training` of Module is a bool, not a parameter",
    ),
    "not contiguous": (
        lambda odd: {"module": with_weight(torch.zeros(3, 4).t())} if odd else {},
        r"`weight` of shape \(4, 3\) and strides \(1, 4\) is not contiguous",
    ),
    "sparse": (
        lambda odd: {"module": with_weight(W.to_sparse())} if odd else {},
        r"`weight` is a Parameter of layout torch.sparse_coo",
    ),
    "device": (
        lambda odd: {
            "sharding_spec": ChunkShardingSpec(
                0, [f"rank:{rank}/{'cuda:7' if odd else 'cpu'}" for rank in range(3)]
            )
        },
        r"CUDA",
    ),
    "no such source": (lambda _: {"src_rank": 3}, r"no source rank 3 in a group of 3"),
    "dim": (lambda _: {"sharding_spec": make_spec(2, [0, 1, 2])}, r"Invalid sharding dim: 2"),
    "too few shards": (
        lambda _: {"sharding_spec": make_spec(0, [0, 1])},
        r"each of 3 ranks must hold one shard, but the spec .* to ranks \[0, 1\]",
    ),
    "two shards on a rank": (
        lambda _: {"sharding_spec": make_spec(0, [0, 1, 1])},
        r"but the spec gives them to ranks \[0, 1, 1\]",
    ),
    "rank outside": (
        lambda _: {"sharding_spec": make_spec(0, [0, 1, 3])},
        r"Global rank 3 does not exist",
    ),
    "another spec": (lambda _: {"sharding_spec": "rows"}, r"str is not a ChunkShardingSpec"),
}


def shard_wrongly(rank: int) -> dict[str, tuple[str, bool]]:
    outcome: dict[str, tuple[str, bool]] = {}
    for name, (change, _) in CASES.items():
        arguments = {
            "module": with_weight(W),
            "param_name": "weight",
            "sharding_spec": make_spec(0, [0, 1, 2]),
            "src_rank": 0,
        } | change(rank == 1)
        before = dict(arguments["module"].named_parameters())
        try:
            shard_parameter(**arguments)
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        after = dict(arguments["module"].named_parameters())
        untouched = all(after[key] is before[key] for key in before)
        outcome[name] = (text, untouched)
    return outcome


def test_what_does_not_fit_is_an_error_on_all_ranks() -> None:
    """Whatever one rank does wrong, or two do differently, all are told, and nothing is changed."""
    outcomes = gloo_world(3, shard_wrongly)
    for name, (_, message) in CASES.items():
        for outcome in outcomes:
            text, untouched = outcome[name]
            assert re.search(message, text), (name, text)
            assert untouched, name
    assert outcomes[1]["missing"][0].startswith("MissingParameterError")
    assert outcomes[0]["missing"][0].startswith("LayoutError: rank 1 of 3: ")


@hypothesis.given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 20))
def test_rounds_send_every_element_once(rows: int, width: int, limit: int) -> None:
    """The rectangles of all rounds tile the matrix, and none is larger than the limit."""
    counts = torch.zeros(rows, width)
    for part in sharded_parameter._rounds(rows, width, limit):
        assert part.numel <= limit
        part.cut(counts).add_(1)
    assert bool((counts == 1).all())
