"""The join of an iteration: seeds for the next one, one more record of history, the next State and its checkpoint.

Owns how an iteration's outcomes become a State. Which seeds are good is planner/selection.py's to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
import pandas as pd
from flytekit import StructuredDataset, kwtypes, task

from spot_runtime.planner import pend
from spot_runtime.planner.ranking import Agreement
from spot_runtime.planner.review import rank_transfer, spot_busy_share
from spot_runtime.planner.selection import ChosenSeed, choose_by_prompt
from spot_runtime.planner.strategies import STRATEGIES
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import ExplorationPlan, Manifest
from tasks.cost import read_meter
from tasks.decks import show
from tasks.images import RUNTIME_IMAGE
from tasks.local_run import current_run
from tasks.models import Outcome, Policy, Score, State, json_text
from tasks.records import (
    BANK_COLUMNS,
    IterationRecord,
    PhaseRecord,
    bank_key,
    bank_table,
    bank_table_key,
    put_bank,
    put_history,
    put_state,
    put_table,
    read_manifest,
    read_tables,
)
from tasks.report import Part, seed_bank
from tasks.resources import JOIN_LIMITS, JOIN_REQUESTS

SeedBank = Annotated[StructuredDataset, kwtypes(**BANK_COLUMNS)]


class Selected(NamedTuple):
    """Outputs of the join."""

    state: State
    seed_bank: SeedBank


@task(container_image=RUNTIME_IMAGE, requests=JOIN_REQUESTS, limits=JOIN_LIMITS, enable_deck=True, deck_fields=[])  # type: ignore[untyped-decorator]
def select_seeds(state: State, rollouts: Outcome, trained: Outcome, explored: Outcome, scores: Outcome) -> Selected:
    """Outcomes that were not due are empty. Raises StoreError where an object cannot be read or written."""
    store = TensorStore(state.settings.store)
    chosen, table = choose_seeds(store, state, explored)
    key = write_bank(store, state, chosen, table)
    jobs = [job for job in (rollouts, trained, explored, scores) if job.is_due]
    transfer = measured_transfer(store, state, rollouts)
    record = iteration_record(state, jobs, explored, key, len(chosen), transfer)
    put_history(
        store, state.run_id, msgspec.structs.replace(record, spot_busy=spot_busy(store, trained, explored, scores))
    )
    after = next_state(state, trained, explored, scores, jobs, key)
    put_state(store, after)
    _tell(state, rollouts, after, len(chosen))
    show([Part("Seed bank", seed_bank(table))])
    return Selected(after, StructuredDataset(dataframe=table))


def choose_seeds(
    store: TensorStore, state: State, explored: Outcome
) -> tuple[dict[str, tuple[ChosenSeed, ...]], pd.DataFrame]:
    """Chosen seeds by prompt id, and the same as a table."""
    if not explored.manifest_key:
        return {}, bank_table([])
    manifest = read_manifest(store, explored.manifest_key)
    chosen = choose_by_prompt(manifest.samples, state.settings.config.grpo.group_size)
    return chosen, _table(chosen, manifest)


def write_bank(
    store: TensorStore, state: State, chosen: Mapping[str, Sequence[ChosenSeed]], table: pd.DataFrame
) -> str:
    """Stores the bank of the next iteration and returns its key; "" where every prompt keeps its default seeds."""
    put_table(store, bank_table_key(state.run_id, state.iteration + 1), table)
    if not chosen:
        return ""
    key = bank_key(state.run_id, state.iteration + 1)
    put_bank(store, key, chosen)
    return key


def measured_transfer(store: TensorStore, state: State, rollouts: Outcome) -> Agreement | None:
    """Rank transfer from the bank of this iteration to its rollouts; None without a bank."""
    if not state.bank_key:
        return None
    bank = read_tables(store, [bank_table_key(state.run_id, state.iteration)])
    explored: dict[str, dict[int, float]] = {}
    for prompt_id, seed, reward in bank[["prompt_id", "seed", "exploration_reward"]].itertuples(index=False):
        explored.setdefault(prompt_id, {})[seed] = reward
    return rank_transfer(explored, read_manifest(store, rollouts.manifest_key).samples)


def spot_busy(store: TensorStore, trained: Outcome, *beside: Outcome) -> float | None:
    """Share of the spot slots' time in the training window that the jobs beside it took."""
    manifests = (read_manifest(store, job.manifest_key) for job in beside if job.manifest_key)
    return spot_busy_share(trained.usage, (sample for manifest in manifests for sample in manifest.samples))


