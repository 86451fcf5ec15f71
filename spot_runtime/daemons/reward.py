"""The reward daemon: an HTTP server around the reward service. Owns its socket and its end; never scores anything itself."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from spot_runtime.daemons.ports import listening_socket
from spot_runtime.daemons.process import Ready, run_child
from spot_runtime.daemons.settings import RewardSettings
from spot_runtime.rewards.service import create_app

_GRACE_PERIOD_S = 5
_STARTED_POLL_S = 0.01


class Server(uvicorn.Server):
    """Leaves signals to `run_child`."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def main(settings: RewardSettings, ready: Ready) -> int:
    with listening_socket(settings.host, settings.port) as listener:
        config = uvicorn.Config(
            create_app(), log_config=None, access_log=False, timeout_graceful_shutdown=_GRACE_PERIOD_S, lifespan="on"
        )
        asyncio.run(_serve(Server(config), listener, ready))
    return 0


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
