import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_runtime import cli
from spot_runtime.config import RunSettings
from spot_runtime.daemons.ports import listening_socket
from spot_runtime.errors import InputError, ModelError, PortInUseError, StoreError, UnreachableError
from spot_runtime.messages import ClusterStatus, Codec, GetStatus, JobStatus, NodeStatus, ToControl
from spot_runtime.transport import Router
from spot_runtime.types import FailedRequest, JobId, JobPhase, NodeId, Op, Pool, RequestId

STATUS = ClusterStatus(
    trainer="training",
    reward_url="http://127.0.0.1:1",
    nodes=(
        NodeStatus(node_id=NodeId("spot-0"), pool=Pool.SPOT, slots=2, in_flight=3, state="draining", last_seen_s=0.5),
    ),
    jobs=(
        JobStatus(
            job_id=JobId("explore-1-ab"), op=Op.EXPLORE, iteration=1, phase=JobPhase.RUNNING, total=9, done=4, scored=3
        ),
        JobStatus(job_id=JobId("rollout-0-cd"), op=Op.ROLLOUT, iteration=0, phase=JobPhase.FAILED, error="no node"),
    ),
    failures=(
        FailedRequest(
            request_id=RequestId("explore-1-ab.7"),
            job_id=JobId("explore-1-ab"),
            prompt_id="p7",
            attempts=5,
            failures=5,
            losses=0,
            reason="RewardError: no answer",
            history=("1.000 leased spot-0", "2.000 errored RewardError: no answer"),
        ),
    ),
)


@pytest.fixture
def control() -> Iterator[str]:
    """Endpoint of a router that answers every status question."""
    router: Router[ToControl] = Router("tcp://127.0.0.1:0", Codec(ToControl))
    open_ = threading.Event()
    open_.set()

    def serve() -> None:
        while open_.is_set():
            for peer, message in router.receive(0.02):
                if isinstance(message, GetStatus):
                    router.send(
                        peer, ClusterStatus(seq=message.seq, **{name: getattr(STATUS, name) for name in FIELDS})
                    )

    thread = threading.Thread(target=serve)
    thread.start()
    yield router.endpoint
    open_.clear()
    thread.join(10)
    router.close()


FIELDS = ("nodes", "jobs", "trainer", "reward_url", "failures")


