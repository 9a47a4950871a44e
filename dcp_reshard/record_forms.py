"""Records of a metadata pickle in the form in which torch writes them, each taken in one step.

A form is a sequence of opcodes with holes for numbers and names. The classes and field names in it
are references to the memo; which ones is learned from the first record that has references only:
it is matched with a pattern in which they are holes too, and they are looked up. From then on a
regular expression with exactly these references takes records of the form, and what it leaves on
the stack is what its opcodes would have left there.
"""

from __future__ import annotations

import functools
import re
from typing import ClassVar

from dcp_reshard.metadata_entries import (
    ChunkEntry,
    IndexEntry,
    PropertiesEntry,
    SizeEntry,
    StorageEntry,
    TensorEntry,
    make_size,
)
from dcp_reshard.stack_machine import StackMachine

__all__ = ["FORMS", "Form", "RecordMachine"]

_REF = rb"(?:h.|j.{4})"
# Integers that are not negative: one byte, two, four, and up to eight.
_INT = rb"(?:K.|M..|J.{3}[\0-\x7f]|\x8a\x05.{4}[\0-\x7f]|\x8a\x06.{5}[\0-\x7f])"
_TUPLE = rb"\)|%b\x85\x94|%b%b\x86\x94|%b%b%b\x87\x94|\((?:%b){4,16}t\x94" % ((_INT,) * 7)
# A string and its length, which is compared afterwards; one with the byte 0x94 fails that.
_TEXT = rb"(?:\x8c(.[^\x94]{0,255})\x94|(%b))" % _REF
_NEW = rb"\)\x81\x94}\x94\("
_CALL = rb"\x85\x94R\x94"
_INTEGERS = re.compile(_INT, re.DOTALL)
_MAX_KNOWN = 1 << 16


class RecordMachine(StackMachine):
    """A stack machine whose memo lacks what was memoised inside of records taken in one step."""

    __slots__ = ("memoized",)

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
        self.memoized = 0
        """Number of opcodes that memoise, whether `memo` has what they do or not."""

    def recall(self, reference: bytes) -> object:
        """What a reference refers to; KeyError if `memo` does not have it."""
        return self.memo[int.from_bytes(reference[1:], "little")]


class Form:
    """A form whose references are known."""

    __slots__ = ("_known", "_match")
    _parts: ClassVar[tuple[object, ...]] = ()
    """Patterns (bytes) and what is referred to between them."""

    def __init__(self, references: list[bytes]) -> None:
        known = map(re.escape, references)
        pattern = b"".join(p if type(p) is bytes else next(known) for p in self._parts)
        self._match = re.compile(pattern, re.DOTALL).match
        self._known: dict[bytes, tuple[object, int]] = {}

    @classmethod
    def learn(cls, machine: RecordMachine, start: int) -> Form | None:
        """The form, if there is a record of it at `start`."""
        found = _with_any_references(cls._parts).match(machine.data, start)
        if found is None:
            return None
        references = []
        for i, part in enumerate(cls._parts):
            if type(part) is not bytes:
                reference = found[f"r{i}"]
                try:
                    value = None if reference is None else machine.recall(reference)
                except KeyError:
                    return None
                if type(value) is not type(part) or value != part:
                    return None
                references.append(reference)
        return cls(references)

    def take(self, machine: RecordMachine, start: int) -> bool:
        """Take all records of the form that follow one another from `start`, if any does."""
        data, match, take = machine.data, self._match, self._take
        try:
            while (found := match(data, start)) and take(machine, found):
                machine.position = start = found.end()
        except KeyError:
            # It refers to what is not in the memo: opcode by opcode it shows why.
            pass
        return machine.position == start

    def _take(self, machine: RecordMachine, found: re.Match[bytes]) -> bool:
        raise NotImplementedError

    def _keep(self, key: bytes, value: object, memoized: int) -> tuple[object, int]:
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = value, memoized
        return value, memoized


@functools.cache
def _with_any_references(parts: tuple[object, ...]) -> re.Pattern[bytes]:
    named = [b"(?P<r%d>%b)" % (i, _REF) for i in range(len(parts))]
    pattern = b"".join(p if type(p) is bytes else named[i] for i, p in enumerate(parts))
    return re.compile(pattern, re.DOTALL)


def _size(text: bytes) -> SizeEntry:
    return make_size(tuple(map(_integer, _INTEGERS.findall(text))))


def _integer(text: bytes) -> int:
    return int.from_bytes(text[2 if text[0] == 0x8A else 1 :], "little")


