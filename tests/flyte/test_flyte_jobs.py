"""The connector: what it submits, how it reads a job's status, and that a retried task finds its job again."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import grpc
import pytest
from fake_control import FakeControl
from flyteidl.admin import agent_pb2
from flyteidl.core.execution_pb2 import TaskExecution
from flytekit import FlyteContextManager
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.type_engine import TypeEngine
from flytekit.extend.backend.connector_service import AsyncConnectorService
from flytekit.models.literals import Literal
from flytekit.tools.translator import get_serializable

from spot_runtime.client import Client
from spot_runtime.config import RunSettings
from spot_runtime.errors import InputError, PolicyMismatchError, RewardError, UnreachableError
from spot_runtime.messages import JobStatus
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobId, JobPhase, Op, PolicyRef
from tasks import endpoint
from tasks.agent import JobConnector, JobMeta, flyte_phase, job_of, resource
from tasks.daemon_task import RETRIES, evaluate, explore, rollout, train_step
from tasks.models import Outcome, Policy, State


@pytest.fixture
def state(tmp_path: Path) -> State:
    settings = RunSettings(
        run_id="run-1",
        iterations=3,
        resolution=64,
        model="tiny",
        store=tmp_path.as_uri(),
        train_prompts_key="rows",
        validation_prompts_key="rows",
    )
    row = '{"tag":"colors","include":[{"class":"circle","count":1,"color":"red"}],"prompt":"a photo of a red circle"}\n'
    TensorStore(settings.store).put_bytes("rows", row.encode())
    return State(
        run_id="run-1",
        settings_json=settings.model_dump_json(),
        iterations=3,
        iteration=1,
        policy=Policy(version=1, key="adapters/1", digest="ab"),
        bank_key="runs/run-1/banks/000001.json",
        bandit_json='{"arms":[{"sequences":4,"effective_steps":8,"chosen":1,"observations":[1.5]}]}',
    )


def status(phase: JobPhase, error_class: str = "", message: str = "") -> JobStatus:
    return JobStatus(
        job_id=JobId("job"), op=Op.ROLLOUT, iteration=0, phase=phase, error_class=error_class, message=message
    )


def submitted(connector: JobConnector, state: State) -> JobMeta:
    """A rollout, handed to the connector as Flyte does."""
    template = get_serializable(OrderedDict(), SerializationSettings(ImageConfig()), rollout).template
    inputs = TypeEngine.dict_to_literal_map(
        FlyteContextManager.current_context(), {"state": state}, type_hints={"state": State}
    )
    return connector.create(task_template=template, inputs=inputs)


def test_each_op_is_made_of_what_it_depends_on(state: State) -> None:
    rollouts = Outcome(op="rollout", manifest_key="manifests/1")
    jobs = {op: job_of(op, state, rollouts if op in (Op.TRAIN_STEP, Op.EXPLORE) else None) for op in Op}
    assert {jobs[op].bank_key for op in (Op.ROLLOUT, Op.TRAIN_STEP, Op.EXPLORE)} == {state.bank_key}
    assert jobs[Op.EVALUATE].bank_key == ""
    assert [jobs[op].manifest_key for op in Op] == ["", "manifests/1", "manifests/1", ""]
    assert jobs[Op.EXPLORE].bandit == state.bandit
    assert jobs[Op.TRAIN_STEP].bandit.arms == ()
    assert {job.policy for job in jobs.values()} == {PolicyRef(1, "adapters/1", "ab")}
    assert len({job.job_id for job in jobs.values()}) == 4


def test_an_exploration_that_is_given_a_training_takes_its_policy(state: State) -> None:
    rollouts = Outcome(op="rollout", manifest_key="manifests/1")
    trained = Outcome(op="train_step", policy=Policy(version=2, key="adapters/2", digest="cd"))
    assert job_of(Op.EXPLORE, state, rollouts, trained).policy == PolicyRef(2, "adapters/2", "cd")
    assert job_of(Op.EXPLORE, state, rollouts, Outcome()).policy == state.policy.ref


def test_a_rollout_names_the_exploration_whose_samples_it_takes_over(state: State) -> None:
    told = state.model_copy(update={"samples_key": "manifests/0"})
    assert job_of(Op.ROLLOUT, told).manifest_key == "manifests/0"
    assert {job_of(op, told).manifest_key for op in (Op.TRAIN_STEP, Op.EXPLORE, Op.EVALUATE)} == {""}


def test_a_job_has_one_id_until_an_input_of_it_changes(state: State) -> None:
    first = job_of(Op.TRAIN_STEP, state, Outcome(manifest_key="manifests/1"))
    assert job_of(Op.TRAIN_STEP, state, Outcome(manifest_key="manifests/1")).job_id == first.job_id
    assert job_of(Op.TRAIN_STEP, state, Outcome(manifest_key="manifests/2")).job_id != first.job_id
    later = state.model_copy(update={"iteration": 2})
    assert job_of(Op.TRAIN_STEP, later, Outcome(manifest_key="manifests/1")).job_id != first.job_id


def test_a_retried_task_attaches_to_its_job(
    state: State, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
    first, second = rollout(state=state), rollout(state=state)
    assert first == second
    assert [job.job_id for job in control.submissions] == [job_of(Op.ROLLOUT, state).job_id] * 2
    assert len(control.jobs) == 1


def test_create_get_and_delete_are_submit_poll_and_cancel(
    state: State, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.seconds = {Op.ROLLOUT: 60.0}
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
    connector = JobConnector()
    meta = submitted(connector, state)
    assert JobMeta.decode(meta.encode()) == JobMeta(control.endpoint, job_of(Op.ROLLOUT, state).job_id)
    assert connector.get(meta).phase == TaskExecution.RUNNING
    connector.delete(meta)
    ended = connector.get(meta)
    assert (ended.phase, ended.message) == (TaskExecution.ABORTED, "the Flyte task was aborted")


def test_a_served_connector_takes_a_job_from_submission_to_its_outcome(
    state: State, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
    template = get_serializable(OrderedDict(), SerializationSettings(ImageConfig()), rollout).template
    inputs = TypeEngine.dict_to_literal_map(
        FlyteContextManager.current_context(), {"state": state}, type_hints={"state": State}
    )
    category = agent_pb2.TaskCategory(name=template.type, version=template.task_type_version)

    async def as_propeller_does() -> agent_pb2.Resource:
        service, grpc_context = AsyncConnectorService(), MagicMock(spec=grpc.ServicerContext)
        create = agent_pb2.CreateTaskRequest(
            inputs=inputs.to_flyte_idl(), template=template.to_flyte_idl(), output_prefix="s3://bucket/outputs"
        )
        made = await service.CreateTask(create, grpc_context)
        get = agent_pb2.GetTaskRequest(task_category=category, resource_meta=made.resource_meta)
        return (await service.GetTask(get, grpc_context)).resource

    ended = asyncio.run(as_propeller_does())
    assert ended.phase == TaskExecution.SUCCEEDED
    outcome = TypeEngine.to_python_value(
        FlyteContextManager.current_context(), Literal.from_flyte_idl(ended.outputs.literals["outcome"]), Outcome
    )
    assert outcome.manifest_key == f"runs/run-1/manifests/{job_of(Op.ROLLOUT, state).job_id}.json"
    assert ended.custom_info["scored"] == 8


def test_outcomes_carry_results_whole(state: State, control: FakeControl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
    rollouts = rollout(state=state)
    trained = train_step(state=state, rollouts=rollouts)
    explored = explore(state=state, rollouts=rollouts)
    assert trained.policy.ref == PolicyRef(2, "adapters/2", "dddddddd")
    assert trained.metrics == {"loss": 0.25}
    assert (explored.plan.sequences, explored.plan.effective_steps) == (6, 8)
    assert explored.bandit.pending_sequences == 6
    assert explored.usage.spot_gpu_s == pytest.approx(2 * explored.usage.reserved_gpu_s)
    assert rollouts.manifest_key.startswith("runs/run-1/manifests/rollout-1-")


@pytest.mark.parametrize(
    ("phase", "error_class", "expected"),
    [
        (JobPhase.ADMITTING, "", TaskExecution.RUNNING),
        (JobPhase.ENCODING, "", TaskExecution.RUNNING),
        (JobPhase.RUNNING, "", TaskExecution.RUNNING),
        (JobPhase.WRITING, "", TaskExecution.RUNNING),
        (JobPhase.CANCELLED, "", TaskExecution.ABORTED),
        (JobPhase.FAILED, "RewardError", TaskExecution.RETRYABLE_FAILED),
        (JobPhase.FAILED, "SomethingNew", TaskExecution.RETRYABLE_FAILED),
        (JobPhase.FAILED, "TrainingError", TaskExecution.FAILED),
        (JobPhase.FAILED, "ModelError", TaskExecution.FAILED),
    ],
)
def test_a_phase_reads_as_flyte_means_it(phase: JobPhase, error_class: str, expected: int) -> None:
    assert flyte_phase(status(phase, error_class)) == expected


@pytest.mark.parametrize(
    ("error_class", "message", "expected"),
    [
        ("", "the Flyte task was aborted", TaskExecution.ABORTED),
        ("", "nobody polled for 601 s", TaskExecution.ABORTED),
        ("SilenceError", "", TaskExecution.RETRYABLE_FAILED),
    ],
)
def test_a_job_that_nobody_asked_after_is_tried_again_and_an_aborted_one_is_not(
    error_class: str, message: str, expected: int
) -> None:
    assert flyte_phase(status(JobPhase.CANCELLED, error_class, message)) == expected


def test_progress_travels_as_custom_info() -> None:
    running = JobStatus(
        job_id=JobId("job"), op=Op.EXPLORE, iteration=3, phase=JobPhase.RUNNING, total=10, scored=4, spot_slots=2
    )
    info = resource(running).custom_info
    assert (info["op"], info["iteration"], info["total"], info["scored"], info["spot_slots"]) == (
        "explore",
        3,
        10,
        4,
        2,
    )


def test_a_failed_job_raises_the_class_it_ended_with(
    state: State, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.errors = {Op.ROLLOUT: ("PolicyMismatchError", "version 1: must be 2")}
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
    with pytest.raises(PolicyMismatchError, match="version 1: must be 2"):
        rollout(state=state)


def test_a_failure_that_may_pass_is_submitted_again_under_the_same_id(
    state: State, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.errors, control.failures_max = {Op.ROLLOUT: ("RewardError", "the service answered 503")}, RETRIES
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
    assert rollout(state=state).op == "rollout"
    assert [job.job_id for job in control.submissions] == [job_of(Op.ROLLOUT, state).job_id] * (1 + RETRIES)


def test_a_failure_that_stays_ends_after_the_last_retry_and_one_that_lasts_at_once(
    state: State, control: FakeControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
    control.errors = {Op.ROLLOUT: ("RewardError", "the service answered 503")}
    with pytest.raises(RewardError, match="the service answered 503"):
        rollout(state=state)
    assert len(control.submissions) == 1 + RETRIES
    control.errors = {Op.EVALUATE: ("InputError", "no rows")}
    with pytest.raises(InputError, match="no rows"):
        evaluate(state=state)
    assert len(control.submissions) == 1 + RETRIES + 1


def test_all_calls_to_an_endpoint_share_one_client(state: State, control: FakeControl) -> None:
    made: list[str] = []

    class Counted(Client):
        def __init__(self, endpoint: str, **options: Any) -> None:
            made.append(endpoint)
            super().__init__(endpoint, **options)

    connector = JobConnector()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "Client", Counted)
        patch.setenv("SPOTLIGHT_ENDPOINT", control.endpoint)
        meta = submitted(connector, state)
        assert [connector.get(meta).phase for _ in range(5)] == [TaskExecution.SUCCEEDED] * 5
    assert made == [control.endpoint]


def test_without_an_endpoint_a_task_alone_says_so(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPOTLIGHT_ENDPOINT", raising=False)
    with pytest.raises(UnreachableError, match="SPOTLIGHT_ENDPOINT is not set"):
        rollout(state=state)
