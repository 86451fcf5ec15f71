"""Control's log: every line about a request names its run, job, request and node."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from scheduler_world import ATTEMPTS_MAX, CLUSTER, INPUTS, SPECS

from spot_runtime.daemons.control import Control
from spot_runtime.daemons.loop import EventLoop
from spot_runtime.daemons.settings import ControlSettings
from spot_runtime.messages import AssignWork, NodeHello, PromptsEncoded, PullWork, RequestFailed, TrainerHello
from spot_runtime.scheduler.events import JobInputsRead, JobSubmitted
from spot_runtime.types import JobId, NodeId, Pool

JOB, NODE = JobId("run-a-rollout-0"), NodeId("spot-1")


@pytest.fixture
def control(tmp_path: Path) -> Iterator[Control]:
    settings = ControlSettings(
        bind="tcp://127.0.0.1:0",
        journal_path=str(tmp_path / "journal.sqlite"),
        store=f"file://{tmp_path}/store",
        cluster=CLUSTER,
        reward_url="http://127.0.0.1:9",
    )
    loop = EventLoop()
    control = Control(settings, loop)
    yield control
    control.close()
    loop.close()


def fail_one(control: Control, number: int) -> RequestFailed:
    control._event(PullWork(node_id=NODE, group_id="g", room=1, number=number))
    (work,) = (message for _, message in control._outbox if isinstance(message, AssignWork))
    (given,) = work.assignments
    failed = RequestFailed(
        node_id=NODE,
        lease_id=given.lease_id,
        request_id=given.request.request_id,
        error_class="RewardError",
        error="no answer",
    )
    control._event(failed)
    control._settle()
    return failed


def test_a_request_is_logged_with_run_job_request_and_node_until_its_last_words(
    control: Control, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    control._event(NodeHello(node_id=NODE, pool=Pool.SPOT, slots=1))
    control._event(TrainerHello(trainer_id="t"))
    control._event(JobSubmitted(job=SPECS[JOB]))
    control._event(JobInputsRead(job_id=JOB, inputs=INPUTS))
    control._event(PromptsEncoded(trainer_id="t", job_id=JOB))
    control._settle()
    said = [fail_one(control, number) for number in range(1, ATTEMPTS_MAX + 1)]
    assert len({failed.request_id for failed in said}) == 1
    lines = [record for record in caplog.records if record.message == "request failed"]
    assert [(r.run_id, r.job_id, r.request_id, r.node_id, r.lease_id, r.error_class) for r in lines] == [  # type: ignore[attr-defined]
        ("run-a", JOB, failed.request_id, NODE, failed.lease_id, "RewardError") for failed in said
    ]
    (last,) = (record for record in caplog.records if record.message == "request failed for good")
    assert (last.run_id, last.job_id, last.request_id, last.attempts) == (
        "run-a",
        JOB,
        said[0].request_id,
        ATTEMPTS_MAX,
    )  # type: ignore[attr-defined]
    assert last.history.count("errored RewardError: no answer") == ATTEMPTS_MAX  # type: ignore[attr-defined]
