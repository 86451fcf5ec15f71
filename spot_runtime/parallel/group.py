"""A sequence-parallel process group of one generation. Owns rendezvous, collectives, their deadlines and the end of the group.

It never touches a process-wide default group, never decides who is in it, never restarts itself: whoever gets a GroupError closes the group
and waits for another generation. How a worker uses it:

    group = SequenceGroup.join(generation, device)       # every rank, at about the same time; raises GroupError after timeout_s
    engine.set_group(group)                               # denoising goes on at the new degree
    ...
    engine.set_group(None)                                # degree 1 needs no group
    group.close()                                         # also right after a GroupError; the weights stay as they are

A rank that is killed frees the others within a second. One that is stopped frees them only at the timeout, or as soon as it is killed: no
call from outside ends a gloo collective, so the timeout should be short and whoever watches the ranks should kill the silent one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor, distributed

from spot_runtime.errors import GroupError
from spot_runtime.types import Generation

LOOPBACK: Final = "127.0.0.1"
"""The ranks of a group share one machine."""
BROADCAST_BYTES: Final = 64 * 1024 * 1024
"""Small tensors are broadcast together up to this size, larger ones alone."""

c10d: Final[Any] = distributed
"""torch leaves half of it untyped."""
POLL_S: Final = 20e-6
"""Between two looks at whether a GPU is done; its denoising steps take tens of milliseconds."""


class SequenceGroup:
    """The ranks of one generation: gloo for CPU tensors, NCCL for those of a GPU.

    Every rank makes the same calls in the same order. Each is bounded by the generation's timeout; what fails raises GroupError, and so
    does every call after it.
    """

    def __init__(self, generation: Generation, device: torch.device, backend: Any) -> None:
        """Of a backend that is already connected; `join` connects one."""
        self.generation = generation
        self.device = device
        self._backend = backend
        self._fault = ""

    @classmethod
    def join(cls, generation: Generation, device: torch.device) -> SequenceGroup:
        """Meets the other ranks of `generation`. Raises GroupError where they do not come within its timeout."""
        _check(generation)
        connect = _connect_nccl if device.type == "cuda" else _connect_gloo
        try:
            group = cls(generation, device, connect(generation, _store(generation)))
            group.gather_numbers([0])  # a backend may connect with its first call only
        except (RuntimeError, OSError) as error:
            raise GroupError(f"{generation}: no group within {generation.timeout_s} s: {error}") from error
        return group

    @property
    def rank(self) -> int:
        return self.generation.rank

    @property
    def degree(self) -> int:
        return self.generation.degree

    @property
    def is_usable(self) -> bool:
        """Neither closed nor failed."""
        return not self._fault

    def all_to_all(self, parts: Tensor) -> Tensor:
        """parts [degree, ...]: part i goes to rank i. Returns [degree, ...], the part that each rank had for this one."""
        assert len(parts) == self.degree, f"{len(parts)} parts for {self.degree} ranks"
        sent = parts.contiguous()
        received = torch.empty_like(sent)
        with self._collective("all_to_all"):
            self._wait(self._backend.alltoall_base(received, sent, [], []))
        return received

    def all_gather(self, part: Tensor) -> Tensor:
        """[degree, ...]: what each rank gave, of the same shape and dtype everywhere."""
        sent = part.contiguous()[None]
        received = sent.new_empty((self.degree, *part.shape))
        with self._collective("all_gather"):
            self._wait(self._backend._allgather_base(received, sent))
        return received

    def broadcast(self, tensors: Iterable[Tensor], source: int) -> None:
        """Overwrites `tensors` with those of rank `source`; shapes and dtypes agree on all ranks."""
        for bucket in _buckets(tensors):
            flat = _flat(bucket)
            with self._collective("broadcast"):
                self._wait(self._backend.broadcast(flat, source))
            if self.rank != source:
                _scatter(flat, bucket)

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """What each rank gave; all give as many."""
        gathered = self.all_gather(torch.tensor(numbers, dtype=torch.int64, device=self.device))
        self.synchronize()
        rows: list[list[int]] = gathered.tolist()
        return rows

    def agree(self, what: str, number: int) -> None:
        """Raises GroupError unless each rank has the same `number` (63 bits), which stands for `what` it is about to do."""
        numbers = [of_rank[0] for of_rank in self.gather_numbers([number])]
        if len(set(numbers)) > 1:
            odd = next(rank for rank, other in enumerate(numbers) if other != numbers[0])
            raise self._broken(what, f"rank {odd} differs from rank 0")

    def synchronize(self) -> None:
        """Waits until every collective so far is done. On a GPU a dead rank shows here: read no result before."""
        if self.device.type == "cuda":
            with self._collective("synchronize"):
                _await_device(self.device, self.generation.timeout_s)

    def close(self) -> None:
        """Ends it, at the latest after the generation's timeout; once is enough. What is open with other ranks is given up."""
        backend, self._backend = self._backend, None
        self._fault = self._fault or "closed"
        if backend is None:
            return
        if self.device.type == "cuda":
            ending = threading.Thread(target=backend.abort, name="group-close", daemon=True)
            ending.start()
            ending.join(self.generation.timeout_s)
            if ending.is_alive():
                raise GroupError(f"{self.generation}: not closed within {self.generation.timeout_s} s")

    def _wait(self, work: Any) -> None:
        if self.device.type == "cuda":
            work.wait()  # orders streams; `synchronize` waits for the device
        else:
            work.wait(timedelta(seconds=self.generation.timeout_s))

    @contextmanager
    def _collective(self, name: str) -> Iterator[None]:
        if self._fault:
            raise GroupError(f"{self.generation}: {name} on a group that is {self._fault}")
        try:
            yield
        except RuntimeError as error:
            raise self._broken(name, str(error)) from error

    def _broken(self, name: str, reason: str) -> GroupError:
        self._fault = f"broken by {name}"
        return GroupError(f"{self.generation}: {name} failed: {reason}")


