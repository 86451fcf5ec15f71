"""A worker goes on with a sample only along the noise levels that it began with."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from diffusion_rollouts import BASE, MODEL, PROMPTS, request

from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.settings import WorkerSettings
from spot_runtime.daemons.worker import Worker
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.messages import (
    AdmitRequest,
    DenoiseStep,
    JoinGroup,
    LoadPolicy,
    LoadWeights,
    RequestAdmitted,
    StepDone,
    StepItem,
    WorkerFailed,
)
from spot_runtime.store.layout import pack_tensors
from spot_runtime.types import Generation


class Said:
    """The node's side: what the worker said."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: object) -> None:
        self.messages.append(message)


@pytest.fixture(scope="module")
def embedding() -> bytes:
    (embeds,) = PromptEncoder(MODEL).encode(PROMPTS[:1])
    return b"".join(pack_tensors({"embeds": embeds}, {}))


@pytest.fixture
def arena() -> Iterator[LatentArena]:
    geometry = check_model(MODEL, 64).geometry
    shape = ArenaShape(slots=1, tokens=geometry.tokens, channels=geometry.channels, window_max=5)
    arena = LatentArena.create(shape)
    yield arena
    arena.close()


def admit(arena: LatentArena, embedding: bytes, schedule_digest: str) -> list[Any]:
    """What a worker with weights and a group of its own says to an admission at step 1 and the step behind it."""
    node, shape, weights_fd = Said(), arena.shape, os.memfd_create("weights")
    settings = WorkerSettings(
        worker_id="n-w0",
        node_endpoint="",
        model=MODEL,
        arena_fd=arena.fd,
        weights_fd=weights_fd,
        arena_slots=shape.slots,
        tokens=shape.tokens,
        channels=shape.channels,
        window_max=shape.window_max,
    )
    worker = Worker(settings, arena, node)  # type: ignore[arg-type]
    worker.handle(LoadWeights(seq=0, device="cpu"))
    worker.handle(JoinGroup(seq=0, generation=Generation(id=1, rank=0, degree=1, rendezvous="", timeout_s=1.0)))
    worker.handle(LoadPolicy(policy=BASE, path=""))
    os.close(weights_fd)
    node.messages.clear()
    asked = request(0)
    arena.latents(0, 1)[:] = 1
    admission = AdmitRequest(
        slot=0, request=asked, embedding=embedding, denoising_step=1, schedule_digest=schedule_digest
    )
    worker.handle(admission)
    worker.handle(DenoiseStep(seq=1, items=(StepItem(slot=0, denoising_step=1),)))
    return node.messages


def test_the_schedule_that_it_began_with_is_gone_on_with(arena: LatentArena, embedding: bytes) -> None:
    fresh, stepped = admit(arena, embedding, "")
    assert isinstance(fresh, RequestAdmitted)
    assert isinstance(stepped, StepDone)
    assert len(fresh.schedule_digest) == 64
    assert admit(arena, embedding, fresh.schedule_digest)[0] == fresh


def test_another_schedule_is_refused_and_not_a_step_is_taken(arena: LatentArena, embedding: bytes) -> None:
    untouched = arena.latents(0, 2).copy()
    refused, behind = admit(arena, embedding, "f" * 64)
    assert isinstance(refused, WorkerFailed)
    assert (refused.error_class, refused.slot) == ("PolicyMismatchError", 0)
    assert refused.error.startswith(f"commit of {request(0).request_id}: schedule_digest = 'ffff")
    assert isinstance(behind, WorkerFailed)
    assert arena.latents(0, 2).tolist() == untouched.tolist()
