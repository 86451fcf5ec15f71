"""Fixtures of the Flyte tests: a model folder that passes every check, a fake control daemon, a working directory of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_control import FakeControl
from safetensors.numpy import save

from tasks import daemon_task, local_run


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A pipeline folder for 64 px with every part that is checked, and no weights worth the name."""
    folder = tmp_path_factory.mktemp("model")
    files = {
        "model_index.json": {"_class_name": "QwenImagePipeline", "_default_resolution": 64},
        "transformer/config.json": {"in_channels": 16},
        "vae/config.json": {"z_dim": 4, "temperal_downsample": [False, True]},
        "scheduler/scheduler_config.json": {},
        "text_encoder/config.json": {},
        "tokenizer/tokenizer_config.json": {},
        "tokenizer/tokenizer.json": {},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content))
    for name in ("transformer/diffusion_pytorch_model", "vae/diffusion_pytorch_model", "text_encoder/model"):
        (folder / f"{name}.safetensors").write_bytes(save({}))
    return str(folder)


@pytest.fixture
def control(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeControl]:
    """Jobs end at once; a test may slow some down or have them fail. What fails is tried again at once."""
    monkeypatch.setattr(daemon_task, "RETRY_AFTER_S", 0.0)
    with FakeControl() as fake:
        yield fake


@pytest.fixture
def embedded(control: FakeControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeControl:
    """The fake stands in for the embedded cluster of local runs, which leave their outputs under tmp_path."""
    monkeypatch.delenv("SPOTLIGHT_ENDPOINT", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_run, "embed", lambda settings, folder: control)
    return control
