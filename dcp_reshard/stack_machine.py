"""The stack machine of pickles, and the opcodes that mean the same to all who read them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TypeVar

__all__ = ["DATA_STEPS", "StackMachine", "push"]


class StackMachine:
    """A pickle, and what has been made of it up to a place.

    MARK puts the stack aside and starts a new one. Taking what is not there is an IndexError.
    """

    __slots__ = ("below", "data", "memo", "position", "stack")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0
        self.stack: list[object] = []
        self.below: list[list[object]] = []
        self.memo: dict[int, object] = {}

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start, self.position = self.position, self.position + count
        if self.position > len(self.data):
            raise IndexError
        return self.data[start : self.position]

    def number(self, width: int) -> int:
        """The next bytes as a number that is not negative."""
        return int.from_bytes(self.take(width), "little")

    def mark(self) -> None:
        """Put the stack aside and start a new one."""
        self.below.append(self.stack)
        self.stack = []

    def above_mark(self) -> list[object]:
        """What is on the stack since the last mark, taken off it."""
        items, self.stack = self.stack, self.below.pop()
        return items

    def top(self, count: int) -> list[object]:
        """The topmost values, taken off the stack."""
        if count > len(self.stack):
            raise IndexError
        items = self.stack[-count:]
        del self.stack[-count:]
        return items


_M = TypeVar("_M", bound=StackMachine)


def push(make: Callable[[_M], object]) -> Callable[[_M], None]:
    """The step that puts a value on the stack."""

    def step(machine: _M) -> None:
        value = make(machine)
        machine.stack.append(value)

    return step


DATA_STEPS: dict[int, Callable[[StackMachine], None]] = {
    ord("("): StackMachine.mark,
    ord("K"): push(lambda m: m.number(1)),
    ord("M"): push(lambda m: m.number(2)),
    ord("J"): push(lambda m: int.from_bytes(m.take(4), "little", signed=True)),
    ord("G"): push(lambda m: struct.unpack(">d", m.take(8))[0]),
    ord("N"): push(lambda _: None),
    0x88: push(lambda _: True),
    0x89: push(lambda _: False),
    ord(")"): push(lambda _: ()),
    0x85: push(lambda m: tuple(m.top(1))),
    0x86: push(lambda m: tuple(m.top(2))),
    0x87: push(lambda m: tuple(m.top(3))),
    ord("t"): push(lambda m: tuple(m.above_mark())),
    ord("]"): push(lambda _: []),
    ord("}"): push(lambda _: {}),
}
"""Steps of numbers and containers, by opcode."""