def _check(generation: Generation) -> None:
    if not 0 <= generation.rank < generation.degree:
        raise GroupError(f"{generation}: rank must lie in 0..{generation.degree - 1}")
    if generation.timeout_s <= 0:
        raise GroupError(f"{generation}: timeout_s = {generation.timeout_s}: must be > 0")


def _store(generation: Generation) -> Any:
    """Where the ranks leave their addresses. A file needs no port, and no rank whose death would take the others' store along."""
    store = c10d.FileStore(generation.rendezvous, generation.degree)
    store.set_timeout(timedelta(seconds=generation.timeout_s))
    if store.add(f"joined/{generation.rank}", 1) != 1:
        raise GroupError(
            f"{generation}: {generation.rendezvous} was used before, every generation needs a file of its own"
        )
    return store


def _connect_gloo(generation: Generation, store: Any) -> Any:
    options = c10d.ProcessGroupGloo._Options()
    options._devices = [c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK, lazy_init=False)]
    options._timeout = timedelta(seconds=generation.timeout_s)
    return c10d.ProcessGroupGloo(store, generation.rank, generation.degree, options)


def _connect_nccl(generation: Generation, store: Any) -> Any:
    """Without NCCL's own watchdogs: they end the process, and with it the weights; `synchronize` and `close` do their work."""
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
    os.environ.setdefault("TORCH_NCCL_ENABLE_MONITORING", "0")
    options = c10d.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=generation.timeout_s)
    return c10d.ProcessGroupNCCL(store, generation.rank, generation.degree, options)


def _buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + tensor.nbytes > BROADCAST_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def _flat(bucket: Sequence[Tensor]) -> Tensor:
    """The bytes of all; a view where there is only one tensor, and that contiguous."""
    parts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in bucket]
    return torch.cat(parts) if len(parts) > 1 else parts[0]


@torch.no_grad()
def _scatter(flat: Tensor, bucket: Sequence[Tensor]) -> None:
    sizes = [tensor.nbytes for tensor in bucket]
    for tensor, part in zip(bucket, torch.split(flat, sizes), strict=True):
        if part.data_ptr() != tensor.data_ptr():
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a clone is aligned for any dtype


def _await_device(device: torch.device, timeout_s: float) -> None:
    """A kernel of NCCL whose peer is dead spins for ever: the host must not wait in a call that has no deadline."""
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    deadline_s = time.monotonic() + timeout_s
    while not event.query():
        if time.monotonic() > deadline_s:
            raise RuntimeError(f"the device is not done within {timeout_s} s")
        time.sleep(POLL_S)
