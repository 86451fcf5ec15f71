"""Admission of exploration: what calibration and measurements make of the plan."""

from dataclasses import replace

import msgspec
import pytest

from spot_runtime.config import (
    CalibratedSteps,
    CalibrationConfig,
    ClusterConfig,
    EvaluationConfig,
    ExplorationConfig,
    GrpoConfig,
    RunSettings,
    SamplingConfig,
    TrainConfig,
)
from spot_runtime.errors import InputError
from spot_runtime.messages import JobSpec, NodeHeartbeat, NodeHello
from spot_runtime.planner import TrainTimeEstimate
from spot_runtime.scheduler.core import ControlCore
from spot_runtime.scheduler.events import JobInputsRead, JobStepFailed, JobSubmitted
from spot_runtime.scheduler.expansion import JobInputs, PromptRow, expand, sde_window
from spot_runtime.scheduler.exploration import Situation, plan_exploration
from spot_runtime.types import ArmStats, BanditState, ExplorationPlan, JobId, NodeId, Op, PolicyRef, Pool, RunId

INPUTS = JobInputs(
    train_rows=tuple(PromptRow(prompt_id=f"p{i}", prompt=f"prompt {i}", row_json="{}") for i in range(12)),
    validation_rows=(),
)
ROWS = (
    CalibratedSteps(effective_steps=3, cache_threshold=0.9, accuracy=0.5, step_cost=2.0),
    CalibratedSteps(effective_steps=5, cache_threshold=0.3, accuracy=0.9, step_cost=1.5),
    CalibratedSteps(effective_steps=10, cache_threshold=0.0, accuracy=1.0),
)
CALIBRATION = CalibrationConfig(
    resolution=64, num_steps=10, step_s=0.01, train_s=3.0, rows=ROWS, polynomial=(2.5, -0.5), last_full=False
)


def settings(calibration: CalibrationConfig | None = CALIBRATION, **exploration: object) -> RunSettings:
    """Three prompts of which two are explored; d is 6, 8, 10 or 12. An SDE window has four places."""
    return RunSettings(
        run_id="run-a",
        iterations=9,
        resolution=64,
        model="tiny",
        store="memory://x",
        train_prompts_key="train",
        validation_prompts_key="validation",
        config=TrainConfig(
            sampling=SamplingConfig(sde_window_size=2),
            grpo=GrpoConfig(prompts_per_iteration=3, group_size=4, optimizer_steps=1),
            exploration=ExplorationConfig(
                max_sequences=12, unexplored_prompts=1, calibration=calibration, **exploration
            ),
            evaluation=EvaluationConfig(pairs=10, every=0),
        ),
    )


def explored(asked: RunSettings, situation: Situation, iteration: int = 1) -> ExplorationPlan:
    return plan_exploration(job(asked, iteration), asked, INPUTS, situation)[0]


def job(asked: RunSettings, iteration: int = 1) -> JobSpec:
    return JobSpec(
        job_id=JobId("explore-1"),
        run_id=RunId("run-a"),
        op=Op.EXPLORE,
        iteration=iteration,
        policy=PolicyRef(),
        settings_json=asked.model_dump_json(),
    )


def test_a_cached_arm_fits_where_a_full_one_does_not():
    """W = 1 * 1 = 1 GPU-s. Full: 6 * 2 * 10 * .01 = 1.2; cached: 6 * 2 * 5 * 1.5 * .01 = .9."""
    plan = explored(settings(), Situation(spot_slots=1, train_s=1.0, step_s=0.01))
    assert (plan.sequences, plan.effective_steps, plan.cache_threshold) == (6, 5, 0.3)
    assert (plan.planned_s, plan.window_s) == (pytest.approx(0.9), 1.0)
    nothing = explored(settings(None), Situation(spot_slots=1, train_s=1.0, step_s=0.01))
    assert nothing.sequences == 0
    assert "the cheapest, 6 sequences of 10 steps, plans 1.2 GPU-s" in nothing.reason


