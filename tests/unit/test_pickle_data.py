"""Pickles interpreted as data: what pickle itself would make of them, and nothing run."""

from __future__ import annotations

import collections
import pickle
import pickletools
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.pickle_data import Call, Global, interpret_pickle
from dcp_reshard.pickle_extent import check_extent

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=300)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=5).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(0, 9), inner, max_size=5)
    ),
    max_leaves=20,
)


@hypothesis.given(VALUES, st.integers(2, 5))
def test_data_is_what_pickle_makes_of_it(value: Any, protocol: int) -> None:
    """Numbers, strings and containers of these come back, whatever the protocol."""
    again = interpret_pickle(pickle.dumps(value, protocol))
    assert repr(again) == repr(value)


def test_shared_values_stay_shared() -> None:
    """What a pickle refers to twice is one value."""
    inner = [1]
    first, second = interpret_pickle(pickle.dumps([inner, inner]))  # type: ignore[misc]
    assert first is second


def test_ordered_dicts_are_dicts() -> None:
    """An OrderedDict is a dict; attributes such as a module's `_metadata` are left out."""
    value = collections.OrderedDict(a=1, b=collections.OrderedDict())
    value._metadata = {"": {"version": 1}}  # type: ignore[attr-defined]
    for protocol in range(2, 6):
        assert interpret_pickle(pickle.dumps(value, protocol)) == {"a": 1, "b": {}}


class Marker:
    """A class whose unpickling would leave a trace."""

    built = 0

    def __setstate__(self, state: object) -> None:
        Marker.built += 1


def test_objects_are_names() -> None:
    """Classes, functions and instances are named, not made; what is set on them is left out."""
    marker = Marker()
    marker.x = 1  # type: ignore[attr-defined]
    table = collections.defaultdict(list, a=[1])
    for protocol in range(2, 6):
        data = pickle.dumps([Marker, marker, print, {1, 2}, frozenset((3,)), table], protocol)
        cls, instance, function, *groups = interpret_pickle(data)  # type: ignore[misc]
        assert isinstance(cls, Global)
        assert cls.name.endswith(" Marker")
        assert isinstance(instance, Call)
        assert isinstance(function, Global)
        assert function.name.endswith(" print")
        assert [group.function.split()[1] for group in groups] == [
            "set",
            "frozenset",
            "defaultdict",
        ]
    assert Marker.built == 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x02cposix\nsystem\n(X\x02\x00\x00\x00oio.", "opcode b'o'"),
        (b"\x80\x02P1\n.", "opcode b'P'"),
        (b"\x80\x02\x82\x01.", r"opcode b'\\x82'"),
        (b"\x80\x00N.", "another protocol"),
        (b"\x80\x02N)R.", "call of something else"),
        (b"\x80\x02cos\nsystem\n]R.", "call of something else"),
        (b"\x80\x02NN\x93.", "global without a name"),
        (b"\x80\x02NNNs.", "items of something else than a dict"),
        (b"\x80\x02NNa.", "items of something else than a list"),
        (b"\x80\x02}(Nu.", "items of something else than a dict"),
        (b"\x80\x02NNb.", "attributes of something else"),
        (b"\x80\x02})\x85Ns.", "a dict with a key of type tuple"),
    ],
)
def test_what_data_does_not_need_is_refused(data: bytes, message: str) -> None:
    """Opcodes that make or change anything but data are an error that names them."""
    with pytest.raises(UnsafeCheckpointError, match=message):
        interpret_pickle(data)


@pytest.mark.parametrize("value", [{"w": [1, 2.5, "text", (None, True)]}, list(range(300))])
def test_cut_pickles_are_errors(value: Any) -> None:
    """A pickle cut at any byte, or with a byte too many, is an error."""
    data = pickle.dumps(value, 4)
    for end in range(len(data)):
        with pytest.raises(CheckpointFormatError):
            interpret_pickle(data[:end])
    with pytest.raises(CheckpointFormatError, match="does not end"):
        interpret_pickle(data + b".")


@hypothesis.given(st.binary(max_size=40))
def test_any_bytes_are_an_error_or_a_value(data: bytes) -> None:
    """Whatever the bytes, nothing but the two errors is raised."""
    for bytes_ in (data, b"\x80\x02" + data + b"."):
        try:
            interpret_pickle(bytes_)
        except CheckpointFormatError:
            continue


@hypothesis.given(VALUES, st.data())
def test_flipped_bits_are_an_error_or_a_value(value: Any, data: st.DataObject) -> None:
    """One flipped bit gives a value or an error, never another exception."""
    flipped = bytearray(pickle.dumps(value, 2))
    bit = data.draw(st.integers(0, 8 * len(flipped) - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        interpret_pickle(bytes(flipped))
    except CheckpointFormatError:
        return


def laughs(levels: int) -> bytes:
    """Ten times the same list in a list, again and again: 10 ** levels values in few bytes."""
    data = b"\x80\x02(N"
    for level in range(levels):
        data += b"q%c](" % level + b"h%c" % level * 10 + b"e"
    return data + b"l."


def test_billions_of_values_in_few_bytes_are_refused() -> None:
    """The number of values is counted as often as they occur, without walking over all."""
    value = interpret_pickle(laughs(12))
    with pytest.raises(UnsafeCheckpointError, match="more than 1000000 values"):
        check_extent(value, max_depth=64, max_values=1_000_000)
    check_extent(interpret_pickle(laughs(3)), max_depth=64, max_values=10_000)


def test_deep_nesting_and_cycles_are_refused() -> None:
    """Thousands of nested tuples, or a list that holds itself, do not end the interpreter."""
    deep = interpret_pickle(b"\x80\x02)" + b"\x85" * 200_000 + b".")
    cycle = interpret_pickle(b"\x80\x02]q\x00h\x00a.")
    for value in (deep, cycle):
        with pytest.raises(UnsafeCheckpointError, match="nested deeper than 64"):
            check_extent(value, max_depth=64, max_values=10_000_000)


@hypothesis.given(VALUES)
def test_extent_counts_what_there_is(value: Any) -> None:
    """A value within the limits passes, and just beyond them does not."""

    def count(value: Any) -> int:
        children = value.values() if isinstance(value, dict) else value
        return 1 + (sum(map(count, children)) if isinstance(value, (dict, list, tuple)) else 0)

    total = count(value)
    check_extent(value, max_depth=64, max_values=total)
    if total > 1:
        with pytest.raises(UnsafeCheckpointError):
            check_extent(value, max_depth=64, max_values=total - 1)


def test_every_opcode_of_data_is_known() -> None:
    """All opcodes that pickle uses for data of these kinds are known to the interpreter."""
    value = {"a": [1, 300, -5, 2**40, 2.5, None, True, False, b"x", "y" * 300], "t": ((), (1,))}
    for protocol in range(2, 6):
        data = pickle.dumps(value, protocol)
        used = {op.name for op, _, _ in pickletools.genops(data)}
        interpreted = interpret_pickle(data)
        assert "PROTO" in used
        if protocol > 2:
            assert interpreted == value
