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
        patient(time, 1000, attempts_max=8).run("put a", fail)
    for index, pause_s in enumerate(time.pauses_s):
        full_s = min(2.0, 0.05 * 2**index)
        assert full_s / 2 <= pause_s <= full_s


def fail(timeout_s: float) -> None:
    raise TransientError("503 SlowDown")


def test_attempts_are_bounded_and_the_last_reason_is_told():
    time = VirtualTime()
    with pytest.raises(ExhaustedError, match=r"put a: 3 attempts in .* failed, the last with: 503 SlowDown"):
        patient(time, 1000, attempts_max=3).run("put a", fail)


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
