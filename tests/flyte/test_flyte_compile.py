"""What reaches a Flyte cluster: everything serialises, work beside each other has no edge between, and a long run stays small."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
from flytekit import FlyteContextManager
from flytekit.configuration import FastSerializationSettings, ImageConfig, SerializationSettings
from flytekit.core.context_manager import ExecutionState
from flytekit.core.type_engine import TypeEngine
from flytekit.models.dynamic_job import DynamicJobSpec
from flytekit.models.literals import LiteralMap
from flytekit.tools.translator import get_serializable

from launchplans.nightly import nightly
from spot_runtime.config import RunSettings, TrainConfig
from tasks.daemon_task import evaluate, explore, rollout, train_step
from tasks.models import Score, State
from workflows.dit_grpo import CHUNKS, grpo_iteration, grpo_loop, train

SETTINGS = SerializationSettings(
    project="p",
    domain="development",
    version="v1",
    image_config=ImageConfig.auto(img_name="example/spotlight:1"),
    env={},
    fast_serialization_settings=FastSerializationSettings(
        enabled=True, destination_dir="/root", distribution_location="s3://bucket/code.tar.gz"
    ),
)
NODES_MAX_BYTES = 2_000_000
"""flytepropeller's default limit of a workflow is 2 MB in etcd."""


def state(iteration: int = 0, iterations: int = 12, target_score: float = 0.0, **config: Any) -> State:
    settings = RunSettings(
        run_id="run-1",
        iterations=iterations,
        resolution=64,
        model="tiny",
        store="s3://bucket/store",
        train_prompts_key="rows",
        validation_prompts_key="rows",
        target_score=target_score,
        config=TrainConfig.parse(config),
    )
    return State(run_id="run-1", settings_json=settings.model_dump_json(), iterations=iterations, iteration=iteration)


def compiled(dynamic: Any, value: State) -> DynamicJobSpec | LiteralMap:
    """A dynamic as its container compiles it; a container does so once, and flytekit remembers it."""
    dynamic._wf = None
    context = FlyteContextManager.current_context().with_serialization_settings(SETTINGS)
    with FlyteContextManager.with_context(context) as outer:
        inside = outer.new_execution_state().with_params(mode=ExecutionState.Mode.TASK_EXECUTION)
        with FlyteContextManager.with_context(outer.with_execution_state(inside)) as inner:
            literals = TypeEngine.dict_to_literal_map(inner, {"state": value}, type_hints={"state": State})
            return dynamic.dispatch_execute(inner, literals)


def edges(spec: DynamicJobSpec) -> dict[str, set[str]]:
    """What each node waits for, by task name."""
    names = {node.id: node.task_node.reference_id.name for node in spec.nodes}
    found: dict[str, set[str]] = {}
    for node in spec.nodes:
        before = set(node.upstream_node_ids)
        before |= {binding.binding.promise.node_id for binding in node.inputs if binding.binding.promise}
        found[names[node.id]] = {names[name] for name in before if name in names}
    return found


def test_the_parts_of_an_iteration_are_parallel_nodes() -> None:
    spec = compiled(grpo_iteration, state())
    assert edges(spec) == {
        "spotlight.rollout": set(),
        "spotlight.evaluate": set(),
        "spotlight.train_step": {"spotlight.rollout"},
        "spotlight.explore": {"spotlight.rollout"},
        "tasks.select_seeds.select_seeds": {
            "spotlight.rollout",
            "spotlight.train_step",
            "spotlight.explore",
            "spotlight.evaluate",
        },
    }


def test_an_iteration_starts_one_pod_beside_its_own() -> None:
    spec = compiled(grpo_iteration, state())
    pods = {template.id.name for template in spec.tasks if template.container is not None}
    assert pods == {"tasks.select_seeds.select_seeds"}
    jobs = {template.id.name: template for template in spec.tasks if template.container is None}
    assert {name: job.custom["op"] for name, job in jobs.items()} == {
        "spotlight.rollout": "rollout",
        "spotlight.train_step": "train_step",
        "spotlight.explore": "explore",
        "spotlight.evaluate": "evaluate",
    }
    assert jobs["spotlight.train_step"].custom["pool"] == "reserved"
    assert jobs["spotlight.explore"].custom["pool"] == "spot"
    assert {job.type for job in jobs.values()} == {"spotlight_job"}
    assert {job.metadata.retries.retries for job in jobs.values()} == {3}


@pytest.mark.parametrize(("iteration", "due"), [(0, True), (1, False), (4, False), (5, True), (10, True)])
def test_validation_is_a_node_only_when_due(iteration: int, due: bool) -> None:
    spec = compiled(grpo_iteration, state(iteration, evaluation={"every": 5}))
    assert ("spotlight.evaluate" in edges(spec)) is due


@pytest.mark.parametrize("mode", ["best_of_n", "prescreen"])
def test_a_strategy_on_the_critical_path_waits_for_training(mode: str) -> None:
    found = edges(compiled(grpo_iteration, state(exploration={"mode": mode})))
    assert found["spotlight.explore"] == {"spotlight.rollout", "spotlight.train_step"}
    assert found["spotlight.train_step"] == {"spotlight.rollout"}


def test_without_exploration_there_is_no_node_for_it() -> None:
    spec = compiled(grpo_iteration, state(exploration={"mode": "none"}))
    assert "spotlight.explore" not in edges(spec)


