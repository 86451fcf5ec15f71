"""The report of a run as self-contained HTML: parts that a page and Flyte decks share. Owns wording, layout and style.

Never reads the store or the clock; all it shows is in `Report`. No external assets, readable in light and dark.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

import pandas as pd

from spot_runtime.instances.cost import PAPER_PRICES
from spot_runtime.planner.review import overhead_s
from spot_runtime.types import FailedRequest, Op, Usage
from tasks.models import State
from tasks.records import IterationRecord, PhaseRecord
from tasks.statistics import Gain, resampled
from tasks.svg import Bar, Series, line_chart, timeline

BANK_ROWS_SHOWN = 24
FAILURES_SHOWN = 50
ITERATIONS_DRAWN = 40
"""Timeline and tables show the last so many, and say so."""

STYLE = """
.spotlight{--ink:#1c2230;--soft:#5b6475;--paper:#fff;--card:#f5f6f9;--line:#dfe3ea;--a:#2f6fde;--b:#e08a1e;--c:#2c9a6b;--d:#9357c9;
--good:#1f8a55;--bad:#c23b3b;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif;padding:8px 4px}
@media(prefers-color-scheme:dark){.spotlight{--ink:#e6e9f0;--soft:#9aa4b6;--paper:#14171e;--card:#1d222c;--line:#323947;--a:#6ea3ff;
--b:#f0a94a;--c:#55c795;--d:#bd8bf0;--good:#55c795;--bad:#f07f7f}}
.spotlight main{max-width:960px;margin:0 auto;padding:16px}
.spotlight h1{font-size:24px;margin:8px 0 0}.spotlight h2{font-size:18px;margin:32px 0 8px}
.spotlight p{margin:6px 0}.spotlight .soft{color:var(--soft)}
.spotlight .big{font-size:38px;font-weight:650;letter-spacing:-.5px;margin:14px 0 0}
.spotlight .good{color:var(--good)}.spotlight .bad{color:var(--bad)}
.spotlight .cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin:18px 0}
.spotlight .card{background:var(--card);border-radius:8px;padding:10px 14px}
.spotlight .card b{display:block;font-size:20px;font-weight:600}
.spotlight .scroll{overflow-x:auto}
.spotlight table{border-collapse:collapse;width:100%;font-size:13.5px}
.spotlight th,.spotlight td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line)}
.spotlight th{color:var(--soft);font-weight:500}.spotlight td.n,.spotlight th.n{text-align:right}
.spotlight .grid-of-samples{display:grid;grid-template-columns:repeat(auto-fill,minmax(215px,1fr));gap:14px}
.spotlight figure{margin:0;background:var(--card);border-radius:8px;padding:10px}
.spotlight figure div{display:flex;gap:10px}.spotlight figure span{font-size:12px;color:var(--soft);text-align:center}
.spotlight figure img{width:90px;height:90px;border-radius:4px;image-rendering:pixelated;outline:3px solid var(--bad)}
.spotlight figure b{color:var(--bad)}.spotlight .ok img{outline-color:var(--good)}.spotlight figure .ok b{color:var(--good)}
.spotlight figcaption{font-size:12.5px;color:var(--soft);margin-top:6px}
.spotlight pre{background:var(--card);border-radius:8px;padding:12px;overflow-x:auto;font-size:12.5px}
.spotlight svg{display:block;height:auto;max-width:none}.spotlight svg .axis{fill:var(--soft);font:12px system-ui,sans-serif}
.spotlight svg .grid{stroke:var(--line);stroke-width:1}
.spotlight svg polyline{fill:none;stroke-width:2.2}
.spotlight svg .a{fill:var(--a)}.spotlight svg .b{fill:var(--b)}.spotlight svg .c{fill:var(--c)}.spotlight svg .d{fill:var(--d)}
.spotlight svg polyline.a{fill:none;stroke:var(--a)}.spotlight svg polyline.b{fill:none;stroke:var(--b)}
"""

STRATEGY_NAMES = {
    "bandit": "a bandit's action beside training, with the weights before",
    "best_of_n": "full candidates after training, with the new weights; the best and the worst are trained on",
    "prescreen": "cheap candidates after training, with the new weights; the best and the worst are drawn again in full",
    "none": "none, every prompt keeps its default seeds",
}
PHASE_NAMES = {Op.ROLLOUT: "rollout", Op.TRAIN_STEP: "train", Op.EXPLORE: "explore", Op.EVALUATE: "evaluate"}
PHASE_STYLES = {Op.ROLLOUT: "a", Op.TRAIN_STEP: "b", Op.EXPLORE: "c", Op.EVALUATE: "d"}
TRAINING_NUMBERS = (
    ("loss", "loss"),
    ("ratio_mean", "ratio, mean"),
    ("ratio_min", "min"),
    ("ratio_max", "max"),
    ("clip_fraction", "clipped"),
    ("kl_rollout", "KL to rollouts"),
    ("kl_reference", "KL to base"),
    ("grad_norm", "gradient norm"),
    ("zero_variance_groups", "groups without spread"),
    ("adapter_delta_norm", "norm of the update"),
    ("train_s", "seconds"),
    ("dlogp_first_max", "|Δlogp|, most"),
)
"""Metrics of a training step and what the report calls them."""
GAP = "dlogp_step_"
"""Metrics whose name ends with the index of a denoising step."""
ROWS = ("reserved", "spot", "spot, validation")
PHASE_ROWS = {Op.ROLLOUT: (0, 1), Op.TRAIN_STEP: (0,), Op.EXPLORE: (1,), Op.EVALUATE: (2,)}


@dataclass(frozen=True)
class Picture:
    """One validation pair before and after: PNG bytes, and whether the dataset's rule calls it correct."""

    prompt: str
    seed: int
    before_png: bytes
    before_correct: bool
    after_png: bytes
    after_correct: bool


