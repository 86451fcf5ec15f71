"""Tasks that run beside each other in a local run, as their nodes do on a cluster. Owns threads of a local run; compiles to plain nodes.

flytekit runs local tasks one after the other. A task whose class has OverlapMixin starts in a thread instead and returns promises that wait
when they are read; so order comes from data alone, as remotely. What a body started is joined when the body ends: `@dynamic(task_config=
Joined())` or `scope()`. A failure gives up the tasks beside it, and the first real failure is what the caller sees.
"""

from __future__ import annotations

import contextvars
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from flytekit.core.context_manager import ExecutionState, FlyteContext, FlyteContextManager, flyte_context_Var
from flytekit.core.promise import Promise, create_task_output
from flytekit.core.python_function_task import PythonFunctionTask
from flytekit.core.task import TaskPlugins

LOCAL_BODIES = (
    ExecutionState.Mode.LOCAL_WORKFLOW_EXECUTION,
    ExecutionState.Mode.LOCAL_DYNAMIC_TASK_EXECUTION,
)


TASK_S = 30 * 86_400.0
"""No task of a local run takes longer; jobs have deadlines of their own, far below."""
GIVE_UP_S = 120.0
"""Time that tasks have to end when their scope is given up."""
LOOK_S = 1.0


class AbandonedError(Exception):
    """Raised in a task that was given up because a task beside it failed or the run was interrupted."""


class ThreadNames:
    """Names for threads, used again when free: flytekit keeps an event loop for every name that it ever saw."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._free: list[str] = []
        self._lock = threading.Lock()

    def take(self) -> str:
        with self._lock:
            return self._free.pop() if self._free else f"flyte-task-{next(self._numbers)}"

    def give_back(self, name: str) -> None:
        with self._lock:
            self._free.append(name)


class Scope:
    """All tasks that one body started. Giving up a scope gives up those inside it."""

    def __init__(self, parent: Scope | None = None) -> None:
        self._parent = parent
        self._names: ThreadNames = parent._names if parent else ThreadNames()
        self._futures: list[Future[Any]] = []
        self._given_up = threading.Event()

    @property
    def is_given_up(self) -> bool:
        return self._given_up.is_set() or (self._parent is not None and self._parent.is_given_up)

    def give_up(self) -> None:
        """Asks every task inside to end; returns at once."""
        self._given_up.set()

    def wait_given_up(self, timeout_s: float) -> bool:
        """Sleeps `timeout_s`, less where the scope is given up; says whether it is."""
        self._given_up.wait(timeout_s)
        return self.is_given_up

    def start(self, work: Callable[[], Any], context: FlyteContext) -> Future[Any]:
        """Runs `work` in a thread with a Flyte context of its own."""
        future: Future[Any] = Future()
        name = self._names.take()
        variables = contextvars.copy_context()

        def run() -> None:
            try:
                flyte_context_Var.set([_own_context(context)])
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - handed to whoever reads the promise
                self.give_up()
                future.set_exception(error)
            finally:
                self._names.give_back(name)

        self._futures.append(future)
        threading.Thread(target=variables.run, args=(run,), name=name, daemon=True).start()
        return future

    def failure(self) -> BaseException | None:
        """Waits for all, then the failure that made the others give up, if any."""
        errors = [error for future in self._futures if (error := self.error(future)) is not None]
        return next((error for error in errors if not isinstance(error, AbandonedError)), errors[0] if errors else None)

    def error(self, future: Future[Any]) -> BaseException | None:
        """Waits for one task and says how it failed; one that goes on GIVE_UP_S after the scope was given up counts as abandoned."""
        deadline_s = time.monotonic() + TASK_S
        while not future.done():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return AbandonedError(f"a task did not end within {TASK_S:g} s")
            if self.is_given_up and deadline_s > time.monotonic() + GIVE_UP_S:
                deadline_s = time.monotonic() + GIVE_UP_S
            wait([future], timeout=min(left_s, LOOK_S))
        return future.exception()


CURRENT: contextvars.ContextVar[Scope | None] = contextvars.ContextVar("spotlight_scope", default=None)
"""The scope of the body that this thread is in: flytekit calls tasks without an argument that could carry it."""


@contextmanager
def scope(opened: Scope | None = None) -> Iterator[Scope]:
    """Joins everything that is started inside, on every way out. Raises what failed first."""
    opened = opened or Scope(CURRENT.get())
    token = CURRENT.set(opened)
    try:
        yield opened
    except BaseException as error:
        opened.give_up()
        cause = opened.failure()
        if isinstance(error, Exception) and cause is not None and cause is not error:
            raise cause from None
        raise
    finally:
        CURRENT.reset(token)
    if (failed := opened.failure()) is not None:
        raise failed


class LazyPromise(Promise):  # type: ignore[misc]
    """A promise whose value is waited for when it is read."""

    def __init__(self, var: str, future: Future[Any], scope: Scope | None = None) -> None:
        super().__init__(var, None)
        self._future = future
        self._scope = scope or Scope()

    @property
    def val(self) -> Any:
        error = self._scope.error(self._future)
        if error is not None:
            raise error
        return self._future.result(0.0)[self._var]

    def with_var(self, new_var: str) -> Promise:
        return Promise(var=new_var, val=self.val)

    def __repr__(self) -> str:
        return f"LazyPromise({self._var}, done={self._future.done()})"

    __str__ = __repr__


class OverlapMixin:
    """Goes before the task class. In a local body under a scope a call does not block; everywhere else it changes nothing."""

    interface: Any
    python_interface: Any

    def local_execute(self, ctx: FlyteContext, **kwargs: Any) -> Any:
        mode = ctx.execution_state.mode if ctx.execution_state else None
        current = CURRENT.get()
        execute = super().local_execute  # type: ignore[misc]
        if current is None or mode not in LOCAL_BODIES or not self.interface.outputs:
            return execute(ctx, **kwargs)

        def run() -> dict[str, Any]:
            output = execute(FlyteContextManager.current_context(), **kwargs)
            promises = output if isinstance(output, tuple) else (output,)
            return {promise.var: promise.val for promise in promises}

        future = current.start(run, FlyteContextManager.current_context())
        return create_task_output(
            [LazyPromise(var, future, current) for var in self.interface.outputs], self.python_interface
        )


class Joined:
    """Task config of a dynamic that joins what its body started."""


class JoinedDynamic(PythonFunctionTask):  # type: ignore[misc]
    """A dynamic under a scope of its own."""

    def dynamic_execute(self, task_function: Callable[..., Any], **kwargs: Any) -> Any:
        with scope():
            return super().dynamic_execute(task_function, **kwargs)


TaskPlugins.register_pythontask_plugin(Joined, JoinedDynamic)


def _own_context(context: FlyteContext) -> FlyteContext:
    """A copy of a Flyte context for another thread; decks of tasks beside each other must not mix."""
    state = context.execution_state
    if state is None or state.user_space_params is None:
        return context
    params = state.user_space_params.new_builder()
    params.decks = []
    own = context.with_execution_state(state.with_params(user_space_params=params.build())).build()
    own.set_stackframe(FlyteContextManager.get_origin_stackframe())
    return own
