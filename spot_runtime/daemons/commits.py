"""The commit record: what one unfinished sample is in the tensor store. Owns its fields and the check before a resume; never does I/O.

A record at denoising step s holds the latents x_s and what no earlier record of the sample holds: window latents and log-probs of the
stochastic steps since. It is written once and names the records that hold the rest, so a window is appended to, never rewritten: where
s lies in the window, x_s is its own row of it. A record with nothing before it is whole; a finished sample is one.

What a record says does not depend on batch, device or sequence-parallel degree: noise is a function of (seed, noise position).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spot_runtime.errors import CorruptObjectError, PolicyMismatchError
from spot_runtime.messages import Assignment, GenerationRequest
from spot_runtime.types import RequestId, RunId


@dataclass(frozen=True)
class Trail:
    """Records of a sample so far: the step of the newest (-1: there is none) and the keys that hold its window, oldest first."""

    denoising_step: int = -1
    keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Record:
    """One record as written or read: `latents` [L, C], `window_latents` [rows, L, C] and `log_probs` [steps], all fp32."""

    tensors: Mapping[str, np.ndarray]
    meta: Mapping[str, str]


@dataclass(frozen=True)
class Restored:
    """A sample as its records have it together; `trail` is what its next record is appended to."""

    latents: np.ndarray
    window_latents: np.ndarray
    log_probs: np.ndarray
    schedule_digest: str
    trail: Trail


def commits_prefix(run_id: RunId) -> str:
    """Folder of the records of a run's unfinished samples."""
    return f"runs/{run_id}/commits"


def commit_key(assignment: Assignment, denoising_step: int) -> str:
    """Of one lease: whoever held the request before appended to other records."""
    return f"{commits_prefix(assignment.request.run_id)}/{assignment.lease_id}.{denoising_step}"


def committed_request(key: str) -> RequestId:
    """The request that a commit key belongs to."""
    return RequestId(key.rpartition("/")[2].rsplit(".", 2)[0])


def noise_position(denoising_step: int) -> int:
    """Stream of the seed that the next denoising step draws from (`rl.noise`: ε_i is stream i + 1)."""
    return denoising_step + 1


def make_record(
    request: GenerationRequest,
    denoising_step: int,
    *,
    latents: np.ndarray,
    window_latents: np.ndarray,
    log_probs: np.ndarray,
    schedule_digest: str,
    trail: Trail,
) -> Record:
    """The record after `denoising_step` steps; its arrays are copies.

    Args:
        latents: [L, C].
        window_latents: all of the window, [window steps + 1, L, C]; rows that are not reached yet are not looked at.
        log_probs: all of the window, [window steps].
        schedule_digest: of the noise levels that the sample steps through.
        trail: what the record is appended to.
    """
    start = request.sde_window[0]
    rows, steps = (
        _rows(request, trail.denoising_step, denoising_step),
        _steps(request, trail.denoising_step, denoising_step),
    )
    tensors = {
        "latents": latents.copy(),
        "window_latents": window_latents[[row - start for row in rows]],
        "log_probs": log_probs[[step - start for step in steps]],
    }
    meta = identity(request) | {
        "denoising_step": str(denoising_step),
        "noise_position": str(noise_position(denoising_step)),
        "schedule_digest": schedule_digest,
        "after": str(trail.denoising_step),
        "earlier": json.dumps(trail.keys, separators=(",", ":")),
    }
    return Record(tensors, meta)


def extend(trail: Trail, request: GenerationRequest, denoising_step: int, key: str) -> Trail:
    """The trail with one more record; one that holds nothing of the window need not be read again."""
    start, stop = request.sde_window
    is_row = start < stop and start <= denoising_step <= stop
    holds = is_row or bool(_rows(request, trail.denoising_step, denoising_step))
    return Trail(denoising_step, (*trail.keys, key) if holds else trail.keys)


def identity(request: GenerationRequest) -> dict[str, str]:
    """What all records of a sample agree in."""
    return {
        "request_id": request.request_id,
        "policy_version": str(request.policy.version),
        "policy_digest": request.policy.digest,
        "num_steps": str(request.params.num_steps),
        "seed": str(request.seed),
        "sde_window": "{}:{}".format(*request.sde_window),
        "embedding_key": request.embedding_key,
    }


def earlier_keys(key: str, record: Record) -> tuple[str, ...]:
    """Keys of the records that hold what `record` does not. Raises CorruptObjectError."""
    try:
        keys = json.loads(record.meta["earlier"])
        if not (isinstance(keys, list) and all(isinstance(each, str) for each in keys)):
            raise ValueError(f"earlier = {keys!r}")
    except (ValueError, KeyError) as error:
        raise CorruptObjectError(f"{key}: not a commit record: {error}") from error
    return tuple(keys)


