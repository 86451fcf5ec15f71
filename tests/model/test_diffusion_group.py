"""An engine whose degree changes between denoising steps: the samples are those of degree 1, with and without a step cache."""

import os
import signal
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from diffusion_rollouts import BASE, MODEL, policy_of, random_adapter, request
from ranks import CPU, generations, ranks, run_group

from spot_runtime.diffusion.adapter import initial_adapter
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.errors import GroupError, InputError, UnseededError
from spot_runtime.messages import GenerationRequest, StepItem
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.parallel.shared import SharedWeights
from spot_runtime.parallel.weights import weights_digest
from spot_runtime.types import Generation, Op, PolicyRef

LENGTHS = (9, 23, 14)
WIDTH = 64
STEPS = 10
TURNS = STEPS + 2
"""Calls of `denoise` until all are done: see `Run`."""
TOLERANCE = 1e-5
THRESHOLD = 0.3


def requests(threshold: float = 0.0, policy: PolicyRef = BASE) -> list[GenerationRequest]:
    """Three, the second of a smaller size; with a threshold they are explorations with a step cache."""
    op = Op.EXPLORE if threshold else Op.ROLLOUT
    made = []
    for seed, size in enumerate((64, 32, 64)):
        wanted = request(seed, window=(1, 4), policy=policy, num_steps=STEPS)
        params = msgspec.structs.replace(wanted.params, cache_threshold=threshold, height=size, width=size)
        made.append(msgspec.structs.replace(wanted, op=op, params=params))
    return made


def embeds() -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [rng.standard_normal((n, WIDTH)).astype(np.float32) for n in LENGTHS]


class Run:
    """Three requests in an engine, each one denoising step behind the one before it, as continuous batching has them."""

    def __init__(self, engine: DiffusersEngine, asked: list[GenerationRequest], first_slot: int = 0) -> None:
        self.engine = engine
        self.slots = range(first_slot, first_slot + len(asked))
        for slot, wanted, text in zip(self.slots, asked, embeds(), strict=True):
            engine.admit(slot, wanted, text)
        self.latents = [engine.initial_latents(slot) for slot in self.slots]
        self.full: list[list[bool]] = [[] for _ in asked]
        self.log_probs: list[list[float]] = [[] for _ in asked]
        self.turn = 0

    def steps(self, count: int) -> None:
        """`count` calls of `denoise` over all that have begun and not ended. Where one raises, nothing of it is kept."""
        for _ in range(count):
            going = [b for b in range(len(self.slots)) if 0 <= self.turn - b < STEPS]
            items = [StepItem(slot=self.slots[b], denoising_step=self.turn - b) for b in going]
            done = self.engine.denoise(items, [self.latents[b] for b in going])
            for b, step in zip(going, done, strict=True):
                self.latents[b] = step.latents
                self.full[b].append(step.is_full)
                self.log_probs[b] += [] if step.log_prob is None else [step.log_prob]
            self.turn += 1

    def tensors(self) -> list[torch.Tensor]:
        return [torch.from_numpy(latents) for latents in self.latents]


def new_engine(*, offload_alone: bool = False) -> tuple[DiffusersEngine, PolicyRef]:
    """With the base model and a policy that differs from it."""
    engine = DiffusersEngine(MODEL, offload_alone=offload_alone)
    return engine, load_policies(engine)


def load_policies(engine: DiffusersEngine) -> PolicyRef:
    adapter = random_adapter(initial_adapter(engine._transformer, rank=4, alpha=8, seed=0), seed=5)
    policy = policy_of(1, adapter)
    engine.load_policy(BASE, None)
    engine.load_policy(policy, adapter)
    return policy


def kinds(policy: PolicyRef) -> list[list[GenerationRequest]]:
    """Requests of the base model, of a policy, and with a step cache."""
    return [requests(), requests(policy=policy), requests(THRESHOLD)]


def all_alone(engine: DiffusersEngine, policy: PolicyRef) -> list[Run]:
    engine.set_group(None)
    runs = []
    for asked in kinds(policy):
        run = Run(engine, asked)
        run.steps(TURNS)
        runs.append(run)
    return runs


