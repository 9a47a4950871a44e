"""What does a pickle of data say? Nothing is imported, nothing is called.

A pickle is a program for a stack machine. `interpret_pickle` runs it on inert values: numbers,
strings, lists, tuples and dicts become what they are; a class or function is its name (`Global`), a
call is the name and its arguments (`Call`), a reference to something outside of the pickle is what
identifies it (`Persistent`). What any of these mean is left to those who know (`payload`,
`torch_files`).

Only the opcodes that pickling data needs are known, of protocols 2 to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.stack_machine import DATA_STEPS, StackMachine, push

__all__ = ["Call", "Global", "Persistent", "interpret_pickle"]

# Each opcode makes at most one object: this bounds memory, whatever the pickle's size.
_MAX_OPCODES = 8_000_000
_ATOMS = (str, int, float, bytes, type(None))
# Of these, tuples of integers among them, any number with one hash can be made up: a dict of them
# takes quadratic time.
_MAX_KEY_BITS = 64
_MAX_TUPLE_KEYS = 10_000
_MAX_KEY_LENGTH = 16


@dataclass(frozen=True, slots=True, eq=False)
class Global:
    """The name of a class or function, not looked up."""

    name: str
    """Module and name, separated by a space."""


@dataclass(frozen=True, slots=True, eq=False)
class Persistent:
    """A reference to something that is kept outside of the pickle."""

    id: object
    """What identifies it."""


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A call that was not made; what was to be done with its result is left out."""

    function: str
    """Name of the function or class, as in `Global`."""

    args: tuple[object, ...]
    """Its arguments."""


def interpret_pickle(data: bytes, *, left_out: list[object] | None = None) -> object:
    """What a pickle says.

    Args:
        data: The pickle.
        left_out: Where to put what is not part of the value: attributes and items of what calls
            return.

    Raises:
        UnsafeCheckpointError: It has an opcode, or uses one in a way, that data does not need.
        CheckpointFormatError: It is cut, broken, or has bytes after its end.

    Example:
        >>> import pickle
        >>> interpret_pickle(pickle.dumps({"a": [1, 2.5, (None, True)]}))
        {'a': [1, 2.5, (None, True)]}
        >>> interpret_pickle(pickle.dumps(print)).name
        'builtins print'
    """
    machine = _Machine(data, left_out=[] if left_out is None else left_out)
    try:
        for _ in range(_MAX_OPCODES):
            op = data[machine.position]
            if op == _STOP:
                return machine.stop()
            machine.position += 1
            step = _STEPS.get(op)
            if step is None:
                raise machine.refuse(f"opcode {bytes([op])!r}")
            step(machine)
    except (IndexError, KeyError, ValueError, struct.error) as error:
        if isinstance(error, CheckpointFormatError):
            raise
        raise CheckpointFormatError(
            f"the pickle is cut or broken at byte {machine.position}"
        ) from error
    raise CheckpointFormatError(f"the pickle has more than {_MAX_OPCODES} opcodes")


