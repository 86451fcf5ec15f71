"""The last task: compares first and last validation and leaves the report and the seed bank behind.

Owns what a run hands over. Both files are complete before either gets its name.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from flytekit import FlyteFile, StructuredDataset, current_context, task
from PIL import Image

from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import Op, SampleRecord
from tasks.cost import read_meter
from tasks.decks import show
from tasks.images import RUNTIME_IMAGE
from tasks.models import Outcome, State, json_text
from tasks.records import PhaseRecord, bank_table_key, parquet, read_history, read_manifest, read_tables
from tasks.report import Failure, Picture, Report, missing_pairs, page, parts
from tasks.resources import JOIN_LIMITS, JOIN_REQUESTS
from tasks.select_seeds import SeedBank, phase_record, score
from tasks.statistics import Gain, compare, sentence

PICTURES_SHOWN = 16
PICTURE_PIXELS_MAX = 256
"""Larger pictures are scaled down, so that the report stays one small file."""

Samples = Mapping[tuple[str, int], SampleRecord]


class RunOutputs(NamedTuple):
    """Outputs of a run."""

    summary: str
    report: FlyteFile
    seed_bank: SeedBank
    state: State


@task(container_image=RUNTIME_IMAGE, requests=JOIN_REQUESTS, limits=JOIN_LIMITS, enable_deck=True, deck_fields=[])  # type: ignore[untyped-decorator]
def finish_run(state: State, scores: Outcome) -> RunOutputs:
    """`scores` are of the final policy. Raises StoreError where an object cannot be read."""
    store = TensorStore(state.settings.store)
    update = {
        "scores": [*state.scores, score(state, scores)],
        "meter_json": json_text(read_meter([scores.usage], state.meter)),
    }
    final = state.model_copy(update=update)
    report, gain = build_report(store, final, scores)
    folder = Path(final.folder or current_context().working_directory)
    html, table = folder / "report.html", folder / "seed_bank.parquet"
    write_together({html: page(report).encode(), table: parquet(report.bank)})
    show(parts(report))
    local = {"remote_path": False} if final.folder else {}
    return RunOutputs(
        f"{sentence(gain)}{missing_pairs(final)}",
        FlyteFile(str(html), **local),
        StructuredDataset(dataframe=report.bank),
        final,
    )


def build_report(store: TensorStore, state: State, scores: Outcome) -> tuple[Report, Gain | None]:
    """All that the report shows, read from the store."""
    before, after = (_samples(store, item.manifest_key) for item in (state.scores[0], state.scores[-1]))
    gain = compare(before.values(), after.values())
    history, last = read_history(store, state.run_id, state.iteration), phase_record(scores)
    report = Report(
        state=state,
        history=history,
        gain=gain,
        bank=read_bank(store, state),
        pictures=pictures(store, before, after),
        final_phases=(last,),
        failures=(
            *(failure for record in history for failure in failures(store, record.iteration, record.phases)),
            *failures(store, state.iteration, (last,)),
        ),
    )
    return report, gain


def failures(store: TensorStore, iteration: int, phases: Iterable[PhaseRecord]) -> tuple[Failure, ...]:
    """Requests that these phases gave up; only manifests of phases that gave some up are read."""
    unwell = [phase for phase in phases if phase.manifest_key and phase.metrics.get("failed")]
    return tuple(
        Failure(iteration, Op(phase.op), request)
        for phase in unwell
        for request in read_manifest(store, phase.manifest_key).failed
    )


def read_bank(store: TensorStore, state: State) -> pd.DataFrame:
    """The seed banks of all iterations."""
    return read_tables(store, (bank_table_key(state.run_id, iteration + 1) for iteration in range(state.iteration)))


def pictures(store: TensorStore, before: Samples, after: Samples) -> tuple[Picture, ...]:
    """The first pairs, in validation order, that both sides kept a picture of."""
    pairs = [pair for pair, sample in before.items() if pair in after and sample.image_key and after[pair].image_key]
    return tuple(
        Picture(
            prompt=before[pair].prompt,
            seed=pair[1],
            before_png=small_png(store.get_bytes(before[pair].image_key)),
            before_correct=before[pair].correct,
            after_png=small_png(store.get_bytes(after[pair].image_key)),
            after_correct=after[pair].correct,
        )
        for pair in pairs[:PICTURES_SHOWN]
    )


def small_png(png: bytes) -> bytes:
    """The picture itself, or a smaller one where a side is longer than PICTURE_PIXELS_MAX."""
    with Image.open(io.BytesIO(png)) as picture:
        if max(picture.size) <= PICTURE_PIXELS_MAX:
            return png
        picture.thumbnail((PICTURE_PIXELS_MAX, PICTURE_PIXELS_MAX))
        buffer = io.BytesIO()
        picture.save(buffer, "PNG")
        return buffer.getvalue()


def write_together(files: Mapping[Path, bytes]) -> None:
    """Writes all under other names first, so that no reader ever sees half of one."""
    drafts = [(path.with_name(f".{path.name}.{os.getpid()}"), path) for path in files]
    for draft, path in drafts:
        draft.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(files[path])
    for draft, path in drafts:
        draft.replace(path)


def _samples(store: TensorStore, manifest_key: str) -> Samples:
    found: Sequence[SampleRecord] = read_manifest(store, manifest_key).samples
    return {(sample.prompt_id, sample.seed): sample for sample in found}
