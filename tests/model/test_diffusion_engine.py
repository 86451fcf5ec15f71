import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from diffusion_rollouts import (
    BASE,
    MODEL,
    NUM_STEPS,
    PROMPTS,
    admit_all,
    policy_of,
    random_adapter,
    request,
    sample,
    step,
)

from spot_runtime.diffusion.adapter import initial_adapter
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import RESIDENT_POLICIES_MAX, DiffusersEngine
from spot_runtime.diffusion.geometry import model_folder
from spot_runtime.diffusion.invariance import make_batch_invariant
from spot_runtime.errors import InputError, PolicyMismatchError
from spot_runtime.messages import StepItem
from spot_runtime.types import PolicyRef


@pytest.fixture(scope="module")
def embeds() -> list[np.ndarray]:
    return PromptEncoder(MODEL).encode(PROMPTS)


@pytest.fixture(scope="module")
def shared_engine() -> DiffusersEngine:
    return DiffusersEngine(MODEL)


@pytest.fixture
def engine(shared_engine: DiffusersEngine) -> DiffusersEngine:
    """The module's engine with an empty policy table and the base model bound."""
    shared_engine._policies.clear()
    shared_engine.load_policy(BASE, None)
    return shared_engine


@pytest.fixture(scope="module")
def adapter(shared_engine: DiffusersEngine) -> dict[str, np.ndarray]:
    return random_adapter(initial_adapter(shared_engine._transformer, rank=4, alpha=8, seed=0), seed=1)


@pytest.fixture(scope="module")
def pipeline() -> QwenImagePipeline:
    pipeline = QwenImagePipeline.from_pretrained(model_folder(MODEL))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def largest_gap(one: list[np.ndarray], two: list[np.ndarray]) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(one, two, strict=True))


ODE_OPTIONS = {"height": 64, "width": 64, "num_inference_steps": NUM_STEPS, "true_cfg_scale": 1.0}


def test_an_ode_sample_is_the_stock_pipelines(
    engine: DiffusersEngine, embeds: list[np.ndarray], pipeline: QwenImagePipeline
) -> None:
    """Relative 1e-5, and pixels to one grey level, for prompts of different length sampled together here and alone there."""
    requests = [request(seed, prompt=seed) for seed in range(len(PROMPTS))]
    trajectories, log_probs = sample(engine, requests, embeds)
    assert log_probs == [[], [], []]
    for slot, prompt in enumerate(PROMPTS):
        start = torch.from_numpy(trajectories[slot][0])[None]
        want = pipeline(prompt, latents=start.clone(), output_type="latent", **ODE_OPTIONS).images[0].numpy()
        got = trajectories[slot][-1]
        assert np.linalg.norm(got - want) <= 1e-5 * np.linalg.norm(want)
        image = pipeline(prompt, latents=start.clone(), output_type="np", **ODE_OPTIONS).images[0]
        (pixels,) = engine.decode([slot], [got])
        assert pixels.shape == (64, 64, 3)
        assert np.abs(pixels - image * 255).max() <= 1.0


def test_the_loop_itself_is_the_stock_pipelines_to_the_bit(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    """With the same order of summation on both sides nothing is left to differ: schedule, timesteps, Euler step."""
    pipeline = QwenImagePipeline.from_pretrained(model_folder(MODEL))
    pipeline.set_progress_bar_config(disable=True)
    make_batch_invariant(pipeline.transformer)
    trajectories, _ = sample(engine, [request(seed, prompt=seed) for seed in range(3)], embeds)
    start = torch.from_numpy(np.stack([trajectory[0] for trajectory in trajectories]))
    text = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(embed) for embed in embeds], batch_first=True)
    mask = torch.tensor([[i < len(embed) for i in range(text.shape[1])] for embed in embeds])
    images = pipeline(
        prompt_embeds=text, prompt_embeds_mask=mask, latents=start, output_type="latent", **ODE_OPTIONS
    ).images
    assert [np.array_equal(images[b].numpy(), trajectories[b][-1]) for b in range(3)] == [True] * 3


@pytest.mark.parametrize("sde", ["sde", "cps"])
def test_a_sample_does_not_depend_on_its_batch_mates(
    engine: DiffusersEngine, embeds: list[np.ndarray], sde: str
) -> None:
    requests = [request(seed, window=(1, 3), sde=sde, prompt=seed) for seed in range(3)]
    together, priced = sample(engine, requests, embeds)
    for b in range(3):
        alone, priced_alone = sample(engine, requests[b : b + 1], embeds[b : b + 1])
        assert np.array_equal(together[b][-1], alone[0][-1])
        assert priced[b] == priced_alone[0]


