"""Denoising steps timed over ranks that are real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from spot_runtime.diffusion import group_profile
from spot_runtime.diffusion.group_profile import GroupPoint, RankOrder, group_latencies_s
from spot_runtime.errors import GroupError
from spot_runtime.lifeline import ORPHAN_EXIT_CODE
from spot_runtime.messages import GenerationRequest, SamplingParams
from spot_runtime.types import Generation, JobId, Op, PolicyRef, RequestId, RunId

pytestmark = pytest.mark.timeout(900)

REQUEST = GenerationRequest(
    request_id=RequestId("r"),
    job_id=JobId("j"),
    run_id=RunId("run-1"),
    op=Op.EXPLORE,
    prompt_id="p",
    prompt="a red square",
    row_json="{}",
    seed=1,
    sde_window=(0, 2),
    params=SamplingParams(height=64, width=64, num_steps=4, noise_level=0.7),
    policy=PolicyRef(),
    embedding_key="e",
)


def latencies(text: tuple[int, int]) -> list[float]:
    points = (GroupPoint(64, 1), GroupPoint(32, 2))
    return group_latencies_s("tiny", REQUEST, text, points, degree=2, device="cpu", threads=1)


def test_two_ranks_time_each_resolution_and_batch_together() -> None:
    found = latencies((7, 64))
    assert len(found) == 2
    assert all(latency_s > 0 for latency_s in found)


def test_what_a_rank_says_last_is_the_error() -> None:
    with pytest.raises(GroupError, match=r"rank-\d of a profile: .*embeds of r have shape \(7, 3\)"):
        latencies((7, 3))


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_fails_is_not_waited_for_behind_one_that_waits_for_it(broken: int, tmp_path: Path) -> None:
    paths = [tmp_path / "rank-0", tmp_path / "rank-1"]
    paths[broken].with_suffix(".err").write_text("no such model")
    ends = ["import time; time.sleep(600)", "import time; time.sleep(600)"]
    ends[broken] = "raise SystemExit(3)"
    ranks = [subprocess.Popen([sys.executable, "-c", code]) for code in ends]
    try:
        with pytest.raises(GroupError, match=f"rank-{broken} of a profile: no such model"):
            group_profile._wait(ranks, paths)
        assert ranks[1 - broken].poll() is None
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_of_two_that_failed_the_one_that_spoke_first_is_the_cause(tmp_path: Path) -> None:
    ranks, paths = [], [tmp_path / "rank-0", tmp_path / "rank-1"]
    for path, spoken_s in zip(paths, (200, 100), strict=True):
        path.with_suffix(".err").write_text(f"traceback\n{path.name} failed")
        os.utime(path.with_suffix(".err"), (spoken_s, spoken_s))
        ranks.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    for rank in ranks:
        rank.wait()
    with pytest.raises(GroupError, match="rank-1 of a profile: rank-1 failed"):
        group_profile._wait(ranks, paths)


def test_a_rank_ends_when_its_parent_lets_go(tmp_path: Path) -> None:
    order = RankOrder(
        model="tiny",
        request=REQUEST,
        text=(7, 64),
        points=(GroupPoint(64, 1),),
        generation=Generation(1, 0, 2, str(tmp_path / "rendezvous"), 300.0),  # the other never comes
        device="cpu",
        threads=1,
    )
    with group_profile._held_lifeline() as held:
        rank = group_profile._start(order, tmp_path / "rank-0", held)
    try:
        assert rank.wait(60) == ORPHAN_EXIT_CODE
    finally:
        rank.kill()
        rank.wait()
