"""The thin connector: create submits a job to control, get polls it, delete cancels it. Owns nothing but the translation.

`pyflyte serve connector --modules tasks.agent` serves it; a local run calls the same object. A job's id is a digest of its inputs, so a
retried or recovered node attaches to its job. Never runs work and never waits for it.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from flyteidl.core.execution_pb2 import TaskExecution
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.extend.backend.base_connector import AsyncConnectorBase, ConnectorRegistry, Resource, ResourceMeta
from flytekit.models.literals import LiteralMap
from flytekit.models.task import TaskTemplate

from spot_runtime.client import Client, job_spec
from spot_runtime.errors import (
    InputError,
    PolicyMismatchError,
    ProtocolError,
    SilenceError,
    TrainingError,
    UnreachableError,
    error_tree,
)
from spot_runtime.messages import JobSpec, JobStatus
from spot_runtime.types import BanditState, JobPhase, Op
from tasks.endpoint import connect, endpoint
from tasks.local_run import current_run
from tasks.models import Outcome, State

TASK_TYPE = "spotlight_job"
CANCEL_DEADLINE_S = 3.0
INPUTS: dict[Op, dict[str, type]] = {
    Op.ROLLOUT: {"state": State},
    Op.TRAIN_STEP: {"state": State, "rollouts": Outcome},
    Op.EXPLORE: {"state": State, "rollouts": Outcome, "trained": Outcome},
    Op.EVALUATE: {"state": State},
}
OUTPUTS: dict[str, type] = {"outcome": Outcome}
LASTING_ERRORS = (InputError, PolicyMismatchError, ProtocolError, TrainingError)
"""Trying again would end the same way."""


@dataclass
class JobMeta(ResourceMeta):  # type: ignore[misc]
    """What Flyte keeps of a running job."""

    endpoint: str
    job_id: str


class JobConnector(AsyncConnectorBase):  # type: ignore[misc]
    """Jobs of the control daemon as Flyte tasks. Has one client an endpoint, which lasts as long as the local run or the connector."""

    name = "Spotlight jobs"

    def __init__(self) -> None:
        super().__init__(task_type_name=TASK_TYPE, metadata_type=JobMeta)
        self._clients: dict[str, Client] = {}
        self._lock = threading.Lock()

    def create(self, task_template: TaskTemplate, inputs: LiteralMap | None = None, **_: Any) -> JobMeta:
        op = Op(task_template.custom["op"])
        context = FlyteContextManager.current_context()
        values = TypeEngine.literal_map_to_kwargs(context, inputs, python_types=INPUTS[op])
        job = job_of(op, **values)
        meta = JobMeta(endpoint(values["state"]), job.job_id)
        self._client(meta.endpoint).submit(job)
        return meta

    def get(self, resource_meta: JobMeta, **_: Any) -> Resource:
        return resource(self._client(resource_meta.endpoint).poll(resource_meta.job_id))

    def delete(self, resource_meta: JobMeta, **_: Any) -> None:
        with suppress(UnreachableError), connect(resource_meta.endpoint, deadline_s=CANCEL_DEADLINE_S) as client:
            client.cancel(resource_meta.job_id, "the Flyte task was aborted")

    def _client(self, given: str) -> Client:
        with self._lock:
            if given not in self._clients:
                self._clients[given] = connect(given)
                if (run := current_run()) is not None:
                    run.connections.callback(self._forget, given)
            return self._clients[given]

    def _forget(self, given: str) -> None:
        with self._lock:
            self._clients.pop(given).close()


ConnectorRegistry.register(JobConnector(), override=True)


def job_of(op: Op, state: State, rollouts: Outcome | None = None, trained: Outcome | None = None) -> JobSpec:
    """The job that an op of this state is. An exploration that was given a training explores with its policy; validation takes the
    moving average where one is kept, since that is what a run is to hand over then.
    """
    policy = trained.policy if trained and trained.is_due else state.policy
    if op is Op.EVALUATE and state.average.key:
        policy = state.average
    samples_key = state.samples_key if op is Op.ROLLOUT else ""
    return job_spec(
        run_id=state.run_id,
        op=op,
        iteration=state.iteration,
        policy=policy.ref,
        settings_json=state.settings_json,
        bank_key=state.bank_key if op is not Op.EVALUATE else "",
        manifest_key=rollouts.manifest_key if rollouts else samples_key,
        bandit=state.bandit if op is Op.EXPLORE else BanditState(),
    )


def resource(status: JobStatus) -> Resource:
    """A job's status as Flyte reads it; `custom_info` is the status itself, without its result."""
    outputs = None
    if status.phase is JobPhase.SUCCEEDED:
        assert status.result is not None, f"{status.job_id} succeeded without a result"
        context = FlyteContextManager.current_context()
        outputs = TypeEngine.dict_to_literal_map(context, {"outcome": Outcome.of(status.result)}, type_hints=OUTPUTS)
    info = msgspec.to_builtins(msgspec.structs.replace(status, result=None))
    return Resource(
        phase=flyte_phase(status), message=status.error or status.message, outputs=outputs, custom_info=info
    )


def flyte_phase(status: JobStatus) -> Any:
    """A failed job may be tried again unless its error lasts, and so may one that nobody asked after: what is scored is kept."""
    match status.phase:
        case JobPhase.SUCCEEDED:
            return TaskExecution.SUCCEEDED
        case JobPhase.CANCELLED:
            silent = status.error_class == SilenceError.__name__
            return TaskExecution.RETRYABLE_FAILED if silent else TaskExecution.ABORTED
        case JobPhase.FAILED:
            cls = error_tree().get(status.error_class)
            lasting = cls is not None and issubclass(cls, LASTING_ERRORS)
            return TaskExecution.FAILED if lasting else TaskExecution.RETRYABLE_FAILED
        case _:
            return TaskExecution.RUNNING
