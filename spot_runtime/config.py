"""Frozen configuration with bounds. Owns defaults and validation messages; never reads files, environment or the network."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spot_runtime.errors import InputError


class Frozen(BaseModel):
    """Base of every config: immutable, finite, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @classmethod
    def parse(cls, values: dict[str, Any]) -> Self:
        """Validates `values`. Raises InputError with one line that names field, value and bound."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise InputError(describe(error)) from error

    @classmethod
    def parse_json(cls, text: str) -> Self:
        """Validates JSON text; errors as `parse`."""
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise InputError(describe(error)) from error


def describe(error: ValidationError) -> str:
    """The first problem of a pydantic error as one line: `grpo.group_size = 3: must be even`."""
    first = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    given = first.get("input")
    if isinstance(given, dict | Frozen):  # a rule over several fields: the message itself begins with one of them
        joint = "." if " = " in message else ": "
        return f"{field}{joint}{message}" if field else message
    return f"{field} = {given!r}: {message}"


class DatasetName(StrEnum):
    """Prompt set and its reward."""

    GENEVAL = "geneval"
    DEEPSEEK_OCR = "deepseek_ocr"


class SamplingConfig(Frozen):
    """How rollouts denoise."""

    num_steps: int = Field(10, ge=2, le=200)
    """Denoising steps of a rollout and of an evaluation sample."""
    noise_level: float = Field(0.7, gt=0, le=2)
    """Noise level a of the SDE step (arXiv 2505.05470)."""
    sde: Literal["sde", "cps"] = "sde"
    """Which stochastic step: Flow-GRPO's SDE or coefficient-preserving sampling (arXiv 2509.05952), whose noise level is at most 1."""
    sde_window_start: int = Field(0, ge=0)
    """First denoising step that a window may cover."""
    sde_window_stop: int = Field(5, ge=1)
    """One past the last denoising step that a window may cover."""
    sde_window_size: int = Field(5, ge=1)
    """Denoising steps in one window; its place is drawn per (iteration, prompt)."""

    @model_validator(mode="after")
    def _noise_grows_with_its_level(self) -> Self:
        if self.sde == "cps" and self.noise_level > 1:
            raise ValueError(
                f"noise_level = {self.noise_level}: must be <= 1 where sde is 'cps', all of a step's noise is new there"
            )
        return self

    @model_validator(mode="after")
    def _window_fits(self) -> Self:
        if self.sde_window_stop > self.num_steps - 1:
            raise ValueError(
                f"sde_window_stop = {self.sde_window_stop}: must be <= num_steps - 1 = {self.num_steps - 1}: no SDE on the last step"
            )
        if self.sde_window_size > self.sde_window_stop - self.sde_window_start:
            span = self.sde_window_stop - self.sde_window_start
            raise ValueError(
                f"sde_window_size = {self.sde_window_size}: must be <= sde_window_stop - sde_window_start = {span}"
            )
        return self