class _Machine(StackMachine):
    """The machine, and what is not part of the value."""

    __slots__ = ("left_out", "tuple_keys")

    def __init__(self, data: bytes, *, left_out: list[object]) -> None:
        super().__init__(data)
        self.left_out = left_out
        self.tuple_keys = 0

    def check_protocol(self) -> None:
        if self.take(1)[0] not in range(2, 6):
            raise self.refuse("another protocol than 2 to 5")

    def skip_frame(self) -> None:
        self.take(8)

    def stop(self) -> object:
        if self.below or len(self.stack) != 1 or self.position + 1 != len(self.data):
            raise CheckpointFormatError(f"the pickle does not end at byte {self.position + 1}")
        return self.stack[0]

    def refuse(self, what: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(f"{what} at byte {self.position} of a pickle is not data")


def _global(machine: _Machine) -> None:
    end = machine.data.index(b"\n", machine.data.index(b"\n", machine.position) + 1)
    name = machine.take(end - machine.position).decode().replace("\n", " ")
    machine.position += 1
    machine.stack.append(Global(name))


def _stack_global(machine: _Machine) -> None:
    module, name = machine.top(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise machine.refuse("a global without a name")
    machine.stack.append(Global(f"{module} {name}"))


def _call(machine: _Machine) -> None:
    function, args = machine.top(2)
    if not isinstance(function, Global) or not isinstance(args, tuple):
        raise machine.refuse("a call of something else than a global")
    # An OrderedDict is made empty, and filled as a dict is.
    ordered = function.name == "collections OrderedDict" and not args
    machine.stack.append({} if ordered else Call(function.name, args))


def _build(machine: _Machine) -> None:
    """Leave out attributes that are set: an OrderedDict of a module has its version in one."""
    machine.left_out.append(machine.stack.pop())
    if not isinstance(machine.stack[-1], (dict, Call)):
        raise machine.refuse("attributes of something else than an object")


def _set_items(machine: _Machine, items: Sequence[object]) -> None:
    target = machine.stack[-1]
    if not isinstance(target, (dict, Call)) or len(items) % 2:
        raise machine.refuse("items of something else than a dict")
    for key, value in zip(items[::2], items[1::2], strict=True):
        _check_key(machine, key)
        if isinstance(target, dict):
            target[key] = value
        else:
            machine.left_out.append(value)


def _check_key(machine: _Machine, key: object) -> None:
    # Others would be hashed: a deeply nested tuple overflows the C stack.
    parts = (key,)
    if type(key) is tuple and len(key) <= _MAX_KEY_LENGTH:
        parts = key
        machine.tuple_keys += 1
    for part in parts:
        if not isinstance(part, (*_ATOMS, Global)):
            raise machine.refuse(f"a dict with a key of type {type(part).__name__}")
        if isinstance(part, int) and part.bit_length() > _MAX_KEY_BITS:
            raise machine.refuse(f"a dict with a key of {part.bit_length()} bits")
    if machine.tuple_keys > _MAX_TUPLE_KEYS:
        raise machine.refuse(f"more than {_MAX_TUPLE_KEYS} keys that are tuples")


def _append_items(machine: _Machine, items: Sequence[object]) -> None:
    target = machine.stack[-1]
    if isinstance(target, list):
        target.extend(items)
    elif isinstance(target, Call):
        machine.left_out += items
    else:
        raise machine.refuse("items of something else than a list")


def _dict(machine: _Machine) -> None:
    items = machine.above_mark()
    machine.stack.append({})
    _set_items(machine, items)


def _memoize(machine: _Machine, index: int) -> None:
    machine.memo[index] = machine.stack[-1]


_Step = Callable[[_Machine], None]


_STOP = ord(".")
_STEPS: dict[int, _Step] = {
    **DATA_STEPS,
    ord("q"): lambda m: _memoize(m, m.number(1)),
    ord("h"): push(lambda m: m.memo[m.number(1)]),
    ord("r"): lambda m: _memoize(m, m.number(4)),
    ord("j"): push(lambda m: m.memo[m.number(4)]),
    0x94: lambda m: _memoize(m, len(m.memo)),
    0x8A: push(lambda m: int.from_bytes(m.take(m.number(1)), "little", signed=True)),
    ord("X"): push(lambda m: m.take(m.number(4)).decode()),
    0x8C: push(lambda m: m.take(m.number(1)).decode()),
    ord("B"): push(lambda m: m.take(m.number(4))),
    ord("C"): push(lambda m: m.take(m.number(1))),
    ord("l"): push(_Machine.above_mark),
    ord("a"): lambda m: _append_items(m, m.top(1)),
    ord("e"): lambda m: _append_items(m, m.above_mark()),
    ord("d"): _dict,
    ord("s"): lambda m: _set_items(m, m.top(2)),
    ord("u"): lambda m: _set_items(m, m.above_mark()),
    0x8F: push(lambda _: Call("builtins set", ())),
    0x90: lambda m: _append_items(m, m.above_mark()),
    0x91: push(lambda m: Call("builtins frozenset", tuple(m.above_mark()))),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _call,
    0x81: _call,
    ord("b"): _build,
    ord("Q"): push(lambda m: Persistent(m.stack.pop())),
    0x80: _Machine.check_protocol,
    0x95: _Machine.skip_frame,
}
