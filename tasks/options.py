"""What `train` takes where nothing is said. Owns these defaults; what they mean is said where they are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from spot_runtime.config import DatasetName
from tasks.models import Exploration


@dataclass(frozen=True)
class Options:
    """The command line's options that a resumed run keeps, and how many iterations it has."""

    dataset: DatasetName = DatasetName.GENEVAL
    resolution: int = 0
    iterations: int = 8
    model: str = "tiny"
    store: str = ""
    exploration: Exploration = Exploration.BANDIT
    seed: int = 0

    def is_said(self, name: str, value: Any) -> bool:
        """Whether `value` of an option is more than its default."""
        return bool(value != getattr(self, name))


UNSAID: Final = Options()
