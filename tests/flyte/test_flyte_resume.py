"""A run that is continued, against a control daemon that only pretends to work."""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from fake_control import FakeControl

from spot_runtime.errors import InputError, TrainingError
from spot_runtime.store.checkpoints import checkpoint_key, find_checkpoint
from spot_runtime.types import Op
from tasks.models import Score, State
from tasks.options import UNSAID
from workflows.dit_grpo import train

SMALL = {"grpo": {"group_size": 4}, "evaluation": {"pairs": 20, "every": 2}}


def broken_off(embedded: FakeControl, model_folder: str, *, after: int, **options: object) -> str:
    """Id of a run of three iterations whose training fails for good once it has trained `after` times."""
    embedded.errors = {Op.TRAIN_STEP: ("TrainingError", "loss = nan: must be finite")}
    embedded.errors_from_iteration = after
    with pytest.raises(TrainingError):
        train(model=model_folder, iterations=3, cfg=SMALL, **options)
    embedded.errors = {}
    return embedded.submissions[-1].run_id


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_run_goes_on_where_its_last_checkpoint_is(embedded: FakeControl, model_folder: str, after: int) -> None:
    run_id = broken_off(embedded, model_folder, after=after)
    before = len(embedded.submissions)
    state: State = train(model=model_folder, resume_from=run_id).state
    assert (state.run_id, state.iteration, state.policy.version) == (run_id, 3, 3)
    again = embedded.submissions[before:]
    assert {job.run_id for job in again} == {run_id}
    assert [job.iteration for job in again if job.op is Op.TRAIN_STEP] == list(range(after, 3))
    assert [score.policy_version for score in state.scores] == [0, 2, 3]
    assert (Path(state.folder) / "report.html").is_file()
    assert Path(state.folder).name == run_id


def test_jobs_that_were_done_are_attached_to_and_not_done_again(embedded: FakeControl, model_folder: str) -> None:
    run_id = broken_off(embedded, model_folder, after=1)
    done = {job.spec.job_id for job in embedded.of(Op.ROLLOUT)}
    train(model=model_folder, resume_from=run_id)
    assert {job.spec.job_id for job in embedded.of(Op.ROLLOUT) if job.spec.iteration < 2} == done


