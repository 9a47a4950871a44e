"""Plans against plain slicing: what is copied from where; what is refused before anything is."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.box import Box, BoxArray
from dcp_reshard.catalog import Catalog, StoredObject, StoredTensor
from dcp_reshard.errors import (
    ChunkCoverageError,
    DtypeMismatchError,
    MissingTensorError,
    PlanError,
    ShapeMismatchError,
)
from dcp_reshard.plan import Cast, PlanOptions, ReadPart, Want, plan_reads
from tests.support.strategies import boxes, shapes, tilings
from tests.support.tensors import indexed_tensor

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
# Each with the wider types of its kind that hold all its values.
WIDER = {
    torch.float16: [torch.float32, torch.float64],
    torch.bfloat16: [torch.float32, torch.float64],
    torch.float32: [torch.float64],
    torch.float64: [],
    torch.complex64: [torch.complex128],
    torch.complex128: [],
    torch.bool: [],
}
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*WIDER, *INTEGERS]


def stored(
    fqn: str,
    shape: tuple[int, ...],
    chunks: list[Box] | None = None,
    dtype: torch.dtype = torch.float32,
) -> StoredTensor:
    """A tensor of a checkpoint, by default in one chunk."""
    parts = [Box.full(shape)] if chunks is None else chunks
    places = np.arange(len(parts), dtype=np.int64)
    array = BoxArray.from_boxes(parts, ndim=len(shape))
    return StoredTensor(fqn, shape, dtype, array, places.astype(np.int32), places, places + 1)


def catalog(*tensors: StoredTensor, objects: tuple[str, ...] = ()) -> Catalog:
    return Catalog(
        {t.fqn: t for t in tensors}, {fqn: StoredObject(fqn, 0, 0, 1) for fqn in objects}, ("f",)
    )


def want(shape: tuple[int, ...], *parts: Box, dtype: torch.dtype = torch.float32) -> Want:
    return Want(shape, dtype, parts or (Box.full(shape),))


@hypothesis.given(shapes(), st.data())
def test_parts_fill_each_box_from_the_right_chunks(
    shape: tuple[int, ...], data: st.DataObject
) -> None:
    """Copying each part from its chunk makes each box what slicing the whole tensor gives."""
    chunks = data.draw(tilings(shape))
    wanted = tuple(data.draw(st.lists(boxes(shape, min_size=1), min_size=1, max_size=3)))
    wanted = tuple(box for box in wanted if not box.is_empty)
    plan = plan_reads(
        catalog(stored("w", shape, chunks)), {"w": Want(shape, torch.float32, wanted)}
    )
    whole = indexed_tensor(shape)
    found = [torch.full(box.sizes, -1.0) for box in wanted]
    for part in plan.tensors[0].parts:
        chunk, box = chunks[part.chunk], wanted[part.shard]
        source = whole[chunk.slices()][part.region.relative_to(chunk.offsets).slices()]
        dest = found[part.shard][part.region.relative_to(box.offsets).slices()]
        assert (dest == -1).all()
        assert source.shape == dest.shape
        dest.copy_(source)
    for tensor, box in zip(found, wanted, strict=True):
        assert torch.equal(tensor, whole[box.slices()])
    assert plan.bytes_wanted == 4 * sum(box.numel for box in wanted)


def test_one_part_for_each_chunk_that_a_box_overlaps() -> None:
    """Two boxes of a tensor in two chunks: one inside of a chunk, one over both."""
    chunks = [Box((0, 0), (2, 6)), Box((2, 0), (2, 6))]
    wanted = (Box((3, 1), (1, 2)), Box((1, 4), (2, 2)))
    plan = plan_reads(catalog(stored("w", (4, 6), chunks)), {"w": want((4, 6), *wanted)})
    assert plan.tensors[0].parts == (
        ReadPart(1, 0, Box((3, 1), (1, 2))),
        ReadPart(0, 1, Box((1, 4), (1, 2))),
        ReadPart(1, 1, Box((2, 4), (1, 2))),
    )


def test_a_scalar_is_one_part() -> None:
    """A 0-d tensor has one element, which one chunk holds."""
    plan = plan_reads(catalog(stored("s", ())), {"s": want(())})
    assert plan.tensors[0].parts == (ReadPart(0, 0, Box((), ())),)


def test_bytes_wanted_are_those_of_the_stored_dtype() -> None:
    """A cast changes what is held, not what is read."""
    plan = plan_reads(
        catalog(stored("w", (3, 4), dtype=torch.bfloat16)),
        {"w": want((3, 4), Box((1, 0), (2, 4)))},
        options=PlanOptions(dtype_policy="widen"),
    )
    assert plan.bytes_wanted == 2 * 8
    assert plan.casts == (Cast("w", torch.bfloat16, torch.float32),)


def test_a_box_beyond_the_tensor_is_refused() -> None:
    """A part of a destination that no chunk could fill is not left as it was."""
    for chunks in (None, [Box((0,), (2,)), Box((2,), (2,))]):
        with pytest.raises(PlanError, match=r"`w`: .*\[2:6\].*\(4,\)"):
            plan_reads(catalog(stored("w", (4,), chunks)), {"w": want((4,), Box((2,), (4,)))})


def test_all_missing_keys_are_named() -> None:
    """Not the first alone; with the nearest keys that there are, and nothing far off."""
    source = catalog(
        stored("layers.0.weight", (2,)), stored("layers.1.weight", (2,)), objects=("step",)
    )
    wants = {"layers.0.weighd": want((2,)), "layers.1.weight": want((2,)), "xyz": want((2,))}
    with pytest.raises(MissingTensorError) as info:
        plan_reads(source, wants, objects=["step", "steps"])
    assert str(info.value) == (
        "3 keys of the state dict are not in the checkpoint: `layers.0.weighd`, `xyz`, `steps` "
        "(nearest to `layers.0.weighd`: `layers.0.weight`, `layers.1.weight`; "
        "nearest to `steps`: `step`)"
    )
    assert info.value.fqn == "layers.0.weighd"
    assert isinstance(info.value, KeyError)


def test_long_lists_of_keys_are_cut() -> None:
    """Twenty names, and how many more there are."""
    wants = {f"w{i}": want((1,)) for i in range(30)}
    with pytest.raises(MissingTensorError, match=r"^30 keys .*`w19` and 10 more$"):
        plan_reads(catalog(), wants)


def test_missing_keys_may_keep_their_values() -> None:
    """By option they are left out of the plan, and reported."""
    plan = plan_reads(
        catalog(stored("w", (2,))),
        {"w": want((2,)), "v": want((3,))},
        objects=["n"],
        options=PlanOptions(on_missing="keep"),
    )
    assert [t.fqn for t in plan.tensors] == ["w"]
    assert (plan.missing, plan.objects, plan.unexpected) == (("v", "n"), (), ())


def test_unexpected_keys_are_reported_or_refused() -> None:
    """Keys that only the checkpoint has, sorted."""
    source = catalog(stored("w", (2,)), stored("b", (2,)), objects=("a",))
    assert plan_reads(source, {"w": want((2,))}).unexpected == ("a", "b")
    with pytest.raises(PlanError, match=r"^2 keys of the checkpoint .*: `a`, `b`$"):
        plan_reads(source, {"w": want((2,))}, options=PlanOptions(on_unexpected="error"))


@pytest.mark.parametrize(
    "rename",
    [{"new": "old"}, lambda fqn: "old" if fqn == "new" else fqn],
    ids=["mapping", "function"],
)
def test_keys_are_renamed(rename: object) -> None:
    """The plan has both names, others stay as they are, and nothing is missing or unexpected."""
    source = catalog(stored("old", (2,)), stored("same", (3,)), objects=("n",))
    plan = plan_reads(
        source,
        {"new": want((2,)), "same": want((3,))},
        objects=["n"],
        options=PlanOptions(rename=rename),  # type: ignore[arg-type]
    )
    assert [(t.fqn, t.stored.fqn) for t in plan.tensors] == [("new", "old"), ("same", "same")]
    assert (plan.objects, plan.missing, plan.unexpected) == ((("n", "n"),), (), ())


def test_renamed_keys_that_are_missing_are_looked_for_by_their_new_name() -> None:
    """The nearest keys are those nearest to the key in the checkpoint."""
    with pytest.raises(MissingTensorError, match=r"nearest to `new`: `module\.weight`"):
        plan_reads(
            catalog(stored("module.weight", (2,))),
            {"new": want((2,))},
            options=PlanOptions(rename={"new": "module.weigh"}),
        )


@pytest.mark.parametrize("shape", [(4, 6), (8,), (8, 6, 1), (6, 8), ()])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    """The message has both, whether the number of elements is the same or not."""
    with pytest.raises(ShapeMismatchError, match=r"`w`: stored shape \(8, 6\), wanted") as info:
        plan_reads(catalog(stored("w", (8, 6))), {"w": want(shape)})
    assert repr(shape) in str(info.value)


def test_what_is_not_stored_is_named_before_anything_is_read() -> None:
    """A hole or an overlap fails the plan, also where this rank does not need that part."""
    for chunks, kind in (
        ([Box((0,), (3,)), Box((4,), (4,))], "no chunk"),
        ([Box((0,), (5,)), Box((4,), (4,))], "2 chunks"),
    ):
        with pytest.raises(ChunkCoverageError, match=rf"`w`.*\[[34]:[45]\].*{kind}"):
            plan_reads(catalog(stored("w", (8,), chunks)), {"w": want((8,), Box((6,), (2,)))})


def test_a_tensor_and_an_object_are_not_the_same() -> None:
    """A tensor is wanted and an object stored, and the reverse."""
    source = catalog(stored("w", (2, 3)), objects=("n",))
    with pytest.raises(PlanError, match=r"`n`.*tensor of shape \(5,\).*object that is not"):
        plan_reads(source, {"n": want((5,))})
    with pytest.raises(PlanError, match=r"`w`.*has a tensor of shape \(2, 3\)"):
        plan_reads(source, {}, objects=["w"])


def holds_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether each value of one dtype is one of another of the same kind, by the tables above."""
    if narrow in INTEGERS and wide in INTEGERS:
        a, b = torch.iinfo(narrow), torch.iinfo(wide)
        return b.min <= a.min and a.max <= b.max
    return wide in WIDER.get(narrow, [])


