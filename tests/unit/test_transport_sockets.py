import socket
import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spot_runtime.errors import InputError, PortInUseError
from spot_runtime.messages import (
    VERSION,
    ClusterStatus,
    Codec,
    GetStatus,
    NodeHello,
    PollJob,
    Refused,
    ToClient,
    ToControl,
)
from spot_runtime.transport import Dealer, Router, local_address
from spot_runtime.types import JobId, NodeId, Pool

Receiving = Router[ToControl]
Asking = Dealer[ToClient]

FRAME_BYTES_MAX = 4096


@pytest.fixture
def router() -> Iterator[Receiving]:
    router: Receiving = Router("tcp://127.0.0.1:0", Codec(ToControl), frame_bytes_max=FRAME_BYTES_MAX)
    yield router
    router.close()


@pytest.fixture
def dealer(router: Receiving) -> Iterator[Asking]:
    dealer: Asking = Dealer(router.endpoint, Codec(ToClient), "spot-0")
    yield dealer
    dealer.close()


class Stranger:
    """A peer that sends whatever bytes it likes."""

    def __init__(self, endpoint: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(list(frames))

    def answer(self) -> ToClient:
        assert self.socket.poll(5000)
        return Codec[ToClient](ToClient).decode(self.socket.recv())

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def stranger(router: Receiving) -> Iterator[Stranger]:
    stranger = Stranger(router.endpoint)
    yield stranger
    stranger.close()


def round_trip(router: Receiving, dealer: Asking, seq: int = 1) -> None:
    """A well-behaved peer is served."""
    assert dealer.send(GetStatus(seq=seq))
    received = router.receive(5.0)
    assert received == [(b"spot-0", GetStatus(seq=seq))]
    assert router.send(b"spot-0", ClusterStatus(seq=seq, trainer="ready"))
    assert dealer.receive(5.0) == [ClusterStatus(seq=seq, trainer="ready")]


def receive_refused(router: Receiving, count: int) -> None:
    """Receives until `count` frames were refused; no message may come of it."""
    end_s = time.monotonic() + 10
    while router.refused_frames < count and time.monotonic() < end_s:
        assert router.receive(0.05) == []
    assert router.refused_frames == count


def test_messages_cross_with_the_identity_of_the_sender(router: Receiving, dealer: Asking) -> None:
    round_trip(router, dealer)


def test_one_receive_takes_no_more_than_its_limit(router: Receiving, dealer: Asking) -> None:
    for seq in range(7):
        dealer.send(GetStatus(seq=seq))
    received: list[int] = []
    while len(received) < 7:
        batch = router.receive(5.0, limit=3)
        assert 1 <= len(batch) <= 3
        received += [message.seq for _, message in batch if isinstance(message, GetStatus)]
    assert received == list(range(7))


def test_receive_returns_empty_after_its_timeout(router: Receiving) -> None:
    began_s = time.monotonic()
    assert router.receive(0.1) == []
    assert 0.1 <= time.monotonic() - began_s < 2


def test_sending_to_an_unknown_or_vanished_peer_is_false(router: Receiving, dealer: Asking) -> None:
    assert not router.send(b"nobody", ClusterStatus())
    round_trip(router, dealer)
    dealer.close()
    end_s = time.monotonic() + 5
    while router.send(b"spot-0", ClusterStatus()) and time.monotonic() < end_s:
        router.receive(0.01)
    assert not router.send(b"spot-0", ClusterStatus())


def test_sending_to_a_peer_that_does_not_read_is_false_in_the_end_and_never_blocks() -> None:
    router: Receiving = Router("tcp://127.0.0.1:0", Codec(ToControl), queue_max=4)
    dealer: Asking = Dealer(router.endpoint, Codec(ToClient), "slow", queue_max=4)
    dealer.send(GetStatus(seq=1))
    assert len(router.receive(5.0)) == 1
    large = ClusterStatus(reward_url="x" * 1_000_000)
    began_s = time.monotonic()
    taken = sum(router.send(b"slow", large) for _ in range(200))
    assert 1 <= taken < 200
    assert time.monotonic() - began_s < 10
    dealer.close()
    router.close()


def test_a_dealer_turns_messages_away_when_nobody_has_answered_for_long() -> None:
    dealer: Asking = Dealer("tcp://127.0.0.1:1", Codec(ToClient), "early", queue_max=3)
    assert [dealer.send(GetStatus(seq=seq)) for seq in range(5)] == [True, True, True, False, False]
    dealer.close()


def test_a_dealer_finds_a_router_that_comes_back_on_its_port(router: Receiving, dealer: Asking) -> None:
    round_trip(router, dealer)
    endpoint = router.endpoint
    router.close()
    assert dealer.receive(0.2) == []
    again: Receiving = Router(endpoint, Codec(ToControl))
    assert again.endpoint == endpoint
    end_s = time.monotonic() + 10
    received: list[tuple[bytes, ToControl]] = []
    while not received and time.monotonic() < end_s:
        dealer.send(GetStatus(seq=2))
        received = again.receive(0.2)
    assert received[0] == (b"spot-0", GetStatus(seq=2))
    assert again.send(b"spot-0", ClusterStatus(seq=2))
    assert dealer.receive(5.0) == [ClusterStatus(seq=2)]
    again.close()


def test_a_peer_that_restarted_takes_its_own_place(router: Receiving, dealer: Asking) -> None:
    round_trip(router, dealer)
    successor: Asking = Dealer(router.endpoint, Codec(ToClient), "spot-0")
    successor.send(GetStatus(seq=2))
    assert router.receive(5.0) == [(b"spot-0", GetStatus(seq=2))]
    assert router.send(b"spot-0", ClusterStatus(seq=2))
    assert successor.receive(5.0) == [ClusterStatus(seq=2)]
    successor.close()


# ---- addresses


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:5555", "tcp://10.0.0.1:0", "tcp://[::]:0", "tcp://example.com:80"]
)
def test_an_address_that_others_can_reach_is_refused(bind: str) -> None:
    with pytest.raises(InputError, match="must be a loopback or ipc address: peers elsewhere are not authenticated"):
        Router(bind, Codec(ToControl))


