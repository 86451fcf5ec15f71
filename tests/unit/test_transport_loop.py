import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

import pytest

from spot_runtime.daemons.loop import EventLoop
from spot_runtime.errors import ClusterError
from spot_runtime.messages import ClusterStatus, Codec, GetStatus, ToClient, ToControl
from spot_runtime.transport import Dealer, Router


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def loop(clock: Clock) -> Iterator[EventLoop]:
    loop = EventLoop(clock=clock, threads=2, calls_max=4)
    yield loop
    loop.close()


def test_timers_come_in_the_order_of_their_due_times(loop: EventLoop, clock: Clock) -> None:
    calls: list[str] = []
    loop.call_later(3.0, partial(calls.append, "third"))
    loop.call_later(1.0, partial(calls.append, "first"))
    loop.call_later(1.0, partial(calls.append, "second"))
    loop.run_once(0.0)
    assert calls == []
    clock.now_s += 1.0
    loop.run_once(0.0)
    assert calls == ["first", "second"]
    clock.now_s += 5.0
    loop.run_once(0.0)
    assert calls == ["first", "second", "third"]


def test_a_period_keeps_its_beat_and_does_not_make_up_for_missed_ones(loop: EventLoop, clock: Clock) -> None:
    calls: list[float] = []
    loop.call_every(1.0, lambda: calls.append(clock.now_s))
    for now_s in (100.9, 101.25, 101.9, 102.0, 109.5, 110.0, 110.5):
        clock.now_s = now_s
        loop.run_once(0.0)
    assert calls == [101.25, 102.0, 109.5, 110.5]


def test_a_cancelled_timer_does_not_come_even_from_a_timer_of_the_same_moment(loop: EventLoop, clock: Clock) -> None:
    calls: list[str] = []
    loop.call_later(1.0, lambda: later.cancel())
    later = loop.call_later(1.0, partial(calls.append, "cancelled"))
    beat = loop.call_every(1.0, lambda: (calls.append("beat"), beat.cancel()))
    for _ in range(3):
        clock.now_s += 1.0
        loop.run_once(0.0)
    assert calls == ["beat"]


def run_until(loop: EventLoop, done: "list[object]", count: int) -> None:
    end_s = time.monotonic() + 10
    while len(done) < count and time.monotonic() < end_s:
        loop.run_once(1.0)
    assert len(done) == count


def test_a_blocking_call_leaves_the_loop_free_and_its_result_comes_on_the_loops_thread(loop: EventLoop) -> None:
    release = threading.Event()
    seen: list[object] = []
    loop.submit(release.wait, 10.0, then=lambda done: seen.append((done.result(), threading.get_ident())))
    loop.post(partial(seen.append, "posted"))
    run_until(loop, seen, 1)
    assert seen == ["posted"]
    assert loop.calls_open == 1
    release.set()
    run_until(loop, seen, 2)
    assert seen == ["posted", (True, threading.get_ident())]
    assert loop.calls_open == 0


def test_the_error_of_a_blocking_call_is_delivered_not_raised(loop: EventLoop) -> None:
    results: list[Future[float]] = []
    loop.submit(pow, 0, -1, then=results.append)
    run_until(loop, results, 1)
    with pytest.raises(ZeroDivisionError):
        results[0].result()


def test_calls_beyond_the_bound_are_refused_and_those_within_it_all_come(loop: EventLoop) -> None:
    release = threading.Event()
    done: list[object] = []
    for _ in range(4):
        loop.submit(release.wait, 10.0, then=done.append)
    with pytest.raises(ClusterError, match="4 blocking calls are open: must be < 4"):
        loop.submit(release.wait, 10.0, then=done.append)
    release.set()
    run_until(loop, done, 4)


def test_an_exception_of_a_handler_leaves_the_loop(loop: EventLoop) -> None:
    loop.post(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        loop.run_once(1.0)


def test_stop_from_another_thread_wakes_a_loop_that_has_nothing_to_do() -> None:
    loop = EventLoop()
    began_s = time.monotonic()
    threading.Timer(0.1, loop.stop).start()
    loop.run()
    assert time.monotonic() - began_s < 5
    loop.close()


def test_many_posts_from_many_threads_all_come_in_each_threads_order() -> None:
    loop = EventLoop()
    seen: list[object] = []

    def post(who: int) -> None:
        for number in range(5000):
            loop.post(partial(seen.append, (who, number)))

    threads = [threading.Thread(target=post, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    run_until(loop, seen, 20_000)
    for who in range(4):
        assert [entry for entry in seen if entry[0] == who] == [(who, number) for number in range(5000)]
    loop.close()


def test_a_closed_loop_ignores_late_results() -> None:
    loop = EventLoop(threads=1)
    begun, release, ended = threading.Event(), threading.Event(), threading.Event()
    seen: list[str] = []

    def call() -> None:
        begun.set()
        release.wait(30.0)

    loop.submit(call, then=lambda done: seen.append("delivered"))
    loop.submit(ended.set, then=lambda done: seen.append("a call that had not begun"))
    assert begun.wait(30.0)
    loop.close()
    release.set()
    loop.post(lambda: seen.append("posted"))
    for thread in [each for each in threading.enumerate() if each.name.startswith("loop-call")]:
        thread.join(30.0)
    loop.run_once(0.0)
    assert seen == []
    assert not ended.is_set()


def test_messages_of_several_channels_reach_their_handlers_until_detached() -> None:
    loop = EventLoop()
    router: Router[ToControl] = Router("tcp://127.0.0.1:0", Codec(ToControl))
    dealer: Dealer[ToClient] = Dealer(router.endpoint, Codec(ToClient), "asking")
    asked: list[object] = []
    answered: list[object] = []

    def answer(messages: list[tuple[bytes, ToControl]]) -> None:
        for peer, message in messages:
            asked.append(message)
            router.send(peer, ClusterStatus(seq=getattr(message, "seq", 0)))

    loop.attach(router, answer)
    loop.attach(dealer, answered.extend)
    dealer.send(GetStatus(seq=1))
    dealer.send(GetStatus(seq=2))
    run_until(loop, answered, 2)
    assert asked == [GetStatus(seq=1), GetStatus(seq=2)]
    assert answered == [ClusterStatus(seq=1), ClusterStatus(seq=2)]
    loop.detach(router)
    dealer.send(GetStatus(seq=3))
    loop.run_once(0.2)
    assert router.receive(5.0) == [(b"asking", GetStatus(seq=3))]
    assert len(asked) == 2
    loop.close()
    dealer.close()
    router.close()
