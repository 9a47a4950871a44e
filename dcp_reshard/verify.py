"""Is this checkpoint whole? Reads it from end to end, without a model and without a process group.

1. The metadata are read and validated (`metadata`), and the chunks of every tensor are shown to
   tile it.
2. File by file, every item is probed: its container must be sound, the tensor in it of the shape
   and dtype that the metadata say, an object plain data.
3. Every record of every item is read and compared with its checksum. Small ones are at hand from
   the probing, large ones are read in blocks; memory stays within the budget of the options.

What is wrong is collected, not raised: a report names all of it. What cannot be known without a
manifest is whether the files belong together: records of two saves each agree with their own
checksums. The report says so (`save_identity`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence

from dcp_reshard.catalog import Catalog, CatalogSource
from dcp_reshard.errors import CheckpointFormatError, StorageError
from dcp_reshard.metadata import DcpCheckpoint
from dcp_reshard.options import ReaderOptions
from dcp_reshard.retry import RetryingSource
from dcp_reshard.storage import CountingSource
from dcp_reshard.verification import Verification
from dcp_reshard.verify_report import VerifyReport

__all__ = ["verify"]

_MAX_PROBLEMS = 1000


def verify(
    checkpoint_id: str | os.PathLike[str] | CatalogSource,
    *,
    allowed_classes: Sequence[type] = (),
    options: ReaderOptions | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Read a whole checkpoint and say what is wrong with it.

    Args:
        checkpoint_id: Folder of a checkpoint that `dcp.save` wrote, or a `CatalogSource`.
        allowed_classes: Classes that values which are not tensors may be instances of, beside plain
            data.
        options: Memory, threads, retries, and what counts: with ``verify="required"`` a record
            without a checksum is a problem, with ``"off"`` only forms are checked.
        on_progress: Called with bytes done and bytes in all, after each file and each large block.

    Raises:
        StorageError: There is no checkpoint, or its metadata cannot be read.

    Example:
        >>> report = verify(path)  # doctest: +SKIP
        >>> assert report.ok, str(report)  # doctest: +SKIP
    """
    options = options or ReaderOptions()
    checkpoint = (
        DcpCheckpoint(checkpoint_id)
        if isinstance(checkpoint_id, (str, os.PathLike))
        else checkpoint_id
    )
    started = time.perf_counter()
    retrying = RetryingSource(checkpoint.open(), options.retry)
    source = CountingSource(retrying)
    # Until the metadata have been read, all that can be said is that they are broken.
    run = Verification(source, Catalog({}, {}, ()), options, on_progress, allowed_classes)
    try:
        run.catalog = checkpoint.read_catalog(source)
        run.notes += run.catalog.notes
        run.check_coverage()
        run.check_files()
    except CheckpointFormatError as error:
        run.add("metadata", error)
    finally:
        try:
            source.close()
        except StorageError as error:
            run.add("file", error)
    catalog = run.catalog
    return VerifyReport(
        checkpoint=str(checkpoint),
        tensors=len(catalog.tensors),
        objects=len(catalog.objects),
        chunks=sum(len(stored.chunks) for stored in catalog.tensors.values()),
        files=len(catalog.files),
        bytes_read=source.bytes_read,
        requests=source.requests,
        retries=retrying.retries,
        records_verified=run.verified,
        records_unverified=run.unverified,
        problems=tuple(run.problems[:_MAX_PROBLEMS]),
        num_problems=len(run.problems),
        notes=tuple(run.notes),
        seconds=time.perf_counter() - started,
    )
