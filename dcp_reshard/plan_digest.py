"""Do all ranks load the same, in the same way? What the coordinator gets of each rank's plan.

torch 2.13 gathers the plans of all ranks on the coordinator, hands them to a planner that does
nothing with them, and scatters them again: 98 MB per rank for 180 tensors of 4096 chunks. A digest
is under 1 KB, and comes with a call that torch makes anyway.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.checkpoint.planner import LoadPlan

from dcp_reshard.catalog import Catalog
from dcp_reshard.choice import Choice
from dcp_reshard.errors import InconsistentRanksError, PlanError
from dcp_reshard.read_items import count_items, find_planned
from dcp_reshard.storage import ByteSource, read_bytes

__all__ = ["PlanDigest", "check_digests", "digest_plan"]

_FINGERPRINT_FILES = 4
_FINGERPRINT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class PlanDigest:
    """What the coordinator gets of a rank's plan, and gives back with what it has decided."""

    metadata: str
    """Digest of the metadata as this rank sees it."""

    keys: str
    """Digest of the keys asked for."""

    way: str
    """What decides which collective calls this rank is going to make."""

    num_items: int
    """Number of read items."""

    num_peers: int
    """Number of ranks of the reader's process group; 1 if this rank is in none."""

    place: tuple[int, int]
    """The host, and the kind of its storage (see `choice.find_place`)."""

    num_ranks: int = 0
    """Number of ranks that take part in the load; 0 until the coordinator has counted them."""

    choice: Choice | None = None
    """How they read, if the coordinator knows."""


def digest_plan(
    plan: LoadPlan,
    catalog: Catalog,
    *,
    source: ByteSource,
    way: str,
    num_peers: int,
    place: tuple[int, int],
) -> PlanDigest:
    """The digest of a plan; reads a few bytes of the metadata files.

    Raises:
        StorageError: A metadata file could not be read.
    """
    planned = find_planned(plan)
    fqns = planned.keys if planned is not None else {item.dest_index.fqn for item in plan.items}
    text = "\0".join(sorted(fqns)).encode(errors="surrogatepass")
    keys = hashlib.blake2b(text, digest_size=16).hexdigest()
    fingerprint = _fingerprint(catalog, source)
    return PlanDigest(fingerprint, keys, way, count_items(plan), num_peers, place)


def _fingerprint(catalog: Catalog, source: ByteSource) -> str:
    """A digest of the metadata as this rank sees it, also if another rank has read it.

    The end of a ``.metadata`` file has the id of its save: a rank that sees the folder of another
    checkpoint is found out by a few bytes.
    """
    digest = hashlib.blake2b(catalog.digest.encode(), digest_size=16)
    for name in catalog.read_from[:_FINGERPRINT_FILES]:
        size = source.size(name)
        end = read_bytes(source, name, max(0, size - _FINGERPRINT_BYTES), size)
        digest.update(size.to_bytes(8, "little") + end)
    return digest.hexdigest()


def check_digests(
    digests: Sequence[PlanDigest], *, require_same_keys: bool, require_peers: bool
) -> None:
    """Check that the ranks load the same.

    Args:
        digests: One for each rank.
        require_same_keys: Whether all have to ask for the same keys.
        require_peers: Whether the process groups of all readers have to be these ranks.

    Raises:
        InconsistentRanksError: They do not; the error names the ranks.
        PlanError: A process group has more ranks, or fewer.
    """
    _check_equal("metadata of the checkpoint", [digest.metadata for digest in digests])
    _check_equal("mode, verification or process group", [digest.way for digest in digests])
    if require_same_keys:
        _check_equal("keys asked for", [digest.keys for digest in digests])
    others = {digest.num_peers for digest in digests} - {len(digests)}
    if require_peers and others:
        raise PlanError(
            f"{len(digests)} ranks take part in the load, but the reader's process group has "
            f"{max(others)}"
        )


def _check_equal(what: str, digests: Sequence[str]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, digest in enumerate(digests):
        ranks.setdefault(digest, []).append(rank)
    if len(ranks) > 1:
        groups = "; ".join(f"ranks {_short(group)} one" for group in ranks.values())
        raise InconsistentRanksError(f"ranks differ in the {what}: {groups}")


def _short(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8]))
    return f"{shown} and {len(ranks) - 8} more" if len(ranks) > 8 else shown