class GrpoConfig(Frozen):
    """What one training step does."""

    prompts_per_iteration: int = Field(24, ge=1, le=4096)
    """Prompts (groups) of one iteration."""
    group_size: int = Field(12, ge=2, le=256)
    """Samples a prompt, k: top k/2 and bottom k/2 seeds come from the bank."""
    learning_rate: float = Field(5e-4, gt=0, le=1)
    """AdamW learning rate."""
    weight_decay: float = Field(0.0, ge=0, le=1)
    """AdamW weight decay."""
    clip_range: float = Field(1e-3, gt=0, lt=1)
    """ε of the clipped ratio."""
    advantage_clip: float = Field(5.0, gt=0)
    """Advantages are clipped to ± this."""
    advantage_normalisation: Literal["group", "batch", "unexplored", "none"] = "batch"
    """Which standard deviation divides the centred rewards; unexplored: that of the prompts with default seeds."""
    ratio: Literal["plain", "guard"] = "plain"
    """guard: ratios and gradients of all denoising steps on one scale (GRPO-Guard, arXiv 2510.22319); it needs a clip range of its own."""
    log_probs: Literal["auto", "rollout", "recompute"] = "auto"
    """Whose log-probs are the old ones: the rollout's, the trainer's own from one more forward pass, or (auto) the rollout's as long as
    they are within clip_range / 10 of the trainer's."""
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the Gaussian KL to the adapter-disabled reference."""
    optimizer_steps: int = Field(4, ge=1, le=64)
    """Optimizer steps an iteration: the batch is split by prompt into so many parts."""
    micro_batch: int = Field(16, ge=1, le=1024)
    """Samples a forward pass in training."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the trainer's forward and backward passes compute in, and holds frozen weights in; weights in training, latents and log-probs
    are fp32 either way."""
    activation_checkpointing: bool = False
    """Keeps only each block's input and computes the rest again: less memory, a third more time."""
    max_grad_norm: float = Field(1.0, gt=0)
    """Gradient norm is clipped to this."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Decay d of the moving average of the policy, an optimizer step; 0: none is kept. Validation samples the average, rollouts never."""
    trainable: Literal["lora", "full"] = "lora"
    """Whether a low-rank adapter is trained, or every weight of the transformer."""
    lora_rank: int = Field(32, ge=1, le=1024)
    """Rank of the adapter."""
    lora_alpha: int = Field(64, ge=1, le=4096)
    """Scale numerator of the adapter."""

    @model_validator(mode="after")
    def _group_is_even(self) -> Self:
        if self.group_size % 2:
            raise ValueError(
                f"group_size = {self.group_size}: must be even: half the seeds are the best, half the worst"
            )
        if self.optimizer_steps > self.prompts_per_iteration:
            raise ValueError(
                f"optimizer_steps = {self.optimizer_steps}: must be <= prompts_per_iteration = {self.prompts_per_iteration}"
            )
        return self


class CalibratedSteps(Frozen):
    """One threshold of the step cache, as profiled."""

    effective_steps: int = Field(ge=1, le=200)
    """Full forwards a sample, on average."""
    cache_threshold: float = Field(ge=0, allow_inf_nan=False)
    """Threshold of the step cache; 0: none."""
    accuracy: float = Field(ge=-1, le=1)
    """Rank correlation within prompts with the rewards of full rollouts."""
    step_cost: float = Field(1.0, gt=0, le=1e6, allow_inf_nan=False)
    """GPU-seconds of one effective step, everything included, in those of a step without a cache."""


RESOLUTION_MIN: Final = 8
RESOLUTION_MAX: Final = 8192
"""Height and width in pixels."""


class CalibratedLatency(Frozen):
    """How long one denoising step without a cache takes."""

    resolution: int = Field(ge=RESOLUTION_MIN, le=RESOLUTION_MAX)
    """Height and width in pixels."""
    batch: int = Field(ge=1, le=1024)
    """Samples denoised together."""
    degree: int = Field(1, ge=1, le=64)
    """GPUs that share each sample (sequence parallelism)."""
    latency_s: float = Field(gt=0, allow_inf_nan=False)
    """Seconds of the step."""

    @property
    def step_s(self) -> float:
        """t_step, GPU-seconds a sample-step: degree * latency / batch."""
        return self.degree * self.latency_s / self.batch


