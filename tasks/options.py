"""What `train` takes where nothing is said. Owns these defaults; what they mean is said where they are taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import click
from click.core import ParameterSource

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
        """Whether an option has another value than its default, or was typed with that one: where there is a command line."""
        return bool(value != getattr(self, name)) or (name in _MEAN_SOMETHING and _is_typed(name))


UNSAID: Final = Options()
_MEAN_SOMETHING: Final = frozenset({"dataset", "iterations", "model", "exploration", "seed"})
"""Options whose defaults ask for something; those of the others leave the choice to the model or the cluster."""


def _is_typed(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
