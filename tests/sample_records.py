"""Samples as a job's manifest lists them, for tests of every suite. Owns what a test does not care about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from spot_runtime.types import NodeId, PolicyRef, Pool, RequestId, SampleRecord


def sample_record(prompt_id: str = "p", seed: int = 1, reward: float = 1.0, **changed: Any) -> SampleRecord:
    """A scored sample without a trajectory that a spot node drew in one second, but for what is `changed`."""
    record = SampleRecord(
        request_id=RequestId(f"{prompt_id}.{seed}"),
        prompt_id=prompt_id,
        prompt="a red square",
        seed=seed,
        reward=reward,
        correct=reward >= 1,
        reason="",
        sample_key="",
        sample_digest="",
        embedding_key="",
        sde_window=(0, 2),
        policy=PolicyRef(),
        node_id=NodeId("n"),
        pool=Pool.SPOT,
        attempts=1,
        started_s=0.0,
        finished_s=1.0,
    )
    return replace(record, **changed)