def gap(run: Run, alone: Run) -> float:
    """The largest difference of latents and log-probs."""
    of_latents = max(float(np.abs(a - b).max()) for a, b in zip(run.latents, alone.latents, strict=True))
    priced, wanted = (np.concatenate(r.log_probs) for r in (run, alone))
    return max(of_latents, float(np.abs(priced - wanted).max()))


Outcome = list[tuple[float, list[list[bool]], list[list[bool]]]]
"""For each kind: its gap to degree 1, which steps took a forward, and which of them did at degree 1."""


def _throughout(group: SequenceGroup) -> Outcome:
    engine, policy = new_engine(offload_alone=group.rank == 1)
    alone = all_alone(engine, policy)
    engine.set_group(group)
    outcome = []
    for asked, reference in zip(kinds(policy), alone, strict=True):
        run = Run(engine, asked)
        run.steps(TURNS)
        outcome.append((gap(run, reference), run.full, reference.full))
    assert not engine._offload.is_on
    assert weights_digest(engine.weights.tensors) == engine.weights.digest
    return outcome


@pytest.mark.parametrize("degree", [2, 4])
def test_samples_are_the_same_at_any_degree(degree: int) -> None:
    """Sizes, denoising steps and text lengths mixed in a batch; every rank has the same, and caches skip the same steps on all of them.

    One rank keeps its blocks in host memory while it is alone.
    """
    for outcome in run_group(_throughout, degree):
        for distance, full, full_alone in outcome:
            assert distance <= TOLERANCE
            assert full == full_alone
        cached = outcome[2][1]
        assert all(0 < sum(steps) < STEPS for steps in cached)


def publish(engine: DiffusersEngine, weights_path: str) -> None:
    fd = os.open(weights_path, os.O_RDWR)
    SharedWeights(fd).publish(engine.weights)
    os.close(fd)


def _survivor(
    tell: Callable[[Any], None], weights_path: str, two: Generation, again: Generation
) -> tuple[str, Outcome]:
    """Degree 2, its peer is killed in mid-step, degree 1, and degree 2 again with a rank that had no weights.

    The step that breaks is one of samples with step caches, after those of one size and before those of the other.
    """
    engine, policy = new_engine()
    alone = all_alone(engine, policy)
    group = SequenceGroup.join(two, CPU)
    engine.set_group(group)
    runs = [Run(engine, asked, 10 * k) for k, asked in enumerate(kinds(policy))]
    for run in runs:
        run.steps(4)
    with pytest.raises(GroupError) as raised:
        runs[2].steps(1)
    engine.set_group(None)
    group.close()
    for run in runs:
        run.steps(2)
    publish(engine, weights_path)
    group = SequenceGroup.join(again, CPU)
    engine.set_group(group)
    for run in runs:
        group.broadcast(run.tensors(), source=0)
        run.steps(TURNS - 6)
    return str(raised.value), [(gap(r, a), r.full, a.full) for r, a in zip(runs, alone, strict=True)]


def _victim(tell: Callable[[Any], None], generation: Generation) -> None:
    engine, policy = new_engine()
    group = SequenceGroup.join(generation, CPU)
    engine.set_group(group)
    runs = [Run(engine, asked, 10 * k) for k, asked in enumerate(kinds(policy))]
    for run in runs:
        run.steps(4)
    broadcast, sizes_decided = group.broadcast, []

    def broadcast_or_die(tensors: list[torch.Tensor], source: int) -> None:
        sizes_decided.append(len(tensors))
        if len(sizes_decided) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(tensors, source)

    group.broadcast = broadcast_or_die
    runs[2].steps(1)


def _newcomer(
    tell: Callable[[Any], None], weights_path: str, generation: Generation
) -> list[tuple[list[np.ndarray], list[list[bool]]]]:
    engine = DiffusersEngine(MODEL, is_seeded=False)
    group = SequenceGroup.join(generation, CPU)
    engine.weights.seed(*SharedWeights(os.open(weights_path, os.O_RDWR)).read())
    policy = load_policies(engine)
    engine.set_group(group)
    outcome = []
    for k, asked in enumerate(kinds(policy)):
        run = Run(engine, asked, 10 * k)
        run.turn = 6
        group.broadcast(run.tensors(), source=0)
        run.steps(TURNS - 6)
        outcome.append((run.latents, run.full))
    return outcome


