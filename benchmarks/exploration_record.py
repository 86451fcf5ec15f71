"""Rewards of an exhaustive exploration beside a real training run, recorded once for `benchmarks.planner` to replay.

    python -m benchmarks.exploration_record --out FILE

Each iteration draws every candidate of every prompt: with the weights before the update at each step count asked for, and in full with the
weights after it. So what any action would have been paid can be looked up. It trains on the seeds that all candidates at all steps choose.
One JSON line an iteration. Samples do not depend on the machine's load, so it may run beside other work. Broken off, or at its time limit,
it leaves FILE with what is done and FILE.states with the trainer; the same command goes on from there.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.exploration_drawers import Drawers, ended
from benchmarks.exploration_rewards import Record, chosen_places
from spot_runtime.client import job_spec
from spot_runtime.config import DatasetName, ExplorationConfig, GrpoConfig, RunSettings, TrainConfig
from spot_runtime.diffusion.adapter import adapter_digest
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.diffusion.profiling import CacheShape, cached
from spot_runtime.diffusion.trainer import GrpoTrainer, TrainerState, TrainingSample
from spot_runtime.messages import GenerationRequest
from spot_runtime.rewards.prompts import prompt_id, row_json, shapes_rows
from spot_runtime.scheduler.expansion import JobInputs, PromptRow, embedding_key, expand, iteration_rows
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import ExplorationPlan, Op, PolicyRef, RunId
from tasks.calibration import with_calibration

MODEL = "tiny"
PROMPT_ROWS = 384


class Recorder:
    """The trainer in this process, its model and judge in the drawers. Goes on after `records` from the newest state in `states`."""

    def __init__(self, settings: RunSettings, rows: Sequence[PromptRow], states: TensorStore, drawers: Drawers) -> None:
        self._settings, self._rows = settings, tuple(rows)
        self._states, self._drawers = states, drawers
        self._trainer = GrpoTrainer(MODEL)

    def run(self, records: Sequence[Record], iterations: int, steps: Sequence[int]) -> Iterator[Record]:
        """The records of the iterations after `records`."""
        state = self._restored(len(records))
        policy = self._load(state) if state else PolicyRef()
        drawn = self._drawers.draw(self._requests(len(records), policy))
        chosen = _chosen(records[-1]) if records else {}
        for iteration in range(len(records), iterations):
            candidates = self._cached(self._requests(iteration + 1, policy), steps)
            exploring = {s: self._drawers.start(requests) for s, requests in candidates.items()}
            state = self._train(state, drawn, chosen)
            stale = {s: _rewards(ended(batches)) for s, batches in exploring.items()}
            policy = self._load(state)
            drawn = self._drawers.draw(self._requests(iteration + 1, policy))
            record = self._record(stale, _rewards(drawn))
            chosen = _chosen(record)
            self._keep(state)
            yield record

    def _cached(
        self, requests: Sequence[GenerationRequest], steps: Sequence[int]
    ) -> dict[int, list[GenerationRequest]]:
        """`requests` at each of these effective step counts."""
        calibration = self._settings.config.exploration.calibration
        assert calibration is not None, "no calibration fits this configuration"
        cache = CacheShape(calibration.polynomial, calibration.last_full)
        thresholds = {row.effective_steps: row.cache_threshold for row in calibration.rows}
        return {s: [cached(request, thresholds[s], cache) for request in requests] for s in steps}

    def _restored(self, iterations: int) -> TrainerState | None:
        """After so many iterations; None before the first."""
        return TrainerState.from_tensors(self._states.get(_state_key(iterations)).tensors) if iterations else None

    def _keep(self, state: TrainerState) -> None:
        """The state before stays: this iteration's record is yet to be written."""
        self._states.put(_state_key(state.policy_version), state.tensors())
        self._states.delete(_state_key(max(0, state.policy_version - 2)))

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
        self._drawers.load(policy, adapter)
        return policy


def _state_key(iterations: int) -> str:
    return f"state-{iterations:06d}"


def _chosen(record: Record) -> dict[str, list[int]]:
    """Places of the candidates that all of them at the most steps choose, by prompt id."""
    most = record.stale[max(record.stale)]
    return {name: chosen_places(rewards, record.group_size) for name, rewards in most.items()}


def _rewards(samples: Sequence[TrainingSample]) -> dict[str, list[float]]:
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.prompt_id, []).append(sample.reward)
    return rewards


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


def wanted_embeds(settings: RunSettings, rows: Sequence[PromptRow]) -> dict[str, np.ndarray]:
    """Embeddings of all prompts, by embedding key."""
    keys = {embedding_key(settings.model_digest, prompt): prompt for prompt in sorted({row.prompt for row in rows})}
    return dict(zip(keys, PromptEncoder(MODEL).encode(list(keys.values())), strict=True))


def kept_records(out: Path, states: TensorStore) -> list[Record]:
    """What an earlier run wrote whole, up to the newest state that it left."""
    newest = max((int(key.removeprefix("state-")) for key in states.list("")), default=0)
    lines = out.read_bytes().split(b"\n")[:-1] if out.exists() else []
    return [msgspec.json.decode(line, type=Record) for line in lines[:newest]]


def main(
    out: Annotated[Path, typer.Option(help="Where the records go, one JSON line an iteration.")],
    iterations: Annotated[int, typer.Option(min=1, help="Training steps.")] = 40,
    prompts: Annotated[int, typer.Option(min=6, help="Prompts an iteration.")] = 24,
    group_size: Annotated[int, typer.Option(min=2, help="Samples a prompt, k; twice as many candidates.")] = 12,
    steps: Annotated[
        str, typer.Option(help="Effective steps, separated by commas; each must be calibrated.")
    ] = "2,4,6,8,10",
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and samples.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Processes that draw.")] = len(os.sched_getaffinity(0)),
    limit_s: Annotated[float, typer.Option(min=1, help="Ends after the iteration that passes it, in seconds.")] = 1e9,
) -> None:
    """Writes FILE as it goes, and goes on with one that was begun with the same options."""
    started_s = time.monotonic()
    rows = [
        PromptRow(prompt_id=prompt_id(row), prompt=row.prompt, row_json=row_json(row))
        for row in shapes_rows(seed, PROMPT_ROWS, "train")
    ]
    settings = recorder_settings(prompts, group_size, seed)
    states = TensorStore(f"file://{out.absolute()}.states")
    records = kept_records(out, states)
    counts = sorted(int(part) for part in steps.split(","))
    for record in records:
        made = (record.group_size, len(record.full), sorted(record.stale))
        assert made == (group_size, prompts, counts), f"{out} was begun with {made}: other options need another file"
    out.write_bytes(b"".join(msgspec.json.encode(record) + b"\n" for record in records))
    with Drawers(MODEL, wanted_embeds(settings, rows), processes) as drawers, out.open("ab", buffering=0) as file:
        recorder = Recorder(settings, rows, states, drawers)
        for done, record in enumerate(recorder.run(records, iterations, counts), start=len(records) + 1):
            file.write(msgspec.json.encode(record) + b"\n")
            mean = fmean(reward for rewards in record.full.values() for reward in rewards)
            elapsed_s = time.monotonic() - started_s
            typer.echo(f"iteration {done} of {iterations}, {elapsed_s:.0f} s: mean reward {mean:.3f}")
            if elapsed_s > limit_s:
                break


if __name__ == "__main__":
    typer.run(main)
