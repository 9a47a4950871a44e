"""`reshard_tensor` against plain slicing: every grid to every grid, and what it must not touch."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard import FusedBlocks, LayoutError, LazySplit, reshard_tensor
from tests.support.rank_grids import cut, split_grid
from tests.support.tensors import indexed_tensor

GRIDS = list(itertools.product((1, 2, 3, 4), (1, 2)))
SHAPES = {0: (12, 5), 1: (7, 12), None: (5, 3)}
UNEVEN = {0: (13, 4), 1: (3, 10), None: (1, 2)}
FUSED = FusedBlocks((12, 4, 4), unit=2)


def check_grids(
    full: torch.Tensor, dim: int | None, fused: FusedBlocks | None, *, lazy: bool = False
) -> None:
    """Reshard from every grid to every rank of every grid, and compare with slicing."""
    dims = {} if dim is None else {"w": dim}
    rules = {} if fused is None else {"w": fused}
    for source in GRIDS:
        splits: Any = split_grid(full, source, dim, fused)
        if lazy:
            splits = [[LazySplit(tuple(s.shape), lambda s=s: s) for s in row] for row in splits]
        for target in GRIDS:
            for ranks in itertools.product(range(target[0]), range(target[1])):
                part = reshard_tensor("w", splits, source, target, ranks, dims, fused=rules)
                wanted = cut(full, target, ranks, dim, fused)
                assert part.shape == wanted.shape, (source, target, ranks)
                assert torch.equal(part, wanted), (source, target, ranks)


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("shapes", [SHAPES, UNEVEN], ids=["even", "uneven"])
def test_every_grid_to_every_grid(shapes: dict[int | None, Any], dim: int | None) -> None:
    """Every rank of every grid gets what slicing the whole tensor gives it."""
    check_grids(indexed_tensor(shapes[dim]), dim, None)


@pytest.mark.parametrize("dim", [0, 1])
def test_fused_blocks_are_cut_each_by_itself(dim: int) -> None:
    """Query, key and value of a fused tensor are resharded as three tensors would be."""
    full = indexed_tensor((20, 6) if dim == 0 else (6, 20))
    check_grids(full, dim, FUSED, lazy=True)


def test_heads_fewer_than_ranks_are_repeated() -> None:
    """Where key and value heads are repeated over the ranks, each rank gets one of each."""
    fused = FusedBlocks((8, 2, 2), unit=2, repeat=True)
    full = indexed_tensor((12, 3))
    for source, target in itertools.product((1, 2, 4), (1, 2, 4)):
        splits = split_grid(full, (source, 1), 0, fused)
        for rank in range(target):
            part = reshard_tensor(
                "w", splits, (source, 1), (target, 1), (rank, 0), {"w": 0}, fused={"w": fused}
            )
            assert torch.equal(part, cut(full, (target, 1), (rank, 0), 0, fused))
    assert part[-4:].tolist() == full[8:12].tolist()


def test_without_the_rule_fused_blocks_come_back_in_the_wrong_order() -> None:
    """The documentation's warning is true: joined without the rule, blocks are interleaved."""
    full = torch.arange(8)
    splits = split_grid(full, (2, 1), 0, FusedBlocks((4, 4)))
    joined = reshard_tensor("w", splits, (2, 1), (1, 1), (0, 0), {"w": 0})
    assert joined.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_uneven_source_shards_are_joined_as_they_are() -> None:
    """Shards of any sizes are parts of the tensor, in the order of the ranks."""
    full = indexed_tensor((11, 3))
    splits = [[full[:2]], [full[2:9]], [full[9:9]], [full[9:]]]
    for target in (1, 2, 3):
        for rank in range(target):
            part = reshard_tensor("w", splits, (4, 1), (target, 1), (rank, 0), {"w": 0})
            assert torch.equal(part, cut(full, (target, 1), (rank, 0), 0))
    for rank in range(4):
        assert reshard_tensor("w", splits, (4, 1), (4, 1), (rank, 0), {"w": 0}) is splits[rank][0]