def test_requests_carry_the_threshold_of_the_plan_with_window_and_seed_of_the_rollout():
    asked = settings()
    plan = explored(asked, Situation(spot_slots=1, train_s=1.0, step_s=0.01))
    requests = expand(job(asked), asked, INPUTS, plan)
    assert len(requests) == 2 * 6
    assert {(r.op, r.params.cache_threshold) for r in requests} == {(Op.EXPLORE, 0.3)}
    assert {(r.params.cache_polynomial, r.params.cache_last_full) for r in requests} == {((2.5, -0.5), False)}
    following = JobSpec(
        job_id=JobId("rollout-2"),
        run_id=RunId("run-a"),
        op=Op.ROLLOUT,
        iteration=2,
        policy=PolicyRef(),
        settings_json=asked.model_dump_json(),
    )
    rolled = {(r.prompt_id, r.seed): r for r in expand(following, asked, INPUTS, ExplorationPlan())}
    same = [r for r in requests if (r.prompt_id, r.seed) in rolled]
    assert len(same) == 2 * 4
    assert all(r.sde_window == rolled[r.prompt_id, r.seed].sde_window for r in same)
    now = {r.prompt_id: sde_window(asked, 1, r.prompt_id) for r in same}
    assert any(r.sde_window != now[r.prompt_id] for r in same)  # else a window of this iteration would do as well
    assert {r.params.cache_threshold for r in rolled.values()} == {0.0}


def test_what_fills_the_window_comes_after_the_plan_and_goes_round_the_prompts():
    asked = settings(fill_sequences=8)
    plan = explored(asked, Situation(spot_slots=1, train_s=1.0, step_s=0.01))
    planned = expand(job(asked), asked, INPUTS, replace(plan, fill_sequences=0))
    requests = expand(job(asked), asked, INPUTS, plan)
    assert requests[: 2 * 6] == planned
    first, second = plan.explored_prompt_ids
    filling = requests[2 * 6 :]
    assert [(r.prompt_id, int(r.request_id.rpartition(".")[2])) for r in filling] == [
        (first, 6),
        (second, 6),
        (first, 7),
        (second, 7),
    ]
    assert [r.fills_window for r in requests] == [False] * 12 + [True] * 4
    assert len({(r.prompt_id, r.seed) for r in requests}) == 16
    assert {r.params for r in filling} == {planned[0].params}


@pytest.mark.parametrize("field", ["max_sequences", "fill_sequences"])
def test_no_prompt_gets_more_than_32_candidates(field: str):
    with pytest.raises(InputError, match=rf"exploration\.{field} = 33: .* 32"):
        TrainConfig.parse({"exploration": {field: 33}})


def test_a_deterministic_run_fills_nothing():
    with pytest.raises(InputError, match=r"exploration\.fill_sequences = 8: must be 0 where deterministic"):
        TrainConfig.parse({"deterministic": True, "exploration": {"fill_sequences": 8}})


def test_what_was_measured_goes_before_what_was_calibrated():
    """Calibrated: W = 3 * 1, t_step .01. Measured: W = 2 * 1, t_step .02."""
    calibrated = explored(settings(), Situation(spot_slots=1, train_s=0.0, step_s=0.0))
    assert (calibrated.window_s, calibrated.planned_s) == (3.0, pytest.approx(0.9))
    measured = explored(settings(), Situation(spot_slots=1, train_s=2.0, step_s=0.02))
    assert (measured.window_s, measured.planned_s) == (2.0, pytest.approx(1.8))


@pytest.mark.parametrize(("train_samples", "window_s"), [(24, 1.5), (12, 3.0), (0, 3.0)])
def test_a_calibrated_training_takes_its_share_of_the_samples(train_samples: int, window_s: float):
    """The run trains on 3 * 4 samples, the calibration's 3 s were on 24, on as many, or on nobody knows."""
    asked = settings(CALIBRATION.model_copy(update={"train_samples": train_samples}))
    assert explored(asked, Situation(spot_slots=1, train_s=0.0, step_s=0.0)).window_s == window_s
    fixed = asked.model_copy(update={"config": asked.config.model_copy(update={"deterministic": True})})
    assert planned(fixed, slots=1, step_s=0.01).window_s == 2 * window_s


def test_without_calibration_and_measurement_nothing_can_be_planned():
    plan = explored(settings(None), Situation(spot_slots=1, train_s=1.0, step_s=0.0))
    assert (plan.sequences, plan.reason) == (0, "no denoising step was measured yet")


def test_a_lower_target_accuracy_lets_the_cheapest_row_in():
    """W = .8: too little for 5 steps (.9), enough for 3: 6 * 2 * 3 * 2 * .01 = .72."""
    situation = Situation(spot_slots=1, train_s=0.8, step_s=0.01)
    assert explored(settings(), situation).sequences == 0
    plan = explored(settings(target_accuracy=0.4), situation)
    assert (plan.sequences, plan.effective_steps) == (6, 3)


