"""A live control daemon with nodes that speak the wire and do no work: kills, restarts, floods of bad frames, figures, bounds."""

from __future__ import annotations

import os
import random
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.fake_cluster import Crowd, FakeNode, put_prompts, rollout, start_control
from spot_runtime.client import Client
from spot_runtime.config import ClusterConfig
from spot_runtime.daemons.ports import free_port
from spot_runtime.daemons.process import Child
from spot_runtime.errors import InputError
from spot_runtime.messages import (
    VERSION,
    Codec,
    JobStatus,
    NodeHeartbeat,
    PullWork,
    SampleDone,
    SampleScored,
    ToControl,
)
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobPhase, LeaseId, Manifest, NodeId, PolicyRef, RequestId

DEADLINE_S = 60.0
COPIES_S = 1.2
"""Figures are copied once a second."""
CLUSTER = ClusterConfig(lease_s=4.0, heartbeat_s=0.5)


class Daemon:
    """Control on a fixed port, so that it is found again after a restart."""

    def __init__(self, folder: Path, cluster: ClusterConfig = CLUSTER) -> None:
        self.folder, self.cluster = folder, cluster
        self.bind = f"tcp://127.0.0.1:{free_port()}"
        put_prompts(folder, rows=256)
        self.start()
        self.client = Client(self.bind, deadline_s=DEADLINE_S)

    def start(self) -> float:
        """Seconds until it was ready."""
        started_s = time.monotonic()
        self.child: Child = start_control(self.folder, bind=self.bind, cluster=self.cluster)
        self.metrics_url = str(self.child.ready(DEADLINE_S)["metrics_url"])
        return time.monotonic() - started_s

    def figures(self) -> dict[str, float]:
        text = urllib.request.urlopen(self.metrics_url, timeout=10).read().decode()
        return {name: float(value) for name, value in re.findall(r"^([a-z]\S*) (\S+)$", text, re.MULTILINE)}

    def figure(self, name: str, until: Callable[[float], bool]) -> float:
        """Copies are a second old at most."""
        limit_s = time.monotonic() + 5.0
        while not until(value := self.figures()[name]) and time.monotonic() < limit_s:
            time.sleep(0.1)
        return value

    def manifest(self, status: JobStatus) -> Manifest:
        assert status.result is not None
        store = TensorStore(f"file://{self.folder}/store")
        return msgspec.json.decode(store.get_bytes(status.result.manifest_key), type=Manifest)

    def log(self) -> str:
        return (self.folder / "control.log").read_text()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.client.close()
    daemon.child.terminate(5.0)


def work(daemon: Daemon, crowd: Crowd, job_id: str, until: Callable[[JobStatus], bool]) -> JobStatus:
    """Lets the crowd work until the job's status fits; polls a few times a second."""
    limit_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < limit_s:
        polled_s = time.monotonic()
        status = daemon.client.poll(job_id)
        if until(status):
            return status
        while time.monotonic() - polled_s < 0.05:
            crowd.turn()
    raise AssertionError(f"{status.phase}: {status.scored} of {status.total}, {status.error}")


def succeeded(status: JobStatus) -> bool:
    assert status.phase not in (JobPhase.FAILED, JobPhase.CANCELLED), status.error
    return status.phase is JobPhase.SUCCEEDED


def test_control_killed_at_random_instants_under_load_loses_no_request_and_scores_none_twice(daemon: Daemon) -> None:
    entropy = random.Random(7)
    job = rollout(daemon.folder, "storm-run", prompts=24, group_size=100)
    daemon.client.submit(job)
    crowd = Crowd(daemon.bind, groups=32, groups_per_node=4, room=4, work_s=0.02)
    scored = 0
    kills = 0
    while kills < 8:
        end_s = time.monotonic() + entropy.uniform(0.02, 0.4)
        while time.monotonic() < end_s:
            crowd.turn()
        daemon.child.kill()
        kills += 1
        daemon.start()
        status = daemon.client.poll(job.job_id)
        assert status.scored >= scored, "what was scored stays scored"
        scored = status.scored
    done = work(daemon, crowd, job.job_id, succeeded)
    crowd.close()
    samples = daemon.manifest(done).samples
    assert len(samples) == len({sample.request_id for sample in samples}) == 2400
    assert len({(sample.prompt_id, sample.seed) for sample in samples}) == 2400
    assert {sample.reward for sample in samples} == {sample.seed % 97 / 97 for sample in samples}