def restore(
    request: GenerationRequest, denoising_step: int, key: str, record: Record, earlier: Sequence[Record]
) -> Restored:
    """The sample from its newest record and, oldest first, those that this one names.

    The schedule is compared by whoever steps: only the model knows its own. Raises PolicyMismatchError that names what differs from the
    request, CorruptObjectError where a record is none, or a row of the window is in no record.
    """
    place = {"denoising_step": str(denoising_step), "noise_position": str(noise_position(denoising_step))}
    _check(request, place, record)
    schedule = {"schedule_digest": record.meta.get("schedule_digest", "")}
    window: dict[int, np.ndarray] = {}
    log_probs: dict[int, float] = {}
    after = _number(key, record, "after")
    for each in (*earlier, record):
        _check(request, schedule, each)
        _check_tensors(key, request, each, record)
        _read(request, each, _number(key, each, "after"), window, log_probs)
    start, stop = request.sde_window
    last = min(stop, denoising_step)
    reached = range(start, last + 1 if last > start else start)
    lacking = [i for i in reached if i not in window] + [i for i in reached[:-1] if i not in log_probs]
    if lacking:
        raise CorruptObjectError(f"{key}: denoising_step {lacking[0]} of its window is in none of its records")
    latents = record.tensors["latents"]
    empty = np.empty((0, *latents.shape), np.float32)
    trail = extend(Trail(after, earlier_keys(key, record)), request, denoising_step, key)
    return Restored(
        latents,
        np.stack([window[step] for step in reached]) if len(reached) else empty,
        np.array([log_probs[step] for step in reached[:-1]], np.float32),
        schedule["schedule_digest"],
        trail,
    )


def _check(request: GenerationRequest, more: Mapping[str, str], record: Record) -> None:
    for name, wanted in {**identity(request), **more}.items():
        found = record.meta.get(name)
        if found != wanted:
            raise PolicyMismatchError(f"commit of {request.request_id}: {name} = {found!r}: must be {wanted!r}")


def _number(key: str, record: Record, name: str) -> int:
    try:
        return int(record.meta[name])
    except (ValueError, KeyError) as error:
        raise CorruptObjectError(f"{key}: not a commit record: {name}: {error}") from error


def _check_tensors(key: str, request: GenerationRequest, record: Record, newest: Record) -> None:
    """A seal says who wrote a record, not that it is one."""
    after, own = _number(key, record, "after"), _number(key, record, "denoising_step")
    found = {name: (array.dtype, array.shape) for name, array in record.tensors.items()}
    latents = newest.tensors["latents"].shape if "latents" in newest.tensors else ()
    shapes = {
        "latents": latents,
        "window_latents": (len(_rows(request, after, own)), *latents),
        "log_probs": (len(_steps(request, after, own)),),
    }
    wanted = {name: (np.dtype(np.float32), shape) for name, shape in shapes.items()}
    if len(latents) != 2 or found != wanted:
        raise CorruptObjectError(f"{key}: not a commit record: holds {_shown(found)}, must hold {_shown(wanted)}")


def _shown(tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]]) -> str:
    return ", ".join(f"{name} {dtype}{list(shape)}" for name, (dtype, shape) in sorted(tensors.items())) or "nothing"


def _read(
    request: GenerationRequest, record: Record, after: int, window: dict[int, np.ndarray], log_probs: dict[int, float]
) -> None:
    """Adds what one record holds of the window."""
    (start, stop), own = request.sde_window, int(record.meta["denoising_step"])
    window.update(zip(_rows(request, after, own), record.tensors["window_latents"], strict=False))
    log_probs.update(zip(_steps(request, after, own), record.tensors["log_probs"].tolist(), strict=False))
    if start <= own <= stop:
        window[own] = record.tensors["latents"]


def _rows(request: GenerationRequest, after: int, denoising_step: int) -> range:
    """Steps i of the window whose x_i a record writes as rows: after the last record's own and before its own."""
    start, stop = request.sde_window
    return range(max(start, after + 1), min(stop + 1, denoising_step)) if start < stop else range(0)


def _steps(request: GenerationRequest, after: int, denoising_step: int) -> range:
    """Stochastic steps whose log-probs a record writes."""
    start, stop = request.sde_window
    return range(max(start, after), min(stop, denoising_step))
