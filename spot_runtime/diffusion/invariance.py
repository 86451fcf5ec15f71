"""Makes a row of a CPU batch come out bit for bit as it does alone. Owns the two places where a batch leaks into its rows; never trains.

Matrix products with few rows choose another order of summation, and attention over padded keys adds up other partial sums. Both are only
rounding, but a sharp model turns 1e-7 into 1e-4 over a trajectory, and a resumed request finds other mates in its batch. So matrices with
one row a sample get at least ROWS_MIN rows, short texts are padded to as many tokens, and each sample attends over its own length
(`attention.attend_ragged`). A rank of a sequence-parallel group takes at least ROWS_MIN image tokens, for the same reason.
"""

from __future__ import annotations

from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional

from spot_runtime.diffusion.attention import attend_ragged, install_attention
from spot_runtime.parallel.ulysses import TokenShards

ROWS_MIN: Final = 16
"""From so many rows on, fp32 products of up to 1024 summands are summed in one order (measured with MKL on AVX-512)."""


def make_batch_invariant(transformer: Any) -> TokenShards:
    """Changes a QwenImageTransformer2DModel in place; what it computes stays the same up to rounding. Returns where its tokens lie."""
    shards = TokenShards(ROWS_MIN)
    install_attention(transformer, shards, attend_ragged)
    _pad_rows(transformer.time_text_embed)
    _pad_rows(transformer.norm_out)
    for block in transformer.transformer_blocks:
        _pad_rows(block.img_mod)
        _pad_rows(block.txt_mod)
    return shards


class PaddedRows(nn.Module):
    """A linear layer that sees at least ROWS_MIN rows; zeros fill up."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, rows: Tensor) -> Tensor:
        missing = max(ROWS_MIN - len(rows), 0)
        result: Tensor = self.linear(functional.pad(rows, (0, 0, 0, missing)))
        return result[: len(rows)]


def _pad_rows(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, PaddedRows(child))
        else:
            _pad_rows(child)
