"""What a node says of an object that the store acknowledged and lost: only a commit that is gone is named as one."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spot_runtime.daemons.commits import Record, Trail, make_record
from spot_runtime.daemons.node import Node
from spot_runtime.errors import CorruptObjectError, MissingObjectError, SpotlightError
from spot_runtime.messages import Assignment, GenerationRequest, ResumePoint, SamplingParams
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import JobId, LeaseId, Op, PolicyRef, RequestId, RunId

REQUEST = GenerationRequest(
    request_id=RequestId("q"),
    job_id=JobId("j"),
    run_id=RunId("r"),
    op=Op.ROLLOUT,
    prompt_id="p",
    prompt="a red square",
    row_json="{}",
    seed=1,
    sde_window=(2, 5),
    params=SamplingParams(height=64, width=64, num_steps=8, noise_level=0.7),
    policy=PolicyRef(),
    embedding_key="embeddings/e",
)
KEYS = {3: "runs/r/commits/q.1.3", 5: "runs/r/commits/q.1.5"}


def record(denoising_step: int, trail: Trail) -> Record:
    rows = np.arange(4 * 6, dtype=np.float32).reshape(4, 3, 2)
    return make_record(
        REQUEST,
        denoising_step,
        latents=rows[denoising_step - 2],
        window_latents=rows,
        log_probs=np.arange(3, dtype=np.float32),
        schedule_digest="s",
        trail=trail,
    )


@pytest.fixture
def store(tmp_path: Path) -> TensorStore:
    """An embedding, and two records that hold a window together."""
    store = TensorStore(f"file://{tmp_path}/store")
    store.put(REQUEST.embedding_key, {"embeds": np.ones((2, 3), np.float32)})
    trails = {3: Trail(), 5: Trail(3, (KEYS[3],))}
    for step, trail in trails.items():
        written = record(step, trail)
        store.put(KEYS[step], written.tensors, written.meta)
    return store


def fetch(store: TensorStore) -> object:
    resume = ResumePoint(denoising_step=5, commit_key=KEYS[5])
    assignment = Assignment(request=REQUEST, lease_id=LeaseId("q.2"), resume=resume)
    node = SimpleNamespace(_store=store)
    node._read_record = lambda key: Node._read_record(node, key)  # type: ignore[arg-type]
    node._fetch_commit = lambda *args: Node._fetch_commit(node, *args)  # type: ignore[arg-type]
    return Node._fetch(node, assignment, None)  # type: ignore[arg-type]


def test_what_was_committed_comes_back(store: TensorStore) -> None:
    restored = fetch(store).restored  # type: ignore[attr-defined]
    assert restored.log_probs.tolist() == [0.0, 1.0, 2.0]
    assert restored.window_latents.tolist() == np.arange(24, dtype=np.float32).reshape(4, 3, 2).tolist()


@pytest.mark.parametrize("step", KEYS)
@pytest.mark.parametrize(("harm", "error"), [("gone", MissingObjectError), ("torn", CorruptObjectError)])
def test_a_commit_that_is_gone_or_torn_is_named_so_that_it_is_redone(
    store: TensorStore, tmp_path: Path, step: int, harm: str, error: type[SpotlightError]
) -> None:
    damage(tmp_path, KEYS[step], harm)
    with pytest.raises(error) as caught:
        fetch(store)
    assert KEYS[step] in str(caught.value)


@pytest.mark.parametrize("harm", ["gone", "torn"])
def test_an_embedding_that_is_gone_does_not_cost_the_commit(store: TensorStore, tmp_path: Path, harm: str) -> None:
    damage(tmp_path, REQUEST.embedding_key, harm)
    with pytest.raises(SpotlightError, match=r"^prompt embedding: .*embeddings/e") as caught:
        fetch(store)
    assert type(caught.value).__name__ == "LostEmbeddingError"


def damage(tmp_path: Path, key: str, harm: str) -> None:
    path = tmp_path / "store" / f"{key}.obj"
    if harm == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-5])
