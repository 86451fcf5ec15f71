"""One machine under a microscope: the node daemon's shell in this process, real workers, and a control and rewards that only nod.

For the elastic benchmark and the fault tests: every event that the node's core handles, and every command it gives, is seen with its time,
so that a test can strike at a moment and a benchmark can measure from one to another.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np

from spot_runtime.config import ClusterConfig
from spot_runtime.daemons.loop import EventLoop
from spot_runtime.daemons.node import Node
from spot_runtime.daemons.process import Ready
from spot_runtime.daemons.settings import NodeSettings
from spot_runtime.diffusion.geometry import check_model, model_folder, read_json
from spot_runtime.messages import (
    Assignment,
    AssignWork,
    Codec,
    DropRequests,
    FromNode,
    GenerationRequest,
    NodeHello,
    RequestFailed,
    RequestReturned,
    ResumePoint,
    SampleDone,
    SampleScored,
    SamplingParams,
    WelcomeNode,
)
from spot_runtime.node.commands import Command, StoreSample
from spot_runtime.node.core import NodeCore, NodeEvent
from spot_runtime.node.events import SlotsChanged
from spot_runtime.store.tensors import TensorStore
from spot_runtime.transport import Router
from spot_runtime.types import JobId, LeaseId, Op, PolicyRef, Pool, RequestId, RunId, WorkerId

DEADLINE_S = 300.0
TEXT_TOKENS = 20


@dataclass(frozen=True)
class Turn:
    """One event that the core handled at `at_s` (monotonic), and what it commanded."""

    at_s: float
    event: NodeEvent
    commands: tuple[Command, ...]
    degrees: tuple[int, ...]
    """Degrees of the groups that took work afterwards."""


class ElasticNode:
    """A node with `slots` slots that forms groups of `degree`. `turns` is everything its core saw and said, `finals` the final latents
    [L, C] of each request.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str = "tiny",
        slots: int = 2,
        degree: int = 2,
        standbys: int = 1,
        max_batch: int = 4,
        num_steps: int = 12,
        group_timeout_s: float = 3.0,
        cores: tuple[int, ...] | None = None,
        pool: Pool = Pool.SPOT,
        sleep: Literal["auto", "always", "never"] = "auto",
    ) -> None:
        checked = check_model(model)
        self.folder = folder
        self.num_steps, self.resolution = num_steps, checked.default_resolution
        self.store = TensorStore(f"file://{folder}/store")
        self._width = int(read_json(model_folder(model), "transformer/config.json")["joint_attention_dim"])
        self.turns: list[Turn] = []
        self.on_commands: Callable[[Sequence[Command]], None] | None = None
        self.scored: Counter[RequestId] = Counter()
        self.samples: dict[RequestId, str] = {}
        self.finals: dict[RequestId, np.ndarray] = {}
        self.returned: list[RequestReturned] = []
        self.failed: list[RequestFailed] = []
        self._names = 0
        self._leases: Counter[RequestId] = Counter()
        self._requests: dict[RequestId, GenerationRequest] = {}
        self._rewards = _nodding_rewards()
        self.loop = EventLoop(threads=8)
        self._router: Router[FromNode] = Router("tcp://127.0.0.1:0", Codec(FromNode))
        self.loop.attach(self._router, self._from_node)
        cluster = ClusterConfig(
            sequence_parallel_degree=degree,
            standbys=standbys,
            max_batch=max_batch,
            group_timeout_s=group_timeout_s,
            step_deadline_s=60.0,
            heartbeat_s=1.0,
            sleep=sleep,
        )
        settings = NodeSettings(
            node_id="spot-0",
            pool=pool,
            slots=slots,
            control_endpoint=self._router.endpoint,
            store=self.store.url,
            model=model,
            resolution=self.resolution,
            folder=str(folder / "node"),
            window_max=3,
            cores=cores,
            cluster=cluster,
        )
        Path(settings.folder).mkdir(parents=True, exist_ok=True)
        self.node = Node(settings, self.loop, Ready(None))
        self._watch_core()
        self.node.start()

    @property
    def core(self) -> NodeCore:
        return self.node.core

    # ---- driving ----

    def until(self, condition: Callable[[], bool], deadline_s: float = DEADLINE_S) -> None:
        """Runs the node until `condition` holds. AssertionError where that takes longer than `deadline_s`."""
        limit_s = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < limit_s, (
                f"not within {deadline_s} s: groups {self.degrees()}, {self.core.roster.workers}"
            )
            self.loop.run_once(0.05)

    def settle(self, degrees: Sequence[int]) -> None:
        """Runs until the groups have these degrees and all standbys wait."""
        roster = self.core.roster
        self.until(
            lambda: (
                self.degrees() == sorted(degrees)
                and sum(w.state.value == "standby" for w in roster.workers.values()) == roster.standbys
            )
        )

    def degrees(self) -> list[int]:
        return sorted(group.degree for group in self.core.groups.values() if group.takes_work)

    def assign(self, count: int, *, first_seed: int = 0, cache_threshold: float = 0.0) -> list[RequestId]:
        """Gives the node `count` new requests; those with a step cache are explorations."""
        made = [self._request(first_seed + index, cache_threshold) for index in range(count)]
        self._give([(request, None) for request in made])
        return [request.request_id for request in made]

    def assign_again(self, back: RequestReturned) -> None:
        """Gives it a request that it returned, to go on where it was committed."""
        resume = None
        if back.commit_key:
            resume = ResumePoint(denoising_step=back.denoising_step, commit_key=back.commit_key)
        self._give([(self._requests[back.request_id], resume)])

    def finish(self, requests: Sequence[RequestId]) -> None:
        self.until(lambda: all(self.scored[request] for request in requests))

    def latents(self, requests: Sequence[RequestId]) -> np.ndarray:
        """Final latents of finished requests, [requests, L, C]."""
        return np.stack([self.store.get(self.samples[request]).tensors["latents"] for request in requests])

    def log_probs(self, requests: Sequence[RequestId]) -> np.ndarray:
        return np.stack([self.store.get(self.samples[request]).tensors["log_probs"] for request in requests])

    # ---- striking ----

    def change_slots(self, slots: Sequence[int], grace_period_s: float = 5.0) -> None:
        self.node._event(SlotsChanged(tuple(slots), grace_period_s))

    def signal(self, worker_id: WorkerId, number: signal.Signals) -> None:
        os.kill(self.node._children[worker_id].pid, number)

    def rank(self, rank: int) -> WorkerId:
        """The worker with this rank in the only group."""
        (group,) = self.core.groups.values()
        return group.ranks[rank]

    # ---- control ----

    def _request(self, seed: int, cache_threshold: float = 0.0) -> GenerationRequest:
        self._names += 1
        key = f"embeddings/{seed}"
        embeds = np.random.default_rng(seed).standard_normal((TEXT_TOKENS + seed % 3, self._width), dtype=np.float32)
        self.store.put(key, {"embeds": embeds}, {})
        side = self.resolution
        request = GenerationRequest(
            request_id=RequestId(f"r{self._names}"),
            job_id=JobId("job"),
            run_id=RunId("run"),
            op=Op.EXPLORE if cache_threshold else Op.ROLLOUT,
            prompt_id="p",
            prompt="a prompt",
            row_json="{}",
            seed=seed,
            sde_window=(1, 4),
            params=SamplingParams(
                height=side,
                width=side,
                num_steps=self.num_steps,
                noise_level=0.7,
                cache_threshold=cache_threshold,
            ),
            policy=PolicyRef(),
            embedding_key=key,
        )
        self._requests[request.request_id] = request
        return request

    def _give(self, work: Sequence[tuple[GenerationRequest, ResumePoint | None]]) -> None:
        assignments = []
        for request, resume in work:
            self._leases[request.request_id] += 1
            lease = LeaseId(f"{request.request_id}.{self._leases[request.request_id]}")
            assignments.append(Assignment(lease_id=lease, request=request, resume=resume))
        self.node._event(AssignWork(group_id="spot-0-g0", assignments=tuple(assignments)))

    def _from_node(self, received: list[tuple[bytes, FromNode]]) -> None:
        for peer, message in received:
            match message:
                case NodeHello():
                    self._router.send(peer, WelcomeNode(heartbeat_s=1.0, reward_url=self._rewards_url))
                case SampleDone():
                    self.samples[message.request_id] = message.sample_key
                case SampleScored():
                    self.scored[message.request_id] += 1
                    self._router.send(peer, DropRequests(request_ids=(message.request_id,)))
                case RequestReturned():
                    self.returned.append(message)
                case RequestFailed():
                    self.failed.append(message)
                case _:
                    pass

    @property
    def _rewards_url(self) -> str:
        return f"http://127.0.0.1:{self._rewards.server_port}"

    def _watch_core(self) -> None:
        handle = self.core.handle

        def watched(event: NodeEvent, now_s: float) -> list[Command]:
            commands = handle(event, now_s)
            for command in commands:
                if isinstance(command, StoreSample):
                    self.finals[command.request_id] = self.node._arena.latents(command.slot, self.num_steps).copy()
            self.turns.append(Turn(time.monotonic(), event, tuple(commands), tuple(self.degrees())))
            if self.on_commands is not None:
                self.loop.post(partial(self.on_commands, commands))  # once they were carried out
            return commands

        self.core.handle = watched  # type: ignore[method-assign]

    def close(self) -> None:
        for child in self.node._children.values():
            child.kill()
        self.node.close()
        self.loop.close()
        self._router.close()
        self._rewards.shutdown()
        self._rewards.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _nodding_rewards() -> ThreadingHTTPServer:
    """A reward service to which every image is worth 1."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            items = [{"id": item["id"], "reward": 1.0, "correct": True, "reason": ""} for item in asked["items"]]
            body = json.dumps({"items": items}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, name="rewards", daemon=True).start()
    return server
