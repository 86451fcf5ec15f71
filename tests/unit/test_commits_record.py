"""Commit records: a window is written once, piece by piece, and comes back whole; what does not belong together is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_node_machine import request

from spot_runtime.daemons.commits import (
    Record,
    Restored,
    Trail,
    commit_key,
    committed_request,
    earlier_keys,
    extend,
    make_record,
    noise_position,
    restore,
)
from spot_runtime.errors import CorruptObjectError, PolicyMismatchError
from spot_runtime.messages import Assignment, GenerationRequest
from spot_runtime.rl import noise
from spot_runtime.types import LeaseId, PolicyRef

TOKENS, CHANNELS = 3, 2
NUM_STEPS = 8


def sample(window: tuple[int, int] = (2, 5)) -> GenerationRequest:
    asked = request("q")
    params = msgspec.structs.replace(asked.params, num_steps=NUM_STEPS)
    return msgspec.structs.replace(asked, sde_window=window, params=params)


def x(denoising_step: int) -> np.ndarray:
    """Latents after so many steps."""
    return np.full((TOKENS, CHANNELS), denoising_step, np.float32)


NOTHING = Trail()


def record_at(
    asked: GenerationRequest, denoising_step: int, trail: Trail = NOTHING, schedule_digest: str = "s"
) -> Record:
    """As the arena has it then: window rows and log-probs up to here, nonsense behind."""
    start, stop = asked.sde_window
    window = np.stack([x(i) if i <= denoising_step else np.full_like(x(0), np.nan) for i in range(start, stop + 1)])
    log_probs = np.array([-i if i < denoising_step else np.nan for i in range(start, stop)], np.float32)
    return make_record(
        asked,
        denoising_step,
        latents=x(denoising_step),
        window_latents=window,
        log_probs=log_probs,
        schedule_digest=schedule_digest,
        trail=trail,
    )


def commit_at(asked: GenerationRequest, steps: Sequence[int]) -> dict[str, Record]:
    """Records after each of `steps`, by key, each appended to those before."""
    records: dict[str, Record] = {}
    trail = Trail()
    for step in steps:
        key = f"c{step}"
        records[key] = record_at(asked, step, trail)
        trail = extend(trail, asked, step, key)
    return records


def read(asked: GenerationRequest, records: dict[str, Record], step: int) -> Restored:
    key = f"c{step}"
    earlier = [records[each] for each in earlier_keys(key, records[key])]
    return restore(asked, step, key, records[key], earlier)


@given(
    st.sets(st.integers(1, NUM_STEPS), min_size=1).map(sorted),
    st.sampled_from([(0, 0), (0, 1), (0, 4), (2, 5), (5, 7)]),
)
def test_whenever_it_was_committed_the_window_comes_back_whole(steps: list[int], window: tuple[int, int]) -> None:
    asked = sample(window)
    records = commit_at(asked, steps)
    start, last = window[0], min(window[1], steps[-1])
    rows = list(range(start, last + 1)) if last > start else []
    restored = read(asked, records, steps[-1])
    assert restored.latents.tolist() == x(steps[-1]).tolist()
    assert restored.window_latents.shape == (len(rows), TOKENS, CHANNELS)
    assert restored.window_latents[:, 0, 0].tolist() == rows
    assert restored.log_probs.tolist() == [-i for i in rows[:-1]]
    assert restored.schedule_digest == "s"


@given(st.sets(st.integers(1, NUM_STEPS), min_size=1).map(sorted))
def test_no_row_and_no_log_prob_is_ever_written_twice(steps: list[int]) -> None:
    asked = sample((2, 5))
    written: list[int] = []
    log_probs: list[float] = []
    for key, record in commit_at(asked, steps).items():
        own = int(key[1:])
        written += [int(row[0, 0]) for row in record.tensors["window_latents"]] + [own] * (2 <= own <= 5)
        log_probs += record.tensors["log_probs"].tolist()
    assert sorted(written) == sorted(set(written))
    assert sorted(log_probs) == sorted(set(log_probs))


def test_a_commit_at_every_step_writes_its_own_latents_alone() -> None:
    records = commit_at(sample((2, 5)), range(1, 8))
    assert [len(record.tensors["window_latents"]) for record in records.values()] == [0] * 7
    assert [len(record.tensors["log_probs"]) for record in records.values()] == [0, 0, 1, 1, 1, 0, 0]
    assert [len(earlier_keys(key, record)) for key, record in records.items()] == [0, 0, 1, 2, 3, 4, 4]


def test_a_finished_sample_is_one_whole_record() -> None:
    record = record_at(sample((2, 5)), NUM_STEPS)
    assert record.tensors["window_latents"][:, 0, 0].tolist() == [2, 3, 4, 5]
    assert record.tensors["log_probs"].tolist() == [-2, -3, -4]
    assert earlier_keys("c", record) == ()


def test_a_record_is_a_copy() -> None:
    latents = x(3)
    record = make_record(
        sample(),
        3,
        latents=latents,
        window_latents=np.stack([x(i) for i in range(2, 6)]),
        log_probs=np.zeros(3, np.float32),
        schedule_digest="s",
        trail=Trail(),
    )
    latents[:] = 9
    assert record.tensors["latents"].tolist() == x(3).tolist()


def test_a_record_says_whose_it_is_and_where_it_stands() -> None:
    assert record_at(sample(), 3, Trail(1, ("c1",))).meta == {
        "request_id": "q",
        "policy_version": "1",
        "policy_digest": "d",
        "num_steps": "8",
        "seed": "1",
        "sde_window": "2:5",
        "embedding_key": "e",
        "denoising_step": "3",
        "noise_position": "4",
        "schedule_digest": "s",
        "after": "1",
        "earlier": '["c1"]',
    }


def test_the_noise_position_is_the_stream_that_the_next_step_draws_from() -> None:
    drawn = noise.sde_noise(7, 3, TOKENS, CHANNELS)
    key = np.array([7, noise_position(3)], dtype=np.uint64)
    wanted = np.random.Generator(np.random.Philox(key=key)).standard_normal((TOKENS, CHANNELS), dtype=np.float32)
    assert drawn.numpy().tolist() == wanted.tolist()


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"policy": PolicyRef(2, "k", "d")}, "commit of q: policy_version = '1': must be '2'"),
        ({"policy": PolicyRef(1, "k", "f")}, "commit of q: policy_digest = 'd': must be 'f'"),
        ({"seed": 5}, "commit of q: seed = '1': must be '5'"),
        ({"embedding_key": "g"}, "commit of q: embedding_key = 'e': must be 'g'"),
    ],
)
def test_a_commit_of_another_policy_seed_or_prompt_is_refused_by_name(changed: dict[str, object], line: str) -> None:
    records = commit_at(sample(), [3])
    with pytest.raises(PolicyMismatchError) as refusal:
        read(msgspec.structs.replace(sample(), **changed), records, 3)
    assert str(refusal.value) == line


def test_a_commit_at_another_step_than_control_says_is_refused() -> None:
    records = {"c4": commit_at(sample(), [3])["c3"]}
    with pytest.raises(PolicyMismatchError, match=r"denoising_step = '3': must be '4'"):
        read(sample(), records, 4)


def test_records_of_two_schedules_are_not_put_together() -> None:
    records = commit_at(sample(), [3, 4])
    records["c3"] = replace(records["c3"], meta={**records["c3"].meta, "schedule_digest": "other"})
    with pytest.raises(PolicyMismatchError, match=r"schedule_digest = 'other': must be 's'"):
        read(sample(), records, 4)


def test_a_window_with_a_hole_is_corrupt() -> None:
    records = commit_at(sample(), [3, 4])
    with pytest.raises(CorruptObjectError, match="c4: denoising_step 2 of its window is in none of its records"):
        restore(sample(), 4, "c4", records["c4"], [])


@pytest.mark.parametrize("meta", [{}, {"earlier": "no"}, {"earlier": '{"a": 1}'}])
def test_what_is_no_record_is_corrupt(meta: dict[str, str]) -> None:
    with pytest.raises(CorruptObjectError, match="c: not a commit record"):
        earlier_keys("c", Record({}, meta))


@pytest.mark.parametrize("which", ["c3", "c4"])
@pytest.mark.parametrize("name", ["latents", "window_latents", "log_probs"])
@pytest.mark.parametrize(
    "harm",
    [None, lambda array: array.astype(np.float64), lambda array: array[None], lambda array: array[..., :0, None]],
)
def test_a_sealed_record_with_other_arrays_is_corrupt(
    which: str, name: str, harm: Callable[[np.ndarray], np.ndarray] | None
) -> None:
    records = commit_at(sample((2, 5)), [1, 3, 4])
    tensors = dict(records[which].tensors)
    array = tensors.pop(name)
    if harm is not None:
        tensors[name] = harm(array)
    records[which] = Record(tensors, records[which].meta)
    with pytest.raises(CorruptObjectError, match=r"^c4: not a commit record: holds .*, must hold "):
        read(sample((2, 5)), records, 4)


@pytest.mark.parametrize("name", ["after", "denoising_step"])
@pytest.mark.parametrize("text", [None, "x", "1e3"])
def test_an_earlier_record_that_does_not_say_where_it_stands_is_corrupt(name: str, text: str | None) -> None:
    records = commit_at(sample((2, 5)), [3, 4])
    meta = {key: value for key, value in records["c3"].meta.items() if key != name}
    records["c3"] = replace(records["c3"], meta=meta if text is None else meta | {name: text})
    with pytest.raises(CorruptObjectError, match=f"^c4: not a commit record: {name}: "):
        read(sample((2, 5)), records, 4)


def test_who_resumes_appends_to_what_it_resumed_from() -> None:
    asked = sample((2, 5))
    records = commit_at(asked, [1, 3])
    restored = read(asked, records, 3)
    assert restored.trail == Trail(3, ("c3",))
    records["c6"] = record_at(asked, 6, restored.trail)
    assert read(asked, records, 6).window_latents[:, 0, 0].tolist() == [2, 3, 4, 5]


def test_a_key_names_its_request_and_no_two_leases_share_one() -> None:
    first, second = (Assignment(lease_id=LeaseId(f"q.r.{n}"), request=request("q.r")) for n in (1, 2))
    assert commit_key(first, 3) == "runs/r/commits/q.r.1.3"
    assert commit_key(second, 3) != commit_key(first, 3)
    assert committed_request(commit_key(first, 3)) == "q.r"
