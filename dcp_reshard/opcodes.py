"""Is a pickle of metadata made of the opcodes that it needs, before any of them is carried out?

A C unpickler allocates by length fields and memo indices before any hook of ours is called. So all
opcodes of the file are walked over first: only those that writing a DCP `Metadata` needs are
allowed, with lengths and memo indices inside the file. Runs of opcodes of fixed length are matched
by one regular expression, so that this costs a fraction of the unpickling.

Tuples need care of their own, as keys of dicts. Python hashes a tuple by a recursion in C that
knows no limit: with a few hundred thousand of them inside one another, the process is gone. And the
hash is known, so that any number of tuples of integers can be made up that share one: a dict of
them takes quadratic time. So `check_opcodes` tells where tuples are built of anything but one or
two small integers or arguments of a call, and `show_tuples` puts in an opcode behind each, by which
the unpickler shows the tuple to a hook.
"""

from __future__ import annotations

import itertools
import re

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError

__all__ = ["check_opcodes", "show_tuples"]

# Opcodes without argument: MARK, NONE, REDUCE, APPEND(S), BUILD, EMPTY_*, SETITEM(S), NEWOBJ,
# NEWTRUE, NEWFALSE, MEMOIZE, STACK_GLOBAL.
_PLAIN = rb"(NRaeb}\])su\x81\x88\x89\x94\x93"
_TUPLE_OPCODES = b"t\x85\x86\x87"
_INT = rb"(?:K.|M..|J.{4})"
_FLAT_TUPLES = (
    # One or two integers, and arguments: what is called checks these itself.
    rb"%b(?:\x85|%b\x86)|[t\x85-\x87](?:\x94|q.)?R" % ((_INT,) * 2)
)
# Byte offsets from 2 GiB on.
_LONGS = rb"\x8a(?:\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_SHORT_STRINGS = b"|".join(b"\\x8c" + re.escape(bytes([n])) + b".{%d}" % n for n in range(64))
_FIXED = re.compile(
    # BININT1, BINGET, BINPUT | BININT2 | BININT, LONG_BINGET | BINFLOAT | FRAME | SHORT_BINUNICODE.
    # Bounded repetition: the matcher keeps a backtracking point per step.
    rb"(?:%b|[%b]+|[Khq].|M..|[Jj].{4}|[G\x95].{8}|%b|%b){1,4096}"
    % (_FLAT_TUPLES, _PLAIN, _LONGS, _SHORT_STRINGS),
    re.DOTALL,
)
# Opcode -> bytes of its little-endian length field: SHORT_BINUNICODE, BINUNICODE, LONG1.
_COUNTED = {0x8C: 1, 0x58: 4, 0x8A: 1}
_LONG_BINPUT = 0x72
# MEMOIZE, BINPUT, LONG_BINPUT.
_MEMO_BYTES = {b"\x94": 1, b"q": 2, b"r": 5}
_STOP = 0x2E
_GLOBAL = 0x63
# Of longer ones, thousands with one hash can be made up. 2**63 has 9 bytes.
_MAX_LONG_BYTES = 9


def check_opcodes(data: bytes, *, file: str) -> list[int]:
    """Check that a pickle consists of allowed opcodes only, ends with STOP, and stays in bounds.

    Returns:
        Where opcodes end that build a tuple of anything but one or two small integers, or arguments
        of a call.

    Raises:
        UnsafeCheckpointError: An opcode that writing metadata does not need.
        CheckpointFormatError: The pickle is cut, or has bytes after its end.
    """
    if len(data) < 3 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise CheckpointFormatError(
            f"file {file!r}: does not start like a pickle of protocol 2 to 5 ({data[:2]!r})",
            file=file,
        )
    tuples: list[int] = []
    position = 2
    while position < len(data):
        match = _FIXED.match(data, position)
        if match is not None:
            position = match.end()
            continue
        op = data[position]
        start = position
        if op in _COUNTED:
            first = position + 1 + _COUNTED[op]
            length = int.from_bytes(data[position + 1 : first], "little")
            position = first + length
            if op == 0x8A and length > _MAX_LONG_BYTES:
                raise _refuse(file, start, f"an integer of {length} bytes")
        elif op == _LONG_BINPUT:
            position += 5
            # A memo index is at most the number of opcodes before it; the unpickler allocates up to
            # it.
            if int.from_bytes(data[start + 1 : position], "little") > start:
                raise _refuse(file, start, "a memo index beyond the file's own size")
        elif op == _GLOBAL:
            end = data.find(b"\n", data.find(b"\n", position) + 1)
            position = end + 1 if end > position else len(data) + 1
        elif op in _TUPLE_OPCODES:
            position += 1
            if not _is_called(data, position):
                tuples.append(position)
        elif op == _STOP:
            if position + 1 < len(data):
                raise CheckpointFormatError(
                    f"file {file!r}: {len(data) - position - 1} stray bytes after the pickle",
                    file=file,
                    start=position + 1,
                )
            return tuples
        else:
            raise _refuse(file, start, f"opcode {bytes([op])!r}")
        if position > len(data):
            raise CheckpointFormatError(
                f"file {file!r}: cut inside the opcode at byte {start}", file=file, start=start
            )
    raise CheckpointFormatError(
        f"file {file!r}: the pickle ends at byte {len(data)} without STOP", file=file
    )


def _is_called(data: bytes, position: int) -> bool:
    """Whether the tuple built before `position` is at once used as the arguments of a call."""
    memo_bytes = _MEMO_BYTES.get(data[position : position + 1], 0)
    return data[position + memo_bytes : position + memo_bytes + 1] == b"R"


def _refuse(file: str, start: int, what: str) -> UnsafeCheckpointError:
    return UnsafeCheckpointError(
        f"file {file!r}: {what} at byte {start} is not needed for checkpoint metadata, and refused",
        file=file,
        start=start,
    )


def show_tuples(data: bytes, tuples: list[int]) -> bytes:
    """The pickle with an opcode behind each of these tuples that has `persistent_load` called.

    All of it is one frame: the pickle's own frames are too short now, and it may have none.
    """
    bounds = [2, *tuples, len(data)]
    body = b"Q".join([data[start:end] for start, end in itertools.pairwise(bounds)])
    return data[:2] + b"\x95" + len(body).to_bytes(8, "little") + body
