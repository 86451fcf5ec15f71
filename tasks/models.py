"""What travels between Flyte tasks: choices of the command line, State, and what a job handed back.

Owns these shapes and their conversion to and from the runtime's types. Never holds tensors or rows of samples: those stay in the tensor
store, and a key travels. Nested runtime types travel as JSON text, because Flyte derives a schema from every field at every call.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

import msgspec
from pydantic import BaseModel, ConfigDict

from spot_runtime.config import RunSettings
from spot_runtime.types import BanditState, ExplorationPlan, JobResult, Op, PolicyRef, Usage
from tasks.cost import Meter, Spend


class System(StrEnum):
    """Presets of the systems that the paper compares."""

    SPOTLIGHT = "spotlight"
    RLBOOST = "rlboost"
    RLBOOST_EXP = "rlboost_exp"
    VERL_OMNI_SPOT = "verl_omni_spot"
    RLBOOST_3X = "rlboost_3x"
    VERL_OMNI_3X = "verl_omni_3x"


class Exploration(StrEnum):
    """Where the seeds of a rollout come from; `exploration.mode` by its values."""

    BANDIT = "bandit"
    BEST_OF_N = "best_of_n"
    PRESCREEN = "prescreen"
    NONE = "none"


class Travelling(BaseModel):
    """Base of all that goes through Flyte: immutable, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Policy(Travelling):
    """A policy version, as `PolicyRef`."""

    version: int = 0
    key: str = ""
    digest: str = ""

    @classmethod
    def of(cls, ref: PolicyRef) -> Self:
        return cls(version=ref.version, key=ref.key, digest=ref.digest)

    @property
    def ref(self) -> PolicyRef:
        return PolicyRef(self.version, self.key, self.digest)


class Outcome(Travelling):
    """What one job handed back, as `JobResult`; empty where the job was not due."""

    op: str = ""
    manifest_key: str = ""
    policy: Policy = Policy()
    average: Policy = Policy()
    metrics: dict[str, float] = {}
    plan_json: str = ""
    bandit_json: str = ""
    usage_json: str = ""

    @classmethod
    def of(cls, result: JobResult) -> Self:
        return cls(
            op=result.op,
            manifest_key=result.manifest_key,
            policy=Policy.of(result.policy),
            average=Policy.of(result.average),
            metrics=dict(result.metrics),
            plan_json=json_text(result.plan),
            bandit_json=json_text(result.bandit),
            usage_json=json_text(result.usage),
        )

    @property
    def is_due(self) -> bool:
        """Whether a job ran at all."""
        return bool(self.op)

    @property
    def plan(self) -> ExplorationPlan:
        return msgspec.json.decode(self.plan_json or "{}", type=ExplorationPlan)

    @property
    def bandit(self) -> BanditState:
        return msgspec.json.decode(self.bandit_json or "{}", type=BanditState)

    @property
    def usage(self) -> Usage:
        return msgspec.json.decode(self.usage_json or "{}", type=Usage)


class Score(Travelling):
    """One validation: the share of fixed pairs that the dataset's rule calls correct, and where their samples are listed."""

    iteration: int
    policy_version: int
    pairs: int
    correct: float
    reward_mean: float
    manifest_key: str


class State(Travelling):
    """All that is needed to go on after `iteration` finished iterations.

    `average` is the moving average of `policy`, of key "" where none is kept: what is validated, never what is sampled to train on.
    `bank_key` names the seeds of the next iteration, "" the default seeds; `samples_key` the manifest of an exploration whose samples the
    next rollout takes over, "" none; `folder` is where a local run leaves its outputs, "" elsewhere.
    """

    run_id: str
    settings_json: str
    iterations: int
    iteration: int = 0
    policy: Policy = Policy()
    average: Policy = Policy()
    bandit_json: str = "{}"
    bank_key: str = ""
    samples_key: str = ""
    scores: list[Score] = []
    meter_json: str = "null"
    folder: str = ""

    @property
    def settings(self) -> RunSettings:
        return RunSettings.parse_json(self.settings_json)

    @property
    def bandit(self) -> BanditState:
        return msgspec.json.decode(self.bandit_json, type=BanditState)

    @property
    def meter(self) -> Meter | None:
        """None before the first job."""
        return msgspec.json.decode(self.meter_json, type=Meter | None)

    @property
    def spend(self) -> Spend:
        """What the run held so far."""
        return self.meter.spend if self.meter else Spend()

    @property
    def reached_target(self) -> bool:
        """Whether a validation came to the target score, where there is one."""
        return any(map(self.reaches_target, self.scores))

    def reaches_target(self, score: Score) -> bool:
        """Of all the pairs that were asked for: one that was not scored counts as wrong."""
        target, asked = self.settings.target_score, self.settings.config.evaluation.pairs
        return target > 0 and round(score.correct * score.pairs) / asked >= target

    @property
    def is_finished(self) -> bool:
        return self.iteration >= self.iterations or self.reached_target


def json_text(value: object) -> str:
    """A runtime type as JSON text."""
    return msgspec.json.encode(value).decode()


POOLS: dict[Op, str] = {
    Op.ROLLOUT: "spot+reserved",
    Op.TRAIN_STEP: "reserved",
    Op.EXPLORE: "spot",
    Op.EVALUATE: "spot",
}
"""Where each op runs, as the Flyte console shows it."""
