"""Groups over NCCL, weights over CUDA IPC and offloading, in bf16 as a GPU worker runs. Each process gets its own CUDA context."""

import gc
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
from diffusion_rollouts import BASE, MODEL, policy_of, random_adapter, request
from ranks import generations, ranks

from spot_runtime.diffusion.adapter import initial_adapter
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.errors import GroupError, UnseededError
from spot_runtime.messages import StepItem
from spot_runtime.parallel.cuda_ipc import DeviceWeights
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.parallel.weights import WeightState, weights_digest
from spot_runtime.types import Generation, PolicyRef

CUDA = torch.device("cuda")
DTYPE = "bfloat16"
LENGTHS = (9, 23, 14)
STEPS = 4

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a CUDA device for each of 2 ranks")


def _engine(
    is_seeded: bool = True, device: str = "cuda", dtype: str = DTYPE, *, offload_alone: bool = False
) -> DiffusersEngine:
    return DiffusersEngine(MODEL, device=device, dtype=dtype, is_seeded=is_seeded, offload_alone=offload_alone)


def _load_policies(engine: DiffusersEngine) -> PolicyRef:
    engine.load_policy(BASE, None)
    adapter = random_adapter(initial_adapter(engine._transformer, rank=4, alpha=8, seed=0), seed=5, scale=0.01)
    policy = policy_of(1, adapter)
    engine.load_policy(policy, adapter)
    return policy


def _samples(engine: DiffusersEngine, policy: PolicyRef = BASE) -> np.ndarray:
    """Final latents of three requests with uneven texts, sampled together: [3, L, C]."""
    rng = np.random.default_rng(4)
    width = engine._transformer.config.joint_attention_dim
    for slot, length in enumerate(LENGTHS):
        wanted = request(slot, window=(1, 3), policy=policy, num_steps=STEPS)
        engine.admit(slot, wanted, rng.standard_normal((length, width)).astype(np.float32))
    latents = [engine.initial_latents(slot) for slot in range(len(LENGTHS))]
    for i in range(STEPS):
        items = [StepItem(slot=slot, denoising_step=i) for slot in range(len(LENGTHS))]
        latents = [step.latents for step in engine.denoise(items, latents)]
    return np.stack(latents)


def _gap(one: np.ndarray, two: np.ndarray) -> float:
    """Relative to `two`."""
    return float(np.linalg.norm(one - two) / np.linalg.norm(two))


def _same(one: np.ndarray, two: np.ndarray, relative: float) -> bool:
    return _gap(one, two) <= relative


def _alone_in_nccl(tell: Callable[[Any], None], generation: Generation) -> dict[str, Any]:
    group = SequenceGroup.join(generation, CUDA)
    parts = torch.arange(6, device=CUDA, dtype=torch.bfloat16).view(1, 2, 3)
    big = torch.full((300, 7), 3.0, device=CUDA)
    group.broadcast([parts, big], source=0)
    seen = {
        "all_to_all": torch.equal(group.all_to_all(parts), parts),
        "all_gather": torch.equal(group.all_gather(parts[0]), parts),
        "numbers": group.gather_numbers([4, 5]),
    }
    exact: dict[str, np.ndarray] = {}
    for dtype in ("float32", DTYPE):
        engine = _engine(dtype=dtype)
        policy = _load_policies(engine)
        for name, wanted in (("base", BASE), ("policy", policy)):
            engine.set_group(None)
            alone = _samples(engine, wanted)
            engine.set_group(group)
            seen[f"{dtype} {name}"] = _gap(_samples(engine, wanted), alone)
            seen[f"rounding {dtype} {name}"] = _gap(alone, exact.setdefault(name, alone))
        engine.set_group(None)
    began_s = time.monotonic()
    group.close()
    group.close()
    seen["closed within"] = time.monotonic() - began_s
    with pytest.raises(GroupError, match="all_gather on a group that is closed"):
        group.all_gather(parts)
    return seen


def test_a_group_over_nccl_denoises_as_no_group_does(tmp_path: Path) -> None:
    (generation,) = generations(tmp_path, 1, 1, timeout_s=30.0)
    with ranks(_alone_in_nccl, [(generation,)], on_gpu=True) as (rank,):
        seen = rank.result()
    assert seen.pop("closed within") < 30
    gaps = {name: seen.pop(name) for name in sorted(seen) if isinstance(seen[name], float)}
    assert seen == {"all_to_all": True, "all_gather": True, "numbers": [[4, 5]]}
    for name in ("base", "policy"):
        assert gaps[f"float32 {name}"] <= 1e-4, gaps
        assert gaps[f"bfloat16 {name}"] <= 2 * gaps[f"rounding bfloat16 {name}"], gaps  # both round, each in its way


