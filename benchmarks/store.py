"""The tensor store beside plain reads and writes of the same bytes, on files and on a real S3 server on this machine.

    python -m benchmarks.store --json FILE

`put` and `get` are the p50 of one caller in ms. The peer neither hashes nor verifies nor lets one writer win: fsspec's `pipe_file` and
`cat_file`, on the local file system and by s3fs on S3. The two take turns. `store_share_of_copy` is the throughput of
eight callers that put 16 MB objects, as a share of the same eight with the peer.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np
import typer
from fsspec.implementations.local import LocalFileSystem

from benchmarks.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from spot_runtime.store.tensors import TensorStore

BUCKET = "bench"
SIZES = {"4 KB": (4096, 100), "1.6 MB": (1_600_000, 40), "64 MB": (64_000_000, 5)}
"""Bytes and repetitions: a seed row, the latents of 1280², a policy."""
SHARED_BYTES = 16_000_000
CALLERS = 8
ROUNDS = 5


class Copies(Protocol):
    """The peer: the same bytes, no promises."""

    def put(self, key: str, array: np.ndarray) -> None: ...

    def get(self, key: str) -> object: ...


class FileCopies:
    """pipe_file and cat_file of fsspec's local file system."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self._fs: Any = LocalFileSystem()

    def put(self, key: str, array: np.ndarray) -> None:
        self._fs.pipe_file(str(self._folder / key), array.data)

    def get(self, key: str) -> object:
        return self._fs.cat_file(str(self._folder / key))


class S3Copies:
    """pipe_file and cat_file of s3fs."""

    def __init__(self, endpoint_url: str) -> None:
        import s3fs

        self._fs: Any = s3fs.S3FileSystem(endpoint_url=endpoint_url, use_listings_cache=False)

    def put(self, key: str, array: np.ndarray) -> None:
        self._fs.pipe_file(f"{BUCKET}/peer/{key}", array.tobytes())

    def get(self, key: str) -> object:
        return self._fs.cat_file(f"{BUCKET}/peer/{key}")


def p50_ms(store: TensorStore, peer: Copies, size_bytes: int, repeats: int) -> dict[str, float]:
    """Median ms of put and get, ours and the peer's, in turns."""
    array = np.random.default_rng(0).integers(0, 256, size_bytes, np.uint8)
    acts: dict[str, Callable[[str], object]] = {
        "put_ms": lambda key: store.put(f"single/{key}", {"x": array}),
        "peer_put_ms": lambda key: peer.put(key, array),
        "get_ms": lambda key: store.get(f"single/{key}"),
        "peer_get_ms": lambda key: peer.get(key),
    }
    spent_s: dict[str, list[float]] = {name: [] for name in acts}
    for index in range(repeats + 1):  # the first warms up
        for name, act in acts.items():
            start_s = time.perf_counter()
            act(f"{size_bytes}-{index}")
            spent_s[name].append(time.perf_counter() - start_s)
    return {name: round(statistics.median(times[1:]) * 1e3, 3) for name, times in spent_s.items()}


def share_of_copy(store: TensorStore, peer: Copies) -> float:
    """Throughput of eight callers with the store as a share of the peer's; the median of rounds in which the two take turns at going first.

    All that was written stays until the end, so the disk has its part in it. The first round warms up.
    """
    array = np.random.default_rng(1).integers(0, 256, SHARED_BYTES, np.uint8)
    puts: dict[str, Callable[[str], object]] = {
        "ours": lambda key: store.put(key, {"x": array}),
        "peer": lambda key: peer.put(key, array),
    }
    shares = []
    with ThreadPoolExecutor(CALLERS) as pool:
        for turn in range(ROUNDS + 1):
            keys = [f"shared-{turn}-{index}" for index in range(2 * CALLERS)]
            spent_s = {}
            for name in ("ours", "peer") if turn % 2 else ("peer", "ours"):
                spent_s[name] = elapsed_s(lambda name=name, keys=keys: list(pool.map(puts[name], keys)))  # type: ignore[misc]
            shares.append(spent_s["peer"] / spent_s["ours"])
    return round(statistics.median(shares[1:]), 3)


def elapsed_s(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


def measure(name: str, store: TensorStore, peer: Copies) -> dict[str, Any]:
    figures: dict[str, Any] = {size: p50_ms(store, peer, *SIZES[size]) for size in SIZES}
    figures["store_share_of_copy"] = share_of_copy(store, peer)
    typer.echo(f"{name}: {json.dumps(figures)}")
    return figures


def main(json_path: Annotated[Path, typer.Option("--json", help="Where the figures go.")]) -> None:
    """Writes p50 latencies and the share of a plain copy's throughput, for files and S3."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = {"file": measure("file", TensorStore(f"file://{folder}/store"), FileCopies(folder / "peer"))}
        server = SeaweedServer(folder / "server")
        server.start()
        try:
            server.make_bucket(BUCKET)
            os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY)
            url = f"s3://{BUCKET}/store?endpoint_url={server.endpoint_url}"
            figures["s3"] = measure("s3", TensorStore(url), S3Copies(server.endpoint_url))
        finally:
            server.kill()
    json_path.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