@dataclass(frozen=True)
class Failure:
    """A request that a phase of an iteration gave up."""

    iteration: int
    op: Op
    request: FailedRequest


@dataclass(frozen=True)
class Report:
    """All that is shown. `final_phases` are jobs after the last iteration; `bank` has the columns of records.BANK_COLUMNS."""

    state: State
    history: tuple[IterationRecord, ...]
    gain: Gain | None
    bank: pd.DataFrame
    pictures: tuple[Picture, ...] = ()
    final_phases: tuple[PhaseRecord, ...] = field(default=())
    failures: tuple[Failure, ...] = ()
    lost: tuple[str, ...] = ()
    """Why something is not shown, a line for each object that the store lost."""


@dataclass(frozen=True)
class Part:
    """One section: also one deck."""

    title: str
    html: str


def parts(report: Report) -> tuple[Part, ...]:
    """All sections in order; those of failed groups and of what is not shown only where there is some."""
    sections: tuple[tuple[str, Callable[[Report], str]], ...] = (
        ("Outcome", headline),
        ("Validation", validation),
        ("Samples before and after", samples),
        ("Phases", phases),
        *((("Failed groups", failed_groups),) if report.failures else ()),
        *((("Not shown", not_shown),) if report.lost else ()),
        ("Training", training),
        ("Seed bank", lambda report: seed_bank(report.bank)),
        ("Exploration planner", planner),
        ("Cost", cost),
        ("Settings", settings),
    )
    return tuple(Part(title, section(report)) for title, section in sections)


def page(report: Report) -> str:
    """The whole report as one HTML document."""
    run_id = escape(report.state.run_id)
    first, *others = parts(report)
    body = first.html + "".join(f"<h2>{escape(part.title)}</h2>{part.html}" for part in others)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f'<meta name="color-scheme" content="light dark"><title>Spotlight: {run_id}</title>'
        f"<style>body{{margin:0}}{STYLE}</style></head>"
        f'<body class="spotlight"><main><h1>Spotlight</h1><p class="soft">run {run_id}</p>{body}</main></body></html>\n'
    )