def test_requests_go_on_at_their_denoising_step_when_a_rank_dies_and_another_joins(tmp_path) -> None:
    two, again = generations(tmp_path, 1, 2), generations(tmp_path, 2, 2)
    (tmp_path / "weights").touch()
    path = str(tmp_path / "weights")
    with (
        ranks(_survivor, [(path, two[0], again[0])]) as (survivor,),
        ranks(_victim, [(two[1],)]),
        ranks(_newcomer, [(path, again[1])]) as (newcomer,),
    ):
        error, outcome = survivor.result()
        joined = newcomer.result()
    assert error.startswith("generation 1 rank 0 of 2: ")
    for (distance, full, full_alone), (_, full_joined) in zip(outcome, joined, strict=True):
        assert distance <= TOLERANCE
        assert full == full_alone
        assert full_joined == [steps[6 - b :] for b, steps in enumerate(full_alone)]
    assert not all(all(steps) for steps in joined[2][1])


def _stray(group: SequenceGroup) -> str:
    engine, policy = new_engine()
    engine.set_group(group)
    run = Run(engine, kinds(policy)[group.rank])
    try:
        run.steps(1)
    except GroupError as error:
        return str(error)
    return ""


def test_ranks_with_different_requests_do_not_denoise() -> None:
    assert [f"generation 1 rank {r} of 2: denoise failed: rank 1 differs from rank 0" for r in (0, 1)] == run_group(
        _stray, 2
    )


class Three:
    """A group of a degree that the model cannot have."""

    degree = 3


def test_a_degree_that_does_not_divide_the_heads_is_refused() -> None:
    engine = DiffusersEngine(MODEL, is_seeded=False)
    with pytest.raises(InputError, match="sequence_parallel_degree = 3: must divide the 4 attention heads"):
        engine.set_group(Three())  # type: ignore[arg-type]


def test_an_unseeded_engine_serves_nothing() -> None:
    engine = DiffusersEngine(MODEL, is_seeded=False)
    engine.admit(0, requests()[0], embeds()[0])
    x = engine.initial_latents(0)
    for use in (
        lambda: engine.load_policy(BASE, None),
        lambda: engine.denoise([StepItem(slot=0, denoising_step=0)], [x]),
        lambda: engine.decode([0], [x]),
    ):
        with pytest.raises(UnseededError, match="are unseeded: must be copied and checked first"):
            use()


def test_an_engine_seeded_from_shared_memory_is_the_publishers_to_the_bit_and_leaves_the_memory_as_it_is() -> None:
    giver, policy = new_engine()
    taker = DiffusersEngine(MODEL, is_seeded=False)
    fd = os.memfd_create("weights")
    try:
        SharedWeights(fd).publish(giver.weights)
        taker.weights.seed(*SharedWeights(fd).read())
        assert load_policies(taker) == policy
        for asked in (requests(), requests(policy=policy)):
            one, two = Run(giver, asked), Run(taker, asked)
            one.steps(3)
            two.steps(3)
            assert gap(one, two) == 0
            (image,), (same,) = (e.decode([0], [one.latents[0]]) for e in (giver, taker))
            assert np.array_equal(image, same)
        assert weights_digest(taker.weights.tensors) == giver.weights.digest
        assert weights_digest(SharedWeights(fd).read()[0]) == giver.weights.digest
    finally:
        os.close(fd)


def test_blocks_in_host_memory_compute_the_same_and_stay_the_publishers() -> None:
    engine, policy = new_engine()
    alone = all_alone(engine, policy)
    sparing, _ = new_engine(offload_alone=True)
    for run, reference in zip(all_alone(sparing, policy), alone, strict=True):
        assert gap(run, reference) == 0
    assert sparing._offload.is_on
    assert not sparing._offload._on_device
    assert weights_digest(sparing.weights.tensors) == engine.weights.digest
