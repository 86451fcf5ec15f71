import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformer2DModel
from diffusion_rollouts import MODEL

from spot_runtime.diffusion.geometry import model_folder
from spot_runtime.diffusion.invariance import ROWS_MIN, PaddedRows, make_batch_invariant
from spot_runtime.diffusion.transformer import load_transformer, predict_velocity

LENGTHS = (9, 23, 14, 9, 31, 11, 12)


def load() -> QwenImageTransformer2DModel:
    return load_transformer(model_folder(MODEL), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def stock() -> QwenImageTransformer2DModel:
    return load()


@pytest.fixture(scope="module")
def invariant() -> QwenImageTransformer2DModel:
    transformer = load()
    make_batch_invariant(transformer)
    return transformer


def rows(transformer: QwenImageTransformer2DModel, which: list[int], text_tokens_min: int) -> torch.Tensor:
    """Velocity of some of seven fixed rows, computed in one batch."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(len(LENGTHS), 64, transformer.config.in_channels, generator=generator)
    texts = [torch.randn(n, transformer.config.joint_attention_dim, generator=generator) for n in LENGTHS]
    sigma = torch.linspace(0.9, 0.2, len(LENGTHS))
    with torch.inference_mode():
        return predict_velocity(
            transformer, x[which], sigma[which], [texts[b] for b in which], (8, 8), text_tokens_min=text_tokens_min
        )


def test_a_row_is_the_same_to_the_bit_in_any_batch(invariant: QwenImageTransformer2DModel) -> None:
    together = rows(invariant, list(range(7)), ROWS_MIN)
    for which in ([0], [1], [4], [2, 5], [6, 3, 0], [5, 4, 3, 2, 1]):
        assert torch.equal(rows(invariant, which, ROWS_MIN), together[which])


def test_it_computes_what_the_stock_transformer_computes(
    stock: QwenImageTransformer2DModel, invariant: QwenImageTransformer2DModel
) -> None:
    got, want = rows(invariant, list(range(7)), ROWS_MIN), rows(stock, list(range(7)), 1)
    assert torch.linalg.norm(got - want) <= 1e-5 * torch.linalg.norm(want)


def test_padding_text_changes_nothing(invariant: QwenImageTransformer2DModel) -> None:
    assert torch.equal(rows(invariant, [1, 4], 31), rows(invariant, [1, 4], 48))


def test_padded_rows_are_the_linear_layer() -> None:
    linear = torch.nn.Linear(8, 5)
    x = torch.randn(3, 8)
    torch.testing.assert_close(PaddedRows(linear)(x), linear(x))
    many = torch.randn(40, 8)
    assert torch.equal(PaddedRows(linear)(many), linear(many))
