"""Denoising steps timed over ranks that are real processes."""

from __future__ import annotations

import pytest

from spot_runtime.diffusion.group_profile import GroupPoint, group_latencies_s
from spot_runtime.errors import GroupError
from spot_runtime.messages import GenerationRequest, SamplingParams
from spot_runtime.types import JobId, Op, PolicyRef, RequestId, RunId

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
