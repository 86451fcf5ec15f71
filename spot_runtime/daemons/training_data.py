"""What a training job reads from the store: the policy with its optimizer, and the samples of its manifest. Never trains, never writes.

What is gone or damaged is an error of its own for each kind of object, for each is made again by somebody else."""

from __future__ import annotations

from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import msgspec
import numpy as np

from spot_runtime.config import RunSettings, SamplingConfig
from spot_runtime.diffusion.adapter import adapter_digest
from spot_runtime.diffusion.batch import TrainingSample
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.errors import (
    CorruptObjectError,
    LostEmbeddingError,
    LostSamplesError,
    LostStateError,
    MissingObjectError,
    PolicyMismatchError,
    TrainingError,
)
from spot_runtime.messages import JobSpec
from spot_runtime.store.checkpoints import STATE_BYTES_MAX, trainer_key
from spot_runtime.store.tensors import StoredTensors, TensorStore
from spot_runtime.types import Manifest, PolicyRef, SampleRecord

READ_THREADS = 4
LOST = (MissingObjectError, CorruptObjectError)


@dataclass(frozen=True)
class TrainingData:
    """All that a training step depends on. `state` is None for version 0."""

    settings: RunSettings
    state: TrainerState | None
    samples: tuple[TrainingSample, ...]


def read_training_data(store: TensorStore, job: JobSpec) -> TrainingData:
    """Raises PolicyMismatchError for samples or a state of another policy, TrainingError for a manifest that is empty or none and for an
    object without its tensors, StoreError, and of that LostInputError's kinds for what is gone or damaged.
    """
    settings = RunSettings.parse_json(job.settings_json)
    return TrainingData(settings, _read_state(store, job.policy), _read_samples(store, job, settings.config.sampling))


def _read_state(store: TensorStore, policy: PolicyRef) -> TrainerState | None:
    if not policy.key:
        return None
    try:
        state = TrainerState.from_tensors(store.get(trainer_key(policy), bytes_max=STATE_BYTES_MAX).tensors)
    except LOST as error:
        raise LostStateError(f"trainer state: {error}") from error
    if adapter_digest(state.adapter) != policy.digest:
        raise PolicyMismatchError(f"trainer state of policy version {policy.version} holds another adapter")
    return state


def _read_samples(store: TensorStore, job: JobSpec, sampling: SamplingConfig) -> tuple[TrainingSample, ...]:
    manifest = _read_manifest(store, job.manifest_key)
    foreign = [sample.request_id for sample in manifest.samples if sample.policy != job.policy]
    if foreign:
        raise PolicyMismatchError(
            f"{len(foreign)} samples are not of policy version {job.policy.version}: {foreign[0]}"
        )
    if not manifest.samples:
        raise TrainingError(f"manifest {job.manifest_key} has no samples: must have at least one whole group")
    with ThreadPoolExecutor(READ_THREADS) as pool:
        embeds = _read_embeddings(store, {sample.embedding_key: sample.prompt for sample in manifest.samples}, pool)
        explored = _explored(store, job.bank_key)
        trails = list(pool.map(partial(_read_trail, store), manifest.samples))
    if lost := tuple(
        sample.request_id for sample, trail in zip(manifest.samples, trails, strict=True) if trail is None
    ):
        raise LostSamplesError(f"{len(lost)} of {len(trails)} samples are gone or damaged: {lost[0]}", lost)
    return tuple(
        _training_sample(sample, trail, embeds[sample.embedding_key], sampling, sample.prompt_id in explored)
        for sample, trail in zip(manifest.samples, trails, strict=True)
        if trail is not None
    )


def _read_manifest(store: TensorStore, key: str) -> Manifest:
    try:
        return msgspec.json.decode(store.get_bytes(key), type=Manifest)
    except LOST as error:
        raise LostSamplesError(f"manifest: {error}") from error
    except msgspec.MsgspecError as error:  # a reward that is no number is null in JSON
        raise TrainingError(f"manifest {key}: {error}") from error


def _read_embeddings(store: TensorStore, prompts: dict[str, str], pool: ThreadPoolExecutor) -> dict[str, np.ndarray]:
    """(text tokens, channels) of each, by key."""

    def read(key: str) -> np.ndarray | None:
        try:
            return _tensor(store.get(key), "embeds", f"embedding {key}")
        except LOST:
            return None

    found = dict(zip(prompts, pool.map(read, prompts), strict=True))
    if lost := tuple((key, prompts[key]) for key, embeds in found.items() if embeds is None):
        raise LostEmbeddingError(f"{len(lost)} prompt embeddings are gone or damaged: {lost[0][0]}", lost)
    return {key: embeds for key, embeds in found.items() if embeds is not None}


def _explored(store: TensorStore, bank_key: str) -> Set[str]:
    """Ids of the prompts whose seeds exploration chose."""
    try:
        bank = msgspec.json.decode(store.get_bytes(bank_key), type=dict[str, tuple[int, ...]]) if bank_key else {}
    except msgspec.MsgspecError as error:
        raise TrainingError(f"seed bank {bank_key}: {error}") from error
    return bank.keys()


def _tensor(stored: StoredTensors, name: str, what: str) -> np.ndarray:
    if name not in stored.tensors:
        raise TrainingError(f"{what}: has tensors {sorted(stored.tensors)}: must have {name!r}")
    return stored.tensors[name]


def _read_trail(store: TensorStore, sample: SampleRecord) -> StoredTensors | None:
    """None where it is gone, damaged or another."""
    try:
        return store.get(sample.sample_key, digest=sample.sample_digest)
    except LOST:
        return None


def _training_sample(
    sample: SampleRecord, trail: StoredTensors, embeds: np.ndarray, sampling: SamplingConfig, is_explored: bool
) -> TrainingSample:
    what = f"sample {sample.request_id} of prompt {sample.prompt_id}"
    return TrainingSample(
        request_id=sample.request_id,
        prompt_id=sample.prompt_id,
        seed=sample.seed,
        reward=sample.reward,
        embeds=embeds,
        window_latents=_tensor(trail, "window_latents", what),
        log_probs=_tensor(trail, "log_probs", what),
        sde_window=sample.sde_window,
        num_steps=sampling.num_steps,
        noise_level=sampling.noise_level,
        is_explored=is_explored,
    )
