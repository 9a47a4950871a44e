"""In which order do pieces travel? So that both sides know it, and no message says what is in it.

By round, then by the other rank, then by extent and request. Pieces that a rank wants of its own
window come last in a round, and do not travel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dcp_reshard.domains import IntArray
from dcp_reshard.pieces import Pieces

__all__ = ["Messages", "Place", "sort_messages"]


class Place(NamedTuple):
    """One piece in the messages of a round."""

    request: int
    """The request that it is part of."""

    first: int
    """First element."""

    last: int
    """One past the last element."""

    start: int
    """First byte in the messages."""

    nbytes: int
    """Bytes, padding included."""


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Pieces in the order in which they travel: by round, then by rank, the own ones last."""

    pieces: Pieces
    """The pieces."""

    bounds: IntArray
    """First piece of each round; one entry more than rounds."""

    splits: IntArray
    """Bytes of the pieces of round k and rank r at ``[k, r]``, own ones included."""

    own: int
    """This rank."""

    def travelling(self, index: int) -> list[int]:
        """Bytes to or from each rank in a round; own ones do not travel."""
        splits = self.splits[index].copy()
        splits[self.own] = 0
        return [int(n) for n in splits]

    def places(self, index: int) -> list[Place]:
        """The pieces of a round."""
        part = slice(self.bounds[index], self.bounds[index + 1])
        nbytes = self.pieces.nbytes[part]
        columns = (
            self.pieces.requests[part],
            self.pieces.first[part],
            self.pieces.last[part],
            np.cumsum(nbytes) - nbytes,
            nbytes,
        )
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return [Place(*row) for row in rows]


def sort_messages(
    pieces: Pieces, ranks: IntArray, rounds: IntArray, *, num_ranks: int, num_rounds: int, own: int
) -> Messages:
    """Put pieces into the order of their messages.

    Args:
        pieces: The pieces.
        ranks: The other side of each piece.
        rounds: The round of each piece.
        num_ranks: Number of ranks.
        num_rounds: Number of rounds.
        own: This rank.
    """
    order = np.lexsort((pieces.requests, pieces.extents, ranks, ranks == own, rounds))
    splits = np.zeros((num_rounds, num_ranks), dtype=np.int64)
    np.add.at(splits, (rounds, ranks), pieces.nbytes)
    bounds = np.searchsorted(rounds[order], np.arange(num_rounds + 1))
    return Messages(pieces.select(order), bounds, splits, own)
