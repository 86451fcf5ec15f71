"""Every exploration strategy in a real run of the train workflow: the tiny model, real processes, one cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from spot_runtime.config import ClusterConfig, RunSettings, TrainConfig
from spot_runtime.daemons.supervisor import EmbeddedCluster
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import Manifest, Op
from spot_runtime.variables import ENDPOINT
from tasks.models import State
from tasks.records import IterationRecord, read_iteration, read_manifest
from workflows.dit_grpo import train

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

STEPS, GROUP, CANDIDATES, PROMPTS = 4, 2, 4, 3
CALIBRATION = {
    "resolution": 64,
    "num_steps": STEPS,
    "step_s": 0.01,
    "rows": [
        {"effective_steps": 2, "cache_threshold": 0.6, "accuracy": 0.9},
        {"effective_steps": STEPS, "cache_threshold": 0.0, "accuracy": 1.0},
    ],
}
CFG: dict[str, Any] = {
    "sampling": {"num_steps": STEPS, "sde_window_stop": 2, "sde_window_size": 2},
    "grpo": {"prompts_per_iteration": PROMPTS, "group_size": GROUP, "optimizer_steps": 1},
    "exploration": {
        "max_sequences": CANDIDATES,
        "unexplored_prompts": 1,
        "calibrated_train_s": 100_000.0,
        "calibration": CALIBRATION,
    },
    "evaluation": {"pairs": 2, "every": 0},
}


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Address and store of a cluster of one reserved and one spot slot."""
    folder = tmp_path_factory.mktemp("strategies")
    settings = RunSettings(
        run_id="run-1",
        iterations=1,
        resolution=64,
        model="tiny",
        store=f"file://{folder}/store",
        train_prompts_key="train",
        validation_prompts_key="validation",
        config=TrainConfig(cluster=ClusterConfig(spot_nodes=1, start_deadline_s=600, lease_s=120)),
    )
    with EmbeddedCluster(settings, folder / "cluster") as cluster:
        yield cluster.endpoint, settings.store


def run(
    endpoint: tuple[str, str], strategy: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[State, IterationRecord, pd.DataFrame]:
    """The state after two iterations, the record of the first and the seed bank."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv(ENDPOINT, endpoint[0])
    outputs = train(iterations=2, exploration=strategy, store=endpoint[1], cfg=json.dumps(CFG))
    store, run_id = TensorStore(endpoint[1]), outputs.state.run_id
    first, second = (read_iteration(store, run_id, iteration) for iteration in range(2))
    assert (outputs.state.policy.version, second.policy.version) == (2, 1)
    assert second.plan.sequences == 0  # nothing comes after it
    return outputs.state, first, pd.read_parquet(Path(outputs.state.folder) / "seed_bank.parquet")


def manifest(state: State, op: Op, iteration: int) -> Manifest:
    store = TensorStore(state.settings.store)
    record = read_iteration(store, state.run_id, iteration)
    return read_manifest(store, next(phase.manifest_key for phase in record.phases if phase.op == op))


def trained_before_explored(record: IterationRecord) -> bool:
    usages = {phase.op: phase.usage for phase in record.phases}
    return usages[Op.TRAIN_STEP].finished_s <= usages[Op.EXPLORE].started_s


def test_the_bandit_explores_beside_training_with_the_weights_before(
    endpoint: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, record, bank = run(endpoint, "bandit", tmp_path, monkeypatch)
    assert not trained_before_explored(record)
    assert len(record.plan.explored_prompt_ids) == PROMPTS - 1
    assert set(bank["policy_version"]) == {0}
    seeds = {prompt: list(rows["seed"]) for prompt, rows in bank.groupby("prompt_id")}
    rolled_out: dict[str, list[int]] = {}
    for sample in manifest(state, Op.ROLLOUT, 1).samples:
        rolled_out.setdefault(sample.prompt_id, []).append(sample.seed)
    assert len(rolled_out) == PROMPTS
    assert {prompt: sorted(rolled_out[prompt]) for prompt in seeds} == {p: sorted(s) for p, s in seeds.items()}
    assert state.bandit.pending_sequences == 0


def test_best_of_n_explores_after_training_and_trains_on_the_very_samples(
    endpoint: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That training took them shows that they are on-policy: it checks the first ratio."""
    state, record, bank = run(endpoint, "best_of_n", tmp_path, monkeypatch)
    assert trained_before_explored(record)
    explored, rolled_out = manifest(state, Op.EXPLORE, 0).samples, manifest(state, Op.ROLLOUT, 1).samples
    assert len(explored) == PROMPTS * CANDIDATES
    assert {sample.effective_steps for sample in explored} == {STEPS}
    assert set(bank["policy_version"]) == {1}
    assert len(bank) == len(rolled_out) == PROMPTS * GROUP
    made = {(s.prompt_id, s.seed): (s.sample_key, s.sample_digest, s.reward) for s in explored}
    assert all(made[s.prompt_id, s.seed] == (s.sample_key, s.sample_digest, s.reward) for s in rolled_out)


def test_prescreen_explores_cheaply_after_training_and_draws_the_chosen_in_full(
    endpoint: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, record, bank = run(endpoint, "prescreen", tmp_path, monkeypatch)
    assert trained_before_explored(record)
    explored, rolled_out = manifest(state, Op.EXPLORE, 0).samples, manifest(state, Op.ROLLOUT, 1).samples
    assert len(explored) == PROMPTS * CANDIDATES
    assert all(1 <= sample.effective_steps < STEPS for sample in explored)
    assert list(bank["effective_steps"]) == [
        next(s.effective_steps for s in explored if (s.prompt_id, s.seed) == (row.prompt_id, row.seed))
        for row in bank.itertuples()
    ]
    assert {(s.prompt_id, s.seed) for s in rolled_out} == set(zip(bank["prompt_id"], bank["seed"], strict=True))
    assert {s.effective_steps for s in rolled_out} == {STEPS}
    assert all(sample.sample_key for sample in rolled_out)
