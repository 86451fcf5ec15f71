from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from spot_runtime.daemons.process import Child, spawn
from spot_runtime.daemons.settings import RewardSettings
from spot_runtime.errors import PortInUseError

DEADLINE_S = 60.0


@pytest.fixture
def reward(tmp_path: Path) -> Iterator[Child]:
    child = spawn("spot_runtime.daemons.reward", RewardSettings(), log_path=tmp_path / "reward.log")
    yield child
    child.kill()


def test_the_reward_daemon_names_its_url_answers_there_and_ends_in_order(reward: Child) -> None:
    url = reward.ready(DEADLINE_S)["endpoint"]
    assert url.startswith("http://127.0.0.1:")
    assert httpx.get(f"{url}/health", timeout=10).json()["status"] == "ok"
    assert reward.terminate(10) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", timeout=10)


def test_a_taken_port_ends_a_second_reward_daemon_with_one_error(reward: Child, tmp_path: Path) -> None:
    port = int(reward.ready(DEADLINE_S)["endpoint"].rpartition(":")[2])
    second = spawn("spot_runtime.daemons.reward", RewardSettings(port=port), log_path=tmp_path / "second.log")
    with pytest.raises(PortInUseError, match=f"^127.0.0.1:{port} is taken"):
        second.ready(DEADLINE_S)
    assert second.terminate(10) == PortInUseError.exit_code
    assert "Traceback" not in (tmp_path / "second.log").read_text()