def run(*argv: str) -> int:
    """The exit code of `spotlight ARGV`."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(argv))
    return int(ended.value.code or 0)


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """Standard error, which is one line; nothing is on standard output."""
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    return lines[0]


def test_help_names_every_command_and_teaches_the_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    text = capsys.readouterr().out
    assert "pyflyte run" in text
    for command in ("up", "status", "doctor"):
        assert f"\n  {command} " in text
        assert run(command, "--help") == 0
        assert "exit code of its own" in capsys.readouterr().out


def test_help_imports_nothing_heavy() -> None:
    program = (
        "import sys\nfrom spot_runtime import cli\n"
        "try:\n    cli.main(['up', '--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'diffusers', 'transformers', 'pandas', 'numpy', 'scipy', 'zmq', 'fsspec', 'flytekit', 'fastapi'}\n"
        "print('HEAVY', sorted(heavy & set(sys.modules)))\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert output.splitlines()[-1] == "HEAVY []"


def test_status_as_json_is_the_whole_answer(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--json", "--endpoint", control) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["trainer"] == "training"
    assert answer["nodes"] == [
        {
            "node_id": "spot-0",
            "pool": "spot",
            "slots": 2,
            "in_flight": 3,
            "state": "draining",
            "last_seen_s": 0.5,
            "degrees": [],
            "standbys": 0,
        }
    ]
    assert answer["failures"][0]["history"] == ["1.000 leased spot-0", "2.000 errored RewardError: no answer"]
    assert [(job["job_id"], job["phase"], job["done"]) for job in answer["jobs"]] == [
        ("explore-1-ab", "running", 4),
        ("rollout-0-cd", "failed", 0),
    ]


def test_status_takes_the_endpoint_from_the_environment_and_prints_lines(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_ENDPOINT", control)
    assert run("status") == 0
    assert capsys.readouterr().out.splitlines() == [
        "trainer  training",
        "reward   http://127.0.0.1:1",
        "node     spot-0       spot     draining  3 in flight on 2 slots",
        "job      explore-1-ab running 4/9 done, 3 scored, 0 failed",
        "job      rollout-0-cd failed 0/0 done, 0 scored, 0 failed: no node",
        "failed   explore-1-ab.7 of prompt p7 after 5 attempts: RewardError: no answer",
    ]


def test_status_without_an_endpoint_says_where_to_put_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPOTLIGHT_ENDPOINT", raising=False)
    assert run("status") == InputError.exit_code
    assert error_line(capsys) == "error: endpoint is not given: pass --endpoint or set SPOTLIGHT_ENDPOINT"


def test_an_unreachable_endpoint_is_one_line_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--endpoint", "tcp://127.0.0.1:1", "--deadline-s", "0.2") == UnreachableError.exit_code
    assert error_line(capsys) == "error: control at tcp://127.0.0.1:1 did not answer within 0.2 s"


def test_a_traceback_is_printed_only_when_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPOTLIGHT_TRACEBACK", "1")
    assert run("status", "--endpoint", "nowhere") == InputError.exit_code
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1] == "error: endpoint = 'nowhere': must look like tcp://HOST:PORT or ipc://@NAME"


def test_a_defect_is_one_line_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "status_text", lambda found: 1 // 0)
    monkeypatch.setattr("spot_runtime.client.Client.status", lambda client: STATUS)
    assert run("status", "--endpoint", "tcp://127.0.0.1:1") == 1
    assert error_line(capsys).startswith("error: unexpected ZeroDivisionError: ")


@pytest.mark.parametrize(
    ("argv", "field"),
    [
        (("up", "--port", "65536"), "--port"),
        (("up", "--spot-nodes", "-1"), "--spot-nodes"),
        (("up", "--slots", "0"), "--slots"),
        (("up", "--slots", "many"), "--slots"),
        (("down",), "down"),
    ],
)
def test_an_option_out_of_bounds_is_named(
    argv: tuple[str, ...], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*argv) == InputError.exit_code
    assert field in capsys.readouterr().err


def test_up_with_a_model_that_is_none_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "cluster"
    (tmp_path / "model").mkdir()
    assert run("up", "--reward", "faces", "--folder", str(folder)) == InputError.exit_code
    assert error_line(capsys).startswith("error: reward = 'faces': must be one of geneval, ")
    assert run("up", "--model", str(tmp_path / "model"), "--folder", str(folder)) == ModelError.exit_code
    assert error_line(capsys) == f"error: model = '{tmp_path}/model': model_index.json is missing"
    assert not folder.exists()


def test_doctor_reports_every_check_and_ends_with_the_code_of_the_first_that_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("in the way")
    with listening_socket("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        argv = ["--model", str(tmp_path), "--store", f"file://{tmp_path}/file/store", "--port", str(port)]
        assert run("doctor", "--json", *argv) == ModelError.exit_code
        checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert list(checks) == ["python", "packages", "device", "cores", "model", "store", "port"]
    assert [name for name, check in checks.items() if not check["ok"]] == ["model", "store", "port"]
    assert checks["python"]["detail"].startswith(f"{sys.version_info[0]}.{sys.version_info[1]}.")
    assert checks["model"]["detail"] == f"model = '{tmp_path}': model_index.json is missing"
    assert checks["store"]["exit_code"] == StoreError.exit_code
    assert checks["port"] == {
        "name": "port",
        "ok": False,
        "detail": f"127.0.0.1:{port} is taken: another process answers there",
        "exit_code": PortInUseError.exit_code,
    }


def test_doctor_leaves_nothing_in_the_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("doctor", "--model", str(tmp_path), "--store", f"file://{tmp_path}/store")
    assert "ok    store     file://" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("url", ["memory://x", "data:,hello", "file:relative", "foo://x"])
@pytest.mark.parametrize(
    "command",
    [
        "up",
        "doctor",
        "models push tiny",
        "models pull x",
        "models list",
        "models remove x",
        "store gc",
        "export latest out",
    ],
)
def test_a_store_that_is_none_is_refused_by_every_command_before_it_begins(
    command: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*command.split(), "--store", url) == InputError.exit_code
    line = error_line(capsys)
    assert line.startswith(f"error: store = '{url}': ")
    assert "file:///folder" in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("deterministic", [True, False])
def test_up_starts_a_cluster_for_deterministic_runs_if_told(
    deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[RunSettings] = []

    def start(settings: RunSettings, folder: Path, port: int) -> None:
        started.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr("spot_runtime.daemons.supervisor.EmbeddedCluster", start)
    options = ("--deterministic",) if deterministic else ()
    assert run("up", "--folder", str(tmp_path), "--spot-nodes", "1", *options) == 0
    (settings,) = started
    assert (settings.config.deterministic, settings.config.cluster.spot_nodes) == (deterministic, 1)
