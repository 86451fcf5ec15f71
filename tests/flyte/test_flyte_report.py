"""The report: self-contained, escaped, and with every part from the figures that it was given."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import msgspec
import pytest

from spot_runtime.config import RunSettings, TrainConfig
from spot_runtime.store.tensors import TensorStore
from spot_runtime.types import (
    BanditState,
    ExplorationPlan,
    FailedRequest,
    JobId,
    Manifest,
    NodeId,
    Op,
    PolicyRef,
    RequestId,
    Usage,
)
from tasks.cost import Meter, Spend
from tasks.finish_run import failures
from tasks.models import Score, State, json_text
from tasks.records import IterationRecord, PhaseRecord, bank_table
from tasks.report import FAILURES_SHOWN, Failure, Picture, Report, failed_groups, fragment, page, parts, phases
from tasks.statistics import Gain
from tasks.svg import Bar, Series, line_chart, timeline

VOID = {"meta", "img", "rect", "line", "circle", "polyline", "br"}


class Balance(HTMLParser):
    """Raises where tags do not nest, and keeps what each refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data")]
        if tag not in VOID or tag in ("rect", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> without a start"
        assert self.open.pop() == tag, tag


def score(iteration: int, pairs: int, correct: float) -> Score:
    return Score(
        iteration=iteration, policy_version=iteration, pairs=pairs, correct=correct, reward_mean=0.5, manifest_key="m"
    )


def state(**more: object) -> State:
    settings = RunSettings(
        run_id="run-1",
        iterations=2,
        resolution=64,
        model="tiny",
        store="file:///store",
        train_prompts_key="a",
        validation_prompts_key="b",
        config=TrainConfig.parse({"evaluation": {"pairs": 20}}),
    )
    scores = [score(0, 20, 0.25), score(2, 20, 0.4)]
    values = {
        "run_id": "run-1",
        "settings_json": settings.model_dump_json(),
        "iterations": 2,
        "iteration": 2,
        "scores": scores,
        "meter_json": json_text(Meter(Spend(100.0, 200.0), Spend(3700.0, 7400.0))),
        "bandit_json": '{"arms":[{"sequences":16,"effective_steps":7,"chosen":3,"observations":[1.0,1.5]}]}',
        **more,
    }
    return State.model_validate(values)


def history() -> tuple[IterationRecord, ...]:
    return tuple(
        IterationRecord(
            iteration=iteration,
            policy=PolicyRef(iteration),
            phases=(
                PhaseRecord(
                    op="rollout", usage=Usage(100.0 * iteration, 100.0 * iteration + 10), metrics={"reward_mean": 0.3}
                ),
                PhaseRecord(op="train_step", usage=Usage(100.0 * iteration + 10, 100.0 * iteration + 30), metrics={}),
                PhaseRecord(op="explore", usage=Usage(100.0 * iteration + 10, 100.0 * iteration + 28), metrics={}),
            ),
            plan=ExplorationPlan(16, 7, 0.1, ("a", "b"), 12.5, 20.0, "best of 9 arms"),
            bandit=BanditState(),
            bank_key="k",
            bank_prompts=2,
            rank_transfer=0.42 if iteration else None,
            spot_busy=0.95 if iteration else None,
        )
        for iteration in range(2)
    )


def test_the_phase_table_counts_the_last_validation_and_no_exploration_without_a_plan() -> None:
    first, last = history()
    shown = phases(report(history=(first, msgspec.structs.replace(last, plan=ExplorationPlan()))))
    cells = [re.findall(r"<td[^>]*>([^<]*)</td>", row) for row in re.findall(r"<tr>.*?</tr>", shown, re.DOTALL)]
    assert [row[:2] for row in cells if row] == [["rollout", "2"], ["train", "2"], ["explore", "1"], ["evaluate", "1"]]


def report(**more: object) -> Report:
    bank = bank_table([(2, "id", "a <b>red</b> circle", 7, 0.75, 0, "top", 1, "16 x 7", 7)])
    values: dict[str, object] = {
        "state": state(),
        "history": history(),
        "gain": Gain(20, 20, 0.25, 0.4, 0.05, 0.25),
        "bank": bank,
        "pictures": (Picture("two & three <circles>", 7, b"before", False, b"after", True),),
        "final_phases": (PhaseRecord(op="evaluate", usage=Usage(130.0, 150.0), metrics={}),),
        **more,
    }
    return Report(**values)  # type: ignore[arg-type]


def text(html: str) -> str:
    """What a reader sees, on one line."""
    return " ".join(re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.S).split())