def test_validation_comes_off_the_window():
    """10 samples that are not made yet * 10 steps * .01 = 1 GPU-s of 2."""
    plan = explored(settings(), Situation(spot_slots=1, train_s=2.0, step_s=0.01, evaluation_samples=10), iteration=0)
    assert plan.window_s == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"rows": []}, r"rows = \[\]: Tuple should have at least 1 item"),
        ({"num_steps": 20}, "effective_steps = 10: the most must be num_steps = 20"),
        ({"step_s": 0}, "step_s = 0: Input should be greater than 0"),
        (
            {"rows": [row.model_dump() for row in (*ROWS, ROWS[0])]},
            r"effective_steps = \[3, 3, 5, 10\]: must be distinct",
        ),
    ],
)
def test_a_calibration_that_cannot_be_used_is_named_in_one_line(change, line):
    with pytest.raises(InputError, match=line):
        CalibrationConfig.parse(CALIBRATION.model_dump() | change)


def test_a_calibration_survives_the_settings_of_a_job():
    asked = settings()
    assert RunSettings.parse_json(asked.model_dump_json()).config.exploration.calibration == CALIBRATION


# ---- feedback: only what is in the bank was explored ---------------------------------------------------------------------------------

PENDING = BanditState(pending_sequences=8, pending_effective_steps=5)
REWARDS = {"p0": (0.0, 1.0), "p1": (0.0, 0.5), "p2": (0.25, 0.75)}  # deviations .5, .25, .25


def observed(bank: dict[str, tuple[int, ...]]) -> tuple[float, ...]:
    """What the pending action was paid."""
    asked = settings()
    spec = msgspec.structs.replace(job(asked), bandit=PENDING)
    inputs = msgspec.structs.replace(INPUTS, rewards=REWARDS, bank=bank)
    bandit = plan_exploration(spec, asked, inputs, Situation(spot_slots=0, train_s=0.0, step_s=0.01))[1]
    return bandit.arms[0].observations if bandit.arms else ()


def test_feedback_by_the_bank() -> None:
    assert observed({"p0": (1, 2)}) == (pytest.approx((0.5 + 0.25 + 0.25) / 3 / 0.25),)
    assert observed({"p0": (1, 2), "p1": (3, 4)}) == (pytest.approx((1.0 / 3) / 0.25),)
    assert observed({"p1": (1, 2)}) == (pytest.approx((1.0 / 3) / 0.375),)


def test_a_bank_of_none_or_of_all_prompts_pays_nothing() -> None:
    assert observed({}) == ()
    assert observed(dict.fromkeys(REWARDS, (1, 2))) == ()


def test_a_rollout_draws_the_seeds_of_the_bank_and_its_own_where_the_bank_has_none() -> None:
    asked = settings()
    rollout = msgspec.structs.replace(job(asked), op=Op.ROLLOUT, job_id=JobId("rollout-1"))
    default = expand(rollout, asked, INPUTS, ExplorationPlan())
    banked, *others = dict.fromkeys(r.prompt_id for r in default)
    seeds = (7, 11, 13, 17)
    drawn = expand(rollout, asked, msgspec.structs.replace(INPUTS, bank={banked: seeds}), ExplorationPlan())
    assert tuple(r.seed for r in drawn if r.prompt_id == banked) == seeds
    assert not {r.seed for r in default} & set(seeds)
    assert [r for r in drawn if r.prompt_id in others] == [r for r in default if r.prompt_id in others]
    assert {(r.request_id, r.sde_window) for r in drawn} == {(r.request_id, r.sde_window) for r in default}


@pytest.mark.parametrize(("window", "kept"), [(1, (1.1,)), (3, (1.2, 1.4, 1.1))])
def test_feedback_is_kept_as_long_as_the_window_of_the_configuration(window: int, kept: tuple[float, ...]) -> None:
    """Deviations .65, .5 and .5, of which the last two are not explored: r = 1.65 / 3 / .5 = 1.1."""
    asked = settings(window=window)
    before = BanditState((ArmStats(8, 5, 3, (1.0, 1.2, 1.4)),), pending_sequences=8, pending_effective_steps=5)
    rewards = {"p0": (0.0, 1.3), "p1": (0.0, 1.0), "p2": (0.0, 1.0)}
    inputs = msgspec.structs.replace(INPUTS, rewards=rewards, bank={"p0": (1, 2)})
    spec = msgspec.structs.replace(job(asked), bandit=before)
    bandit = plan_exploration(spec, asked, inputs, Situation(spot_slots=0, train_s=0.0, step_s=0.01))[1]
    assert bandit.arms[0].chosen == 4
    assert bandit.arms[0].observations == pytest.approx(kept)


