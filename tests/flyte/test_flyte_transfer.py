"""What the join writes down of an exploration, once its seeds were rolled out."""

from __future__ import annotations

import uuid

import msgspec
import pytest
from sample_records import sample_record

from spot_runtime.config import RunSettings
from spot_runtime.planner.ranking import Agreement
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import (
    ExplorationPlan,
    JobId,
    Manifest,
    Op,
    PolicyRef,
    Usage,
)
from tasks.models import Outcome, State, json_text
from tasks.records import bank_table, bank_table_key, put_table
from tasks.report import Report, planner
from tasks.select_seeds import choose_seeds, iteration_record, measured_transfer


@pytest.fixture
def store() -> TensorStore:
    return TensorStore(f"memory://transfer-{uuid.uuid4().hex}")


def state(store: TensorStore, bank_key: str) -> State:
    settings = RunSettings(
        run_id="run-1",
        iterations=3,
        resolution=64,
        model="tiny",
        store=store.url,
        train_prompts_key="",
        validation_prompts_key="",
    )
    return State(run_id="run-1", settings_json=settings.model_dump_json(), iterations=3, iteration=1, bank_key=bank_key)


def rolled_out(store: TensorStore) -> Outcome:
    samples = (
        sample_record("a", 1, 0.9),
        sample_record("a", 2, 0.1),
        sample_record("b", 1, 0.3),
        sample_record("b", 2, 0.6),
    )
    manifest = Manifest(JobId("rollout-1"), Op.ROLLOUT, 1, PolicyRef(), samples)
    store.put_bytes("manifest", msgspec.json.encode(manifest))
    return Outcome(op=Op.ROLLOUT, manifest_key="manifest", usage_json=json_text(Usage(0.0, 10.0)))


def test_the_bank_of_an_iteration_is_compared_with_its_rollouts(store: TensorStore) -> None:
    """Prompt a kept its order, b did not; the bank of another iteration does not count."""
    rows = [(1, "a", "", 1, 0.8, 0, "top", 0, "4 x 5", 5), (1, "a", "", 2, 0.2, 3, "bottom", 0, "4 x 5", 5)]
    rows += [(1, "b", "", 1, 0.7, 0, "top", 0, "4 x 5", 5), (1, "b", "", 2, 0.2, 3, "bottom", 0, "4 x 5", 5)]
    put_table(store, bank_table_key("run-1", 1), bank_table(rows))
    put_table(store, bank_table_key("run-1", 2), bank_table([(2, "a", "", 1, 0.0, 0, "top", 1, "4 x 5", 5)]))
    assert measured_transfer(store, state(store, "bank"), rolled_out(store)) == Agreement(0.0, 2, 0)


def test_a_row_of_the_bank_is_of_the_next_iteration_and_tells_what_its_own_sample_ran_with(store: TensorStore) -> None:
    """Leftovers under `latest` run with another policy than the job began with."""
    old, new = PolicyRef(4, "policies/4", "d4"), PolicyRef(5, "policies/5", "d5")
    group = RunSettings.parse_json(state(store, "").settings_json).config.grpo.group_size
    samples = tuple(sample_record("a", i, i / 10, policy=old if i else new) for i in range(group))
    plan = ExplorationPlan(group, 5, 0.3, ("a",))
    manifest = Manifest(JobId("explore-1"), Op.EXPLORE, 1, old, samples, plan=plan)
    store.put_bytes("explored", msgspec.json.encode(manifest))
    chosen, table = choose_seeds(store, state(store, ""), Outcome(op=Op.EXPLORE, manifest_key="explored"))
    assert set(chosen) == {"a"}
    assert set(table["iteration"]) == {2}
    assert dict(zip(table["seed"], table["policy_version"], strict=True)) == {i: 4 if i else 5 for i in range(group)}
    assert set(table["action"]) == {f"{group} x 5"}


def test_without_a_bank_nothing_is_compared(store: TensorStore) -> None:
    assert measured_transfer(store, state(store, ""), rolled_out(store)) is None


def test_the_report_shows_transfer_and_overhead(store: TensorStore) -> None:
    """Training ends at 30 s, exploration at 32 s: 2 of the 32 s of this iteration."""
    jobs = [
        Outcome(op=Op.ROLLOUT, usage_json=json_text(Usage(0.0, 10.0))),
        Outcome(op=Op.TRAIN_STEP, usage_json=json_text(Usage(10.0, 30.0))),
        Outcome(
            op=Op.EXPLORE,
            usage_json=json_text(Usage(10.0, 32.0)),
            plan_json=json_text(ExplorationPlan(4, 5, 0.3, ("a", "b"), 12.5, 20.0)),
        ),
    ]
    record = iteration_record(state(store, ""), jobs, jobs[2], "key", 2, Agreement(0.875, 2, 0))
    record = msgspec.structs.replace(record, spot_busy=0.93)
    assert (record.rank_transfer, record.ranked_prompts) == (0.875, 2)
    html = planner(Report(state=state(store, ""), history=(record,), gain=None, bank=bank_table([])))
    cells = [cell.split("</td>")[0] for cell in html.split("<td>")[1:10]]
    assert cells == ["1", "4 x 5", "2", "12.5", "20.0", "6.2%", "93%", "0.88", ""]
