"""ManiSkill's Python once for several environments: bit for bit what each environment gives by itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.utils.registration import REGISTERED_ENVS, register_env
from mani_skill.utils.structs.pose import Pose

from sim_farm.backends.maniskill.row_checks import ARITHMETIC, FEW, OVER, RowChecks, by_rows, result
from sim_farm.backends.maniskill.tasks import INSTRUCTIONS
from sim_farm.backends.maniskill.together import CHECKED
from sim_farm.client.farm import Farm
from sim_farm.conformance.checks import close_kept, name_of, random_actions
from sim_farm.conformance.physics_laws import batch_equals_single_environments
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.registry import make_batch, make_physics
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import Trace, actions_for, assert_same, drive, run
from tests.sim_farm.test_maniskill import EVERY, spec_of
from tests.sim_farm.test_workers import collect, processes, request, until
from tests.variants import often

ROOT = Path(__file__).resolve().parents[2]
OFTEN = ("PickCubeSO100", "PushRedCube", "RollBall", "TwoRobotPickCube")
"""Others than PushCube, which test_maniskill has: an own robot, an own task, one without a cube, two robots."""
ALONE = {
    "DrawSVG-v1": "DrawSVGEnv._after_control_step acts on one environment",
    "DrawTriangle-v1": "DrawTriangleEnv._after_control_step acts on one environment",
    "PushT-v1": "torch's `matmul` of matrices of more than 4 may round differently in a batch",
}
"""Tasks whose Python is not shared, and why."""
BLIND = tuple(replace(spec, cameras=0) for spec in EVERY)
PUSH = replace(spec_of("PushCube-v1"), cameras=0, max_episode_steps=9)

each_task = pytest.mark.parametrize(
    "spec", often([spec for spec in BLIND if spec.name.split("/")[1][:-3] in OFTEN], BLIND), ids=name_of
)


@each_task
def test_a_batch_equals_single_environments(spec: TaskSpec) -> None:
    batch_equals_single_environments(spec)
    close_kept()


def reason(spec: TaskSpec) -> str:
    """Why environments of the task do not share their Python, after more env steps than are computed both ways."""
    with ExitStack() as stack:
        physics = [stack.enter_context(closing(make_physics(spec))) for _ in range(2)]
        batch = make_batch(spec, physics)
        for seed, each in enumerate(physics):
            each.reset(EpisodeSpec(seed))
        batch.step([0, 1], np.stack([random_actions(physics[0].info, CHECKED + 3)] * 2))
        return batch.alone


@pytest.mark.slow
@pytest.mark.parametrize("task", INSTRUCTIONS)
def test_which_tasks_share_their_python(task: str) -> None:
    assert reason(replace(spec_of(task), cameras=0)) == ALONE.get(task, "")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("pd_joint_pos", "pd_joint_target_delta_pos", "pd_joint_vel", "pd_ee_delta_pose"))
def test_a_batch_equals_single_environments_in_other_control_modes(mode: str) -> None:
    batch_equals_single_environments(TaskSpec("maniskill/PickCube-v1", control_mode=mode))
    close_kept()


def test_a_reason_names_the_method_whose_results_cannot_be_joined() -> None:
    """Inverse kinematics has no answer for an arm at its reach: ManiSkill's returns none, for that environment."""
    spec = TaskSpec("maniskill/PushCube-v1", control_mode="pd_ee_delta_pos", max_episode_steps=60)
    with ExitStack() as stack:
        physics = [stack.enter_context(closing(make_physics(spec))) for _ in range(2)]
        batch = make_batch(spec, physics)
        for each in physics:
            each.reset(EpisodeSpec(0))
        outward = np.zeros((50, physics[0].info.action_dim), np.float32)
        outward[:, :3] = 1.0
        batch.step([0, 1], np.stack([outward, np.zeros_like(outward)]))
        assert batch.alone == "what Kinematics.compute_ik returns is a NoneType or Tensor"


# --- tasks that were not written for a batch


class PushCubeOwn(PushCubeEnv):
    """The base of tasks whose rewards differ in a batch."""


class SharedReward(PushCubeOwn):
    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        return self.obj.pose.p[:, 0] - self.obj.pose.p[:, 0].mean()


