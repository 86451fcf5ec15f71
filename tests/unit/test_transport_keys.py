"""CURVE on loopback: who has a key that is allowed passes, anyone else is refused and disturbs nobody."""

from __future__ import annotations

import logging
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spot_runtime.cli import main
from spot_runtime.daemons.keys import client_keys, server_keys
from spot_runtime.errors import InputError
from spot_runtime.messages import Codec, GetStatus, ToClient, ToControl
from spot_runtime.transport import (
    ClientKeys,
    Dealer,
    KeyPair,
    Router,
    ServerKeys,
    new_pair,
    read_allowed,
    read_pair,
    read_public,
    write_pair,
)

CONTROL, FRIEND, STRANGER = new_pair(), new_pair(), new_pair()


@pytest.fixture
def router() -> Iterator[Router[ToControl]]:
    keys = ServerKeys(CONTROL, frozenset({FRIEND.public}))
    router: Router[ToControl] = Router("tcp://127.0.0.1:0", Codec(ToControl), keys=keys)
    yield router
    router.close()


def dealer(
    router: Router[ToControl], name: str, pair: KeyPair | None, server: bytes = CONTROL.public
) -> Dealer[ToClient]:
    keys = ClientKeys(pair, server) if pair else None
    return Dealer(router.endpoint, Codec(ToClient), name, keys=keys)


def heard(router: Router[ToControl], timeout_s: float) -> list[bytes]:
    return [peer for peer, _ in router.receive(timeout_s)]


def test_an_allowed_key_passes_both_ways(router: Router[ToControl]) -> None:
    friend = dealer(router, "friend", FRIEND)
    friend.send(GetStatus(seq=1))
    assert heard(router, 30.0) == [b"friend"]
    friend.close()
    assert router.refused_peers == 0


@pytest.mark.parametrize("pair", [STRANGER, None])
def test_an_unknown_or_missing_key_is_refused_and_hurts_nobody(
    router: Router[ToControl], pair: KeyPair | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    stranger = dealer(router, "stranger", pair)
    stranger.send(GetStatus(seq=1))
    friend = dealer(router, "friend", FRIEND)
    friend.send(GetStatus(seq=2))
    assert heard(router, 30.0) == [b"friend"]
    assert heard(router, 0.3) == []
    limit_s = time.monotonic() + 30.0
    while not router.refused_peers and time.monotonic() < limit_s:
        stranger.send(GetStatus(seq=3))
        time.sleep(0.01)
    counted = router.refused_peers
    stranger.close()
    friend.close()
    assert counted >= 1
    lines = [record for record in caplog.records if record.getMessage() == "peer refused"]
    said = [record.__dict__.get("key") or record.__dict__.get("reason") for record in lines]
    assert said[:1] == ([STRANGER.public.decode()] if pair else ["no key was shown"])


def test_a_friend_does_not_talk_to_a_server_of_another_key(router: Router[ToControl]) -> None:
    friend = dealer(router, "friend", FRIEND, server=STRANGER.public)
    friend.send(GetStatus(seq=1))
    assert heard(router, 0.3) == []
    friend.close()


def test_a_public_address_needs_keys() -> None:
    with pytest.raises(InputError, match=r"bind = tcp://0\.0\.0\.0:0: must be a loopback or ipc address"):
        Router("tcp://0.0.0.0:0", Codec(ToControl))
    keys = ServerKeys(CONTROL, frozenset({FRIEND.public}))
    router: Router[ToControl] = Router("tcp://0.0.0.0:0", Codec(ToControl), keys=keys)
    assert router.endpoint.startswith("tcp://0.0.0.0:")
    router.close()


def test_the_command_makes_a_pair_that_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["keys", "new", "spot-0", "--folder", str(tmp_path)])
    assert not ended.value.code
    assert capsys.readouterr().out.splitlines() == [str(tmp_path / "spot-0.public"), str(tmp_path / "spot-0.secret")]
    assert stat.S_IMODE((tmp_path / "spot-0.secret").stat().st_mode) == 0o600
    pair = read_pair(tmp_path / "spot-0.secret")
    assert pair.public == read_public(tmp_path / "spot-0.public")
    assert read_allowed(tmp_path) == {pair.public}
    assert pair.secret.decode() not in repr(pair)


def test_a_key_is_never_replaced(tmp_path: Path) -> None:
    write_pair(tmp_path, "spot-0", FRIEND)
    with pytest.raises(InputError, match="exists already"):
        write_pair(tmp_path, "spot-0", STRANGER)
    assert read_pair(tmp_path / "spot-0.secret") == FRIEND


def test_bad_key_files_are_one_line(tmp_path: Path) -> None:
    _, secret = write_pair(tmp_path, "spot-0", FRIEND)
    secret.chmod(0o640)
    with pytest.raises(InputError, match="has mode 0640: must be 0600"):
        read_pair(secret)
    (tmp_path / "torn.public").write_text("short\n")
    with pytest.raises(InputError, match=r"torn\.public: must be one line of 40 characters in Z85"):
        read_allowed(tmp_path)
    with pytest.raises(InputError, match="No such file"):
        read_public(tmp_path / "none.public")
    with pytest.raises(InputError, match=r"0 \*\.public files: must be 1 to 4096"):
        read_allowed(tmp_path / "nowhere")
    with pytest.raises(InputError, match="must be 1 to 63 lower-case letters"):
        write_pair(tmp_path, "../x", FRIEND)


def test_keys_come_in_twos(tmp_path: Path) -> None:
    public, secret = write_pair(tmp_path, "control", CONTROL)
    assert server_keys("", "") is None
    assert client_keys("", "") is None
    assert server_keys(str(secret), str(tmp_path)) == ServerKeys(CONTROL, frozenset({CONTROL.public}))
    assert client_keys(str(secret), str(public)) == ClientKeys(CONTROL, CONTROL.public)
    with pytest.raises(InputError, match="must both be given, or neither"):
        server_keys(str(secret), "")
    with pytest.raises(InputError, match="must both be given, or neither"):
        client_keys("", str(public))
