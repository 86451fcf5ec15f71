"""Step cache: the rule by hand, and in the denoise loop of the tiny model."""

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
import torch
from diffusion_rollouts import BASE, MODEL, PROMPTS, admit_all, request, sample, step

from spot_runtime.diffusion.cache import CachedSample, TeaCache, teacache
from spot_runtime.diffusion.cache.recorder import Change, Recorder, fitted_polynomial, steps_taken, thresholds_by_steps
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.errors import InputError
from spot_runtime.messages import GenerationRequest, SamplingParams, StepItem
from spot_runtime.types import Op

STEPS = 10
THRESHOLD = 0.3
WINDOW = (1, 5)


@pytest.fixture(scope="module")
def embeds() -> list[np.ndarray]:
    return PromptEncoder(MODEL).encode(PROMPTS)


@pytest.fixture(scope="module")
def engine() -> DiffusersEngine:
    engine = DiffusersEngine(MODEL)
    engine.load_policy(BASE, None)
    return engine


def exploring(seed: int, threshold: float = THRESHOLD, *, op: Op = Op.EXPLORE, prompt: int = 0) -> GenerationRequest:
    plain = request(seed, window=WINDOW, num_steps=STEPS, prompt=prompt)
    params = msgspec.structs.replace(plain.params, cache_threshold=threshold)
    return msgspec.structs.replace(plain, op=op, params=params)


def full_steps(engine: DiffusersEngine, slots: int) -> list[int]:
    return [engine.full_steps(slot) for slot in range(slots)]


# ---- the rule ----


def decisions(cache: TeaCache, inputs: Sequence[float]) -> list[bool]:
    """Feeds constant inputs one after the other; residuals are the count of forwards so far."""
    due = []
    for value in inputs:
        sums = cache.measure(torch.full((2, 3), value)).tolist()
        due.append(cache.is_due(sums))
        if due[-1]:
            cache.keep(torch.full((2, 3), float(sum(due))), torch.zeros(2, 1))
    return due


def test_changes_add_up_until_the_threshold_and_start_again_after_a_forward() -> None:
    # relative changes .25, .2, .5, .111: sums .25, .45 -> forward at >= .4; .5 -> forward; .111
    assert decisions(TeaCache(0.4), [4.0, 5.0, 6.0, 9.0, 10.0]) == [True, False, True, True, False]


def test_a_change_that_reaches_the_threshold_exactly_is_due() -> None:
    assert decisions(TeaCache(0.25), [4.0, 5.0]) == [True, True]


def test_the_polynomial_rescales_the_change_and_its_sign_does_not_count() -> None:
    # p(x) = -2 x + .1 at x = .25: |-.4| >= .4
    assert decisions(TeaCache(0.4, (-2.0, 0.1)), [4.0, 5.0]) == [True, True]
    assert decisions(TeaCache(0.41, (-2.0, 0.1)), [4.0, 5.0]) == [True, False]


def test_the_residual_is_that_of_the_last_forward() -> None:
    cache = TeaCache(0.4)
    decisions(cache, [4.0, 5.0, 6.0, 6.1])
    assert cache.residual.tolist() == [[2.0] * 3] * 2


def test_ranks_that_add_up_their_sums_decide_as_one_that_has_all_tokens() -> None:
    """One half changes by a quarter, the other not at all: alone they would disagree, together both see an eighth."""
    whole, left, right = TeaCache(0.2), TeaCache(0.2), TeaCache(0.2)
    for first, second in ((4.0, 4.0), (5.0, 4.0)):
        halves = torch.full((2, 3), first), torch.full((2, 3), second)
        parts = torch.stack([left.measure(halves[0]), right.measure(halves[1])])
        total = whole.measure(torch.cat(halves))
        assert parts.sum(0).tolist() == total.tolist()
    assert (total[0] / total[1]).item() == 0.125
    assert (parts[0, 0] / parts[0, 1]).item() == 0.25


class NeverDue:
    """A cache that always has a stand-in."""

    def measure(self, modulated: torch.Tensor) -> torch.Tensor:
        return torch.zeros(1)

    def is_due(self, sums: Sequence[float]) -> bool:
        return False

    def keep(self, residual: torch.Tensor, velocity: torch.Tensor) -> None:
        self.residual = residual


def test_first_step_last_step_and_the_first_after_a_gap_take_a_forward_whatever_the_cache_says() -> None:
    cached, taken = CachedSample(NeverDue(), full_step=7), []
    for denoising_step in (0, 1, 2, 5, 6, 7):
        taken.append(cached.takes_forward(denoising_step, [0.0]))
        cached.step_taken(denoising_step)
    assert taken == [True, False, False, True, False, True]


# ---- the loop ----


def test_a_zero_threshold_is_the_engine_without_a_cache_to_the_bit(
    engine: DiffusersEngine, embeds: list[np.ndarray]
) -> None:
    plain, priced = sample(engine, [request(1, window=WINDOW, num_steps=STEPS)], embeds[:1])
    assert engine.full_steps(0) == STEPS
    explored, priced_again = sample(engine, [exploring(1, 0.0)], embeds[:1])
    assert [np.array_equal(a, b) for a, b in zip(plain[0], explored[0], strict=True)] == [True] * (STEPS + 1)
    assert priced == priced_again


