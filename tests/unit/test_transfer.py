"""Transfers to devices: what holds without one."""

from __future__ import annotations

from typing import Any

import pytest

from dcp_reshard import transfer
from dcp_reshard.errors import StorageError


class Stream:
    """Notes when it is waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def synchronize(self) -> None:
        self.events.append("waited")


@pytest.mark.parametrize("fails", [False, True])
def test_copies_under_way_are_awaited(*, fails: bool) -> None:
    """Copies of a side stream are waited for before a transfer ends, also if it fails."""
    events: list[str] = []
    stream: Any = Stream(events)

    def read() -> None:
        with transfer._awaited(stream):
            events.append("read")
            if fails:
                raise StorageError("told to fail")

    if fails:
        with pytest.raises(StorageError, match="told to fail"):
            read()
    else:
        read()
    assert events == ["read", "waited"]