@pytest.mark.parametrize(
    "bind",
    ["", "127.0.0.1:0", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "ipc://", "ipc:///tmp/file", "udp://127.0.0.1:1"],
)
def test_a_malformed_address_is_refused(bind: str) -> None:
    with pytest.raises(InputError, match="must look like tcp://HOST:PORT or ipc://@NAME"):
        Router(bind, Codec(ToControl))


def test_a_port_out_of_range_is_refused() -> None:
    with pytest.raises(InputError, match="must name a port <= 65535"):
        Router("tcp://127.0.0.1:65536", Codec(ToControl))
    with pytest.raises(InputError, match="must name a port between 1 and 65535"):
        Dealer("tcp://127.0.0.1:0", Codec(ToClient), "me")


@pytest.mark.parametrize("identity", ["", "\0me", "x" * 256])
def test_an_identity_that_no_router_can_answer_is_refused(identity: str) -> None:
    with pytest.raises(InputError, match="must have 1 to 255 bytes"):
        Dealer("tcp://127.0.0.1:1", Codec(ToClient), identity)


def test_an_occupied_port_is_named(router: Receiving) -> None:
    with pytest.raises(PortInUseError, match=rf"^{router.endpoint} is taken"):
        Router(router.endpoint, Codec(ToControl))


def test_an_occupied_port_of_another_program_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        endpoint = f"tcp://127.0.0.1:{other.getsockname()[1]}"
        with pytest.raises(PortInUseError, match=rf"^{endpoint} is taken"):
            Router(endpoint, Codec(ToControl))


def test_local_addresses_are_fresh_and_cannot_be_taken_over() -> None:
    first, second = local_address("node"), local_address("node")
    assert first != second
    router: Receiving = Router(first, Codec(ToControl))
    with pytest.raises(PortInUseError, match="is taken"):
        Router(router.endpoint, Codec(ToControl))
    router.close()


# ---- bad frames


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ((b"",), "frame starts with b'': this side speaks b'SL01'"),
        ((b"SL02\x80",), "frame starts with b'SL02': this side speaks b'SL01'"),
        ((VERSION + b"\xc1",), "malformed frame"),
        ((VERSION + b"\x81\xa4type\xa5Other",), "malformed frame"),
        ((VERSION + b"\x81\xa4type\xa9GetStatus",), "malformed frame: Object missing required field `seq`"),
        ((VERSION + b"\x82\xa1x" + b"\x91" * 4000 + b"\xc0",), "malformed frame: nested too deeply"),
        ((b"", b"framed as a REQ socket does"), "message of 2 frames: must be 1"),
        ((VERSION + b"x" * FRAME_BYTES_MAX,), f"frame of {FRAME_BYTES_MAX + 4} bytes: must be <= {FRAME_BYTES_MAX}"),
    ],
)
def test_a_bad_frame_is_counted_answered_and_hurts_nobody_else(
    router: Receiving, dealer: Asking, stranger: Stranger, frames: tuple[bytes, ...], reason: str
) -> None:
    stranger.send(*frames)
    receive_refused(router, 1)
    answer = stranger.answer()
    assert isinstance(answer, Refused)
    assert answer.error_class == "ProtocolError"
    assert answer.error.startswith(reason)
    round_trip(router, dealer)


