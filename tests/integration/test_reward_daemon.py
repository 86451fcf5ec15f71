"""The reward daemon loads what the run's stored rows name, at its start and never on request."""

from __future__ import annotations

from pathlib import Path

import httpx
import numpy as np
import pytest

from spot_runtime.daemons.process import spawn
from spot_runtime.daemons.reward import named_rewards
from spot_runtime.daemons.settings import RewardSettings
from spot_runtime.errors import InputError, RewardError
from spot_runtime.rewards.client import Item, RewardClient, Score, encode_png
from spot_runtime.rewards.prompts import GenevalRow, row_json
from spot_runtime.store.tensors import TensorStore

PLUG_IN = "spot_runtime.rewards.jpeg:compressibility"
DEADLINE_S = 60.0


def stored(tmp_path: Path, *rewards: str) -> RewardSettings:
    """Settings of a daemon whose store has one row a reward, and a second key without rows."""
    url = (tmp_path / "store").as_uri()
    rows = [GenevalRow(tag="text", include=(), prompt='"A"', reward=reward) for reward in rewards]
    TensorStore(url).put_bytes("rows", "".join(f"{row_json(row)}\n" for row in rows).encode())
    return RewardSettings(store=url, prompts_keys=("rows", "not-there", ""))


def item() -> Item:
    row = GenevalRow(tag="text", include=(), prompt='"A"', reward=PLUG_IN)
    return Item(id="a", row_json=row_json(row), png=encode_png(np.zeros((32, 32, 3), np.uint8)))


def test_rewards_are_named_by_rows_and_keys_without_rows_name_none(tmp_path: Path) -> None:
    assert named_rewards(stored(tmp_path, PLUG_IN, "", "jpeg", PLUG_IN)) == ("jpeg", PLUG_IN)
    assert named_rewards(RewardSettings()) == ()


def test_a_plug_in_that_rows_name_is_served_and_the_token_is_taken_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_REWARD_TOKEN", "s3cret")
    child = spawn("spot_runtime.daemons.reward", stored(tmp_path, PLUG_IN), log_path=tmp_path / "reward.log")
    try:
        url = child.ready(DEADLINE_S)["endpoint"]
        assert httpx.get(f"{url}/health", timeout=10).json()["datasets"][-1] == PLUG_IN
        client = RewardClient(url, retries=0)
        with pytest.raises(RewardError, match="status 401"):
            client.score([item()])
        client.close()
        client = RewardClient(url, retries=0, token="s3cret")
        (result,) = client.score([item()])
        assert isinstance(result, Score)
        assert 0 < result.reward < 1
        client.close()
    finally:
        child.terminate(10)


def test_a_reward_that_cannot_be_loaded_ends_the_daemon_with_one_line(tmp_path: Path) -> None:
    child = spawn("spot_runtime.daemons.reward", stored(tmp_path, "faces"), log_path=tmp_path / "reward.log")
    try:
        with pytest.raises(InputError, match="reward = 'faces': must be one of geneval, "):
            child.ready(DEADLINE_S)
    finally:
        child.terminate(10)
