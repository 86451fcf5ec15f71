"""A sample that was committed at one sequence-parallel degree goes on at another: its records say nothing of degrees."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from diffusion_rollouts import BASE, MODEL, request
from ranks import run_group

from spot_runtime.daemons.commits import Record, Trail, earlier_keys, extend, make_record, restore
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.messages import GenerationRequest, StepItem
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.store.tensors import TensorStore

STEPS, WINDOW = 8, (1, 5)
COMMITTED = (2, 4)
"""Steps after which a record is written; the sample is lost after the last of them."""
TOLERANCE = 1e-5
EMBEDS = np.random.default_rng(4).standard_normal((11, 64)).astype(np.float32)
numbers = itertools.count()


class Sample:
    """What an arena holds of one sample: x_i, its window and log-probs."""

    def __init__(self, engine: DiffusersEngine, asked: GenerationRequest) -> None:
        engine.admit(0, asked, EMBEDS)
        self.asked, self.step, self.latents = asked, 0, engine.initial_latents(0)
        size = WINDOW[1] - WINDOW[0]
        self.window = np.zeros((size + 1, *self.latents.shape), np.float32)
        self.log_probs = np.zeros(size, np.float32)

    def go(self, engine: DiffusersEngine, until: int) -> None:
        for step in range(self.step, until):
            (done,) = engine.denoise([StepItem(slot=0, denoising_step=step)], [self.latents])
            if done.log_prob is not None:
                place = step - WINDOW[0]
                self.window[place], self.window[place + 1] = self.latents, done.latents
                self.log_probs[place] = done.log_prob
            self.latents, self.step = done.latents, step + 1

    def record(self, digest: str, trail: Trail) -> Record:
        rows = {"latents": self.latents, "window_latents": self.window, "log_probs": self.log_probs}
        return make_record(self.asked, self.step, **rows, schedule_digest=digest, trail=trail)

    def gap(self, other: Sample) -> float:
        pairs = ((self.latents, other.latents), (self.window, other.window), (self.log_probs, other.log_probs))
        return max(float(np.abs(mine - theirs).max()) for mine, theirs in pairs)


def commit_all(store: TensorStore, engine: DiffusersEngine, sample: Sample) -> str:
    """Steps and commits as COMMITTED says; the key of the last record."""
    trail, key = Trail(), ""
    for step in COMMITTED:
        sample.go(engine, step)
        record, key = sample.record(engine.schedule_digest(0), trail), f"commits/{step}"
        store.put(key, record.tensors, record.meta)
        trail = extend(trail, sample.asked, step, key)
    return key


def resume(store: TensorStore, engine: DiffusersEngine, asked: GenerationRequest, key: str) -> Sample:
    """A fresh sample that goes on from the store alone."""
    sample = Sample(engine, asked)
    read = {each: store.get(each) for each in ("commits/2", "commits/4")}
    records = {each: Record(stored.tensors, stored.meta) for each, stored in read.items()}
    earlier = [records[each] for each in earlier_keys(key, records[key])]
    restored = restore(asked, COMMITTED[-1], key, records[key], earlier)
    assert restored.schedule_digest == engine.schedule_digest(0)
    sample.step, sample.latents = COMMITTED[-1], restored.latents
    sample.window[: len(restored.window_latents)] = restored.window_latents
    sample.log_probs[: len(restored.log_probs)] = restored.log_probs
    return sample


def _migrate(group: SequenceGroup) -> dict[str, float]:
    """Gaps to the sample that nothing disturbed at degree 1, by the degrees before and after the migration."""
    engine = DiffusersEngine(MODEL)
    engine.load_policy(BASE, None)
    asked = request(3, window=WINDOW, num_steps=STEPS)
    calm = Sample(engine, asked)
    calm.go(engine, STEPS)
    gaps = {}
    groups = {"1": None, "2": group}
    for before, after in itertools.product(groups, groups):
        store = TensorStore(f"memory://degrees-{next(numbers)}")
        engine.set_group(groups[before])
        key = commit_all(store, engine, Sample(engine, asked))
        engine.release(0)
        engine.set_group(groups[after])
        resumed = resume(store, engine, asked, key)
        resumed.go(engine, STEPS)
        gaps[f"{before}-{after}"] = resumed.gap(calm)
    return gaps


@pytest.mark.timeout(400)
def test_a_sample_goes_on_at_another_degree_and_is_exact_at_the_same() -> None:
    for gaps in run_group(_migrate, 2):
        assert sorted(gaps) == ["1-1", "1-2", "2-1", "2-2"]
        assert gaps["1-1"] == 0.0
        assert max(gaps.values()) <= TOLERANCE