@pytest.mark.parametrize(
    ("exploration", "chosen"),
    [({"beta": 0.0, "window": 3}, 12), ({"beta": 2.0, "window": 3}, 6), ({"beta": 0.0, "window": 1}, 8)],
)
def test_beta_and_window_of_the_configuration_decide(exploration: dict[str, float], chosen: int) -> None:
    """Arms of 10 steps: over three observations 12 candidates are best, by the last alone 8; 6 were tried once."""
    asked = settings(**exploration, target_accuracy=0.95)
    tried = (
        ArmStats(6, 10, 1, (1.0,)),
        ArmStats(8, 10, 9, (1.0, 1.0, 1.3)),
        ArmStats(10, 10, 9, (1.0, 1.0, 1.0)),
        ArmStats(12, 10, 9, (1.2, 1.2, 1.2)),
    )
    spec = msgspec.structs.replace(job(asked), bandit=BanditState(tried))
    plan = plan_exploration(spec, asked, INPUTS, Situation(spot_slots=9, train_s=9.0, step_s=0.01))[0]
    assert plan.sequences == chosen


# ---- strategies ----------------------------------------------------------------------------------------------------------------------


def test_best_of_n_requests_are_the_rollout_that_would_follow() -> None:
    """Same prompts, seeds, windows and parameters, and their trajectories are kept."""
    asked = settings(mode="best_of_n")
    spec = job(asked)
    plan = explored(asked, Situation(spot_slots=0, train_s=0.0, step_s=0.0))
    candidates = expand(spec, asked, INPUTS, plan)
    assert (len(candidates), len(plan.explored_prompt_ids)) == (3 * 12, 3)
    bank = {p: tuple(r.seed for r in candidates if r.prompt_id == p)[-4:] for p in plan.explored_prompt_ids}
    rollout = msgspec.structs.replace(spec, op=Op.ROLLOUT, iteration=2, job_id=JobId("rollout-2"))
    requests = expand(rollout, asked, msgspec.structs.replace(INPUTS, bank=bank), ExplorationPlan())
    same = {(r.prompt_id, r.seed, r.sde_window, r.params, r.policy) for r in candidates if r.seed in bank[r.prompt_id]}
    assert {(r.prompt_id, r.seed, r.sde_window, r.params, r.policy) for r in requests} == same
    assert all(r.stores_trajectory for r in (*candidates, *requests))


def test_prescreen_requests_carry_the_cheapest_threshold_and_keep_nothing() -> None:
    asked = settings(mode="prescreen")
    plan = explored(asked, Situation(spot_slots=0, train_s=0.0, step_s=0.0))
    requests = expand(job(asked), asked, INPUTS, plan)
    assert len(requests) == 3 * 12
    assert {(r.params.cache_threshold, r.stores_trajectory) for r in requests} == {(0.3, False)}


@pytest.mark.parametrize("mode", ["bandit", "best_of_n", "prescreen"])
def test_no_strategy_explores_for_an_iteration_that_does_not_come(mode: str) -> None:
    asked = settings(mode=mode)
    plan = explored(asked, Situation(spot_slots=2, train_s=9.0, step_s=0.01), iteration=8)
    assert plan == ExplorationPlan(reason="the last iteration has no next one to explore for")


def control(*, slots: int, step_s: float, spot_nodes: int = 2) -> ControlCore:
    """Of a cluster of `spot_nodes`, of which one came, has `slots` and measured `step_s`."""
    core = ControlCore(ClusterConfig(spot_nodes=spot_nodes))
    core.handle(NodeHello(node_id=NodeId("spot-0"), pool=Pool.SPOT, slots=slots), 1.0)
    core.handle(NodeHeartbeat(node_id=NodeId("spot-0"), slots=slots, step_s=step_s), 2.0)
    return core


def planned(
    asked: RunSettings, *, slots: int, step_s: float, spot_nodes: int = 2, iteration: int = 1
) -> ExplorationPlan:
    core = control(slots=slots, step_s=step_s, spot_nodes=spot_nodes)
    core.handle(JobSubmitted(job=job(asked, iteration)), 3.0)
    core.handle(JobInputsRead(job_id=JobId("explore-1"), inputs=INPUTS), 4.0)
    return core.jobs[JobId("explore-1")].plan


