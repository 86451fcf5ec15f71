"""The progress of a local run on a terminal and elsewhere."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from spot_runtime.messages import JobStatus
from spot_runtime.types import JobId, JobPhase, Op
from tasks.progress import Progress


def status(op: Op, iteration: int, scored: int, phase: JobPhase = JobPhase.RUNNING, **more: object) -> JobStatus:
    return JobStatus(
        job_id=JobId(f"{op}-{iteration}"),
        op=op,
        iteration=iteration,
        phase=phase,
        total=10,
        scored=scored,
        done=scored,
        spot_slots=2,
        reward_mean=0.5,
        elapsed_s=1.25,
        **more,  # type: ignore[arg-type]
    )


class Shown:
    """A progress on a fake terminal or pipe, with a clock to turn by hand."""

    def __init__(self, *, terminal: bool) -> None:
        self._file = io.StringIO()
        self.now_s = 0.0
        console = Console(file=self._file, force_terminal=terminal, width=120, highlight=False, color_system=None)
        self.progress = Progress(console, now_s=lambda: self.now_s)
        self.progress.iterations = 3

    @property
    def text(self) -> str:
        return self._file.getvalue()


def test_without_a_terminal_a_phase_is_told_when_done() -> None:
    shown = Shown(terminal=False)
    shown.progress.show(status(Op.ROLLOUT, 0, 4))
    assert shown.text == ""
    shown.progress.show(status(Op.ROLLOUT, 0, 10, JobPhase.SUCCEEDED))
    assert shown.text == "iteration 1/3: rollout 10/10 · spot slots 2 · mean reward 0.500 · 1.2 s\n"


def test_a_reward_service_that_does_not_answer_shows_as_samples_that_wait() -> None:
    shown = Shown(terminal=False)
    for shown.now_s in (0.0, 10.0):
        shown.progress.show(msgspec.structs.replace(status(Op.ROLLOUT, 0, 0), done=10))
    assert shown.text.startswith("iteration 1/3: rollout 0/10, 10 wait for their rewards · ")


def test_without_a_terminal_a_long_phase_is_told_at_most_every_ten_seconds() -> None:
    shown = Shown(terminal=False)
    for second in range(31):
        shown.now_s = float(second)
        shown.progress.show(status(Op.EXPLORE, 1, min(9, second)))
    assert [line.split(" ·")[0] for line in shown.text.splitlines()] == ["iteration 2/3: explore 9/10"] * 3


@pytest.mark.parametrize(
    ("phase", "message", "words"),
    [
        (JobPhase.ADMITTING, "", "explore (waiting)"),
        (JobPhase.ENCODING, "", "explore (encoding prompts)"),
        (JobPhase.RUNNING, "", "explore (waiting)"),
        (JobPhase.SUCCEEDED, "no eligible action", "explore (no eligible action)"),
        (JobPhase.SUCCEEDED, "", "explore (nothing to do)"),
    ],
)
def test_a_phase_without_requests_says_why(phase: JobPhase, message: str, words: str) -> None:
    shown = Shown(terminal=False)
    empty = JobStatus(job_id=JobId("j"), op=Op.EXPLORE, iteration=0, phase=JobPhase.RUNNING)
    shown.progress.show(empty)
    shown.now_s = 20.0
    shown.progress.show(msgspec.structs.replace(empty, phase=phase, message=message))
    assert shown.text.splitlines()[-1].startswith(f"iteration 1/3: {words} ·")


def test_failed_requests_and_the_final_policy_are_named() -> None:
    shown = Shown(terminal=False)
    shown.progress.show(status(Op.EVALUATE, 3, 8, JobPhase.SUCCEEDED, failed=2))
    assert shown.text.startswith("final policy: validate 8/10, 2 failed ·")


def test_on_a_terminal_phases_share_one_live_line_that_goes_away() -> None:
    shown = Shown(terminal=True)
    shown.progress.show(status(Op.TRAIN_STEP, 0, 3))
    shown.progress.show(status(Op.EXPLORE, 0, 7))
    assert "iteration 1/3: train 3/10 · explore 7/10 · spot slots 2" in shown.text
    assert shown.text.count("\n") <= 1
    shown.progress.note("iteration 1/3: done")
    shown.progress.close()
    assert "iteration 1/3: done" in shown.text


def test_a_forgotten_job_is_shown_no_more() -> None:
    shown = Shown(terminal=True)
    shown.progress.show(status(Op.TRAIN_STEP, 0, 3))
    shown.progress.forget("train_step-0")
    shown.progress.show(status(Op.EXPLORE, 0, 7))
    assert shown.text.rstrip().rsplit("iteration", 1)[-1].startswith(" 1/3: explore 7/10")
    shown.progress.close()