def test_a_frame_far_over_the_bound_costs_its_sender_the_connection_and_nobody_else(
    router: Receiving, dealer: Asking, stranger: Stranger
) -> None:
    stranger.send(VERSION + b"x" * 10_000_000)
    assert router.receive(0.3) == []
    round_trip(router, dealer)


def test_a_refusal_is_logged_once_a_second_at_most(
    router: Receiving, stranger: Stranger, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(50):
        stranger.send(b"rubbish")
    receive_refused(router, 50)
    assert 1 <= len([record for record in caplog.records if record.message == "frame refused"]) <= 3


def test_a_dealer_counts_bad_frames_and_reads_on(router: Receiving, dealer: Asking) -> None:
    round_trip(router, dealer)
    router.socket.send_multipart([b"spot-0", b"rubbish"])
    router.socket.send_multipart([b"spot-0", b"two", b"frames"])
    router.send(b"spot-0", ClusterStatus(seq=5))
    end_s = time.monotonic() + 5
    received: list[ToClient] = []
    while not received and time.monotonic() < end_s:
        received += dealer.receive(0.2)
    assert received == [ClusterStatus(seq=5)]
    assert dealer.refused_frames == 2


frames = st.one_of(
    st.binary(max_size=64),
    st.binary(max_size=64).map(lambda tail: VERSION + tail),
    st.sampled_from(
        [GetStatus(seq=1), PollJob(seq=2, job_id=JobId("x")), NodeHello(node_id=NodeId("n"), pool=Pool.SPOT, slots=1)]
    )
    .map(Codec[ToControl](ToControl).encode)
    .flatmap(lambda frame: st.integers(0, len(frame) - 1).map(lambda cut: frame[:cut])),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(frames, min_size=1, max_size=3))
def test_fuzzed_frames_never_reach_a_handler_nor_disturb_a_peer(
    router: Receiving, dealer: Asking, stranger: Stranger, parts: list[bytes]
) -> None:
    before = router.refused_frames
    stranger.send(*parts)
    end_s = time.monotonic() + 5
    messages: list[object] = []
    while router.refused_frames == before and not messages and time.monotonic() < end_s:
        messages += [message for _, message in router.receive(0.2)]
    assert messages == []
    assert router.refused_frames == before + 1
    round_trip(router, dealer)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=st.binary(min_size=1, max_size=200))
def test_bytes_that_are_not_zeromq_at_all_disturb_nobody(router: Receiving, dealer: Asking, raw: bytes) -> None:
    host, port = router.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port)), timeout=5) as connection:
        connection.sendall(raw)
    round_trip(router, dealer)


def test_a_router_serves_many_peers_of_other_threads(router: Receiving) -> None:
    answers: list[int] = []

    def peer(number: int) -> None:
        dealer: Asking = Dealer(router.endpoint, Codec(ToClient), f"peer-{number}")
        dealer.send(GetStatus(seq=number))
        answers.extend(reply.seq for reply in dealer.receive(10.0))
        dealer.close()

    threads = [threading.Thread(target=peer, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    served = 0
    end_s = time.monotonic() + 10
    while served < 16 and time.monotonic() < end_s:
        for who, message in router.receive(0.5):
            assert isinstance(message, GetStatus)
            served += router.send(who, ClusterStatus(seq=message.seq))
    for thread in threads:
        thread.join(10)
    assert sorted(answers) == list(range(16))


def test_a_peer_on_this_machine_is_never_taken_for_dead_and_a_far_one_is(router: Receiving, dealer: Asking) -> None:
    """A stopped process answers no heartbeat; what a node tells its worker meanwhile must still arrive when it goes on."""
    near: Receiving = Router(local_address("node"), Codec(ToControl))
    worker: Asking = Dealer(near.endpoint, Codec(ToClient), "worker")
    try:
        assert [c.socket.getsockopt(zmq.HEARTBEAT_IVL) for c in (near, worker)] == [0, 0]
        assert all(c.socket.getsockopt(zmq.HEARTBEAT_IVL) > 0 for c in (router, dealer))
    finally:
        worker.close()
        near.close()
