"""A cluster of real processes on all of the machine's addresses: whoever has an allowed key works, anyone else is refused and seen."""

from __future__ import annotations

import json
import re
import socket
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.fake_cluster import put_prompts
from spot_runtime import cli, variables
from spot_runtime.client import Client, job_spec
from spot_runtime.config import ClusterConfig, EvaluationConfig, GrpoConfig, RunSettings, SamplingConfig, TrainConfig
from spot_runtime.daemons.keys import client_keys
from spot_runtime.daemons.ports import free_port
from spot_runtime.daemons.settings import ControlSettings, NodeSettings
from spot_runtime.daemons.supervision import Member, Supervisor
from spot_runtime.daemons.supervisor import layout
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.errors import AuthenticationError, UnreachableError
from spot_runtime.messages import ClusterStatus, JobSpec, JobStatus
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import new_pair, write_pair
from spot_runtime.types import JobPhase, Op, PolicyRef, RunId
from tasks.endpoint import connect, probe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEADLINE_S = 120.0
CONFIG = TrainConfig(
    sampling=SamplingConfig(num_steps=4, sde_window_stop=3, sde_window_size=1),
    grpo=GrpoConfig(prompts_per_iteration=2, group_size=4, optimizer_steps=1),
    evaluation=EvaluationConfig(pairs=2),
    cluster=ClusterConfig(spot_nodes=1, heartbeat_s=0.5),
)


def own_address() -> str:
    """This machine's address towards others; loopback where it has none."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe_socket:
        try:
            probe_socket.connect(("192.0.2.1", 9))  # sends nothing
        except OSError:
            return "127.0.0.1"
        return str(probe_socket.getsockname()[0])


@dataclass
class Locked:
    """A cluster whose control listens on 0.0.0.0 with keys."""

    folder: Path
    keys: Path
    settings: RunSettings
    endpoint: str
    metrics_url: str

    def key(self, name: str) -> tuple[str, str]:
        """What NAME passes on to reach control: its secret and control's public key."""
        return str(self.keys / f"{name}.secret"), str(self.keys / "control.public")

    def job(self, op: Op, manifest_key: str = "") -> JobSpec:
        return job_spec(
            run_id=RunId("locked-run"),
            op=op,
            iteration=0,
            policy=PolicyRef(),
            settings_json=self.settings.model_dump_json(),
            manifest_key=manifest_key,
        )

    def figure(self, name: str) -> float:
        text = urllib.request.urlopen(self.metrics_url, timeout=10).read().decode()
        return float(re.findall(rf"^{name} (\S+)$", text, re.MULTILINE)[0])

    def log(self) -> str:
        return (self.folder / "logs" / "control.log").read_text()


def locked_members(settings: RunSettings, folder: Path, keys: Path, endpoint: str, port: int) -> list[Member]:
    """The embedded cluster's members, but with keys, and control for everyone who has one."""
    members = []
    for member in layout(settings, folder, control_port=port, reward_port=free_port()):
        config = member.config
        if isinstance(config, ControlSettings):
            secrets = {"secret_key": str(keys / "control.secret"), "allowed_keys": str(keys / "allowed")}
            config = config.model_copy(update={"bind": f"tcp://0.0.0.0:{port}", **secrets})
        elif isinstance(config, NodeSettings):
            secrets = {"secret_key": str(keys / "node.secret"), "control_key": str(keys / "control.public")}
            config = config.model_copy(update={"control_endpoint": endpoint, **secrets})
        members.append(Member(member.name, member.module, config, stage=member.stage, may_leave=member.may_leave))
    return members


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    folder = tmp_path_factory.mktemp("locked")
    keys = folder / "keys"
    for name in ("control", "node", "friend", "stranger"):
        public, _ = write_pair(keys, name, new_pair())
        if name in ("node", "friend"):
            (keys / "allowed").mkdir(exist_ok=True)
            (keys / "allowed" / public.name).write_bytes(public.read_bytes())
    put_prompts(folder, rows=64)
    checked = check_model("tiny")
    settings = RunSettings(
        run_id="locked-run",
        iterations=1,
        resolution=checked.default_resolution,
        model="tiny",
        model_digest=checked.digest,
        store=TensorStore(f"file://{folder}/store").url,
        train_prompts_key="prompts/train.jsonl",
        validation_prompts_key="prompts/validation.jsonl",
        config=CONFIG,
    )
    port = free_port()
    endpoint = f"tcp://{own_address()}:{port}"
    members = locked_members(settings, folder, keys, endpoint, port)
    supervisor = Supervisor(members, folder / "logs", start_deadline_s=DEADLINE_S)
    facts = supervisor.start()
    yield Locked(folder, keys, settings, endpoint, str(facts["control"]["metrics_url"]))
    supervisor.stop()


