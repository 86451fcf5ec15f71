"""The transformer spread over real processes computes what it computes alone: velocities, gradients, any text, any number of tokens."""

import pytest
import torch
from diffusion_rollouts import MODEL
from ranks import CPU, run_group

from spot_runtime.diffusion.attention import attend_masked, install_attention
from spot_runtime.diffusion.geometry import model_folder
from spot_runtime.diffusion.invariance import ROWS_MIN, make_batch_invariant
from spot_runtime.diffusion.transformer import load_transformer, predict_velocity
from spot_runtime.errors import InputError
from spot_runtime.parallel.degree import allowed_degrees, check_degree
from spot_runtime.parallel.group import SequenceGroup
from spot_runtime.parallel.ulysses import TokenShards

EVEN, ODD = (8, 8), (7, 9)
"""Grids of 64 tokens, which 2 and 4 divide, and of 63."""
TOLERANCE = 1e-5


def _velocity(transformer, grid: tuple[int, int], lengths: tuple[int, ...], text_tokens_min: int = 1) -> torch.Tensor:
    """Of rows at different noise levels with texts of `lengths`."""
    generator = torch.Generator().manual_seed(3)
    rows, config = len(lengths), transformer.config
    latents = torch.randn(rows, grid[0] * grid[1], config.in_channels, generator=generator)
    texts = [torch.randn(n, config.joint_attention_dim, generator=generator) for n in lengths]
    sigma = torch.linspace(0.95, 0.1, rows)
    return predict_velocity(transformer, latents, sigma, texts, grid, text_tokens_min=text_tokens_min)


def _guided(velocity: torch.Tensor, scale: float = 4.0) -> torch.Tensor:
    """Classifier-free guidance over a batch whose second half is unconditional, rescaled to the conditional norm as Qwen-Image does."""
    conditional, unconditional = velocity.chunk(2)
    mixed = unconditional + scale * (conditional - unconditional)
    return mixed * (conditional.norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True))


def _gap(one: torch.Tensor, two: torch.Tensor) -> float:
    return (one - two).abs().max().item()


CASES = {
    "one text length": (EVEN, (12, 12)),
    "uneven texts of odd length": (EVEN, (9, 23, 1)),
    "tokens that do not divide": (ODD, (5, 5)),
    "tokens that do not divide, uneven texts": (ODD, (17, 3, 8)),
    "fewer tokens than ranks": ((1, 3), (4, 2)),
}


def _compare(group: SequenceGroup) -> dict[str, float]:
    """The largest gaps between degree 1 and the group's, by what is compared."""
    gaps: dict[str, float] = {}
    for kind in ("masked", "ragged"):
        transformer = load_transformer(model_folder(MODEL), CPU, torch.float32)
        if kind == "ragged":
            shards, text_tokens_min = make_batch_invariant(transformer), ROWS_MIN
        else:
            shards, text_tokens_min = TokenShards(), 1
            install_attention(transformer, shards, attend_masked)
        with torch.inference_mode():
            for name, (grid, lengths) in CASES.items():
                shards.group = None
                alone = _velocity(transformer, grid, lengths, text_tokens_min)
                shards.group = group
                gaps[f"{kind}: {name}"] = _gap(alone, _velocity(transformer, grid, lengths, text_tokens_min))
            shards.group = None
            alone = _guided(_velocity(transformer, ODD, (7, 12, 3, 3), text_tokens_min))
            shards.group = group
            gaps[f"{kind}: guidance"] = _gap(
                alone, _guided(_velocity(transformer, ODD, (7, 12, 3, 3), text_tokens_min))
            )
        gaps[f"{kind}: gradients"] = _gradient_gap(transformer, shards, group)
    return gaps


def _gradient_gap(transformer, shards: TokenShards, group: SequenceGroup) -> float:
    """Of all parameters: the sum over ranks against degree 1, in units of the largest gradient where that is above 1."""
    transformer.requires_grad_(True)
    gradients = []
    for each in (None, group):
        shards.group = each
        transformer.zero_grad()
        _velocity(transformer, ODD, (9, 4)).square().mean().backward()
        gradients.append({name: p.grad for name, p in transformer.named_parameters() if p.grad is not None})
    alone, mine = gradients
    assert alone.keys() == mine.keys()
    assert len(alone) > 100
    summed = {name: group.all_gather(grad).sum(0) for name, grad in mine.items()}
    scale = max(1.0, *(grad.abs().max().item() for grad in alone.values()))
    return max(_gap(alone[name], summed[name]) for name in alone) / scale


@pytest.fixture(scope="module", params=[2, 4])
def gaps(request: pytest.FixtureRequest) -> list[dict[str, float]]:
    return run_group(_compare, request.param)


@pytest.mark.parametrize("what", [*CASES, "guidance", "gradients"])
@pytest.mark.parametrize("kind", ["masked", "ragged"])
def test_a_group_computes_what_one_rank_computes(gaps: list[dict[str, float]], kind: str, what: str) -> None:
    assert max(of_rank[f"{kind}: {what}"] for of_rank in gaps) <= TOLERANCE


def test_a_degree_takes_as_many_heads_on_each_rank() -> None:
    assert allowed_degrees(24, 8) == (1, 2, 3, 4, 6, 8)
    assert allowed_degrees(4, 2) == (1, 2)
    for degree in (0, -1, 3, 8):
        with pytest.raises(
            InputError,
            match=f"sequence_parallel_degree = {degree}: must divide the 4 attention heads .* one of 1, 2, 4",
        ):
            check_degree(degree, 4)
    check_degree(4, 4)
