"""From a job to its requests: which prompts, which seeds, which SDE window. Pure: the run's seed is the only entropy.

A seed is a function of (run seed, iteration, prompt, index), so exploration of iteration n + 1 and the rollout of iteration n + 1 draw the
same initial latents and noise. A window is drawn per (iteration, prompt), never per request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spot_runtime.config import RunSettings
from spot_runtime.messages import GenerationRequest, JobSpec, SamplingParams
from spot_runtime.planner.strategies import STRATEGIES
from spot_runtime.types import ExplorationPlan, Op, PolicyRef, RequestId, SampleRecord

SEED_BITS = 52
"""Seeds stay exact in JSON, parquet and float64."""


class PromptRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a prompt set: `row_json` is what the reward service scores by."""

    prompt_id: str
    prompt: str
    row_json: str


class JobInputs(msgspec.Struct, frozen=True, kw_only=True):
    """What the shell read for a job: prompt sets, the seed bank, rewards by prompt of the rollouts that feed the bandit, and the keys of
    the embeddings that exist already. `samples` are those of an exploration that a rollout takes over.
    """

    train_rows: tuple[PromptRow, ...]
    validation_rows: tuple[PromptRow, ...]
    bank: Mapping[str, tuple[int, ...]] = {}
    rewards: Mapping[str, tuple[float, ...]] = {}
    encoded: frozenset[str] = frozenset()
    samples: tuple[SampleRecord, ...] = ()


def digest_int(*parts: object, bits: int = SEED_BITS) -> int:
    """A stable non-negative integer of `bits` bits from the parts' text."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> (64 - bits)


def embedding_key(model_digest: str, prompt: str) -> str:
    """Store key of one prompt's embedding under one text encoder."""
    return f"embeddings/{model_digest[:16]}/{hashlib.sha256(prompt.encode()).hexdigest()[:32]}"


def iteration_rows(rows: Sequence[PromptRow], *, run_seed: int, iteration: int, count: int) -> tuple[PromptRow, ...]:
    """The `count` prompts of an iteration: epochs over a reshuffled set, each prompt at most once an iteration."""
    assert rows, "prompt set is empty"
    count = min(count, len(rows))
    per_epoch = len(rows) // count
    epoch, place = divmod(iteration, per_epoch)
    order = sorted(rows, key=lambda row: (digest_int(run_seed, "epoch", epoch, row.prompt_id), row.prompt_id))
    return tuple(order[place * count : (place + 1) * count])


def default_seed(run_seed: int, iteration: int, prompt_id: str, index: int) -> int:
    """Seed `index` of a prompt in an iteration."""
    return digest_int(run_seed, "seed", iteration, prompt_id, index)


def sde_window(settings: RunSettings, iteration: int, prompt_id: str) -> tuple[int, int]:
    """[start, stop) of the SDE window of this prompt in this iteration."""
    sampling = settings.config.sampling
    places = sampling.sde_window_stop - sampling.sde_window_start - sampling.sde_window_size + 1
    start = sampling.sde_window_start + digest_int(settings.seed, "window", iteration, prompt_id) % places
    return start, start + sampling.sde_window_size


def expand(
    job: JobSpec, settings: RunSettings, inputs: JobInputs, plan: ExplorationPlan
) -> tuple[GenerationRequest, ...]:
    """All requests of a generation job, in a fixed order."""
    match job.op:
        case Op.ROLLOUT:
            return _rollout(job, settings, inputs)
        case Op.EXPLORE:
            return _explore(job, settings, inputs, plan)
        case Op.EVALUATE:
            return _evaluate(job, settings, inputs)
        case Op.TRAIN_STEP:
            raise AssertionError("train_step has no generation requests")


def samples_made(
    requests: Sequence[GenerationRequest], samples: Sequence[SampleRecord]
) -> dict[RequestId, SampleRecord]:
    """By request id, the samples that are what these requests would draw: same prompt, seed, SDE window and policy, and stored whole."""
    known = {(s.prompt_id, s.seed, s.sde_window, s.policy): s for s in samples if s.sample_key}
    found = ((r.request_id, known.get((r.prompt_id, r.seed, r.sde_window, r.policy))) for r in requests)
    return {request_id: sample for request_id, sample in found if sample is not None}


def prompts_to_encode(job: JobSpec, settings: RunSettings, inputs: JobInputs) -> tuple[tuple[str, str], ...]:
    """(embedding key, prompt) of all that this job needs; of a rollout also what explore and evaluate need while the trainer is busy."""
    count = settings.config.grpo.prompts_per_iteration
    rows: list[PromptRow] = []
    iterations = {Op.ROLLOUT: (job.iteration, job.iteration + 1), Op.EXPLORE: (job.iteration + 1,)}.get(job.op, ())
    for iteration in iterations:
        rows += iteration_rows(inputs.train_rows, run_seed=settings.seed, iteration=iteration, count=count)
    if job.op in (Op.ROLLOUT, Op.EVALUATE):
        rows += inputs.validation_rows[: settings.config.evaluation.pairs]
    return tuple({embedding_key(settings.model_digest, row.prompt): row.prompt for row in rows}.items())


