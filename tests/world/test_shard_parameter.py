"""`shard_parameter` with threads as ranks; with processes, and torch's own, see `tests/dist`."""

from __future__ import annotations

import pytest
import torch
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from dcp_reshard import InconsistentRanksError, LayoutError, MissingParameterError, shard_parameter
from tests.support.tensors import indexed_tensor
from tests.support.worlds import thread_world

SPEC = ["rank:2/cpu", "rank:0/cpu", "rank:1/cpu"]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_each_rank_gets_its_part(dim: int) -> None:
    """The parameter becomes a ShardedTensor of which each rank holds what the spec says."""
    full = indexed_tensor((6, 7, 5))

    def shard(rank: int) -> None:
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(full.clone() if rank == 1 else torch.zeros(6, 7, 5))
        shard_parameter(module, "w", ChunkShardingSpec(dim, list(SPEC)), src_rank=1)
        [mine] = module.w.local_shards()
        assert torch.equal(mine.tensor, full.chunk(3, dim)[(rank + 1) % 3])
        assert module.w.requires_grad

    thread_world(3, shard)


def test_ranks_that_differ_are_all_told() -> None:
    """A rank without the parameter, or with another spec, is an error on all."""

    def shard(rank: int) -> list[type[Exception]]:
        errors: list[type[Exception]] = []
        for name, dim in (("v" if rank == 1 else "w", 0), ("w", rank % 2)):
            module = torch.nn.Linear(4, 4)
            module.w = torch.nn.Parameter(torch.zeros(6, 6))
            try:
                shard_parameter(module, name, ChunkShardingSpec(dim, list(SPEC)))
            except Exception as error:
                errors.append(type(error))
        return errors

    told = thread_world(3, shard)
    assert [one for one, _ in told] == [LayoutError, MissingParameterError, LayoutError]
    assert [other for _, other in told] == [InconsistentRanksError] * 3


def test_a_parameter_without_elements() -> None:
    """There is nothing to send, and every rank has an empty shard."""

    def shard(rank: int) -> tuple[int, ...]:
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(torch.zeros(0, 6))
        shard_parameter(module, "w", ChunkShardingSpec(1, list(SPEC)))
        return tuple(module.w.local_shards()[0].tensor.shape)

    assert thread_world(3, shard) == [(0, 2)] * 3
