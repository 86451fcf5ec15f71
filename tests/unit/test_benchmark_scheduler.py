"""The scheduler's benchmark says what it lacks before it measures anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer

from benchmarks import scheduler
from spot_runtime.errors import InputError


def test_without_its_peer_the_benchmark_ends_with_one_line_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler, "find_spec", lambda name: None)
    with pytest.raises(typer.Exit) as ended:
        scheduler.main(tmp_path / "figures.json")
    assert ended.value.exit_code == InputError.exit_code
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: dask.distributed is not installed: pip install -e '.[bench]' adds it, --no-peer measures without it"
    )
    assert not list(tmp_path.iterdir())


def test_a_percentile_is_a_measured_latency() -> None:
    latencies_s = [0.001 * number for number in range(100, 0, -1)]
    assert scheduler.percentile_ms(latencies_s, 0.5) == pytest.approx(51.0)
    assert scheduler.percentile_ms(latencies_s, 0.99) == pytest.approx(100.0)
    assert scheduler.percentile_ms([], 0.99) == 0.0
