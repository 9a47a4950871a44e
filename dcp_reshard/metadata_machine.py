"""The stack machine of metadata pickles: what do their opcodes say of inert records?

A C unpickler allocates by length fields and memo indices before any hook of ours is called. This
machine is in Python, and knows the opcodes that writing a DCP `Metadata` needs, of protocols 2 to
5: lengths and memo indices stay inside the file, and tuples are never keys. (Python hashes them by
a recursion that knows no limit, and any number of them with one hash can be made up.)

One opcode at a time it would take 12 us per chunk. So records in the form in which torch writes
them are taken in one step each, see `record_forms`. What is memoised inside of them is not kept but
for strings; where a pickle refers to it all the same, which torch's do not, the machine starts
again, without such steps.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from types import FunctionType

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from dcp_reshard.metadata_entries import Entry, IndexEntry, PropertiesEntry
from dcp_reshard.record_forms import FORMS, Form, RecordMachine
from dcp_reshard.stack_machine import DATA_STEPS, push

__all__ = ["run_metadata"]

# Of longer ones, thousands with one hash can be made up. 2**63 has 9 bytes.
_MAX_INT_BYTES = 9
# A tuple as a key has a message of its own.
_KEYS = (str, int, float, type(None), IndexEntry)

FindClass = Callable[[str, str], object]
"""What stands for a class or function of this module and name; raises if nothing does."""


class _SkippedError(Exception):
    """The pickle refers to what a step has left out of the memo."""


def run_metadata(data: bytes, find_class: FindClass, *, steps: bool = True) -> object:
    """What a pickle of metadata says.

    Args:
        data: The pickle.
        find_class: What stands for a name.
        steps: Whether to take records of a known form in one step. The value is the same.

    Raises:
        UnsafeCheckpointError: It has an opcode that metadata do not need.
        CheckpointFormatError: It is cut, broken, or has bytes after its end.
    """
    try:
        return _Machine(data, find_class, steps=steps).run()
    except _SkippedError:
        return _Machine(data, find_class, steps=False).run()


class _Machine(RecordMachine):
    """The machine, and the forms that it knows by now."""

    __slots__ = ("find_class", "forms", "unknown")

    def __init__(self, data: bytes, find_class: FindClass, *, steps: bool) -> None:
        super().__init__(data)
        self.find_class = find_class
        self.forms: dict[bytes, Form] = {}
        self.unknown: dict[object, type[Form]] = dict(FORMS) if steps else {}

    def run(self) -> object:
        data = self.data
        if len(data) < 3 or data[0] != 0x80 or not 2 <= data[1] <= 5:
            raise CheckpointFormatError(
                f"does not start like a pickle of protocol 2 to 5 ({data[:2]!r})"
            )
        self.position = 2
        start = 0
        try:
            while (op := data[start := self.position]) != _STOP:
                self.position += 1
                step = _STEPS.get(op)
                if step is None:
                    raise self.refuse(f"opcode {bytes([op])!r}")
                step(self)
        except (IndexError, struct.error) as error:
            if self.position >= len(data):
                raise CheckpointFormatError(
                    f"cut inside the opcode at byte {start}, or without STOP", start=start
                ) from error
            raise CheckpointFormatError(
                f"could not find MARK, or what the opcode at byte {start} takes", start=start
            ) from error
        stray = len(data) - self.position - 1
        if stray:
            raise CheckpointFormatError(
                f"{stray} stray bytes after the pickle", start=self.position + 1
            )
        if self.below or len(self.stack) != 1:
            raise CheckpointFormatError(f"{len(self.stack)} values at the end, not one")
        return self.stack[0]

    def refuse(self, what: str) -> UnsafeCheckpointError:
        return UnsafeCheckpointError(
            f"{what} at byte {self.position - 1} is not needed for checkpoint metadata, and "
            f"refused",
            start=self.position - 1,
        )

    def long(self) -> int:
        width = self.number(1)
        if width > _MAX_INT_BYTES:
            raise self.refuse(f"an integer of {width} bytes")
        return int.from_bytes(self.take(width), "little", signed=True)

    def text(self) -> str:
        return self.take(self.number(4)).decode("utf-8", "surrogatepass")


def _short_text(machine: _Machine) -> None:
    # Written out: keys of tensors and their paths are most of what forms do not take.
    data, start = machine.data, machine.position + 1
    end = start + data[start - 1]
    if end > len(data):
        machine.position = end
        raise IndexError
    text = data[start:end].decode("utf-8", "surrogatepass")
    machine.stack.append(text)
    if data[end : end + 1] == b"\x94":
        machine.memo[machine.memoized] = text
        machine.memoized += 1
        end += 1
    machine.position = end


def _skip_frame(machine: _Machine) -> None:
    length = machine.number(8)
    if machine.position + length > len(machine.data):
        raise CheckpointFormatError(f"cut inside the frame at byte {machine.position - 9}")


def _memoize(machine: _Machine, index: int) -> None:
    # Picklers count up, be the number written or not.
    if index != machine.memoized:
        raise CheckpointFormatError(f"memo index {index} where {machine.memoized} is the next")
    machine.memo[index] = machine.stack[-1]
    machine.memoized += 1


def _recall(machine: _Machine, width: int) -> None:
    start = machine.position - 1
    index = machine.number(width)
    form = machine.forms.get(machine.data[start : machine.position])
    if form is not None and form.take(machine, start):
        return
    if index not in machine.memo:
        if index < machine.memoized:
            raise _SkippedError
        raise CheckpointFormatError(f"Memo value not found at index {index}")
    value = machine.memo[index]
    machine.stack.append(value)
    if type(value) is type and value in machine.unknown:
        learned = machine.unknown[value].learn(machine, start)
        if learned is not None:
            machine.forms[machine.data[start : machine.position]] = learned
            del machine.unknown[value]


def _global(machine: _Machine) -> None:
    lines = machine.data.find(b"\n", machine.data.find(b"\n", machine.position) + 1) + 1
    if lines <= machine.position:
        machine.position = len(machine.data)
        raise IndexError
    module, name = machine.take(lines - machine.position).decode().split("\n")[:2]
    machine.stack.append(machine.find_class(module, name))


def _stack_global(machine: _Machine) -> None:
    module, name = machine.top(2)
    if type(module) is not str or type(name) is not str:
        raise CheckpointFormatError("a global whose name is not a string")
    machine.stack.append(machine.find_class(module, name))


def _new(machine: _Machine) -> None:
    cls, args = machine.top(2)
    if type(cls) is not type:
        raise CheckpointFormatError(f"a {type(cls).__name__} is not a class")
    machine.stack.append(_instance(cls, args))


def _call(machine: _Machine) -> None:
    function, args = machine.top(2)
    if type(function) is type:
        machine.stack.append(_instance(function, args))
        return
    if type(function) is not FunctionType or type(args) is not tuple:
        raise CheckpointFormatError(f"a {type(function).__name__} is not callable")
    machine.stack.append(function(*args))


def _instance(cls: type, args: object) -> object:
    if args != ():
        raise CheckpointFormatError(f"{cls.__name__} takes no arguments")
    return cls()


def _build(machine: _Machine) -> None:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if not isinstance(target, (Entry, PropertiesEntry)):
        raise CheckpointFormatError(f"a {type(target).__name__} cannot be given state")
    target.__setstate__(state)


def _set_items(machine: _Machine, items: Sequence[object]) -> None:
    target = machine.stack[-1]
    if type(target) is not dict or len(items) % 2:
        raise CheckpointFormatError(f"items of a {type(target).__name__}")
    keys = items[::2]
    for cls in set(map(type, keys)).difference(_KEYS):
        if any(type(part) is tuple for key in keys if type(key) is tuple for part in key):
            raise UnsafeCheckpointError("tuples in tuples are not needed for metadata: refused")
        raise CheckpointFormatError(f"unhashable type: {cls.__name__!r}, as a key")
    target.update(zip(keys, items[1::2], strict=True))


def _append_items(machine: _Machine, items: Sequence[object]) -> None:
    target = machine.stack[-1]
    if type(target) is not list:
        raise CheckpointFormatError(f"items of a {type(target).__name__}, which is no list")
    target += items


_Step = Callable[[_Machine], None]


_STOP = ord(".")
_STEPS: dict[int, _Step] = {
    **DATA_STEPS,
    ord("h"): lambda m: _recall(m, 1),
    ord("j"): lambda m: _recall(m, 4),
    0x94: lambda m: _memoize(m, m.memoized),
    ord("q"): lambda m: _memoize(m, m.number(1)),
    ord("r"): lambda m: _memoize(m, m.number(4)),
    0x8A: push(_Machine.long),
    ord("X"): push(_Machine.text),
    0x8C: _short_text,
    ord("a"): lambda m: _append_items(m, m.top(1)),
    ord("e"): lambda m: _append_items(m, m.above_mark()),
    ord("s"): lambda m: _set_items(m, m.top(2)),
    ord("u"): lambda m: _set_items(m, m.above_mark()),
    ord("c"): _global,
    0x93: _stack_global,
    ord("R"): _call,
    0x81: _new,
    ord("b"): _build,
    0x95: _skip_frame,
}
