"""Containers: what `torch.save` writes is read, whatever it would not write is refused."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from dcp_reshard.container import Record, read_directory, read_record
from dcp_reshard.errors import CheckpointFormatError, CorruptRecordError
from tests.support.items import (
    EndsSink,
    directory_places,
    patch,
    reader,
    saved_bytes,
    write_container,
)

ITEM = saved_bytes(torch.arange(6.0).reshape(2, 3))
RECORDS = [("data.pkl", b"pickle"), ("data/0", b"0123456789"), ("version", b"3\n")]


def parse(data: bytes) -> list[Record]:
    return read_directory(len(data), reader(data))


def u16(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}H", *values)


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}L", *values)


def deflated(data: bytes) -> bytes:
    """The records of a container, written compressed by another tool."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name), zipfile.ZIP_DEFLATED)
    return out.getvalue()


def in_both_headers(data: bytes, local: int, entry: int, new: bytes) -> bytes:
    """The same field of the second record's two headers, overwritten."""
    place = directory_places(data)[1]
    return patch(patch(data, place[0] + local, new), place[1] + entry, new)


def local(data: bytes, at: int, new: bytes) -> bytes:
    return patch(data, directory_places(data)[1][0] + at, new)


def central(data: bytes, at: int, new: bytes) -> bytes:
    return patch(data, directory_places(data)[1][1] + at, new)


def with_zip64_end(
    data: bytes,
    *,
    start: int | None = None,
    locator: int | None = None,
    disks: int = 1,
    full: bool = False,
) -> bytes:
    """The container with a second, wide end record, as files beyond 4 GiB have."""
    body, end = data[:-22], data[-22:]
    _, _, _, _, count, size, at, _ = struct.unpack("<4s4H2LH", end)
    at = at if start is None else start
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0, 0, 0, 0, count, count, size, at)
    place = len(body) if locator is None else locator
    if full:
        end = patch(end, 8, b"\xff" * 12)
    return body + wide + struct.pack("<4sLQL", b"PK\x06\x07", 0, place, disks) + end


@hypothesis.given(
    st.dictionaries(st.text("abc/.é", min_size=1, max_size=5), st.binary(max_size=99), min_size=1)
)
def test_records_are_where_zipfile_finds_them(contents: dict[str, bytes]) -> None:
    """Names, contents, checksums and the places of the checksums, for any records."""
    hypothesis.assume(len(contents) <= 16)
    data = write_container(contents.items())
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        wanted = [
            (i.filename.partition("/")[2], archive.read(i), i.CRC) for i in archive.infolist()
        ]
    records = parse(data)
    found = [(r.name, data[r.start : r.start + r.length], r.crc) for r in records]
    assert found == wanted
    assert [data[r.crc_at : r.crc_at + 4] for r in records] == [u32(r.crc) for r in records]
    assert [read_record(r, reader(data)) for r in records] == [c for _, c, _ in wanted]


def test_records_of_a_real_item() -> None:
    """The elements are found in what torch writes, and every checksum of torch's is right."""
    records = {record.name: record for record in parse(ITEM)}
    assert {"data.pkl", "data/0", "byteorder", "version"} <= records.keys()
    for record in records.values():
        assert zlib.crc32(read_record(record, reader(ITEM))) == record.crc
    data = read_record(records["data/0"], reader(ITEM))
    assert struct.unpack("<6f", data) == (0, 1, 2, 3, 4, 5)
    assert records["data/0"].start % 64 == 0


@pytest.mark.parametrize("full", [False, True])
def test_wide_end_records_are_read(*, full: bool) -> None:
    """A second end record that agrees with the first, or that the first points to, is fine."""
    data = write_container(RECORDS)
    assert parse(with_zip64_end(data, full=full)) == parse(data)


