"""Groups of real processes over gloo: what collectives return, and how a group ends when a rank dies, stops, strays or does not come."""

import signal
import time

import pytest
import torch
from ranks import CPU, generations, ranks, run_group

from spot_runtime.errors import GroupError
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.types import Generation


def _exchange(group: SequenceGroup) -> list:
    parts = torch.arange(group.degree) + 10 * group.rank
    return group.all_to_all(parts).tolist()


def _gather(group: SequenceGroup) -> list:
    return group.all_gather(torch.full((2,), float(group.rank), dtype=torch.bfloat16)).tolist()


def _broadcast(group: SequenceGroup) -> list:
    sizes, kinds = ((3,), (2, 2), (), (0,)), (torch.float32, torch.bfloat16, torch.int64, torch.float32)
    tensors = [torch.full(size, group.rank + 1, dtype=kind) for size, kind in zip(sizes, kinds, strict=True)]
    tensors.append(torch.arange(6).view(2, 3).t() * (group.rank + 1))
    group.broadcast(tensors, source=1)
    return [tensor.tolist() for tensor in tensors]


def _agree(group: SequenceGroup) -> str:
    group.agree("a batch", 7)
    try:
        group.agree("a batch", 7 if group.rank != 1 else 8)
    except GroupError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("degree", [2, 4])
def test_part_i_of_all_to_all_goes_to_rank_i(degree: int) -> None:
    assert run_group(_exchange, degree) == [[rank + 10 * other for other in range(degree)] for rank in range(degree)]


def test_all_gather_has_the_part_of_each_rank_everywhere() -> None:
    assert run_group(_gather, 3) == [[[0, 0], [1, 1], [2, 2]]] * 3


def test_broadcast_overwrites_tensors_of_any_kind_and_layout() -> None:
    mine = [[2, 2, 2], [[2, 2], [2, 2]], 2, [], [[0, 6], [2, 8], [4, 10]]]
    assert run_group(_broadcast, 3) == [mine] * 3


def test_ranks_that_are_about_to_do_different_things_find_out_on_every_rank() -> None:
    errors = run_group(_agree, 3)
    assert [f"generation 1 rank {rank} of 3: a batch failed: rank 1 differs from rank 0" for rank in range(3)] == errors


def _until_broken(tell, generation: Generation) -> tuple[str, str, float, bool]:
    """Exchanges until something happens: the error, that of the next call, how long it took to notice, and whether the group is of use."""
    group = SequenceGroup.join(generation, CPU)
    tell("joined")
    parts = torch.zeros(generation.degree, 1000)
    try:
        while True:
            began_s = time.monotonic()
            group.all_to_all(parts)
    except GroupError as error:
        first = str(error)
    waited_s = time.monotonic() - began_s
    with pytest.raises(GroupError) as raised:
        group.all_gather(parts)
    group.close()
    group.close()
    return first, str(raised.value), waited_s, group.is_usable


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_gone_frees_the_others_with_one_error(tmp_path, number: int) -> None:
    timeout_s = 120.0 if number == signal.SIGKILL else 20.0
    of_rank = generations(tmp_path, 7, 3, timeout_s)
    with ranks(_until_broken, [(generation,) for generation in of_rank]) as running:
        assert [rank.message() for rank in running] == ["joined"] * 3
        running[1].kill(number)
        for rank in (0, 2):
            first, later, waited_s, usable = running[rank].result()
            assert first.startswith(f"generation 7 rank {rank} of 3: all_to_all failed: ")
            assert later == f"generation 7 rank {rank} of 3: all_gather on a group that is broken by all_to_all"
            assert waited_s < 100
            assert not usable


def _join(tell, generation: Generation) -> str:
    try:
        SequenceGroup.join(generation, CPU).close()
    except GroupError as error:
        return str(error)
    return "joined"


def test_a_rank_that_does_not_come_ends_the_join_of_the_others(tmp_path) -> None:
    first, *_ = generations(tmp_path, 8, 2, timeout_s=1.0)
    with ranks(_join, [(first,)]) as running:
        assert running[0].result().startswith("generation 8 rank 0 of 2: no group within 1.0 s: ")


def test_survivors_meet_again_in_another_generation(tmp_path) -> None:
    old, new = generations(tmp_path, 1, 2), generations(tmp_path, 2, 2)
    with ranks(_until_broken, [(generation,) for generation in old]) as running:
        assert [rank.message() for rank in running] == ["joined"] * 2
        running[1].kill()
        assert "all_to_all failed" in running[0].result()[0]
    with ranks(_join, [(generation,) for generation in new]) as running:
        assert [rank.result() for rank in running] == ["joined"] * 2


def test_the_rendezvous_of_an_old_generation_is_refused(tmp_path) -> None:
    generation = generations(tmp_path, 1, 2, timeout_s=1.0)[0]
    with ranks(_join, [(generation,)]) as running:
        running[0].result()
    with ranks(_join, [(generation,)]) as running:
        assert "was used before, every generation needs a file of its own" in running[0].result()


@pytest.mark.parametrize(
    ("generation", "bound"),
    [
        (Generation(3, 2, 2, "x", 1.0), "rank must lie in 0..1"),
        (Generation(3, 0, 2, "x", 0.0), "timeout_s = 0.0: must be > 0"),
    ],
)
def test_a_generation_out_of_bounds_is_refused(generation: Generation, bound: str) -> None:
    with pytest.raises(GroupError, match=bound):
        SequenceGroup.join(generation, CPU)
