"""Weights are used and passed on only when whole and checked: shared memory, handles of device memory, and givers that die on the way."""

import mmap
import os
import signal
import time

import pytest
import torch
from ranks import CPU, ranks
from torch import Tensor

from spot_runtime.errors import UnseededError
from spot_runtime.parallel import cuda_ipc, shared
from spot_runtime.parallel.cuda_ipc import DeviceWeights, machine_weights
from spot_runtime.parallel.shared import SharedWeights
from spot_runtime.parallel.weights import TensorSpec, Weights, WeightState, weights_digest

SPEC = {
    "a": TensorSpec(torch.float32, (300_000,)),
    "b": TensorSpec(torch.bfloat16, (3, 5)),
    "c": TensorSpec(torch.int64, ()),
    "d": TensorSpec(torch.float32, (0, 4)),
}


def _tensors(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: (torch.randn(s.shape, generator=generator) * 100).to(s.dtype) for name, s in SPEC.items()}


def _seeded(seed: int = 0) -> Weights:
    weights = Weights(SPEC)
    weights.seed(_tensors(seed))
    return weights


@pytest.fixture
def fd():
    made = os.memfd_create("weights")
    yield made
    os.close(made)


def test_unseeded_weights_give_nothing_away() -> None:
    weights = Weights(SPEC)
    assert weights.state is WeightState.UNSEEDED
    for use in (lambda: weights.tensors, lambda: weights.digest, weights.require_seeded):
        with pytest.raises(UnseededError, match="weights of 4 tensors are unseeded"):
            use()


def test_any_change_of_a_tensor_changes_the_digest() -> None:
    digests = {weights_digest(_tensors())}
    for name, place in (("a", 0), ("a", 150_000), ("a", 299_999), ("b", 14), ("c", 0)):
        tensors = _tensors()
        tensors[name].view(-1)[place] += 1
        digests.add(weights_digest(tensors))
    digests.add(weights_digest(_tensors() | {"d": torch.empty(4, 0)}))
    digests.add(weights_digest({name if name != "c" else "e": t for name, t in _tensors().items()}))
    assert len(digests) == 8


def test_the_digest_does_not_depend_on_order_or_layout() -> None:
    tensors = _tensors()
    other = dict(reversed(tensors.items())) | {"b": tensors["b"].t().contiguous().t()}
    assert weights_digest(other) == weights_digest(tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": torch.zeros(2)}, "differ in 1 tensors, the first a: "),
        ({"x": torch.zeros(2)}, "the first x: .*, must be absent"),
    ],
)
def test_tensors_that_do_not_fit_the_model_seed_nothing(change: dict, message: str) -> None:
    weights = Weights(SPEC)
    with pytest.raises(UnseededError, match=message):
        weights.seed(_tensors() | change)
    assert weights.state is WeightState.UNSEEDED


def test_a_wrong_digest_seeds_nothing() -> None:
    weights = Weights(SPEC)
    with pytest.raises(UnseededError, match=r"weights arrived with digest .*: must be abc"):
        weights.seed(_tensors(), "abc")
    assert weights.state is WeightState.UNSEEDED


def test_shared_weights_are_those_that_were_published(fd: int) -> None:
    giver = _seeded()
    SharedWeights(fd).publish(giver)
    taker = Weights(SPEC)
    taker.seed(*SharedWeights(fd).read())
    assert taker.digest == giver.digest
    assert all(torch.equal(tensor, giver.tensors[name]) for name, tensor in taker.tensors.items())
    assert all(tensor.data_ptr() % 64 == 0 for tensor in taker.tensors.values() if tensor.numel())


def test_who_writes_to_shared_weights_changes_only_their_own(fd: int) -> None:
    SharedWeights(fd).publish(_seeded())
    mine, digest = SharedWeights(fd).read()
    mine["a"].zero_()
    again, _ = SharedWeights(fd).read()
    assert weights_digest(again) == digest


def test_unseeded_weights_are_not_published_and_nothing_is_read_before(fd: int) -> None:
    with pytest.raises(UnseededError, match="are unseeded"):
        SharedWeights(fd).publish(Weights(SPEC))
    with pytest.raises(UnseededError, match="no worker of this machine has published any"):
        SharedWeights(fd).read()


def test_the_second_to_publish_changes_nothing(fd: int) -> None:
    SharedWeights(fd).publish(_seeded(0))
    SharedWeights(fd).publish(_seeded(1))
    assert SharedWeights(fd).read()[1] == _seeded(0).digest


def test_memory_that_changed_after_it_was_sealed_is_found_out(fd: int) -> None:
    SharedWeights(fd).publish(_seeded())
    os.pwrite(fd, b"\0" * 64, 4096)
    taker = Weights(SPEC)
    with pytest.raises(UnseededError, match="weights arrived with digest"):
        taker.seed(*SharedWeights(fd).read())
    assert taker.state is WeightState.UNSEEDED


