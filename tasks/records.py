"""What tasks keep in the tensor store beside what the runtime keeps there: prompt rows, seed banks and the history of iterations.

Owns their keys and formats, and reading manifests. Everything is written once: a retried task finds its own object and moves on.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import pandas as pd

from spot_runtime.planner.selection import ChosenSeed
from spot_runtime.rewards.prompts import GenevalRow, row_json
from spot_runtime.store.checkpoints import Checkpoint, put_checkpoint
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import BanditState, ExplorationPlan, Manifest, PolicyRef, Usage
from tasks.models import State

BANK_COLUMNS: dict[str, type] = {
    "iteration": int,
    "prompt_id": str,
    "prompt": str,
    "seed": int,
    "exploration_reward": float,
    "rank": int,
    "side": str,
    "policy_version": int,
    "action": str,
    "effective_steps": int,
}
"""Columns of the seed bank. `iteration` is the one that trains on the seeds, `policy_version` the one that explored them and
`effective_steps` the full forwards that this took."""


class PhaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One job of an iteration."""

    op: str
    usage: Usage
    metrics: dict[str, float]
    manifest_key: str = ""


class IterationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One finished iteration. `policy` is what it rolled out with; `bank_prompts` counts prompts with seeds for the next one.

    `rank_transfer` says how well the exploration before had ranked the seeds of these rollouts, over `ranked_prompts`; none where it
    explored nothing. `spot_busy` is the share of the spot slots' time that exploration and validation took while training ran.
    """

    iteration: int
    policy: PolicyRef
    phases: tuple[PhaseRecord, ...]
    plan: ExplorationPlan
    bandit: BanditState
    bank_key: str
    bank_prompts: int
    rank_transfer: float | None = None
    ranked_prompts: int = 0
    spot_busy: float | None = None


def prompts_key(run_id: str, split: str) -> str:
    return f"runs/{run_id}/prompts/{split}.jsonl"


def bank_key(run_id: str, iteration: int) -> str:
    """Of the seeds that `iteration` trains on."""
    return f"runs/{run_id}/banks/{iteration:06d}.json"


def bank_table_key(run_id: str, iteration: int) -> str:
    """Of the same seeds as a table."""
    return f"runs/{run_id}/banks/{iteration:06d}.parquet"


def history_key(run_id: str, iteration: int) -> str:
    return f"runs/{run_id}/history/{iteration:06d}.json"


def put_rows(store: TensorStore, key: str, rows: Iterable[GenevalRow]) -> None:
    """Prompt rows as JSON lines, in order."""
    store.put_bytes(key, "".join(f"{row_json(row)}\n" for row in rows).encode())


def read_manifest(store: TensorStore, key: str) -> Manifest:
    """The manifest of a generation job. Raises MissingObjectError, CorruptObjectError or StoreError."""
    return msgspec.json.decode(store.get_bytes(key), type=Manifest)


def put_bank(store: TensorStore, key: str, chosen: Mapping[str, Sequence[ChosenSeed]]) -> None:
    """Seeds by prompt id: what control reads."""
    seeds = {prompt_id: [item.seed for item in items] for prompt_id, items in sorted(chosen.items())}
    store.put_bytes(key, msgspec.json.encode(seeds))


def put_table(store: TensorStore, key: str, table: pd.DataFrame) -> None:
    store.put_bytes(key, parquet(table))


def read_tables(store: TensorStore, keys: Iterable[str]) -> pd.DataFrame:
    """Seed banks one after the other; an empty table with the right columns where there are none."""
    tables = [pd.read_parquet(io.BytesIO(store.get_bytes(key))) for key in keys]
    return pd.concat([table for table in tables if len(table)] or [bank_table([])], ignore_index=True)


def bank_table(rows: Sequence[tuple[object, ...]]) -> pd.DataFrame:
    """Rows in the order of BANK_COLUMNS as a typed table."""
    return pd.DataFrame(rows, columns=list(BANK_COLUMNS)).astype(BANK_COLUMNS)


def parquet(table: pd.DataFrame) -> bytes:
    buffer = io.BytesIO()
    table.to_parquet(buffer, index=False)
    return buffer.getvalue()


def put_state(store: TensorStore, state: State) -> None:
    """Commits `state` as a checkpoint. What it names must be in the store."""
    checkpoint = Checkpoint(
        run_id=state.run_id,
        iteration=state.iteration,
        lineage=state.settings.lineage,
        policy=state.policy.ref,
        state_json=state.model_dump_json(),
        settings_json=state.settings_json,
        bank_key=state.bank_key,
        samples_key=state.samples_key,
        made_s=time.time(),
    )
    put_checkpoint(store, checkpoint)


def put_history(store: TensorStore, run_id: str, record: IterationRecord) -> None:
    store.put_bytes(history_key(run_id, record.iteration), msgspec.json.encode(record))


def read_iteration(store: TensorStore, run_id: str, iteration: int) -> IterationRecord:
    """Raises MissingObjectError, CorruptObjectError or StoreError."""
    return msgspec.json.decode(store.get_bytes(history_key(run_id, iteration)), type=IterationRecord)
