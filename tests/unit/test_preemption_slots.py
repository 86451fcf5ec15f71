"""The file that says which slots a machine has."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_runtime.preemption import SlotNotice, slot_file_watcher, write_slots


@pytest.fixture
def notices(tmp_path: Path) -> Iterator[list[SlotNotice]]:
    seen: list[SlotNotice] = []
    watcher = slot_file_watcher(tmp_path / "slots")
    watcher.start(seen.append)
    yield seen
    watcher.stop()
    watcher.stop()


def wait_for(notices: list[SlotNotice], count: int, deadline_s: float = 10.0) -> list[SlotNotice]:
    end_s = time.monotonic() + deadline_s
    while len(notices) < count and time.monotonic() < end_s:
        time.sleep(0.005)
    return notices


def test_each_change_is_delivered_once(tmp_path: Path, notices: list[SlotNotice]) -> None:
    write_slots(tmp_path / "slots", (2, 0), 2.5)
    assert wait_for(notices, 1) == [SlotNotice((0, 2), 2.5)]
    write_slots(tmp_path / "slots", (), 0.0)
    assert wait_for(notices, 2)[1:] == [SlotNotice((), 0.0)]
    assert wait_for(notices, 3, 0.2)[2:] == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[1]",
        b'{"slots": [64], "grace_period_s": 1}',
        b'{"slots": [-1], "grace_period_s": 1}',
        b'{"slots": [0], "grace_period_s": NaN}',
        b'{"slots": [0], "grace_period_s": -1}',
        b'{"slots": 3, "grace_period_s": 1}',
        b"[" * 4000,
    ],
)
def test_what_cannot_be_read_changes_nothing_and_the_next_change_is_delivered(
    tmp_path: Path, notices: list[SlotNotice], content: bytes
) -> None:
    path = tmp_path / "slots"
    path.write_bytes(content)
    end_s = time.monotonic() + 10.0
    while path.exists() and time.monotonic() < end_s:
        time.sleep(0.005)
    write_slots(path, (1,), 1.0)
    assert wait_for(notices, 1) == [SlotNotice((1,), 1.0)]
