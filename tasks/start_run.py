"""The first task: checks all that the user gave before anything starts, names the run and stores its prompts.

Owns which inputs this version takes. Starts and writes nothing until every check has passed; a start that fails leaves only logs.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from flytekit import task

from spot_runtime.config import DatasetName, RunSettings, TrainConfig
from spot_runtime.diffusion.geometry import CheckedModel
from spot_runtime.errors import InputError, SpotlightError, StoreError
from spot_runtime.models.address import find_model, is_stored
from spot_runtime.rewards.catalog import check_reward
from spot_runtime.rewards.choice import check_offered, draws_photographs, rewarded
from spot_runtime.rewards.client import RewardClient
from spot_runtime.rewards.coco import coco_rows, is_evaluation_prompt
from spot_runtime.rewards.prompts import GenevalRow, Split, read_rows, read_texts, reward_of, shapes_rows, text_rows
from spot_runtime.store.address import check_shared, folders_to_make, recorded, remove_empty
from spot_runtime.store.checkpoints import RUNS_FOLDER, checkpoint_key, lineage_key
from spot_runtime.store.tensors import TensorStore
from spot_runtime.variables import cache_folder, given_endpoint
from tasks.calibration import with_calibration
from tasks.changes import Changes
from tasks.endpoint import endpoint, probe
from tasks.images import RUNTIME_IMAGE
from tasks.local_run import current_run
from tasks.models import Exploration, State, System
from tasks.records import prompts_key, put_rows, put_state
from tasks.resources import JOIN_LIMITS, JOIN_REQUESTS
from tasks.resume import resumed_state, with_mode

TRAIN_ROWS = 384
"""Generated training prompts: more would use up the small kinds (counting) and leave the mix to the large ones."""
VALIDATION_ROWS_MAX = 2048
VALIDATION_SEED = 0
"""Generated validation prompts are the same for every run seed, so that runs can be compared."""
ROWS_SUFFIX = ".jsonl"
VALIDATION_SHARE = 0.25
"""Share of the prompts of a user's file that is held out."""


@task(container_image=RUNTIME_IMAGE, requests=JOIN_REQUESTS, limits=JOIN_LIMITS)  # type: ignore[untyped-decorator]
def start_run(
    dataset: DatasetName,
    resolution: int,
    iterations: int,
    system: System,
    model: str,
    prompts: str,
    reward: str,
    store: str,
    exploration: Exploration,
    spot_trace: str,
    seed: int,
    resume_from: str,
    cfg: Changes,
    target_score: float,
) -> State:
    """Raises InputError, ModelError, StoreError, UnreachableError or ClusterError, each with one line.

    `cfg` is text, so that a mistake in it is such a line too and `--help` stays readable.
    """
    _refuse_what_is_not_there(system, spot_trace)
    if store:
        check_shared(store)
    if resume_from:
        given = {
            "dataset": dataset,
            "resolution": resolution,
            "iterations": iterations,
            "model": model,
            "prompts": prompts,
            "reward": reward,
            "store": store,
            "exploration": exploration,
            "seed": seed,
            "target_score": target_score,
        }
        return _resumed(resume_from, given, cfg.fields())
    cluster = probe(given_endpoint()) if given_endpoint() else None
    if cluster is None:
        check_reward(reward)
    else:
        store = store or cluster.store
    checked = find_model(model, store, resolution)
    config = with_calibration(_config(cfg, exploration), model, checked, dataset, resolution)
    photographs = draws_photographs(checked.default_resolution)
    train_rows, validation_rows = prompt_rows(dataset, prompts, seed, config, photographs=photographs)
    rows = (*train_rows, *validation_rows)
    named = rewarded(rows, reward, photographs=photographs, here=cluster is None, source=prompts)
    if cluster is not None:
        _check_service(named, cluster.reward_url)
    train_rows, validation_rows = named[: len(train_rows)], named[len(train_rows) :]
    run_id = _new_run_id(dataset)
    folder = Path(RUNS_FOLDER).absolute() / run_id if current_run() is not None else None
    settings = RunSettings.parse(
        {
            "run_id": run_id,
            "dataset": dataset,
            "iterations": iterations,
            "resolution": resolution or checked.default_resolution,
            "seed": seed,
            "model": _model_name(model, checked),
            "model_digest": checked.digest,
            "store": _store_url(store, folder),
            "train_prompts_key": prompts_key(run_id, "train"),
            "validation_prompts_key": prompts_key(run_id, "validation"),
            "target_score": target_score,
            "config": config,
        }
    )
    return _started(settings, folder, train_rows, validation_rows)


