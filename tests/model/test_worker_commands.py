"""What a worker refuses: it serves neither without weights nor outside a group, and its failures never leave others waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spot_runtime.daemons import worker as worker_daemon
from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.settings import WorkerSettings
from spot_runtime.daemons.worker import Worker
from spot_runtime.diffusion.geometry import model_folder, read_json
from spot_runtime.errors import ClusterError
from spot_runtime.messages import (
    AdmitRequest,
    DenoiseStep,
    DismissRequest,
    GenerationRequest,
    GroupJoined,
    JoinGroup,
    LoadPolicy,
    LoadWeights,
    SamplingParams,
    SleepWorker,
    StepDone,
    StepItem,
    WakeWorker,
    WorkerFailed,
    WorkerSeeded,
    WorkerSlept,
    WorkerWoke,
)
from spot_runtime.parallel.shared import SharedWeights
from spot_runtime.store.layout import pack_tensors
from spot_runtime.types import Generation, JobId, Op, PolicyRef, RequestId, RunId, WorkerId

ALONE = Generation(id=1, rank=0, degree=1, rendezvous="", timeout_s=1.0)
STEP = DenoiseStep(seq=7, items=(StepItem(slot=0, denoising_step=0),))


class Heard:
    """Stands in for the connection to the node: keeps what was said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def send(self, message: object) -> None:
        self.said.append(message)


class Bench:
    """One worker with an arena of its own."""

    def __init__(self) -> None:
        self.arena = LatentArena.create(ArenaShape(slots=2, tokens=64, channels=16, window_max=2))
        self.weights_fd = os.memfd_create("weights")
        self.node = Heard()
        self.worker = self.another()

    def another(self, **changed: Any) -> Worker:
        settings = WorkerSettings(
            worker_id="n-w0",
            node_endpoint="",
            model="tiny",
            arena_fd=self.arena.fd,
            weights_fd=self.weights_fd,
            arena_slots=2,
            tokens=64,
            channels=16,
            window_max=2,
            **changed,
        )
        return Worker(settings, self.arena, self.node)  # type: ignore[arg-type]

    def tell(self, message: Any, worker: Worker | None = None) -> Any:
        """The last that it said in answer; None for nothing."""
        self.node.said.clear()
        (worker or self.worker).handle(message)
        return self.node.said[-1] if self.node.said else None

    def admit(self) -> Any:
        width = int(read_json(model_folder("tiny"), "transformer/config.json")["joint_attention_dim"])
        embeds = np.zeros((3, width), np.float32)
        payload = b"".join(pack_tensors({"embeds": embeds}, {}))
        return self.tell(AdmitRequest(slot=0, request=request(), embedding=payload))


def request() -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId("a"),
        job_id=JobId("j"),
        run_id=RunId("r"),
        op=Op.ROLLOUT,
        prompt_id="p",
        prompt="a cube",
        row_json="{}",
        seed=1,
        sde_window=(0, 1),
        params=SamplingParams(height=64, width=64, num_steps=4, noise_level=0.7),
        policy=PolicyRef(),
        embedding_key="e",
    )


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    os.close(bench.weights_fd)


def test_without_weights_nothing_is_served(bench: Bench) -> None:
    for message in (JoinGroup(seq=3, generation=ALONE), LoadPolicy(policy=PolicyRef(), path="")):
        failed = bench.tell(message)
        assert (failed.error_class, failed.seq) == ("UnseededError", getattr(message, "seq", -1))
    assert isinstance(bench.tell(STEP), WorkerFailed)


def test_where_no_peer_is_left_the_model_folder_is_read_and_checked_all_the_same(bench: Bench) -> None:
    assert isinstance(bench.tell(LoadWeights(seq=1, device="cpu", from_peer=True)), WorkerSeeded)
    refused = bench.tell(LoadWeights(seq=1, device="cpu", digest="f" * 64), bench.another())
    assert refused.error_class == "UnseededError"


def test_a_peer_gets_the_weights_of_the_first_and_other_weights_are_refused(bench: Bench) -> None:
    first = bench.tell(LoadWeights(seq=1, device="cpu"))
    assert isinstance(first, WorkerSeeded)
    copied = bench.tell(LoadWeights(seq=1, device="cpu", from_peer=True, digest=first.digest), bench.another())
    assert copied.digest == first.digest
    refused = bench.tell(LoadWeights(seq=1, device="cpu", from_peer=True, digest="f" * 64), bench.another())
    assert refused.error_class == "UnseededError"


def test_a_step_is_taken_in_a_group_only_and_a_failed_one_ends_the_part_in_it(bench: Bench) -> None:
    bench.tell(LoadWeights(seq=1, device="cpu"))
    bench.tell(LoadPolicy(policy=PolicyRef(), path=""))
    bench.admit()
    assert bench.tell(STEP).error_class == "GroupError"
    assert isinstance(bench.tell(JoinGroup(seq=2, generation=ALONE)), GroupJoined)
    assert isinstance(bench.tell(STEP), StepDone)
    stranger = DenoiseStep(seq=8, items=(StepItem(slot=1, denoising_step=0),))
    assert bench.tell(stranger).error_class == "ClusterError"
    assert bench.tell(STEP).error_class == "GroupError"