def _memoized(size: bytes) -> int:
    """How often making a size memoises: arguments and result, and the tuple unless it is empty."""
    return 2 if size == b")" else 3


class _Chunks(Form):
    __slots__ = ()
    _parts = (
        *(ChunkEntry, _NEW, "offsets", make_size, b"(%b)" % _TUPLE, _CALL),
        *("sizes", make_size, b"(%b)" % _TUPLE, _CALL, rb"ub"),
    )

    def _take(self, machine: RecordMachine, found: re.Match[bytes]) -> bool:
        # Records alike are one: layers are, and a record cannot be changed.
        chunk, memoized = self._known.get(found[0]) or self._make(found)
        machine.stack.append(chunk)
        machine.memoized += memoized
        return True

    def _make(self, found: re.Match[bytes]) -> tuple[object, int]:
        offsets, sizes = found.groups()
        chunk = ChunkEntry()
        chunk.offsets, chunk.sizes = _size(offsets), _size(sizes)
        return self._keep(found[0], chunk, 2 + _memoized(offsets) + _memoized(sizes))


class _Places(Form):
    """An index and the storage entry that belongs to it; objects have no offset."""

    __slots__ = ()
    _parts = (
        *(IndexEntry, _NEW, "fqn", _TEXT, "index", b"(%b|N)" % _INT),
        *(b"(?:", "offset", make_size, b"(%b)" % _TUPLE, _CALL, b")?ub"),
        *(StorageEntry, _NEW, "relative_path", _TEXT),
        *("offset", b"(%b)" % _INT, "length", b"(%b)ub" % _INT),
    )

    def _take(self, machine: RecordMachine, found: re.Match[bytes]) -> bool:
        name, name_ref, number, offset, file, file_ref, start, length = found.groups()
        if (name and len(name) != name[0] + 1) or (file and len(file) != file[0] + 1):
            return False
        memo, memoized = machine.memo, machine.memoized + 2
        index, entry = IndexEntry(), StorageEntry()
        entry.relative_path = machine.recall(file_ref) if file is None else self._text(file)
        if name is None:
            index.fqn = machine.recall(name_ref)
        else:
            index.fqn = memo[memoized] = self._text(name)
            memoized += 1
        index.index = None if number == b"N" else _integer(number)
        index.offset = None
        if offset is not None:
            index.offset, count = self._known.get(offset) or self._keep(
                offset, _size(offset), _memoized(offset)
            )
            memoized += count
        memoized += 2
        if file is not None:
            memo[memoized] = entry.relative_path
            memoized += 1
        entry.offset, entry.length = _integer(start), _integer(length)
        entry.transform_descriptors = None
        machine.stack += (index, entry)
        machine.memoized = memoized
        return True

    def _text(self, text: bytes) -> object:
        # Every rank has pickled the names for itself.
        known = self._known.get(text)
        if known is None:
            known = self._keep(text, text[1:].decode("utf-8", "surrogatepass"), 1)
        return known[0]


class _Tensors(Form):
    """A tensor up to its chunks."""

    __slots__ = ()
    _parts = (
        *(TensorEntry, _NEW, "properties", PropertiesEntry),
        rb"\)\x81\x94\((%b)(%b)([\x88\x89])(%b)([\x88\x89])t\x94b" % (_REF, _REF, _REF),
        *("size", make_size, b"(%b)" % _TUPLE, _CALL, "chunks", rb"\]\x94"),
    )

    def _take(self, machine: RecordMachine, found: re.Match[bytes]) -> bool:
        *state, shape = found.groups()
        dtype, layout, requires_grad, memory_format, pinned = state
        key = b"".join(state)
        properties, _ = self._known.get(key) or self._keep(
            key,
            _properties(
                machine.recall(dtype),
                machine.recall(layout),
                requires_grad == b"\x88",
                machine.recall(memory_format),
                pinned == b"\x88",
            ),
            2,
        )
        size, count = self._known.get(shape) or self._keep(shape, _size(shape), _memoized(shape))
        machine.stack += (TensorEntry(), {})
        machine.mark()
        machine.stack += ("properties", properties, "size", size, "chunks", [])
        machine.memoized += 5 + count
        return True


def _properties(*state: object) -> PropertiesEntry:
    properties = PropertiesEntry()
    properties.__setstate__(state)
    return properties


FORMS: dict[object, type[Form]] = {
    ChunkEntry: _Chunks,
    IndexEntry: _Places,
    TensorEntry: _Tensors,
}
"""Forms by the class with which they begin."""
