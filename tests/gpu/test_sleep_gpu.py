"""Rollout engines and workers that sleep: their memory is the trainer's meanwhile, and they wake up as they fell asleep."""

import gc
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from diffusion_rollouts import BASE, MODEL, policy_of, random_adapter, request

from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.settings import WorkerSettings
from spot_runtime.daemons.worker import Worker
from spot_runtime.diffusion.adapter import initial_adapter
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.diffusion.weights import copy_weights
from spot_runtime.errors import ClusterError, UnseededError
from spot_runtime.messages import (
    AdmitRequest,
    DenoiseStep,
    JoinGroup,
    LoadPolicy,
    LoadWeights,
    SleepWorker,
    StepDone,
    StepItem,
    WakeWorker,
    WorkerSeeded,
    WorkerSlept,
    WorkerWoke,
)
from spot_runtime.store.layout import pack_tensors
from spot_runtime.types import Generation, PolicyRef

DEVICE = "cuda:0"
STEP = StepItem(slot=0, denoising_step=1)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def allocated() -> int:
    gc.collect()
    return torch.cuda.memory_allocated(DEVICE)


@pytest.fixture(autouse=True, scope="module")
def _libraries_have_their_memory() -> None:
    """The first matrix product of a process takes 32 MiB to work in, and keeps them."""
    torch.ones(64, 64, device=DEVICE) @ torch.ones(64, 64, device=DEVICE)


def weights_bytes(engine: DiffusersEngine) -> int:
    return sum(tensor.nbytes for tensor in engine.weights.tensors.values())


def load(engine: DiffusersEngine, kind: str) -> PolicyRef:
    engine.load_policy(BASE, None)
    if kind == "base":
        return BASE
    adapter = random_adapter(initial_adapter(engine._transformer, rank=4, alpha=8, seed=0), seed=5, scale=0.01)
    if kind == "full":
        adapter = {name: array + np.float32(0.01) for name, array in copy_weights(engine._transformer).items()}
    policy = policy_of(1, adapter)
    engine.load_policy(policy, adapter)
    return policy


def embeds(engine: DiffusersEngine) -> np.ndarray:
    return np.ones((5, engine._transformer.config.joint_attention_dim), np.float32)