def test_ten_thousand_requests_are_back_within_two_seconds_of_a_kill(daemon: Daemon) -> None:
    job = rollout(daemon.folder, "large-run", prompts=100, group_size=100)
    daemon.client.submit(job)
    crowd = Crowd(daemon.bind, groups=8, room=8)
    before = work(daemon, crowd, job.job_id, lambda status: status.scored >= 200)
    crowd.close()
    daemon.child.kill()
    daemon.start()
    after = daemon.client.poll(job.job_id)
    assert (after.total, after.phase) == (10_000, JobPhase.RUNNING)
    assert after.scored >= before.scored
    seconds = float(re.findall(r"event=restored .*requests=10000 seconds=(\S+)", daemon.log())[-1])
    assert seconds <= 2.0


FAKES = st.sampled_from(
    [
        Codec(ToControl).encode(message)
        for message in (
            NodeHeartbeat(node_id=NodeId("spot-0"), slots=1),
            PullWork(node_id=NodeId("nobody"), group_id="g", room=5),
            SampleDone(
                node_id=NodeId("spot-0"),
                lease_id=LeaseId("x"),
                request_id=RequestId("x"),
                sample_key="k",
                sample_digest="d",
                policy=PolicyRef(),
                started_s=0.0,
                finished_s=0.0,
            ),
            SampleScored(
                node_id=NodeId("spot-0"), lease_id=LeaseId("x"), request_id=RequestId("x"), reward=9.0, correct=True
            ),
        )
    ]
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good frame with some bytes changed, cut or repeated."""
    frame = bytearray(draw(FAKES))
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(frame) - 1))
        match draw(st.sampled_from(["change", "cut", "insert"])):
            case "change":
                frame[place] = draw(st.integers(0, 255))
            case "cut":
                del frame[place + 1 :]
            case _:
                frame[place:place] = draw(st.binary(max_size=8))
    return bytes(frame)


FRAMES = st.lists(
    st.one_of(
        st.binary(max_size=200),
        st.binary(max_size=200).map(lambda tail: VERSION + tail),
        st.binary(max_size=40).map(lambda tail: b"SL99" + tail),
        mutated(),
    ),
    min_size=1,
    max_size=3,
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Daemon, Crowd]]:
    patient = ClusterConfig(lease_s=DEADLINE_S, heartbeat_s=0.5)
    daemon = Daemon(tmp_path_factory.mktemp("control"), patient)
    crowd = Crowd(daemon.bind, groups=8, groups_per_node=4, room=2, work_s=0.02)
    yield daemon, crowd
    crowd.close()
    daemon.client.close()
    daemon.child.terminate(5.0)


def test_fuzzed_frames_disturb_neither_a_working_cluster_nor_its_results(shared: tuple[Daemon, Crowd]) -> None:
    daemon, crowd = shared
    job = rollout(daemon.folder, "fuzz-run", prompts=10, group_size=40)
    daemon.client.submit(job)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sent = 0

    @settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(batch=st.lists(FRAMES, min_size=1, max_size=8))
    def flood(batch: list[list[bytes]]) -> None:
        nonlocal sent
        for frames in batch:
            stranger.send_multipart(frames)
            sent += 1
        crowd.turn(0.0)

    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(daemon.bind)
        flood()
        for frames in ([b"SL99x"], [VERSION + b"\xc1"], [b""], [VERSION + b"\x80", b"second"]):
            stranger.send_multipart(frames)
        stranger.send_multipart([VERSION + b"x" * (4 * 1024 * 1024)])
        done = work(daemon, crowd, job.job_id, succeeded)
        refused = daemon.figure("spotlight_frames_refused_total", lambda value: value >= 5)
    context.term()
    assert sent > 150
    assert 5 <= refused <= sent + 5
    assert 'event="frame refused"' in daemon.log()
    samples = daemon.manifest(done).samples
    assert len({sample.request_id for sample in samples}) == 400
    assert {sample.reward for sample in samples} == {sample.seed % 97 / 97 for sample in samples}
    assert daemon.child.poll() is None


def test_figures_follow_the_queue(shared: tuple[Daemon, Crowd]) -> None:
    daemon, crowd = shared
    job = rollout(daemon.folder, "figures-run", prompts=5, group_size=20)
    time.sleep(COPIES_S)
    before = daemon.figures()
    daemon.client.submit(job)
    work(daemon, crowd, job.job_id, succeeded)
    scored = 'spotlight_requests{op="rollout",state="scored"}'
    assert daemon.figure(scored, lambda value: value == before[scored] + 100) == before[scored] + 100
    jobs = 'spotlight_jobs{op="rollout",phase="succeeded"}'
    time.sleep(COPIES_S)
    figures = daemon.figures()
    assert figures[jobs] == before[jobs] + 1
    assert figures['spotlight_slots{pool="spot"}'] == 8
    assert figures['spotlight_nodes{pool="spot"}'] == 2
    assert figures["spotlight_pulls_parked"] == 8
    assert figures['spotlight_requests{op="rollout",state="in_flight"}'] == 0
    assert figures["spotlight_journal_write_seconds_count"] > before["spotlight_journal_write_seconds_count"]
    assert figures["spotlight_leases_lost_total"] == 0


def test_work_granted_to_a_node_that_went_away_is_given_to_others(daemon: Daemon) -> None:
    ghost = FakeNode(NodeId("ghost"), daemon.bind, groups=2, room=5)
    crowd = Crowd(daemon.bind, groups=4, groups_per_node=4)
    limit_s = time.monotonic() + DEADLINE_S
    while daemon.figures()["spotlight_pulls_parked"] < 6:
        assert time.monotonic() < limit_s
        crowd.turn()
    ghost.dealer.close()
    job = rollout(daemon.folder, "ghost-run", prompts=5, group_size=10)
    daemon.client.submit(job)
    done = work(daemon, crowd, job.job_id, succeeded)
    crowd.close()
    assert 'event="peer away" peer=ghost kind=AssignWork' in daemon.log()
    assert daemon.figure("spotlight_leases_lost_total", lambda value: value >= 6) == 10
    assert {sample.node_id for sample in daemon.manifest(done).samples} == {"spot-0"}


@pytest.mark.slow
def test_control_that_was_stopped_for_longer_than_a_lease_takes_no_work_from_anybody(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path, ClusterConfig(lease_s=8.0, heartbeat_s=0.5))
    job = rollout(daemon.folder, "stopped-run", prompts=6, group_size=20)
    daemon.client.submit(job)
    crowd = Crowd(daemon.bind, groups=8, groups_per_node=2, room=2, work_s=0.3)
    work(daemon, crowd, job.job_id, lambda status: status.scored >= 8)
    os.kill(daemon.child.pid, signal.SIGSTOP)
    end_s = time.monotonic() + 11.0
    while time.monotonic() < end_s:
        crowd.turn()
    os.kill(daemon.child.pid, signal.SIGCONT)
    done = work(daemon, crowd, job.job_id, succeeded)
    lost = daemon.figure("spotlight_leases_lost_total", lambda value: value > 0)
    daemon.client.close()
    daemon.child.terminate(5.0)
    crowd.close()
    assert 'event="was away"' in daemon.log()
    assert lost == 0
    assert {sample.attempts for sample in daemon.manifest(done).samples} == {1}
    assert len(daemon.manifest(done).samples) == 120


def test_control_on_a_public_address_without_keys_refuses_to_start(tmp_path: Path) -> None:
    child = start_control(tmp_path, bind="tcp://0.0.0.0:0")
    with pytest.raises(InputError, match=r"bind = tcp://0\.0\.0\.0:0: must be a loopback or ipc address"):
        child.ready(DEADLINE_S)
    assert child.terminate(5.0) == InputError.exit_code


def test_a_job_beyond_the_bounds_is_one_line_and_counted(shared: tuple[Daemon, Crowd]) -> None:
    daemon, _ = shared
    before = daemon.figures()["spotlight_messages_refused_total"]
    job = rollout(daemon.folder, "huge-run", prompts=4096, group_size=256)
    with pytest.raises(InputError, match=r"prompts_per_iteration \* group_size = 1048576 .*: must be <= 131072"):
        daemon.client.submit(job)
    assert daemon.figures()["spotlight_messages_refused_total"] == before + 1
    assert "error_class=InputError" in daemon.log()
    assert job.job_id in daemon.log()