def test_a_worker_computes_in_the_dtype_and_with_the_offload_of_its_settings(bench: Bench) -> None:
    bench.worker = bench.another(dtype="bfloat16", offload_alone=True)
    bench.tell(LoadWeights(seq=1, device="cpu"))
    bench.tell(JoinGroup(seq=2, generation=ALONE))
    bench.tell(LoadPolicy(policy=PolicyRef(), path=""))
    bench.admit()
    assert isinstance(bench.tell(STEP), StepDone)
    engine: Any = bench.worker._loaded
    assert str(engine._transformer.proj_out.weight.dtype) == "torch.bfloat16"
    assert engine._offload.is_on
    assert np.isfinite(bench.arena.latents(0, 1)).all()


def ready_to_step(bench: Bench) -> None:
    bench.tell(LoadWeights(seq=1, device="cpu"))
    bench.tell(JoinGroup(seq=2, generation=ALONE))
    bench.tell(LoadPolicy(policy=PolicyRef(), path=""))
    bench.admit()


def test_a_worker_that_slept_goes_on_with_its_group_its_policies_and_its_requests(bench: Bench) -> None:
    ready_to_step(bench)
    bench.tell(STEP)
    before = bench.arena.latents(0, 1).copy()
    assert bench.tell(SleepWorker(seq=8)) == WorkerSlept(worker_id=WorkerId("n-w0"), seq=8)
    assert isinstance(bench.tell(SleepWorker(seq=9)), WorkerSlept)
    assert bench.tell(WakeWorker(seq=10)) == WorkerWoke(worker_id=WorkerId("n-w0"), seq=10)
    assert isinstance(bench.tell(WakeWorker(seq=11)), WorkerWoke)
    bench.arena.latents(0, 1)[:] = 0
    assert isinstance(bench.tell(STEP), StepDone)
    assert np.array_equal(bench.arena.latents(0, 1), before)


def test_in_its_sleep_a_worker_computes_nothing(bench: Bench) -> None:
    ready_to_step(bench)
    bench.tell(SleepWorker(seq=8))
    assert bench.tell(STEP).error_class == "UnseededError"
    assert bench.tell(LoadPolicy(policy=PolicyRef(), path="")).error_class == "UnseededError"


def test_weights_that_were_damaged_in_their_sleep_end_the_worker(bench: Bench) -> None:
    ready_to_step(bench)
    bench.tell(SleepWorker(seq=8))
    engine: Any = bench.worker._loaded
    engine._transformer.proj_out.weight[0, 0] += 1
    with pytest.raises(ClusterError, match=r"1 tensors woke up .* transformer.proj_out.weight; the worker starts anew"):
        bench.tell(WakeWorker(seq=9))


def test_a_worker_waits_for_room_on_the_device_as_it_wakes_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ready_to_step(bench)
    bench.tell(SleepWorker(seq=8))
    engine: Any = bench.worker._loaded
    wake, full = engine.wake, [torch.OutOfMemoryError("full"), torch.OutOfMemoryError("full")]

    def try_to_wake() -> None:
        if full:
            raise full.pop()
        wake()

    monkeypatch.setattr(worker_daemon, "WAKE_POLL_S", 0.0)
    monkeypatch.setattr(engine, "wake", try_to_wake)
    assert isinstance(bench.tell(WakeWorker(seq=9)), WorkerWoke)
    full[:] = [torch.OutOfMemoryError("full")]
    monkeypatch.setattr(worker_daemon, "WAKE_S", 0.0)
    with pytest.raises(ClusterError, match="full; the worker starts anew"):
        bench.tell(WakeWorker(seq=10))


def test_weights_that_sleep_at_times_are_given_on_through_the_hosts_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def noted(fd: int, device: torch.device, *, stay: bool) -> SharedWeights:
        asked.append(stay)
        return SharedWeights(fd)

    monkeypatch.setattr(worker_daemon, "machine_weights", noted)
    for sleeps in (False, True):
        bench.tell(LoadWeights(seq=1, device="cpu"), bench.another(sleeps=sleeps))
    assert asked == [True, False]


def test_a_dismissed_request_is_held_no_more(bench: Bench) -> None:
    bench.tell(LoadWeights(seq=1, device="cpu"))
    bench.tell(JoinGroup(seq=2, generation=ALONE))
    bench.tell(LoadPolicy(policy=PolicyRef(), path=""))
    bench.admit()
    assert bench.tell(DismissRequest(slot=0)) is None
    assert bench.tell(DismissRequest(slot=1)) is None
    engine: Any = bench.worker._loaded
    assert not engine._slots
    assert bench.tell(STEP).error_class == "ClusterError"


def test_only_the_lead_writes_into_the_arena_and_only_what_a_step_has_made(bench: Bench) -> None:
    bench.tell(LoadWeights(seq=1, device="cpu"))
    bench.tell(JoinGroup(seq=2, generation=ALONE))
    bench.tell(LoadPolicy(policy=PolicyRef(), path=""))
    bench.admit()
    bench.worker._rank = 1
    assert isinstance(bench.tell(STEP), StepDone)
    assert not bench.arena.latents(0, 0).any()
    assert not bench.arena.latents(0, 1).any()
    bench.worker._rank = 0
    assert isinstance(bench.tell(STEP), StepDone)
    assert not bench.arena.latents(0, 0).any()
    assert bench.arena.latents(0, 1).any()
