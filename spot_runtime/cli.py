"""What people type: `spotlight`. Owns words, options and exit codes; never does the work.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from spot_runtime import variables
from spot_runtime.errors import InputError, SpotlightError
from spot_runtime.models import commands as models
from spot_runtime.store import commands as stores
from spot_runtime.store.commands import StoreOption

if TYPE_CHECKING:
    from spot_runtime.config import RunSettings
    from spot_runtime.messages import ClusterStatus

_CHECK_S = 0.5
_EPILOG = f"An error is one line and an exit code of its own; {variables.TRACEBACK}=1 adds the traceback."

app = typer.Typer(
    name="spotlight",
    help="The runtime that post-trains diffusion transformers on reserved and spot GPUs.\n\n"
    "A training run starts a cluster of its own: `pyflyte run workflows/dit_grpo.py train --dataset geneval`. "
    "Use `spotlight up` to keep one running for several runs, `spotlight status` to look at it, "
    "and `spotlight doctor` where something does not start.",
    epilog=_EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

ModelOption = Annotated[
    str,
    typer.Option(
        help="Qwen-Image pipeline: a folder, a hub id such as Qwen/Qwen-Image, store:NAME for one that `spotlight models push` "
        "put into the store, or `tiny`, which ships with the package."
    ),
]
FolderOption = Annotated[Path, typer.Option(help="Where the cluster keeps its journal, logs and scratch.")]
PortOption = Annotated[int, typer.Option(min=0, max=65535, help="Loopback port where control answers. 0: a free one.")]
EndpointOption = Annotated[
    str, typer.Option(envvar=variables.ENDPOINT, help="Where control answers, as `spotlight up` printed it.")
]
SecretKeyOption = Annotated[
    str, typer.Option(envvar=variables.SECRET_KEY, help="NAME.secret of the caller, where control wants keys.")
]
ControlKeyOption = Annotated[
    str, typer.Option(envvar=variables.CONTROL_KEY, help="Control's .public file, where control wants keys.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


@app.command(epilog=_EPILOG, short_help="Start a cluster on this machine and keep it.")
def up(
    model: ModelOption = "tiny",
    spot_nodes: Annotated[int, typer.Option(min=0, max=64, help="Spot nodes beside the reserved one.")] = 2,
    slots: Annotated[int, typer.Option(min=1, max=64, help="Workers on each spot node.")] = 1,
    degree: Annotated[
        int, typer.Option(min=1, max=64, help="Workers of a node that denoise together: sequence-parallel degree.")
    ] = 1,
    resolution: Annotated[
        int, typer.Option(min=0, max=8192, help="Height and width in pixels. 0: the model's own.")
    ] = 0,
    deterministic: Annotated[
        bool, typer.Option(help="Denoise each sample alone: for runs whose cfg says deterministic.")
    ] = False,
    reward: Annotated[
        list[str] | None, typer.Option(help="Reward that its service loads beside the embedded ones; may be repeated.")
    ] = None,
    store: StoreOption = "",
    folder: FolderOption = Path(".spotlight"),
    port: PortOption = 0,
) -> None:
    """Start a cluster of real processes on this machine and keep it until Ctrl-C.

    Starts control, a reserved node with the trainer, the spot nodes and the reward service on loopback. The endpoint is the first line
    of the output; set SPOTLIGHT_ENDPOINT to it and runs use this cluster, and its store, instead of starting their own. Without --store
    the store is FOLDER/store.

        spotlight up --spot-nodes 2 &
        SPOTLIGHT_ENDPOINT=tcp://127.0.0.1:PORT pyflyte run workflows/dit_grpo.py train --dataset geneval
    """
    from spot_runtime.daemons.supervisor import EmbeddedCluster
    from spot_runtime.models.address import is_stored, local_model
    from spot_runtime.rewards.catalog import check_reward

    for name in reward or ():
        check_reward(name)
    cluster_config = {
        "spot_nodes": spot_nodes,
        "slots_per_spot_node": slots,
        "sequence_parallel_degree": degree,
        "rewards": reward or (),
    }
    config = {"cluster": cluster_config, "deterministic": deterministic}
    settings = _cluster_settings(model, resolution, store or (folder.absolute() / "store").as_uri(), config)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with models.progress(f"pulling {model}", quiet=not is_stored(model)) as told:
            local_model(model, settings.store, told)
        typer.echo(f"starting {spot_nodes + 1} nodes; logs in {folder / 'logs'}", err=True)
        with EmbeddedCluster(settings, folder, port=port) as cluster:
            typer.echo(cluster.endpoint)
            typer.echo(f"ready, store {settings.store}; Ctrl-C ends it", err=True)
            while True:
                time.sleep(_CHECK_S)
                cluster.check()
    except KeyboardInterrupt:
        typer.echo("ended", err=True)


@app.command(epilog=_EPILOG, short_help="Show nodes, jobs and trainer of a cluster.")
def status(
    endpoint: EndpointOption = "",
    secret_key: SecretKeyOption = "",
    control_key: ControlKeyOption = "",
    deadline_s: Annotated[float, typer.Option(min=0.1, max=600, help="Seconds to wait for the answer.")] = 5.0,
    as_json: JsonOption = False,
) -> None:
    """Show nodes, jobs and trainer of a running cluster.

    spotlight status --endpoint tcp://127.0.0.1:PORT --json
    """
    import msgspec

    from spot_runtime.client import Client
    from spot_runtime.daemons.keys import client_keys

    if not endpoint:
        raise InputError(f"endpoint is not given: pass --endpoint or set {variables.ENDPOINT}")
    keys = client_keys(secret_key, control_key, names=("--secret-key", "--control-key"))
    with Client(endpoint, deadline_s=deadline_s, keys=keys) as client:
        found = client.status()
    typer.echo(msgspec.json.encode(found).decode() if as_json else status_text(found))


@app.command(epilog=_EPILOG, short_help="Write a run's policy as a diffusers folder.")
def export(
    run: Annotated[
        str, typer.Argument(help="Run id, folder of a run, URI STORE/runs/RUN[/checkpoints/N], or `latest`.")
    ],
    folder: Annotated[Path, typer.Argument(help="Where the policy goes; must not exist yet.")],
    store: StoreOption = "",
    lineage: Annotated[str, typer.Option(help="Which runs `latest` chooses among.")] = "geneval",
    ema: Annotated[
        bool,
        typer.Option(
            "--ema", help="The moving average, which validations sample where one is kept, instead of the policy."
        ),
    ] = False,
) -> None:
    """Write a run's policy as a folder that stock diffusers loads.

    An adapter is read by pipeline.load_lora_weights(FOLDER); all weights lie in FOLDER/transformer. Without --store the store is that of
    the run's folder.

    spotlight export latest my-policy
    """
    from spot_runtime.export import export_policy

    typer.echo(export_policy(run, folder, store_url=store, ema=ema, lineage=lineage))


@app.command(epilog=_EPILOG, short_help="Check that this machine can run a cluster.")
def doctor(
    model: ModelOption = "tiny",
    store: StoreOption = "",
    folder: FolderOption = Path(".spotlight"),
    port: PortOption = 0,
    endpoint: EndpointOption = "",
    secret_key: SecretKeyOption = "",
    control_key: ControlKeyOption = "",
    as_json: JsonOption = False,
) -> None:
    """Check that this machine can run a cluster: Python, packages, torch device, cores, model, store, port; with an endpoint also that
    control answers there and takes the key. Without --store the store is FOLDER/store; nothing is left in it.

    Prints one line a check and ends with the exit code of the first that failed.
    """
    from dataclasses import asdict

    from spot_runtime.daemons.environment import Where, examine

    checks = []
    where = Where(endpoint, secret_key, control_key)
    for check in examine(model=model, store=store or (folder.absolute() / "store").as_uri(), port=port, control=where):
        checks.append(check)
        if not as_json:
            typer.echo(f"{'ok  ' if check.ok else 'FAIL'}  {check.name:<8}  {check.detail}")
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    raise typer.Exit(next((check.exit_code for check in checks if not check.ok), 0))


keys = typer.Typer(help="Keys for clusters that are not on one machine.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(keys, name="keys")


@keys.command(epilog=_EPILOG, short_help="Make a CURVE key pair.")
def new(
    name: Annotated[str, typer.Argument(help="Of the daemon or person: lower-case letters, digits and -.")],
    folder: Annotated[Path, typer.Option(help="Where NAME.public and NAME.secret go.")] = Path("keys"),
) -> None:
    """Make a CURVE key pair: NAME.secret stays with its owner (mode 0600), NAME.public goes to control's folder of allowed keys.

    spotlight keys new control && spotlight keys new spot-0
    """
    from spot_runtime.transport import new_pair, write_pair

    for path in write_pair(folder, name, new_pair()):
        typer.echo(path)


app.add_typer(models.app, name="models")
app.add_typer(stores.app, name="store")


def status_text(found: ClusterStatus) -> str:
    """A few aligned lines for people."""
    lines = [f"trainer  {found.trainer}", f"reward   {found.reward_url or 'none'}"]
    lines += [
        f"node     {node.node_id:<12} {node.pool.value:<8} {node.state:<9} {node.in_flight} in flight on {node.slots} slots"
        + (f" in groups of {', '.join(map(str, node.degrees))}" if max(node.degrees, default=1) > 1 else "")
        + (f", {node.standbys} standing by" if node.standbys else "")
        for node in found.nodes
    ]
    lines += [
        f"job      {job.job_id} {job.phase.value} {job.done}/{job.total} done, {job.scored} scored, {job.failed} failed"
        + (f": {job.error or job.message}" if job.error or job.message else "")
        for job in found.jobs
    ]
    lines += [
        f"failed   {request.request_id} of prompt {request.prompt_id} after {request.attempts} attempts: {request.reason}"
        for request in found.failures
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Entry point of `spotlight`: an error becomes one line on standard error and the exit code of its class."""
    try:
        app(args=argv)
    except SpotlightError as error:
        _end(str(error), error.exit_code)
    except Exception as error:  # noqa: BLE001  a defect: shown in one line, in full when asked
        _end(
            f"unexpected {type(error).__name__}: {error} ({variables.TRACEBACK}=1 shows where)",
            SpotlightError.exit_code,
        )


def _end(message: str, exit_code: int) -> None:
    if variables.wants_traceback():
        traceback.print_exc()
    typer.echo(f"error: {message}", err=True)
    sys.exit(exit_code)


def _cluster_settings(model: str, resolution: int, store: str, config: Mapping[str, object]) -> RunSettings:
    """What a cluster without a run of its own is started with."""
    from spot_runtime.config import RunSettings
    from spot_runtime.models.address import find_model

    checked = find_model(model, store, resolution)
    return RunSettings.parse(
        {
            "run_id": "spotlight-up",
            "iterations": 1,
            "resolution": resolution or checked.default_resolution,
            "model": str(Path(model).absolute()) if Path(model).is_dir() else model,
            "model_digest": checked.digest,
            "store": store,
            "train_prompts_key": "",
            "validation_prompts_key": "",
            "config": config,
        }
    )


if __name__ == "__main__":
    main()
