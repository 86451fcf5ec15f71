"""Tasks beside each other in a local run: threads, order by data alone, failures and interruption."""

from __future__ import annotations

import contextvars
import threading
import time

import pytest
from flytekit import FlyteContextManager

from tasks.overlap import CURRENT, AbandonedError, LazyPromise, Scope, ThreadNames, scope


def context():  # type: ignore[no-untyped-def]
    return FlyteContextManager.current_context()


def test_work_of_one_scope_runs_beside_each_other() -> None:
    meeting = threading.Barrier(3, timeout=5)
    with scope() as tasks:
        futures = [tasks.start(meeting.wait, context()) for _ in range(3)]
    assert sorted(future.result() for future in futures) == [0, 1, 2]


def test_a_scope_joins_what_nobody_waited_for() -> None:
    done = threading.Event()

    def work() -> None:
        time.sleep(0.1)
        done.set()

    with scope() as tasks:
        tasks.start(work, context())
        assert not done.is_set()
    assert done.is_set()


def test_a_failure_that_nobody_read_is_raised_at_the_end() -> None:
    def fail() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"), scope() as tasks:
        tasks.start(fail, context())


def test_a_failure_gives_up_the_others_and_is_the_one_that_is_raised() -> None:
    ended = []

    def patient() -> None:
        scoped = CURRENT.get()
        assert scoped is not None
        while not scoped.wait_given_up(0.02):
            pass
        ended.append("patient")
        raise AbandonedError("given up")

    def fail() -> None:
        raise ValueError("first")

    def body() -> None:
        with scope() as tasks:
            waiting = tasks.start(patient, context())
            tasks.start(fail, context())
            waiting.result()

    started_s = time.monotonic()
    with pytest.raises(ValueError, match="first"):
        body()
    assert ended == ["patient"]
    assert time.monotonic() - started_s < 5


def test_giving_up_an_outer_scope_reaches_the_inner_ones() -> None:
    outer = Scope()
    inner = Scope(outer)
    assert not inner.is_given_up
    outer.give_up()
    assert inner.is_given_up
    assert inner.wait_given_up(0.0)


def test_an_interrupt_stays_an_interrupt() -> None:
    def patient() -> None:
        scoped = CURRENT.get()
        assert scoped is not None
        while not scoped.wait_given_up(0.02):
            pass
        raise AbandonedError("given up")

    def body() -> None:
        with scope() as tasks:
            tasks.start(patient, context())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        body()


def test_work_sees_the_variables_of_its_caller_and_keeps_its_own_flyte_context() -> None:
    name: contextvars.ContextVar[str] = contextvars.ContextVar("name", default="none")
    name.set("caller")
    seen = []

    def work() -> None:
        seen.append(name.get())
        with FlyteContextManager.with_context(context().new_builder()):
            time.sleep(0.05)

    depth = FlyteContextManager.size()
    with scope() as tasks:
        tasks.start(work, context())
        assert FlyteContextManager.size() == depth
    assert seen == ["caller"]
    assert FlyteContextManager.size() == depth


def test_thread_names_are_used_again() -> None:
    names = ThreadNames()
    first, second = names.take(), names.take()
    names.give_back(first)
    assert names.take() == first
    assert second != first


def test_a_lazy_promise_waits_when_read_and_not_before() -> None:
    release = threading.Event()

    def work() -> dict[str, str]:
        release.wait(5)
        return {"out": "value"}

    with scope() as tasks:
        promise = LazyPromise("out", tasks.start(work, context()))
        assert "done=False" in repr(promise)
        release.set()
        assert promise.val == "value"
        assert promise.with_var("renamed").var == "renamed"