def _rank_of_two(tell: Callable[[Any], None], generation: Generation) -> tuple[np.ndarray, np.ndarray, str]:
    device = f"cuda:{generation.rank}"
    torch.cuda.set_device(device)
    engine = _engine(device=device)
    group = SequenceGroup.join(generation, torch.device(device))
    policy = _load_policies(engine)
    alone = _samples(engine, policy)
    engine.set_group(group)
    together = _samples(engine, policy)
    engine.set_group(None)
    group.close()
    return alone, together, engine.weights.digest


@two_gpus
def test_two_gpus_denoise_as_one_does(tmp_path: Path) -> None:
    of_rank = generations(tmp_path, 2, 2, timeout_s=60.0)
    with ranks(_rank_of_two, [(generation,) for generation in of_rank], on_gpu=True) as running:
        (alone, together, digest), (_, other, other_digest) = (rank.result() for rank in running)
    assert digest == other_digest
    assert np.array_equal(together, other)
    assert _same(together, alone, 2e-2)


def _until_freed(tell: Callable[[Any], None], generation: Generation) -> tuple[str, float]:
    device = torch.device(f"cuda:{generation.rank}")
    torch.cuda.set_device(device)
    group = SequenceGroup.join(generation, device)
    tell("joined")
    parts = torch.zeros(2, 1000, device=device)
    began_s = time.monotonic()
    try:
        while True:
            began_s = time.monotonic()
            group.all_to_all(parts)
            group.synchronize()
    except GroupError as error:
        group.close()
        x = torch.ones(8, device=device).sum().item()
        return f"{error} {x}", time.monotonic() - began_s


@two_gpus
def test_a_killed_rank_frees_the_other_whose_gpu_stays_usable(tmp_path: Path) -> None:
    of_rank = generations(tmp_path, 3, 2, timeout_s=5.0)
    with ranks(_until_freed, [(generation,) for generation in of_rank], on_gpu=True) as running:
        assert [rank.message() for rank in running] == ["joined"] * 2
        running[1].kill()
        error, waited_s = running[0].result()
    assert error.startswith("generation 3 rank 0 of 2: ")
    assert error.endswith(" 8.0")
    assert waited_s < 30


def _publisher(tell: Callable[[Any], None], path: str) -> None:
    engine = _engine()
    policy = _load_policies(engine)
    samples = _samples(engine, policy)
    DeviceWeights(os.open(path, os.O_RDWR), CUDA).publish(engine.weights)
    tell((os.getpid(), engine.weights.digest, samples))
    time.sleep(600)


def _reader(tell: Callable[[Any], None], path: str, publisher_pid: int) -> tuple[str, np.ndarray, bool]:
    """Digest, samples, and whether the copy is whole when the publisher is gone."""
    engine = _engine(is_seeded=False)
    assert torch.cuda.memory_allocated() == 0
    engine.weights.seed(*DeviceWeights(os.open(path, os.O_RDWR), CUDA).read())
    tell("copied")
    while Path(f"/proc/{publisher_pid}").exists():
        time.sleep(0.05)
    whole = weights_digest(engine.weights.tensors) == engine.weights.digest
    return engine.weights.digest, _samples(engine, _load_policies(engine)), whole


def _late(tell: Callable[[Any], None], path: str) -> tuple[str, str]:
    engine = _engine(is_seeded=False)
    try:
        engine.weights.seed(*DeviceWeights(os.open(path, os.O_RDWR), CUDA).read())
    except UnseededError as error:
        return engine.weights.state, str(error)
    return engine.weights.state, ""