def test_a_cache_that_never_skips_changes_nothing_to_the_bit(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    plain, _ = sample(engine, [exploring(seed, 0.0, prompt=seed) for seed in range(3)], embeds)
    cached, _ = sample(engine, [exploring(seed, 1e-9, prompt=seed) for seed in range(3)], embeds)
    assert [np.array_equal(a[-1], b[-1]) for a, b in zip(plain, cached, strict=True)] == [True] * 3
    assert full_steps(engine, 3) == [STEPS] * 3


def test_a_higher_threshold_takes_fewer_forwards_down_to_the_first_and_the_last(
    engine: DiffusersEngine, embeds: list[np.ndarray]
) -> None:
    taken = []
    for threshold in (0.1, 0.3, 0.6, 1e9):
        sample(engine, [exploring(1, threshold)], embeds[:1])
        taken.append(engine.full_steps(0))
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[2]
    assert taken[-1] == 2


def test_the_last_step_may_be_as_any_other(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    asked = exploring(1, 1e9)
    params = msgspec.structs.replace(asked.params, cache_last_full=False)
    (loose,), _ = sample(engine, [msgspec.structs.replace(asked, params=params)], embeds[:1])
    assert engine.full_steps(0) == 1
    (strict,), _ = sample(engine, [asked], embeds[:1])
    assert engine.full_steps(0) == 2
    assert np.array_equal(loose[-2], strict[-2])
    assert not np.array_equal(loose[-1], strict[-1])


def test_steps_say_whether_they_took_a_forward(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    (latents,), full = admit_all(engine, [exploring(1, 1e9)], embeds[:1]), []
    for i in range(STEPS):
        (done,) = engine.denoise([StepItem(slot=0, denoising_step=i)], [latents])
        latents = done.latents
        full.append(done.is_full)
    assert full == [True] + [False] * (STEPS - 2) + [True]


def test_a_skipped_step_runs_no_block_and_a_batch_only_those_of_its_full_rows(
    engine: DiffusersEngine, embeds: list[np.ndarray]
) -> None:
    rows: list[int] = []
    block = engine._transformer.transformer_blocks[1]
    hook = block.register_forward_pre_hook(
        lambda _, __, inputs: rows.append(len(inputs["hidden_states"])), with_kwargs=True
    )
    try:
        sample(engine, [exploring(0, 1e9), exploring(1, 1e9, prompt=1), exploring(2, 0.0, prompt=2)], embeds)
    finally:
        hook.remove()
    assert rows == [3] + [1] * (STEPS - 2) + [3]
    assert full_steps(engine, 3) == [2, 2, STEPS]


def test_a_cached_sample_does_not_depend_on_its_batch_mates(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    requests = [exploring(0), exploring(1, 0.5, prompt=1), exploring(2, 0.0, prompt=2)]
    together, priced = sample(engine, requests, embeds)
    taken = full_steps(engine, 3)
    assert taken[0] < STEPS
    for b in range(3):
        alone, priced_alone = sample(engine, requests[b : b + 1], embeds[b : b + 1])
        assert np.array_equal(together[b][-1], alone[0][-1])
        assert priced[b] == priced_alone[0]
        assert engine.full_steps(0) == taken[b]


def test_batches_may_change_from_step_to_step(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    """Slot 1 joins three steps after slot 0, slot 2 two later: each ends where it would have ended alone."""
    requests = [exploring(seed, prompt=seed) for seed in range(3)]
    alone = [sample(engine, [wanted], [embed])[0][0][-1] for wanted, embed in zip(requests, embeds, strict=True)]
    latents, at, joins = admit_all(engine, requests, embeds), [0, 0, 0], [0, 3, 5]
    for tick in range(STEPS + max(joins)):
        live = [b for b in range(3) if joins[b] <= tick and at[b] < STEPS]
        after, _ = step(engine, live, [at[b] for b in live], [latents[b] for b in live])
        for b, moved in zip(live, after, strict=True):
            latents[b], at[b] = moved, at[b] + 1
    assert [np.array_equal(a, b) for a, b in zip(latents, alone, strict=True)] == [True] * 3


def test_a_resumed_sample_begins_with_a_full_forward(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    (whole,), _ = sample(engine, [exploring(3, 1e9)], embeds[:1])
    engine.release(0)
    engine.admit(0, exploring(3, 1e9), embeds[0])
    (resumed,), _ = step(engine, [0], [4], [whole[4]])
    assert engine.full_steps(0) == 1
    engine.admit(0, exploring(3, 0.0), embeds[0])
    (full,), _ = step(engine, [0], [4], [whole[4]])
    assert np.array_equal(resumed, full)


def test_a_step_without_a_forward_follows_the_one_with(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    """Near the full sample, not on it: the residual stands in, it does not vanish."""
    (plain,), _ = sample(engine, [exploring(4, 0.0)], embeds[:1])
    (cached,), _ = sample(engine, [exploring(4, 0.3)], embeds[:1])
    gap = np.linalg.norm(cached[-1] - plain[-1]) / np.linalg.norm(plain[-1])
    assert 0 < gap < 0.7


@pytest.mark.parametrize("op", [Op.ROLLOUT, Op.EVALUATE])
def test_only_exploration_may_cache(engine: DiffusersEngine, embeds: list[np.ndarray], op: Op) -> None:
    with pytest.raises(InputError, match=rf"cache_threshold = 0.3: must be 0 for op {op}, only exploration may cache"):
        engine.admit(0, exploring(1, op=op), embeds[0])


@pytest.mark.parametrize("threshold", [-0.1, float("nan"), float("inf")])
def test_a_threshold_out_of_range_is_refused(
    engine: DiffusersEngine, embeds: list[np.ndarray], threshold: float
) -> None:
    with pytest.raises(InputError, match=r"cache_threshold = .*: must be finite and >= 0"):
        engine.admit(0, exploring(1, threshold), embeds[0])


# ---- choosing polynomial and thresholds ----


def test_a_recorder_sees_every_step_and_skips_none(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    """What it notes of a sample is the change between velocities that the same sample has without it."""
    recorders: list[Recorder] = []

    def recorder(_: SamplingParams) -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    engine._step_cache = recorder
    try:
        (recorded,), _ = sample(engine, [exploring(6)], embeds[:1])
    finally:
        engine._step_cache = teacache
    (plain,), _ = sample(engine, [exploring(6, 0.0)], embeds[:1])
    assert np.array_equal(recorded[-1], plain[-1])
    (changes,) = (r.changes for r in recorders)
    assert len(changes) == STEPS - 1
    sigmas = engine._slots[0].sigmas.numpy()
    velocity = [(plain[i + 1] - plain[i]) / (sigmas[i + 1] - sigmas[i]) for i in (6, 7)]
    wanted = np.abs(velocity[1] - velocity[0]).sum() / np.abs(velocity[0]).sum()
    assert changes[6].velocity == pytest.approx(wanted, rel=1e-3)
    assert all(change.modulated > 0 for change in changes)


def test_recorded_changes_say_how_many_forwards_a_threshold_takes() -> None:
    # sums .2 .4 .7 -> forward; .1 .3; the last step always
    changes = [Change(x, 0.0) for x in (0.2, 0.2, 0.3, 0.1, 0.2)]
    assert steps_taken(changes, 0.5, (1.0, 0.0), last_full=True) == 3
    assert steps_taken(changes, 9.0, (1.0, 0.0), last_full=True) == 2
    assert steps_taken(changes, 0.0, (1.0, 0.0), last_full=True) == 6
    assert steps_taken(changes, 0.5, (3.0, 0.0), last_full=True) == 6 - 1
    assert steps_taken(changes, 0.5, (1.0, 0.0), last_full=False) == 2


def test_the_polynomial_is_the_line_of_least_squares() -> None:
    on_a_line = [Change(x, 3 * x - 0.1) for x in (0.1, 0.2, 0.4)]
    assert fitted_polynomial(on_a_line) == pytest.approx((3.0, -0.1))
    assert fitted_polynomial([Change(0.1, 1.0), Change(0.2, 0.5)]) == (1.0, 0.0)
    assert fitted_polynomial([Change(0.1, 1.0)] * 3) == (1.0, 0.0)
    assert fitted_polynomial([]) == (1.0, 0.0)


def test_thresholds_are_chosen_by_the_steps_that_they_leave() -> None:
    recorded = [[Change(x + s / 100, 0.0) for x in (0.3, 0.2, 0.2, 0.1, 0.1)] for s in range(5)]
    thresholds = thresholds_by_steps(recorded, (1.0, 0.0), last_full=True)
    assert sorted(thresholds) == [2, 3, 4, 5]
    for steps, threshold in thresholds.items():
        mean = sum(steps_taken(changes, threshold, (1.0, 0.0), last_full=True) for changes in recorded) / 5
        assert mean <= steps
    assert thresholds[2] > thresholds[3] > thresholds[4] > thresholds[5] > 0


@pytest.mark.parametrize("polynomial", [(), (1.0, float("nan"))])
def test_coefficients_that_make_no_polynomial_are_refused(
    engine: DiffusersEngine, embeds: list[np.ndarray], polynomial: tuple[float, ...]
) -> None:
    asked = exploring(1)
    params = msgspec.structs.replace(asked.params, cache_polynomial=polynomial)
    with pytest.raises(InputError, match=r"cache_polynomial = .*: must be at least 1 coefficient, all finite"):
        engine.admit(0, msgspec.structs.replace(asked, params=params), embeds[0])


def test_the_polynomial_of_a_request_decides_for_it(engine: DiffusersEngine, embeds: list[np.ndarray]) -> None:
    asked = exploring(1)
    steep = msgspec.structs.replace(asked.params, cache_polynomial=(1e9, 0.0))
    sample(engine, [asked, msgspec.structs.replace(asked, params=steep)], [embeds[0]] * 2)
    assert engine.full_steps(0) < STEPS == engine.full_steps(1)