def fragment(part: Part) -> str:
    """A part that stands alone in a deck."""
    return f'<style>{STYLE}</style><div class="spotlight"><main><h2>{escape(part.title)}</h2>{part.html}</main></div>'


# ---- the parts --------------------------------------------------------------------------------------------------------------------


def headline(report: Report) -> str:
    """Before and after, the interval, and a few figures."""
    state, settings = report.state, report.state.settings
    cards = (
        (str(state.iteration), "iterations"),
        (settings.dataset.value, "dataset"),
        (f"{_wall_s(report):.0f} s", "wall time of jobs"),
        (f"${state.spend.usd:.2f}", "at the paper's prices"),
    )
    shown = "".join(
        f'<div class="card"><b>{escape(value)}</b><span class="soft">{name}</span></div>' for value, name in cards
    )
    return f'{_gain(report.gain, missing_pairs(state))}<div class="cards">{shown}</div>'


def validation(report: Report) -> str:
    """Held-out score over iterations, and the mean reward of the rollouts beside it."""
    scored = tuple((float(score.iteration), score.correct) for score in report.state.scores)
    rewards = tuple(
        (float(record.iteration), phase.metrics["reward_mean"])
        for record in report.history
        for phase in record.phases
        if phase.op == Op.ROLLOUT and "reward_mean" in phase.metrics
    )
    chart = line_chart(
        [Series("validation, share correct", "a", scored), Series("rollouts, mean reward", "b", rewards)],
        x_label="iteration",
    )
    note = (
        f"{_pairs(report.state)} fixed pairs of held-out prompts and seeds. "
        "Rollouts use chosen seeds, so the two lines are not comparable."
    )
    return f'<div class="scroll">{chart}</div><p class="soft">{note}{_target(report.state)}</p>'


def samples(report: Report) -> str:
    """The same prompts and seeds under the first and the last policy."""
    if not report.pictures:
        return '<p class="soft">No pictures were kept.</p>'
    figures = "".join(_figure(picture) for picture in report.pictures)
    note = "Left before, right after; same prompt and seed. The first pairs of the validation set, not selected."
    return f'<p class="soft">{note}</p><div class="grid-of-samples">{figures}</div>'


def phases(report: Report) -> str:
    """What ran when, by pool."""
    drawn = [*_drawn_phases(report.history[-ITERATIONS_DRAWN:])]
    drawn += [(report.state.iteration, phase) for phase in report.final_phases]
    jobs = [(iteration, phase) for iteration, phase in drawn if phase.usage.finished_s > phase.usage.started_s]
    if not jobs:
        return '<p class="soft">No job was timed.</p>'
    start_s = min(phase.usage.started_s for _, phase in jobs)
    bars = [bar for iteration, phase in jobs for bar in _bars(iteration, phase, start_s)]
    legend = [(PHASE_NAMES[op], PHASE_STYLES[op]) for op in Op]
    return f'<div class="scroll">{timeline(ROWS, bars, legend)}</div>{_left_out(report)}{_busy(_worked(report))}'


def failed_groups(report: Report) -> str:
    """Requests that were given up, which group each was of, where it ran last and why it failed."""
    groups = {(failure.iteration, failure.op, failure.request.prompt_id) for failure in report.failures}
    shown = report.failures[:FAILURES_SHOWN]
    rows = (
        [
            str(failure.iteration),
            PHASE_NAMES[failure.op],
            escape(failure.request.prompt or failure.request.prompt_id),
            escape(failure.request.request_id),
            escape(failure.request.node_id or ""),
            f"{failure.request.attempts} ({failure.request.failures} failed, {failure.request.losses} lost)",
            escape(failure.request.reason),
        ]
        for failure in shown
    )
    rest = f" Shown: the first {len(shown)}." if len(shown) < len(report.failures) else ""
    note = (
        f"{_count(len(report.failures), 'request')} of {_count(len(groups), 'group')} failed for good. A rollout's group that lost a "
        f"sample is left out of training whole; of an exploration or a validation only the sample is missing.{rest}"
    )
    names = ("iteration", "phase", "prompt", "request", "last node", "attempts", "why")
    return f'<p class="soft">{note}</p>{table(names, rows)}'


