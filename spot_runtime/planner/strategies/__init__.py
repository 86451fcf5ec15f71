"""Pure core: exploration strategies by name, one module each behind `Strategy`."""

from typing import Final

from spot_runtime.planner.strategies.bandit_beside_training import BanditBesideTraining
from spot_runtime.planner.strategies.best_of_n import BestOfN
from spot_runtime.planner.strategies.prescreen import Prescreen
from spot_runtime.planner.strategies.strategy import Question, Strategy

STRATEGIES: Final[dict[str, Strategy]] = {
    "bandit": BanditBesideTraining(),
    "best_of_n": BestOfN(),
    "prescreen": Prescreen(),
}
"""By `exploration.mode`; "none" has no strategy."""

__all__ = ["STRATEGIES", "Question", "Strategy"]