def test_the_page_is_well_formed_and_needs_nothing_from_outside() -> None:
    html = page(report())
    balance = Balance()
    balance.feed(html)
    assert balance.open == []
    assert all(reference.startswith("data:image/png;base64,") for reference in balance.references)
    assert "<script" not in html
    assert "http" not in html
    assert "prefers-color-scheme:dark" in html


def test_the_headline_has_both_scores_the_interval_and_the_cost() -> None:
    shown = text(page(report()))
    assert "25.0% → 40.0%" in shown
    assert "+15.0% (95% interval +5.0% to +25.0%, paired bootstrap over 20 prompt-seed pairs)" in shown
    assert "$15.82 at the paper's prices" in shown


def test_a_validation_that_lost_pairs_says_so() -> None:
    short = report(state=state(scores=[score(0, 20, 0.25), score(1, 17, 0.3), score(2, 16, 0.4)]))
    sections = {part.title: text(part.html) for part in parts(short)}
    assert (
        "paired bootstrap over 20 prompt-seed pairs; of 20 pairs the first validation scored 20, the last 16)"
        in sections["Outcome"]
    )
    assert (
        "20 (of which iteration 1 scored 17, iteration 2 scored 16) fixed pairs of held-out" in sections["Validation"]
    )
    assert "20 fixed pairs of held-out prompts and seeds" in text(parts(report())[1].html)


@pytest.mark.parametrize(("low", "high", "style"), [(0.01, 0.2, "good"), (-0.2, -0.01, "bad"), (-0.1, 0.1, "soft")])
def test_a_difference_is_coloured_by_its_interval(low: float, high: float, style: str) -> None:
    html = parts(report(gain=Gain(20, 20, 0.25, 0.4, low, high)))[0].html
    assert f'<b class="{style}">+15.0%</b>' in html


def test_pictures_stand_in_pairs_with_success_marked_and_prompts_escaped() -> None:
    html = parts(report())[2].html
    assert html.count("<img ") == 2
    assert '<span class="no"><img alt="before: wrong"' in html
    assert '<span class="ok"><img alt="after: correct"' in html
    assert (html.count("✗"), html.count("✓")) == (1, 1)
    assert "two &amp; three &lt;circles&gt;" in html


def test_the_timeline_has_a_bar_for_each_phase_in_each_of_its_pools() -> None:
    html = parts(report())[3].html
    assert html.count("<title>iteration ") == 2 * (2 + 1 + 1) + 1
    assert "<title>iteration 1, explore: 18.0 s</title>" in html


STEP = {
    "loss": -0.0125,
    "ratio_mean": 1.0,
    "ratio_min": 0.99995,
    "ratio_max": 1.00009,
    "clip_fraction": 0.25,
    "kl_rollout": 3e-5,
    "grad_norm": 0.5,
    "zero_variance_groups": 3.0,
    "adapter_delta_norm": 0.0625,
    "train_s": 12.0,
    "dlogp_first_max": 8e-7,
    "dlogp_step_100": 3e-7,
    "dlogp_step_00": 1e-7,
    "dlogp_step_99": 2e-7,
}


@pytest.mark.parametrize(
    ("log_probs", "words"),
    [
        ({"log_probs_recomputed": 0.0, "log_probs_recompute_s": 0.0}, "of the rollouts"),
        ({"log_probs_recomputed": 1.0, "log_probs_recompute_s": 3.25}, "recomputed, 3.25 s"),
    ],
)
def test_every_training_step_shows_its_numbers_and_whose_log_probs_it_took(
    log_probs: dict[str, float], words: str
) -> None:
    first, second = history()
    trained = PhaseRecord(op="train_step", usage=Usage(110.0, 130.0), metrics=STEP | log_probs)
    shown = report(history=(first, msgspec.structs.replace(second, phases=(trained,))))
    (section,) = (text(part.html) for part in parts(shown) if part.title == "Training")
    gaps = "0: 1.0e-07, 99: 2.0e-07, 100: 3.0e-07"
    assert f"1 -0.0125 1 0.99995 1.00009 0.25 3e-05 0.5 3 0.0625 12 8e-07 {words} {gaps}" in section


def test_a_table_that_leaves_iterations_out_says_so() -> None:
    first, _ = history()
    for made, said in ((40, 0), (41, 3)):
        html = page(report(history=(first,) * made))
        assert html.count(f"The last 40 of {made} iterations.") == said


def gave_up(number: int, prompt_id: str, op: Op = Op.ROLLOUT) -> Failure:
    request = FailedRequest(
        request_id=RequestId(f"r-{number}"),
        job_id=JobId("j"),
        prompt_id=prompt_id,
        attempts=3,
        failures=2,
        losses=1,
        reason="RewardError: <no answer>",
        prompt=f"prompt & {prompt_id}",
        node_id=NodeId("spot-1"),
    )
    return Failure(1, op, request)


