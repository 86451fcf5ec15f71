"""The trainer's orders without a model that computes: what it leaves in the store, when it sleeps, what ends it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import structs
from sample_records import sample_record

from spot_runtime.client import job_spec
from spot_runtime.config import RunSettings
from spot_runtime.daemons import trainer as trainer_module
from spot_runtime.daemons.settings import TrainerSettings
from spot_runtime.daemons.trainer import Trainer, TrainingRecord
from spot_runtime.daemons.trainer_rank import OtherRanks, agreed
from spot_runtime.daemons.training_data import read_training_data
from spot_runtime.diffusion.adapter import ALPHA_KEY, adapter_digest
from spot_runtime.diffusion.ranks import Alone
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.trainer import TrainingOutcome, TrainingSample
from spot_runtime.errors import ClusterError, PolicyMismatchError, TrainingError, UnseededError
from spot_runtime.messages import (
    EncodePrompts,
    JobSpec,
    Message,
    PromptsEncoded,
    StartTraining,
    TrainerFailed,
    TrainerHeartbeat,
    TrainingFinished,
)
from spot_runtime.store.checkpoints import trainer_key
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobId, Manifest, Op, PolicyRef, RequestId


class FakeModel:
    """In the place of GrpoTrainer; `error` is what encoding raises."""

    def __init__(self, error: Exception | None = None) -> None:
        self.ranks = Alone()
        self.error = error
        self.slept = self.trained = 0
        self.encoded: list[str] = []

    def encode(self, prompts: Sequence[str]) -> list[np.ndarray]:
        if self.error is not None:
            raise self.error
        self.encoded += prompts
        return [np.zeros((1, 2), dtype=np.float32) for _ in prompts]

    def train(self, state: TrainerState | None, samples: Sequence[TrainingSample], **rest: object) -> TrainingOutcome:
        """Another policy and another loss each time."""
        self.trained += 1
        weights = {"w": np.full(2, self.trained, np.float32), ALPHA_KEY: np.ones(1, np.float32)}
        return TrainingOutcome(TrainerState(weights, {}, {}, 4, 1), {"loss": float(self.trained)})

    def sleep(self) -> None:
        self.slept += 1


def trainer_over(
    folder: Path, model: FakeModel, *, sleeps: bool = False, heartbeat_s: float = 1.0
) -> tuple[Trainer, list[Message]]:
    said: list[Message] = []
    settings = TrainerSettings(
        trainer_id="t",
        control_endpoint="tcp://127.0.0.1:1",
        store=folder.as_uri(),
        model="tiny",
        sleeps=sleeps,
        heartbeat_s=heartbeat_s,
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


@pytest.mark.parametrize("how", ["gone", "altered"])
def test_an_embedding_that_is_gone_or_damaged_is_made_again(tmp_path: Path, how: str) -> None:
    trainer, said = trainer_over(tmp_path, FakeModel())
    trainer._obey(ORDER)
    harm(tmp_path, "embeds/a", how)
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


@pytest.mark.parametrize("which", [0, 1])
def test_a_policy_or_average_that_is_gone_is_stored_again_from_the_trainers_state(tmp_path: Path, which: int) -> None:
    trainer, said = trainer_over(tmp_path, FakeModel())
    alpha = {ALPHA_KEY: np.ones(1, dtype=np.float32)}
    weights, average = ({"w": np.full(2, value, dtype=np.float32), **alpha} for value in (1.0, 2.0))
    lost = trainer._write_policy(job(tmp_path.as_uri()), TrainerState(weights, {}, {}, 4, 1, average))[which]
    store = TensorStore(tmp_path.as_uri())
    store.delete(lost.key)
    trainer._obey(EncodePrompts(job_id=JobId("encode-0"), prompts=(), policy=lost))
    assert isinstance(said[-1], PromptsEncoded)
    again = store.get(lost.key)
    assert adapter_digest(again.tensors) == lost.digest
    assert again.meta == {"policy_version": "1", "policy_digest": lost.digest}


def test_a_policy_that_is_gone_with_its_state_is_named_in_one_line(tmp_path: Path) -> None:
    trainer, said = trainer_over(tmp_path, FakeModel())
    gone = PolicyRef(1, "runs/run-1/policies/1-abc", "abc")
    trainer._obey(EncodePrompts(job_id=JobId("encode-0"), prompts=(), policy=gone))
    assert isinstance(said[-1], TrainerFailed)
    assert said[-1].error_class == "LostStateError"
    assert said[-1].error == "runs/run-1/policies/1-abc: gone, and no trainer state in runs/run-1/trainer holds it"


# ---- what a training step reads, and what the store may have lost of it -----------------------------------------------------------

POLICY = PolicyRef(0, "", "")
SAMPLES = [f"rollout-0.p{prompt}.{place}" for prompt in range(2) for place in range(2)]


def sample_key(request_id: str) -> str:
    return f"runs/run-1/samples/{request_id}"


def rolled_out(folder: Path) -> JobSpec:
    """Two prompts with two samples each, whole in the store; the training job that reads them."""
    store, records = TensorStore(folder.as_uri()), []
    for request_id in SAMPLES:
        prompt_id = request_id.split(".")[1]
        store.put(f"embeds/{prompt_id}", {"embeds": np.zeros((1, 2), dtype=np.float32)})
        trail = {"window_latents": np.zeros((2, 4, 2), np.float32), "log_probs": np.zeros(1, np.float32)}
        records.append(
            sample_record(
                prompt_id,
                reward=0.5,
                request_id=RequestId(request_id),
                prompt=f"prompt {prompt_id}",
                correct=True,
                sample_key=sample_key(request_id),
                sample_digest=store.put(sample_key(request_id), trail),
                embedding_key=f"embeds/{prompt_id}",
                sde_window=(0, 1),
                policy=POLICY,
            )
        )
    manifest = Manifest(
        job_id=JobId("rollout-0"),
        op=Op.ROLLOUT,
        iteration=0,
        policy=POLICY,
        samples=tuple(records),
        failed_prompt_ids=(),
    )
    store.put_bytes("runs/run-1/manifests/rollout-0.json", msgspec.json.encode(manifest))
    return structs.replace(job(folder.as_uri()), manifest_key="runs/run-1/manifests/rollout-0.json")


def harm(folder: Path, key: str, how: str) -> None:
    path = folder / f"{key}.obj"
    blob = path.read_bytes()
    path.unlink() if how == "gone" else path.write_bytes(blob[:-1] + bytes([blob[-1] ^ 1]))


@pytest.mark.parametrize("how", ["gone", "altered"])
def test_lost_samples_are_named_all_of_them(tmp_path: Path, how: str) -> None:
    order = StartTraining(job=rolled_out(tmp_path), order=1)
    lost = [SAMPLES[0], SAMPLES[3]]
    for request_id in lost:
        harm(tmp_path, sample_key(request_id), how)
    trainer, said = trainer_over(tmp_path, FakeModel())
    trainer._obey(order)
    failed = said[-1]
    assert isinstance(failed, TrainerFailed)
    assert (failed.error_class, list(failed.lost)) == ("LostSamplesError", lost)
    assert failed.error == f"2 of 4 samples are gone or damaged: {lost[0]}"


@pytest.mark.parametrize("how", ["gone", "altered"])
def test_a_lost_manifest_is_told_from_a_lost_sample(tmp_path: Path, how: str) -> None:
    order = StartTraining(job=rolled_out(tmp_path), order=1)
    harm(tmp_path, order.job.manifest_key, how)
    trainer, said = trainer_over(tmp_path, FakeModel())
    trainer._obey(order)
    failed = said[-1]
    assert isinstance(failed, TrainerFailed)
    assert (failed.error_class, failed.lost) == ("LostSamplesError", ())
    assert failed.error.startswith("manifest: ")


@pytest.mark.parametrize("how", ["gone", "altered"])
def test_a_lost_embedding_is_encoded_again_and_training_goes_on(tmp_path: Path, how: str) -> None:
    spec = rolled_out(tmp_path)
    harm(tmp_path, "embeds/p1", how)
    model = FakeModel()
    trainer, _ = trainer_over(tmp_path, model, sleeps=True)
    data = trainer._read(spec)
    assert [sample.request_id for sample in data.samples] == SAMPLES
    assert model.encoded == ["prompt p1"]
    assert model.slept == 1, "the encoder leaves the device before training"
    assert TensorStore(tmp_path.as_uri()).get("embeds/p1").tensors["embeds"].shape == (1, 2)


def test_a_lost_trainer_state_is_an_error_of_its_own(tmp_path: Path) -> None:
    policy = PolicyRef(1, "runs/run-1/policies/1-abc", "abc")
    order = StartTraining(job=structs.replace(rolled_out(tmp_path), policy=policy), order=1)
    trainer, said = trainer_over(tmp_path, FakeModel())
    trainer._obey(order)
    assert isinstance(said[-1], TrainerFailed)
    assert said[-1].error_class == "LostStateError"


def changed(folder: Path, spec: JobSpec, **changes: object) -> JobSpec:
    """The job with the first record of its manifest changed."""
    store = TensorStore(folder.as_uri())
    manifest = msgspec.json.decode(store.get_bytes(spec.manifest_key), type=Manifest)
    first, *others = manifest.samples
    odd = dataclasses.replace(manifest, samples=(dataclasses.replace(first, **changes), *others))  # type: ignore[arg-type]
    store.put_bytes("odd.json", msgspec.json.encode(odd))
    return structs.replace(spec, manifest_key="odd.json")


def test_what_is_read_is_what_the_manifest_names(tmp_path: Path) -> None:
    """In its order, with the run's seed bank saying whose seeds exploration chose."""
    store = TensorStore(tmp_path.as_uri())
    store.put_bytes("bank", msgspec.json.encode({"p1": [1, 2]}))
    spec = structs.replace(changed(tmp_path, rolled_out(tmp_path), reward=0.75, seed=9), bank_key="bank")
    data = read_training_data(store, spec)
    assert data.state is None
    assert [(s.request_id, s.reward, s.seed, s.is_explored) for s in data.samples] == [
        (SAMPLES[0], 0.75, 9, False),
        (SAMPLES[1], 0.5, 1, False),
        (SAMPLES[2], 0.5, 1, True),
        (SAMPLES[3], 0.5, 1, True),
    ]
    sample = data.samples[0]
    assert (sample.window_latents.shape, sample.log_probs.shape, sample.embeds.shape) == ((2, 4, 2), (1,), (1, 2))
    assert (sample.sde_window, sample.num_steps) == ((0, 1), data.settings.config.sampling.num_steps)