def finished(client: Client, job: JobSpec) -> JobStatus:
    client.submit(job)
    limit_s = time.monotonic() + DEADLINE_S
    while not (status := client.poll(job.job_id)).phase.is_final and time.monotonic() < limit_s:
        time.sleep(0.05)
    assert status.phase is JobPhase.SUCCEEDED, f"{status.phase}: {status.error}"
    return status


def test_nodes_trainer_and_client_with_keys_roll_out_and_train(locked: Locked) -> None:
    with Client(locked.endpoint, keys=client_keys(*locked.key("friend"))) as client:
        rollout = finished(client, locked.job(Op.ROLLOUT))
        assert rollout.result is not None
        trained = finished(client, locked.job(Op.TRAIN_STEP, rollout.result.manifest_key))
        nodes = {node.node_id for node in client.status().nodes}
    assert (rollout.scored, nodes) == (8, {"reserved-0", "spot-0"})
    assert trained.result is not None
    assert trained.result.policy.version == 1


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it (wants a key and none was shown|breaks off every handshake: does it want a key)"),
        ("stranger", "it does not allow this key"),
    ],
)
def test_a_client_without_or_with_a_foreign_key_is_refused_at_once_counted_and_logged(
    locked: Locked, name: str, reason: str
) -> None:
    before = locked.figure("spotlight_peers_refused_total")
    keys = client_keys(*locked.key(name)) if name else None
    with (
        Client(locked.endpoint, deadline_s=DEADLINE_S, keys=keys) as client,
        pytest.raises(AuthenticationError, match=f"^control at {locked.endpoint} refuses the connection: {reason}"),
    ):
        client.status()
    limit_s = time.monotonic() + DEADLINE_S
    while locked.figure("spotlight_peers_refused_total") == before and time.monotonic() < limit_s:
        time.sleep(0.1)
    assert locked.figure("spotlight_peers_refused_total") > before
    assert 'event="peer refused"' in locked.log()
    with Client(locked.endpoint, keys=client_keys(*locked.key("friend"))) as client:
        assert client.status().trainer == "idle"


def test_a_control_key_that_is_not_controls_is_named_as_a_likely_cause(locked: Locked) -> None:
    wrong = client_keys(str(locked.keys / "friend.secret"), str(locked.keys / "stranger.public"))
    with (
        Client(locked.endpoint, deadline_s=DEADLINE_S, keys=wrong) as client,
        pytest.raises(AuthenticationError, match="is its public key the one that was given"),
    ):
        client.status()


def command(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    """Exit code and what `spotlight ARGV` printed on both outputs."""
    with pytest.raises(SystemExit) as ended:
        cli.main(list(argv))
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def test_commands_and_tasks_take_the_key_from_the_environment(
    locked: Locked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, control = locked.key("friend")
    monkeypatch.setenv(variables.ENDPOINT, locked.endpoint)
    monkeypatch.setenv(variables.SECRET_KEY, secret)
    monkeypatch.setenv(variables.CONTROL_KEY, control)
    code, out, _ = command(capsys, "status", "--json")
    assert (code, json.loads(out)["trainer"]) == (0, "idle")
    code, out, _ = command(capsys, "doctor", "--store", f"file://{locked.folder}/doctor")
    assert code == 0
    assert f"ok    control   {locked.endpoint} answers with keys: 2 nodes, trainer idle" in out
    probe(locked.endpoint)
    with connect(locked.endpoint) as client:
        assert isinstance(client.status(), ClusterStatus)


def test_commands_and_tasks_without_a_key_end_with_one_line(
    locked: Locked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variables.ENDPOINT, locked.endpoint)
    monkeypatch.delenv(variables.SECRET_KEY, raising=False)
    monkeypatch.delenv(variables.CONTROL_KEY, raising=False)
    code, out, err = command(capsys, "status", "--deadline-s", "60")
    assert (code, out) == (AuthenticationError.exit_code, "")
    assert re.fullmatch(rf"error: control at {locked.endpoint} refuses the connection: it .*want.* a key.*\n", err)
    with pytest.raises((AuthenticationError, UnreachableError)) as refused:
        probe(locked.endpoint)
    assert locked.endpoint in str(refused.value)
    monkeypatch.setenv(variables.SECRET_KEY, str(locked.keys / "friend.secret"))
    code, _, err = command(capsys, "status")
    assert code == 2
    assert "must both be given, or neither" in err
