"""The planner on real models: how accurate exploration is, which arms it settles on, what it gains, and what it costs.

    python -m benchmarks.exploration_record --out RECORD             # once: rewards of an exhaustive exploration of the tiny model
    python -m benchmarks.planner --json FILE --record RECORD         # replays them, then measures overhead on bench-dit

`gain_share`: mean r - 1 over the iterations after 20, as a share of the best fixed arm's; its peers are that arm (1) and a choice at random
(`random_share`). r divides by the mean deviation of the few prompts that are held back, and the mean of such ratios is above that of their
means: `no_op_gain` is what an arm that changes nothing would be credited with, a floor under every gain. `gain_share_above_no_op` and
`random_share_above_no_op` are the shares of what is above it: how much is won of what choosing can win.

`overhead_pct` and `spot_busy_pct` are of iterations of a real cluster whose denoising steps take real time, with
`exploration.fill_sequences`; limits are 0 and 100. `planned_busy_pct` counts what the bandit's action alone keeps busy.
Pictures go beside FILE.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer

from benchmarks.exploration_overhead import measure_overhead
from benchmarks.exploration_replay import Payoffs, Replayed, accuracy, payoffs, replay, space
from benchmarks.exploration_rewards import read_records
from spot_runtime.config import CalibrationConfig, ExplorationConfig
from spot_runtime.models.recipe import make_bench
from tasks.calibration import read_calibration, shipped_calibration
from tasks.report import STYLE
from tasks.svg import Series, line_chart

BETAS = (0.0, 0.5, 1.0)
WINDOWS = (1, 2, 3, 5, 10, 20, 40)
DEFAULTS = ExplorationConfig()


def main(
    json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")],
    record: Annotated[
        Path | None, typer.Option(help="What benchmarks.exploration_record wrote; none: no replay.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="Calibration file; none: the one that ships.")] = None,
    iterations: Annotated[int, typer.Option(min=21, help="Iterations replayed.")] = 40,
    replays: Annotated[int, typer.Option(min=1, help="Draws of the prompts that are held back.")] = 50,
    overhead: Annotated[bool, typer.Option(help="Measure overhead on bench-dit, minutes.")] = True,
) -> None:
    """Writes figures and pictures."""
    calibrated = read_calibration(calibration.read_bytes()) if calibration else shipped_calibration("tiny")
    assert calibrated is not None, "no calibration ships"
    figures: dict[str, Any] = {"calibrated": _calibrated(calibrated)}
    if record is not None:
        figures |= replayed(record, calibrated, iterations, replays, json_path)
        json_path.write_text(json.dumps(figures, indent=2))  # overhead takes minutes and may be broken off
    if overhead:
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "bench-dit"
            make_bench(model, 0, False, typer.echo)
            figures |= measure_overhead(model, Path(folder), typer.echo)
    json_path.write_text(json.dumps(figures, indent=2))
    shares = ("gain_share", "random_share", "no_op_gain", "gain_share_above_no_op", "random_share_above_no_op")
    shown = (*shares, "overhead_pct", "spot_busy_pct", "planned_busy_pct")
    typer.echo(", ".join(f"{name} {figures[name]:.3g}" for name in shown if name in figures))


def replayed(record: Path, calibration: CalibrationConfig, iterations: int, replays: int, out: Path) -> dict[str, Any]:
    """Figures of the replay; pictures beside `out`."""
    records = read_records(record)
    actions = space(records, calibration, DEFAULTS.target_accuracy)
    paid = payoffs(records, actions, iterations=iterations, replays=replays)
    best = max(paid.of_arm(place) for place in range(len(actions)))
    runs = {(beta, window): replay(paid, beta=beta, window=window) for beta in BETAS for window in WINDOWS}
    accurate = accuracy(records)
    _picture(out, "accuracy", _accuracy_lines(calibration, accurate), "effective steps")
    for beta in BETAS:
        lines = _arm_lines(paid, runs[beta, DEFAULTS.window])
        _picture(out, f"arms_beta_{beta:g}", lines, f"iteration, beta = {beta:g}")
    chosen, no_op = runs[DEFAULTS.beta, DEFAULTS.window], paid.of_no_op
    random = fmean(paid.of_arm(place) for place in range(len(actions)))
    return {
        "records": len(records),
        "accuracy": accurate,
        "fixed_arms": {_name(paid, place): paid.of_arm(place) for place in range(len(actions))},
        "best_gain": best,
        "gain_share": chosen.gain / best,
        "random_share": random / best,
        "no_op_gain": no_op,
        "gain_share_above_no_op": (chosen.gain - no_op) / (best - no_op),
        "random_share_above_no_op": (random - no_op) / (best - no_op),
        "sweep": [
            {
                "beta": beta,
                "window": window,
                "gain_share": run.gain / best,
                "arms_of_last_ten": run.arms_of_last_ten,
            }
            for (beta, window), run in runs.items()
        ],
    }


def _calibrated(calibration: CalibrationConfig) -> dict[str, Any]:
    return {"num_steps": calibration.num_steps, "rows": [row.model_dump() for row in calibration.rows]}


def _accuracy_lines(calibration: CalibrationConfig, accurate: dict[int, dict[str, float]]) -> list[Series]:
    same = tuple((float(row.effective_steps), max(0.0, row.accuracy)) for row in calibration.rows)
    stale = tuple((float(steps), max(0.0, found["spearman"])) for steps, found in accurate.items())
    return [Series("same weights", "a", same), Series("one update later", "b", stale)]


def _arm_lines(paid: Payoffs, run: Replayed) -> list[Series]:
    """Mean over replays of d and s, as shares of the most there are, so that both fit one picture."""
    iterations = range(len(run.chosen[0]))
    most = max(arm.sequences for arm in paid.arms), max(arm.effective_steps for arm in paid.arms)
    arms = [[paid.arms[replay[i]] for replay in run.chosen] for i in iterations]
    sequences = tuple((float(i), fmean(arm.sequences for arm in arms[i]) / most[0]) for i in iterations)
    steps = tuple((float(i), fmean(arm.effective_steps for arm in arms[i]) / most[1]) for i in iterations)
    return [Series(f"sequences, of {most[0]}", "a", sequences), Series(f"steps, of {most[1]}", "b", steps)]


def _picture(out: Path, name: str, lines: Sequence[Series], x_label: str) -> None:
    """A page with one SVG, so that it has the report's colours."""
    svg = line_chart(lines, x_label=x_label)
    out.with_name(f"{out.stem}_{name}.html").write_text(f'<style>{STYLE}</style><body class="spotlight">{svg}</body>')


def _name(paid: Payoffs, place: int) -> str:
    return f"{paid.arms[place].sequences} x {paid.arms[place].effective_steps}"


if __name__ == "__main__":
    typer.run(main)