def _check_service(rows: Sequence[GenevalRow], url: str) -> None:
    with closing(RewardClient(url)) as service:
        check_offered(rows, service)


def _started(
    settings: RunSettings,
    folder: Path | None,
    train_rows: tuple[GenevalRow, ...],
    validation_rows: tuple[GenevalRow, ...],
) -> State:
    """Writes what the run needs, and starts the cluster of a local one."""
    with nothing_half_written(settings, folder):
        # before the start: the reward service loads what they name
        _store_prompts(settings, train_rows, validation_rows)
        state = _first_state(settings, folder)
        put_state(TensorStore(settings.store), state)
        _note_rewards((*train_rows, *validation_rows))
        if current_run() is not None:
            endpoint(state)  # a cluster starts in the main thread, where Ctrl-C reaches it at once
    return state


def prompt_rows(
    dataset: DatasetName, prompts: str, seed: int, config: TrainConfig, *, photographs: bool = False
) -> tuple[tuple[GenevalRow, ...], tuple[GenevalRow, ...]]:
    """Rows to train on and rows held out; no prompt is in both. Raises InputError that names file and line.

    A file of nothing but GenEval's evaluation prompts says what to validate with; what to train on is generated then.
    """
    generate = _generator(dataset, photographs)
    train_rows, validation_rows = (
        split_rows(distinct_rows(_file_rows(dataset, prompts), prompts)) if prompts else ((), ())
    )
    if prompts and not train_rows and not is_evaluation_prompt(validation_rows[0].prompt):
        raise InputError(f"prompts = {prompts}: 1 distinct prompt, must be >= 2: one is held out for validation")
    needed = config.grpo.prompts_per_iteration
    train_rows = train_rows or generate(seed, max(TRAIN_ROWS, needed), "train")
    held_out = min(config.evaluation.pairs, VALIDATION_ROWS_MAX)
    validation_rows = validation_rows or generate(VALIDATION_SEED, held_out, "validation")
    if len(train_rows) < needed:
        raise InputError(
            f"prompts = {prompts}: {len(train_rows)} rows to train on, must be >= grpo.prompts_per_iteration = {needed}"
        )
    return train_rows, validation_rows


def distinct_rows(rows: Sequence[GenevalRow], prompts: str) -> tuple[GenevalRow, ...]:
    """The first row of each prompt, in order: an iteration takes each prompt once. A local run says how many are left out."""
    first: dict[str, GenevalRow] = {}
    for row in rows:
        first.setdefault(row.prompt, row)
    if len(first) < len(rows) and (run := current_run()) is not None:
        run.progress.note(f"{prompts}: {len(rows) - len(first)} rows left out, each with a prompt of an earlier row")
    return tuple(first.values())


def split_rows(rows: Sequence[GenevalRow]) -> tuple[tuple[GenevalRow, ...], tuple[GenevalRow, ...]]:
    """GenEval's evaluation prompts are held out, all and alone; else a quarter of the distinct prompts, at least one.

    Those whose hash comes first are that quarter. The order of the file is kept.
    """
    texts = sorted({row.prompt for row in rows}, key=lambda text: hashlib.sha256(text.encode()).digest())
    held_out = set(filter(is_evaluation_prompt, texts)) or set(texts[: max(1, round(len(texts) * VALIDATION_SHARE))])
    train_rows = tuple(row for row in rows if row.prompt not in held_out)
    return train_rows, tuple(row for row in rows if row.prompt in held_out)


def _generator(dataset: DatasetName, photographs: bool) -> Callable[[int, int, Split], tuple[GenevalRow, ...]]:
    if dataset is DatasetName.DEEPSEEK_OCR:
        return text_rows
    return coco_rows if photographs else shapes_rows


def _file_rows(dataset: DatasetName, prompts: str) -> tuple[GenevalRow, ...]:
    """Texts one a line for deepseek_ocr, unless the file is called .jsonl; else rows, which may be of any kind."""
    texts = dataset is DatasetName.DEEPSEEK_OCR and not prompts.endswith(ROWS_SUFFIX)
    return read_texts(prompts) if texts else read_rows(prompts)


def _resumed(resume_from: str, given: Mapping[str, Any], cfg: Mapping[str, Any]) -> State:
    """A run that goes on; nothing of it is written here."""
    cluster_store = probe(endpoint_given).store if (endpoint_given := given_endpoint()) else ""
    state = resumed_state(resume_from, {**given, "store": given["store"] or cluster_store}, cfg)
    if cluster_store not in ("", state.settings.store):
        raise InputError(
            f"resume_from = {resume_from!r}: its store is {state.settings.store}, that of the cluster is {cluster_store}"
        )
    if (run := current_run()) is not None:
        run.progress.iterations = state.iterations
        endpoint(state)
    return state


