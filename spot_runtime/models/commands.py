"""`spotlight models`: a model once into the store, from there to any machine. Owns words, options and the progress line.

Never does the work. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from spot_runtime import variables
from spot_runtime.store.commands import StoreOption

_EPILOG = (
    "In runs the model is then called store:NAME, with the same --store. Credentials of S3 come from AWS_ACCESS_KEY_ID, "
    f"AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL. {variables.CACHE} names the folder of pulled models (default: "
    "$XDG_CACHE_HOME/spotlight, else ~/.cache/spotlight)."
)
_MIB = 1024 * 1024

app = typer.Typer(
    help="Models in the tensor store: pushed once, pulled by each machine once.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
NameArgument = Annotated[str, typer.Argument(help="Of a model in the store; `spotlight models list` shows them.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs; no progress.")]


@app.command(epilog=_EPILOG, short_help="Put a pipeline folder or hub model into the store.")
def push(
    model: Annotated[str, typer.Argument(help="Pipeline folder, hub id such as Qwen/Qwen-Image, or `tiny`.")],
    store: StoreOption,
    name: Annotated[str, typer.Option(help="Its name in the store. Empty: the last part of MODEL.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Put a pipeline folder or hub model into the store.

    A hub id is downloaded first, which needs the hub to be reachable from here; a folder needs no network but the store's. Interrupted,
    the same command goes on with the files that are missing. On a model that is complete it repairs damaged objects.

        spotlight models push Qwen/Qwen-Image --store s3://bucket/spotlight
        pyflyte run workflows/dit_grpo.py train --model store:Qwen-Image --store s3://bucket/spotlight
    """
    from spot_runtime.diffusion.geometry import model_folder
    from spot_runtime.models.shelf import push_model
    from spot_runtime.store.tensors import TensorStore

    folder = model_folder(model)
    chosen = name or model.rstrip("/").rpartition("/")[2]
    with progress(f"pushing {chosen}", quiet=as_json) as told:
        pushed = push_model(TensorStore(store), chosen, folder, told)
    listing = pushed.listing
    fields = {"name": chosen, "digest": listing.digest, "files": len(listing.files), "bytes": listing.size_bytes}
    if as_json:
        typer.echo(json.dumps({**fields, "sent_bytes": pushed.sent_bytes}))
    else:
        typer.echo(
            f"store:{chosen}: {_size(listing.size_bytes)} in {len(listing.files)} files, {_size(pushed.sent_bytes)} sent"
        )


@app.command(epilog=_EPILOG, short_help="Fetch a model from the store to this machine.")
def pull(
    name: NameArgument,
    store: StoreOption,
    verify: Annotated[bool, typer.Option(help="Read what is here already, and pull again what is damaged.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Fetch a model from the store to this machine's cache and print its folder.

    Nodes do this by themselves when they start; pull beforehand to have it done. Checks the free space first. Interrupted, the same
    command goes on where it was; several at once download once.

        spotlight models pull Qwen-Image --store s3://bucket/spotlight
    """
    from spot_runtime.models.cache import pull_model
    from spot_runtime.store.tensors import TensorStore

    with progress(f"pulling {name}", quiet=as_json) as told:
        pulled = pull_model(TensorStore(store), name, verify=verify, on_progress=told)
    listing = pulled.listing
    if as_json:
        fields = {"name": name, "digest": listing.digest, "folder": pulled.folder, "bytes": listing.size_bytes}
        typer.echo(json.dumps({**fields, "fetched_bytes": pulled.fetched_bytes}))
    else:
        typer.echo(f"{_size(listing.size_bytes)}, {_size(pulled.fetched_bytes)} fetched", err=True)
        typer.echo(pulled.folder)


@app.command("list", epilog=_EPILOG, short_help="Show the models in a store.")
def list_(store: StoreOption, as_json: JsonOption = False) -> None:
    """Show the models in a store.

    spotlight models list --store s3://bucket/spotlight --json
    """
    from spot_runtime.models.shelf import list_models
    from spot_runtime.store.tensors import TensorStore

    found = list_models(TensorStore(store), lambda reason: typer.echo(f"left out: {reason}", err=True))
    if as_json:
        rows = [{"name": m.name, "digest": m.digest, "files": len(m.files), "bytes": m.size_bytes} for m in found]
        typer.echo(json.dumps(rows))
        return
    for model in found:
        typer.echo(f"store:{model.name:<24} {_size(model.size_bytes):>12}  {model.digest[:12]}")


@app.command(epilog=_EPILOG, short_help="Remove a model from the store.")
def remove(name: NameArgument, store: StoreOption) -> None:
    """Remove a model from the store. Copies in caches stay.

    spotlight models remove Qwen-Image --store s3://bucket/spotlight
    """
    from spot_runtime.models.shelf import remove_model
    from spot_runtime.store.tensors import TensorStore

    removed = remove_model(TensorStore(store), name)
    typer.echo(f"store:{name}: removed, {_size(removed.size_bytes)}")


def _size(size_bytes: int) -> str:
    return f"{size_bytes / _MIB:.1f} MiB"


@contextlib.contextmanager
def progress(what: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error where that is a terminal, else nothing."""
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _all: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        line = bar.add_task(what, total=None)
        yield lambda done_bytes, all_bytes: bar.update(line, completed=done_bytes, total=all_bytes)