def test_a_sample_of_another_policy_version_is_refused_by_name(tmp_path: Path) -> None:
    spec = changed(tmp_path, rolled_out(tmp_path), policy=PolicyRef(3, "runs/run-1/policies/3-abc", "abc"))
    with pytest.raises(PolicyMismatchError, match=rf"^1 samples are not of policy version 0: {SAMPLES[0]}$"):
        read_training_data(TensorStore(tmp_path.as_uri()), spec)


def test_a_trainer_state_with_another_adapter_is_refused(tmp_path: Path) -> None:
    store, policy = TensorStore(tmp_path.as_uri()), PolicyRef(1, "runs/run-1/policies/1-abc", "abc")
    weights = {"w": np.ones(2, np.float32), ALPHA_KEY: np.ones(1, np.float32)}
    store.put(trainer_key(policy), TrainerState(weights, {}, {}, 4, 1).tensors())
    with pytest.raises(PolicyMismatchError, match="trainer state of policy version 1 holds another adapter"):
        read_training_data(store, structs.replace(rolled_out(tmp_path), policy=policy))


def test_a_manifest_without_samples_or_with_a_reward_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    store, spec = TensorStore(tmp_path.as_uri()), rolled_out(tmp_path)
    manifest = msgspec.json.decode(store.get_bytes(spec.manifest_key), type=Manifest)
    store.put_bytes("empty.json", msgspec.json.encode(dataclasses.replace(manifest, samples=())))
    with pytest.raises(
        TrainingError, match=r"^manifest empty\.json has no samples: must have at least one whole group"
    ):
        read_training_data(store, structs.replace(spec, manifest_key="empty.json"))
    with pytest.raises(TrainingError, match=r"^manifest odd\.json: Expected `float`, got `null` - at `\$\.samples"):
        read_training_data(store, changed(tmp_path, spec, reward=float("nan")))