class CalibrationConfig(Frozen):
    """What `workflows/calibrate.py` found for one model, dataset, resolution and hardware (paper §4.3.1, §6.8)."""

    model_digest: str = ""
    """Digest of the model that was profiled; empty: any."""
    dataset: DatasetName = DatasetName.GENEVAL
    """Prompt set and reward that were profiled."""
    resolution: int = Field(ge=RESOLUTION_MIN, le=RESOLUTION_MAX)
    """Height and width in pixels that were profiled."""
    num_steps: int = Field(ge=2, le=200)
    """Denoising steps that were profiled."""
    sampling: SamplingConfig | None = None
    """SDE, noise level and windows that were profiled: what candidates are worth to rank depends on them; none: any."""
    hardware: str = ""
    """What it was profiled on, in words."""
    step_s: float = Field(gt=0, le=1e6, allow_inf_nan=False)
    """GPU-seconds a sample-step without a cache, until a run has measured its own."""
    train_s: float = Field(0.0, ge=0, le=1e8, allow_inf_nan=False)
    """Seconds of one training step, until a run has measured its own; 0: unknown."""
    train_samples: int = Field(0, ge=0)
    """Samples that a training step of `train_s` trains on: a run with other prompts or groups takes its share; 0: as many as the run."""
    polynomial: tuple[float, ...] = Field((1.0, 0.0), min_length=1, max_length=8)
    """Polynomial of the step cache that the thresholds belong to, the highest power first."""
    last_full: bool = True
    """Whether the last denoising step takes a forward whatever changed; it moves a sample little where it ends at a low noise level."""
    rows: tuple[CalibratedSteps, ...] = Field(min_length=1, max_length=200)
    """What the thresholds leave, one row a step count."""
    latencies: tuple[CalibratedLatency, ...] = Field((), max_length=1000)
    """Denoising steps as profiled, by resolution, batch and degree; `step_s` is that of a whole sample in the run's own batches."""

    @model_validator(mode="after")
    def _ends_without_a_cache(self) -> Self:
        steps = [row.effective_steps for row in self.rows]
        if len(set(steps)) < len(steps):
            raise ValueError(f"effective_steps = {sorted(steps)}: must be distinct")
        if max(steps) != self.num_steps:
            raise ValueError(f"effective_steps = {max(steps)}: the most must be num_steps = {self.num_steps}")
        if self.sampling is not None and self.sampling.num_steps != self.num_steps:
            raise ValueError(f"sampling.num_steps = {self.sampling.num_steps}: must be num_steps = {self.num_steps}")
        return self


SEQUENCES_MAX: Final = 32
"""Candidates a prompt: more of them hardly raise the deviation of the best and the worst (paper §6.8)."""


class ExplorationConfig(Frozen):
    """Where the seeds of a rollout come from (paper §4.3)."""

    mode: Literal["bandit", "best_of_n", "prescreen", "none"] = "bandit"
    """Strategy: a bandit's action with the weights before beside training; after it max_sequences full candidates, or as many cheap ones;
    or default seeds."""
    leftovers: Literal["pinned", "latest", "drop"] = "pinned"
    """What a sample that had not begun when training ended is drawn with: the policy that the exploration began with, the new one (paper
    §4.3.4), or not at all."""
    max_sequences: int = Field(24, ge=2, le=SEQUENCES_MAX)
    """Upper bound of d, candidates a prompt."""
    fill_sequences: int = Field(0, ge=0, le=SEQUENCES_MAX)
    """Candidates a prompt up to which the bandit's spot slots go on, while training lasts, once its action is carried out; 0: they idle."""
    unexplored_prompts: int = Field(4, ge=1)
    """Prompts an iteration that keep default seeds, as the bandit's reference (paper §4.3.2)."""
    beta: float = Field(0.5, ge=0)
    """UCB exploration coefficient β."""
    window: int = Field(2, ge=1, le=10_000)
    """Sliding window W_b of observations an arm: with a dozen arms all bonuses are equal after 12 W_b iterations, and means decide."""
    calibrated_train_s: float = Field(0.0, ge=0, le=1e8)
    """T_train of the first iteration in seconds, before one was measured; 0: the calibration's."""
    target_accuracy: float = Field(0.8, ge=-1, le=1)
    """Accuracy that a calibrated step count must reach to be tried (paper §6.8)."""
    calibration: CalibrationConfig | None = None
    """How far the step cache may go; none: what ships with the model, where there is any and it fits, else exploration caches nothing."""


