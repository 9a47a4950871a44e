"""Checkpoints that stock torch wrote wrongly: what do their chunks really hold?

For some uneven tensors under strided placements, torch 2.13 records other boxes than it stores (see
`misrecorded`). Most of these records have another shape than was recorded, and that shows in the
length of an item: `torch.save` makes items of equal length for tensors of equal shape, and a longer
one as soon as there is any element.

1. Tensors whose items have lengths that do not fit their recorded shapes, or whose chunks do not
   tile them, are picked out. No byte is read for the others.
2. The shapes of their records are read; the names of their files say which rank wrote them.
3. If all differences lie in one dim, the layouts that would have been recorded like this are
   looked for. If there is one answer, and it fills the tensor, the catalog gets the true boxes. If
   not, the tensor gets a `defect`, and is refused when it is asked for.

The same on all ranks: nothing but the checkpoint decides.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from dcp_reshard.box import Box, BoxArray, IntMatrix
from dcp_reshard.catalog import Catalog, StoredTensor
from dcp_reshard.coverage import find_defect
from dcp_reshard.errors import ReshardError
from dcp_reshard.misrecorded import find_true_runs
from dcp_reshard.payload import probe_payload
from dcp_reshard.probe import Item, ItemBytes, probe_items
from dcp_reshard.sharding import Run
from dcp_reshard.storage import ByteSource, CountingSource

__all__ = ["repair_catalog"]

# Fewer chunks than this are never wrong: two ranks for each of two axes is the least.
_MIN_CHUNKS = 4
_WHOLE_BYTES = 16 * 2**10
_MAX_REQUEST_BYTES = 2**20
_THREADS = 4
# As `FileSystemWriter` names them: the rank, and the number of the file.
_DATA_FILE = re.compile(r"__(\d{1,7})_\d{1,7}\.distcp")


def repair_catalog(catalog: Catalog, source: ByteSource) -> Catalog:
    """The catalog with the true boxes of tensors that were recorded wrongly.

    Tensors for which they cannot be found, but which are known to be wrong, get a `defect`.

    Args:
        catalog: What the metadata say.
        source: The files of the checkpoint, of which next to nothing is read.
    """
    suspects = [stored for stored in catalog.tensors.values() if _looks_wrong(stored)]
    changed: dict[str, StoredTensor] = {}
    for stored in suspects:
        try:
            shapes = _read_shapes(stored, catalog, source)
        except ReshardError:
            # Damaged items are told of when the tensor is asked for, by the load that needs them.
            continue
        if shapes is None:
            continue
        found = _with_true_boxes(stored, shapes, _find_writers(stored, catalog))
        if found is not stored:
            changed[stored.fqn] = found
    if not changed:
        return catalog
    digest = hashlib.blake2b(catalog.digest.encode(), digest_size=16)
    for stored in changed.values():
        digest.update(stored.chunks.offsets.tobytes() + stored.chunks.sizes.tobytes())
    tensors = {**catalog.tensors, **changed}
    return replace(catalog, tensors=tensors, digest=digest.hexdigest())


def _looks_wrong(stored: StoredTensor) -> bool:
    """Whether the items of a tensor do not have the lengths that its recorded boxes let expect."""
    sizes, lengths = stored.chunks.sizes, stored.lengths
    if len(sizes) < _MIN_CHUNKS or stored.payloads is not None or stored.defect:
        return False
    if bool((lengths == lengths[0]).all()) and bool((sizes == sizes[0]).all()):
        return False
    # One number per shape; a number that two shapes share only makes us look closer.
    radix = np.cumprod([1, *(side + 1 for side in stored.shape[:-1])], dtype=np.int64)
    kinds, which = np.unique(sizes @ radix, return_inverse=True)
    longest = np.zeros(len(kinds), np.int64)
    shortest = np.full(len(kinds), np.iinfo(np.int64).max)
    np.maximum.at(longest, which, lengths)
    np.minimum.at(shortest, which, lengths)
    if bool((longest != shortest).any()):
        return True
    empty = (sizes == 0).any(axis=1)
    if bool(empty.all()):
        return False
    if bool(empty.any()) and int(lengths[empty].max()) >= int(lengths[~empty].min()):
        return True
    return not _may_tile(stored.chunks, stored.shape)


def _may_tile(chunks: BoxArray, shape: Sequence[int]) -> bool:
    """Whether boxes that cut one dim tile it; of other boxes, whether their volumes add up."""
    cut = np.flatnonzero((chunks.sizes != np.array(shape)).any(axis=0))
    if len(cut) != 1:
        return int(np.prod(chunks.sizes, axis=1).sum()) == int(np.prod(shape, dtype=np.int64))
    starts, sizes = chunks.offsets[:, cut[0]], chunks.sizes[:, cut[0]]
    starts, sizes = starts[sizes > 0], sizes[sizes > 0]
    order = np.argsort(starts)
    ends = np.cumsum(sizes[order])
    return int(ends[-1]) == shape[cut[0]] and bool((starts[order][1:] == ends[:-1]).all())


def _read_shapes(stored: StoredTensor, catalog: Catalog, source: ByteSource) -> IntMatrix | None:
    """The shapes of the stored records; None if some are not dense tensors of the right dims."""
    places = zip(
        stored.files.tolist(), stored.starts.tolist(), stored.lengths.tolist(), strict=True
    )
    items = [Item(catalog.files[file], start, length) for file, start, length in places]
    found: dict[Item, tuple[int, ...]] = {}

    def on_item(item: ItemBytes) -> None:
        payload = probe_payload(item.item.length, item.read)
        if payload is not None and len(payload.shape) == len(stored.shape):
            found[item.item] = payload.shape

    probe_items(
        items,
        CountingSource(source),
        whole_bytes=_WHOLE_BYTES,
        max_bytes=_MAX_REQUEST_BYTES,
        threads=_THREADS,
        on_item=on_item,
    )
    if len(found) != len(set(items)):
        return None
    return np.array([found[item] for item in items], dtype=np.int64)


def _find_writers(stored: StoredTensor, catalog: Catalog) -> list[int] | None:
    """The rank that wrote each record, from the name of its file."""
    names = [_DATA_FILE.fullmatch(catalog.files[number]) for number in stored.files.tolist()]
    writers = [int(name[1]) for name in names if name]
    return writers if len(writers) == len(names) else None


def _with_true_boxes(
    stored: StoredTensor, shapes: IntMatrix, writers: Sequence[int] | None
) -> StoredTensor:
    chunks = stored.chunks
    # Shapes without elements come in various forms, and hold nothing either way.
    empty = (shapes == 0).any(axis=1) & (chunks.sizes == 0).any(axis=1)
    differ = (shapes != chunks.sizes) & ~empty[:, None]
    whole = Box.full(stored.shape)
    if not differ.any() and find_defect(chunks, whole) is None:
        return stored
    dims = np.flatnonzero(differ.any(axis=0)).tolist() or range(len(stored.shape))
    answers = []
    if writers is not None and (len(dims) == 1 or not differ.any()):
        for dim in dims:
            answers += _answers(stored, shapes, writers, dim)
    if len(answers) == 1:
        return answers[0]
    if not differ.any():
        return stored
    return replace(stored, defect=_describe(stored, shapes, differ, len(answers)))


def _answers(
    stored: StoredTensor, shapes: IntMatrix, writers: Sequence[int], dim: int
) -> list[StoredTensor]:
    """The tensor with true boxes, if the boxes recorded along this dim are wrong: all ways."""
    size = stored.shape[dim]
    chunks = stored.chunks
    others = [d for d in range(len(stored.shape)) if d != dim]
    offsets = chunks.offsets.copy()
    sizes = shapes.copy()
    several = 1
    for rows in _groups(chunks, others):
        runs = [Run(int(chunks.offsets[i, dim]), int(chunks.sizes[i, dim])) for i in rows]
        lengths = [int(shapes[i, dim]) for i in rows]
        found = find_true_runs(size, runs, lengths, [writers[i] for i in rows])
        if not found:
            return []
        several = max(several, len(found))
        for i, run in zip(rows, found[0], strict=True):
            offsets[i, dim] = run.start
            sizes[i, dim] = run.length
    keep = np.flatnonzero((sizes > 0).all(axis=1))
    boxes = BoxArray(offsets[keep], sizes[keep])
    if find_defect(boxes, Box.full(stored.shape)) is not None:
        return []
    true = replace(
        stored,
        chunks=boxes,
        files=stored.files[keep],
        starts=stored.starts[keep],
        lengths=stored.lengths[keep],
        repaired=True,
    )
    return [true] * several


def _groups(chunks: BoxArray, dims: Sequence[int]) -> list[list[int]]:
    """Numbers of the chunks that are alike in these dims, and not empty there."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i in range(len(chunks)):
        box = chunks[i]
        key = tuple(box.offsets[d] for d in dims), tuple(box.sizes[d] for d in dims)
        if 0 not in key[1]:
            groups.setdefault(key, []).append(i)
    return list(groups.values())


def _describe(
    stored: StoredTensor, shapes: IntMatrix, differ: npt.NDArray[np.bool_], answers: int
) -> str:
    wrong = np.flatnonzero(differ.any(axis=1))
    i = int(wrong[0])
    why = "several layouts explain that" if answers else "no layout explains that without loss"
    return (
        f"{len(wrong)} of its {len(stored.chunks)} records have another shape than the metadata "
        f"say (chunk {stored.chunks[i]} has shape {tuple(shapes[i].tolist())!r}), and {why}; the "
        f"checkpoint itself is wrong, nothing was loaded; `ReshardSavePlanner` records true boxes"
    )
