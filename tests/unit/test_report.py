"""Reports as text and as plain data."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from dcp_reshard.report import (
    Cooperation,
    HyperParameter,
    LoadReport,
    OptimizerReport,
    ReadStats,
    format_bytes,
)


def make_report(**fields: Any) -> LoadReport:
    """A report of a small load in which nothing is out of the ordinary; other counters are 0."""
    ordinary: dict[str, Any] = {
        "checkpoint": "/checkpoints/7",
        "rank": 3,
        "tensors": 4,
        "objects": 2,
        "bytes_wanted": 1000,
        "bytes_read": 1500,
        "bytes_direct": 800,
        "requests": 6,
        "retries": 0,
        "chunks_read": 5,
        "chunks_read_whole": (),
        "records_verified": 5,
        "records_unverified": 1,
        "casts": (),
        "missing": (),
        "unexpected": (),
        "cooperation": Cooperation(reason="one rank"),
        "seconds": {"plan": 0.01, "total": 1.5},
    }
    nothing = {
        f.name: 0 for f in dataclasses.fields(LoadReport) if f.default is dataclasses.MISSING
    }
    return LoadReport(**nothing | ordinary | fields)


def test_an_ordinary_load_is_a_short_table() -> None:
    """Two columns, and no row for what did not happen."""
    assert str(make_report()).splitlines() == [
        "checkpoint  /checkpoints/7 (rank 3)",
        "loaded      4 tensors, 2 other values",
        "wanted      1000 B",
        "read        1.5 KiB (1.50 x wanted) in 6 requests, 800 B straight into place",
        "verified    5 records by checksum, 1 not",
        "mode        direct (one rank)",
        "seconds     plan 0.010, total 1.500",
    ]


def test_what_is_out_of_the_ordinary_has_a_row() -> None:
    """Casts, keys, retries, notes, the exchange, and the optimizer, each with its first five."""
    report = make_report(
        retries=2,
        chunks_read_whole=("sparse",),
        casts=(("w", "torch.float32", "torch.bfloat16"),),
        missing=tuple(f"m{i}" for i in range(7)),
        unexpected=("u",),
        repaired=("r",),
        notes=("first note", "second note"),
        cooperation=Cooperation(
            mode="cooperative",
            reason="asked for",
            bytes_sent=2048,
            bytes_received=3 << 20,
            rounds=4,
            imbalance=1.25,
        ),
        optimizer=OptimizerReport(
            restored=("a", "b"),
            renamed=(("new", "old"),),
            hyper_parameters=(
                HyperParameter(group=1, name="lr", what="kept", value="0.1", instead_of="0.2"),
            ),
        ),
    )
    rows = str(report).splitlines()[5:]
    assert rows.pop(3).startswith("retried           2 calls to the storage, after errors")
    assert rows == [
        "mode              cooperative (asked for)",
        "exchanged         2.0 KiB sent, 3.0 MiB received in 4 rounds; "
        "the rank that read most read 1.25 x the mean",
        "seconds           plan 0.010, total 1.500",
        "note              first note",
        "note              second note",
        "cast              1: w (torch.float32 to torch.bfloat16)",
        "repaired          1: r",
        "missing           7: m0, m1, m2, m3, m4 and 2 more",
        "unexpected        1: u",
        "read whole        1: sparse",
        "state restored    2: a, b",
        "renamed           1: new (was old)",
        "hyper-parameters  1: group 1 `lr` kept: 0.1, not 0.2",
    ]


@pytest.mark.parametrize("optimizer", [None, OptimizerReport(renamed=(("a", "b"),))])
def test_a_report_is_plain_data(optimizer: OptimizerReport | None) -> None:
    """Every field is there, and JSON gives back what was put in."""
    report = make_report(
        casts=(("w", "torch.float32", "torch.bfloat16"),), missing=("m",), optimizer=optimizer
    )
    plain = report.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert plain.keys() == {*LoadReport.__dataclass_fields__, "read_amplification"}
    assert plain["casts"] == [["w", "torch.float32", "torch.bfloat16"]]
    assert plain["missing"] == ["m"]
    assert plain["seconds"] == {"plan": 0.01, "total": 1.5}
    assert plain["cooperation"]["reason"] == "one rank"
    assert plain["read_amplification"] == 1.5
    assert (plain["optimizer"] is None) == (optimizer is None)
    if optimizer is not None:
        assert plain["optimizer"]["renamed"] == [["a", "b"]]


def test_amplification_of_a_load_that_wants_nothing() -> None:
    """A rank without a shard divides nothing by nothing."""
    assert make_report(bytes_wanted=0, bytes_read=700).read_amplification == 0.0


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (5 << 20, "5.0 MiB"),
        ((1 << 20) - 1, "1.0 MiB"),
        (3 << 29, "1.5 GiB"),
        (1 << 40, "1.0 TiB"),
        (5 << 50, "5120.0 TiB"),
    ],
)
def test_numbers_of_bytes_are_for_people(count: int, text: str) -> None:
    """Whole bytes, then one decimal in the largest unit that fits."""
    assert format_bytes(count) == text


def test_counters_start_at_zero_and_are_not_shared() -> None:
    """Each load counts for itself."""
    first, second = ReadStats(), ReadStats()
    first.seconds["read"] = 1.0
    assert second.seconds == {}
    assert (second.bytes_read, second.requests, second.records_verified) == (0, 0, 0)
