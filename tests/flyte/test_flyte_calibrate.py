"""Calibrations: which one a run takes, and the workflow that makes one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from diskcache import Cache
from flytekit.core.local_cache import LocalTaskCache

from spot_runtime.config import CalibratedSteps, CalibrationConfig, DatasetName, SamplingConfig, TrainConfig
from spot_runtime.diffusion.geometry import check_model
from spot_runtime.errors import InputError
from spot_runtime.planner import Calibration, CalibrationRow, arms
from spot_runtime.rewards.prompts import prompt_id, shapes_rows
from spot_runtime.scheduler.expansion import default_seed, sde_window
from spot_runtime.types import Op
from tasks import calibration_profile
from tasks.calibration import calibration_file, read_calibration, shipped_calibration, with_calibration
from tasks.calibration_profile import exploration_requests, order_profile
from tasks.changes import read_changes
from workflows.calibrate import calibrate

CHECKED = check_model("tiny")
SMALL = {"grpo": {"group_size": 2, "prompts_per_iteration": 2, "optimizer_steps": 1}, "sampling": {"num_steps": 6}}
TWO_STEPS = SMALL | {"sampling": {"num_steps": 2, "sde_window_stop": 1, "sde_window_size": 1}}
MADE = CalibrationConfig(
    model_digest=CHECKED.digest,
    resolution=64,
    num_steps=10,
    step_s=0.01,
    rows=(CalibratedSteps(effective_steps=10, cache_threshold=0.0, accuracy=1.0),),
)


@pytest.fixture
def found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """flytekit's local cache, empty and apart from the user's."""
    with Cache(str(tmp_path / "cache")) as cache:
        monkeypatch.setattr(LocalTaskCache, "_cache", cache, raising=False)
        monkeypatch.setattr(LocalTaskCache, "_initialized", True)
        yield


def taken(
    cfg: dict[str, Any], model: str = "tiny", dataset: DatasetName = DatasetName.GENEVAL
) -> CalibrationConfig | None:
    config = TrainConfig.parse(cfg)
    return with_calibration(config, model, CHECKED, dataset, 0).exploration.calibration


# ---- which one a run takes --------------------------------------------------------------------------------------------------------


def test_a_deterministic_run_without_a_calibration_that_fits_is_refused_before_it_starts() -> None:
    """It plans by calibrated times alone; measured ones differ from run to run."""
    reason = r"deterministic = True: exploration plans by calibrated times, a calibration must be given in cfg"
    with pytest.raises(InputError, match=f"{reason}: none ships with this model"):
        taken({"deterministic": True}, model="other/model")
    with pytest.raises(InputError, match=f"{reason}: num_steps = 10: must be this run's 6"):
        taken({"deterministic": True, **SMALL})
    assert taken({"deterministic": True, "exploration": {"mode": "none"}}, model="other/model") is None
    assert taken({"deterministic": True}) == taken({})


@pytest.mark.parametrize("mode", ["best_of_n", "prescreen"])
def test_a_strategy_with_nothing_to_choose_from_is_refused_before_the_run_starts(mode: str) -> None:
    line = f"exploration = {mode}: exploration.max_sequences = 12: must be > grpo.group_size = 12"
    with pytest.raises(InputError, match=line):
        taken({"exploration": {"mode": mode, "max_sequences": 12}})
    assert taken({"exploration": {"max_sequences": 12}}) is not None  # the bandit idles, and says so each time


def test_the_shipped_calibration_is_of_the_shipped_model() -> None:
    """After a new tiny base, or other defaults, it has to be made again: `pyflyte run workflows/calibrate.py calibrate`."""
    shipped = taken({})
    assert shipped is not None
    assert shipped == shipped_calibration("tiny")
    assert shipped.model_digest == CHECKED.digest
    assert shipped.sampling == SamplingConfig()
    grpo = TrainConfig().grpo
    assert shipped.train_samples == grpo.prompts_per_iteration * grpo.group_size


def test_with_the_shipped_calibration_a_fifth_of_the_cost_can_be_saved() -> None:
    shipped = taken({})
    assert shipped is not None
    rows = tuple(CalibrationRow(r.effective_steps, r.cache_threshold, r.accuracy, r.step_cost) for r in shipped.rows)
    space = arms(12, 32, Calibration(shipped.step_s, rows, shipped.train_s))
    assert len(space) == 12
    assert {arm.sequences for arm in space} == {17, 22, 27, 32}
    assert min(arm.steps_per_prompt for arm in space) <= 17 * 10 * 0.8


@pytest.mark.parametrize(
    ("cfg", "dataset"),
    [
        ({"sampling": {"num_steps": 12}}, DatasetName.GENEVAL),
        ({}, DatasetName.DEEPSEEK_OCR),
        ({"exploration": {"mode": "none"}}, DatasetName.GENEVAL),
    ],
)
def test_a_run_that_it_was_not_made_for_goes_without(cfg: dict[str, Any], dataset: DatasetName) -> None:
    assert taken(cfg, dataset=dataset) is None


@pytest.mark.parametrize("sampling", [{"sde_window_size": 4}, {"noise_level": 0.1}, {"noise_level": 0.9, "sde": "cps"}])
def test_the_shipped_one_is_left_out_under_other_noise(sampling: dict[str, Any]) -> None:
    assert taken({"sampling": sampling}) is None


def test_no_other_model_has_one() -> None:
    assert taken({}, model="/models/other") is None


def test_the_users_calibration_goes_before_the_shipped_one() -> None:
    assert taken({"exploration": {"calibration": MADE.model_dump(mode="json")}}) == MADE


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (
            {"model_digest": "f" * 64},
            f"cfg.exploration.calibration.model_digest = {'f' * 64}: must be this run's {CHECKED.digest}",
        ),
        ({"dataset": "deepseek_ocr"}, "cfg.exploration.calibration.dataset = deepseek_ocr: must be this run's geneval"),
        ({"resolution": 128}, "cfg.exploration.calibration.resolution = 128: must be this run's 64"),
    ],
)
def test_a_calibration_made_for_another_run_is_refused(change: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        taken({"exploration": {"calibration": MADE.model_dump(mode="json") | change}})
    assert str(caught.value) == line


def test_other_denoising_steps_are_refused() -> None:
    cfg = {"exploration": {"calibration": MADE.model_dump(mode="json")}, "sampling": {"num_steps": 12}}
    with pytest.raises(InputError, match=r"calibration.num_steps = 10: must be this run's 12"):
        taken(cfg)


@pytest.mark.parametrize(
    ("sampling", "line"),
    [
        ({"sde_window_size": 4}, "sampling.sde_window_size = 5: must be this run's 4"),
        ({"sde_window_stop": 6}, "sampling.sde_window_stop = 5: must be this run's 6"),
        ({"noise_level": 0.5}, "sampling.noise_level = 0.7: must be this run's 0.5"),
        ({"sde": "cps"}, "sampling.sde = sde: must be this run's cps"),
    ],
)
def test_a_calibration_under_other_noise_is_refused(sampling: dict[str, Any], line: str) -> None:
    made = MADE.model_copy(update={"sampling": SamplingConfig()})
    with pytest.raises(InputError) as caught:
        taken({"exploration": {"calibration": made.model_dump(mode="json")}, "sampling": sampling})
    assert str(caught.value) == f"cfg.exploration.calibration.{line}"


def test_one_that_names_no_sampling_is_of_any() -> None:
    cfg = {"exploration": {"calibration": MADE.model_dump(mode="json")}, "sampling": {"noise_level": 0.5}}
    assert taken(cfg) == MADE


def test_without_a_digest_it_is_of_any_model() -> None:
    any_model = MADE.model_copy(update={"model_digest": ""})
    assert taken({"exploration": {"calibration": any_model.model_dump(mode="json")}}) == any_model


def test_its_file_is_configuration_of_a_run() -> None:
    data = calibration_file(MADE)
    assert read_calibration(data) == MADE
    assert TrainConfig.parse(json.loads(data)).exploration.calibration == MADE


def test_its_file_is_taken_by_a_run_whatever_was_profiled() -> None:
    """`calibrate --cfg PRESET`, then `train --cfg calibration.json`."""
    sampling = SamplingConfig(num_steps=6, noise_level=0.9, sde_window_size=2)
    rows = (CalibratedSteps(effective_steps=6, cache_threshold=0.0, accuracy=1.0),)
    made = MADE.model_copy(update={"sampling": sampling, "num_steps": 6, "rows": rows})
    data = calibration_file(made)
    assert read_calibration(data) == made
    assert taken(json.loads(data)) == made


# ---- making one -------------------------------------------------------------------------------------------------------------------


def order(**change: Any) -> calibration_profile.ProfileOrder:
    asked: dict[str, Any] = {
        "dataset": DatasetName.GENEVAL,
        "resolution": 0,
        "model": "tiny",
        "prompts": "",
        "reward": "",
        "prompts_profiled": 3,
        "sequences": 4,
        "last_full": False,
        "resolutions": [],
        "degrees": [1],
        "hardware": "a computer",
        "seed": 5,
        "cfg": SMALL,
    }
    asked |= change
    return order_profile.task_function(**(asked | {"cfg": read_changes(asked["cfg"])}))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"sequences": 1}, "sequences = 1: must be >= grpo.group_size = 2 and <= 32"),
        ({"sequences": 33}, "sequences = 33: must be >= grpo.group_size = 2 and <= 32"),
        ({"resolution": 16384}, r"resolution = 16384: must be within 8\.\.8192"),
        ({"resolutions": [2**20]}, r"resolution = 1048576: must be within 8\.\.8192"),
        ({"seed": -1}, "seed = -1: Input should be greater than or equal to 0"),
        ({"cfg": TWO_STEPS}, r"cfg\.sampling\.num_steps = 2: must be >= 3"),
        ({"prompts_profiled": 0}, r"prompts_profiled = 0: must be within 1\.\.384, the rows there are"),
        ({"cfg": {"grpo": {"group_size": 3}}}, "cfg.grpo.group_size = 3: must be even"),
        ({"resolutions": [7]}, "resolution = 7: must be"),
        ({"degrees": [3]}, "sequence_parallel_degree = 3: must divide the 4 attention heads of the model"),
        ({"reward": "beauty"}, "reward = 'beauty': must be one of"),
    ],
)
def test_what_cannot_be_profiled_is_named_in_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        order(**change)
    assert "\n" not in str(caught.value)


def test_a_profile_runs_as_the_workers_of_the_cluster_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**SMALL, "cluster": {"device": "cpu", "threads": 3, "rollout_dtype": "bfloat16"}}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # but the cluster's device goes first
    made = order(cfg=asked, hardware="")
    assert (made.device, made.hardware.rpartition(", ")[2]) == ("cpu", "3 threads")
    told: dict[str, Any] = {}

    class Told(Exception):
        pass

    def profiler(model: str, embeds: object, **how: Any) -> None:
        told.update(how)
        raise Told

    monkeypatch.setattr("spot_runtime.diffusion.calibration.Profiler", profiler)
    with pytest.raises(Told):
        calibration_profile.find(made)
    assert told == {"batch": 8, "device": "cpu", "threads": 3, "dtype": "bfloat16"}


def test_hardware_that_is_not_here_must_be_named() -> None:
    far = {**SMALL, "cluster": {"device": "cuda"}}
    with pytest.raises(
        InputError, match="hardware = '': must be given where the machine that checks the inputs has no cuda"
    ):
        order(cfg=far, degrees=[], hardware="")
    made = order(cfg=far, degrees=[])
    assert (made.device, made.hardware) == ("cuda", "a computer")


def test_requests_are_those_of_an_exploration() -> None:
    made = order()
    requests = exploration_requests(made)
    ids = [prompt_id(row) for row in shapes_rows(5, 3, "train")]
    assert {request.prompt_id for request in requests} == set(ids)
    assert len(requests) == 3 * 4
    for request in requests:
        assert (request.op, request.params.num_steps, request.params.cache_threshold) == (Op.EXPLORE, 6, 0.0)
        assert request.sde_window == sde_window(made.settings, 1, request.prompt_id)
    seeds = [request.seed for request in requests if request.prompt_id == ids[0]]
    assert seeds == [default_seed(5, 1, ids[0], index) for index in range(4)]


def test_two_degrees_are_timed_where_there_are_as_many_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2})
    assert order(degrees=[]).degrees == [1, 2]
    assert order(degrees=[2]).degrees == [1, 2]
    with pytest.raises(InputError, match="degrees = 4: must be <= 3, the devices of this machine"):
        order(degrees=[4])
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    assert order(degrees=[]).degrees == [1]


def test_an_order_is_the_same_where_all_that_matters_is() -> None:
    """It is what Flyte finds an earlier profile by."""
    assert order() == order()
    assert (
        len({order(**change).model_dump_json() for change in ({}, {"hardware": "b"}, {"seed": 6}, {"last_full": True})})
        == 4
    )


@pytest.mark.timeout(600)
def test_the_workflow_leaves_a_file_that_train_takes_and_profiles_once(
    found_again: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    profiled: list[calibration_profile.ProfileOrder] = []
    find = calibration_profile.find
    monkeypatch.setattr(calibration_profile, "find", lambda order: profiled.append(order) or find(order))
    asked = {
        "prompts_profiled": 4,
        "sequences": 4,
        "cfg": SMALL,
        "hardware": "a computer",
        "resolutions": [32],
        "degrees": [1],
    }
    outputs = calibrate(**asked)
    made = read_calibration((tmp_path / "calibration.json").read_bytes())
    assert made.rows[-1] == CalibratedSteps(effective_steps=6, cache_threshold=0.0, accuracy=1.0)
    assert [row.effective_steps for row in made.rows] == sorted({row.effective_steps for row in made.rows})
    assert 2 <= len(made.rows) <= 6
    assert (made.model_digest, made.num_steps, made.hardware) == (CHECKED.digest, 6, "a computer")
    assert made.step_s > 0
    assert made.train_s > 0
    assert made.sampling is not None
    assert made.sampling.num_steps == 6
    assert made.train_samples == 2 * 2
    assert [(row.resolution, row.batch, row.degree) for row in made.latencies] == [
        (resolution, batch, 1) for resolution in (64, 32) for batch in (1, 2, 4, 8)
    ]
    assert all(row.step_s == row.degree * row.latency_s / row.batch for row in made.latencies)
    assert "accuracy by effective steps" in outputs.summary
    (tmp_path / "calibration.json").unlink()
    assert calibrate(**asked).summary == outputs.summary
    assert read_calibration((tmp_path / "calibration.json").read_bytes()) == made
    assert len(profiled) == 1
    config = TrainConfig.parse(json.loads((tmp_path / "calibration.json").read_bytes()))
    assert with_calibration(config, "tiny", CHECKED, DatasetName.GENEVAL, 0) == config
