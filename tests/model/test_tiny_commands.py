"""The model makers' command line: what it writes, and what it refuses in one line."""

from __future__ import annotations

from pathlib import Path

from diffusers import QwenImagePipeline
from typer.testing import CliRunner

from spot_runtime.models.__main__ import app


def test_bench_dit_writes_a_stock_pipeline_folder_that_splits_among_four_ranks(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench-dit", "--out", str(tmp_path / "bench"), "--no-measure"])
    assert result.exit_code == 0, result.output
    transformer = QwenImagePipeline.from_pretrained(tmp_path / "bench").transformer
    assert transformer.config.num_attention_heads % 4 == 0
    assert transformer.config.num_layers == 6


def test_a_folder_in_use_is_refused_in_one_line_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    result = CliRunner().invoke(app, ["bench-dit", "--out", str(tmp_path)])
    assert result.exit_code == 2
    assert result.output == f"error: out = {tmp_path}: must be a new or empty folder\n"
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_an_unknown_device_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["tiny", "--out", str(tmp_path / "tiny"), "--device", "tpu"])
    assert result.exit_code == 2
    assert result.output == "error: device = 'tpu': must be auto, cpu or cuda\n"
    assert not (tmp_path / "tiny").exists()


def test_help_names_both_recipes() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert "tiny" in result.output
    assert "bench-dit" in result.output
