"""Bad input ends `pyflyte run` with one clear line and an exit code, before anything starts and with nothing left behind."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from fake_control import FakeControl
from flytekit.clis.sdk_in_container.pyflyte import main
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine

from spot_runtime.config import RunSettings
from spot_runtime.errors import ClusterError
from spot_runtime.rewards.catalog import EMBEDDED, ENGINES
from spot_runtime.types import Op
from tasks import endpoint, local_run
from tasks.changes import Changes

WORKFLOW = str(Path(__file__).parents[2] / "workflows" / "dit_grpo.py")
ROW = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}


@pytest.fixture
def run(embedded: FakeControl, model_folder: str):  # type: ignore[no-untyped-def]
    """`pyflyte run … train` in this process; a later option wins over the defaults."""

    def call(*options: str) -> Result:
        small = ["--model", model_folder, "--iterations", "1"] if "--model" not in options else ["--iterations", "1"]
        return CliRunner().invoke(main, ["run", WORKFLOW, "train", *small, *options])

    return call


def write_rows(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def row(prompt: str) -> str:
    return json.dumps({**ROW, "prompt": prompt})


BAD_OPTIONS = [
    (["--iterations", "0"], 2, "iterations = 0: Input should be greater than or equal to 1"),
    (["--seed", "-1"], 2, "seed = -1: Input should be greater than or equal to 0"),
    (["--resolution", "60"], 3, "resolution = 60: must be a positive multiple of 8 (VAE 4 x patch 2)"),
    (["--model", "/nowhere"], 3, "model = '/nowhere': must be 'tiny', a folder, or a hub id such as Qwen/Qwen-Image"),
    (["--system", "rlboost"], 2, "system = 'rlboost': this version runs only 'spotlight'"),
    (["--spot_trace", "a.csv"], 2, "spot_trace = 'a.csv': this version does not replay traces, must be empty"),
    (["--target_score", "1.5"], 2, "target_score = 1.5: Input should be less than or equal to 1"),
    (
        ["--resume_from", "nobody"],
        2,
        "resume_from = 'nobody': must be 'latest', the id or folder of a run that is there, or a URI STORE/runs/RUN",
    ),
    (
        ["--cfg", '{"grpo": {"group_size": 1}}'],
        2,
        "cfg.grpo.group_size = 1: Input should be greater than or equal to 2",
    ),
    (["--cfg", '{"grpo": {"groups": 2}}'], 2, "cfg.grpo.groups = 2: Extra inputs are not permitted"),
    (
        ["--cfg", '{"grpo": {"advantage_clip": 1e999}}'],
        2,
        "cfg.grpo.advantage_clip = inf: Input should be a finite number",
    ),
    (
        ["--exploration", "best_of_n", "--cfg", '{"grpo": {"advantage_normalisation": "unexplored"}}'],
        2,
        "grpo.advantage_normalisation = 'unexplored': exploration.mode must be 'bandit' or 'none', 'best_of_n' explores every prompt",
    ),
    (["--cfg", "{"], 2, "cfg: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    (["--cfg", "[1]"], 2, "cfg: must be an object of fields, is [1]"),
    (["--cfg", "none.yaml"], 2, "cfg = none.yaml: neither a JSON object nor a file"),
    (["--reward", "ocr"], 2, f"reward = 'ocr': must be one of {', '.join((*EMBEDDED, *ENGINES))}, or MODULE:FUNCTION"),
]


@pytest.mark.parametrize(("options", "exit_code", "line"), BAD_OPTIONS, ids=lambda value: str(value)[:24])
def test_a_bad_option_is_one_line_and_nothing_starts(  # type: ignore[no-untyped-def]
    run, embedded: FakeControl, tmp_path: Path, options: list[str], exit_code: int, line: str
) -> None:
    result = run(*options)
    assert result.stderr == f"error: {line}\n"
    assert result.exit_code == exit_code
    assert not embedded.started
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("a.yaml", "grpo: [1, 2\n  x: : y", "not YAML: while parsing a flow sequence"),
        ("a.yml", "", "must be an object of fields, is empty"),
        ("a.yaml", "- 1", "must be an object of fields, is [1]"),
        ("a.yaml", "grpo: {seen: 2026-01-01}", "must be an object that JSON can write: Object of type date"),
        ("a.json", "{]", "not JSON: Expecting property name"),
        ("a.json", "\udcff", "cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_a_bad_cfg_file_is_one_line_and_nothing_starts(  # type: ignore[no-untyped-def]
    run, embedded: FakeControl, tmp_path_factory: pytest.TempPathFactory, name: str, text: str, line: str
) -> None:
    path = tmp_path_factory.mktemp("cfg") / name
    path.write_bytes(text.encode(errors="surrogateescape"))
    result = run("--cfg", str(path))
    assert result.stderr.startswith(f"error: cfg = {path}: {line}")
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 2
    assert not embedded.started


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_a_cfg_file_is_read_where_the_run_is_started(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text('{"grpo": {"group_size": 4, "learning_rate": 0.25}}')
    context = FlyteContextManager.current_context()
    literal = TypeEngine.to_literal(context, str(path), Changes, TypeEngine.to_literal_type(Changes))
    path.unlink()
    changes = TypeEngine.to_python_value(context, literal, Changes)
    assert changes.fields() == {"grpo": {"group_size": 4, "learning_rate": 0.25}}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--dataset", "cifar"], "'cifar' is not one of 'geneval', 'deepseek_ocr'"),
        (["--system", "nothing"], "'nothing' is not one of 'spotlight'"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_an_option_that_cannot_be_read_is_a_usage_error(run, options: list[str], words: str) -> None:  # type: ignore[no-untyped-def]
    result = run(*options)
    assert words in " ".join(result.stderr.replace("│", " ").split())
    assert result.exit_code == 2
    assert "Traceback" not in result.output


def test_a_store_that_cannot_be_written_is_named_as_the_option(run, tmp_path: Path, embedded: FakeControl) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "taken").write_text("a file, not a folder")
    result = run("--store", str(tmp_path / "taken" / "store"))
    assert result.stderr.startswith(f"error: store = '{tmp_path}/taken/store': cannot be written: ")
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 2
    assert not embedded.started


def test_an_odd_group_size_is_one_line(run) -> None:  # type: ignore[no-untyped-def]
    result = run("--cfg", '{"grpo": {"group_size": 3}}')
    assert "group_size = 3: must be even" in result.stderr
    assert result.stderr.startswith("error: cfg.grpo")
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 2


def test_a_broken_line_of_a_prompt_file_is_named(run, tmp_path: Path, embedded: FakeControl) -> None:  # type: ignore[no-untyped-def]
    path = write_rows(tmp_path / "rows.jsonl", row("a photo of a red circle"), '{"tag": "colors", "include": 3}')
    result = run("--prompts", path)
    assert result.stderr.startswith(f"error: {path} line 2: not a GenEval row: ")
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 2
    assert not embedded.started


def test_a_prompt_file_needs_a_prompt_to_hold_out(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = write_rows(tmp_path / "rows.jsonl", row("a photo of a red circle"))
    result = run("--prompts", path)
    assert (
        result.stderr == f"error: prompts = {path}: 1 distinct prompt, must be >= 2: one is held out for validation\n"
    )
    assert result.exit_code == 2


def test_a_model_folder_without_a_part_is_named(run, model_folder: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    broken = tmp_path / "broken"
    shutil.copytree(model_folder, broken)
    (broken / "vae" / "config.json").unlink()
    result = run("--model", str(broken))
    assert result.stderr == f"error: model = '{broken}': vae/config.json is missing\n"
    assert result.exit_code == 3


def test_an_endpoint_where_nobody_answers_is_named(  # type: ignore[no-untyped-def]
    run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(endpoint, "PROBE_DEADLINE_S", 0.3)
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", "tcp://127.0.0.1:9")
    result = run("--store", tmp_path.as_uri())
    assert result.stderr == "error: SPOTLIGHT_ENDPOINT = tcp://127.0.0.1:9: nobody answered within 0.3 s\n"
    assert result.exit_code == 4
    assert list(tmp_path.iterdir()) == []


def test_a_malformed_endpoint_is_named(run, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", "localhost")
    result = run()
    assert result.stderr == "error: endpoint = 'localhost': must look like tcp://HOST:PORT or ipc://@NAME\n"
    assert result.exit_code == 2


def test_a_given_cluster_says_which_store_it_has(  # type: ignore[no-untyped-def]
    run, embedded: FakeControl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", embedded.endpoint)
    embedded.store = (tmp_path / "theirs").as_uri()
    assert run().exit_code == 0
    assert {RunSettings.parse_json(job.spec.settings_json).store for job in embedded.jobs.values()} == {embedded.store}
    assert not embedded.started


def test_a_store_that_cannot_be_used_is_named(run, tmp_path: Path, embedded: FakeControl) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    result = run("--store", (tmp_path / "file").as_uri())
    assert result.stderr.startswith(f"error: store = '{(tmp_path / 'file').as_uri()}': ")
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 2
    assert not embedded.started


@pytest.mark.parametrize("url", ["memory://x", "data:,hello", "file:relative", "foo://x"])
def test_a_store_that_is_none_is_refused_before_all_else(run, url: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("--store", url, "--model", "not/there")
    assert result.stderr.startswith(f"error: store = '{url}': ")
    assert "file:///folder" in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("logged", ["", "weights cannot be read\n"])
def test_a_cluster_that_does_not_start_leaves_nothing_but_its_logs(  # type: ignore[no-untyped-def]
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: str
) -> None:
    class Broken:
        def __init__(self, settings: RunSettings, folder: Path) -> None:
            self._folder = folder

        def start(self) -> str:
            (self._folder / "logs").mkdir(parents=True)
            (self._folder / "logs" / "control.log").write_text(logged)
            (self._folder / "journal.sqlite").write_text("half")
            (self._folder / "nodes" / "spot-0" / "policies").mkdir(parents=True)
            (self._folder / "nodes" / "spot-0" / "spot-0-w0.log").write_text(logged)
            raise ClusterError("control was not ready within 60 s")

        def stop(self) -> None:
            pass

    monkeypatch.setattr(local_run, "embed", Broken)
    result = run("--store", (tmp_path / "store").as_uri())
    left = {path.relative_to(tmp_path).parts[2:] for path in tmp_path.rglob("*") if path.is_file()}
    last = result.stderr.splitlines()[-1]
    if logged:
        (folder,) = (tmp_path / "spotlight-runs").iterdir()
        assert last == f"error: control was not ready within 60 s; logs are in {folder}"
        assert left == {("logs", "control.log"), ("nodes", "spot-0", "spot-0-w0.log")}
    else:
        assert last == "error: control was not ready within 60 s"
        assert left == set()
        assert list(tmp_path.iterdir()) == []
    assert result.exit_code == ClusterError.exit_code


def test_an_error_of_a_job_has_its_own_exit_code(run, embedded: FakeControl) -> None:  # type: ignore[no-untyped-def]
    embedded.errors = {Op.TRAIN_STEP: ("TrainingError", "loss = nan: must be finite")}
    result = run()
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: job train_step-0-")
    assert last.endswith(": loss = nan: must be finite")
    assert result.exit_code == 12
    assert embedded.stopped


@pytest.mark.parametrize("said", ["1", "true"])
def test_a_traceback_comes_only_when_asked(run, monkeypatch: pytest.MonkeyPatch, said: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("SPOTLIGHT_TRACEBACK", "0")
    assert "Traceback" not in run("--iterations", "0").output
    monkeypatch.setenv("SPOTLIGHT_TRACEBACK", said)
    result = run("--iterations", "0")
    assert "Traceback (most recent call last)" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("error: iterations = 0")
    assert result.exit_code == 2


def test_the_last_lines_are_the_result_and_the_two_paths(run, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    result = run("--cfg", '{"grpo": {"group_size": 4}, "evaluation": {"pairs": 20}}')
    assert result.exit_code == 0, result.output
    summary, report, bank = result.stdout.splitlines()[-3:]
    assert summary.startswith("validation 0.200 -> 0.400, +0.200 (95% interval +")
    assert report.startswith("spotlight-runs/geneval-")
    assert (tmp_path / report).read_text().startswith("<!doctype html>")
    assert (tmp_path / bank).read_bytes()[:4] == b"PAR1"


def test_workflows_import_without_torch() -> None:
    import subprocess

    code = "import sys, workflows.dit_grpo, launchplans.nightly; sys.exit(any(m in sys.modules for m in ('torch', 'diffusers')))"
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60, check=False)
    assert done.returncode == 0
