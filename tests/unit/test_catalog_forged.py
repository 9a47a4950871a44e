"""Metadata that contradicts itself is refused, whatever its values are."""

from __future__ import annotations

import pytest
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from dcp_reshard.errors import CheckpointFormatError, UnsafeCheckpointError
from tests.support.forged_metadata import (
    DEEP,
    ELSEWHERE,
    Change,
    add_index,
    build,
    chunk,
    drop_index,
    make_metadata,
    set_fields,
    size,
)

WRONG: dict[str, tuple[Change, str]] = {
    "version of the future": (set_fields("metadata", version="2.0.0"), "version '2.0.0'"),
    "version of no kind": (set_fields("metadata", version=7), "version 7"),
    "described by a list": (set_fields("metadata", state_dict_metadata=[]), "is a list"),
    "stored in a list": (set_fields("metadata", storage_data=[]), "is a list"),
    "described by nothing": (lambda m: m.state_dict_metadata.update(w=None), "a NoneType"),
    "a key that is no text": (lambda m: m.state_dict_metadata.update({7: None}), "key 7"),
    "a key with NUL": (lambda m: m.state_dict_metadata.update({"a\0": None}), "NUL"),
    "a long key": (lambda m: m.state_dict_metadata.update({"é" * 2049: None}), "4096 bytes"),
    "an index that is none": (lambda m: m.storage_data.update(w=ELSEWHERE), "does not map"),
    "a place that is none": (lambda m: m.storage_data.update({MetadataIndex("x"): 1}), "not map"),
    "an index of no text": (set_fields("index", fqn=7), "the chunk of 7"),
    "an unchecked index": (set_fields("index", offset=(0, 0)), "storage entry for the chunk of"),
    "a list as index": (set_fields("index", offset=[0, 0]), r"at \[0, 0\]"),
    "shape that is none": (set_fields("tensor", size=None), "shape None"),
    "an unchecked shape": (set_fields("tensor", size=(4, 3)), "shape .* is not understood"),
    "17 dims": (set_fields("tensor", size=size(*[1] * 17)), "up to 16 dims"),
    "dtype that is none": (set_fields("tensor", properties=None), "dtype None"),
    "chunks that are no list": (set_fields("tensor", chunks=()), "chunks are not a list"),
    "a chunk that is none": (set_fields("tensor", chunks=[None]), "a NoneType at None"),
    "an unchecked chunk": (set_fields("chunk", offsets=(0, 0)), "a ChunkEntry at"),
    "unchecked sizes": (set_fields("chunk", sizes=(2, 3)), "a chunk at"),
    "fewer offsets": (set_fields("chunk", offsets=size(0)), "a tensor of 2 dims"),
    "fewer sizes": (set_fields("chunk", sizes=size(2)), "a tensor of 2 dims"),
    "more sizes": (set_fields("chunk", sizes=size(2, 3, 1)), "a tensor of 2 dims"),
    "too many rows": (set_fields("chunk", sizes=size(5, 3)), r"`w`: .* lies outside"),
    "too many columns": (set_fields("chunk", sizes=size(2, 4)), r"lies outside of shape \(4, 3\)"),
    "rows beyond the last": (
        lambda m: vars(m.state_dict_metadata["w"].chunks[1]).update(sizes=size(3, 3)),
        r"chunk at \(2, 0\) of \(3, 3\) lies outside",
    ),
    "endless rows": (set_fields("chunk", sizes=size((1 << 63) - 1, 3)), "lies outside"),
    "a chunk that is not stored": (drop_index(1), r"chunk at \(2, 0\) is described but not"),
    "an object that is not stored": (drop_index(2), "object `n`: not stored"),
    "a chunk described twice": (
        lambda m: m.state_dict_metadata["w"].chunks.append(chunk(2, 2)),
        "described but not stored",
    ),
    "a chunk stored twice": (add_index("w", size(2, 0), ELSEWHERE), "two storage entries"),
    "an object stored twice": (add_index("n", None, ELSEWHERE), "two storage entries"),
    "stored, not described": (add_index("w", size(3, 0), ELSEWHERE), "belongs to no chunk"),
    "stored, not known": (add_index("x", None, ELSEWHERE), "`x`.*belongs to no chunk"),
    "overlap by one byte": (set_fields("info", length=101), "'f'.*share bytes.*one at 100"),
    "no bytes": (set_fields("info", length=0), "are not a range of bytes"),
    "negative length": (set_fields("info", length=-1), "length -1"),
    "huge length": (set_fields("info", length=1 << 62), "are not a range of bytes"),
    "length of no kind": (set_fields("info", length="9"), "length '9'"),
    "length by truth": (set_fields("info", length=True), "length True"),
    "negative offset": (set_fields("info", offset=-1), "offset -1"),
    "huge offset": (set_fields("info", offset=1 << 62), "are not a range of bytes"),
    "offset with a fraction": (set_fields("info", offset=0.5), "offset 0.5"),
    "transformed": (set_fields("info", transform_descriptors=["zstd"]), r"\['zstd'\], which"),
    "deep version": (set_fields("metadata", version=DEEP), "version"),
    "deep index": (set_fields("index", offset=DEEP), "storage entry"),
    "deep shape": (set_fields("tensor", size=DEEP), "shape"),
    "deep offsets": (set_fields("chunk", offsets=DEEP), "is not a chunk"),
    "deep sizes": (set_fields("chunk", sizes=DEEP), "a chunk at"),
    "deep length": (set_fields("info", length=DEEP), "not a range of bytes"),
    "deep name": (set_fields("info", relative_path=DEEP), "file name of type list"),
    "deep transforms": (set_fields("info", transform_descriptors=DEEP), "transforms"),
}


@pytest.mark.parametrize("what", WRONG)
def test_metadata_that_cannot_be_true_are_refused(what: str) -> None:
    """Every number, name and link is checked, and the message shows what is wrong."""
    change, message = WRONG[what]
    metadata = make_metadata()
    change(metadata)
    with pytest.raises(CheckpointFormatError, match=message):
        build(metadata)


class Empty:
    """Pickled as a record that is made, and never given its fields."""

    def __init__(self, cls: type) -> None:
        self.cls = cls

    def __reduce__(self) -> tuple[object, ...]:
        return self.cls, ()


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.state_dict_metadata["w"].chunks.append(Empty(ChunkStorageMetadata)),
        lambda m: m.state_dict_metadata.update(w=Empty(TensorStorageMetadata)),
        set_fields("tensor", properties=Empty(TensorProperties)),
        lambda m: m.storage_data.update({Empty(MetadataIndex): ELSEWHERE}),
        lambda m: m.storage_data.update({MetadataIndex("x"): Empty(_StorageInfo)}),
    ],
)
def test_records_without_any_field_are_refused(change: Change) -> None:
    """A record that is not filled is an error of ours, wherever it is."""
    metadata = make_metadata()
    change(metadata)
    with pytest.raises(CheckpointFormatError):
        build(metadata)


@pytest.mark.parametrize(
    "name",
    [
        "../f",
        "/f",
        "a/f",
        "a\\f",
        "f\0",
        "",
        ".",
        "..",
        "C:f",
        "s3://f",
        "f\n",
        "f" * 256,
        7,
    ],
    ids=repr,
)
def test_file_names_stay_inside_the_folder(name: object) -> None:
    """Parents, other folders, drives, URLs and what is no name are refused before any is opened."""
    metadata = make_metadata()
    set_fields("info", relative_path=name)(metadata)
    with pytest.raises(UnsafeCheckpointError, match="file name"):
        build(metadata)
