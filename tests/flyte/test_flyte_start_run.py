"""What a run is made of: its prompts, its settings, its names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_control import FakeControl

from spot_runtime.config import DatasetName, TrainConfig
from spot_runtime.errors import InputError
from spot_runtime.rewards.prompts import GenevalRow, parse_row, prompt_id
from spot_runtime.store.tensors import TensorStore
from tasks.start_run import TRAIN_ROWS, prompt_rows, split_rows
from workflows.dit_grpo import train


def rows(count: int) -> tuple[GenevalRow, ...]:
    clause = {"class": "circle", "count": 1, "color": "red"}
    return tuple(
        parse_row(json.dumps({"tag": "colors", "include": [clause], "prompt": f"circle number {index}"}))
        for index in range(count)
    )


@pytest.mark.parametrize("count", [2, 3, 8, 41])
def test_a_quarter_of_the_prompts_of_a_file_is_held_out(count: int) -> None:
    train_rows, validation_rows = split_rows(rows(count))
    assert len(validation_rows) == max(1, round(count / 4))
    assert len(train_rows) + len(validation_rows) == count
    assert not {row.prompt for row in train_rows} & {row.prompt for row in validation_rows}


def test_rows_with_the_same_prompt_stay_on_one_side_and_in_order() -> None:
    doubled = [row for row in rows(12) for _ in range(2)]
    train_rows, validation_rows = split_rows(doubled)
    assert not {row.prompt for row in train_rows} & {row.prompt for row in validation_rows}
    assert list(train_rows) == [row for row in doubled if row in train_rows]


def test_generated_prompts_differ_by_seed_but_validation_does_not() -> None:
    config = TrainConfig()
    first, held_out = prompt_rows(DatasetName.GENEVAL, "", 0, config)
    second, held_out_again = prompt_rows(DatasetName.GENEVAL, "", 1, config)
    assert first != second
    assert held_out == held_out_again
    assert (len(first), len(held_out)) == (TRAIN_ROWS, config.evaluation.pairs)
    assert not {prompt_id(row) for row in first} & {prompt_id(row) for row in held_out}


def test_too_few_rows_to_train_on_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "\n".join(f'{{"tag":"t","include":[{{"class":"circle","count":1}}],"prompt":"p{index}"}}' for index in range(3))
    )
    config = TrainConfig.parse({"grpo": {"optimizer_steps": 4, "prompts_per_iteration": 4}})
    with pytest.raises(
        InputError, match=r"rows\.jsonl: 2 rows to train on, must be >= grpo\.prompts_per_iteration = 4"
    ):
        prompt_rows(DatasetName.GENEVAL, str(path), 0, config)


def test_as_many_rows_are_generated_as_an_iteration_takes() -> None:
    config = TrainConfig.parse({"grpo": {"prompts_per_iteration": TRAIN_ROWS + 16}})
    train_rows, _ = prompt_rows(DatasetName.GENEVAL, "", 0, config)
    assert len({prompt_id(row) for row in train_rows}) == TRAIN_ROWS + 16


def test_repeated_prompts_are_left_out_and_counted(
    embedded: FakeControl, model_folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [f'{{"tag":"t","include":[{{"class":"circle","count":1}}],"prompt":"p{index}"}}' for index in range(8)]
    other = '{"tag":"t","include":[{"class":"square","count":2}],"prompt":"p5"}'
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text("\n".join([*lines, lines[2], other]))
    cfg = {"grpo": {"group_size": 2, "prompts_per_iteration": 2, "optimizer_steps": 1}, "evaluation": {"pairs": 4}}
    settings = train(model=model_folder, prompts=str(prompts), iterations=1, cfg=cfg).state.settings
    store = TensorStore(settings.store)
    stored = [
        parse_row(line)
        for key in (settings.train_prompts_key, settings.validation_prompts_key)
        for line in store.get_bytes(key).splitlines()
    ]
    assert sorted(row.prompt for row in stored) == [f"p{index}" for index in range(8)]
    assert {clause.class_name for row in stored for clause in row.include} == {"circle"}
    assert f"{prompts}: 2 rows left out, each with a prompt of an earlier row" in capsys.readouterr().err


def test_a_run_stores_what_its_settings_name(embedded: FakeControl, model_folder: str, tmp_path: Path) -> None:
    prompts = tmp_path / "rows.jsonl"
    prompts.write_text(
        "\n".join(f'{{"tag":"t","include":[{{"class":"circle","count":1}}],"prompt":"p{index}"}}' for index in range(8))
    )
    cfg = {"grpo": {"group_size": 2, "prompts_per_iteration": 2, "optimizer_steps": 1}, "evaluation": {"pairs": 4}}
    state = train(model=model_folder, prompts=str(prompts), iterations=1, seed=3, cfg=cfg).state
    settings = state.settings
    assert (settings.seed, settings.resolution, settings.iterations) == (3, 64, 1)
    assert settings.model == model_folder
    assert len(settings.model_digest) == 64
    assert settings.config.grpo.group_size == 2
    assert settings.store == (tmp_path / "spotlight-runs" / state.run_id / "store").as_uri()
    store = TensorStore(settings.store)
    stored = [
        [parse_row(line).prompt for line in store.get_bytes(key).splitlines()]
        for key in (settings.train_prompts_key, settings.validation_prompts_key)
    ]
    assert [len(texts) for texts in stored] == [6, 2]
    assert sorted(stored[0] + stored[1]) == [f"p{index}" for index in range(8)]


def test_a_store_given_as_a_relative_path_is_recorded_for_any_working_directory(
    embedded: FakeControl, model_folder: str, tmp_path: Path
) -> None:
    cfg = {"grpo": {"group_size": 2, "prompts_per_iteration": 2, "optimizer_steps": 1}, "evaluation": {"pairs": 4}}
    assert train(model=model_folder, iterations=1, store="a b", cfg=cfg).state.settings.store == str(tmp_path / "a b")


def test_two_runs_never_share_a_name(embedded: FakeControl, model_folder: str) -> None:
    cfg = {"grpo": {"group_size": 4}, "evaluation": {"pairs": 4}}
    first, second = (train(model=model_folder, iterations=1, cfg=cfg).state for _ in range(2))
    assert first.run_id != second.run_id
    assert first.run_id.startswith("geneval-")
