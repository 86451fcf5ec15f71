"""What a training job reads from the store: the policy with its optimizer, and the samples of its manifest. Never trains, never writes."""

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
from spot_runtime.errors import PolicyMismatchError, TrainingError
from spot_runtime.messages import JobSpec
from spot_runtime.store.checkpoints import STATE_BYTES_MAX, trainer_key
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import Manifest, PolicyRef, SampleRecord

READ_THREADS = 4


@dataclass(frozen=True)
class TrainingData:
    """All that a training step depends on. `state` is None for version 0."""

    settings: RunSettings
    state: TrainerState | None
    samples: tuple[TrainingSample, ...]


def read_training_data(store: TensorStore, job: JobSpec) -> TrainingData:
    """Raises PolicyMismatchError for samples or a state of another policy, TrainingError for an empty manifest, StoreError."""
    settings = RunSettings.parse_json(job.settings_json)
    return TrainingData(settings, _read_state(store, job.policy), _read_samples(store, job, settings.config.sampling))


def _read_state(store: TensorStore, policy: PolicyRef) -> TrainerState | None:
    if not policy.key:
        return None
    state = TrainerState.from_tensors(store.get(trainer_key(policy), bytes_max=STATE_BYTES_MAX).tensors)
    if adapter_digest(state.adapter) != policy.digest:
        raise PolicyMismatchError(f"trainer state of policy version {policy.version} holds another adapter")
    return state


def _read_samples(store: TensorStore, job: JobSpec, sampling: SamplingConfig) -> tuple[TrainingSample, ...]:
    manifest = msgspec.json.decode(store.get_bytes(job.manifest_key), type=Manifest)
    foreign = [sample.request_id for sample in manifest.samples if sample.policy != job.policy]
    if foreign:
        raise PolicyMismatchError(
            f"{len(foreign)} samples are not of policy version {job.policy.version}: {foreign[0]}"
        )
    if not manifest.samples:
        raise TrainingError(f"manifest {job.manifest_key} has no samples: must have at least one whole group")
    keys = sorted({sample.embedding_key for sample in manifest.samples})
    with ThreadPoolExecutor(READ_THREADS) as pool:
        embeds = dict(zip(keys, pool.map(lambda key: store.get(key).tensors["embeds"], keys), strict=True))
        explored = _explored(store, job.bank_key)
        read = partial(_read_sample, store, embeds=embeds, sampling=sampling, explored=explored)
        return tuple(pool.map(read, manifest.samples))


def _explored(store: TensorStore, bank_key: str) -> Set[str]:
    """Ids of the prompts whose seeds exploration chose."""
    bank = msgspec.json.decode(store.get_bytes(bank_key), type=dict[str, tuple[int, ...]]) if bank_key else {}
    return bank.keys()


def _read_sample(
    store: TensorStore,
    sample: SampleRecord,
    *,
    embeds: dict[str, np.ndarray],
    sampling: SamplingConfig,
    explored: Set[str],
) -> TrainingSample:
    stored = store.get(sample.sample_key, digest=sample.sample_digest)
    return TrainingSample(
        request_id=sample.request_id,
        prompt_id=sample.prompt_id,
        seed=sample.seed,
        reward=sample.reward,
        embeds=embeds[sample.embedding_key],
        window_latents=stored.tensors["window_latents"],
        log_probs=stored.tensors["log_probs"],
        sde_window=sample.sde_window,
        num_steps=sampling.num_steps,
        noise_level=sampling.noise_level,
        is_explored=sample.prompt_id in explored,
    )
