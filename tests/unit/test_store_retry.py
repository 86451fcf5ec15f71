from itertools import pairwise

import pytest

from spot_runtime.store.retry import ExhaustedError, Retry, TransientError


class VirtualTime:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.pauses_s: list[float] = []

    def sleep(self, pause_s: float) -> None:
        self.pauses_s.append(pause_s)
        self.now_s += pause_s


def patient(time: VirtualTime, deadline_s: float, **more) -> Retry:
    return Retry(deadline_s, clock=lambda: time.now_s, sleep=time.sleep, **more)


def test_the_first_success_is_the_answer():
    time, failures = VirtualTime(), [TransientError("503"), TransientError("reset")]

    def attempt(timeout_s: float) -> str:
        if failures:
            raise failures.pop(0)
        return "done"

    assert patient(time, 10).run("put a", attempt) == "done"
    assert len(time.pauses_s) == 2


def test_pauses_double_up_to_their_bound_with_half_of_it_random():
    time = VirtualTime()
    with pytest.raises(ExhaustedError):
        patient(time, 1000).run("put a", fail)
    for index, pause_s in enumerate(time.pauses_s[:400]):
        full_s = min(2.0, 0.05 * 2**index)
        assert full_s / 2 <= pause_s <= full_s


def fail(timeout_s: float) -> None:
    raise TransientError("503 SlowDown")


def test_a_place_that_refuses_at_once_is_asked_until_the_deadline_and_the_last_reason_is_told():
    time, asked_s = VirtualTime(), []

    def refuse(timeout_s: float) -> None:
        asked_s.append(time.now_s - 100)
        raise TransientError("connection refused")

    with pytest.raises(ExhaustedError, match=r"put a: \d+ attempts in .* failed, the last with: connection refused"):
        patient(time, 30).run("put a", refuse)
    assert 29.9 < asked_s[-1] < 30
    assert time.now_s - 100 == asked_s[-1]  # nobody waits for nothing
    assert max(later - earlier for earlier, later in pairwise(asked_s)) <= 2
    assert len(asked_s) < 40


def test_hung_attempts_end_exactly_at_the_deadline_and_leave_room_for_others():
    time, timeouts_s = VirtualTime(), []

    def hang(timeout_s: float) -> None:
        timeouts_s.append(timeout_s)
        time.now_s += timeout_s
        raise TransientError("no answer")

    with pytest.raises(ExhaustedError):
        patient(time, 8).run("get a", hang)
    assert len(timeouts_s) == 3
    assert timeouts_s[0] == 4.0
    assert time.now_s == pytest.approx(108.0)


def test_an_error_that_is_not_transient_goes_through_at_once():
    time = VirtualTime()

    def denied(timeout_s: float) -> None:
        raise PermissionError("403")

    with pytest.raises(PermissionError):
        patient(time, 10).run("get a", denied)
    assert time.pauses_s == []