def test_equal_sizes_return_the_split_itself() -> None:
    """With as many tensor-parallel ranks as before nothing is copied, but for a dp join."""
    full = indexed_tensor((8, 3))
    one = split_grid(full, (2, 1), 1)
    assert reshard_tensor("w", one, (2, 1), (2, 1), (1, 0), {"w": 1}) is one[1][0]
    two = split_grid(full, (2, 2), 1)
    joined = reshard_tensor("w", two, (2, 2), (2, 1), (1, 0), {"w": 1})
    assert torch.equal(joined, full[:, 2:])
    assert reshard_tensor("w", two, (2, 2), (2, 2), (0, 1), {"w": 1}) is two[0][1]
    whole = [[full], [full.clone()]]
    assert reshard_tensor("norm", whole, (2, 1), (4, 1), (3, 0), {}) is full


def test_target_dp_can_be_ignored_as_fairseq2_does() -> None:
    """`target_dp="join"` gives every data-parallel rank the whole tensor-parallel shard."""
    full = indexed_tensor((8, 4))
    splits = split_grid(full, (2, 2), 0)
    for dp_rank in (0, 1):
        part = reshard_tensor("w", splits, (2, 2), (1, 2), (0, dp_rank), {"w": 0}, target_dp="join")
        assert torch.equal(part, full)


def test_a_tail_that_does_not_divide_can_be_refused() -> None:
    """`on_uneven="error"` refuses sizes that do not divide, and only these."""
    splits = split_grid(torch.arange(10), (2, 1), 0)
    call: Callable[..., torch.Tensor] = lambda tp: reshard_tensor(  # noqa: E731
        "w", splits, (2, 1), (tp, 1), (0, 0), {"w": 0}, on_uneven="error"
    )
    assert len(call(5)) == 2
    assert len(call(2)) == 5
    with pytest.raises(LayoutError, match=r"`w`: 10 indices .* do not divide by 3 tp ranks"):
        call(3)


def test_patterns_say_dims_too() -> None:
    """`shard_specs` are matched from the start of the key, and may wrap the dim."""

    @dataclass
    class Spec:
        dim: int

    splits = split_grid(indexed_tensor((4, 6)), (2, 1), 1)
    for specs in ({r".*\.wo\.weight$": 1}, {r"layers\.\d+\.wo": Spec(1)}):
        part = reshard_tensor(
            "layers.3.wo.weight", splits, (2, 1), (1, 1), (0, 0), shard_specs=specs
        )
        assert torch.equal(part, indexed_tensor((4, 6)))
    older = {r".*\.wo\.weight$": Spec(1)}
    part = reshard_tensor("layers.3.wo.weight", splits, (2, 1), (1, 1), (0, 0), older)
    assert torch.equal(part, indexed_tensor((4, 6)))
    part = reshard_tensor("wo", splits, (2, 1), (1, 1), (0, 0), shard_specs={r"layers": 0})
    assert part is splits[0][0]


class Counted:
    """Splits as callables that count how often they are called."""

    def __init__(self, full: torch.Tensor, sizes: tuple[int, int], dim: int) -> None:
        self.calls: list[tuple[int, int]] = []
        grid = split_grid(full, sizes, dim)
        self.splits = [
            [lambda t=t, d=d, s=s: self.calls.append((t, d)) or s for d, s in enumerate(row)]
            for t, row in enumerate(grid)
        ]


@pytest.mark.parametrize("dim", [0, 1])
def test_only_splits_that_overlap_are_loaded_each_once(dim: int) -> None:
    """Callables of splits that the target does not need are never called, others once."""
    full = indexed_tensor((24, 24))
    for source, target in itertools.product(GRIDS, GRIDS):
        for ranks in itertools.product(range(target[0]), range(target[1])):
            counted = Counted(full, source, dim)
            part = reshard_tensor("w", counted.splits, source, target, ranks, {"w": dim})
            assert torch.equal(part, cut(full, target, ranks, dim))
            values = set(part.flatten().tolist())
            needed = [
                (t, d)
                for t, row in enumerate(split_grid(full, source, dim))
                for d, split in enumerate(row)
                if values & set(split.flatten().tolist())
            ]
            assert sorted(counted.calls) == needed, (source, target, ranks)


