"""The two recipes: the tiny base and the bench model, from nothing to a pipeline folder. Owns their sizes, seeds and order of work."""

from __future__ import annotations

import json
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel

from spot_runtime.errors import InputError
from spot_runtime.models.build import BENCH, BENCH_RESOLUTION, TINY, build_pipeline
from spot_runtime.models.evaluation import Exam, draw, grade, is_correct, make_exam
from spot_runtime.models.flow import decode_latents, encode_images, ode_sample, to_uint8
from spot_runtime.models.latents import LatentSet, make_latent_set, training_rows
from spot_runtime.models.pretrain import Report, effort_of, train_transformer, train_vae
from spot_runtime.models.render import render
from spot_runtime.models.scenes import scene_of
from spot_runtime.rewards.prompts import COUNT_WORDS, PLURALS, RELATIONS, GenevalRow, shapes_rows, text_rows
from spot_runtime.rewards.world import PALETTE, SHAPES

SIDE_PX: Final = 64
NUM_STEPS: Final = 10
VAE_SHARE: Final = 0.18
"""Share of the training time that the VAE gets."""
EXAM_SEED: Final = 20_000
"""Keeps the exam's prompts apart from those that a run's own seed draws."""
EXAM_PROMPTS: Final = 64
EXAM_TRIES: Final = 8
DRAW_BATCH: Final = 64
SNAPSHOTS_AT: Final = (0.55, 0.7, 0.8)
"""Shares of the transformer's time after which its average is kept as a snapshot."""

OTHER_WORDS: Final = (
    *("a", "an", "the", "photo", "picture", "image", "drawing", "of", "and", "with", "in", "on", "to", "text", "word"),
    *("orange", "pink", "brown", "white", "gray", "shape", "shapes", "left", "right", "above", "below", "cross"),
)


def domain_words() -> list[str]:
    """Every word of the shapes world's prompts, and a few that users may add."""
    relations = [word for relation in RELATIONS for word in relation.split()]
    plurals = [PLURALS.get(shape, f"{shape}s") for shape in SHAPES]
    return sorted({*OTHER_WORDS, *PALETTE, *SHAPES, *plurals, *relations, *COUNT_WORDS})


@dataclass(frozen=True)
class TinyOrder:
    """What the caller may choose. With `vae_from`, the VAE of that pipeline folder is kept and all the time goes to the transformer."""

    out: Path
    device: torch.device
    limit_s: float
    seed: int
    vae_from: Path | None = None


def make_tiny(order: TinyOrder, report: Report) -> None:
    """Trains the tiny base and writes its folder to `out`, snapshots of the transformer beside it as `<out>-snapshots`.

    Raises InputError if `out` holds something already.
    """
    _check_empty(order.out)
    torch.set_float32_matmul_precision("high")
    device, rng = order.device, random.Random(f"tiny/{order.seed}")
    pipeline = build_pipeline(TINY, domain_words(), order.seed)
    rows = training_rows(order.seed, effort_of(device).text_prompts)
    report(f"device {device}, {sum(map(len, rows.values()))} training prompts")
    left_s = order.limit_s - _provide_vae(pipeline, rows, rng, order, report)
    data = _encode(pipeline, rows, rng, device, report)
    inspector = Inspector(pipeline, device, order.out.with_name(order.out.name + "-snapshots"), report)
    average = train_transformer(pipeline.transformer.to(device), data, order.seed, left_s, report, inspector)
    inspector.examine(average)
    pipeline.transformer = average
    pipeline.to("cpu")
    save_folder(pipeline, order.out, SIDE_PX)
    report(f"saved {order.out}, {folder_bytes(order.out) / 1e6:.1f} MB")


def _provide_vae(
    pipeline: QwenImagePipeline, rows: dict[str, list[GenevalRow]], rng: random.Random, order: TinyOrder, report: Report
) -> float:
    """Trains the pipeline's VAE or takes a given one; returns the seconds that this takes off the limit."""
    spent_s = 0.0
    if order.vae_from is not None:
        given = AutoencoderKLQwenImage.from_pretrained(order.vae_from, subfolder="vae")
        pipeline.vae.load_state_dict(given.state_dict())
        pipeline.vae.register_to_config(latents_mean=given.config.latents_mean, latents_std=given.config.latents_std)
    pipeline.vae.to(order.device)
    if order.vae_from is None:
        spent_s = order.limit_s * VAE_SHARE
        train_vae(pipeline.vae, rows, SIDE_PX, rng, order.device, spent_s, report)
    report(f"vae {reconstruction_line(pipeline, rng, order.device)}")
    return spent_s


def _encode(
    pipeline: QwenImagePipeline,
    rows: dict[str, list[GenevalRow]],
    rng: random.Random,
    device: torch.device,
    report: Report,
) -> LatentSet:
    started_s = time.monotonic()
    pipeline.text_encoder.to(device)
    data = make_latent_set(pipeline, rows, effort_of(device).images, SIDE_PX, rng, device)
    report(f"{len(data.x0_NTC)} images, {len(data.embeds_PLD)} prompts encoded in {time.monotonic() - started_s:.0f} s")
    return data


