"""One rank of a training step, as a process: reads samples, trains, rank 0 writes the outcome. Run by test_trainer_ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from spot_runtime.config import GrpoConfig, SamplingConfig
from spot_runtime.diffusion.batch import TrainingSample
from spot_runtime.diffusion.ranks import GroupRanks
from spot_runtime.diffusion.state import TrainerState
from spot_runtime.diffusion.trainer import GrpoTrainer

ARRAYS = ("embeds", "window_latents", "log_probs")


def write_samples(folder: Path, samples: Sequence[TrainingSample]) -> None:
    arrays = {f"{name}-{i}": getattr(s, name) for i, s in enumerate(samples) for name in ARRAYS}
    np.savez(folder / "samples.npz", **arrays)
    fields = [{k: v for k, v in vars(sample).items() if k not in ARRAYS} for sample in samples]
    (folder / "samples.json").write_text(json.dumps(fields))


def read_samples(folder: Path) -> list[TrainingSample]:
    fields = json.loads((folder / "samples.json").read_text())
    with np.load(folder / "samples.npz") as arrays:
        return [
            TrainingSample(
                **{**given, "sde_window": tuple(given["sde_window"])},
                **{name: arrays[f"{name}-{i}"] for name in ARRAYS},
            )
            for i, given in enumerate(fields)
        ]


def main(folder: Path, rank: int, size: int) -> None:
    deadline = timedelta(seconds=600)
    store = dist.FileStore(str(folder / f"rendezvous-{size}"), size)
    store.set_timeout(deadline)  # else five minutes, which the import of one rank may take longer than that of another
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=deadline)
    samples = read_samples(folder)
    trainer = GrpoTrainer("tiny", ranks=GroupRanks(torch.device("cpu")))
    for name, given in json.loads((folder / "cases.json").read_text()).items():
        grpo, sampling = GrpoConfig.parse(given["grpo"]), SamplingConfig.parse(given["sampling"])
        state = None
        for training_step in range(given["training_steps"]):
            outcome = trainer.train(
                state,
                samples,
                sampling=sampling,
                grpo=grpo,
                seed=1,
                policy_version=training_step,
                on_progress=lambda *_: None,
                should_stop=lambda: False,
            )
            state = TrainerState.from_tensors(outcome.state.tensors())
        if rank == 0:
            np.savez(folder / f"{name}-{size}.npz", **outcome.state.tensors())
            (folder / f"{name}-{size}.json").write_text(json.dumps(outcome.metrics))
    dist.barrier()  # nobody leaves while another still needs the connection
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