def test_failed_groups_are_named_with_request_node_and_cause_and_only_where_there_are_some() -> None:
    assert "Failed groups" not in page(report())
    failed = (gave_up(0, "a"), gave_up(1, "a"), gave_up(2, "b", Op.EVALUATE))
    html = page(report(failures=failed))
    assert html.index("<h2>Phases</h2>") < html.index("<h2>Failed groups</h2>") < html.index("<h2>Training</h2>")
    shown = text(html)
    assert "3 requests of 2 groups failed for good." in shown
    assert "1 rollout prompt &amp; a r-1 spot-1 3 (2 failed, 1 lost) RewardError: &lt;no answer&gt;" in shown
    assert "1 evaluate prompt &amp; b r-2" in shown


def test_of_very_many_failed_requests_the_first_are_shown_and_all_are_counted() -> None:
    html = failed_groups(report(failures=tuple(gave_up(number, "a") for number in range(FAILURES_SHOWN + 1))))
    assert html.count("<tr>") == FAILURES_SHOWN + 1
    assert f"{FAILURES_SHOWN + 1} requests of 1 group failed for good." in html
    assert f"Shown: the first {FAILURES_SHOWN}." in html


def test_failures_are_read_from_the_manifests_of_phases_that_gave_something_up() -> None:
    store = TensorStore("memory://failures")
    lost = gave_up(0, "a").request
    manifest = Manifest(JobId("j"), Op.ROLLOUT, 1, PolicyRef(), (), ("a",), failed=(lost,))
    store.put_bytes("m", msgspec.json.encode(manifest))
    phases = (
        PhaseRecord(op="rollout", usage=Usage(), metrics={"failed": 1.0}, manifest_key="m"),
        PhaseRecord(op="explore", usage=Usage(), metrics={"failed": 0.0}, manifest_key="not there"),
        PhaseRecord(op="train_step", usage=Usage(), metrics={}),
    )
    missed: list[str] = []
    assert failures(store, 1, phases, missed) == (Failure(1, Op.ROLLOUT, lost),)
    assert missed == []


def test_seed_bank_planner_cost_and_settings_show_their_figures() -> None:
    sections = {part.title: text(part.html) for part in parts(report())}
    assert "a &lt;b&gt;red&lt;/b&gt; circle 7 0.750 0 top 1 16 x 7" in sections["Seed bank"]
    assert "1 16 x 7 2 12.5 20.0 0.0% 95% 0.42 best of 9 arms" in sections["Exploration planner"]
    assert "16 7 3 1.250" in sections["Exploration planner"]
    assert "reserved 3600.0 1.0000 $10.08 $10.0800" in sections["Cost"]
    assert "spot 7200.0 2.0000 $2.87 $5.7400" in sections["Cost"]
    assert "&quot;resolution&quot;: 64" in sections["Settings"]


def test_a_run_without_anything_to_show_still_has_a_page() -> None:
    empty = report(
        state=state(scores=[], iteration=0), history=(), gain=None, bank=bank_table([]), pictures=(), final_phases=()
    )
    shown = text(page(empty))
    for words in (
        "no validation",
        "No pictures were kept.",
        "No job was timed.",
        "every prompt kept its default seeds",
    ):
        assert words in shown


def test_a_deck_carries_its_own_style() -> None:
    html = fragment(parts(report())[1])
    assert html.startswith("<style>")
    assert "<h2>Validation</h2>" in html
    assert "<svg " in html


def test_a_line_stays_inside_its_axes() -> None:
    html = line_chart([Series("score", "a", ((0, 0.0), (5, 0.37), (10, 1.0)))], x_label="iteration")
    dots = [(float(x), float(y)) for x, y in re.findall(r'<circle class="a" cx="([\d.]+)" cy="([\d.]+)"', html)]
    assert [x for x, _ in dots] == [58.0, 451.0, 844.0]
    assert dots[0][1] == 240.0
    assert dots[2][1] == 36.0
    assert dots[2][1] < dots[1][1] < dots[0][1]
    assert ">10</text>" in html


def test_bars_are_as_long_as_their_seconds() -> None:
    html = timeline(("one", "two"), [Bar(0, 0, 10, "a", "x"), Bar(1, 10, 30, "b", "y")], [("kind", "a")])
    widths = [float(width) for width in re.findall(r'width="([\d.]+)" height="18"', html)]
    assert (widths[1] + 1) / (widths[0] + 1) == pytest.approx(2.0, abs=0.01)
