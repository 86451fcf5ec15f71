"""What GPU time costs. Owns prices; never counts time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Prices:
    """US dollars a GPU-hour. The defaults are the paper's H100 averages over three clouds (Appendix A, June 2026)."""

    reserved_usd: float = 10.08
    spot_usd: float = 2.87


PAPER_PRICES = Prices()


def cost_usd(reserved_gpu_s: float, spot_gpu_s: float, prices: Prices = PAPER_PRICES) -> float:
    """US dollars for so many GPU-seconds of each pool."""
    return (reserved_gpu_s * prices.reserved_usd + spot_gpu_s * prices.spot_usd) / 3600
