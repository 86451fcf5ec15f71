"""What a worker calls to make samples, and the default engine on diffusers models. Owns the denoise loop's arithmetic, one step at a time.

Latents come in and go out with every call: the engine keeps no step counter and nothing of a request that the caller could lose with it.
It never schedules, never talks to a network, never loads the text encoder.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from spot_runtime.diffusion.adapter import Adapter, adapter_digest, adapter_modules, adapter_rank
from spot_runtime.diffusion.attention import attend_masked, install_attention
from spot_runtime.diffusion.cache import CachedSample, StepCacheMaker, predict_cached_velocity, teacache
from spot_runtime.diffusion.frame import FrameDecoder
from spot_runtime.diffusion.geometry import LatentGeometry, latent_geometry, model_folder, read_json
from spot_runtime.diffusion.invariance import ROWS_MIN, make_batch_invariant
from spot_runtime.diffusion.offload import BlockOffload
from spot_runtime.diffusion.parts import (
    TRANSFORMER,
    VAE,
    base_tensors,
    empty_parts,
    install,
    load_parts,
    transformer_blocks,
    weight_spec,
)
from spot_runtime.diffusion.policy_slot import make_policy_slot
from spot_runtime.diffusion.schedule import schedule_digest, sigmas
from spot_runtime.diffusion.sleep import Sleeper
from spot_runtime.diffusion.transformer import predict_velocity
from spot_runtime.diffusion.weights import is_whole
from spot_runtime.errors import GroupError, InputError, PolicyMismatchError, UnseededError
from spot_runtime.messages import RESIDENT_POLICIES_MAX, GenerationRequest, StepItem
from spot_runtime.parallel.degree import check_degree
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.parallel.ulysses import TokenShards
from spot_runtime.parallel.weights import Weights
from spot_runtime.rl import noise
from spot_runtime.rl.sde import STEPS, ode_step
from spot_runtime.types import Op, PolicyRef


@dataclass(frozen=True)
class DenoisedStep:
    """Latents [L, C] fp32 after one denoising step, their log-prob where the step was stochastic, and whether it took a full forward."""

    latents: np.ndarray
    log_prob: float | None
    is_full: bool = True


class RolloutEngine(Protocol):
    """A model behind slots (docs/architecture.md). Every call may raise SpotlightError; the engine stays usable after one."""

    @property
    def weights(self) -> Weights:
        """The base model's, by which a worker that has them seeds one that has not. Unseeded, every other call raises UnseededError."""

    def set_group(self, group: SequenceGroup | None) -> None:
        """The ranks that denoise together from the next denoising step on; None: this one alone.

        Weights, policies and requests stay. Each rank of a group gets the same calls with the same arguments, and each gives the same
        answers. Raises InputError where the model cannot be spread over so many. Where `denoise` raises GroupError nothing is lost: the
        same denoising step is taken again under another group.
        """

    def load_policy(self, policy: PolicyRef, adapter: Adapter | None) -> None:
        """Makes `policy` resident: None for the base model, else its LoRA. Raises PolicyMismatchError where a tensor does not bind."""

    def admit(self, slot: int, request: GenerationRequest, embeds: np.ndarray) -> None:
        """Gives `slot` to a request with its prompt embedding [text tokens, width]."""

    def initial_latents(self, slot: int) -> np.ndarray:
        """x_T of the slot's request: [L, C] fp32."""

    def schedule_digest(self, slot: int) -> str:
        """SHA-256 of the noise levels that the slot's request steps through."""

    def denoise(self, items: Sequence[StepItem], latents: Sequence[np.ndarray]) -> list[DenoisedStep]:
        """One denoising step for each item, in one forward for each resolution among them.

        Items may stand at different denoising steps but share a policy. Latents go in and come out whole at any degree, so a request is
        all there is to take along from one group, or one worker, to the next.
        """

    def full_steps(self, slot: int) -> int:
        """Full forwards that the slot's request took since it was admitted."""

    def decode(self, slots: Sequence[int], latents: Sequence[np.ndarray]) -> list[np.ndarray]:
        """The finished images [H, W, 3] uint8 of slots that share a geometry."""

    def release(self, slot: int) -> None:
        """Forgets the slot's request; a free slot is no error."""

    def sleep(self) -> None:
        """Moves the weights to host memory and gives theirs on the device back. Group, policies and slots stay; until `wake` nothing is
        bound, denoised or decoded (UnseededError). Asleep already is no error.
        """

    def wake(self) -> None:
        """Moves them back. Raises UnseededError where they are not what they were: the engine must not be used again then. Where the device
        has no room yet it may be called again. Awake already is no error.
        """

    def close(self) -> None:
        """Frees the model. No other call may follow."""


