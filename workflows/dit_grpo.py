"""GRPO post-training of a diffusion transformer: the DAG and nothing else.

pyflyte run workflows/dit_grpo.py train --dataset geneval            # here, on an embedded cluster
pyflyte run --remote workflows/dit_grpo.py train --dataset geneval   # on a Flyte cluster
"""

from __future__ import annotations

from flytekit import dynamic

from spot_runtime.config import DatasetName
from spot_runtime.planner.strategies import STRATEGIES
from tasks.changes import NO_CHANGES, Changes
from tasks.daemon_task import evaluate, explore, rollout, train_step
from tasks.finish_run import RunOutputs, finish_run
from tasks.images import RUNTIME_IMAGE
from tasks.local_run import run_workflow
from tasks.models import Exploration, Outcome, State, System
from tasks.options import UNSAID
from tasks.overlap import Joined
from tasks.resources import JOIN_LIMITS, JOIN_REQUESTS
from tasks.select_seeds import select_seeds
from tasks.start_run import start_run

CHUNKS = 8
"""The loop is so many nodes in a row, so that a run which is over leaves few of them to pass through."""


@dynamic(task_config=Joined(), container_image=RUNTIME_IMAGE, requests=JOIN_REQUESTS, limits=JOIN_LIMITS)  # type: ignore[untyped-decorator]
def grpo_iteration(state: State) -> State:
    """Roll out; then train, explore the next prompts with the old weights and validate, side by side; then join. Nothing once over.

    A strategy that explores after training waits for the new weights.
    """
    if state.is_finished:
        return state
    settings = state.settings
    strategy = STRATEGIES.get(settings.config.exploration.mode)
    rollouts = rollout(state=state)
    trained = train_step(state=state, rollouts=rollouts)
    before = trained if strategy and strategy.after_training else Outcome()
    explored = explore(state=state, rollouts=rollouts, trained=before) if strategy else Outcome()
    scores = evaluate(state=state) if settings.evaluates_at(state.iteration) else Outcome()
    selected = select_seeds(state=state, rollouts=rollouts, trained=trained, explored=explored, scores=scores)
    after: State = selected.state
    return after


@dynamic(task_config=Joined(), container_image=RUNTIME_IMAGE, requests=JOIN_REQUESTS, limits=JOIN_LIMITS)  # type: ignore[untyped-decorator]
def grpo_loop(state: State) -> State:
    """One chunk of iterations, chained through State; none where the run is over."""
    chunk = 0 if state.is_finished else -(-state.iterations // CHUNKS)
    for _ in range(min(chunk, state.iterations - state.iteration)):
        state = grpo_iteration(state=state)
    return state


@run_workflow
def train(
    dataset: DatasetName = UNSAID.dataset,
    resolution: int = UNSAID.resolution,
    iterations: int = UNSAID.iterations,
    system: System = System.SPOTLIGHT,
    model: str = UNSAID.model,
    prompts: str = "",
    reward: str = "",
    store: str = UNSAID.store,
    exploration: Exploration = UNSAID.exploration,
    spot_trace: str = "",
    seed: int = UNSAID.seed,
    resume_from: str = "",
    cfg: Changes = NO_CHANGES,
    target_score: float = 0.0,
) -> RunOutputs:
    """Post-train a diffusion transformer with GRPO on reserved and spot GPUs.

    Args:
        dataset: prompt set and its reward
        resolution: height and width in pixels; 0 takes the model's own
        iterations: GRPO iterations
        system: preset of the compared systems
        model: tiny, a pipeline folder, a hub id, or store:NAME (`spotlight models push`)
        prompts: URL of a GenEval jsonl file (txt for deepseek_ocr); empty generates prompts
        reward: name of a reward or MODULE:FUNCTION (docs/rewards.md); empty takes the dataset's
        store: URL of the tensor store; empty puts it beside a local run's outputs
        exploration: where seeds come from: bandit (on spot capacity, while training runs), best_of_n, prescreen (after it), none
        spot_trace: trace of spot availability to replay; empty keeps all spot nodes
        seed: the only entropy of the run
        resume_from: run to continue: latest, a run id, or a URI STORE/runs/RUN; empty starts a new one
        cfg: fields of TrainConfig that differ from their defaults, as JSON or a JSON or YAML file
        target_score: share of correct validation pairs that ends the run early; 0: none
    """
    state = start_run(
        dataset=dataset,
        resolution=resolution,
        iterations=iterations,
        system=system,
        model=model,
        prompts=prompts,
        reward=reward,
        store=store,
        exploration=exploration,
        spot_trace=spot_trace,
        seed=seed,
        resume_from=resume_from,
        cfg=cfg,
        target_score=target_score,
    )
    for _ in range(CHUNKS):
        state = grpo_loop(state=state)
    scores = evaluate(state=state)
    outputs: RunOutputs = finish_run(state=state, scores=scores)
    return outputs
