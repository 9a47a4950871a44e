"""How deep, and how large, is what a pickle says, and which calls are in it? No recursion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dcp_reshard.errors import UnsafeCheckpointError
from dcp_reshard.pickle_data import Call, Persistent

__all__ = ["check_extent", "find_calls"]


def check_extent(value: object, *, max_depth: int, max_values: int) -> None:
    """Check how deep a value is nested, and how many values it has, before anyone walks over it.

    Values that occur several times are counted as often: a pickle of a few bytes can hold the same
    list ten times, in a list that another holds ten times, and so on; or a list that holds itself.

    Args:
        value: Lists, tuples, dicts, calls, and whatever they hold.
        max_depth: Deepest nesting allowed.
        max_values: Most values allowed.

    Raises:
        UnsafeCheckpointError: It has more.
    """
    counts: dict[int, int] = {}
    open_values: set[int] = set()
    stack: list[tuple[object, Sequence[object] | None]] = [(value, None)]
    while stack:
        current, done = stack.pop()
        key = id(current)
        if done is not None:
            open_values.discard(key)
            counts[key] = 1 + sum(counts.get(id(child), 1) for child in done)
            if counts[key] > max_values:
                raise UnsafeCheckpointError(f"more than {max_values} values")
            continue
        children = _children(current)
        if not children or key in counts:
            continue
        if key in open_values or len(open_values) >= max_depth:
            raise UnsafeCheckpointError(f"values nested deeper than {max_depth}")
        open_values.add(key)
        stack.append((current, children))
        stack += [(child, None) for child in children]


def find_calls(value: object) -> Iterator[Call]:
    """All calls in a value whose extent has been checked, each once.

    Example:
        >>> import pickle
        >>> from dcp_reshard.pickle_data import interpret_pickle
        >>> [call.function for call in find_calls(interpret_pickle(pickle.dumps([{1}, {2}], 2)))]
        ['__builtin__ set', '__builtin__ set']
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        current = stack.pop()
        children = _children(current)
        if isinstance(current, Call):
            yield current
        for child in children:
            if id(child) not in seen:
                seen.add(id(child))
                stack.append(child)


def _children(value: object) -> Sequence[object]:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, Call):
        return value.args
    if isinstance(value, Persistent):
        return (value.id,)
    return value if isinstance(value, (list, tuple)) else ()
