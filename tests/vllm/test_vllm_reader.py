"""The vision-language reader against vLLM itself: a real server of a tiny model with random weights, on this machine's cores.

`make test-vllm` runs it, with vLLM in an environment of its own; SPOTLIGHT_VLLM_PYTHON names that environment's interpreter.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
import tiny_vlm
import uvicorn

from spot_runtime.errors import RewardError
from spot_runtime.rewards.client import Item, RewardClient, Score, ScoreError, encode_png
from spot_runtime.rewards.desk import ServiceLimits
from spot_runtime.rewards.engines.vlm import VlmReader
from spot_runtime.rewards.ocr import TextJudge
from spot_runtime.rewards.prompts import GenevalRow, row_json
from spot_runtime.rewards.scorer import JudgesByName
from spot_runtime.rewards.service import create_app

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(3000)]

PYTHON = os.environ.get("SPOTLIGHT_VLLM_PYTHON", "")
MODEL, KEY = "tiny-vlm", "k3y"
READY_DEADLINE_S = 900.0
ANSWER_DEADLINE_S = 300.0
MEMORY_GIB = "1"
ROW = GenevalRow(tag="text", include=(), prompt='a neon sign "Open"')
RNG = np.random.default_rng(0)
IMAGES = [RNG.integers(0, 256, (side, side + 16, 3), dtype=np.uint8) for side in (32, 64, 200)]


class Vllm:
    """`vllm serve` on a fixed port, so that who asks finds it again after a restart."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/v1"
        self._folder, self._log = folder, log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = f"--host 127.0.0.1 --port {self.port} --served-model-name {MODEL} --api-key {KEY} --dtype float32"
        options += " --max-model-len 1024 --max-num-batched-tokens 1024 --max-num-seqs 8 --enforce-eager"
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": MEMORY_GIB,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        environment.pop("PYTHONPATH", None)
        serve = [PYTHON, str(Path(__file__).with_name("serve.py")), "serve", str(self._folder), *options.split()]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(serve, stdout=log, stderr=log, env=environment, start_new_session=True)

    def wait_until_ready(self) -> None:
        until_s = time.monotonic() + READY_DEADLINE_S
        while time.monotonic() < until_s:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            try:
                if httpx.get(f"http://127.0.0.1:{self.port}/health", timeout=5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.5)
        pytest.fail(f"not ready within {READY_DEADLINE_S} s: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        """SIGKILL to the server and its engine."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(60)
            self._process = None

    def reader(self, *, model: str = MODEL, key: str = KEY, deadline_s: float = ANSWER_DEADLINE_S) -> VlmReader:
        return VlmReader(self.url, model, key, deadline_s=deadline_s)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vllm]:
    assert PYTHON, "SPOTLIGHT_VLLM_PYTHON must name the interpreter of an environment with vLLM: run make test-vllm"
    folder = tmp_path_factory.mktemp("vlm")
    tiny_vlm.build(folder / "model")
    vllm = Vllm(folder / "model", folder / "vllm.log")
    vllm.start()
    try:
        vllm.wait_until_ready()
        yield vllm
    finally:
        vllm.kill()


def test_images_of_any_size_are_read_and_the_same_way_again(vllm: Vllm) -> None:
    reader = vllm.reader()
    first = [reader(image) for image in IMAGES]
    assert all(first)
    assert [reader(image) for image in IMAGES] == first
    assert len(set(first)) == len(IMAGES), "the model did not see the images"


@pytest.mark.parametrize(
    ("options", "fault"),
    [({"model": "another"}, "status 404"), ({"key": "wrong"}, "status 401"), ({"deadline_s": 0.001}, "within 0.001 s")],
)
def test_errors_and_silence_of_the_server_are_reward_errors_and_it_goes_on(
    vllm: Vllm, options: dict[str, str | float], fault: str
) -> None:
    with pytest.raises(RewardError, match=fault):
        vllm.reader(**options)(IMAGES[0])  # type: ignore[arg-type]
    assert vllm.reader()(IMAGES[0])


def items() -> list[Item]:
    row = row_json(ROW)
    return [Item(str(n), row, encode_png(image), "deepseek_ocr-vlm") for n, image in enumerate(IMAGES)]


@pytest.fixture
def rewards(vllm: Vllm) -> Iterator[str]:
    """A reward service whose texts the model reads."""
    limits = ServiceLimits(threads=4, score_deadline_s=ANSWER_DEADLINE_S)
    app = create_app(JudgesByName({"deepseek_ocr-vlm": TextJudge(vllm.reader())}), limits)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(60)


def client(url: str, retries: int) -> RewardClient:
    return RewardClient(url, READY_DEADLINE_S, retries, request_timeout_s=2 * ANSWER_DEADLINE_S)


def test_a_server_that_is_killed_costs_no_reward_and_once_back_it_is_asked_again(vllm: Vllm, rewards: str) -> None:
    before = client(rewards, 0).score(items())
    assert all(isinstance(score, Score) and 0 <= score.reward <= 1 for score in before), before
    vllm.kill()
    down = client(rewards, 0).score(items())
    assert all(isinstance(score, ScoreError) and "no answer within" in score.error for score in down)
    vllm.start()
    patient: list[Score | ScoreError] = []
    asking = threading.Thread(target=lambda: patient.extend(client(rewards, 10_000).score(items())))
    asking.start()
    vllm.wait_until_ready()
    asking.join(READY_DEADLINE_S)
    assert [score.id for score in patient if isinstance(score, Score)] == ["0", "1", "2"], patient