def iteration_record(
    state: State,
    jobs: Sequence[Outcome],
    explored: Outcome,
    key: str,
    bank_prompts: int,
    transfer: Agreement | None,
) -> IterationRecord:
    return IterationRecord(
        iteration=state.iteration,
        policy=state.policy.ref,
        phases=tuple(phase_record(job) for job in jobs),
        plan=explored.plan,
        bandit=explored.bandit,
        bank_key=key,
        bank_prompts=bank_prompts,
        rank_transfer=transfer.spearman if transfer else None,
        ranked_prompts=transfer.groups if transfer else 0,
    )


def phase_record(job: Outcome) -> PhaseRecord:
    return PhaseRecord(op=job.op, usage=job.usage, metrics=job.metrics, manifest_key=job.manifest_key)


def next_state(
    state: State, trained: Outcome, explored: Outcome, scores: Outcome, jobs: Sequence[Outcome], key: str
) -> State:
    """State after this iteration: the new policy, the new bank, what was spent. An action without a bank waits for no feedback."""
    bandit = explored.bandit if explored.is_due else state.bandit
    update = {
        "iteration": state.iteration + 1,
        "policy": Policy.of(trained.policy.ref),
        "average": Policy.of(trained.average.ref),
        "bandit_json": json_text(bandit if key else pend(bandit, None)),
        "bank_key": key,
        "samples_key": explored.manifest_key if key and _keeps_samples(state) else "",
        "scores": [*state.scores, score(state, scores)] if scores.is_due else state.scores,
        "meter_json": json_text(read_meter((job.usage for job in jobs), state.meter)),
    }
    return state.model_copy(update=update)


def _keeps_samples(state: State) -> bool:
    strategy = STRATEGIES.get(state.settings.config.exploration.mode)
    return strategy is not None and strategy.keeps_samples


def score(state: State, scores: Outcome) -> Score:
    """What one evaluation said of the policy of `state`, or of its moving average."""
    return Score(
        iteration=state.iteration,
        policy_version=state.policy.version,
        pairs=int(scores.metrics.get("samples", 0)),
        correct=scores.metrics.get("correct", 0.0),
        reward_mean=scores.metrics.get("reward_mean", 0.0),
        manifest_key=scores.manifest_key,
    )


def _table(chosen: Mapping[str, Sequence[ChosenSeed]], manifest: Manifest) -> pd.DataFrame:
    """One row a seed, with the policy version that this very sample ran with."""
    samples = {(sample.prompt_id, sample.seed): sample for sample in manifest.samples}
    action = _action(manifest.plan)
    rows = []
    for prompt_id, items in chosen.items():
        for item in items:
            sample = samples[prompt_id, item.seed]
            where = (manifest.iteration + 1, prompt_id, sample.prompt)
            choice = (item.seed, item.reward, item.rank, item.side.value)
            rows.append((*where, *choice, sample.policy.version, action, sample.effective_steps))
    return bank_table(rows)


def _action(plan: ExplorationPlan) -> str:
    return f"{plan.sequences} x {plan.effective_steps}"


def _tell(state: State, rollouts: Outcome, after: State, bank_prompts: int) -> None:
    if (run := current_run()) is None:
        return
    reward = rollouts.metrics.get("reward_mean", 0.0)
    validation = f", {_validated(after)}" if len(after.scores) > len(state.scores) else ""
    run.progress.note(
        f"iteration {after.iteration}/{state.iterations}: mean reward {reward:.3f}{validation}, "
        f"chosen seeds for {bank_prompts} prompts, policy version {after.policy.version}"
    )


def _validated(after: State) -> str:
    last, asked = after.scores[-1], after.settings.config.evaluation.pairs
    missing = f" ({last.pairs} of {asked} pairs)" if last.pairs < asked else ""
    return f"validation {last.correct:.3f}{missing}"