@pytest.mark.parametrize("policy", ["exact", "widen", "cast"])
@pytest.mark.parametrize("held", DTYPES, ids=str)
def test_dtype_policies(policy: str, held: torch.dtype) -> None:
    """For each pair: equal is fine; wider of the same kind by option; any two floats by another."""
    for wanted in DTYPES:
        allowed = {
            "exact": False,
            "widen": holds_all(wanted, held),
            "cast": holds_all(wanted, held) or (held in FLOATS and wanted in FLOATS),
        }[policy]
        source = catalog(stored("w", (2,), dtype=held))
        options = PlanOptions(dtype_policy=policy)  # type: ignore[arg-type]
        wants = {"w": want((2,), dtype=wanted)}
        if wanted == held or allowed:
            casts = () if wanted == held else (Cast("w", held, wanted),)
            assert plan_reads(source, wants, options=options).casts == casts
        else:
            with pytest.raises(DtypeMismatchError, match=f"stored dtype {held}, wanted {wanted}"):
                plan_reads(source, wants, options=options)


@pytest.mark.parametrize(
    ("name", "value"),
    [("on_missing", "ignore"), ("on_unexpected", "keep"), ("dtype_policy", "lossy")],
)
def test_options_are_checked(name: str, value: str) -> None:
    """A choice that there is not is named with those that there are."""
    with pytest.raises(ValueError, match=f"`{name}` must be .* or .*, got '{value}'"):
        PlanOptions(**{name: value})  # type: ignore[arg-type]
