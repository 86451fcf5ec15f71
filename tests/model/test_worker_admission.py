"""A worker goes on with a sample only along the noise levels that it began with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from diffusion_rollouts import BASE, MODEL, PROMPTS, request

from spot_runtime.daemons.arena import ArenaShape, LatentArena
from spot_runtime.daemons.worker import Worker
from spot_runtime.diffusion.embeddings import PromptEncoder
from spot_runtime.diffusion.engine import DiffusersEngine
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.messages import AdmitRequest, DenoiseStep, RequestAdmitted, StepDone, StepItem, WorkerFailed
from spot_runtime.store.layout import pack_tensors
from spot_runtime.types import WorkerId


class Said:
    """The node's side: what the worker said."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def send(self, message: object) -> None:
        self.messages.append(message)


@pytest.fixture(scope="module")
def engine() -> DiffusersEngine:
    engine = DiffusersEngine(MODEL)
    engine.load_policy(BASE, None)
    return engine


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


def admit(engine: DiffusersEngine, arena: LatentArena, embedding: bytes, schedule_digest: str) -> list[Any]:
    """What the worker says to an admission at step 1 and the step behind it."""
    node = Said()
    worker = Worker(WorkerId("n-w0"), engine, arena, node)  # type: ignore[arg-type]
    asked = request(0)
    arena.latents(0, 1)[:] = 1
    admission = AdmitRequest(
        slot=0, request=asked, embedding=embedding, denoising_step=1, schedule_digest=schedule_digest
    )
    worker.handle(admission)
    worker.handle(DenoiseStep(seq=1, items=(StepItem(slot=0, denoising_step=1),)))
    return node.messages


def test_the_schedule_that_it_began_with_is_gone_on_with(
    engine: DiffusersEngine, arena: LatentArena, embedding: bytes
) -> None:
    fresh, stepped = admit(engine, arena, embedding, "")
    assert isinstance(fresh, RequestAdmitted)
    assert isinstance(stepped, StepDone)
    assert len(fresh.schedule_digest) == 64
    assert admit(engine, arena, embedding, fresh.schedule_digest)[0] == fresh


def test_another_schedule_is_refused_and_not_a_step_is_taken(
    engine: DiffusersEngine, arena: LatentArena, embedding: bytes
) -> None:
    untouched = arena.latents(0, 2).copy()
    refused, behind = admit(engine, arena, embedding, "f" * 64)
    assert isinstance(refused, WorkerFailed)
    assert (refused.error_class, refused.slot) == ("PolicyMismatchError", 0)
    assert refused.error.startswith(f"commit of {request(0).request_id}: schedule_digest = 'ffff")
    assert isinstance(behind, WorkerFailed)
    assert arena.latents(0, 2).tolist() == untouched.tolist()