def test_a_run_that_reached_its_target_is_no_node_more() -> None:
    score = Score(iteration=1, policy_version=1, pairs=4, correct=0.75, reward_mean=0.5, manifest_key="m")
    asked = {"pairs": 4}
    reached = state(2, target_score=0.75, evaluation=asked).model_copy(update={"scores": [score]})
    for dynamic in (grpo_iteration, grpo_loop):
        assert isinstance(compiled(dynamic, reached), LiteralMap)
    short = state(2, target_score=0.8, evaluation=asked).model_copy(update={"scores": [score]})
    assert isinstance(compiled(grpo_loop, short), DynamicJobSpec)


@pytest.mark.parametrize(
    ("iteration", "iterations", "nodes"), [(0, 12, 2), (11, 12, 1), (0, 500, 63), (441, 500, 59), (0, 1, 1)]
)
def test_a_loop_is_one_chunk_of_iterations_in_a_row(iteration: int, iterations: int, nodes: int) -> None:
    spec = compiled(grpo_loop, state(iteration, iterations))
    assert [node.task_node.reference_id.name for node in spec.nodes] == ["workflows.dit_grpo.grpo_iteration"] * nodes
    before = [
        {binding.binding.promise.node_id for binding in node.inputs if binding.binding.promise} for node in spec.nodes
    ]
    assert before == [set(), *({node.id} for node in spec.nodes[:-1])]


@pytest.mark.parametrize("iterations", [1, 7, 8, 12, 30])
def test_the_chunks_cover_every_iteration(iterations: int) -> None:
    done = 0
    for _ in range(CHUNKS):
        spec = compiled(grpo_loop, state(done, iterations))
        done += len(spec.nodes) if isinstance(spec, DynamicJobSpec) else 0
    assert done == iterations


def test_a_loop_that_is_over_makes_no_node_and_hands_its_state_on() -> None:
    literals = compiled(grpo_loop, state(12, 12))
    assert isinstance(literals, LiteralMap)
    context = FlyteContextManager.current_context()
    assert TypeEngine.to_python_value(context, literals.literals["o0"], State) == state(12, 12)


def test_500_iterations_compile_to_less_than_a_workflow_may_have() -> None:
    spec = compiled(grpo_loop, state(0, 500))
    assert len(spec.to_flyte_idl().SerializeToString()) < NODES_MAX_BYTES / 20
    iteration = compiled(grpo_iteration, state(250, 500))
    assert len(iteration.to_flyte_idl().SerializeToString()) < NODES_MAX_BYTES / 20


def test_the_state_of_a_long_run_stays_small() -> None:
    score = {
        "iteration": 100,
        "policy_version": 100,
        "pairs": 256,
        "correct": 0.5,
        "reward_mean": 0.5,
        "manifest_key": "runs/geneval-20260101-000000-abcd/manifests/evaluate-100-0123456789abcdef.json",
    }
    late = State.model_validate({**state(499, 500).model_dump(), "scores": [score] * 100})
    assert len(late.model_dump_json()) < 32 * 1024


def test_the_workflow_its_tasks_and_the_launch_plan_serialise() -> None:
    entities: OrderedDict[Any, Any] = OrderedDict()
    plan = get_serializable(entities, SETTINGS, nightly)
    workflow = get_serializable(entities, SETTINGS, train)
    inputs = workflow.template.interface.inputs
    assert list(inputs) == [
        "dataset",
        "resolution",
        "iterations",
        "system",
        "model",
        "prompts",
        "reward",
        "store",
        "exploration",
        "spot_trace",
        "seed",
        "resume_from",
        "cfg",
        "target_score",
    ]
    assert inputs["dataset"].type.enum_type.values == ["geneval", "deepseek_ocr"]
    assert list(workflow.template.interface.outputs) == ["summary", "report", "seed_bank", "state"]
    columns = workflow.template.interface.outputs["seed_bank"].type.structured_dataset_type.columns
    assert [column.name for column in columns][:4] == ["iteration", "prompt_id", "prompt", "seed"]
    assert plan.spec.entity_metadata.schedule.cron_schedule.schedule == "0 2 * * *"
    assert list(plan.spec.fixed_inputs.literals) == ["dataset"]
    given = plan.spec.default_inputs.parameters
    assert {name for name in inputs if name not in given} == {"dataset"}
    assert given["store"].default.scalar.primitive.string_value.startswith("s3://")
    assert all(get_serializable(entities, SETTINGS, job).template for job in (rollout, train_step, explore, evaluate))


def test_the_workflow_runs_its_chunks_between_start_and_finish() -> None:
    nodes = get_serializable(OrderedDict(), SETTINGS, train).template.nodes
    names = [node.task_node.reference_id.name.rsplit(".", 1)[-1] for node in nodes]
    assert names == ["start_run", *["grpo_loop"] * CHUNKS, "evaluate", "finish_run"]


def test_container_tasks_load_in_a_pod_by_module_and_name() -> None:
    spec = compiled(grpo_iteration, state())
    args = next(template.container.args for template in spec.tasks if template.container is not None)
    assert args[-4:] == ["task-module", "tasks.select_seeds", "task-name", "select_seeds"]
    loop = compiled(grpo_loop, state())
    assert loop.tasks[0].container.args[-4:] == ["task-module", "workflows.dit_grpo", "task-name", "grpo_iteration"]
