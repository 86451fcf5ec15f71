"""Rewards of an exhaustive exploration beside a real training run, recorded once for `benchmarks.planner` to replay.

    python -m benchmarks.exploration_record --out FILE

Each iteration draws every candidate of every prompt: with the weights before the update at each step count asked for, and in full with the
weights after it. So what any action would have been paid can be looked up. It trains on the seeds that all candidates at all steps choose.
One JSON line an iteration. Samples do not depend on the machine's load, so it may run beside other work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer

from spot_runtime.client import job_spec
from spot_runtime.config import DatasetName, ExplorationConfig, GrpoConfig, RunSettings, TrainConfig
from spot_runtime.diffusion.adapter import adapter_digest
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.diffusion.profiling import CacheShape, Judge, Profiler, cached
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainerState, TrainingSample
from spot_runtime.messages import GenerationRequest
from spot_runtime.planner.selection import Candidate, choose_seeds
from spot_runtime.rewards.catalog import load_judges
from spot_runtime.rewards.prompts import prompt_id, reward_of, row_json, shapes_rows
from spot_runtime.scheduler.expansion import JobInputs, PromptRow, embedding_key, expand, iteration_rows
from spot_runtime.types import ExplorationPlan, Op, PolicyRef, RunId
from tasks.calibration import with_calibration

MODEL = "tiny"
PROMPT_ROWS = 384
BATCH = 8


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One iteration: rewards by prompt id, candidates in the order of their index. `stale` is by effective steps, with the weights before;
    `full` with those after. `group_size` is k.
    """

    group_size: int
    num_steps: int
    stale: dict[int, dict[str, list[float]]]
    full: dict[str, list[float]]


def read_records(path: Path) -> list[Record]:
    return [msgspec.json.decode(line, type=Record) for line in path.read_bytes().splitlines() if line.strip()]


def chosen_places(rewards: Sequence[float], group_size: int) -> list[int]:
    """Which candidates an exploration with these rewards chooses, as places in `rewards`."""
    candidates = [Candidate(place, reward) for place, reward in enumerate(rewards)]
    return [item.seed for item in choose_seeds(candidates, group_size)]


class Recorder:
    """The model, its trainer and its judge in one process."""

    def __init__(self, settings: RunSettings, rows: Sequence[PromptRow], iterations: int) -> None:
        self._settings, self._rows = settings, tuple(rows)
        wanted = {row.prompt for iteration in range(iterations + 1) for row in self._prompts(iteration)}
        keys = {embedding_key(settings.model_digest, prompt): prompt for prompt in sorted(wanted)}
        embeds = dict(zip(keys, PromptEncoder(MODEL).encode(list(keys.values())), strict=True))
        self._profiler = Profiler(MODEL, embeds, batch=BATCH, device="cpu", threads=1)
        self._trainer = GrpoTrainer(MODEL)
        self._judge = _judge(rows)

    def run(self, iterations: int, steps: Sequence[int]) -> Iterator[Record]:
        calibration = self._settings.config.exploration.calibration
        assert calibration is not None, "no calibration fits this configuration"
        cache = CacheShape(calibration.polynomial, calibration.last_full)
        thresholds = {row.effective_steps: row.cache_threshold for row in calibration.rows}
        policy, state = PolicyRef(), None
        drawn = self._draw(self._requests(0, policy))
        chosen: dict[str, list[int]] = {}
        for iteration in range(iterations):
            state = self._train(state, drawn, chosen)
            requests = self._requests(iteration + 1, policy)
            stale = {s: self._draw([cached(r, thresholds[s], cache) for r in requests]) for s in steps}
            policy = self._load(state)
            drawn = self._draw(self._requests(iteration + 1, policy))
            record = self._record({s: _rewards(samples) for s, samples in stale.items()}, _rewards(drawn))
            chosen = {
                name: chosen_places(rewards, record.group_size) for name, rewards in record.stale[max(steps)].items()
            }
            yield record

    def _record(self, stale: dict[int, dict[str, list[float]]], full: dict[str, list[float]]) -> Record:
        config = self._settings.config
        return Record(group_size=config.grpo.group_size, num_steps=config.sampling.num_steps, stale=stale, full=full)

    def _prompts(self, iteration: int) -> tuple[PromptRow, ...]:
        count = self._settings.config.grpo.prompts_per_iteration
        return iteration_rows(self._rows, run_seed=self._settings.seed, iteration=iteration, count=count)

    def _requests(self, iteration: int, policy: PolicyRef) -> tuple[GenerationRequest, ...]:
        """All candidates of the prompts of `iteration`, as an exploration makes them."""
        settings = self._settings
        plan = ExplorationPlan(
            sequences=settings.config.exploration.max_sequences,
            effective_steps=settings.config.sampling.num_steps,
            explored_prompt_ids=tuple(row.prompt_id for row in self._prompts(iteration)),
        )
        job = job_spec(
            run_id=RunId(settings.run_id),
            op=Op.EXPLORE,
            iteration=iteration - 1,
            policy=policy,
            settings_json=settings.model_dump_json(),
        )
        return expand(job, settings, JobInputs(train_rows=self._rows, validation_rows=()), plan)

    def _draw(self, requests: Sequence[GenerationRequest]) -> list[TrainingSample]:
        samples = []
        for start in range(0, len(requests), BATCH):
            part = requests[start : start + BATCH]
            drawn = self._profiler.draw(part)
            for request, image, trajectory, log_probs in zip(
                part, drawn.images, drawn.trajectories, drawn.log_probs, strict=True
            ):
                reward = self._judge(request, image)
                samples.append(self._profiler.training_sample(request, trajectory, log_probs, reward))
        return samples

    def _train(
        self, state: TrainerState | None, drawn: Sequence[TrainingSample], chosen: dict[str, list[int]]
    ) -> TrainerState:
        """Trains on the chosen candidates of each prompt, the first k where none are chosen."""
        config = self._settings.config
        groups: dict[str, list[TrainingSample]] = {}
        for sample in drawn:
            groups.setdefault(sample.prompt_id, []).append(sample)
        first = list(range(config.grpo.group_size))
        kept = [group[place] for name, group in groups.items() for place in chosen.get(name, first)]
        outcome = self._trainer.train(
            state,
            kept,
            sampling=config.sampling,
            grpo=config.grpo,
            seed=self._settings.seed,
            policy_version=state.policy_version if state else 0,
            on_progress=lambda done, total: None,  # noqa: ARG005 - the signature is the trainer's
            should_stop=lambda: False,
        )
        return outcome.state

    def _load(self, state: TrainerState) -> PolicyRef:
        adapter = dict(state.adapter)
        policy = PolicyRef(state.policy_version, f"policy-{state.policy_version}", adapter_digest(adapter))
        self._profiler.load_policy(policy, adapter)
        return policy