def test_requests_at_different_denoising_steps_share_a_forward(
    engine: DiffusersEngine, embeds: list[np.ndarray]
) -> None:
    """Slot 1 joins two steps after slot 0, slot 2 a step later: each ends where it would have ended alone."""
    requests = [request(seed, window=(1, 3), prompt=seed) for seed in range(3)]
    alone = [sample(engine, [wanted], [embed])[0][0][-1] for wanted, embed in zip(requests, embeds, strict=True)]
    latents, at, joins = admit_all(engine, requests, embeds), [0, 0, 0], [0, 2, 3]
    for tick in range(NUM_STEPS + max(joins)):
        live = [b for b in range(3) if joins[b] <= tick and at[b] < NUM_STEPS]
        after, _ = step(engine, live, [at[b] for b in live], [latents[b] for b in live])
        for b, moved in zip(live, after, strict=True):
            latents[b], at[b] = moved, at[b] + 1
    assert at == [NUM_STEPS] * 3
    assert largest_gap(latents, alone) == 0


def test_only_the_window_is_stochastic_and_priced(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    ode, _ = sample(engine, [request(3)], embeds[:1])
    windowed, log_probs = sample(engine, [request(3, window=(2, 4))], embeds[:1])
    assert len(log_probs[0]) == 2
    assert np.array_equal(ode[0][2], windowed[0][2])
    assert np.abs(ode[0][3] - windowed[0][3]).max() > 0.1


def test_resuming_at_any_step_on_a_fresh_slot_gives_the_identical_sample(
    engine: DiffusersEngine, embeds: list[np.ndarray]
) -> None:
    wanted = request(5, window=(1, 4))
    (whole,), _ = sample(engine, [wanted], embeds[:1])
    for start in range(1, NUM_STEPS):
        engine.release(0)
        engine.admit(7, wanted, embeds[0])
        latents = whole[start].copy()
        for i in range(start, NUM_STEPS):
            (latents,), _ = step(engine, [7], [i], [latents])
        assert np.array_equal(latents, whole[-1])


def test_two_seeds_give_two_samples_and_one_seed_one(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    first, again = (sample(engine, [request(8, window=(0, 2))], embeds[:1])[0][0][-1] for _ in range(2))
    other = sample(engine, [request(9, window=(0, 2))], embeds[:1])[0][0][-1]
    assert np.array_equal(first, again)
    assert np.abs(first - other).max() > 0.1


def test_policies_stay_resident_side_by_side(
    engine: DiffusersEngine, embeds: list[np.ndarray], adapter: dict[str, np.ndarray]
) -> None:
    policy = policy_of(1, adapter)
    base, _ = sample(engine, [request(2)], embeds[:1])
    engine.load_policy(policy, adapter)
    tuned, _ = sample(engine, [request(2, policy=policy)], embeds[:1])
    base_again, _ = sample(engine, [request(2)], embeds[:1])
    tuned_again, _ = sample(engine, [request(2, policy=policy)], embeds[:1])
    assert np.array_equal(base[0][-1], base_again[0][-1])
    assert np.array_equal(tuned[0][-1], tuned_again[0][-1])
    assert np.abs(base[0][-1] - tuned[0][-1]).max() > 0.01


def test_an_adapter_of_another_rank_replaces_the_first(
    engine: DiffusersEngine, adapter: dict[str, np.ndarray], embeds: list[np.ndarray]
) -> None:
    other = random_adapter(initial_adapter(engine._transformer, rank=2, alpha=2, seed=3), seed=4)
    one, two = policy_of(1, adapter), policy_of(2, other)
    engine.load_policy(one, adapter)
    first, _ = sample(engine, [request(2, policy=one)], embeds[:1])
    engine.load_policy(two, other)
    sample(engine, [request(2, policy=two)], embeds[:1])
    again, _ = sample(engine, [request(2, policy=one)], embeds[:1])
    assert np.array_equal(first[0][-1], again[0][-1])


def test_a_policy_that_is_not_loaded_is_refused(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    absent = PolicyRef(version=9, key="k", digest="d")
    latents = admit_all(engine, [request(1, policy=absent)], embeds[:1])
    with pytest.raises(PolicyMismatchError, match=r"version 9: not loaded, this worker holds versions \[0\]"):
        step(engine, [0], [0], latents)


def test_a_batch_of_two_policies_is_refused(
    engine: DiffusersEngine, embeds: list[np.ndarray], adapter: dict[str, np.ndarray]
) -> None:
    policy = policy_of(1, adapter)
    engine.load_policy(policy, adapter)
    latents = admit_all(engine, [request(1), request(2, policy=policy)], embeds[:2])
    with pytest.raises(PolicyMismatchError, match=r"versions \[0, 1\]: must share one"):
        step(engine, [0, 1], [0, 0], latents)


def test_the_oldest_policy_beyond_the_bound_is_evicted(
    engine: DiffusersEngine, embeds: list[np.ndarray], adapter: dict[str, np.ndarray]
) -> None:
    engine.load_policy(BASE, None)
    for version in range(1, RESIDENT_POLICIES_MAX + 1):
        engine.load_policy(policy_of(version, adapter), adapter)
    latents = admit_all(engine, [request(1)], embeds[:1])
    with pytest.raises(PolicyMismatchError, match=r"holds versions \[1, 2, 3, 4\]"):
        step(engine, [0], [0], latents)


def without(adapter: dict[str, np.ndarray], name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in adapter.items() if key != name}


@pytest.mark.parametrize(
    "fault", ["digest", "half a module", "foreign module", "wrong shape", "no modules", "no adapter"]
)
def test_an_adapter_that_does_not_bind_is_refused_and_the_engine_stays_usable(
    engine: DiffusersEngine, embeds: list[np.ndarray], adapter: dict[str, np.ndarray], fault: str
) -> None:
    name = "transformer_blocks.0.attn.to_q.lora_A.weight"
    broken: dict[str, dict[str, np.ndarray] | None] = {
        "digest": adapter,
        "half a module": without(adapter, name),
        "foreign module": adapter | {"transformer_blocks.99.attn.to_q.lora_A.weight": adapter[name]},
        "wrong shape": adapter | {name: adapter[name][:, :-1]},
        "no modules": {"lora_alpha": adapter["lora_alpha"]},
        "no adapter": None,
    }
    given = broken[fault]
    policy = PolicyRef(5, "k", "0" * 64) if fault == "digest" or given is None else policy_of(5, given)
    engine.load_policy(policy_of(1, adapter), adapter)
    with pytest.raises(PolicyMismatchError):
        engine.load_policy(policy, given)
    ode, _ = sample(engine, [request(2)], embeds[:1])
    again, _ = sample(engine, [request(2)], embeds[:1])
    assert np.array_equal(ode[0][-1], again[0][-1])
    latents = admit_all(engine, [request(1, policy=policy)], embeds[:1])
    with pytest.raises(PolicyMismatchError, match="not loaded"):
        step(engine, [0], [0], latents)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": (4, NUM_STEPS)}, "no SDE on the last step"),
        ({"window": (3, 2)}, "sde_window"),
        ({"sde": "ddim"}, "must be one of"),
    ],
)
def test_requests_that_cannot_be_sampled_are_refused_at_admission(
    engine: DiffusersEngine, embeds: list[np.ndarray], change: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        engine.admit(0, request(1, **change), embeds[0])  # type: ignore[arg-type]


def test_embeddings_of_another_width_are_refused(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    with pytest.raises(InputError, match="must be"):
        engine.admit(0, request(1), embeds[0][:, :-1])


def test_a_bf16_engine_keeps_latents_in_fp32_and_serves_policies_attached(
    engine: DiffusersEngine, embeds: list[np.ndarray], adapter: dict[str, np.ndarray]
) -> None:
    """One denoising step stays within 5 % of the fp32 engine's, under the base model and under an adapter."""
    half = DiffusersEngine(MODEL, dtype="bfloat16")
    half.load_policy(BASE, None)
    for policy, weights in ((BASE, None), (policy_of(1, adapter), adapter)):
        moved = []
        for each in (half, engine):
            each.load_policy(policy, weights)
            (start,) = admit_all(each, [request(1, window=(0, 1), policy=policy)], embeds[:1])
            (after,), (log_prob,) = step(each, [0], [0], [start])
            assert after.dtype == np.float32
            assert log_prob is not None
            moved.append(after - start)
        assert np.linalg.norm(moved[0] - moved[1]) <= 0.05 * np.linalg.norm(moved[1])


def test_a_released_slot_is_gone(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    latents = admit_all(engine, [request(1)], embeds[:1])
    engine.release(0)
    engine.release(0)
    with pytest.raises(KeyError):
        engine.denoise([StepItem(slot=0, denoising_step=0)], latents)
