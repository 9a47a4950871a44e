"""Do ranks ask for one plain tensor although each may mean a value of its own?

A plain tensor is stored once per key: `dcp.save` keeps one rank's copy, and a load gives it to
every rank. That is right for what all ranks have alike, and wrong for what depends on the rank (a
random number generator's state, an expert's weights). Nothing in the checkpoint tells the two
apart. But where ranks ask under different meshes, they do not all have the same role, and it is
worth a warning. A number beside sharded tensors (the `step` of a sharded parameter's optimizer
state) is one of their kind, and says nothing.

Each rank sends a sketch with its plan: a hash of the meshes of its sharded tensors, and the
smallest hashes of the keys of its plain tensors. Sketches of ranks that ask for the same keys have
hashes in common, whatever the number of keys; up to `_SKETCH_KEYS` keys the answer is exact.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dcp_reshard._torch import describe_ranks, sharing_ranks

__all__ = ["AskedFor", "RankValueWarning", "collect_asked_for", "warn_of_shared_values"]

_SKETCH_KEYS = 32
_HASH_BYTES = 8
_SHOWN = 5


class RankValueWarning(UserWarning):
    """Ranks under different meshes get one rank's copy of a plain tensor."""


@dataclass(frozen=True, slots=True)
class AskedFor:
    """What a rank tells of the tensors that it asks for, in under 400 bytes."""

    meshes: bytes
    """Hash of the meshes of its sharded tensors."""

    plain: bytes
    """The smallest hashes of keys of its plain tensors, one after the other."""


def collect_asked_for(tensors: Mapping[str, Any]) -> AskedFor:
    """The sketch of a rank's flattened state dict; values that are not tensors do not count."""
    meshes: dict[int, object] = {}
    sharded: set[str] = set()
    plain: list[tuple[str, torch.Tensor]] = []
    for fqn, value in tensors.items():
        if isinstance(value, torch.Tensor):
            ranks = sharing_ranks(value)
            if ranks is None:
                plain.append((fqn, value))
            else:
                meshes[id(ranks)] = ranks
                sharded.add(_parent(fqn))
    described = sorted({describe_ranks(ranks) for ranks in meshes.values()})
    hashes = sorted(_hash(fqn) for fqn, t in plain if t.ndim or _parent(fqn) not in sharded)
    return AskedFor(_hash("|".join(described)), b"".join(hashes[:_SKETCH_KEYS]))


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def warn_of_shared_values(asked: Sequence[AskedFor], names: Iterable[str]) -> None:
    """Warn if ranks under different meshes ask for the same plain tensors.

    Args:
        asked: The sketches of all ranks.
        names: Keys of this rank, which may be those concerned.
    """
    ranks: dict[bytes, list[int]] = {}
    keys: dict[bytes, set[bytes]] = {}
    for rank, one in enumerate(asked):
        ranks.setdefault(one.meshes, []).append(rank)
        hashes = keys.setdefault(one.meshes, set())
        hashes |= {one.plain[i : i + _HASH_BYTES] for i in range(0, len(one.plain), _HASH_BYTES)}
    if len(ranks) == 1:
        return
    seen: set[bytes] = set()
    shared: set[bytes] = set()
    for hashes in keys.values():
        shared |= seen & hashes
        seen |= hashes
    if not shared:
        return
    known = sorted(name for name in names if _hash(name) in shared)
    more = len(shared) - len(known[:_SHOWN])
    which = ", ".join(f"`{name}`" for name in known[:_SHOWN])
    if more:
        which += f" and {more} more" if which else f"{more} of them"
    groups = "; ".join(_short(group) for group in list(ranks.values())[:4])
    warnings.warn(
        f"plain tensors ({which}) are given to all ranks from one rank's copy, although ranks ask "
        f"under different meshes ({groups}); values that depend on the rank need keys that do, see "
        f"docs/rank_values.md",
        RankValueWarning,
        stacklevel=2,
    )


def _hash(text: str) -> bytes:
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:4]))
    return f"ranks {shown} and {len(ranks) - 4} more" if len(ranks) > 4 else f"ranks {shown}"
