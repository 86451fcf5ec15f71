"""What the journal gives back: every request as it was, however often its progress was written again."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from scheduler_world import INPUTS, POLICY, SPECS, Cluster

from spot_runtime.daemons.journal import FORMAT, Journal
from spot_runtime.errors import StoreError
from spot_runtime.messages import TrainerHello
from spot_runtime.scheduler.events import JobInputsRead, JobSubmitted
from spot_runtime.scheduler.jobs import JobRecord
from spot_runtime.scheduler.requests import RequestRecord
from spot_runtime.types import JobId, NodeId, PolicyRef

JOB = JobId("run-a-rollout-0")


def running(world: Cluster) -> tuple[JobRecord, list[RequestRecord]]:
    world.trainer.runs = True
    world.say(TrainerHello(trainer_id="t1"))
    world.send(JobSubmitted(job=SPECS[JOB]))
    world.send(JobInputsRead(job_id=JOB, inputs=INPUTS))
    world.train()
    return world.core.jobs[JOB], world.core.queue.of_job(JOB)


def test_requests_come_back_as_they_were_in_the_order_they_were_taken_in(tmp_path: Path) -> None:
    world = Cluster()
    job, requests = running(world)
    journal = Journal(tmp_path / "journal.sqlite")
    journal.write([job], reversed(requests))
    world.hello(world.nodes[NodeId("s1")], fresh=True)
    world.pull(world.nodes[NodeId("s1")], "g", 2)
    moved = [record for record in requests if record.lease_id]
    journal.write([], moved)
    journal.close()
    ((loaded, found),) = Journal(tmp_path / "journal.sqlite").load()
    assert msgspec.to_builtins(loaded) == msgspec.to_builtins(job)
    assert found == requests
    assert [record.number for record in found] == [1, 2, 3, 4]
    assert {record.request_id for record in found if record.lease_id} == {record.request_id for record in moved}
    assert len(moved) > 0


def test_a_request_that_was_given_another_policy_keeps_it(tmp_path: Path) -> None:
    job, requests = running(Cluster())
    journal = Journal(tmp_path / "journal.sqlite")
    journal.write([job], requests)
    newer = PolicyRef(2, "policies/2", "d2")
    requests[1].change_policy(newer)
    journal.write([], [requests[1]])
    ((_, found),) = journal.load()
    assert [record.request.policy for record in found] == [POLICY, newer, POLICY, POLICY]


def test_a_job_that_is_forgotten_and_submitted_again_in_one_turn_stays(tmp_path: Path) -> None:
    job, requests = running(Cluster())
    journal = Journal(tmp_path / "journal.sqlite")
    journal.write([job], requests)
    for record in requests:
        record.number += 4
    journal.write([job], requests, [JOB])
    ((loaded, found),) = journal.load()
    assert (loaded.job_id, [record.number for record in found]) == (JOB, [5, 6, 7, 8])


@pytest.mark.parametrize("found", [0, FORMAT - 1, FORMAT + 1])
def test_a_journal_of_another_format_is_refused_with_one_line_and_left_as_it_is(tmp_path: Path, found: int) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as db:
        db.executescript(f"CREATE TABLE jobs (job_id TEXT); PRAGMA user_version={found}")
    before = path.read_bytes()
    line = f"has format {found}, this version reads {FORMAT}: end its runs with the version that began them"
    with pytest.raises(StoreError, match=line):
        Journal(path)
    assert path.read_bytes() == before


def test_a_forgotten_job_leaves_nothing_and_later_numbers_go_on(tmp_path: Path) -> None:
    job, requests = running(Cluster())
    journal = Journal(tmp_path / "journal.sqlite")
    journal.write([job], requests)
    journal.write([], [], [JOB])
    assert journal.load() == []
    for record in requests:
        record.number += 10
    journal.write([job], requests)
    ((_, found),) = journal.load()
    assert [record.number for record in found] == [11, 12, 13, 14]