def not_shown(report: Report) -> str:
    """What the store lost since it was written."""
    rows = "".join(f"<li>{escape(reason)}</li>" for reason in report.lost[:FAILURES_SHOWN])
    rest = f" Shown: the first {FAILURES_SHOWN}." if len(report.lost) > FAILURES_SHOWN else ""
    return f'<p class="soft">{_count(len(report.lost), "object")} of this run cannot be read any more.{rest}</p><ul>{rows}</ul>'


def training(report: Report) -> str:
    """The numbers of each training step; a number that a step does not have is empty."""
    steps = [
        (record.iteration, phase.metrics)
        for record in report.history[-ITERATIONS_DRAWN:]
        for phase in record.phases
        if phase.op == Op.TRAIN_STEP
    ]
    rows = (
        [
            str(iteration),
            *(_number(name, metrics.get(name)) for name, _ in TRAINING_NUMBERS),
            _log_probs(metrics),
            _gaps(metrics),
        ]
        for iteration, metrics in steps
    )
    names = ("iteration", *(title for _, title in TRAINING_NUMBERS), "log-probs", "|Δlogp| by denoising step")
    note = (
        "|Δlogp|: mean difference between the log-probs of trainer and rollouts before the first update, at each denoising step that a "
        "window covers, by its index. Where one exceeds a tenth of the clip range, the trainer computes them again; "
        "the extra seconds are shown."
    )
    return f'{_left_out(report)}{table(names, rows)}<p class="soft">{note}</p>'


def seed_bank(bank: pd.DataFrame) -> str:
    """The newest seeds: best and worst halves of what exploration found."""
    if bank.empty:
        return '<p class="soft">Empty: every prompt kept its default seeds.</p>'
    newest = bank[bank["iteration"] == bank["iteration"].max()]
    rows = newest.head(BANK_ROWS_SHOWN)
    columns = ("prompt", "seed", "exploration_reward", "rank", "side", "policy_version", "action")
    note = (
        f"{len(bank)} rows over {bank['iteration'].nunique()} iterations; shown: {len(rows)} of the {len(newest)} seeds "
        f"for iteration {newest['iteration'].iloc[0]}."
    )
    cells = ([_cell(value) for value in row] for row in rows.loc[:, list(columns)].itertuples(index=False))
    return f'<p class="soft">{note}</p>{table([name.replace("_", " ") for name in columns], cells)}'


def planner(report: Report) -> str:
    """Which action the strategy took in each iteration, and what the bandit thinks of its arms."""
    actions = (
        [
            str(record.iteration),
            f"{record.plan.sequences} x {record.plan.effective_steps}" if record.plan.sequences else "none",
            str(len(record.plan.explored_prompt_ids)),
            f"{record.plan.planned_s:.1f}",
            f"{record.plan.window_s:.1f}",
            _overhead(record),
            "" if record.spot_busy is None else f"{record.spot_busy:.0%}",
            "" if record.rank_transfer is None else f"{record.rank_transfer:.2f}",
            escape(record.plan.reason),
        ]
        for record in report.history[-ITERATIONS_DRAWN:]
    )
    arms = (
        [str(arm.sequences), str(arm.effective_steps), str(arm.chosen), _mean(arm.observations)]
        for arm in report.state.bandit.arms
    )
    names = (
        "iteration",
        "sequences x steps",
        "prompts",
        "planned, GPU-s",
        "window, GPU-s",
        "overhead",
        "spot busy",
        "rank transfer",
        "",
    )
    note = (
        f"Strategy: {escape(STRATEGY_NAMES[report.state.settings.config.exploration.mode])}. "
        "Overhead: what was left of the exploration when training was over, as a share of the iteration. Spot busy: the share of the spot "
        "slots' time that exploration and validation took while training ran. Rank transfer: Spearman "
        "correlation within prompts between the reward that exploration gave a seed and the one that this iteration's rollout gave it."
    )
    return (
        f'{_left_out(report)}{table(names, actions)}<p class="soft">{note}</p>'
        f"{table(('sequences', 'steps', 'chosen', 'mean feedback'), arms)}"
    )