class EvaluationConfig(Frozen):
    """Held-out validation."""

    pairs: int = Field(256, ge=1, le=100_000)
    """Fixed (prompt, seed) pairs; the same before, during and after training."""
    every: int = Field(4, ge=0, le=100_000)
    """Evaluate every so many iterations; 0: only before and after."""


class ClusterConfig(Frozen):
    """The embedded cluster, and the runtime's patience."""

    spot_nodes: int = Field(2, ge=0, le=64)
    """Spot nodes of the embedded cluster."""
    slots_per_spot_node: int = Field(1, ge=1, le=64)
    """Worker slots a spot node."""
    pin_cores: bool = True
    """Reserved processes on one core, spot workers on another (where there are two)."""
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    """torch device of workers and trainer."""
    threads: int = Field(1, ge=1, le=512)
    """Threads of each worker and of the trainer."""
    trainer_ranks: int = Field(1, ge=1, le=64)
    """Processes that the trainer's model is sharded over (FSDP2), one a GPU of the reserved node."""
    max_batch: int = Field(8, ge=1, le=1024)
    """Requests that one worker denoises together."""
    reward_threads: int = Field(2, ge=1, le=256)
    """Images that the reward service judges at the same time; more where judging means waiting for a model elsewhere."""
    rewards: tuple[str, ...] = Field((), max_length=64)
    """Names of rewards that the service loads beside the embedded ones and those that the run's prompt rows name."""
    reward_deadline_s: float = Field(120.0, ge=1, le=3600)
    """A sample of which the reward service says nothing for so long goes back to the queue; after five times as long where it is busy."""
    rollout_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What workers load the model in and compute with; latents, noise and log-probs are fp32 in any case. Below float32 the trainer's
    probe decides whether the rollouts' log-probs can be used (`grpo.log_probs`)."""
    offload_alone: bool = False
    """A worker that denoises without a group keeps the transformer's blocks in host memory: slower, for a GPU that holds the weights and a
    rank's share of the activations but not all of these."""
    sleep: Literal["auto", "always", "never"] = "auto"
    """Weights of the reserved nodes' workers and of the trainer lie in host memory while the other side has the device; `auto`: on a GPU.
    On the CPU nothing moves, but what wakes up is checked all the same."""
    sequence_parallel_degree: int = Field(1, ge=1, le=64)
    """Slots of a node that denoise one batch together where it has so many, else the next lower degree; 1: each for itself."""
    standbys: int | None = Field(None, ge=0, le=64)
    """Processes that a node keeps in reserve, imported but without weights; None: one where the degree is above 1."""
    group_timeout_s: float = Field(10.0, ge=0.5, le=600)
    """Bound of joining a sequence-parallel group and of each of its collectives; a silent rank is found after it."""
    step_deadline_s: float = Field(60.0, ge=0.5, le=3600)
    """A worker that takes longer over one command is killed."""
    lease_s: float = Field(20.0, ge=0.5, le=3600)
    """A lease without a heartbeat for so long is lost."""
    heartbeat_s: float = Field(1.0, ge=0.05, le=600)
    """Time between a node's heartbeats."""
    max_attempts: int = Field(5, ge=1, le=100)
    """Tries of one request before it is FAILED."""
    start_deadline_s: float = Field(120.0, ge=1, le=3600)
    """A process of the cluster must be ready within this."""
    live_migration: bool = True
    """What a notice interrupts is committed and goes on elsewhere where it was; else it starts over."""
    commit_every_steps: int | None = Field(None, ge=0, le=200)
    """Background commit of in-flight latents every so many denoising steps; 0: only on a notice; none: as often as costs little."""
    trainer_deadline_s: float = Field(600.0, ge=5, le=86_400)
    """A trainer that is wanted and says nothing for so long is killed and started again."""
    stall_deadline_s: float = Field(1800.0, ge=10, le=604_800)
    """A job without any progress for so long has failed."""
    run_lease_s: float = Field(120.0, ge=5, le=86_400)
    """A run none of whose jobs was polled for so long is paused: what is under way goes on, nothing more begins until one is. If it has the
    trainer, it leaves it to other runs."""
    poll_deadline_s: float = Field(600.0, ge=10, le=86_400)
    """A job whose client has not polled for so long is cancelled."""

    @property
    def standbys_wanted(self) -> int:
        return int(self.sequence_parallel_degree > 1) if self.standbys is None else self.standbys

    def sleeps_on(self, device: str) -> bool:
        return self.sleep == "always" or (self.sleep == "auto" and device != "cpu")

    @model_validator(mode="after")
    def _lease_outlives_heartbeat(self) -> Self:
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(f"lease_s = {self.lease_s}: must be >= 2 * heartbeat_s = {2 * self.heartbeat_s}")
        return self