def test_callables_of_several_shapes_are_an_error_where_two_are_called() -> None:
    """Bare callables that break the promise of one shape are refused by who calls both."""
    full = indexed_tensor((7, 2))
    splits = [[lambda: full[:4]], [lambda: full[4:]]]
    with pytest.raises(
        LayoutError, match=r"`w`: .* tp rank 1, dp rank 0 has shape \(3, 2\), taken"
    ):
        reshard_tensor("w", splits, (2, 1), (1, 1), (0, 0), {"w": 0})
    known = [[LazySplit((4, 2), splits[0][0])], [LazySplit((3, 2), splits[1][0])]]
    part = reshard_tensor("w", known, (2, 1), (4, 1), (2, 0), {"w": 0})
    assert torch.equal(part, full[4:6])


def test_memory_mapped_splits_stay_on_disk(tmp_path: Path) -> None:
    """A memory-mapped split is copied from, not kept: the target owns its memory."""
    full = indexed_tensor((6, 4))
    splits = []
    for rank, shard in enumerate(full.chunk(2)):
        torch.save(shard.clone(), tmp_path / f"{rank}.pt")
        splits.append([torch.load(tmp_path / f"{rank}.pt", mmap=True, weights_only=True)])
    part = reshard_tensor("w", splits, (2, 1), (3, 1), (1, 0), {"w": 0})
    assert torch.equal(part, full[2:4])
    assert part.untyped_storage().nbytes() == part.nbytes


@hypothesis.given(data=st.data())
def test_random_grids(data: st.DataObject) -> None:
    """Any shape, dim, pair of grids and rank: the part is what slicing gives."""
    shape = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple))
    dim = data.draw(st.none() | st.integers(0, len(shape) - 1))
    sizes = st.tuples(st.integers(1, 5), st.integers(1, 3))
    source, target = data.draw(sizes), data.draw(sizes)
    ranks = tuple(data.draw(st.integers(0, n - 1)) for n in target)
    full = indexed_tensor(shape)
    splits = split_grid(full, source, dim)
    dims = {} if dim is None else {"w": dim}
    part = reshard_tensor("w", splits, source, target, (ranks[0], ranks[1]), dims)
    wanted = cut(full, target, (ranks[0], ranks[1]), dim)
    assert part.shape == wanted.shape
    assert torch.equal(part, wanted)


def test_one_split_is_held_at_a_time() -> None:
    """Of splits that are loaded, each is let go before the next one is loaded."""
    full = indexed_tensor((24, 6))
    alive: list[weakref.ref[torch.Tensor]] = []

    def load(part: torch.Tensor) -> torch.Tensor:
        assert all(other() is None for other in alive)
        loaded = part.clone()
        alive.append(weakref.ref(loaded))
        return loaded

    splits = [[LazySplit((6, 6), lambda part=part: load(part))] for part in full.chunk(4)]
    part = reshard_tensor("w", splits, (4, 1), (3, 1), (1, 0), {"w": 0})
    assert torch.equal(part, full[8:16])
    assert len(alive) == 2


def test_scalars_are_replicated() -> None:
    """A 0-d tensor has nothing to cut: every rank gets it."""
    step = torch.tensor(3.0)
    assert reshard_tensor("step", [[step, step]], (1, 2), (2, 2), (1, 1), {}) == 3