def _rollout(job: JobSpec, settings: RunSettings, inputs: JobInputs) -> tuple[GenerationRequest, ...]:
    grpo = settings.config.grpo
    rows = iteration_rows(
        inputs.train_rows, run_seed=settings.seed, iteration=job.iteration, count=grpo.prompts_per_iteration
    )
    requests: list[GenerationRequest] = []
    for row in rows:
        seeds = inputs.bank.get(row.prompt_id) or _default_seeds(
            settings, job.iteration, row.prompt_id, grpo.group_size
        )
        window = sde_window(settings, job.iteration, row.prompt_id)
        requests += _of_prompt(job, settings, row, seeds, window)
    return tuple(requests)


def _explore(
    job: JobSpec, settings: RunSettings, inputs: JobInputs, plan: ExplorationPlan
) -> tuple[GenerationRequest, ...]:
    """What is planned, prompt by prompt; then what fills the window, a candidate of each prompt before the next of any."""
    following = job.iteration + 1
    count = settings.config.grpo.prompts_per_iteration
    rows = iteration_rows(inputs.train_rows, run_seed=settings.seed, iteration=following, count=count)
    explored = [row for row in rows if row.prompt_id in set(plan.explored_prompt_ids)]
    requests: list[GenerationRequest] = []
    for row in explored:
        requests += _candidates(job, settings, row, plan, range(plan.sequences))
    for index in range(plan.sequences, plan.fill_sequences):
        for row in explored:
            requests += _candidates(job, settings, row, plan, range(index, index + 1))
    return tuple(requests)


def _candidates(
    job: JobSpec, settings: RunSettings, row: PromptRow, plan: ExplorationPlan, places: range
) -> list[GenerationRequest]:
    """The candidates of one prompt of the next iteration at these places; those beyond the plan fill the window."""
    following = job.iteration + 1
    strategy = STRATEGIES.get(settings.config.exploration.mode)
    return _of_prompt(
        job,
        settings,
        row,
        [default_seed(settings.seed, following, row.prompt_id, index) for index in places],
        sde_window(settings, following, row.prompt_id),
        first_index=places.start,
        cache_threshold=plan.cache_threshold,
        keep_trajectory=strategy is not None and strategy.keeps_samples,
        fills_window=places.start >= plan.sequences,
    )


def _step_cache(settings: RunSettings) -> dict[str, Any]:
    """What thresholds of the run's calibration belong to."""
    calibration = settings.config.exploration.calibration
    assert calibration is not None, "an arm with a threshold comes from a calibration"
    return {"cache_polynomial": calibration.polynomial, "cache_last_full": calibration.last_full}


def _evaluate(job: JobSpec, settings: RunSettings, inputs: JobInputs) -> tuple[GenerationRequest, ...]:
    requests: list[GenerationRequest] = []
    for pair in range(settings.config.evaluation.pairs):
        row = inputs.validation_rows[pair % len(inputs.validation_rows)]
        seed = digest_int(settings.seed, "validation", pair)
        requests += _of_prompt(job, settings, row, (seed,), (0, 0), first_index=pair, keep_image=True)
    return tuple(requests)


def _default_seeds(settings: RunSettings, iteration: int, prompt_id: str, count: int) -> tuple[int, ...]:
    return tuple(default_seed(settings.seed, iteration, prompt_id, index) for index in range(count))


def _of_prompt(
    job: JobSpec,
    settings: RunSettings,
    row: PromptRow,
    seeds: Sequence[int],
    window: tuple[int, int],
    *,
    first_index: int = 0,
    cache_threshold: float = 0.0,
    keep_image: bool = False,
    keep_trajectory: bool = False,
    fills_window: bool = False,
) -> list[GenerationRequest]:
    sampling = settings.config.sampling
    params = SamplingParams(
        height=settings.resolution,
        width=settings.resolution,
        num_steps=sampling.num_steps,
        noise_level=sampling.noise_level,
        sde=sampling.sde,
        cache_threshold=cache_threshold,
        **(_step_cache(settings) if cache_threshold else {}),
    )
    policy = PolicyRef(job.policy.version, job.policy.key, job.policy.digest)
    key = embedding_key(settings.model_digest, row.prompt)
    return [
        GenerationRequest(
            request_id=RequestId(f"{job.job_id}.{row.prompt_id}.{first_index + index}"),
            job_id=job.job_id,
            run_id=job.run_id,
            op=job.op,
            prompt_id=row.prompt_id,
            prompt=row.prompt,
            row_json=row.row_json,
            seed=seed,
            sde_window=window,
            params=params,
            policy=policy,
            embedding_key=key,
            keep_image=keep_image,
            keep_trajectory=keep_trajectory,
            fills_window=fills_window,
        )
        for index, seed in enumerate(seeds)
    ]