def cost(report: Report) -> str:
    """GPU-hours held by pool and what they cost."""
    held = report.state.spend
    pools = (
        ("reserved", held.reserved_gpu_s, PAPER_PRICES.reserved_usd),
        ("spot", held.spot_gpu_s, PAPER_PRICES.spot_usd),
    )
    rows = [
        [name, f"{gpu_s:.1f}", f"{gpu_s / 3600:.4f}", f"${price:.2f}", f"${gpu_s / 3600 * price:.4f}"]
        for name, gpu_s, price in pools
    ]
    rows.append(["total", f"{held.reserved_gpu_s + held.spot_gpu_s:.1f}", "", "", f"${held.usd:.4f}"])
    note = "Slots held from the first job to the last, each priced as one of the paper's GPUs, whatever it runs on."
    return (
        table(("pool", "GPU-seconds held", "GPU-hours", "price an hour", "cost"), rows) + f'<p class="soft">{note}</p>'
    )


def settings(report: Report) -> str:
    """Everything that made this run."""
    return f"<pre>{escape(report.state.settings.model_dump_json(indent=2))}</pre>"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Cells are HTML; numbers align right."""
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


# ---- leaves -----------------------------------------------------------------------------------------------------------------------


def missing_pairs(state: State) -> str:
    """ "" where the first and the last validation scored all pairs; else how many each did."""
    asked = state.settings.config.evaluation.pairs
    if not state.scores or min(state.scores[0].pairs, state.scores[-1].pairs) >= asked:
        return ""
    return f"; of {asked} pairs the first validation scored {state.scores[0].pairs}, the last {state.scores[-1].pairs}"


def _pairs(state: State) -> str:
    """How many pairs were asked for, and which validations scored fewer."""
    asked = state.settings.config.evaluation.pairs
    fewer = [f"iteration {score.iteration} scored {score.pairs}" for score in state.scores if score.pairs < asked]
    return f"{asked} (of which {', '.join(fewer)})" if fewer else str(asked)


def _target(state: State) -> str:
    """Which validation ended the run early; "" where none did."""
    target = state.settings.target_score
    reached = [score for score in state.scores if state.reaches_target(score)]
    if not reached:
        return ""
    first = reached[0]
    return f" The validation {first.correct:.1%} of policy version {first.policy_version} reached the target score of {target:.1%}."


def _gain(gain: Gain | None, missing: str) -> str:
    if gain is None:
        return '<p class="big">no validation</p>'
    style = "good" if gain.low > 0 else "bad" if gain.high < 0 else "soft"
    return (
        f'<p class="big">{gain.before:.1%} → {gain.after:.1%}</p>'
        f'<p>held-out success, <b class="{style}">{gain.difference:+.1%}</b> '
        f'<span class="soft">({gain.level:.0%} interval {gain.low:+.1%} to {gain.high:+.1%}, '
        f"paired bootstrap over {resampled(gain)}{missing})</span></p>"
    )


def _figure(picture: Picture) -> str:
    before = _picture(picture.before_png, picture.before_correct, "before")
    after = _picture(picture.after_png, picture.after_correct, "after")
    return f"<figure><div>{before}{after}</div><figcaption>{escape(picture.prompt)}</figcaption></figure>"


def _picture(png: bytes, correct: bool, name: str) -> str:
    """Success is marked by a word and a sign too, not by colour alone."""
    style, word, sign = ("ok", "correct", "✓") if correct else ("no", "wrong", "✗")
    source = f"data:image/png;base64,{base64.b64encode(png).decode()}"
    return f'<span class="{style}"><img alt="{name}: {word}" src="{source}"><br>{name} <b>{sign}</b></span>'


def _drawn_phases(history: Iterable[IterationRecord]) -> Iterable[tuple[int, PhaseRecord]]:
    return ((record.iteration, phase) for record in history for phase in record.phases)


def _bars(iteration: int, phase: PhaseRecord, start_s: float) -> list[Bar]:
    op, usage = Op(phase.op), phase.usage
    note = f"iteration {iteration}, {PHASE_NAMES[op]}: {usage.finished_s - usage.started_s:.1f} s"
    return [
        Bar(row, usage.started_s - start_s, usage.finished_s - start_s, PHASE_STYLES[op], note)
        for row in PHASE_ROWS[op]
    ]


def _worked(report: Report) -> Iterable[PhaseRecord]:
    """Jobs that had something to do: an exploration without a plan had not."""
    for record in report.history:
        yield from (phase for phase in record.phases if record.plan.sequences or phase.op != Op.EXPLORE)
    yield from report.final_phases


def _busy(jobs: Iterable[PhaseRecord]) -> str:
    """Mean seconds of each phase."""
    spans_of: dict[Op, list[float]] = {}
    for job in jobs:
        spans_of.setdefault(Op(job.op), []).append(job.usage.finished_s - job.usage.started_s)
    rows = []
    for op in Op:
        spans = spans_of.get(op, [])
        if spans:
            rows.append([PHASE_NAMES[op], str(len(spans)), f"{sum(spans) / len(spans):.2f}", f"{max(spans):.2f}"])
    return table(("phase", "jobs", "mean, s", "longest, s"), rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _left_out(report: Report) -> str:
    """Says so where not all iterations are shown."""
    made = len(report.history)
    return f'<p class="soft">The last {ITERATIONS_DRAWN} of {made} iterations.</p>' if made > ITERATIONS_DRAWN else ""


def _number(name: str, value: float | None) -> str:
    """Ratios with all the digits of a float: a clip range may be 1e-5."""
    if value is None:
        return ""
    return f"{value:.7g}" if name.startswith("ratio_") else f"{value:.4g}"


def _log_probs(metrics: Mapping[str, float]) -> str:
    if "log_probs_recomputed" not in metrics:
        return ""
    recomputed = f"recomputed, {metrics.get('log_probs_recompute_s', 0.0):.2f} s"
    return recomputed if metrics["log_probs_recomputed"] else "of the rollouts"


def _gaps(metrics: Mapping[str, float]) -> str:
    gaps = {int(name.removeprefix(GAP)): value for name, value in metrics.items() if name.startswith(GAP)}
    return ", ".join(f"{i}: {gaps[i]:.1e}" for i in sorted(gaps))


def _overhead(record: IterationRecord) -> str:
    """Share of the iteration's time that only exploration took; "" where it explored nothing."""
    usages = {phase.op: phase.usage for phase in record.phases}
    if not record.plan.sequences or not {Op.TRAIN_STEP, Op.EXPLORE} <= usages.keys():
        return ""
    span_s = max(usage.finished_s for usage in usages.values()) - min(usage.started_s for usage in usages.values())
    return f"{overhead_s(usages[Op.TRAIN_STEP], usages[Op.EXPLORE]) / span_s:.1%}" if span_s > 0 else ""


def _wall_s(report: Report) -> float:
    usages: list[Usage] = [phase.usage for record in report.history for phase in record.phases]
    usages += [phase.usage for phase in report.final_phases]
    timed = [usage for usage in usages if usage.finished_s > usage.started_s]
    if not timed:
        return 0.0
    return max(usage.finished_s for usage in timed) - min(usage.started_s for usage in timed)


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else escape(str(value))


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.3f}" if values else "not tried"
