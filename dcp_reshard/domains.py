"""Who reads which bytes for the whole job, and in which round? Arithmetic that all ranks do alike.

Two-phase collective I/O, as MPI-IO does it (Thakur, Gropp and Lusk, "Data sieving and collective
I/O in ROMIO", 1999), on stored elements:

1. The parts of files that anyone needs (*units*) are laid one after the other: the *tape*. A
   position on the tape stands for a byte of a file.
2. Units are cut into *blocks*. A block is read whole or not at all; an atomic unit is one block.
3. The blocks needed are cut into *domains*, one per rank, contiguous and of equal bytes
   (`plan_domains`), and each domain into *slots*: what a rank reads at once, at least.
4. Consecutive slots are read in one *round*, as many as the memory allows for what the round reads,
   sends and receives on any rank (`plan_rounds`).

::

    tape     |unit 0 |unit 1   |unit 2     |unit 3  |
    blocks   |   |   |         |  |xx|  |  |  |  |  |      xx: nobody needs it
    domains  |<- rank 0 ->|<-- rank 1 -->|<- rank 2 ->|
    slots    |  0  |  1   |  0   |   1   |  0  |  1   |

An *extent* is a run of neighbouring blocks of one slot. What a rank wants of a chunk is cut at
the starts of extents (`elements`).

Knows no catalog, no tensor and no process group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = [
    "Domains",
    "IntArray",
    "Tape",
    "plan_domains",
    "plan_rounds",
    "plan_tape",
]

IntArray = npt.NDArray[np.int64]

_MAX_BLOCKS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """The units in the order of files and bytes, and their blocks; row i of a column is unit i."""

    files: IntArray
    """Number of the file."""

    starts: IntArray
    """First byte in the file."""

    lengths: IntArray
    """Bytes."""

    positions: IntArray
    """Where the unit starts on the tape."""

    first_blocks: IntArray
    """Number of the unit's first block; one entry more than units."""

    block_bytes: int
    """Bytes of a block, but for the last one of a unit, and for atomic units."""

    atomic: npt.NDArray[np.bool_]
    """Whether the unit is a single block."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return int(self.first_blocks[-1])

    def find_unit(self, position: int) -> int:
        """The unit at a position of the tape."""
        return int(np.searchsorted(self.positions, position, side="right")) - 1

    def block_starts(self, unit: int) -> IntArray:
        """Positions of the blocks of a unit."""
        count = int(self.first_blocks[unit + 1] - self.first_blocks[unit])
        starts: IntArray = np.arange(count, dtype=np.int64) * self.block_bytes
        return starts + int(self.positions[unit])

    def blocks(self) -> tuple[IntArray, IntArray]:
        """Position and bytes of each block."""
        counts = np.diff(self.first_blocks)
        units = np.repeat(np.arange(len(counts)), counts)
        inside = np.arange(self.num_blocks) - self.first_blocks[units]
        offsets = inside * self.block_bytes
        rest = self.lengths[units] - offsets
        return (
            self.positions[units] + offsets,
            np.where(self.atomic[units], rest, np.minimum(rest, self.block_bytes)),
        )


def plan_tape(
    files: IntArray,
    starts: IntArray,
    lengths: IntArray,
    atomic: npt.NDArray[np.bool_],
    *,
    block_bytes: int,
) -> tuple[Tape, IntArray]:
    """The tape of the parts of files that anyone needs.

    Args:
        files: Number of the file of each part.
        starts: First byte of each part in its file.
        lengths: Bytes of each part, at least 1.
        atomic: Whether the part must be read by one rank at once.
        block_bytes: Least size of a block. Blocks are larger if there would be too many.

    Returns:
        The tape, and the number of the unit of each part. Equal parts are one unit.
    """
    order = np.lexsort((lengths, starts, files))
    columns = [column[order] for column in (files, starts, lengths)]
    new = np.ones(len(order), dtype=bool)
    if len(order):
        new[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    units = np.empty(len(order), dtype=np.int64)
    units[order] = np.cumsum(new) - 1
    files, starts, lengths = (column[new] for column in columns)
    atomic = atomic[order][new]
    while np.sum(lengths[~atomic] // block_bytes) > _MAX_BLOCKS:
        block_bytes *= 2
    counts = np.where(atomic, 1, -(-lengths // block_bytes))
    tape = Tape(
        files,
        starts,
        lengths,
        np.cumsum(lengths) - lengths,
        np.concatenate(([0], np.cumsum(counts))).astype(np.int64),
        block_bytes,
        atomic,
    )
    return tape, units


@dataclass(frozen=True, slots=True, eq=False)
class Domains:
    """Who reads which extents, in which slot; row i of a column is extent i, in tape order."""

    starts: IntArray
    """Position of the extent on the tape."""

    lengths: IntArray
    """Bytes."""

    owners: IntArray
    """The rank that reads it."""

    slots: IntArray
    """Number of its slot among those of its rank."""

    slot_bytes: IntArray
    """Bytes of each slot, of the rank whose slot is the largest."""

    def find_extents(self, positions: IntArray) -> IntArray:
        """The extents that hold these positions."""
        return np.searchsorted(self.starts, positions, side="right") - 1


def plan_domains(
    tape: Tape, needed: npt.NDArray[np.bool_], *, num_ranks: int, slot_bytes: int
) -> Domains:
    """Cut the blocks needed into a domain per rank, and each domain into slots.

    Args:
        tape: All blocks.
        needed: Which of them are needed.
        num_ranks: Number of ranks. Some own nothing if there are fewer blocks than ranks.
        slot_bytes: A slot is not grown beyond this; a single larger block is a slot of its own.
    """
    starts, lengths = (column[needed] for column in tape.blocks())
    before = np.cumsum(lengths) - lengths
    total = max(1, int(lengths.sum()))
    # By the middle of the block: a domain is then at most half a block larger than its share.
    owners = np.minimum((2 * before + lengths) * num_ranks // (2 * total), num_ranks - 1)
    slots = np.zeros(len(starts), dtype=np.int64)
    for owner in np.unique(owners):
        mine = owners == owner
        slots[mine] = _fill(lengths[mine], slot_bytes)
    changes = np.ones(len(starts), dtype=bool)
    changes[1:] = (
        (owners[1:] != owners[:-1])
        | (slots[1:] != slots[:-1])
        | (starts[1:] != starts[:-1] + lengths[:-1])
    )
    (first,) = np.nonzero(changes)
    num_slots = int(slots.max(initial=-1)) + 1
    by_slot = np.zeros((num_ranks, num_slots), dtype=np.int64)
    np.add.at(by_slot, (owners, slots), lengths)
    return Domains(
        starts[first],
        np.add.reduceat(lengths, first) if len(first) else lengths,
        owners[first],
        slots[first],
        by_slot.max(axis=0),
    )


def _fill(lengths: IntArray, limit: int) -> IntArray:
    """Number of the slot of each block: slots are filled in order, up to the limit."""
    slots = np.empty(len(lengths), dtype=np.int64)
    before = np.cumsum(lengths) - lengths
    first = slot = 0
    while first < len(lengths):
        last = int(np.searchsorted(before + lengths, before[first] + limit, side="right"))
        last = max(last, first + 1)
        slots[first:last] = slot
        first, slot = last, slot + 1
    return slots


def plan_rounds(
    read: IntArray, sent: IntArray, received: IntArray, *, budget: int, read_limit: int
) -> IntArray:
    """The round of each slot.

    While one round is exchanged the next one is read, so what a round reads counts twice.

    Args:
        read: Most bytes that any rank reads, by slot.
        sent: Most bytes that any rank sends.
        received: Most bytes that any rank receives.
        budget: Bytes of buffers on a rank. Only a single slot may need more.
        read_limit: Bytes that a rank reads in a round. Only a single slot may have more.

    Example:
        >>> ones = np.ones(5, dtype=np.int64)
        >>> plan_rounds(ones, ones, ones, budget=8, read_limit=9).tolist()
        [0, 0, 1, 1, 2]
    """
    rounds = np.zeros(len(read), dtype=np.int64)
    need = used = 0
    for slot, (own, other) in enumerate(
        zip(read.tolist(), (sent + received).tolist(), strict=True)
    ):
        need, used = need + 2 * own + other, used + own
        if slot:
            full = need > budget or used > read_limit
            rounds[slot] = rounds[slot - 1] + full
            if full:
                need, used = 2 * own + other, own
    return rounds