@pytest.mark.parametrize("lacking", ["log_probs", "window_latents", "embeds"])
def test_an_object_without_a_tensor_fails_the_job_and_not_the_trainer(tmp_path: Path, lacking: str) -> None:
    store, spec = TensorStore(tmp_path.as_uri()), rolled_out(tmp_path)
    there = {"window_latents": np.zeros((2, 4, 2), np.float32), "log_probs": np.zeros(1, np.float32)}
    there.pop(lacking, None)
    digest = store.put("odd", there)
    odd = {"embedding_key": "odd"} if lacking == "embeds" else {"sample_key": "odd", "sample_digest": digest}
    order = StartTraining(job=changed(tmp_path, spec, **odd), order=1)
    trainer, said = trainer_over(tmp_path, FakeModel())
    trainer._obey(order)
    assert isinstance(said[-1], TrainerFailed)
    assert said[-1].error_class == "TrainingError"
    what = "embedding odd" if lacking == "embeds" else f"sample {SAMPLES[0]} of prompt p0"
    assert said[-1].error == f"{what}: has tensors {sorted(there)}: must have {lacking!r}"


def test_reading_and_storing_of_any_length_are_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lasts until its heartbeat was heard."""
    trainer, said = trainer_over(tmp_path, FakeModel(), heartbeat_s=0.05)

    def until_heard(message: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def slow(*arguments: Any) -> Any:
            limit_s = time.monotonic() + 30
            while not any(isinstance(each, TrainerHeartbeat) and each.message == message for each in said):
                assert time.monotonic() < limit_s, f"nothing was heard while {message}"
                time.sleep(0.005)
            return work(*arguments)

        return slow

    read = until_heard("training data is read", read_training_data)
    monkeypatch.setattr(trainer_module, "read_training_data", read)
    monkeypatch.setattr(trainer, "_write_policy", until_heard("policy is stored", trainer._write_policy))
    trainer._obey(StartTraining(job=rolled_out(tmp_path), order=1))
    assert isinstance(said[-1], TrainingFinished)


def test_an_order_that_was_carried_out_is_answered_with_its_recorded_result(tmp_path: Path) -> None:
    order = StartTraining(job=rolled_out(tmp_path), order=1)
    trainer, said = trainer_over(tmp_path, FakeModel())
    trainer._obey(order)
    trainer._obey(structs.replace(order, order=2))
    first, again = said[-3], said[-1]
    assert isinstance(first, TrainingFinished)
    assert again == structs.replace(first, order=2)
    assert (first.policy.version, first.metrics["loss"]) == (1, 1.0)


class Ranks:
    """Two ranks of which the other one failed, or did not."""

    rank, size, mesh = 0, 2, None

    def __init__(self, *, other_failed: bool) -> None:
        self.other = float(other_failed)
        self.asked: list[float] = []

    def max(self, value: float) -> float:
        self.asked.append(value)
        return max(value, self.other)


@pytest.mark.parametrize("error", [TrainingError("half a group"), KeyError("log_probs")])
def test_a_rank_that_cannot_read_says_so_to_the_others_before_it_raises(error: Exception) -> None:
    ranks: Any = Ranks(other_failed=False)

    def read() -> int:
        raise error

    with pytest.raises(type(error)) as caught:
        agreed(ranks, read)
    assert caught.value is error
    assert ranks.asked == [1.0]


def test_what_another_rank_could_not_read_fails_this_one_too() -> None:
    failed: Any = Ranks(other_failed=True)
    with pytest.raises(TrainingError, match="another rank of the trainer could not read the training data"):
        agreed(failed, lambda: 7)
    whole: Any = Ranks(other_failed=False)
    assert agreed(whole, lambda: 7) == 7


@pytest.mark.parametrize("what", ["trainer", "policies"])
def test_a_result_whose_policy_is_gone_does_not_count(tmp_path: Path, what: str) -> None:
    trainer, _ = trainer_over(tmp_path, FakeModel())
    weights = {"w": np.ones(2, dtype=np.float32), ALPHA_KEY: np.ones(1, dtype=np.float32)}
    policy, _ = trainer._write_policy(job(tmp_path.as_uri()), TrainerState(weights, {}, {}, 4, 1, {}))
    store = TensorStore(tmp_path.as_uri())
    store.put_bytes("record", msgspec.json.encode(TrainingRecord(policy=policy, metrics={})))
    assert trainer._recorded("record") is not None
    store.delete(policy.key.replace("policies", what))
    assert trainer._recorded("record") is None


def test_what_is_trained_again_for_a_policy_that_is_gone_is_recorded_in_the_place_of_that(tmp_path: Path) -> None:
    """Else each later order would train again, to another policy each time."""
    order, model = StartTraining(job=rolled_out(tmp_path), order=1), FakeModel()
    trainer, said = trainer_over(tmp_path, model)
    trainer._obey(order)
    first = said[-1]
    assert isinstance(first, TrainingFinished)
    TensorStore(tmp_path.as_uri()).delete(trainer_key(first.policy))
    for _ in range(2):
        trainer._obey(order)
        again = said[-1]
        assert isinstance(again, TrainingFinished)
        assert again.policy.digest != first.policy.digest
    assert model.trained == 2