def _publish_and_die(tell, path: str) -> None:
    """Writes all but the seal, then is killed while it holds the turn."""
    write = shared.write_all

    def write_or_die(fd: int, data, offset: int) -> None:
        if offset == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        write(fd, data, offset)

    shared.write_all = write_or_die
    SharedWeights(os.open(path, os.O_RDWR)).publish(_seeded())


def test_a_publisher_that_dies_half_way_leaves_nothing_and_the_next_one_publishes(tmp_path) -> None:
    path = tmp_path / "weights"
    path.touch()
    with ranks(_publish_and_die, [(str(path),)]) as running, pytest.raises((EOFError, AssertionError)):
        running[0].result()
    fd = os.open(path, os.O_RDWR)
    try:
        assert os.fstat(fd).st_size > mmap.PAGESIZE
        assert not SharedWeights(fd).is_sealed
        os.pwrite(fd, b"x" * 10_000, os.fstat(fd).st_size)
        SharedWeights(fd).publish(_seeded(1))
        taker = Weights(SPEC)
        taker.seed(*SharedWeights(fd).read())
        assert taker.digest == _seeded(1).digest
    finally:
        os.close(fd)


# ---- handles of device memory; the handles themselves are tested on a GPU ----


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Handles that carry the tensor itself."""
    monkeypatch.setattr(cuda_ipc, "_handle", lambda t: [str(t.dtype).removeprefix("torch."), t.tolist()])
    monkeypatch.setattr(cuda_ipc, "_open", lambda entry: torch.tensor(entry[1], dtype=getattr(torch, entry[0])))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)


@pytest.mark.usefixtures("handles")
def test_device_weights_are_those_of_the_first_publisher_that_lives(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    device, living = DeviceWeights(fd, CPU), {1, 2, 3}
    mine = 0
    monkeypatch.setattr(cuda_ipc, "_process", lambda pid: f"{pid} 7" if pid in living else "")
    monkeypatch.setattr(os, "getpid", lambda: mine)
    with pytest.raises(UnseededError, match="no living worker of this machine has published any"):
        device.read()
    with pytest.raises(UnseededError, match="are unseeded"):
        device.publish(Weights(SPEC))
    for mine in (1, 2, 3):
        device.publish(_seeded(mine))
    taker = Weights(SPEC)
    tensors, digest = device.read()
    taker.seed({name: tensor.view(SPEC[name].shape) for name, tensor in tensors.items()}, digest)
    assert taker.digest == _seeded(1).digest
    living.remove(1)
    assert device.read()[1] == _seeded(2).digest
    living.clear()
    with pytest.raises(UnseededError, match="no living worker"):
        device.read()
    living.add(4)
    mine = 4
    device.publish(_seeded(4))
    assert [entry["process"] for entry in device._living()] == ["4 7"]


def _publish_device(tell, path: str, seed: int) -> None:
    cuda_ipc._handle = lambda t: [str(t.dtype).removeprefix("torch."), t.tolist()]
    DeviceWeights(os.open(path, os.O_RDWR), CPU).publish(_seeded(seed))
    tell("published")
    time.sleep(600)


def test_workers_that_publish_at_the_same_time_are_all_heard(tmp_path) -> None:
    path = tmp_path / "weights"
    path.touch()
    with ranks(_publish_device, [(str(path), seed) for seed in range(3)]) as running:
        assert [rank.message() for rank in running] == ["published"] * 3
        fd = os.open(path, os.O_RDWR)
        device = DeviceWeights(fd, CPU)
        assert sorted(entry["digest"] for entry in device._living()) == sorted(_seeded(n).digest for n in range(3))
        running[0].end()
        assert {entry["digest"] for entry in device._living()} == {_seeded(n).digest for n in (1, 2)}
        os.close(fd)


def _nothing(tell) -> str:
    return cuda_ipc._process(os.getpid())


def test_a_publisher_is_gone_when_its_process_is_also_where_its_pid_is_used_again() -> None:
    with ranks(_nothing, [()]) as (rank,):
        name = rank.result()
    pid = int(name.split()[0])
    assert cuda_ipc._process(pid) != name
    mine = cuda_ipc._process(os.getpid())
    assert mine.split()[0] == str(os.getpid())
    assert mine == cuda_ipc._process(os.getpid())
    assert cuda_ipc._process(0) == ""


def test_who_shares_weights_picks_by_device(fd: int) -> None:
    assert isinstance(machine_weights(fd, CPU), SharedWeights)
    assert isinstance(machine_weights(fd, torch.device("cuda")), DeviceWeights)
    assert isinstance(machine_weights(fd, torch.device("cuda"), stay=False), SharedWeights)
