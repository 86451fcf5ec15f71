"""What a real S3 server and the network in front of it can do to the store."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import numpy as np
import pytest
from faulty_proxy import Fault, FaultyProxy

from benchmarks.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from spot_runtime.errors import CorruptObjectError, MissingObjectError, StoreError
from spot_runtime.store import s3
from spot_runtime.store.seal import Kind, SealedBody
from spot_runtime.store.tensors import TensorStore

BUCKET = "faults"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    server.start()
    try:
        server.make_bucket(BUCKET)
        yield server
    finally:
        server.kill()


@pytest.fixture(autouse=True)
def credentials(server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint_url)


@pytest.fixture
def proxy(server: SeaweedServer) -> Iterator[FaultyProxy]:
    proxy = FaultyProxy(server.port)
    yield proxy
    proxy.close()


def behind(proxy: FaultyProxy, prefix: str, deadline_s: float = 20.0) -> TensorStore:
    return TensorStore(
        f"s3://{BUCKET}/{prefix}?endpoint_url={proxy.endpoint_url}", deadline_s=deadline_s, part_bytes=65536
    )


def first(count: int, fault: Fault) -> Callable[[str, str], Fault]:
    """`fault` for the first `count` requests, then none."""
    left = [fault] * count
    return lambda method, path: left.pop() if left else Fault.NONE


def every(period: int, fault: Fault) -> Callable[[str, str], Fault]:
    """`fault` for one request of each `period`."""
    lock, seen = threading.Lock(), [0]

    def plan(method: str, path: str) -> Fault:
        with lock:
            seen[0] += 1
            return fault if seen[0] % period == 0 else Fault.NONE

    return plan


def latents(seed: int, count: int = 40_000) -> dict[str, np.ndarray]:
    return {"latents": np.random.default_rng(seed).standard_normal(count, dtype=np.float32)}


def test_a_wrong_secret_is_one_clear_line_at_once(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    store = TensorStore(f"s3://{BUCKET}/secret")
    start_s = time.monotonic()
    for act in (
        lambda: store.put("a", latents(0)),
        lambda: store.get("a"),
        lambda: store.list(""),
        lambda: store.exists("a"),
    ):
        with pytest.raises(StoreError) as caught:
            act()
        assert type(caught.value) is StoreError
        assert "access denied" in str(caught.value)
        assert "check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY" in str(caught.value)
        assert "wrong-secret" not in str(caught.value)
        assert "\n" not in str(caught.value)
    assert time.monotonic() - start_s < 10


def test_missing_credentials_are_one_clear_line(monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(StoreError, match="no credentials: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        TensorStore(f"s3://{BUCKET}/none").get("a")


def test_a_missing_bucket_is_named():
    store = TensorStore("s3://no-such-bucket/x")
    for act in (lambda: store.put_bytes("a", b""), lambda: store.get("a"), lambda: store.list("")):
        with pytest.raises(StoreError, match="no bucket 'no-such-bucket'"):
            act()


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.UNAVAILABLE, Fault.LOSE_ANSWER, Fault.CUT, Fault.STALL])
def test_a_fault_or_two_is_outlived_by_every_operation(proxy, fault):
    store = behind(proxy, f"few-{fault}", deadline_s=3.0 if fault is Fault.STALL else 20.0)
    count = 1 if fault is Fault.STALL else 2
    proxy.plan = first(count, fault)
    digest = store.put("a", latents(0))
    proxy.plan = first(count, fault)
    assert store.get("a").digest == digest
    proxy.plan = first(count, fault)
    assert store.list("") == ["a"]
    proxy.plan = first(count, fault)
    store.delete("a")
    assert not store.exists("a")


@pytest.mark.parametrize("count", [100, 40_000], ids=["one blob", "parts"])
def test_a_put_or_delete_whose_answers_are_lost_is_acknowledged_once_it_is_seen(proxy, count):
    store = behind(proxy, f"lost-answer-{count}")
    left = {"PUT": 2, "DELETE": 2}

    def plan(method: str, path: str) -> Fault:
        left[method] = left.get(method, 0) - 1
        return Fault.LOSE_ANSWER if left[method] >= 0 else Fault.NONE

    proxy.plan = plan
    digest = store.put("a", latents(0, count))
    assert left["PUT"] < 0
    assert store.get("a").digest == digest
    store.delete("a")
    assert left["DELETE"] < 0
    assert list(store._blobs.list("")) == []


def test_parts_of_a_put_whose_marker_is_refused_for_good_stay_for_the_collector(monkeypatch):
    """Its answer may be what was lost."""
    store = TensorStore(f"s3://{BUCKET}/refused-marker", part_bytes=65536)
    create = store._blobs.create

    def refused(name, body):
        if name == "policy.obj":
            raise StoreError("put policy.obj: 503")
        return create(name, body)

    monkeypatch.setattr(store._blobs, "create", refused)
    with pytest.raises(StoreError, match=r"put policy\.obj"):
        store.put("policy", latents(0))
    assert len(list(store._blobs.list(".parts/policy/"))) == 3


def test_a_large_put_whose_marker_answer_is_lost_keeps_its_parts(proxy):
    store = behind(proxy, "lost-marker")
    left = [Fault.LOSE_ANSWER]
    proxy.plan = lambda method, path: (
        left.pop() if left and method == "PUT" and path.endswith("policy.obj") else Fault.NONE
    )
    digest = store.put("policy", latents(0))
    assert not left
    assert store.get("policy").digest == digest


def test_a_bit_that_flips_on_the_way_is_not_blamed_on_the_object(proxy):
    store = behind(proxy, "flip")
    digest = store.put("a", latents(0, 100))
    proxy.plan = first(1, Fault.FLIP)
    assert store.get("a").digest == digest
    proxy.plan = lambda method, path: Fault.FLIP if method == "GET" else Fault.NONE
    with pytest.raises(CorruptObjectError):
        store.get("a")


@pytest.mark.parametrize("fault", [Fault.RESET, Fault.UNAVAILABLE, Fault.LOSE_ANSWER, Fault.CUT])
def test_with_one_request_in_three_failing_racing_writers_still_have_one_winner(proxy, fault):
    store = behind(proxy, f"third-{fault}")
    proxy.plan = every(3, fault)
    for key in ("small", "parted"):
        count = 1000 if key == "small" else 40_000
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(lambda seed, key=key, count=count: store.put(key, latents(seed, count)), range(4)))
        assert len(set(digests)) == 1
        assert store.get(key).digest == digests[0]


def test_what_is_gone_before_it_is_replaced_was_not_replaced(monkeypatch):
    """Some servers answer 404 to If-Match of a name that is not there."""
    store = TensorStore(f"s3://{BUCKET}/replaced")
    body = SealedBody("a", Kind.BYTES, [memoryview(b"x")])
    assert store._blobs.replace("a.obj", body, '"etag"') is False

    def gone(verb, name, start, deadline_s=None):
        raise MissingObjectError(f"{verb} {name}: no such object")

    monkeypatch.setattr(store._blobs, "_request", gone)
    assert store._blobs.replace("a.obj", body, '"etag"') is False
    with pytest.raises(MissingObjectError):
        store._blobs.create("a.obj", body)


def test_what_is_put_names_its_sha256_so_that_the_server_refuses_what_changed_on_the_way(monkeypatch):
    store = TensorStore(f"s3://{BUCKET}/checksum", part_bytes=65536)
    put, sums = store._blobs._client.put_object, {}

    def noted(**params):
        sums[params["Key"]] = (params["ChecksumSHA256"], base64.b64encode(sha256(params["Body"]).digest()).decode())
        return put(**params)

    monkeypatch.setattr(store._blobs._client, "put_object", noted)
    store.put("a", latents(0))
    assert len(sums) == 4
    assert all(named == own for named, own in sums.values())


def test_a_slow_server_is_waited_for(proxy):
    store = behind(proxy, "slow")
    digest = store.put("a", latents(0))
    proxy.plan = lambda method, path: Fault.SLOW
    assert store.get("a").digest == digest


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.UNAVAILABLE, Fault.RESET])
def test_a_server_that_stays_down_ends_at_the_deadline_with_a_reason(proxy, fault):
    store = behind(proxy, f"down-{fault}", deadline_s=0.8)
    proxy.plan = lambda method, path: fault
    for act in (lambda: store.put("a", latents(0, 100)), lambda: store.get("a"), lambda: store.list("")):
        start_s = time.monotonic()
        with pytest.raises(StoreError, match=r"attempts in .* s failed, the last with: ") as caught:
            act()
        assert not isinstance(caught.value, CorruptObjectError | MissingObjectError)
        assert time.monotonic() - start_s < 2.3


def reading(fault: Fault, suffix: str = "a.obj") -> Callable[[str, str], Fault]:
    return lambda method, path: fault if method == "GET" and path.endswith(suffix) else Fault.NONE


@pytest.mark.parametrize("fault", [Fault.STALL, Fault.BROKEN])
def test_an_object_whose_content_the_server_has_lost_is_torn_and_can_be_redone(proxy, monkeypatch, fault):
    monkeypatch.setattr(s3, "_READ_SHARE", 0.04)
    store = behind(proxy, f"lost-content-{fault}")
    first_digest = store.put("a", latents(0, 100))
    proxy.plan = reading(fault)
    with pytest.raises(CorruptObjectError, match="a: no intact seal"):
        store.get("a")
    second_digest = store.put("a", latents(1, 100))
    proxy.plan = lambda method, path: Fault.NONE
    assert second_digest != first_digest
    assert store.get("a").digest == second_digest
    assert list(store._blobs.list(".tmp/")) == []


@pytest.mark.parametrize(
    ("fault", "suffix"),
    [(fault, "a.obj") for fault in (Fault.UNAVAILABLE, Fault.RESET, Fault.CUT, Fault.HANG)] + [(Fault.STALL, "")],
)
def test_an_object_that_cannot_be_read_in_time_is_not_torn_and_never_replaced(proxy, monkeypatch, fault, suffix):
    monkeypatch.setattr(s3, "_READ_SHARE", 0.04)
    store = behind(proxy, f"slow-{fault}")
    first_digest = store.put("a", latents(0, 100))
    proxy.plan = reading(fault, suffix)
    for act in (lambda: store.get("a"), lambda: store.put("a", latents(1, 100))):
        with pytest.raises(StoreError, match=r"get a\.obj .* failed, the last with: ") as caught:
            act()
        assert not isinstance(caught.value, CorruptObjectError)
    proxy.plan = lambda method, path: Fault.NONE
    assert store.get("a").digest == first_digest


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.STALL, Fault.BROKEN])
def test_parts_are_nobodys_only_where_their_marker_is_gone(proxy, monkeypatch, fault):
    """A marker that is badly read, or not at all, may be intact."""
    monkeypatch.setattr(s3, "_READ_SHARE", 0.04)
    store = behind(proxy, f"collect-{fault}")
    monkeypatch.setattr(store._blobs, "now_s", lambda: time.time() + 1000)
    digest = store.put("a", latents(0))
    proxy.plan = reading(fault)
    assert store.collect("", 0.0, lambda _: True).orphans == 0
    proxy.plan = lambda method, path: Fault.NONE
    assert store.get("a").digest == digest
    store._blobs.delete("a.obj")
    assert store.collect("", 0.0, lambda _: True).orphans == 3


def until(happened: Callable[[], bool]) -> None:
    limit_s = time.monotonic() + 60
    while not happened() and time.monotonic() < limit_s:
        time.sleep(0.02)


def test_kill_9_of_the_server_in_mid_write_breaks_nothing(server):
    store = TensorStore(f"s3://{BUCKET}/killed", deadline_s=30.0, part_bytes=65536)
    acknowledged: dict[str, str] = {}
    stop = threading.Event()

    def write(writer: int) -> None:
        index = 0
        while not stop.is_set():
            key = f"w{writer}/{index}"
            acknowledged[key] = store.put(key, latents(index, 100 if index % 3 else 60_000))
            index += 1

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, writer) for writer in range(4)]
        until(lambda: len(acknowledged) >= 8)
        server.kill()
        before = len(acknowledged)
        time.sleep(0.3)
        server.start()
        until(lambda: len(acknowledged) >= before + 8)
        stop.set()
        for writer in writers:
            writer.result(60)  # every put was retried until the server was back: none raised
    assert 8 <= before < len(acknowledged)
    redone = 0
    for key, digest in acknowledged.items():
        index = int(key.split("/")[1])
        try:
            assert store.get(key).digest == digest
        except (MissingObjectError, CorruptObjectError):  # acknowledged and gone: it is redone
            redone += 1
            assert store.put(key, latents(index, 100 if index % 3 else 60_000)) == digest
            assert store.get(key).digest == digest
    assert redone <= len(acknowledged) / 2
    assert set(store.list("")) == set(acknowledged)
