"""The train workflow in this process, against a control daemon that only pretends to work."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path

import pandas as pd
import pytest
from fake_control import FakeControl, FakeJob

from spot_runtime.config import RunSettings
from spot_runtime.errors import InputError, RewardError
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobResult, Op
from tasks.finish_run import build_report, pictures
from tasks.models import Outcome, State
from tasks.records import BANK_COLUMNS, bank_table_key, history_key, read_iteration, read_manifest
from tasks.report import page
from workflows.dit_grpo import train

SMALL = {"grpo": {"group_size": 4}, "evaluation": {"pairs": 20, "every": 2}}


def overlap_s(left: FakeJob, right: FakeJob) -> float:
    """Seconds that both ran."""
    assert left.ended_s is not None
    assert right.ended_s is not None
    return min(left.ended_s, right.ended_s) - max(left.submitted_s, right.submitted_s)


def test_an_iteration_rolls_out_then_trains_explores_and_joins_before_the_next(
    embedded: FakeControl, model_folder: str
) -> None:
    state: State = train(model=model_folder, iterations=2, cfg=SMALL).state
    rollouts, trained, explored = embedded.of(Op.ROLLOUT), embedded.of(Op.TRAIN_STEP), embedded.of(Op.EXPLORE)
    assert [job.spec.iteration for job in (*rollouts, *trained, *explored)] == [0, 1, 0, 1, 0, 1]
    for index in range(2):
        assert rollouts[index].ended_s <= trained[index].submitted_s  # type: ignore[operator]
        assert rollouts[index].ended_s <= explored[index].submitted_s  # type: ignore[operator]
    assert max(trained[0].ended_s, explored[0].ended_s) <= rollouts[1].submitted_s  # type: ignore[type-var]
    assert [job.spec.policy.version for job in (*rollouts, *trained, *explored)] == [0, 1, 0, 1, 0, 1]
    assert (state.iteration, state.policy.version) == (2, 2)


def test_training_exploration_and_validation_run_beside_each_other(embedded: FakeControl, model_folder: str) -> None:
    embedded.seconds = {Op.TRAIN_STEP: 1.5, Op.EXPLORE: 1.5, Op.EVALUATE: 2.0}
    train(model=model_folder, iterations=1, cfg=SMALL)
    beside = [embedded.of(op)[0] for op in (Op.TRAIN_STEP, Op.EXPLORE, Op.EVALUATE)]
    for left, right in itertools.combinations(beside, 2):
        assert overlap_s(left, right) > 0.3, (left.spec.op, right.spec.op)
    assert overlap_s(beside[0], beside[1]) > 0.7


def test_the_policy_is_validated_before_between_and_after(embedded: FakeControl, model_folder: str) -> None:
    outputs = train(model=model_folder, iterations=3, cfg=SMALL)
    assert [score.iteration for score in outputs.state.scores] == [0, 2, 3]
    assert [score.policy_version for score in outputs.state.scores] == [0, 2, 3]
    assert [score.correct for score in outputs.state.scores] == pytest.approx([0.2, 0.65, 0.8], abs=0.06)
    assert outputs.summary.startswith("validation 0.200 -> 0.800, +0.600 (95% interval +")


def test_seeds_that_exploration_chose_are_the_bank_of_the_next_rollout(
    embedded: FakeControl, model_folder: str
) -> None:
    state: State = train(model=model_folder, iterations=2, cfg=SMALL).state
    first, second = (job.spec for job in embedded.of(Op.ROLLOUT))
    assert first.bank_key == ""
    store = TensorStore(state.settings.store)
    bank = json.loads(store.get_bytes(second.bank_key))
    table = pd.read_parquet(Path(state.folder) / "seed_bank.parquet")
    rows = table[table["iteration"] == 1]
    assert list(table.columns) == list(BANK_COLUMNS)
    assert {prompt: list(group["seed"]) for prompt, group in rows.groupby("prompt_id")} == bank
    assert all(len(seeds) == 4 for seeds in bank.values())
    for _, group in rows.groupby("prompt_id"):
        assert list(group["side"]) == ["top", "top", "bottom", "bottom"]
        assert list(group["rank"]) == [0, 1, 4, 5]
        assert list(group["exploration_reward"]) == sorted(group["exploration_reward"], reverse=True)
    assert set(rows["action"]) == {"6 x 8"}


def test_the_bandit_of_one_iteration_reaches_the_exploration_of_the_next(
    embedded: FakeControl, model_folder: str
) -> None:
    state: State = train(model=model_folder, iterations=2, cfg=SMALL).state
    first, second = (job.spec for job in embedded.of(Op.EXPLORE))
    assert first.bandit.arms == ()
    assert second.bandit.arms[0].observations == (1.25,)
    assert second.bandit == state.bandit
    assert second.manifest_key == embedded.of(Op.TRAIN_STEP)[1].spec.manifest_key


def test_an_action_whose_seeds_were_not_used_waits_for_no_feedback(embedded: FakeControl, model_folder: str) -> None:
    embedded.candidates = 3  # fewer than a group: no prompt has seeds to choose from
    state: State = train(model=model_folder, iterations=2, cfg=SMALL).state
    assert [job.spec.bank_key for job in embedded.of(Op.ROLLOUT)] == ["", ""]
    given = embedded.of(Op.EXPLORE)[1].spec.bandit
    assert (given.pending_sequences, given.pending_effective_steps) == (0, 0)
    assert given.arms[0].observations == (1.25,)
    assert state.bandit.pending_sequences == 0


def test_pairs_that_a_validation_lost_are_told_and_not_compared(embedded: FakeControl, model_folder: str) -> None:
    embedded.lost_pairs = 5
    outputs = train(model=model_folder, iterations=1, cfg=SMALL)
    assert [score.pairs for score in outputs.state.scores] == [20, 15]
    assert outputs.summary.endswith(
        "paired bootstrap over 15 prompt-seed pairs); of 20 pairs the first validation scored 20, the last 15"
    )


def test_without_exploration_every_rollout_has_its_default_seeds(embedded: FakeControl, model_folder: str) -> None:
    state: State = train(model=model_folder, iterations=2, exploration="none", cfg=SMALL).state
    assert embedded.of(Op.EXPLORE) == []
    assert [job.spec.bank_key for job in embedded.of(Op.ROLLOUT)] == ["", ""]
    assert pd.read_parquet(Path(state.folder) / "seed_bank.parquet").empty


@pytest.mark.parametrize(("strategy", "takes_over"), [("best_of_n", True), ("prescreen", False)])
def test_other_strategies_explore_after_training_with_the_new_weights(
    embedded: FakeControl, strategy: str, takes_over: bool
) -> None:
    state: State = train(iterations=2, exploration=strategy, cfg=SMALL).state
    trained, explored, rollouts = (embedded.of(op) for op in (Op.TRAIN_STEP, Op.EXPLORE, Op.ROLLOUT))
    for index in range(2):
        assert trained[index].ended_s <= explored[index].submitted_s  # type: ignore[operator]
    assert [job.spec.policy.version for job in explored] == [1, 2]
    assert rollouts[1].spec.bank_key
    key = rollouts[1].spec.manifest_key
    assert key == (f"runs/{state.run_id}/manifests/{explored[0].spec.job_id}.json" if takes_over else "")
    assert RunSettings.parse_json(state.settings_json).config.exploration.mode == strategy
    assert "Strategy: " in (Path(state.folder) / "report.html").read_text()


def test_a_strategy_that_needs_a_calibration_is_refused_without_one(embedded: FakeControl, model_folder: str) -> None:
    with pytest.raises(InputError, match=r"exploration = prescreen: needs a calibration of the step cache"):
        train(model=model_folder, iterations=2, exploration="prescreen", cfg=SMALL)
    assert embedded.submissions == []


def test_history_cost_and_report_tell_of_every_iteration(embedded: FakeControl, model_folder: str) -> None:
    embedded.seconds = dict.fromkeys(Op, 0.2)
    outputs = train(model=model_folder, iterations=2, cfg=SMALL)
    state: State = outputs.state
    store = TensorStore(state.settings.store)
    history = [read_iteration(store, state.run_id, iteration) for iteration in range(2)]
    assert [[phase.op for phase in record.phases] for record in history] == [
        ["rollout", "train_step", "explore", "evaluate"],
        ["rollout", "train_step", "explore"],
    ]
    assert [record.bank_prompts for record in history] == [2, 2]
    jobs = list(embedded.jobs.values())
    held_s = max(job.ended_s or 0 for job in jobs) - min(job.submitted_s for job in jobs)
    assert state.spend.reserved_gpu_s == pytest.approx(held_s, rel=1e-6)
    assert state.spend.spot_gpu_s == pytest.approx(2 * held_s, rel=1e-6)
    assert state.spend.usd == pytest.approx(held_s * (10.08 + 2 * 2.87) / 3600, rel=1e-6)
    html = Path(outputs.report.path).read_text()
    assert f"run {state.run_id}" in html
    assert html.count("data:image/png;base64,") == 2 * 16
    assert all(f"<h2>{title}</h2>" in html for title in ("Validation", "Phases", "Seed bank", "Cost", "Settings"))


def test_a_run_whose_store_lost_what_the_report_shows_has_its_report_all_the_same(
    embedded: FakeControl, model_folder: str
) -> None:
    state: State = train(model=model_folder, iterations=2, cfg=SMALL).state
    store = TensorStore(state.settings.store)
    first, last = state.scores[0], state.scores[-1]
    scores = Outcome.of(JobResult(op=Op.EVALUATE, policy=state.policy.ref, manifest_key=last.manifest_key))
    whole, gain = build_report(store, state, scores)
    assert (whole.lost, gain is None) == ((), False)
    image_key = read_manifest(store, last.manifest_key).samples[0].image_key
    for key in (history_key(state.run_id, 1), bank_table_key(state.run_id, 1), first.manifest_key):
        store.delete(key)
    report, gain = build_report(store, state, scores)
    assert (gain, report.pictures, len(report.history)) == (None, (), 1)
    assert 0 < len(report.bank) < len(whole.bank)
    html = page(report)
    assert "3 objects of this run cannot be read any more" in html
    assert first.manifest_key in html
    samples = {(sample.prompt_id, sample.seed): sample for sample in read_manifest(store, last.manifest_key).samples}
    store.delete(image_key)
    missed: list[str] = []
    assert len(pictures(store, samples, samples, missed)) + len(missed) == len(whole.pictures)
    assert missed


def test_the_cluster_starts_once_after_all_checks_and_ends_with_the_run(
    embedded: FakeControl, model_folder: str
) -> None:
    train(model=model_folder, iterations=1, cfg=SMALL)
    assert (embedded.started, embedded.stopped) == (True, True)


def test_a_given_endpoint_is_used_instead_of_an_embedded_cluster(
    embedded: FakeControl, model_folder: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", embedded.endpoint)
    train(model=model_folder, iterations=1, store=(tmp_path / "shared").as_uri(), cfg=SMALL)
    assert embedded.of(Op.TRAIN_STEP)
    assert not embedded.started


def test_a_failure_beside_others_gives_them_up_and_is_the_error_of_the_run(
    embedded: FakeControl, model_folder: str
) -> None:
    embedded.seconds = {Op.TRAIN_STEP: 60.0}
    embedded.errors = {Op.EXPLORE: ("RewardError", "the reward service answered 500")}
    with pytest.raises(RewardError, match=r"^job explore-0-\w+: the reward service answered 500$"):
        train(model=model_folder, iterations=1, cfg=SMALL)
    assert embedded.of(Op.TRAIN_STEP)[0].cancelled == "the Flyte task was aborted"
    assert embedded.stopped


def test_a_run_outlives_a_failure_that_passes_and_says_so(
    embedded: FakeControl, model_folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    embedded.errors, embedded.failures_max = {Op.EXPLORE: ("RewardError", "the reward service answered 500")}, 2
    state: State = train(model=model_folder, iterations=1, cfg=SMALL).state
    assert state.iteration == 1
    notes = [line for line in capsys.readouterr().err.splitlines() if "trying again" in line]
    assert [note.split(": ", 1)[1] for note in notes] == [
        "the reward service answered 500; trying again (1 of 3)",
        "the reward service answered 500; trying again (2 of 3)",
    ]


def test_a_failed_run_leaves_no_report_and_no_thread(embedded: FakeControl, model_folder: str, tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    embedded.errors = {Op.TRAIN_STEP: ("TrainingError", "loss = nan: must be finite")}
    with pytest.raises(Exception, match="must be finite"):
        train(model=model_folder, iterations=1, cfg=SMALL)
    assert list(tmp_path.glob("spotlight-runs/*/*.html")) == []
    assert list(tmp_path.glob("spotlight-runs/*/*.parquet")) == []
    assert [thread for thread in set(threading.enumerate()) - threads if thread.name.startswith("flyte-task")] == []


def test_what_is_validated_is_the_moving_average_where_one_is_kept(embedded: FakeControl, model_folder: str) -> None:
    """And what is rolled out never is. Before the first update there is none."""
    cfg = {**SMALL, "grpo": {"group_size": 4, "ema_decay": 0.5}}
    state: State = train(model=model_folder, iterations=2, cfg=cfg).state
    assert [job.spec.policy.key for job in embedded.of(Op.EVALUATE)] == ["", "averages/2"]
    assert [job.spec.policy.key for job in embedded.of(Op.ROLLOUT)] == ["", "adapters/1"]
    assert [score.policy_version for score in state.scores] == [0, 2]