def _refuse_what_is_not_there(system: System, spot_trace: str) -> None:
    """A switch that is ignored would be worse than one that is missing."""
    if system is not System.SPOTLIGHT:
        raise InputError(f"system = {system.value!r}: this version runs only {System.SPOTLIGHT.value!r}")
    if spot_trace:
        raise InputError(f"spot_trace = {spot_trace!r}: this version does not replay traces, must be empty")


def _store_url(store: str, folder: Path | None) -> str:
    """As given or as the cluster has it, for any working directory; else beside the outputs of a local run."""
    if store:
        return recorded(store)
    if folder is None:
        raise InputError("store = '': must be a URL that tasks and the cluster share, except in a local run")
    return (folder / "store").as_uri()


def _config(cfg: Changes, exploration: Exploration) -> TrainConfig:
    """What the command line says goes before the file, except that its default leaves the file its say."""
    try:
        config = TrainConfig.parse(cfg.fields())
    except InputError as error:
        raise InputError(f"cfg.{error}") from error
    if exploration is not Exploration.BANDIT:
        config = with_mode(config, exploration)
    return config


def _model_name(model: str, checked: CheckedModel) -> str:
    """A local folder as an absolute path, since daemons run elsewhere; other names as they are."""
    return str(checked.path) if Path(model).expanduser().is_dir() else model


def _new_run_id(dataset: DatasetName) -> str:
    """Sorts by time and never repeats; Flyte's own ids change with retries and do not exist locally."""
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    return f"{dataset.value.replace('_', '-')}-{stamp}-{secrets.token_hex(2)}"


def _store_prompts(
    settings: RunSettings, train_rows: Sequence[GenevalRow], validation_rows: Sequence[GenevalRow]
) -> None:
    """The first thing that is written: a store that cannot take it is named as the option that it came from."""
    store = TensorStore(settings.store)
    try:
        put_rows(store, settings.train_prompts_key, train_rows)
        put_rows(store, settings.validation_prompts_key, validation_rows)
    except StoreError as error:
        raise InputError(f"store = {settings.store!r}: cannot be written: {error}") from error


@contextmanager
def nothing_half_written(settings: RunSettings, folder: Path | None) -> Iterator[None]:
    """Where the start fails, the prompts go and so does all of the run's folder but its logs, which the error then names."""
    made = folders_to_make(settings.store)
    try:
        yield
    except BaseException as error:
        with suppress(SpotlightError):
            store = TensorStore(settings.store)
            store.delete(checkpoint_key(settings.run_id, 0))
            store.delete(lineage_key(settings.lineage, settings.run_id))
            store.delete(settings.train_prompts_key)
            store.delete(settings.validation_prompts_key)
        remove_empty(made)
        logs = _only_logs(folder) if folder is not None and folder.is_dir() else None
        if logs is not None and isinstance(error, SpotlightError):
            error.args = (f"{error}; logs are in {logs}",)
        raise


def _only_logs(folder: Path) -> Path | None:
    """Removes all else from a run's folder, then folders that are empty; None where nothing was logged."""
    for path in sorted(folder.rglob("*"), reverse=True):  # what is in a folder before the folder
        with suppress(OSError):
            if path.is_dir():
                path.rmdir()
            elif path.suffix != ".log" or not path.stat().st_size:
                path.unlink()
    for empty in (folder, folder.parent):
        with suppress(OSError):
            empty.rmdir()
    return folder if folder.is_dir() else None


def _first_state(settings: RunSettings, folder: Path | None) -> State:
    if (run := current_run()) is not None:
        run.progress.iterations = settings.iterations
        run.progress.note(f"run {settings.run_id}: {settings.iterations} iterations, {settings.resolution} px")
        if is_stored(settings.model):
            run.progress.note(
                f"model {settings.model} is pulled to {cache_folder() / 'models'} where it is not there yet"
            )
    return State(
        run_id=settings.run_id,
        settings_json=settings.model_dump_json(),
        iterations=settings.iterations,
        folder=str(folder or ""),
    )


def _note_rewards(rows: Sequence[GenevalRow]) -> None:
    """Defaults that follow from the model must be seen."""
    if (run := current_run()) is not None:
        counts = Counter(map(reward_of, rows))
        run.progress.note("judged by " + ", ".join(f"{name} ({count} prompts)" for name, count in counts.items()))
