"""Command line of the model makers: `python -m spot_runtime.models --help`. Owns options and progress lines; never a formula."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from spot_runtime.errors import SpotlightError

app = typer.Typer(
    help="Make the small Qwen-Image pipelines that the demo, the tests and the benchmarks use. Nothing is downloaded.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)
Out = Annotated[Path, typer.Option("--out", help="Folder to write; it must not hold another pipeline.")]


@app.command("tiny")
def tiny(
    out: Out,
    device: Annotated[str, typer.Option(help="cuda, cpu, or auto: a GPU if there is one.")] = "auto",
    minutes: Annotated[
        float,
        typer.Option(min=0.2, max=600, help="Time for training, evaluation not counted: 4 on a GPU, 50 on two cores."),
    ] = 50.0,
    threads: Annotated[int, typer.Option(min=1, max=256, help="CPU threads.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Seeds weights, images and noise.")] = 0,
    vae_from: Annotated[
        Path | None,
        typer.Option(
            help="Keep the VAE of this pipeline folder and train the transformer only.", exists=True, file_okay=False
        ),
    ] = None,
) -> None:
    """Train the tiny base from nothing: tokenizer, frozen text encoder, VAE, transformer.

    It draws shapes and short texts at 64 px and gets about a third of the prompts right, because the captions it learns from last are
    loose: that is the room which post-training fills. Snapshots of the transformer are kept in a folder beside the final one.
    """
    import torch

    from spot_runtime.models.recipe import TinyOrder, make_tiny, resolved_device

    torch.set_num_threads(threads)
    _run(lambda: make_tiny(TinyOrder(out, resolved_device(device), minutes * 60, seed, vae_from), _progress()))


@app.command("bench-dit")
def bench_dit(
    out: Out,
    seed: Annotated[int, typer.Option(min=0, help="Seeds the weights.")] = 0,
    measure: Annotated[bool, typer.Option(help="Time one denoising step on one core and print it.")] = True,
) -> None:
    """Make a pipeline with random weights whose denoising step takes 150-300 ms on one core at 256 px.

    For timing only: a system measured on it is measured doing work, not passing messages. Its 8 heads and 1024 image tokens split
    evenly among 1, 2, 4 or 8 sequence-parallel ranks.
    """
    from spot_runtime.models.recipe import make_bench

    _run(lambda: make_bench(out, seed, measure, _progress()))


def _run(make: Callable[[], None]) -> None:
    try:
        make()
    except SpotlightError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from None


def _progress() -> Callable[[str], None]:
    started_s = time.monotonic()
    return lambda line: typer.echo(f"[{time.monotonic() - started_s:6.1f} s] {line}")


if __name__ == "__main__":
    app()
