"""Pure core: the exploration planner (paper §4.3)."""

from spot_runtime.planner.arms import Arm, Calibration, CalibrationRow, arms
from spot_runtime.planner.bandit import choose, feedback, group_deviations, observe, pend, retain, ucb
from spot_runtime.planner.plan import PlanInputs, TrainTimeEstimate, plan, split_prompts

__all__ = [
    "Arm",
    "Calibration",
    "CalibrationRow",
    "PlanInputs",
    "TrainTimeEstimate",
    "arms",
    "choose",
    "feedback",
    "group_deviations",
    "observe",
    "pend",
    "plan",
    "retain",
    "split_prompts",
    "ucb",
]
