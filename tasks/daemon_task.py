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
        """Local runs only: submit, poll until the job ends, cancel where the run is given up."""
        context = FlyteContextManager.current_context()
        settings = context.serialization_settings or SerializationSettings(ImageConfig())
        template = get_serializable(OrderedDict(), settings, self).template
        connector = ConnectorRegistry.get_connector(template.type, template.task_type_version)
        literals = TypeEngine.dict_to_literal_map(context, inputs, type_hints=INPUTS[self._op])
        meta = connector.create(task_template=template, inputs=literals)
        ended = self._wait(connector, meta, current_run())
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


def _status(polled: Resource) -> JobStatus:
    return msgspec.convert(polled.custom_info, JobStatus)


def _error(status: JobStatus) -> Exception:
    """The class that the job ended with, so that a local run exits with its code."""
    reason = status.error or status.message or status.phase.value
    return error_tree().get(status.error_class, JobFailedError)(f"job {status.job_id}: {reason}")


rollout = DaemonTask(Op.ROLLOUT)
train_step = DaemonTask(Op.TRAIN_STEP)
explore = DaemonTask(Op.EXPLORE)
evaluate = DaemonTask(Op.EVALUATE)