@dataclass
class _Occupant:
    """What a slot holds; `cache` is None for a request without a step cache, `full_steps` counts its forwards."""

    request: GenerationRequest
    embeds: Tensor
    geometry: LatentGeometry
    sigmas: Tensor
    cache: CachedSample | None
    full_steps: int = 0


class DiffusersEngine:
    """RolloutEngine on the diffusers transformer and VAE of one device.

    On the CPU in fp32 a sample is the same to the bit whatever shares its batches, so also however often it is interrupted and resumed; the
    thread count is set for the whole process. Raises ModelError for a model folder that cannot be loaded.

    With `is_seeded` False it reads no weights and takes no memory of the device before `engine.weights` is seeded:

        engine.weights.seed(*SharedWeights(fd).read())      # from memory that a worker of this machine published

    With `offload_alone` it keeps the transformer's blocks in host memory while it denoises without a group: slower, for a GPU that holds
    the weights and a rank's share of the activations but not all of these.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        threads: int = 1,
        dtype: str = "float32",
        step_cache: StepCacheMaker = teacache,
        is_seeded: bool = True,
        offload_alone: bool = False,
    ) -> None:
        if device == "cpu":
            torch.set_num_threads(threads)
        self._folder = model_folder(model)
        self._device = torch.device(device)
        self._step_cache = step_cache
        precision = getattr(torch, dtype)
        make = partial(load_parts, device=self._device) if is_seeded else empty_parts
        self._parts = make(self._folder, dtype=precision)
        self._transformer: Any = self._parts[TRANSFORMER]
        self._is_batch_invariant = device == "cpu" and precision == torch.float32
        if self._is_batch_invariant:
            self._shards = make_batch_invariant(self._transformer)
        else:
            self._shards = TokenShards()
            install_attention(self._transformer, self._shards, attend_masked)
        self._decoder = FrameDecoder(self._parts[VAE])
        self.weights = Weights(weight_spec(self._parts), self._device, partial(install, self._parts))
        if is_seeded:
            self.weights.seed(base_tensors(self._parts))
        self._sleeper = Sleeper([self._parts], self._device, self._relocate)
        self._offload = BlockOffload(transformer_blocks(self._parts), self._device)
        self._offload_alone = offload_alone
        self._scheduler_config = read_json(self._folder, "scheduler/scheduler_config.json")
        self._schedules: dict[tuple[int, int], Tensor] = {}
        self._policies: OrderedDict[PolicyRef, Adapter | None] = OrderedDict()
        self._policy_slot = make_policy_slot(self._transformer)
        self._bound: PolicyRef | None = None
        self._slots: dict[int, _Occupant] = {}

    def set_group(self, group: SequenceGroup | None) -> None:
        if group is not None:
            check_degree(group.degree, self._transformer.config.num_attention_heads)
        self._shards.group = group

    def load_policy(self, policy: PolicyRef, adapter: Adapter | None) -> None:
        """As the protocol; binds it at once, so that an adapter that does not fit is refused before any request is."""
        self._require_awake()
        _check_policy(policy, adapter)
        self._bind(policy, adapter)
        self._policies[policy] = adapter
        self._policies.move_to_end(policy)
        while len(self._policies) > RESIDENT_POLICIES_MAX:
            self._policies.popitem(last=False)

    def admit(self, slot: int, request: GenerationRequest, embeds: np.ndarray) -> None:
        self.release(slot)
        params = request.params
        width = self._transformer.config.joint_attention_dim
        if embeds.ndim != 2 or embeds.shape[1] != width or not len(embeds):
            raise InputError(f"embeds of {request.request_id} have shape {embeds.shape}: must be (>= 1, {width})")
        _check_cache(request)
        start, stop = request.sde_window
        if not 0 <= start <= stop <= max(params.num_steps - 1, 0):
            raise InputError(
                f"sde_window = {request.sde_window}: must lie in 0..{params.num_steps - 1}, no SDE on the last step"
            )
        if params.sde not in STEPS:
            raise InputError(f"sde = {params.sde!r}: must be one of {sorted(STEPS)}")
        geometry = latent_geometry(self._folder, params.height, params.width)
        schedule = self._schedule(params.num_steps, geometry.tokens)
        text = torch.from_numpy(np.ascontiguousarray(embeds)).to(self._device)
        cache = CachedSample.of(self._step_cache(params), params) if params.cache_threshold else None
        self._slots[slot] = _Occupant(request, text, geometry, schedule, cache)

    def initial_latents(self, slot: int) -> np.ndarray:
        occupant = self._slots[slot]
        geometry = occupant.geometry
        return noise.initial_latents(occupant.request.seed, geometry.tokens, geometry.channels).numpy()

    def schedule_digest(self, slot: int) -> str:
        return schedule_digest(self._slots[slot].sigmas)

    def denoise(self, items: Sequence[StepItem], latents: Sequence[np.ndarray]) -> list[DenoisedStep]:
        self._require_awake()
        occupants = [self._slots[item.slot] for item in items]
        policy = _shared_policy(occupants)
        self._place_blocks(in_host_memory=self._offload_alone and self._shards.group is None)
        if self._shards.group is not None:
            self._shards.group.agree("denoise", _command_number(items, occupants))
        self._activate(policy)
        before = [(o, copy(o.cache), o.full_steps) for o in occupants]
        try:
            return self._denoise_buckets(occupants, [item.denoising_step for item in items], latents)
        except GroupError:
            for occupant, cache, full_steps in before:  # the step is taken again, and must come out the same
                occupant.cache, occupant.full_steps = cache, full_steps
            raise

    def _denoise_buckets(
        self, occupants: Sequence[_Occupant], steps: Sequence[int], latents: Sequence[np.ndarray]
    ) -> list[DenoisedStep]:
        """One forward for each resolution."""
        done: dict[int, DenoisedStep] = {}
        for rows in _buckets(occupants):
            bucket = self._denoise([occupants[b] for b in rows], [steps[b] for b in rows], [latents[b] for b in rows])
            done.update(zip(rows, bucket, strict=True))
        return [done[b] for b in range(len(occupants))]

    @torch.inference_mode()
    def _denoise(
        self, occupants: Sequence[_Occupant], steps: Sequence[int], latents: Sequence[np.ndarray]
    ) -> list[DenoisedStep]:
        x = torch.from_numpy(np.stack(latents).astype(np.float32, copy=False)).to(self._device)
        sigma = torch.stack([o.sigmas[i] for o, i in zip(occupants, steps, strict=True)])
        sigma_next = torch.stack([o.sigmas[i + 1] for o, i in zip(occupants, steps, strict=True)])
        velocity, is_full = self._velocity(occupants, steps, x, sigma)
        after = ode_step(velocity, x, sigma, sigma_next)
        log_probs = _stochastic_rows(occupants, steps, velocity, x, after)
        for occupant, full in zip(occupants, is_full, strict=True):
            occupant.full_steps += full
        if self._shards.group is not None:
            self._shards.group.synchronize()
        rows = after.cpu().numpy()
        return [DenoisedStep(row, log_probs.get(b), is_full[b]) for b, row in enumerate(rows)]

    def _velocity(
        self, occupants: Sequence[_Occupant], steps: Sequence[int], x: Tensor, sigma: Tensor
    ) -> tuple[Tensor, list[bool]]:
        """v [B, L, C] and which rows took a forward."""
        grid = occupants[0].geometry.grid
        texts, caches = [o.embeds for o in occupants], [o.cache for o in occupants]
        width = ROWS_MIN if self._is_batch_invariant else 1
        if not any(caches):
            velocity = predict_velocity(self._transformer, x, sigma, texts, grid, text_tokens_min=width)
            return velocity, [True] * len(caches)
        return predict_cached_velocity(
            self._transformer, x, sigma, texts, grid, caches, steps, shards=self._shards, text_tokens_min=width
        )

    def full_steps(self, slot: int) -> int:
        return self._slots[slot].full_steps

    def decode(self, slots: Sequence[int], latents: Sequence[np.ndarray]) -> list[np.ndarray]:
        self._require_awake()
        grids = {self._slots[slot].geometry.grid for slot in slots}
        assert len(grids) == 1, f"one batch, one resolution: got grids {sorted(grids)}"
        x = torch.from_numpy(np.stack(latents).astype(np.float32, copy=False)).to(self._device)
        return list(self._decoder.decode(x, grids.pop()))

    def release(self, slot: int) -> None:
        self._slots.pop(slot, None)

    def sleep(self) -> None:
        self.weights.require_seeded()
        if self._sleeper.is_asleep:
            return
        self._place_blocks(in_host_memory=False)
        self._bound = None
        self._policy_slot.release()
        self._sleeper.sleep()

    def wake(self) -> None:
        self.weights.require_seeded()
        self._sleeper.wake()

    def close(self) -> None:
        self._slots.clear()
        self._policies.clear()
        self._shards.group = None
        del self._transformer, self._policy_slot, self._decoder, self._parts, self._offload, self._sleeper, self.weights

    def _schedule(self, num_steps: int, tokens: int) -> Tensor:
        key = (num_steps, tokens)
        if key not in self._schedules:
            self._schedules[key] = sigmas(self._scheduler_config, num_steps, tokens).to(self._device)
        return self._schedules[key]

    def _place_blocks(self, *, in_host_memory: bool) -> None:
        if in_host_memory == self._offload.is_on:
            return
        self._bound = None
        self._policy_slot.bind(None)
        if in_host_memory:
            self._offload.turn_on()
        else:
            self._offload.turn_off()
        self._relocate()

    def _relocate(self) -> None:
        self.weights.relocate(base_tensors(self._parts))

    def _require_awake(self) -> None:
        self.weights.require_seeded()
        if self._sleeper.is_asleep:
            raise UnseededError("the weights are asleep: must wake up first")

    def _activate(self, policy: PolicyRef) -> None:
        if policy not in self._policies:
            held = sorted(known.version for known in self._policies)
            raise PolicyMismatchError(f"policy version {policy.version}: not loaded, this worker holds versions {held}")
        self._policies.move_to_end(policy)
        if policy != self._bound:
            self._bind(policy, self._policies[policy])

    def _bind(self, policy: PolicyRef, adapter: Adapter | None) -> None:
        self._bound = None
        self._offload.settle()
        self._policy_slot.bind(adapter)
        self._bound = policy


def _check_cache(request: GenerationRequest) -> None:
    threshold = request.params.cache_threshold
    if not (math.isfinite(threshold) and threshold >= 0):
        raise InputError(f"cache_threshold = {threshold}: must be finite and >= 0")
    if threshold and request.op is not Op.EXPLORE:
        raise InputError(f"cache_threshold = {threshold}: must be 0 for op {request.op}, only exploration may cache")


def _check_policy(policy: PolicyRef, adapter: Adapter | None) -> None:
    if (adapter is None) != (policy.key == ""):
        raise PolicyMismatchError(
            f"policy version {policy.version} with key {policy.key!r}: a key and an adapter go together"
        )
    if adapter is None:
        return
    digest = adapter_digest(adapter)
    if digest != policy.digest:
        raise PolicyMismatchError(
            f"policy version {policy.version}: adapter digest {digest}, must be {policy.digest!r}"
        )
    if is_whole(adapter):
        return
    if not adapter_modules(adapter) or adapter_rank(adapter) < 1:
        raise PolicyMismatchError(f"policy version {policy.version}: adapter binds 0 modules, must bind at least 1")


def _buckets(occupants: Sequence[_Occupant]) -> list[list[int]]:
    """Rows of each resolution, in the order of their first; the same on every rank."""
    buckets: dict[tuple[int, int], list[int]] = {}
    for b, occupant in enumerate(occupants):
        buckets.setdefault(occupant.geometry.grid, []).append(b)
    return list(buckets.values())


def _command_number(items: Sequence[StepItem], occupants: Sequence[_Occupant]) -> int:
    """63 bits that two ranks share only if they are about to take the same denoising steps of the same requests."""
    said = [
        (o.request.request_id, item.denoising_step, o.request.policy) for item, o in zip(items, occupants, strict=True)
    ]
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:8]) >> 1


def _shared_policy(occupants: Sequence[_Occupant]) -> PolicyRef:
    policies = {o.request.policy for o in occupants}
    if len(policies) != 1:
        raise PolicyMismatchError(f"one batch of policy versions {sorted(p.version for p in policies)}: must share one")
    return policies.pop()


def _stochastic_rows(
    occupants: Sequence[_Occupant], steps: Sequence[int], velocity: Tensor, latents: Tensor, after: Tensor
) -> dict[int, float]:
    """Replaces the rows of `after` whose denoising step lies in its SDE window; returns their log-probs by row."""
    log_probs: dict[int, float] = {}
    for kind, take_step in STEPS.items():
        rows = [b for b, (o, i) in enumerate(zip(occupants, steps, strict=True)) if _is_stochastic(o.request, i, kind)]
        if not rows:
            continue
        schedules = torch.stack([occupants[b].sigmas[[steps[b], steps[b] + 1, 1]] for b in rows])
        levels = torch.tensor([occupants[b].request.params.noise_level for b in rows], device=latents.device)
        epsilon = torch.stack([_noise(occupants[b], steps[b]) for b in rows]).to(latents.device)
        transition = take_step(velocity[rows], latents[rows], *schedules.unbind(1), levels, noise=epsilon)
        after[rows] = transition.sample
        log_probs.update(zip(rows, transition.log_prob.tolist(), strict=True))
    return log_probs


def _is_stochastic(request: GenerationRequest, denoising_step: int, kind: str) -> bool:
    start, stop = request.sde_window
    return request.params.sde == kind and start <= denoising_step < stop


def _noise(occupant: _Occupant, denoising_step: int) -> Tensor:
    geometry = occupant.geometry
    return noise.sde_noise(occupant.request.seed, denoising_step, geometry.tokens, geometry.channels)