class LogisticReward(PushCubeOwn):
    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        return self.obj.pose.p[:, 0].sigmoid()


class CountedReward(PushCubeOwn):
    def _initialize_episode(self, env_idx: torch.Tensor, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.nearest = float(self.obj.pose.p[0, 0])

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        self.nearest = min(self.nearest, float(self.agent.tcp.pose.p[0, 0]))
        return self.obj.pose.p[:, 0] - self.nearest


class BranchingReward(PushCubeOwn):
    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        near = self.agent.tcp.pose.p[:, 2] < 0.17
        return self.obj.pose.p[:, 0] * (0.5 if near.any() else 0.25)


class RememberingReward(PushCubeOwn):
    """Written for a batch: its reward depends on the step before."""

    def _initialize_episode(self, env_idx: torch.Tensor, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.before = self.obj.pose.p[:, 0]
        self.started = {"at": self.agent.tcp.pose.p}

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        before, self.before = self.before, self.agent.tcp.pose.p[:, 0]
        return self.before - before + self.started["at"][:, 1]


class KeepingReward(PushCubeOwn):
    """Written for a batch: its reward depends on earlier env steps, by a dictionary, a list and a number."""

    def _initialize_episode(self, env_idx: torch.Tensor, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.nearest = {"tcp": self.agent.tcp.pose.p[:, 0]}
        self.path = [self.agent.tcp.pose.p] * 3
        self.scale = torch.tensor(0.5)

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        at = self.agent.tcp.pose.p
        self.nearest["tcp"] = torch.minimum(self.nearest["tcp"], at[:, 0])
        self.path = [*self.path[1:], at]
        return self.scale * (self.nearest["tcp"] - self.path[0][:, 1])


class FollowingGoal(PushCubeOwn):
    def evaluate(self) -> dict[str, torch.Tensor]:
        self.goal_region.set_pose(Pose.create_from_pq(self.goal_region.pose.p + 0.01 * self.agent.tcp.pose.p))
        return super().evaluate()


class GrowingReward(PushCubeOwn):
    def _initialize_episode(self, env_idx: torch.Tensor, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.steps = np.zeros(1, np.float32)

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        self.steps += 1
        return self.obj.pose.p[:, 0] * float(self.steps[0])


class Counter:
    def __init__(self) -> None:
        self.count = 0

    def add(self) -> None:
        self.count += 1


class CounterReward(PushCubeOwn):
    def _initialize_episode(self, env_idx: torch.Tensor, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.counter = Counter()

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        self.counter.add()
        return self.obj.pose.p[:, 0] * self.counter.count


class NotedReward(PushCubeOwn):
    def _initialize_episode(self, env_idx: torch.Tensor, options: Any) -> None:
        super()._initialize_episode(env_idx, options)
        self.obj.highest = self.agent.tcp.pose.p[:, 2]

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: Any) -> torch.Tensor:
        self.obj.highest = self.obj.highest + self.agent.tcp.pose.p[:, 2]
        return self.obj.highest


OWN = {
    "PushCubeShared-v1": SharedReward,
    "PushCubeLogistic-v1": LogisticReward,
    "PushCubeCounted-v1": CountedReward,
    "PushCubeBranching-v1": BranchingReward,
    "PushCubeRemembering-v1": RememberingReward,
    "PushCubeKeeping-v1": KeepingReward,
    "PushCubeFollowing-v1": FollowingGoal,
    "PushCubeGrowing-v1": GrowingReward,
    "PushCubeCounter-v1": CounterReward,
    "PushCubeNoted-v1": NotedReward,
}


@pytest.fixture
def own_tasks() -> Iterator[None]:
    """Tasks that are registered in this process for one test: others list the tasks that there are."""
    for name, cls in OWN.items():
        register_env(name, max_episode_steps=9)(cls)
    yield
    for name in OWN:
        del REGISTERED_ENVS[name], gymnasium.registry[name]


@pytest.mark.usefixtures("own_tasks")
@pytest.mark.parametrize(
    ("task", "why"),
    [
        pytest.param("PushCubeShared-v1", "torch's `mean` is taken over all environments", marks=pytest.mark.slow),
        pytest.param(
            "PushCubeLogistic-v1", "torch's `sigmoid` may round differently in a batch", marks=pytest.mark.slow
        ),
        ("PushCubeCounted-v1", "CountedReward.nearest differs from environment to environment and is no tensor"),
        pytest.param("PushCubeBranching-v1", "torch's `any` is taken over all environments", marks=pytest.mark.slow),
        ("PushCubeRemembering-v1", ""),
        ("PushCubeKeeping-v1", ""),
        ("PushCubeFollowing-v1", "Actor.set_pose may change what one environment has to itself"),
        pytest.param("PushCubeGrowing-v1", "", marks=pytest.mark.slow),
        ("PushCubeCounter-v1", "Counter.add may change what one environment has to itself"),
        pytest.param(
            "PushCubeNoted-v1", "Actor.highest is set, which one environment has to itself", marks=pytest.mark.slow
        ),
    ],
)
def test_a_task_that_cannot_be_batched_says_why_and_is_stepped_one_by_one(task: str, why: str) -> None:
    spec = TaskSpec(f"maniskill/{task}")
    said = reason(spec)
    assert said.startswith(why) and bool(said) == bool(why)
    batch_equals_single_environments(spec)
    close_kept()


@pytest.mark.usefixtures("own_tasks")
def test_another_environments_reset_leaves_what_a_task_keeps() -> None:
    spec = TaskSpec("maniskill/PushCubeKeeping-v1", max_episode_steps=60)
    with ExitStack() as stack:
        *physics, alone = [stack.enter_context(closing(make_physics(spec))) for _ in range(3)]
        batch, actions = make_batch(spec, physics), random_actions(alone.info, 30)
        for seed, each in enumerate(physics):
            each.reset(EpisodeSpec(seed))
        batch.step([0, 1], np.stack([actions[:20]] * 2))
        physics[0].reset(EpisodeSpec(2))
        _, found = batch.step([0, 1], np.stack([actions[20:]] * 2))
        assert batch.alone == ""
        alone.reset(EpisodeSpec(1))
        alone.step(actions[:20])
        assert found.reward.tobytes() == alone.step(actions[20:]).reward.tobytes()
    close_kept()


@pytest.mark.usefixtures("own_tasks")
def test_the_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    spec = FarmSpec(TaskSpec("maniskill/PushCubeShared-v1"), EndlessEpisodes(1), num_envs=4, chunk=2, groups=2)
    with caplog.at_level(logging.WARNING), closing(Farm.create(spec, InProcess())) as farm:
        drive(farm, end=4, policy=wandering)
    (said,) = [record.getMessage() for record in caplog.records if "one by one" in record.getMessage()]
    assert said.startswith("maniskill/PushCubeShared-v1: ") and said.endswith("taken over all environments")


# --- in a farm


def wandering(env: int, number: int, state: np.ndarray) -> np.ndarray:
    return np.random.default_rng((env, number)).uniform(-1, 1, (FARM.chunk, 8)).astype(np.float32)


FARM = FarmSpec(PUSH, EndlessEpisodes(3), num_envs=6, chunk=2, groups=2, final_frames="never")
CHUNKS = 14
"""More than the env steps that are computed both ways, and than an episode."""


def one_by_one(spec: FarmSpec, chunks: int) -> dict[int, list[tuple[np.ndarray, np.ndarray]]]:
    """State and rewards of every environment after its reset and each chunk, by an environment of its own."""
    found: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    with closing(make_physics(spec.task)) as physics:
        for env in range(spec.num_envs):
            begun = 0
            result = physics.reset(EndlessEpisodes(3).spec(env, begun))
            rows = found[env] = [(result.state, np.empty(0, np.float32))]
            for number in range(chunks):
                result = physics.step(wandering(env, number, result.state))
                rewards = result.reward
                if result.ended:
                    begun += 1
                    result = physics.reset(EndlessEpisodes(3).spec(env, begun))
                rows.append((result.state, rewards))
    return found


def test_a_farm_gives_what_single_environments_give_and_continues_from_a_snapshot() -> None:
    with closing(Farm.create(FARM, InProcess())) as farm:
        trace = drive(farm, end=9, policy=wandering)
        kept = farm.snapshot()
    with closing(Farm.create(FARM, InProcess())) as farm:
        farm.restore(kept)
        for group in range(farm.groups):
            farm.reset(group)
            farm.collect(group)
        for env, rows in drive(farm, 9, CHUNKS, policy=wandering, reset=False).items():
            trace[env] += rows
    for env, expected in one_by_one(FARM, CHUNKS).items():
        assert len(trace[env]) == len(expected)
        for row, (state, rewards) in zip(trace[env], expected, strict=True):
            assert row["state"].tobytes() == state.tobytes()
            assert row["reward"][: len(rewards)].tobytes() == rewards.tobytes()


@pytest.mark.slow
def test_a_killed_worker_replays_its_environments() -> None:
    spec = replace(FARM, physics_workers=2, num_envs=8)
    with processes(spec) as (farm, host):
        slots = farm.tasks[0].slots
        trace: Trace = {env: [] for env in range(spec.num_envs)}
        request(farm, -1)
        collect(farm, trace)
        for number in range(9):
            for group in range(farm.groups):
                farm.submit(group, actions_for(farm, group, number, wandering))
            if number in (3, 7):
                until(lambda: (slots["simulated"] == slots["requested"]).any())
                host.replace_worker(number % 2)  # with a part of its environments served, or all
            collect(farm, trace)
    assert_same(run(spec, wandering, 9), trace, "killed workers change results")


# --- PyTorch's operations

SIZES = (2, 3, 5, 8, 13, 16, 32)
"""Rows of a batch: fewer and more than a vector of numbers."""


CONSTANT = torch.linspace(-1, 1, 16).sin().reshape(4, 4)


def _logic(x: torch.Tensor) -> torch.Tensor:
    return x > 0.1


def _three(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x, x], -1)[:, :3]


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x] * 16, -1)[:, :16].reshape(-1, 4, 4)


def _uses(names: str, use: Callable[[Any, torch.Tensor], torch.Tensor]) -> dict[str, Callable[..., torch.Tensor]]:
    return {name: partial(use, getattr(torch, name)) for name in names.split()}


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **_uses(
        "abs absolute neg negative sqrt rsqrt reciprocal square sin cos tan asin arcsin acos arccos atan arctan tanh "
        "exp expm1 log log1p erf sign floor ceil round trunc rad2deg deg2rad isnan isfinite isinf",
        lambda op, x: op(x),
    ),
    **_uses(
        "add sub subtract rsub mul multiply div divide true_divide maximum minimum lt le gt ge eq ne less less_equal "
        "greater greater_equal not_equal",
        lambda op, x: op(x, 1.3 * x.flip(-1)),
    ),
    **_uses(
        "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor",
        lambda op, x: op(_logic(x), _logic(x.flip(-1))),
    ),
    **_uses("logical_not bitwise_not", lambda op, x: op(_logic(x))),
    **_uses("any all", lambda op, x: op(_logic(x), -1)),
    **_uses("max min", lambda op, x: op(x, -1)[0]),
    **_uses("argmax argmin", lambda op, x: op(x, -1)),
    **_uses("sum mean prod", lambda op, x: torch.stack([op(x[:, :FEW], -1), op(x.contiguous(), -1)], -1)),
    **_uses("cross", lambda op, x: op(_three(x), _three(x.flip(-1)), dim=-1)),
    **_uses("norm", lambda op, x: op(x, dim=-1)),
    "__and__": lambda x: _logic(x) & _logic(-x),
    "__or__": lambda x: _logic(x) | _logic(-x),
    "__xor__": lambda x: _logic(x) ^ _logic(-x),
    "clamp": lambda x: x.clamp(-0.2, 0.3),
    "clip": lambda x: x.clip(-0.2, 0.3),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "clamp_max": lambda x: x.clamp_max(0.1),
    "lerp": lambda x: torch.lerp(x, 0.3 * x, 0.7),
    "where": lambda x: torch.where(x > 0, x, -x * 0.3),
    "masked_fill": lambda x: x.masked_fill(x > 0, 0.5),
    "pow": lambda x: torch.cat([x.abs() ** 0.5, x**1, x**2, x**3], -1),
    "linalg_norm": lambda x: torch.linalg.norm(x, dim=-1),
    "linalg_vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "linalg_cross": lambda x: torch.linalg.cross(_three(x), _three(x.flip(-1))),
    "matmul": lambda x: torch.cat([(CONSTANT @ _matrix(x)).flatten(1), _matrix(x) @ CONSTANT[0]], -1),
    "mm": lambda x: _matrix(x)[:, 1] @ CONSTANT,
    "mv": lambda x: (_matrix(x)[:, 1] @ CONSTANT[0])[:, None],
    "bmm": lambda x: torch.bmm(_matrix(x), _matrix(1.3 * x)).flatten(1),
    "einsum": lambda x: torch.einsum("ij,ij->i", _matrix(x)[..., 1], _matrix(x.flip(-1))[:, 2])[:, None],
}
"""An operation's name to a use of it, for rows [N, D]."""


