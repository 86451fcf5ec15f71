"""The reward daemon: an HTTP server around the reward service. Owns its socket, its end and which rewards it loads; never scores itself.

It loads what its settings and the run's own stored prompt rows name, once, at its start: no request can have it load anything.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from spot_runtime.daemons.ports import listening_socket
from spot_runtime.daemons.process import Ready, run_child
from spot_runtime.daemons.settings import RewardSettings
from spot_runtime.errors import MissingObjectError
from spot_runtime.rewards.catalog import load_judges
from spot_runtime.rewards.desk import ServiceLimits
from spot_runtime.rewards.prompts import parse_row
from spot_runtime.rewards.service import create_app
from spot_runtime.store.tensors import TensorStore
from spot_runtime.variables import given_reward_token

_GRACE_PERIOD_S = 5
_STARTED_POLL_S = 0.01


class Server(uvicorn.Server):
    """Leaves signals to `run_child`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(settings: RewardSettings, ready: Ready) -> int:
    with listening_socket(settings.host, settings.port) as listener:
        judges, limits = load_judges(named_rewards(settings)), ServiceLimits(threads=settings.threads)
        app = create_app(judges, limits, token=given_reward_token())
        config = uvicorn.Config(
            app, log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_PERIOD_S, lifespan="on"
        )
        asyncio.run(_serve(Server(config), listener, ready))
    return 0


def named_rewards(settings: RewardSettings) -> tuple[str, ...]:
    """Rewards of the settings and of the run's rows, if there are any yet; sorted. Raises StoreError."""
    named = set(settings.rewards)
    for key in filter(None, settings.prompts_keys if settings.store else ()):
        try:
            rows = TensorStore(settings.store).get_bytes(key)
        except MissingObjectError:
            continue
        named |= {parse_row(line).reward for line in rows.splitlines() if line.strip()}
    return tuple(sorted(named - {""}))


async def _serve(server: Server, listener: socket.socket, ready: Ready) -> None:
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(_STARTED_POLL_S)
    if not serving.done():
        host, port = listener.getsockname()[:2]
        ready.send(f"http://{host}:{port}")
        ready.on_stop(lambda: setattr(server, "should_exit", True))
    await serving


if __name__ == "__main__":
    run_child(RewardSettings, main)