class TrainConfig(Frozen):
    """Everything about a run that is not a scalar of the command line."""

    sampling: SamplingConfig = SamplingConfig()
    grpo: GrpoConfig = GrpoConfig()
    exploration: ExplorationConfig = ExplorationConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    cluster: ClusterConfig = ClusterConfig()
    deterministic: bool = False
    """Denoise each sample alone and plan by calibrated times, so that the policy is bit-equal whatever is killed; slower."""
    lineage: str = Field("", pattern=r"^([a-z0-9][a-z0-9_-]{0,62})?$")
    """Names the runs among which `resume_from=latest` chooses; empty: the dataset's."""

    @model_validator(mode="after")
    def _some_prompts_are_unexplored(self) -> Self:
        mode = self.exploration.mode
        if self.grpo.advantage_normalisation == "unexplored" and mode in ("best_of_n", "prescreen"):
            raise ValueError(
                f"grpo.advantage_normalisation = 'unexplored': exploration.mode must be 'bandit' or 'none', {mode!r} explores every prompt"
            )
        return self

    @model_validator(mode="after")
    def _nothing_hangs_on_the_clock(self) -> Self:
        if self.deterministic and self.exploration.leftovers != "pinned":
            raise ValueError(
                f"exploration.leftovers = {self.exploration.leftovers!r}: must be 'pinned' where deterministic"
            )
        if self.deterministic and self.exploration.fill_sequences:
            raise ValueError(
                f"exploration.fill_sequences = {self.exploration.fill_sequences}: must be 0 where deterministic"
            )
        return self


class RunSettings(Frozen):
    """One run as every daemon sees it: made once by the first task, carried in State and in every job."""

    run_id: str = Field(pattern=r"^[a-z0-9][a-z0-9-]{2,62}$")
    """Names the run's keys in the tensor store."""
    dataset: DatasetName = DatasetName.GENEVAL
    """Prompt set and reward."""
    iterations: int = Field(ge=1, le=100_000)
    """GRPO iterations."""
    resolution: int = Field(ge=RESOLUTION_MIN, le=RESOLUTION_MAX)
    """Height and width in pixels."""
    seed: int = Field(0, ge=0, lt=2**31)
    """The only entropy of the run."""
    model: str
    """Pipeline folder or hub id; already checked."""
    model_digest: str = ""
    """Digest of the model's configuration, part of every embedding key."""
    store: str
    """URL of the tensor store."""
    train_prompts_key: str
    """Store key of the training rows (JSON lines)."""
    validation_prompts_key: str
    """Store key of the validation rows (JSON lines)."""
    target_score: float = Field(0.0, ge=0, le=1)
    """Share of correct validation pairs that ends the run early; 0: none."""
    config: TrainConfig = TrainConfig()
    """Everything else."""

    @property
    def lineage(self) -> str:
        """Whose last checkpoint `resume_from=latest` takes."""
        return self.config.lineage or self.dataset.value

    def evaluates_at(self, iteration: int) -> bool:
        """Whether the policy that `iteration` starts with is validated: the base, every n-th, and the final one."""
        every = self.config.evaluation.every
        return iteration in (0, self.iterations) or (every > 0 and iteration % every == 0)