def test_a_worker_takes_its_weights_from_a_peer_on_the_same_gpu(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    with ranks(_publisher, [(str(path),)], on_gpu=True) as (publisher,):
        pid, digest, samples = publisher.message()
        with ranks(_reader, [(str(path), pid)], on_gpu=True) as (reader,):
            assert reader.message() == "copied"
            publisher.end()
            copied, same, whole = reader.result()
    assert copied == digest
    assert whole
    assert _same(same, samples, 1e-2)
    with ranks(_late, [(str(path),)], on_gpu=True) as (late,):
        assert late.result() == (
            WeightState.UNSEEDED,
            "device weights are empty: no living worker of this machine has published any",
        )


def _at_rest_bytes(engine: DiffusersEngine) -> int:
    """What is allocated between two denoising steps, when nobody is admitted."""
    for slot in range(len(LENGTHS)):
        engine.release(slot)
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def test_blocks_in_host_memory_compute_the_same_in_less_device_memory() -> None:
    """The same engine before and after: what a first forward leaves on the device, such as rotary tables, is in both."""
    engine = _engine()
    policy = _load_policies(engine)
    alone = {wanted: _samples(engine, wanted) for wanted in (BASE, policy)}
    held_bytes = _at_rest_bytes(engine)
    blocks_bytes = sum(p.nbytes for p in engine._transformer.transformer_blocks.parameters())
    engine._offload_alone = True
    for wanted, samples in alone.items():
        assert _same(_samples(engine, wanted), samples, 1e-2)
    assert held_bytes - _at_rest_bytes(engine) >= 0.9 * blocks_bytes
    assert weights_digest(engine.weights.tensors) == engine.weights.digest


def test_a_second_publisher_gives_when_the_first_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.touch()
    with ranks(_publisher, [(str(path),), (str(path),)], on_gpu=True) as (first, second):
        (_, digest, _), (pid, _, _) = first.message(), second.message()
        first.end()
        with ranks(_reader, [(str(path), pid)], on_gpu=True) as (reader,):
            assert reader.message() == "copied"
            second.end()
            copied, _, whole = reader.result()
    assert copied == digest
    assert whole


def _worker_on_gpu(
    tell: Callable[[Any], None], path: str, from_peer: bool, offload_alone: bool
) -> tuple[str, str, bool]:
    """A worker as a node starts it (settings, arena, commands), through two denoising steps alone: digest, dtype, all steps answered."""
    from spot_runtime.daemons.arena import ArenaShape, LatentArena
    from spot_runtime.daemons.settings import WorkerSettings
    from spot_runtime.daemons.worker import Worker
    from spot_runtime.diffusion import engine as engine_module
    from spot_runtime.diffusion.geometry import check_model
    from spot_runtime.messages import AdmitRequest, DenoiseStep, JoinGroup, LoadPolicy, LoadWeights, StepDone
    from spot_runtime.store.layout import pack_tensors

    if from_peer:
        engine_module.load_parts = None  # type: ignore[assignment] - the model folder is not to be read
    said: list[Any] = []

    class Node:
        send = staticmethod(said.append)

    geometry = check_model(MODEL, 64).geometry
    arena = LatentArena.create(ArenaShape(slots=1, tokens=geometry.tokens, channels=geometry.channels, window_max=5))
    settings = WorkerSettings(
        worker_id="n-w0",
        node_endpoint="",
        model=str(MODEL),
        dtype=DTYPE,
        offload_alone=offload_alone,
        arena_fd=arena.fd,
        weights_fd=os.open(path, os.O_RDWR),
        arena_slots=1,
        tokens=geometry.tokens,
        channels=geometry.channels,
        window_max=5,
    )
    worker = Worker(settings, arena, Node())  # type: ignore[arg-type]
    worker.handle(LoadWeights(seq=0, device="cuda:0", from_peer=from_peer))
    (seeded,) = said
    worker.handle(JoinGroup(seq=1, generation=Generation(1, 0, 1, "", 1.0)))
    worker.handle(LoadPolicy(policy=BASE, path=""))
    engine: Any = worker._loaded
    width = engine._transformer.config.joint_attention_dim
    embedding = b"".join(pack_tensors({"embeds": np.ones((5, width), np.float32)}, {}))
    worker.handle(AdmitRequest(slot=0, request=request(0, window=(1, 3)), embedding=embedding))
    for step in range(2):
        worker.handle(DenoiseStep(seq=2 + step, items=(StepItem(slot=0, denoising_step=step),)))
    done = [message for message in said if isinstance(message, StepDone)]
    tell("ready")
    if not from_peer:
        time.sleep(600)
    on_host = next(engine._transformer.transformer_blocks.parameters()).device.type == "cpu"
    return seeded.digest, str(engine._transformer.proj_out.weight.dtype), len(done) == 2 and on_host == offload_alone


@pytest.mark.parametrize("offload_alone", [False, True])
def test_a_worker_serves_in_bf16_with_the_weights_of_a_peer(tmp_path: Path, offload_alone: bool) -> None:
    """Also of one whose blocks have gone to the host since."""
    path = tmp_path / "weights"
    path.touch()
    with ranks(_worker_on_gpu, [(str(path), False, offload_alone)], on_gpu=True) as (first,):
        assert first.message() == "ready"
        with ranks(_worker_on_gpu, [(str(path), True, offload_alone)], on_gpu=True) as (second,):
            assert second.message() == "ready"
            _, dtype, served = second.result()
    assert (dtype, served) == ("torch.bfloat16", True)
