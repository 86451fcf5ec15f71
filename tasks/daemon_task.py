"""The task class of jobs, and the four tasks themselves. Owns their Flyte interface and how a local run waits for one."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec
from flyteidl.core.execution_pb2 import TaskExecution
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.base_task import PythonTask, TaskMetadata
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.interface import Interface
from flytekit.core.type_engine import TypeEngine
from flytekit.extend.backend.base_connector import ConnectorRegistry, Resource
from flytekit.extend.backend.utils import is_terminal_phase
from flytekit.models.literals import LiteralMap
from flytekit.tools.translator import get_serializable

from spot_runtime.errors import JobFailedError, error_tree
from spot_runtime.messages import JobStatus
from spot_runtime.types import Op
from tasks.agent import INPUTS, OUTPUTS, TASK_TYPE, JobConnector, JobMeta
from tasks.local_run import LocalRun, current_run
from tasks.models import POOLS
from tasks.overlap import CURRENT, AbandonedError, OverlapMixin, Scope

POLL_S = 0.1
RETRIES = 3
RETRY_AFTER_S = 2.0
"""Before a local run submits a failed job again; doubles each time. On a cluster Flyte has a pause of its own."""


class DaemonTask(OverlapMixin, PythonTask):  # type: ignore[misc]
    """A task that control carries out. Remotely the connector serves it; locally it polls the same connector."""

    def __init__(self, op: Op) -> None:
        self._op = op
        super().__init__(
            task_type=TASK_TYPE,
            name=f"spotlight.{op.value}",
            task_config=None,
            interface=Interface(inputs=INPUTS[op], outputs=OUTPUTS),
            metadata=TaskMetadata(retries=RETRIES),
        )

    def get_custom(self, _: SerializationSettings) -> dict[str, Any]:
        return {"op": self._op.value, "pool": POOLS[self._op]}

    def execute(self, **inputs: Any) -> LiteralMap:
        """Local runs only: submit, poll until the job ends, cancel where the run is given up. What may pass is tried again as remotely."""
        context = FlyteContextManager.current_context()
        settings = context.serialization_settings or SerializationSettings(ImageConfig())
        template = get_serializable(OrderedDict(), settings, self).template
        connector = ConnectorRegistry.get_connector(template.type, template.task_type_version)
        literals = TypeEngine.dict_to_literal_map(context, inputs, type_hints=INPUTS[self._op])
        run = current_run()
        ended = self._wait(connector, connector.create(task_template=template, inputs=literals), run)
        for retry in range(1, RETRIES + 1):
            if ended.phase != TaskExecution.RETRYABLE_FAILED:
                break
            self._pause(ended, retry, run)
            ended = self._wait(connector, connector.create(task_template=template, inputs=literals), run)
        if ended.phase != TaskExecution.SUCCEEDED:
            raise _error(_status(ended))
        return ended.outputs

    def _wait(self, connector: JobConnector, meta: JobMeta, run: LocalRun | None) -> Resource:
        scope = CURRENT.get() or Scope()
        try:
            while not is_terminal_phase((polled := connector.get(meta)).phase):
                if run is not None:
                    run.progress.show(_status(polled))
                    run.check()
                if scope.wait_given_up(POLL_S):
                    raise AbandonedError(f"{self.name} was given up")
        except BaseException:
            if run is not None:
                run.progress.forget(meta.job_id)
            connector.delete(meta)
            raise
        if run is not None:
            run.progress.show(_status(polled))
        return polled

    def _pause(self, ended: Resource, retry: int, run: LocalRun | None) -> None:
        """Says that a failed job is submitted again; its id is the same, so what it has scored is kept."""
        if run is not None:
            run.progress.note(f"{_reason(_status(ended))}; trying again ({retry} of {RETRIES})")
            run.check()
        if (CURRENT.get() or Scope()).wait_given_up(RETRY_AFTER_S * 2 ** (retry - 1)):
            raise AbandonedError(f"{self.name} was given up")


def _status(polled: Resource) -> JobStatus:
    return msgspec.convert(polled.custom_info, JobStatus)


def _error(status: JobStatus) -> Exception:
    """The class that the job ended with, so that a local run exits with its code."""
    return error_tree().get(status.error_class, JobFailedError)(_reason(status))


def _reason(status: JobStatus) -> str:
    return f"job {status.job_id}: {status.error or status.message or status.phase.value}"


rollout = DaemonTask(Op.ROLLOUT)
train_step = DaemonTask(Op.TRAIN_STEP)
explore = DaemonTask(Op.EXPLORE)
evaluate = DaemonTask(Op.EVALUATE)
