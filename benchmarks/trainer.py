"""One training step against a plain loop of stock diffusers, peft and torch on the same batch.

    python -m benchmarks.trainer --json FILE

The plain loop goes group by group and denoising step by denoising step: one forward and backward pass each, peft's own LoRA layers, AdamW.
Both start from the same policy and see the same samples; how far apart the two policies end is reported beside the figures. `ratio` is of
wall times; `cpu_ratio`, of processor times, says the same of a machine that others use too.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from peft import LoraConfig
from torch.nn.utils.rnn import pad_sequence

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.adapter import ALPHA_KEY, target_modules
from spot_runtime.diffusion.batch import TrainingSample, split_by_prompt
from spot_runtime.diffusion.geometry import model_folder, read_json
from spot_runtime.diffusion.optimizer import ADAM_BETAS, ADAM_EPS
from spot_runtime.diffusion.schedule import sigmas
from spot_runtime.diffusion.trainer import GrpoTrainer
from spot_runtime.diffusion.transformer import load_transformer, predict_velocity
from spot_runtime.rl.noise import initial_latents, sde_noise
from spot_runtime.rl.sde import ode_step, sde_step

MODEL = "tiny"
COLOURS = ("red", "green", "blue", "yellow", "black", "white")
SHAPES = ("square", "circle", "triangle")
WANTED_RATIO = 1.2


def main(
    json_path: Annotated[Path | None, typer.Option("--json", help="Where the figures go.")] = None,
    prompts: Annotated[int, typer.Option(min=4, max=18, help="Groups of the batch.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, max=20, help="Runs of each side, in turn; the fastest counts.")] = 3,
    threads: Annotated[int, typer.Option(min=1, max=64, help="Threads of torch.")] = 1,
) -> None:
    """Samples a second of both sides, and their ratio."""
    sampling, grpo = SamplingConfig(), GrpoConfig(prompts_per_iteration=prompts)
    trainer = GrpoTrainer(MODEL, threads=threads)
    texts = [f"a photo of a {colour} {shape}" for colour in COLOURS for shape in SHAPES][:prompts]
    samples = rollouts(texts, trainer.encode(texts), sampling, grpo)
    ours_s, plain_s, gap = [], [], 0.0
    train_ours(trainer, samples, sampling, grpo)  # attaches the adapter, which a resident trainer does once
    for _ in range(repeats):
        started = time.perf_counter(), time.process_time()
        ours = train_ours(trainer, samples, sampling, grpo)
        ours_s.append(_since(started))
        seconds, plain = train_plain(trainer, samples, sampling, grpo)
        plain_s.append(seconds)
        gap = max(float(np.abs(ours[name] - plain[name]).max()) for name in plain)
    figures = {
        "samples": len(samples),
        "rows": sum(len(sample.log_probs) for sample in samples),
        "threads": threads,
        "ours_samples_per_s": len(samples) / min(ours_s)[0],
        "plain_samples_per_s": len(samples) / min(plain_s)[0],
        "ratio": min(plain_s)[0] / min(ours_s)[0],
        "cpu_ratio": min(cpu_s for _, cpu_s in plain_s) / min(cpu_s for _, cpu_s in ours_s),
        "wanted_ratio": WANTED_RATIO,
        "policy_gap_max": gap,
    }
    text = json.dumps(figures, indent=2)
    typer.echo(text)
    if json_path is not None:
        json_path.write_text(text + "\n")


def _since(started: tuple[float, float]) -> tuple[float, float]:
    """Wall and processor seconds."""
    return time.perf_counter() - started[0], time.process_time() - started[1]


def rollouts(
    texts: Sequence[str], embeds: Sequence[np.ndarray], sampling: SamplingConfig, grpo: GrpoConfig
) -> list[TrainingSample]:
    """A group of each text; rewards read the latents, which is enough to have advantages."""
    folder = model_folder(MODEL)
    transformer = load_transformer(folder, torch.device("cpu"), torch.float32)
    tokens, channels = 64, int(transformer.config.in_channels)
    schedule = sigmas(read_json(folder, "scheduler/scheduler_config.json"), sampling.num_steps, tokens)
    window = (sampling.sde_window_start, sampling.sde_window_start + sampling.sde_window_size)
    samples = []
    for number, (text, embed) in enumerate(zip(texts, embeds, strict=True)):
        seeds = [1000 * number + index for index in range(grpo.group_size)]
        x = torch.stack([initial_latents(seed, tokens, channels) for seed in seeds])
        path, log_probs = [x], []
        for i in range(sampling.num_steps):
            now, then, level = (
                torch.full((len(seeds),), float(v)) for v in (*schedule[i : i + 2], sampling.noise_level)
            )
            with torch.no_grad():
                velocity = predict_velocity(transformer, x, now, [torch.from_numpy(embed)] * len(seeds), (8, 8))
            if window[0] <= i < window[1]:
                noise = torch.stack([sde_noise(seed, i, tokens, channels) for seed in seeds])
                step = sde_step(velocity, x, now, then, schedule[1].expand(len(seeds)), level, noise=noise)
                x = step.sample
                log_probs.append(step.log_prob)
            else:
                x = ode_step(velocity, x, now, then)
            path.append(x)
        for place, seed in enumerate(seeds):
            samples.append(
                TrainingSample(
                    request_id=f"{number}.{seed}",
                    prompt_id=f"{number:02d} {text}",
                    seed=seed,
                    reward=float(x[place].mean()),
                    embeds=embed,
                    window_latents=np.stack([step[place].numpy() for step in path[window[0] : window[1] + 1]]),
                    log_probs=np.array([float(priced[place]) for priced in log_probs], dtype=np.float32),
                    sde_window=window,
                    num_steps=sampling.num_steps,
                    noise_level=sampling.noise_level,
                )
            )
    return samples


def train_ours(
    trainer: GrpoTrainer, samples: Sequence[TrainingSample], sampling: SamplingConfig, grpo: GrpoConfig
) -> dict[str, np.ndarray]:
    outcome = trainer.train(
        None,
        samples,
        sampling=sampling,
        grpo=grpo,
        seed=0,
        policy_version=0,
        on_progress=lambda *_: None,
        should_stop=lambda: False,
    )
    return dict(outcome.state.adapter)


def train_plain(
    trainer: GrpoTrainer, samples: Sequence[TrainingSample], sampling: SamplingConfig, grpo: GrpoConfig
) -> tuple[tuple[float, float], dict[str, np.ndarray]]:
    """Wall and processor seconds of the same step without anything of ours, and the policy that it ends with.

    Its model is loaded before the clock starts.
    """
    folder = model_folder(MODEL)
    model = QwenImageTransformer2DModel.from_pretrained(folder, subfolder="transformer").requires_grad_(False)
    schedule = sigmas(read_json(folder, "scheduler/scheduler_config.json"), sampling.num_steps, 64)
    modules = list(target_modules(model))
    model.add_adapter(LoraConfig(r=grpo.lora_rank, lora_alpha=grpo.lora_alpha, target_modules=modules))
    weights = {name.replace(".default.", "."): p for name, p in model.named_parameters() if ".lora_" in name}
    start = trainer.initial_state(grpo, 0).adapter
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(torch.from_numpy(start[name]))
    started = time.perf_counter(), time.process_time()
    _plain_step(model, weights, samples, schedule, sampling, grpo)
    seconds = _since(started)
    return seconds, {name: p.detach().numpy() for name, p in weights.items() if name != ALPHA_KEY}


def _plain_step(
    model: Any,
    weights: dict[str, torch.nn.Parameter],
    samples: Sequence[TrainingSample],
    schedule: torch.Tensor,
    sampling: SamplingConfig,
    grpo: GrpoConfig,
) -> None:
    optimizer = torch.optim.AdamW(
        weights.values(), lr=grpo.learning_rate, betas=ADAM_BETAS, eps=ADAM_EPS, weight_decay=grpo.weight_decay
    )
    std = np.std([sample.reward for sample in samples])
    for part in split_by_prompt(samples, grpo.optimizer_steps):
        rows = sum(len(samples[index].log_probs) for index in part)
        for start in range(0, len(part), grpo.group_size):
            group = [samples[index] for index in part[start : start + grpo.group_size]]
            rewards = np.array([sample.reward for sample in group])
            advantage = torch.tensor((rewards - rewards.mean()) / (std + 1e-4), dtype=torch.float32)
            for place, i in enumerate(range(*group[0].sde_window)):
                loss = _plain_loss(model, group, place, i, advantage, schedule, sampling, grpo)
                (loss.sum() / rows).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(list(weights.values()), grpo.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()


def _plain_loss(
    model: Any,
    group: Sequence[TrainingSample],
    place: int,
    i: int,
    advantage: torch.Tensor,
    schedule: torch.Tensor,
    sampling: SamplingConfig,
    grpo: GrpoConfig,
) -> torch.Tensor:
    x, after = (torch.from_numpy(np.stack([sample.window_latents[k] for sample in group])) for k in (place, place + 1))
    text = pad_sequence([torch.from_numpy(sample.embeds) for sample in group], batch_first=True)
    now, then = schedule[i].expand(len(group)), schedule[i + 1].expand(len(group))
    velocity = model(
        hidden_states=x,
        timestep=now,
        encoder_hidden_states=text,
        img_shapes=[[(1, 8, 8)]] * len(group),
        return_dict=False,
    )[0]
    level = torch.full_like(now, sampling.noise_level)
    log_prob = sde_step(velocity, x, now, then, schedule[1].expand_as(now), level, sample=after).log_prob
    old = torch.tensor([float(sample.log_probs[place]) for sample in group])
    ratio = torch.exp(log_prob - old)
    clipped = ratio.clamp(1 - grpo.clip_range, 1 + grpo.clip_range)
    return torch.maximum(-advantage * ratio, -advantage * clipped)


if __name__ == "__main__":
    typer.run(main)
