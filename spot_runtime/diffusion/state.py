"""All that a trainer must remember from one training step to the next. Owns its tensor names; never touches a model or a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from spot_runtime.errors import TrainingError

_ADAPTER: Final = "adapter."
_EXP_AVG: Final = "exp_avg."
_EXP_AVG_SQ: Final = "exp_avg_sq."
_EMA: Final = "ema."
_COUNTERS: Final = "counters"


@dataclass(frozen=True)
class TrainerState:
    """Policy and optimizer as numpy. Moments are named as the adapter's tensors; both are empty before the first optimizer step.

    `adapter` is the policy, low-rank or whole; `ema` its moving average, empty where none is kept. `policy_version` counts training steps,
    `optimizer_steps` AdamW's own.
    """

    adapter: Mapping[str, np.ndarray]
    exp_avg: Mapping[str, np.ndarray]
    exp_avg_sq: Mapping[str, np.ndarray]
    optimizer_steps: int
    policy_version: int
    ema: Mapping[str, np.ndarray] = field(default_factory=dict)

    def tensors(self) -> dict[str, np.ndarray]:
        """The state as one flat mapping, fit for a safetensors file."""
        parts = ((_ADAPTER, self.adapter), (_EXP_AVG, self.exp_avg), (_EXP_AVG_SQ, self.exp_avg_sq), (_EMA, self.ema))
        flat = {f"{prefix}{name}": array for prefix, part in parts for name, array in part.items()}
        return flat | {_COUNTERS: np.array([self.optimizer_steps, self.policy_version], dtype=np.int64)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, np.ndarray]) -> TrainerState:
        """Inverse of `tensors`. Raises TrainingError where counters or adapter are missing."""
        adapter = _part(tensors, _ADAPTER)
        counters = tensors.get(_COUNTERS)
        if counters is None or counters.shape != (2,) or not adapter:
            raise TrainingError(f"trainer state of {len(tensors)} tensors: must hold {_COUNTERS} [2] and an adapter")
        return cls(
            adapter=adapter,
            exp_avg=_part(tensors, _EXP_AVG),
            exp_avg_sq=_part(tensors, _EXP_AVG_SQ),
            optimizer_steps=int(counters[0]),
            policy_version=int(counters[1]),
            ema=_part(tensors, _EMA),
        )


def _part(tensors: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {name.removeprefix(prefix): array for name, array in tensors.items() if name.startswith(prefix)}
