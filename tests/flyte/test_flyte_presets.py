"""The shipped presets are the paper's Table 2, and the command line reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from fake_control import FakeControl
from flytekit.clis.sdk_in_container.pyflyte import main

from spot_runtime.config import RunSettings, TrainConfig
from spot_runtime.scheduler.expansion import sde_window

PRESETS = Path(__file__).parents[2] / "workflows" / "presets"
WORKFLOW = str(Path(__file__).parents[2] / "workflows" / "dit_grpo.py")
TABLE = {
    "deepseek_ocr_512": (3e-4, 1e-5, 16, 20, (0, 15)),
    "geneval_512": (1.5e-5, 1e-5, 16, 10, (0, 5)),
    "deepseek_ocr_1280": (3e-5, 5e-5, 16, 20, (0, 15)),
    "geneval_1280": (5e-6, 0.0, 16, 10, (0, 5)),
}
"""Learning rate, weight decay, sequences, denoising steps, window: paper, Table 2."""
TARGETS = {"deepseek_ocr_512": 0.7, "geneval_512": 0.75, "deepseek_ocr_1280": 0.6, "geneval_1280": 0.5}
"""Target scores: paper, §6.2."""


def preset(name: str) -> TrainConfig:
    return TrainConfig.parse(yaml.safe_load((PRESETS / f"{name}.yaml").read_text()))


def test_every_row_of_the_table_ships_and_nothing_else_does() -> None:
    assert {path.stem for path in PRESETS.iterdir()} == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_a_preset_has_the_values_of_its_row(name: str) -> None:
    config = preset(name)
    grpo, sampling = config.grpo, config.sampling
    window = (sampling.sde_window_start, sampling.sde_window_stop)
    row = (grpo.learning_rate, grpo.weight_decay, grpo.group_size, sampling.num_steps, window)
    assert row == TABLE[name]
    assert config.exploration.max_sequences == 32  # paper §6.8
    assert sampling.sde_window_size == 2  # ours, as the file says
    text = (PRESETS / f"{name}.yaml").read_text()
    dataset, _, resolution = name.rpartition("_")
    assert f"--dataset {dataset} --resolution {resolution} " in text
    assert f"--target_score {TARGETS[name]} --cfg workflows/presets/{name}.yaml" in text


@pytest.mark.parametrize("name", TABLE)
def test_windows_are_placed_anywhere_in_their_range_by_iteration_and_prompt(name: str) -> None:
    settings = RunSettings(
        run_id="run-1",
        iterations=1,
        resolution=512,
        model="m",
        store="memory://s",
        train_prompts_key="t",
        validation_prompts_key="v",
        config=preset(name),
    )
    windows = {sde_window(settings, i, f"prompt-{p}") for i in range(16) for p in range(16)}
    last = TABLE[name][4][1] - 2
    assert windows == {(start, start + 2) for start in range(last + 1)}
    assert sde_window(settings, 3, "prompt-1") == sde_window(settings, 3, "prompt-1")


def test_the_command_line_takes_a_preset(embedded: FakeControl, model_folder: str) -> None:
    options = ["--model", model_folder, "--iterations", "1", "--cfg", str(PRESETS / "geneval_512.yaml")]
    result = CliRunner().invoke(main, ["run", WORKFLOW, "train", *options])
    assert result.exit_code == 0, result.output
    config = RunSettings.parse_json(embedded.submissions[0].settings_json).config
    assert config.grpo == preset("geneval_512").grpo