class Inspector:
    """Examines the transformer now and then, and keeps snapshots at SNAPSHOTS_AT."""

    def __init__(self, pipeline: QwenImagePipeline, device: torch.device, snapshots: Path, report: Report) -> None:
        self._vae = pipeline.vae
        self._snapshots, self._report = snapshots, report
        self._due = list(SNAPSHOTS_AT)
        self._exams = [
            make_exam(pipeline, rows, EXAM_TRIES, SIDE_PX, NUM_STEPS, EXAM_SEED, device) for rows in exam_rows()
        ]

    def __call__(self, transformer: QwenImageTransformer2DModel, share_done: float) -> None:
        self.examine(transformer)
        if self._due and share_done >= self._due[0]:
            folder = self._snapshots / f"at-{self._due.pop(0):.2f}"
            transformer.save_pretrained(folder)
            self._report(f"snapshot {folder}")

    def examine(self, transformer: QwenImageTransformer2DModel) -> None:
        """Reports success on validation prompts; at one try, and at EXAM_TRIES tries in brackets."""
        for exam in self._exams:
            self._report(f"  {grade(draw(transformer, self._vae, exam, DRAW_BATCH), exam).line()}")


def exam_rows() -> tuple[tuple[GenevalRow, ...], tuple[GenevalRow, ...]]:
    """Validation prompts of the shapes world, and texts."""
    shapes = shapes_rows(EXAM_SEED, EXAM_PROMPTS, "validation")
    return shapes, text_rows(EXAM_SEED, EXAM_PROMPTS // 2, "validation")


def reconstruction_line(pipeline: QwenImagePipeline, rng: random.Random, device: torch.device) -> str:
    """How many true scenes of the exam's prompts are still judged right after encoding and decoding."""
    lines = []
    for rows in exam_rows():
        scenes = [scene_of(row, rng) for row in rows]
        images = render(scenes, SIDE_PX, device)
        decoded = decode_latents(pipeline.vae, encode_images(pipeline.vae, images)).cpu()
        exact, kept = (
            sum(is_correct(row, image.numpy()) for row, image in zip(rows, batch, strict=True))
            for batch in (to_uint8(images).cpu(), decoded)
        )
        lines.append(f"{kept} of {len(rows)} ({exact} before encoding)")
    return f"reconstructions judged right: shapes {lines[0]}, texts {lines[1]}"


def save_folder(pipeline: QwenImagePipeline, out: Path, resolution: int) -> None:
    """Writes the folder, with the resolution that it was made for where runs look for their default."""
    pipeline.save_pretrained(out)
    index = out / "model_index.json"
    named = json.loads(index.read_text()) | {"_default_resolution": resolution}
    index.write_text(json.dumps(named, indent=2) + "\n")


def make_bench(out: Path, seed: int, measure: bool, report: Report) -> None:
    """Writes the bench model's folder to `out`. Raises InputError if `out` holds something already."""
    _check_empty(out)
    pipeline = build_pipeline(BENCH, domain_words(), seed)
    save_folder(pipeline, out, BENCH_RESOLUTION)
    parameters = sum(p.numel() for p in pipeline.transformer.parameters())
    report(f"saved {out}: {parameters / 1e6:.1f} M parameters, {folder_bytes(out) / 1e6:.0f} MB")
    if measure:
        step_s = measured_step_s(pipeline, BENCH_RESOLUTION)
        report(
            f"one denoising step at {BENCH_RESOLUTION} px, batch 1, one core: {step_s * 1000:.0f} ms of processor time"
        )


@torch.no_grad()
def measured_step_s(pipeline: QwenImagePipeline, side_px: int, repeats: int = 7) -> float:
    """Median processor time of one forward of the transformer, batch 1, on one thread: what wall time is on a core of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    exam = make_exam(pipeline, shapes_rows(0, 1, "train"), 1, side_px, 2, 0, torch.device("cpu"))
    one_step = Exam(exam.rows, 1, exam.noise_levels[:2], exam.x_BTC, exam.embeds_BLD, exam.mask_BL)
    took_s = sorted(_forward_s(pipeline, one_step) for _ in range(repeats + 1))
    torch.set_num_threads(threads)
    return took_s[len(took_s) // 2]


def resolved_device(name: str) -> torch.device:
    """The torch device that `name` means. Raises InputError for an unknown name or a GPU that is not there."""
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise InputError(f"device = {name!r}: must be auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InputError(f"device = {name!r}: no CUDA device on this machine")
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _check_empty(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(f"out = {out}: must be a new or empty folder")


def _forward_s(pipeline: QwenImagePipeline, exam: Exam) -> float:
    started_s = time.thread_time()
    ode_sample(pipeline.transformer, exam.x_BTC, exam.noise_levels, exam.embeds_BLD, exam.mask_BL)
    return time.thread_time() - started_s
