"""Requests and rollouts that the diffusion and trainer tests share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import numpy as np

from spot_runtime.diffusion.adapter import ALPHA_KEY, adapter_digest
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.trainer import TrainingSample
from spot_runtime.messages import GenerationRequest, SamplingParams, StepItem
from spot_runtime.types import JobId, Op, PolicyRef, RequestId, RunId

MODEL = os.environ.get("SPOTLIGHT_TEST_MODEL", "tiny")
PROMPTS = (
    "a photo of a red square",
    "a photo of three blue circles",
    "a photo of a green triangle left of a black square",
)
NUM_STEPS = 6
NOISE_LEVEL = 0.7
BASE = PolicyRef()


def request(
    seed: int,
    *,
    window: tuple[int, int] = (0, 0),
    policy: PolicyRef = BASE,
    sde: str = "sde",
    num_steps: int = NUM_STEPS,
    prompt: int = 0,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=RequestId(f"request-{prompt}-{seed}"),
        job_id=JobId("job"),
        run_id=RunId("run"),
        op=Op.ROLLOUT,
        prompt_id=f"prompt-{prompt}",
        prompt=PROMPTS[prompt],
        row_json="{}",
        seed=seed,
        sde_window=window,
        params=SamplingParams(height=64, width=64, num_steps=num_steps, noise_level=NOISE_LEVEL, sde=sde),
        policy=policy,
        embedding_key="",
    )


def admit_all(
    engine: DiffusersEngine, requests: Sequence[GenerationRequest], embeds: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Requests in slots 0, 1, ...; their initial latents."""
    for slot, (wanted, embed) in enumerate(zip(requests, embeds, strict=True)):
        engine.admit(slot, wanted, embed)
    return [engine.initial_latents(slot) for slot in range(len(requests))]


def step(
    engine: DiffusersEngine, slots: Sequence[int], at: Sequence[int], latents: Sequence[np.ndarray]
) -> tuple[list[np.ndarray], list[float | None]]:
    done = engine.denoise([StepItem(slot=slot, denoising_step=i) for slot, i in zip(slots, at, strict=True)], latents)
    return [d.latents for d in done], [d.log_prob for d in done]


def sample(
    engine: DiffusersEngine, requests: Sequence[GenerationRequest], embeds: Sequence[np.ndarray]
) -> tuple[list[list[np.ndarray]], list[list[float]]]:
    """All steps of all requests together: latents before each step and after the last, and log-probs of the window."""
    latents = admit_all(engine, requests, embeds)
    trajectories, log_probs = [[x] for x in latents], [[] for _ in latents]  # type: ignore[var-annotated]
    slots = range(len(requests))
    for i in range(requests[0].params.num_steps):
        latents, priced = step(engine, slots, [i] * len(latents), latents)
        for b in slots:
            trajectories[b].append(latents[b])
            if priced[b] is not None:
                log_probs[b].append(priced[b])
    return trajectories, log_probs


def random_adapter(like: Mapping[str, np.ndarray], seed: int, scale: float = 0.05) -> dict[str, np.ndarray]:
    """An adapter of the same shapes that does change the model."""
    rng = np.random.default_rng(seed)
    drawn = {name: (rng.standard_normal(array.shape) * scale).astype(np.float32) for name, array in like.items()}
    return drawn | {ALPHA_KEY: like[ALPHA_KEY]}


def policy_of(version: int, adapter: Mapping[str, np.ndarray]) -> PolicyRef:
    return PolicyRef(version=version, key=f"policy-{version}", digest=adapter_digest(adapter))


def training_samples(
    engine: DiffusersEngine,
    embeds: Sequence[np.ndarray],
    *,
    group_size: int = 4,
    policy: PolicyRef = BASE,
    sde: str = "sde",
) -> list[TrainingSample]:
    """A rollout of every prompt: a group each, windows at different places, and rewards that read the image's brightness."""
    samples = []
    for prompt, embed in enumerate(embeds):
        window = (prompt, prompt + 2)
        seeds = range(100 * prompt, 100 * prompt + group_size)
        wanted = [request(seed, window=window, policy=policy, sde=sde, prompt=prompt) for seed in seeds]
        trajectories, log_probs = sample(engine, wanted, [embed] * group_size)
        for asked, trajectory, priced in zip(wanted, trajectories, log_probs, strict=True):
            samples.append(
                TrainingSample(
                    request_id=asked.request_id,
                    prompt_id=asked.prompt_id,
                    seed=asked.seed,
                    reward=float(trajectory[-1].mean()),
                    embeds=embed,
                    window_latents=np.stack(trajectory[window[0] : window[1] + 1]),
                    log_probs=np.array(priced, dtype=np.float32),
                    sde_window=window,
                    num_steps=NUM_STEPS,
                    noise_level=NOISE_LEVEL,
                )
            )
    return samples
