"""`ReshardStorageReader`: the adapter between `dcp.load` and the bytes of a checkpoint.

What happens in a load, from the top::

    dcp.load(state, storage_reader=ReshardStorageReader(path), planner=ReshardLoadPlanner())
      read_metadata              metadata.read_catalog     .metadata -> Catalog, as torch's Metadata
                                 repair.repair_catalog     chunks that torch has recorded wrongly
      (planner)                  layout, plan              boxes held x chunks stored -> read items
      prepare_local_plan         plan_digest.digest_plan   the items stay here, their digest travels
      prepare_global_plan        plan_digest.check_digests on the coordinator
      read_data
        job_read.JobRead.run       choice                    each for itself, or together
          wanted.Wanted.resolve    read_items.Planned.parts  part of a chunk, destination; by the
                                   planner.resolve_tensor    items, with another planner
          wanted.Wanted.check_values  planner.check_value    what is not a tensor is read first
          direct.DirectRead.run
            probe.probe_items      payload.find_payload      where a chunk's elements lie; of small
                                                             ones all bytes
            transfer.plan_requests ranges.plan_spans         boxes -> runs -> few large requests
            transfer.Transfer.run  storage.read_into         preadv, straight into place if possible
          cooperative.CooperativeRead.run
            placing, domains       lockstep.exchange_rows    who reads what, and sends it to whom
            exchange.Exchange.run  window_reader, windows    rounds: read, send, put into place
          verdict.check_records    crc.join_parts            parts of a record against its checksum
        wanted.Wanted.deliver    planner.commit_plan, planner.load_bytes, planner.commit_tensor
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from dcp_reshard.catalog import Catalog, CatalogSource
from dcp_reshard.choice import Choice, choose_by_place, find_place
from dcp_reshard.destination import Destination, before_writing
from dcp_reshard.errors import PlanError
from dcp_reshard.garbage import paused_gc
from dcp_reshard.job_read import JobRead
from dcp_reshard.lockstep import Lockstep
from dcp_reshard.metadata import DcpCheckpoint, read_own_copies
from dcp_reshard.options import ReaderOptions
from dcp_reshard.plan_digest import PlanDigest, check_digests, digest_plan
from dcp_reshard.portable import portable
from dcp_reshard.read_items import count_items
from dcp_reshard.report import ReadStats
from dcp_reshard.retry import RetryingSource
from dcp_reshard.storage import CountingSource
from dcp_reshard.torch_metadata import broken_metadata, catalog_of, to_torch_metadata
from dcp_reshard.wanted import Wanted

__all__ = ["ReshardStorageReader"]

logger = logging.getLogger(__name__)


class ReshardStorageReader(StorageReader):
    """Reads the byte ranges that a load needs from a checkpoint that stock `dcp.save` wrote.

    Attributes:
        stats: Counters of the latest load on this rank.
        destination: Whether any rank may have written to its destination.
        waiting_for: What all ranks have to do for this rank to go on, where it waits.

    Example:
        >>> import torch, torch.distributed.checkpoint as dcp
        >>> state = {"w": torch.zeros(4, 4)}
        >>> dcp.load(state, storage_reader=ReshardStorageReader(path))  # doctest: +SKIP
    """

    def __init__(
        self,
        checkpoint: str | os.PathLike[str] | CatalogSource,
        *,
        mode: str = "auto",
        process_group: dist.ProcessGroup | None = None,
        options: ReaderOptions | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Keep what to read, and how.

        Args:
            checkpoint: Folder of the checkpoint, or a `CatalogSource` for one of another format.
            mode: ``"direct"``: every rank reads what it needs. ``"cooperative"``: every byte is
                read by one rank, which sends it to those that need it. ``"auto"``: what pays (see
                `dcp_reshard.choice`).
            process_group: The group that `dcp.load` is called with, if it is not the default one.
            options: Memory, threads, verification.
            on_progress: Called with bytes done and bytes in all while large chunks are read.

        Raises:
            ValueError: `mode` is not one of these.
        """
        super().__init__()
        if mode not in ("auto", "direct", "cooperative"):
            raise ValueError(f"`mode` must be 'auto', 'direct' or 'cooperative', got {mode!r}")
        self.mode = mode
        self.options = options or ReaderOptions()
        self.process_group = process_group
        self.on_progress = on_progress
        self.destination = Destination()
        self.reset(checkpoint)

    def reset(self, checkpoint_id: str | os.PathLike[str] | CatalogSource | None = None) -> None:
        """Forget the latest load; from now on read `checkpoint_id`, if it is given."""
        if isinstance(checkpoint_id, (str, os.PathLike)):
            self._checkpoint: CatalogSource = DcpCheckpoint(checkpoint_id)
        elif checkpoint_id is not None:
            self._checkpoint = checkpoint_id
        self.stats = ReadStats()
        self._source: CountingSource | None = None
        self._lockstep: Lockstep | None = None
        self._plan: LoadPlan | None = None
        self._own: Catalog | None = None
        self._load_id = str(uuid.uuid4())
        self.destination.touched = False
        self.waiting_for = "read the metadata"

    @property
    def checkpoint_id(self) -> str:
        """The checkpoint, as text."""
        return str(self._checkpoint)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this reader can read from there: a path, not a URL."""
        return "://" not in os.fspath(checkpoint_id)

    # No parameter may be named `kwargs` here: torch 2.13 looks for that name, takes it to mean that
    # per-rank metadata can be read, and then falls back on this rank alone while others wait.
    @portable
    def read_metadata(self) -> Metadata:
        """Read the metadata, and as good as nothing else (see `repair`).

        If the reader was given a process group, its first rank reads and sends the others what it
        found: they read nothing, and hold columns instead of objects. This is a collective call
            then.

        A failure is raised when the metadata is first looked into: `dcp.load` would swallow it
        here.
        """
        started = time.perf_counter()
        self.stats = ReadStats()
        self._source = None
        self._lockstep = None
        self.destination.touched = False
        self.waiting_for = "read the metadata"
        try:
            with self.destination.said_in_errors():
                catalog = self._share_catalog()
        except Exception as error:
            return broken_metadata(error)
        self.stats.seconds["metadata"] = time.perf_counter() - started
        meta = StorageMeta(checkpoint_id=self.checkpoint_id, load_id=self._load_id)
        return to_torch_metadata(catalog, storage_meta=meta, reader=self)

    def _share_catalog(self) -> Catalog:
        group = self.process_group
        if group is None or dist.get_world_size(group) <= 1:
            return self._read_catalog()
        # No rank may fail before this call: the others would wait in it.
        self._lockstep = step = Lockstep(group, self._wait_for)
        with step.held_interrupts():
            return step.compute_once(self._read_catalog, what="reading the metadata")

    def _open(self) -> CountingSource:
        self._retrying = RetryingSource(self._checkpoint.open(), self.options.retry)
        return CountingSource(self._retrying)

    def _read_catalog(self) -> Catalog:
        self._source = self._open()
        try:
            return self._checkpoint.read_catalog(self._source)
        finally:
            self._source.close()

    @before_writing
    def set_up_storage_reader(
        self,
        metadata: Metadata,
        is_coordinator: bool,
        **kwargs: Any,
    ) -> None:
        """Take the catalog out of the metadata, and find the copies that are this rank's own.

        Args:
            metadata: What `read_metadata` has returned.
            is_coordinator: Not needed.
            kwargs: torch 2.13 gives the rank in the process group of the load if there is a
                parameter of this name.
        """
        self._catalog: Catalog = catalog_of(metadata)
        if self._source is None:
            self._source = self._open()
        self._own = read_own_copies(self._source, self._catalog, rank=kwargs.get("rank", 0))

    @before_writing
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Keep the plan here, and send a digest of it instead."""
        assert self._source is not None
        # If there is no memory for it, torch tells the other ranks: none waits for this one yet.
        self._lockstep = self._lockstep or self._find_peers()
        digest = digest_plan(
            plan,
            self._catalog,
            source=self._source,
            way=self._way(),
            num_peers=1 if self._lockstep is None else self._lockstep.size,
            place=find_place(self._source) if self.mode == "auto" else (0, 0),
        )
        self.waiting_for = "make their plans"
        if not self.options.keep_plan_local:
            return replace(plan, storage_data=digest)
        self._plan = plan
        return replace(plan, items=[], storage_data=digest)

    def _way(self) -> str:
        """What decides which collective calls this rank is going to make."""
        unverified = self.options.verify == "off"
        group = "none" if self.process_group is None else "given"
        return f"{self.mode}, {'un' if unverified else ''}verified, process group {group}"

    @before_writing
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Compare the digests of all ranks, on the coordinator.

        Raises:
            InconsistentRanksError: Ranks see different checkpoints (or ask for different keys, if
                that is not allowed); the error reaches all ranks.
            PlanError: The reader's process group is not that of the load.
        """
        digests = [plan.storage_data for plan in plans]
        check_digests(
            digests,
            require_same_keys=self.options.require_same_keys,
            require_peers=len(plans) > 1
            and (self.process_group is not None or self.mode == "cooperative"),
        )
        choice = self._choose([digest.place for digest in digests])
        return [
            replace(plan, storage_data=replace(digest, num_ranks=len(plans), choice=choice))
            for plan, digest in zip(plans, digests, strict=True)
        ]

    def _choose(self, places: Sequence[tuple[int, int]]) -> Choice | None:
        if self.mode == "auto":
            return choose_by_place(np.array(places))
        return Choice("direct" if self.mode == "direct" else "cooperative", "asked for")

    @portable
    @paused_gc()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read everything that the plan asks for into the memory that the planner gives.

        Raises:
            StorageError: Bytes could not be read.
            CheckpointFormatError: An item is not what the metadata say, or has the wrong checksum.
            PlanError: The plan was changed by a planner, although it never left this rank.
        """
        # What a deferred planner has made itself is no destination of the caller's.
        own = getattr(planner, "fills_own_memory", False)
        with self.destination.said_in_errors():
            self._read_data(plan, planner, Destination() if own else self.destination)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_data(self, plan: LoadPlan, planner: LoadPlanner, destination: Destination) -> None:
        assert self._source is not None
        self.waiting_for = "read their parts"
        lockstep = self._choose_peers(plan)
        started = time.perf_counter()
        wanted = Wanted(self._catalog, planner, self._own, self.options.allow_unsafe_pickle)
        job = JobRead(
            plan.storage_data.choice if isinstance(plan.storage_data, PlanDigest) else None,
            self._source,
            self._catalog,
            self.options,
            lockstep,
            self.on_progress,
            wanted.check_values,
            destination,
        )
        result = job.run(lambda: wanted.resolve(self._local_plan(plan)))
        seconds, found = time.perf_counter() - started, result.found
        wanted.deliver()
        self.stats.requests = self._source.requests
        self.stats.bytes_read = self._source.bytes_read
        self.stats.retries = self._retrying.retries
        self.stats.rereads = found.rereads
        self.stats.notes = self._catalog.notes
        self.stats.bytes_direct = found.bytes_direct
        self.stats.chunks_read = wanted.num_chunks
        self.stats.chunks_read_whole = tuple(sorted(found.chunks_read_whole))
        self.stats.records_verified = result.verdict.verified
        self.stats.records_unverified = result.verdict.unverified
        self.stats.cooperation = result.cooperation
        self.stats.seconds |= found.seconds | {
            "resolve": wanted.seconds,
            "read": seconds - wanted.seconds - result.verify_seconds,
            "verify": result.verify_seconds,
        }
        self._plan = None
        self.waiting_for = "end the load"

    def _find_peers(self) -> Lockstep | None:
        """The ranks that may read together; None if there are no others."""
        if not dist.is_available() or not dist.is_initialized():
            return None
        if dist.get_world_size(self.process_group) <= 1:
            return None
        return Lockstep(self.process_group, self._wait_for)

    def _choose_peers(self, plan: LoadPlan) -> Lockstep | None:
        """The ranks that this one reads together with; None if it reads alone."""
        num_ranks = plan.storage_data.num_ranks if isinstance(plan.storage_data, PlanDigest) else 1
        step = self._lockstep
        if num_ranks == 1 or step is None:
            return None
        if step.size == num_ranks:
            return step
        # `dcp.load(process_group=...)` does not tell the reader which group it is.
        logger.info(
            "the load runs on %d of %d ranks: give the reader its process group, so that parts of "
            "records read by several ranks can be verified together",
            num_ranks,
            step.size,
        )
        return None

    def _wait_for(self, what: str) -> None:
        self.waiting_for = what

    def _local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan of this rank, of which `plan` came back from the coordinator."""
        digest = plan.storage_data
        if not self.options.keep_plan_local or not isinstance(digest, PlanDigest):
            return plan
        if plan.items or self._plan is None or digest.num_items != count_items(self._plan):
            raise PlanError(
                "the planner changed the plan after it was made, but the plan had been kept on "
                "this rank; use `ReaderOptions(keep_plan_local=False)` with this planner"
            )
        return self._plan