def test_latest_is_the_last_run_of_the_dataset_and_a_corrupt_checkpoint_is_passed_over(
    embedded: FakeControl, model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken_off(embedded, model_folder, after=1)
    run_id = broken_off(embedded, model_folder, after=2)
    record = tmp_path / "spotlight-runs" / run_id / "store" / f"{checkpoint_key(run_id, 2)}.obj"
    record.write_bytes(record.read_bytes()[:100])
    state: State = train(model=model_folder, resume_from="latest").state
    assert (state.run_id, state.iteration) == (run_id, 3)
    said = capsys.readouterr().err
    assert f"passed over {checkpoint_key(run_id, 2)}: " in said
    assert f"resuming run {run_id} after iteration 1, of 3" in said


def test_a_finished_run_can_be_given_more_iterations(embedded: FakeControl, model_folder: str) -> None:
    run_id = train(model=model_folder, iterations=2, cfg=SMALL).state.run_id
    state: State = train(model=model_folder, resume_from=run_id, iterations=4).state
    assert (state.run_id, state.iteration, state.iterations, state.settings.iterations) == (run_id, 4, 4, 4)
    assert len(find_checkpoint(run_id).checkpoint.state_json) > 0


def test_more_iterations_find_the_jobs_that_were_done_with_fewer(embedded: FakeControl, model_folder: str) -> None:
    run_id = broken_off(embedded, model_folder, after=1)
    done = {job.spec.job_id for job in embedded.of(Op.ROLLOUT)}
    train(model=model_folder, resume_from=run_id, iterations=5, target_score=1.0)
    again = [job.spec for job in embedded.of(Op.ROLLOUT)]
    assert {spec.job_id for spec in again if spec.iteration < 2} == done
    assert [spec.iteration for spec in again] == sorted({spec.iteration for spec in again})


def test_a_run_goes_on_in_the_store_that_it_was_found_in(
    embedded: FakeControl, model_folder: str, tmp_path: Path
) -> None:
    """Copied or moved: nothing is read from or written to where it was made."""
    run_id = train(model=model_folder, iterations=1, cfg=SMALL).state.run_id
    made, copy = tmp_path / "spotlight-runs" / run_id, tmp_path / "elsewhere" / run_id
    shutil.copytree(made, copy)
    before = sorted(path for path in made.rglob("*") if path.is_file())
    uri = f"{(copy / 'store').as_uri()}/runs/{run_id}"
    state: State = train(model=model_folder, resume_from=uri, iterations=2).state
    assert (state.settings.store, state.folder, state.iteration) == ((copy / "store").as_uri(), str(copy), 2)
    assert sorted(path for path in made.rglob("*") if path.is_file()) == before


def test_the_command_line_that_began_a_run_goes_on_with_it(
    embedded: FakeControl, model_folder: str, tmp_path: Path
) -> None:
    """Another spelling of the store is the same store, and an option goes before the file as it did at first."""
    cfg = {**SMALL, "exploration": {"mode": "best_of_n"}}
    options = {"model": model_folder, "exploration": "none", "cfg": cfg}
    run_id = train(iterations=1, store=f"{tmp_path}/store/", **options).state.run_id
    for store in (f"{tmp_path}/store/", f"{tmp_path}/store", (tmp_path / "store").as_uri()):
        state: State = train(resume_from=run_id, store=store, **options).state
        assert (state.run_id, state.settings.config.exploration.mode) == (run_id, "none")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 7}, "seed = 7: run {run} has 0, and keeps it"),
        ({"resolution": 128}, "resolution = 128: run {run} has 64, and keeps it"),
        ({"prompts": "rows.jsonl"}, "prompts = 'rows.jsonl': must be empty, run {run} keeps the rows it has"),
        ({"reward": "ocr"}, "reward = 'ocr': must be empty"),
        ({"exploration": "none"}, "exploration = 'none': run {run} has 'bandit', and keeps it"),
        ({"cfg": {"grpo": {"learning_rate": 1.0}}}, "cfg.grpo.learning_rate = 1.0: the run has 0.0005, and keeps it"),
        ({"cfg": {"deterministic": True}}, "cfg.deterministic = True: the run has False, and keeps it"),
        ({"cfg": {"grpo": {"nothing": 1}}}, "cfg.grpo.nothing = 1: Extra inputs are not permitted"),
    ],
)
def test_an_option_that_is_not_the_runs_is_refused(
    embedded: FakeControl, model_folder: str, options: dict[str, object], words: str
) -> None:
    run_id = train(model=model_folder, iterations=1, cfg=SMALL).state.run_id
    before = len(embedded.submissions)
    with pytest.raises(InputError) as caught:
        train(model=model_folder, resume_from=run_id, **options)
    assert words.format(run=run_id) in str(caught.value)
    assert len(embedded.submissions) == before


def test_a_run_ends_once_a_validation_reaches_the_target_and_reports(embedded: FakeControl, model_folder: str) -> None:
    """Policy n gets (n + 1) / 5 of the pairs right and every policy is validated: .6 is reached by policy 2."""
    cfg = {**SMALL, "evaluation": {"pairs": 20, "every": 1}}
    outputs = train(model=model_folder, iterations=9, cfg=cfg, target_score=0.6)
    state: State = outputs.state
    assert [score.policy_version for score in state.scores] == [0, 1, 2, 3]
    assert (state.iteration, state.reached_target) == (3, True)
    assert len(embedded.of(Op.TRAIN_STEP)) == 3
    assert "of policy version 2 reached the target score of 60.0%" in Path(outputs.report.path).read_text()


def test_pairs_that_were_not_scored_count_as_wrong_against_the_target(embedded: FakeControl, model_folder: str) -> None:
    settings = train(model=model_folder, iterations=1, cfg=SMALL, target_score=0.5).state
    pairs = ((1, 1.0, False), (19, 9 / 19, False), (12, 10 / 12, True), (20, 0.5, True))
    for scored, correct, reached in pairs:
        score = Score(
            iteration=1, policy_version=1, pairs=scored, correct=correct, reward_mean=correct, manifest_key="m"
        )
        assert settings.model_copy(update={"scores": [score]}).reached_target is reached


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ([], set()),
        (["--iterations", "8", "--resolution", "0"], {"iterations"}),
        (["--iterations", "9"], {"iterations"}),
    ],
)
def test_an_option_that_is_typed_with_its_default_is_said(typed: list[str], said: set[str]) -> None:
    """But for one whose default leaves the choice to others."""

    @click.command()
    @click.option("--iterations", default=UNSAID.iterations)
    @click.option("--resolution", default=UNSAID.resolution)
    def command(**given: int) -> None:
        assert {name for name, value in given.items() if UNSAID.is_said(name, value)} == said

    assert CliRunner().invoke(command, typed, catch_exceptions=False).exit_code == 0
    assert not UNSAID.is_said("iterations", UNSAID.iterations), "no command line here"
