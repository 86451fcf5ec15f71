"""The last task: compares first and last validation and leaves the report and the seed bank behind.

Owns what a run hands over. Both files are complete before either gets its name.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import pandas as pd
from flytekit import FlyteFile, StructuredDataset, current_context, task
from PIL import Image

from spot_runtime.errors import CorruptObjectError, MissingObjectError
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import Op, SampleRecord
from tasks.cost import read_meter
from tasks.decks import show
from tasks.images import RUNTIME_IMAGE
from tasks.models import Outcome, State, json_text
from tasks.records import (
    PhaseRecord,
    bank_table,
    bank_table_key,
    parquet,
    read_iteration,
    read_manifest,
    read_tables,
)
from tasks.report import Failure, Picture, Report, missing_pairs, page, parts
from tasks.resources import JOIN_LIMITS, JOIN_REQUESTS
from tasks.select_seeds import SeedBank, phase_record, score
from tasks.statistics import Gain, compare, sentence

T = TypeVar("T")

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
    """`scores` are of the final policy. Raises StoreError where the store does not answer."""
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
    """All that the report shows, read from the store; what that has lost is left out and named."""
    lost: list[str] = []
    nothing: Samples = {}
    sides = (state.scores[0], state.scores[-1])
    before, after = (_unless_lost(partial(_samples, store, side.manifest_key), nothing, lost) for side in sides)
    records = (
        _unless_lost(partial(read_iteration, store, state.run_id, iteration), None, lost)
        for iteration in range(state.iteration)
    )
    history, last = tuple(record for record in records if record is not None), phase_record(scores)
    gain = compare(before.values(), after.values())
    report = Report(
        state=state,
        history=history,
        gain=gain,
        bank=read_bank(store, state, lost),
        pictures=pictures(store, before, after, lost),
        final_phases=(last,),
        failures=(
            *(failure for record in history for failure in failures(store, record.iteration, record.phases, lost)),
            *failures(store, state.iteration, (last,), lost),
        ),
        lost=tuple(lost),
    )
    return report, gain


def failures(store: TensorStore, iteration: int, phases: Iterable[PhaseRecord], lost: list[str]) -> tuple[Failure, ...]:
    """Requests that these phases gave up; only manifests of phases that gave some up are read."""
    unwell = [phase for phase in phases if phase.manifest_key and phase.metrics.get("failed")]
    manifests = [
        (phase, _unless_lost(partial(read_manifest, store, phase.manifest_key), None, lost)) for phase in unwell
    ]
    return tuple(
        Failure(iteration, Op(phase.op), request)
        for phase, manifest in manifests
        if manifest is not None
        for request in manifest.failed
    )


def read_bank(store: TensorStore, state: State, lost: list[str]) -> pd.DataFrame:
    """The seed banks of all iterations."""
    keys = [bank_table_key(state.run_id, iteration + 1) for iteration in range(state.iteration)]
    tables = [_unless_lost(partial(read_tables, store, [key]), bank_table([]), lost) for key in keys]
    return pd.concat([table for table in tables if len(table)] or [bank_table([])], ignore_index=True)


def pictures(store: TensorStore, before: Samples, after: Samples, lost: list[str]) -> tuple[Picture, ...]:
    """The first pairs, in validation order, that both sides kept a picture of."""
    pairs = [pair for pair, sample in before.items() if pair in after and sample.image_key and after[pair].image_key]
    shown = (
        _unless_lost(partial(_picture, store, before[pair], after[pair]), None, lost) for pair in pairs[:PICTURES_SHOWN]
    )
    return tuple(picture for picture in shown if picture is not None)


def _picture(store: TensorStore, before: SampleRecord, after: SampleRecord) -> Picture:
    return Picture(
        prompt=before.prompt,
        seed=before.seed,
        before_png=small_png(store.get_bytes(before.image_key)),
        before_correct=before.correct,
        after_png=small_png(store.get_bytes(after.image_key)),
        after_correct=after.correct,
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


def _unless_lost(read: Callable[[], T], otherwise: T, lost: list[str]) -> T:
    """What `read` reads; where it is gone or damaged, which goes to `lost`, `otherwise`: a run that was trained has its report."""
    try:
        return read()
    except (MissingObjectError, CorruptObjectError) as error:
        lost.append(str(error))
        return otherwise
