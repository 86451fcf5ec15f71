"""`spotlight store`: what people do to a tensor store itself. Owns words and options; never does the work."""

from __future__ import annotations

import json
from typing import Annotated

import typer

HOUR_S = 3600.0


def _checked(url: str) -> str:
    """Before anything is done."""
    from spot_runtime.store.address import check_shared

    return check_shared(url) if url else url


StoreOption = Annotated[
    str,
    typer.Option(
        help="Tensor store: file:///folder, a path or s3://bucket/prefix.", show_default=False, callback=_checked
    ),
]

app = typer.Typer(help="The tensor store itself.", no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def _group() -> None:
    """The tensor store itself."""


@app.command(short_help="Remove what ended runs left in passing.")
def gc(
    store: StoreOption,
    older_than_h: Annotated[
        float, typer.Option(min=0.1, max=87600, help="A run that wrote nothing for so many hours has ended.")
    ] = 168.0,
    whole_runs: Annotated[
        bool,
        typer.Option(
            help="Remove all of an ended run: policies, manifests, seed banks and images too. Not before 24 h."
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Say what would go; remove nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for programs.")] = False,
) -> None:
    """Remove what ended runs left in passing: commits and trajectories, and parts of objects whose writers died.

    Policies, manifests, seed banks, images, prompt embeddings and models stay, and so does what a run that was broken off needs to be
    resumed. Nothing of a run is touched that wrote anything within --older-than-h. Control itself removes the commits of each job that
    ends.

        spotlight store gc --store s3://bucket/spotlight --dry-run
    """
    from spot_runtime.store.retention import sweep
    from spot_runtime.store.tensors import TensorStore

    swept = sweep(TensorStore(store), older_than_h * HOUR_S, whole_runs=whole_runs, dry_run=dry_run)
    if as_json:
        fields = {"ended_runs": swept.ended_runs, "keys": swept.keys, "orphans": swept.orphans, "dry_run": dry_run}
        typer.echo(json.dumps(fields))
        return
    verb = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(swept.ended_runs)} ended runs: {len(swept.keys)} objects {verb}, {swept.orphans} orphans")
