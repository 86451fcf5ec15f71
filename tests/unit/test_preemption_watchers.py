import os
import signal
import time
from pathlib import Path

import pytest

from spot_runtime.preemption import PreemptionNotice, SigtermWatcher, Watcher, notice_file_watcher, write_notice


def wait_for(notices: list[PreemptionNotice], count: int, deadline_s: float = 5.0) -> list[PreemptionNotice]:
    end_s = time.monotonic() + deadline_s
    while len(notices) < count and time.monotonic() < end_s:
        time.sleep(0.005)
    return notices


def test_a_file_that_appears_is_a_notice_and_is_taken_away(tmp_path: Path) -> None:
    path = tmp_path / "notice"
    notices: list[PreemptionNotice] = []
    watcher: Watcher = notice_file_watcher(path)
    watcher.start(notices.append)
    time.sleep(0.1)
    assert notices == []
    write_notice(path, 2.5)
    assert wait_for(notices, 1) == [PreemptionNotice(2.5, "file")]
    assert list(tmp_path.iterdir()) == []
    write_notice(path, 1.0)
    assert wait_for(notices, 2, 0.2) == [PreemptionNotice(2.5, "file")]
    watcher.stop()
    watcher.stop()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"soon",
        b"{}",
        b"[1]",
        b'{"grace_period_s": -1}',
        b'{"grace_period_s": NaN}',
        b"\xff\xfe",
        b"9" * 5000,
        b"[" * 4000,
        b'{"grace_period_s": 1%s}' % (b"0" * 400),
    ],
)
def test_a_file_that_says_nothing_readable_is_a_notice_of_the_default_grace_period(
    tmp_path: Path, content: bytes
) -> None:
    notices: list[PreemptionNotice] = []
    (tmp_path / "notice").write_bytes(content)
    watcher = notice_file_watcher(tmp_path / "notice")
    watcher.start(notices.append)
    assert wait_for(notices, 1) == [PreemptionNotice(30.0, "file")]
    watcher.stop()


def test_a_stopped_watcher_delivers_nothing(tmp_path: Path) -> None:
    notices: list[PreemptionNotice] = []
    watcher = notice_file_watcher(tmp_path / "notice")
    watcher.start(notices.append)
    watcher.stop()
    write_notice(tmp_path / "notice", 1.0)
    assert wait_for(notices, 1, 0.2) == []


def test_sigterm_is_one_notice_and_its_former_handler_comes_back() -> None:
    calls: list[int] = []
    former = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    try:
        notices: list[PreemptionNotice] = []
        watcher: Watcher = SigtermWatcher(grace_period_s=30)
        watcher.start(notices.append)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for(notices, 1) == [PreemptionNotice(30, "sigterm")]
        assert calls == []
        watcher.stop()
        watcher.stop()
        os.kill(os.getpid(), signal.SIGTERM)
        assert calls == [signal.SIGTERM]
        assert len(notices) == 1
    finally:
        signal.signal(signal.SIGTERM, former)