W = torch.zeros(4, 4)
BAD: dict[str, tuple[dict[str, Any], str]] = {
    "grid of another size": (
        {"source_splits": [[W], [W]], "source_shard_sizes": (3, 1)},
        r"2 tp ranks with \[1, 1\] splits, but `source_shard_sizes` is \(3, 1\)",
    ),
    "ragged grid": ({"source_splits": [[W], [W, W]]}, r"splits, but `source_shard_sizes`"),
    "no ranks": ({"source_shard_sizes": (0, 1)}, r"`source_shard_sizes` is \(0, 1\)"),
    "a float": ({"target_shard_sizes": (2.0, 1)}, r"`target_shard_sizes` is \(2.0, 1\)"),
    "three sizes": ({"target_shard_sizes": (2, 1, 1)}, r"not two numbers"),
    "rank outside": ({"target_shard_ranks": (3, 0)}, r"no rank \(3, 0\) in a grid of \(3, 1\)"),
    "dp rank outside": ({"target_shard_ranks": (0, 1)}, r"no rank \(0, 1\)"),
    "negative rank": ({"target_shard_ranks": (-1, 0)}, r"`target_shard_ranks` is \(-1, 0\)"),
    "dim beyond": ({"shard_dims": {"w": 2}}, r"cut along dim 2, but it has 2 dims"),
    "negative dim": ({"shard_dims": {"w": -1}}, r"-1 is not a dim"),
    "dim of text": ({"shard_dims": {"w": "0"}}, r"'0' is not a dim"),
    "rules disagree": ({"shard_specs": {"w": 1}}, r"dim 0 \(`shard_dims`\) and dim 1 \(pattern"),
    "dtypes": ({"source_splits": [[W], [W.double()]]}, r"torch.float64, another one of .*float32"),
    "other dims differ": (
        {"source_splits": [[W], [torch.zeros(4, 5)]]},
        r"tp rank 1 holds shape \(4, 5\), but tp rank 0 \(4, 4\)",
    ),
    "number of dims": ({"source_splits": [[W], [torch.zeros(4)]]}, r"tp rank 1 holds shape \(4,\)"),
    "dp splits differ": (
        {"source_splits": [[W, torch.zeros(4, 3)], [W, W]], "source_shard_sizes": (2, 2)},
        r"tp rank 0, dp rank 1 holds shape \(4, 3\), but dp rank 0 of tp rank 0 \(4, 4\)",
    ),
    "not a tensor": ({"source_splits": [[lambda: 3], [lambda: W]]}, r"is a int, not a tensor"),
    "sparse": ({"source_splits": [[W.to_sparse()], [W]]}, r"not a plain dense tensor"),
    "lazy shape": (
        {"source_splits": [[LazySplit((4, 4), lambda: W[:3])], [W]]},
        r"has shape \(3, 4\), taken was \(4, 4\)",
    ),
    "fused sizes": (
        {"fused": {"w": FusedBlocks((4, 2))}},
        r"rank 0 of 2 holds 4 indices, .* it should hold 3",
    ),
    "fused but not cut": ({"fused": {"w": FusedBlocks((4,))}, "shard_dims": {}}, r"no dim"),
    "cannot repeat": (
        {"fused": {"w": FusedBlocks((4, 4), unit=2, repeat=True)}},
        r"2 units cannot be repeated evenly over 3 ranks",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_an_error_that_names_the_key(case: str) -> None:
    """Grids, sizes, ranks, dims, dtypes and shapes that do not fit are refused by name."""
    changed, message = BAD[case]
    arguments = {
        "source_splits": [[W], [W]],
        "source_shard_sizes": (2, 1),
        "target_shard_sizes": (3, 1),
        "target_shard_ranks": (0, 0),
        "shard_dims": {"w": 0},
    } | changed
    with pytest.raises(LayoutError, match=message) as caught:
        reshard_tensor("w", **arguments)
    assert "`w`" in str(caught.value)
    assert caught.value.fqn == "w"


@pytest.mark.parametrize("option", ["on_uneven", "target_dp"])
def test_options_have_two_values(option: str) -> None:
    """A misspelt option is refused."""
    with pytest.raises(ValueError, match=rf"`{option}` must be '\w+' or '\w+', got 'x'"):
        reshard_tensor("w", [[W]], (1, 1), (1, 1), (0, 0), {}, **{option: "x"})