def differing(functions: dict[str, Callable[[torch.Tensor], torch.Tensor]]) -> list[str]:
    """Names of those that give a row of a batch something else than that row alone."""
    draws, found = np.random.default_rng(0), set()
    for width in (1, 2, 3, 4, 7, 9):
        for count in SIZES:
            numbers = draws.normal(size=(count, width)) * 10 ** draws.uniform(-2, 0.5, (count, 1))
            rows = torch.from_numpy(numbers.astype(np.float32))
            # As they come: one after the other, columns of wider rows, and one column after the other.
            for laid in (rows, torch.cat([rows] * 3, 1)[:, width // 2 : width // 2 + width], rows.T.contiguous().T):
                for name, function in functions.items():
                    whole = function(laid)
                    each = torch.cat([function(laid[i : i + 1]) for i in range(count)])
                    if whole.numpy().tobytes() != each.numpy().tobytes():
                        found.add(name)
    return sorted(found)


def test_operations_that_are_known_have_been_compared() -> None:
    assert set(FUNCTIONS) == ARITHMETIC | OVER


@pytest.mark.parametrize("kernels", often(("",), ("", "default", "avx2")))
def test_a_known_operation_gives_a_row_of_a_batch_what_it_gives_it_alone(kernels: str) -> None:
    code = "from tests.sim_farm import test_maniskill_together as t; print(t.differing(t.FUNCTIONS))"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | (
        {"ATEN_CPU_CAPABILITY": kernels} if kernels else {}
    )
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("compute", "doubt"),
    [
        (lambda x: (x.exp() / x.norm(dim=-1, keepdim=True)).sum(-1), ""),
        (lambda x: x.mean() * 0 + 1, "`mean` is taken over all environments"),
        (lambda x: (x.mean(), x.cos())[1], ""),
        (lambda x: x.clone().index_put_((x > 0,), x.sigmoid()[x > 0]), "`sigmoid` may round differently"),
        (lambda x: x[:, 0] ** 1.7, "`pow` may round differently"),
        (lambda x: x.repeat(1, 3).T.contiguous().T.sum(-1), "`sum` of 9 numbers may round differently"),
        (lambda x: x @ torch.ones(3, 16), "`matmul` of matrices of more than 4"),
        (lambda x: x.neg() if (x > 0).all() else x.exp(), "`all` is taken over all environments"),
    ],
)
def test_a_result_is_traced_to_its_operations(compute: Callable[[torch.Tensor], torch.Tensor], doubt: str) -> None:
    rows = torch.linspace(-1, 1, 15).reshape(5, 3)
    with torch.inference_mode(), RowChecks(len(rows)) as checks:
        checks.mark(rows)
        result(compute(rows))
    assert doubt in checks.doubt and bool(checks.doubt) == bool(doubt)


def test_two_others_are_computed_row_by_row() -> None:
    def both(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.atan2(x, 1.3 * x.flip(-1)), torch.sigmoid(x)], -1)

    with by_rows():
        assert differing({"both": both}) == []
    assert torch.atan2 is not None and torch.sigmoid(torch.zeros(2)).tolist() == [0.5, 0.5]
