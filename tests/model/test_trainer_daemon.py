"""The trainer's orders without a model that computes: what it leaves in the store, when it sleeps, what ends it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spot_runtime.client import job_spec
from spot_runtime.config import RunSettings
from spot_runtime.daemons.settings import TrainerSettings
from spot_runtime.daemons.trainer import Trainer
from spot_runtime.daemons.trainer_rank import OtherRanks
from spot_runtime.diffusion.adapter import ALPHA_KEY, adapter_digest
from spot_runtime.diffusion.ranks import Alone
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.errors import ClusterError, TrainingError, UnseededError
from spot_runtime.messages import EncodePrompts, JobSpec, Message, PromptsEncoded, TrainerFailed
from spot_runtime.store.checkpoints import trainer_key
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobId, Op, PolicyRef


class FakeModel:
    """In the place of GrpoTrainer; `error` is what encoding raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ranks = Alone()
        self.error = error
        self.slept = 0

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        if self.error is not None:
            raise self.error
        return [np.zeros((1, 2), dtype=np.float32) for _ in prompts]

    def sleep(self) -> None:
        self.slept += 1


def trainer_over(folder: Path, model: FakeModel, *, sleeps: bool = False) -> tuple[Trainer, list[Message]]:
    said: list[Message] = []
    settings = TrainerSettings(
        trainer_id="t", control_endpoint="tcp://127.0.0.1:1", store=folder.as_uri(), model="tiny", sleeps=sleeps
    )
    control: Any = SimpleNamespace(send=said.append, receive=lambda timeout_s: [])
    fake: Any = model
    return Trainer(settings, fake, control, OtherRanks(settings)), said


ORDER = EncodePrompts(job_id=JobId("encode-0"), prompts=(("embeds/a", "a red circle"),), order=3)


@pytest.mark.parametrize("error", [None, TrainingError("a prompt cannot be encoded")])
@pytest.mark.parametrize("sleeps", [False, True])
def test_after_each_order_the_device_is_the_rollout_workers_whatever_came_of_it(
    tmp_path: Path, sleeps: bool, error: Exception | None
) -> None:
    model = FakeModel(error)
    trainer, said = trainer_over(tmp_path, model, sleeps=sleeps)
    trainer._obey(ORDER)
    assert isinstance(said[-1], TrainerFailed if error else PromptsEncoded)
    assert model.slept == sleeps


@pytest.mark.parametrize("harm", ["gone", "altered"])
def test_an_embedding_that_is_gone_or_damaged_is_made_again(tmp_path: Path, harm: str) -> None:
    trainer, said = trainer_over(tmp_path, FakeModel())
    trainer._obey(ORDER)
    path = tmp_path / "embeds/a.obj"
    blob = path.read_bytes()
    path.unlink() if harm == "gone" else path.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))
    trainer._obey(ORDER)
    assert isinstance(said[-1], PromptsEncoded)
    assert TensorStore(tmp_path.as_uri()).get("embeds/a").tensors["embeds"].shape == (1, 2)


def test_damaged_weights_end_the_trainer_so_that_it_starts_anew(tmp_path: Path) -> None:
    trainer, said = trainer_over(tmp_path, FakeModel(UnseededError("1 tensors woke up other than they fell asleep")))
    with pytest.raises(ClusterError, match="other than they fell asleep; the trainer starts anew"):
        trainer._obey(ORDER)
    assert not any(isinstance(message, TrainerFailed) for message in said)


def job(store: str) -> JobSpec:
    settings = RunSettings(
        run_id="run-1",
        iterations=2,
        resolution=64,
        model="tiny",
        store=store,
        train_prompts_key="t",
        validation_prompts_key="v",
    )
    text = settings.model_dump_json()
    return job_spec(run_id="run-1", op=Op.TRAIN_STEP, iteration=0, policy=PolicyRef(), settings_json=text)


@pytest.mark.parametrize("keeps_average", [True, False])
def test_a_policy_and_its_moving_average_are_objects_of_their_own(tmp_path: Path, keeps_average: bool) -> None:
    trainer, _ = trainer_over(tmp_path, FakeModel())
    alpha = {ALPHA_KEY: np.ones(1, dtype=np.float32)}
    weights, average = ({"w": np.full(2, value, dtype=np.float32), **alpha} for value in (1.0, 2.0))
    state = TrainerState(weights, {}, {}, 4, 1, average if keeps_average else {})
    policy, averaged = trainer._write_policy(job(tmp_path.as_uri()), state)
    store = TensorStore(tmp_path.as_uri())
    assert adapter_digest(store.get(policy.key).tensors) == policy.digest == adapter_digest(weights)
    assert (policy.version, store.get(trainer_key(policy)).meta["next_iteration"]) == (1, "1")
    if keeps_average:
        assert adapter_digest(store.get(averaged.key).tensors) == averaged.digest == adapter_digest(average)
        assert averaged.version == 1
    else:
        assert averaged == PolicyRef()
        assert len(store.list("runs/run-1/policies")) == 1