@pytest.mark.parametrize("kind", ["base", "lora", "full"])
@pytest.mark.parametrize(("dtype", "offload_alone"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_sleeping_engine_leaves_the_device_and_makes_the_same_step_afterwards(
    kind: str, dtype: str, offload_alone: bool
) -> None:
    """Neither the base nor what a policy put in its place stays; the rotary tables and the slots' embeddings do."""
    before = allocated()
    engine = DiffusersEngine(MODEL, device=DEVICE, dtype=dtype, offload_alone=offload_alone)
    size, digest = weights_bytes(engine), engine.weights.digest
    policy = load(engine, kind)
    engine.admit(0, request(0, window=(1, 3), policy=policy), embeds(engine))
    latents = engine.initial_latents(0)
    (first,) = engine.denoise([STEP], [latents])
    awake = allocated() - before
    engine.sleep()
    asleep, held = allocated() - before, torch.cuda.memory_reserved(DEVICE)
    print(f"{kind}, {dtype}, offload {offload_alone}: {awake / 1e6:.2f} MB awake, {asleep / 1e6:.2f} MB asleep")
    assert {tensor.device.type for tensor in engine.weights.tensors.values()} == {"cpu"}
    assert asleep < 0.25 * size + 2e6
    engine.wake()
    assert {tensor.device for tensor in engine.weights.tensors.values()} == {torch.device(DEVICE)}
    assert engine.weights.digest == digest
    (again,) = engine.denoise([STEP], [latents])
    np.testing.assert_allclose(again.latents, first.latents, rtol=0, atol=1e-5)
    engine.sleep()
    assert abs(allocated() - before - asleep) < 0.05 * size  # nothing stays behind at each turn
    assert torch.cuda.memory_reserved(DEVICE) <= held + 2 * 20 * 1024 * 1024


def test_an_engine_whose_weights_were_damaged_in_their_sleep_is_refused() -> None:
    engine = DiffusersEngine(MODEL, device=DEVICE, dtype="bfloat16")
    engine.load_policy(BASE, None)
    engine.sleep()
    engine._transformer.proj_out.weight.data[0, 0] += 1
    with pytest.raises(UnseededError, match=r"1 tensors woke up .* transformer.proj_out.weight"):
        engine.wake()


class Bench:
    """Workers as a node that sleeps starts them, over one arena and one piece of shared memory."""

    def __init__(self, dtype: str) -> None:
        geometry = check_model(MODEL, 64).geometry
        self.shape = ArenaShape(slots=1, tokens=geometry.tokens, channels=geometry.channels, window_max=5)
        self.arena = LatentArena.create(self.shape)
        self.weights_fd = os.memfd_create("weights")
        self.dtype = dtype
        self.said: list[Any] = []

    def worker(self) -> Worker:
        settings = WorkerSettings(
            worker_id="n-w0",
            node_endpoint="",
            model=str(MODEL),
            dtype=self.dtype,
            sleeps=True,
            arena_fd=self.arena.fd,
            weights_fd=self.weights_fd,
            arena_slots=1,
            tokens=self.shape.tokens,
            channels=self.shape.channels,
            window_max=5,
        )
        return Worker(settings, self.arena, self)  # type: ignore[arg-type]

    def send(self, message: Any) -> None:
        self.said.append(message)

    def tell(self, worker: Worker, message: Any) -> Any:
        self.said.clear()
        worker.handle(message)
        return self.said[-1]

    def ready(self, worker: Worker) -> None:
        self.tell(worker, JoinGroup(seq=1, generation=Generation(1, 0, 1, "", 1.0)))
        self.tell(worker, LoadPolicy(policy=BASE, path=""))
        engine: Any = worker._loaded
        embedding = b"".join(pack_tensors({"embeds": embeds(engine)}, {}))
        self.tell(worker, AdmitRequest(slot=0, request=request(0, window=(1, 3)), embedding=embedding))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_memory_of_a_workers_process_falls_while_it_sleeps_and_a_peer_gets_its_weights_all_the_same(
    dtype: str,
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    bench, before = Bench(dtype), allocated()
    worker = bench.worker()
    seeded = bench.tell(worker, LoadWeights(seq=0, device=DEVICE))
    assert isinstance(seeded, WorkerSeeded)
    bench.ready(worker)
    step = DenoiseStep(seq=2, items=(StepItem(slot=0, denoising_step=0),))
    assert isinstance(bench.tell(worker, step), StepDone)
    first = bench.arena.latents(0, 1).copy()
    awake, (free_awake, _) = allocated() - before, torch.cuda.mem_get_info(DEVICE)
    assert isinstance(bench.tell(worker, SleepWorker(seq=3)), WorkerSlept)
    asleep, (free_asleep, _) = allocated() - before, torch.cuda.mem_get_info(DEVICE)
    print(f"{dtype}: process {awake / 1e6:.1f} MB awake, {asleep / 1e6:.1f} MB asleep; ", end="")
    print(f"device {(free_asleep - free_awake) / 1e6:.1f} MB more free")
    assert asleep < awake

    peer = bench.worker()
    offered = LoadWeights(seq=0, device=DEVICE, from_peer=True, digest=seeded.digest)
    assert isinstance(bench.tell(peer, offered), WorkerSeeded)

    assert isinstance(bench.tell(worker, WakeWorker(seq=4)), WorkerWoke)
    bench.arena.latents(0, 1)[:] = 0
    assert isinstance(bench.tell(worker, step), StepDone)
    np.testing.assert_allclose(bench.arena.latents(0, 1), first, rtol=0, atol=1e-5)

    bench.tell(worker, SleepWorker(seq=5))
    engine: Any = worker._loaded
    engine._transformer.proj_out.weight.data[0, 0] += 1
    with pytest.raises(ClusterError, match="the worker starts anew"):
        bench.tell(worker, WakeWorker(seq=6))