def test_a_deterministic_run_plans_the_same_whatever_was_measured():
    """W = 3 * 2 configured slots = 6 GPU-s by calibrated times; measured ones would fit nothing, or more."""
    asked = settings()
    fixed = asked.model_copy(update={"config": asked.config.model_copy(update={"deterministic": True})})
    plans = {planned(fixed, slots=slots, step_s=step_s) for slots, step_s in ((1, 0.001), (2, 0.02), (3, 50.0))}
    (plan,) = plans
    assert (plan.window_s, plan.planned_s) == (6.0, pytest.approx(0.9))
    assert planned(asked, slots=1, step_s=50.0).sequences == 0
    assert (
        planned(fixed, slots=1, step_s=50.0, spot_nodes=3).window_s == 9.0
    )  # of the cluster, not of the run's own cfg


def test_only_what_spot_nodes_measure_counts():
    """Exploration is theirs: a reserved node of another GPU says nothing of its cost."""
    core = ControlCore(ClusterConfig(spot_nodes=2))
    for name, pool, step_s in (("r", Pool.RESERVED, 0.5), ("a", Pool.SPOT, 0.01), ("b", Pool.SPOT, 0.03)):
        core.handle(NodeHello(node_id=NodeId(name), pool=pool, slots=1), 2.0)
        core.handle(NodeHeartbeat(node_id=NodeId(name), slots=1, step_s=step_s), 2.0)
    asked = settings()
    core.handle(JobSubmitted(job=job(asked)), 3.0)
    core.handle(JobInputsRead(job_id=JobId("explore-1"), inputs=INPUTS), 4.0)
    plan = core.jobs[JobId("explore-1")].plan
    assert (plan.window_s, plan.planned_s) == (6.0, pytest.approx(6 * 2 * 5 * 1.5 * 0.02))


def test_an_evaluation_that_is_due_and_not_here_yet_comes_off_the_window():
    """10 samples * 10 steps * .01 = 1 GPU-s of 3, in every second iteration."""
    asked = settings()
    evaluation = asked.config.evaluation.model_copy(update={"every": 2})
    often = asked.model_copy(update={"config": asked.config.model_copy(update={"evaluation": evaluation})})
    assert planned(often, slots=1, step_s=0.01).window_s == 3.0
    assert planned(often, slots=1, step_s=0.01, iteration=2).window_s == pytest.approx(2.0)


def test_how_long_another_run_trains_says_nothing():
    asked = settings()
    core = control(slots=1, step_s=0.01)
    core.train_times[RunId("run-b")] = TrainTimeEstimate(0.0, (99.0,))
    core.handle(JobSubmitted(job=job(asked)), 3.0)
    core.handle(JobInputsRead(job_id=JobId("explore-1"), inputs=INPUTS), 4.0)
    assert core.jobs[JobId("explore-1")].plan.window_s == 3.0  # as calibrated


def test_a_plan_is_made_once_and_the_bandit_goes_back_with_the_result():
    """A job that failed and is submitted again keeps the plan that its samples were drawn by, whatever was measured since."""
    core = control(slots=1, step_s=0.01)
    spec = job(settings())
    core.handle(JobSubmitted(job=spec), 3.0)
    core.handle(JobInputsRead(job_id=spec.job_id, inputs=INPUTS), 4.0)
    plan = core.jobs[spec.job_id].plan
    core.handle(JobStepFailed(job_id=spec.job_id, error_class="StoreError", error="x"), 5.0)
    core.handle(NodeHeartbeat(node_id=NodeId("spot-0"), slots=1, step_s=0.015), 6.0)
    core.handle(JobSubmitted(job=spec), 7.0)
    core.handle(JobInputsRead(job_id=spec.job_id, inputs=INPUTS), 8.0)
    assert plan.sequences == 6
    assert core.jobs[spec.job_id].plan == plan
    bandit = core.jobs[spec.job_id].bandit
    assert (bandit.pending_sequences, bandit.pending_effective_steps) == (6, 5)


def test_leftovers_of_a_deterministic_run_are_pinned():
    with pytest.raises(InputError, match=r"exploration.leftovers = 'drop': must be 'pinned' where deterministic"):
        TrainConfig.parse({"deterministic": True, "exploration": {"leftovers": "drop"}})
