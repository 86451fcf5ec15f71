"""The trainer's other ranks: processes beside the trainer that hold a share of the model. Owns their start, meeting and end.

The trainer is rank 0 and the only one that control knows. It starts the others, announces each training job to them in the store of
their rendezvous, and trains together with them; every rank reads the job's data by itself. A rank that dies, or that the others wait for
too long, breaks the process group for good: the trainer then ends, its ranks with it, and its node starts it anew.

torch.distributed's default process group is used here, because FSDP2 shards over a mesh of it (docs/decisions/012).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from spot_runtime.daemons.ports import HOST, free_port
from spot_runtime.daemons.process import Child, Ready, run_child, spawn
from spot_runtime.daemons.settings import TrainerRankSettings, TrainerSettings
from spot_runtime.daemons.training_data import TrainingData, read_training_data
from spot_runtime.diffusion.geometry import loading
from spot_runtime.diffusion.ranks import Alone, GroupRanks, Ranks
from spot_runtime.diffusion.trainer import GrpoTrainer
from spot_runtime.errors import ClusterError, SpotlightError, TrainingError, UnseededError
from spot_runtime.messages import JobSpec
from spot_runtime.store.tensors import TensorStore

ORDER_POLL_S = 1.0
END_GRACE_S = 5.0
T = TypeVar("T")

_log = logging.getLogger(__name__)


# ---- rank 0's side ----------------------------------------------------------------------------------------------------------------


class OtherRanks:
    """Ranks 1 to `ranks - 1` of a trainer; none where it trains alone."""

    def __init__(self, settings: TrainerSettings) -> None:
        self._settings = settings
        self._children: list[Child] = []
        self._orders = 0
        self._rendezvous: TCPStore | None = None

    def __enter__(self) -> Self:
        if self._settings.ranks > 1:
            self._start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._children:
            child.ask_to_end()
        for child in self._children:
            child.terminate(END_GRACE_S)

    def _start(self) -> None:
        settings = self._settings
        port = free_port()
        self._rendezvous = rendezvous(port, 0, settings.ranks, settings.ranks_deadline_s)
        for rank in range(1, settings.ranks):
            config = TrainerRankSettings(
                trainer_id=f"{settings.trainer_id}-{rank}",
                rank=rank,
                size=settings.ranks,
                rendezvous_port=port,
                store=settings.store,
                model=settings.model,
                threads=settings.threads,
                device=self.device(settings.device, rank),
                sleeps=settings.sleeps,
                deadline_s=settings.ranks_deadline_s,
            )
            log_path = Path(settings.folder) / "logs" / f"{config.trainer_id}.log"
            module = "spot_runtime.daemons.trainer_rank"
            self._children.append(spawn(module, config, log_path=log_path, threads=settings.threads))

    @staticmethod
    def device(name: str, rank: int) -> str:
        """Each rank its own GPU."""
        return f"cuda:{rank}" if name == "cuda" else name

    def join(self, device: str) -> Ranks:
        """Waits until all ranks are there. Raises ClusterError where one is not within the deadline."""
        if self._rendezvous is None:
            return Alone()
        return join_group(self._rendezvous, 0, self._settings.ranks, device, self._settings.ranks_deadline_s)

    def announce(self, job: JobSpec) -> None:
        """Has the others train this job too."""
        if self._rendezvous is not None:
            self._rendezvous.set(_order_key(self._orders), msgspec.json.encode(job).decode())
            self._orders += 1

    def check(self) -> None:
        """Raises ClusterError where one has ended: nothing can be trained without it."""
        for child in self._children:
            if (code := child.poll()) is not None:
                raise ClusterError(f"{child.module} ended with {code}: {child.last_lines()}")


def rendezvous(port: int, rank: int, size: int, deadline_s: float) -> TCPStore:
    """The store where ranks meet and orders are announced; rank 0 serves it."""
    timeout = timedelta(seconds=deadline_s)
    return TCPStore(HOST, port, size, is_master=rank == 0, timeout=timeout, wait_for_workers=False)


def join_group(store: Store, rank: int, size: int, device: str, deadline_s: float) -> Ranks:
    """Makes the default process group. Raises ClusterError where not all ranks come within the deadline."""
    backend = "nccl" if device.startswith("cuda") else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(device)
    try:
        timeout = timedelta(seconds=deadline_s)
        dist.init_process_group(backend, store=PrefixStore("group", store), rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise ClusterError(f"trainer rank {rank} of {size}: not all ranks came within {deadline_s:g} s") from error
    return GroupRanks(torch.device(device))


def agreed(ranks: Ranks, read: Callable[[], T]) -> T:
    """What `read` returns, if no rank's raised. Raises its own error, or TrainingError for another rank's.

    Any error is told first, also one that ends this process: the others would wait for it.
    """
    result: T | None = None
    failure: Exception | None = None
    try:
        result = read()
    except Exception as error:  # noqa: BLE001 - raised below
        failure = error
    failures = ranks.max(float(failure is not None))
    if failure is not None:
        raise failure
    if failures:
        raise TrainingError("another rank of the trainer could not read the training data")
    assert result is not None
    return result


# ---- the others' side -------------------------------------------------------------------------------------------------------------


def main(settings: TrainerRankSettings, ready: Ready) -> int:
    meeting = rendezvous(settings.rendezvous_port, settings.rank, settings.size, settings.deadline_s)
    ranks = join_group(meeting, settings.rank, settings.size, settings.device, settings.deadline_s)
    with loading(settings.model):
        model = GrpoTrainer(settings.model, device=settings.device, threads=settings.threads, ranks=ranks)
    store = TensorStore(settings.store)
    ready.send()
    order = 0
    while not ready.stopping:
        job = _next_order(meeting, order)
        if job is not None:
            order += 1
            _train(model, store, job)
            if settings.sleeps:
                model.sleep()
    return 0


def _next_order(meeting: Store, order: int) -> JobSpec | None:
    """The job announced under this number; None where there is none yet."""
    if not meeting.check([_order_key(order)]):
        time.sleep(ORDER_POLL_S / 20)
        return None
    return msgspec.json.decode(meeting.get(_order_key(order)), type=JobSpec)


def _train(model: GrpoTrainer, store: TensorStore, job: JobSpec) -> None:
    """Beside rank 0, whose outcome is the same. An error of the tree is one of all ranks; damaged weights and any other end this one."""
    try:
        data: TrainingData = agreed(model.ranks, lambda: read_training_data(store, job))
        model.train(
            data.state,
            data.samples,
            sampling=data.settings.config.sampling,
            grpo=data.settings.config.grpo,
            seed=data.settings.seed,
            policy_version=job.policy.version,
            on_progress=lambda *_: None,
            should_stop=lambda: False,
        )
    except UnseededError:
        raise
    except SpotlightError as error:
        _log.info("not trained", extra={"job_id": job.job_id, "error": str(error)})


def _order_key(number: int) -> str:
    return f"order/{number}"


if __name__ == "__main__":
    run_child(TrainerRankSettings, main)