DAMAGES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "deflated": (deflated, "compressed"),
    "method": (lambda d: in_both_headers(d, 8, 10, u16(8)), "compressed"),
    "encrypted": (lambda d: in_both_headers(d, 6, 8, u16(0x0809)), "encrypted"),
    "other size": (lambda d: central(d, 20, u32(9)), "compressed"),
    "entry of another disk": (lambda d: central(d, 34, u16(1)), "split"),
    "entry with a comment": (lambda d: central(d, 32, u16(1)), "comment|compressed|broken"),
    "end of another disk": (lambda d: patch(d, -18, u16(1)), "directory is not where"),
    "directory of another disk": (lambda d: patch(d, -16, u16(1)), "directory is not where"),
    "fewer records here": (lambda d: patch(d, -14, u16(2)), "directory is not where"),
    "fewer records": (lambda d: patch(d, -14, u16(2, 2)), "stray bytes"),
    "more records": (lambda d: patch(d, -14, u16(4, 4)), "shorter than its entries"),
    "no records": (lambda d: patch(d, -14, u16(0, 0)), "directory is not where"),
    "directory elsewhere": (lambda d: patch(d, -6, u32(0)), "directory is not where"),
    "comment": (lambda d: patch(d, -2, u16(3)) + b"abc", "end record without comment"),
    "comment that is not there": (lambda d: patch(d, -2, u16(3)), "end record without comment"),
    "bytes behind the end": (lambda d: d + b"\0", "end record without comment"),
    "no end": (lambda d: patch(d, -22, b"PK\x05\x07"), "end record without comment"),
    "bytes before the start": (lambda d: b"\0" + d, "not a zip container"),
    "two archives": (lambda d: d + d, "directory is not where"),
    "an archive behind another": (lambda d: d + write_container(RECORDS[:1]), "not where"),
    "wide end with another start": (lambda d: with_zip64_end(d, start=0), "disagree"),
    "wide end elsewhere": (lambda d: with_zip64_end(d, locator=0), "locator is wrong"),
    "wide end on two disks": (lambda d: with_zip64_end(d, disks=2), "locator is wrong"),
    "wide sizes missing": (lambda d: central(d, 20, u32(0xFFFFFFFF, 0xFFFFFFFF)), "zip64"),
    "local name": (lambda d: local(d, 30, b"X"), "headers disagree"),
    "local name length": (lambda d: local(d, 26, u16(3)), "headers disagree"),
    "local flags": (lambda d: local(d, 6, u16(0x0800)), "headers disagree"),
    "local method": (lambda d: local(d, 8, u16(8)), "headers disagree"),
    "local checksum": (lambda d: local(d, 14, u32(1)), "headers disagree"),
    "local size": (lambda d: local(d, 18, u32(9)), "headers disagree"),
    "local packed size": (lambda d: local(d, 22, u32(9)), "headers disagree"),
    "local extra length": (lambda d: local(d, 28, u16(0xFFFF)), "headers disagree"),
    "local magic": (lambda d: local(d, 0, b"PK\x03\x05"), "headers disagree"),
    "entry magic": (lambda d: central(d, 0, b"PK\x01\x03"), "broken entry"),
    "entry name length": (lambda d: central(d, 28, u16(0xFFFF)), "broken entry"),
    "overlap": (lambda d: central(d, 42, u32(0)), "starts at byte 0"),
    "shorter record": (lambda d: central(d, 20, u32(9, 9)), "starts at byte"),
    "name that is not UTF-8": (lambda d: in_both_headers(d, 38, 54, b"\xff"), "UTF-8"),
}


@pytest.mark.row("B26")
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_torch_does_not_write_is_refused(damage: str) -> None:
    """Two readers of zip files could disagree about each of these."""
    change, message = DAMAGES[damage]
    with pytest.raises(CheckpointFormatError, match=message):
        parse(change(write_container(RECORDS)))


@pytest.mark.row("B26")
@pytest.mark.parametrize("number", range(4))
def test_gaps_are_refused(number: int) -> None:
    """Bytes before, between or behind the records, which nothing accounts for."""
    with pytest.raises(CheckpointFormatError, match=r"expected|stray bytes|not a zip"):
        parse(write_container(RECORDS, gaps={number: 1}))


@pytest.mark.row("B26")
def test_duplicate_names_are_refused() -> None:
    """Which of two records of one name counts would depend on the reader."""
    with pytest.raises(CheckpointFormatError, match="two records of one name"):
        parse(write_container([*RECORDS, RECORDS[0]]))


def test_a_directory_of_any_size_is_not_allocated() -> None:
    """A huge directory, in a file that may be sparse, is refused before it is read."""
    size = 1 << 40
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 1, 1, 0xFFFFFFFF, 0xFFFFFFFF, 0)
    wide = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 0, 0, 0, 0, 1, 1, size, 64)
    tail = wide + struct.pack("<4sLQL", b"PK\x06\x07", 0, 64 + size, 1) + end

    def read(start: int, stop: int) -> bytes:
        assert stop - start < 1000
        return b"PK\x03\x04" if stop == 4 else tail[start - 64 - size : stop - 64 - size]

    with pytest.raises(CheckpointFormatError, match="directory has 1099511627776 bytes"):
        read_directory(64 + size + len(tail), read)
    with pytest.raises(CheckpointFormatError, match="directory is not where"):
        parse(write_container((str(i), b"") for i in range(17)))


@pytest.mark.parametrize("data", [b"", b"PK", b"\x80\x02cold", b"PK\x03\x04" + bytes(99)])
def test_what_is_no_container_is_refused(data: bytes) -> None:
    """Empty and short items, and torch's format before version 1.6."""
    with pytest.raises(CheckpointFormatError, match=r"zip container|end record"):
        parse(data)


@pytest.fixture
def _no_checksums() -> Iterator[None]:
    """Gigabytes are written without reading them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(before)


@pytest.mark.usefixtures("_no_checksums")
def test_containers_beyond_4_gib_are_read() -> None:
    """Wide sizes and places, and wide descriptors behind records that start beyond 4 GiB."""
    sink = EndsSink(4096)
    torch.save(torch.empty((1 << 32) + 7, dtype=torch.uint8), sink)
    records = {r.name: r for r in read_directory(sink.length, sink.read)}
    assert records["data/0"].length == (1 << 32) + 7
    last = records[".data/serialization_id"]
    assert last.start > 1 << 32
    assert read_record(last, sink.read).isdigit()


def test_a_record_is_compared_with_its_checksum() -> None:
    """Contents that changed are an error, unless the writer had checksums off."""
    data = write_container(RECORDS)
    record = parse(data)[1]
    damaged = patch(data, record.start, b"X")
    with pytest.raises(CorruptRecordError, match=r"CRC-32 is 0x.*recorded was 0x"):
        read_record(record, reader(damaged))
    unchecked = parse(central(damaged, 16, u32(0)))[1]
    assert unchecked.crc == 0
    assert read_record(unchecked, reader(damaged)) == b"X123456789"
