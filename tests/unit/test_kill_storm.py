"""Kills at any tick of a world of real cores change nothing of what a run ends in; and one seed makes one log."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kill_storm import PHASE_TICKS, WHATS, Kill, Outcome, drawn, iteration, life

from spot_runtime.types import JobPhase, PolicyRef

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = "import hashlib, kill_storm; print(hashlib.sha256(kill_storm.life(7)).hexdigest())"


@pytest.fixture(scope="module")
def calm() -> Outcome:
    return iteration([])


def test_a_calm_run_makes_every_sample(calm: Outcome) -> None:
    explored = len(calm.plan.explored_prompt_ids) * calm.plan.sequences
    assert explored > 0
    counts = {job_id: len(samples) for job_id, samples in calm.samples.items()}
    assert counts == {"rollout-0": 40, "explore-0": explored, "evaluate-0": 12}
    assert set(calm.phases.values()) == {JobPhase.SUCCEEDED}
    assert calm.policy == PolicyRef(2, "k", "e")


@settings(max_examples=25, deadline=None)
@given(
    kills=st.lists(st.tuples(st.integers(0, 2 * PHASE_TICKS - 1), st.sampled_from(WHATS)), max_size=24),
)
def test_any_kills_of_nodes_workers_control_and_trainer_end_in_the_same_results(
    calm: Outcome, kills: list[Kill]
) -> None:
    stormy = iteration(kills)
    assert stormy.samples == calm.samples
    assert stormy.phases == calm.phases
    assert stormy.policy == calm.policy


def test_kills_of_every_kind_find_something_at_work() -> None:
    hits: Counter[str] = Counter()
    for seed in range(8):
        hits += iteration(drawn(seed)).hits
    assert set(hits) == set(WHATS)


def restarts(every: int) -> list[Kill]:
    """Control dies again and again, and a node in between, so that leases of every kind are in the journal."""
    deaths = [(tick, "control dies") for tick in range(3, 2 * PHASE_TICKS, every)]
    beside = [(20, "spot-0 dies"), (50, "spot-1 is noticed"), (70, "spot-0 dies"), (90, "messages are lost")]
    return sorted([*deaths, *beside])


@pytest.mark.parametrize("leftovers", ["pinned", "latest"])
def test_control_that_comes_back_from_its_journal_after_any_event_ends_in_the_same_results(
    calm: Outcome, tmp_path: Path, leftovers: str
) -> None:
    """Also with leftovers that take the new policy: what was told to change stays changed."""
    stormy = iteration(restarts(every=7), tmp_path / "journal.sqlite", leftovers)
    assert (stormy.samples, stormy.phases, stormy.policy) == (calm.samples, calm.phases, calm.policy)
    assert stormy.hits["control dies"] >= 15
    assert (stormy.hits["another policy is restored"] > 0) == (leftovers == "latest")


@settings(max_examples=5, deadline=None)
@given(kills=st.lists(st.tuples(st.integers(0, 2 * PHASE_TICKS - 1), st.sampled_from(WHATS)), max_size=24))
def test_any_kills_of_a_control_with_a_journal_end_in_the_same_results(
    calm: Outcome, tmp_path_factory: pytest.TempPathFactory, kills: list[Kill]
) -> None:
    stormy = iteration(
        sorted([*kills, (30, "control dies"), (80, "control dies")]), tmp_path_factory.mktemp("storm") / "j"
    )
    assert (stormy.samples, stormy.phases, stormy.policy) == (calm.samples, calm.phases, calm.policy)


def digest_under(hash_seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return ended.stdout.strip()


def test_the_same_seed_makes_the_same_log_of_events_and_commands_in_any_process() -> None:
    here = hashlib.sha256(life(7)).hexdigest()
    assert here == hashlib.sha256(life(7)).hexdigest()
    assert [digest_under(hash_seed) for hash_seed in (0, 1, 4711)] == [here] * 3
    assert here != hashlib.sha256(life(8)).hexdigest()