def _rewards(samples: Sequence[TrainingSample]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_id, []).append(sample.reward)
    return rewards


def _judge(rows: Sequence[PromptRow]) -> Judge:
    judges = load_judges({reward_of(row.row_json) for row in rows})

    def judge(request: GenerationRequest, image: np.ndarray) -> float:
        return judges.score(reward_of(request.row_json), request.row_json.encode(), image).reward

    return judge


def recorder_settings(prompts: int, group_size: int, seed: int) -> RunSettings:
    """A run of the tiny model with the calibration that ships; as many candidates as twice the group."""
    checked = check_model(MODEL)
    config = TrainConfig(
        grpo=GrpoConfig(prompts_per_iteration=prompts, group_size=group_size, optimizer_steps=min(4, prompts)),
        exploration=ExplorationConfig(max_sequences=2 * group_size),
    )
    return RunSettings(
        run_id="exploration-record",
        iterations=100_000,
        resolution=checked.default_resolution,
        seed=seed,
        model=MODEL,
        model_digest=checked.digest,
        store="memory://exploration-record",
        train_prompts_key="",
        validation_prompts_key="",
        config=with_calibration(config, MODEL, checked, DatasetName.GENEVAL, 0),
    )


def main(
    out: Annotated[Path, typer.Option(help="Where the records go, one JSON line an iteration.")],
    iterations: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    prompts: Annotated[int, typer.Option(min=6, help="Prompts an iteration.")] = 12,
    group_size: Annotated[int, typer.Option(min=2, help="Samples a prompt, k; twice as many candidates.")] = 12,
    steps: Annotated[
        str, typer.Option(help="Effective steps, separated by commas; each must be calibrated.")
    ] = "6,8,10",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and samples.")] = 0,
) -> None:
    """Writes FILE as it goes."""
    prompt_rows = [
        PromptRow(prompt_id=prompt_id(row), prompt=row.prompt, row_json=row_json(row))
        for row in shapes_rows(seed, PROMPT_ROWS, "train")
    ]
    recorder = Recorder(recorder_settings(prompts, group_size, seed), prompt_rows, iterations)
    counts = [int(part) for part in steps.split(",")]
    with out.open("wb", buffering=0) as file:
        for done, record in enumerate(recorder.run(iterations, counts), start=1):
            file.write(msgspec.json.encode(record) + b"\n")
            mean = float(np.mean([reward for rewards in record.full.values() for reward in rewards]))
            typer.echo(f"iteration {done} of {iterations}: mean reward {mean:.3f}")


if __name__ == "__main__":
    typer.run(main)
