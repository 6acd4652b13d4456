"""Law 1: a plan changes when and where, never what. One workflow by many assignments, in this process and on Ray."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied.algorithms.estimators import Estimate, gae, group_relative
from embodied.config import Config
from embodied.config_files import parse_config
from embodied.data.trajectories import Trajectories
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.executor import Iteration, executor
from embodied.execution.session import Session, open_session
from embodied.runtime.ray_runtime import RayRuntime
from embodied.workers.affinity import Affinity
from embodied.workers.context import make_policy
from embodied.workers.learner import Learner
from embodied.workers.roles import Decider, EpisodePart, Trainer
from embodied.workers.update_steps import OffPolicy
from embodied.workflows.recipes import GRPO, PPO
from policies.contract import PolicySpec
from tests import libero_assets
from tests.embodied.held import held

ITERATIONS = 3
CORES = sorted(os.sched_getaffinity(0))
TOLERANCE = 1e-4
"""Of every number where plans batch the policy's rows differently: matrix products over 4 and over 2 rows round
differently, by 1e-7 of what they add up; the simulator and Adam, which divides by the size of gradients, carry that
on. What is counted (steps, ends, episodes) is equal all the same."""


# --- what is gathered is kept beside the run, by an estimator of our own: it works in the learner's process


def kept_in(folder: Path, config: Config) -> Config:
    """The configuration, whose name tells `keep` the folder: without its slash, for a run's name is no path from it."""
    return config.model_copy(update={"name": str(folder).removeprefix("/")})


def keep(batch: Trajectories, config: Config) -> None:
    """Write the trajectories where the test that gave the run its name finds them."""
    assert config.name is not None
    folder = Path("/", config.name)
    named = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    named |= {f"trace.{key}": value for key, value in batch.trace.items()}
    named |= {f"frames.{key}": value for key, value in batch.inputs.frames.items()}
    for key in ("state", "proprio"):
        if getattr(batch.inputs, key) is not None:
            named[key] = getattr(batch.inputs, key)
    named["version"] = torch.tensor(batch.version)
    save_file({k: v.contiguous() for k, v in named.items()}, folder / f"{len(list(folder.iterdir())):03d}.safetensors")


def kept_gae(batch: Trajectories, config: Config) -> Estimate:
    keep(batch, config)
    return gae(batch, config)


def kept_group_relative(batch: Trajectories, config: Config) -> Estimate:
    keep(batch, config)
    return group_relative(batch, config)


KEPT_PPO = replace(PPO, estimator=kept_gae)
KEPT_GRPO = replace(GRPO, estimator=kept_group_relative)


# --- configurations

STATES: dict[str, Any] = {
    "workflow": f"{__name__}:KEPT_PPO",
    "seed": 3,
    "iterations": ITERATIONS,
    "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9, "start_seeds": 6},
    "policy": {"chunk": 2, "options": {"widths": [32, 32], "initial_log_std": 0.5}},
    "rollout": {"decisions": 12, "curriculum": 0.5},
    "optim": {"epochs": 2, "minibatch": 16, "threads": 1, "policy_lr": 3e-3, "value_lr": 3e-3},
    "runtime": {"deadline_s": 120},
}
IMAGES: dict[str, Any] = {
    **STATES,
    "env": {**STATES["env"], "cameras": 1, "image_size": 32},
    "policy": {
        "kind": "flow",
        "reads": ["proprio", "images"],
        "chunk": 2,
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16]},
    },
    "rollout": {"decisions": 6},
}
GROUPS: dict[str, Any] = {
    **STATES,
    "workflow": f"{__name__}:KEPT_GRPO",
    "rollout": {"episode_group": 2, "episodes_per_env": 2, "curriculum": 0.5},
    "advantage": {"outcome": "return"},
    "optim": {**STATES["optim"], "epochs": 1, "minibatch": 0},
}
MANISKILL: dict[str, Any] = {
    **STATES,
    "env": {"task": "maniskill/PushCube-v1", "num_envs": 4, "max_episode_steps": 9, "start_seeds": 6},
}
LIBERO: dict[str, Any] = {
    **IMAGES,
    "env": {
        "task": "libero/libero_spatial/0", "num_envs": 2, "max_episode_steps": 6, "cameras": 1, "image_size": 64,
        "init_states": 50,
    },
    "rollout": {"decisions": 4}, "optim": {**STATES["optim"], "minibatch": 4},
    }  # fmt: skip


# --- assignments


def cores(*numbers: int) -> tuple[int, ...]:
    """Cores of this machine by their number, begun anew where there are fewer."""
    return tuple(dict.fromkeys(CORES[number % len(CORES)] for number in numbers))


def assigned(
    mode: str = "collocated", groups: int = 1, physics: tuple[int, ...] = (0,), render: tuple[int, ...] = (),
    policy: tuple[int, ...] = (0, 1), learner: tuple[int, ...] = (0, 1), one_process: bool = True, ahead: int = 0,
) -> Assignment:  # fmt: skip
    farm = FarmAssignment(
        groups,
        tuple(CORES[core % len(CORES)] for core in physics), (HERE,) * len(physics),
        tuple(CORES[core % len(CORES)] for core in render),
    )  # fmt: skip
    components = {"policy": (Affinity(cores(*policy)),), "learner": (Affinity(cores(*learner)),)}
    return Assignment(mode, (farm,), components, (0,) if one_process else (), ahead)


def inline(like: Assignment) -> Assignment:
    """The same batches without processes, cores or a shared policy."""
    free = (None,)
    farms = tuple(
        replace(farm, physics=free * len(farm.physics), render=free * len(farm.render)) for farm in like.farms
    )
    components = {name: (Affinity(),) for name in like.components}
    return replace(like, mode="inline", farms=farms, components=components, hosts=(), unload=False)


PLANS = {
    "collocated": assigned(physics=(0, 1)),
    "collocated, groups share the cores": assigned(groups=2, physics=(0, 1), policy=()),
    "disaggregated, 2 splits": assigned("disaggregated", physics=(0,), policy=(1,), learner=(1,)),
    "disaggregated, 2 splits, 2 groups": assigned("disaggregated", 2, (0,), (), (1,), (1,)),
    "disaggregated, 3 splits": assigned("disaggregated", 2, (0, 0), (), (1,), (0,), one_process=False),
    "hybrid": assigned("hybrid", 1, (0, 0), (), (1,), (0, 1)),
    "hybrid, 2 groups": assigned("hybrid", 2, (0,), (), (1,), (0, 1)),
    "context switches": replace(assigned(), unload=True),
    "context switches of two processes": replace(assigned(one_process=False), unload=True),
}
DRAWING = {
    "fused": assigned(physics=(0,)),
    "fused, 2 workers": assigned("hybrid", 1, (0, 1), (), (1,), (0, 1)),
    "split": assigned("disaggregated", 1, (0,), (0,), (1,), (1,)),
    "split in 4, 2 groups": assigned("disaggregated", 2, (0,), (0,), (1,), (0,), one_process=False),
    "fused, context switches": replace(assigned(physics=(0, 1)), unload=True),
    "split, context switches": replace(assigned(render=(1,), one_process=False), unload=True),
}


# --- runs


@dataclass(frozen=True)
class Run:
    iterations: list[Iteration]
    gathered: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]

    @property
    def episodes(self) -> list[list[tuple[int, bool, int]]]:
        return [[(e.env, e.success, e.length) for e in one.summary.episodes] for one in self.iterations]

    @property
    def returns(self) -> list[float]:
        return [e.total_reward for one in self.iterations for e in one.summary.episodes]


def run(
    settings: dict[str, Any], session: Session, assignment: Assignment, folder: Path, drains: tuple[int, ...] = (),
) -> Run:  # fmt: skip
    """Three iterations by the assignment; `drains`: those after which no rollout is ahead."""
    (folder / "gathered").mkdir(parents=True)
    config = kept_in(folder / "gathered", parse_config(settings, "test"))
    with executor(config, folder, session, assignment) as workers:
        workers.begin(None, 0)
        iterations = [workers.iterate(i, drain=i in drains or i == ITERATIONS - 1) for i in range(ITERATIONS)]
        if assignment.unload:
            workers.trainer.call(Trainer.load_back)
        parameters = {name: tensor.clone() for name, tensor in workers.trainer.call(Trainer.weights).items()}
    return Run(iterations, [load_file(path) for path in sorted((folder / "gathered").iterdir())], parameters)


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    """One Ray for all assignments."""
    ray_runtime.prepare(2)
    return Session(Config(), ray_runtime, tuple(CORES))


@pytest.fixture(scope="module")
def here() -> Iterator[Session]:
    """This process, with as many threads as a worker begins with."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with open_session(parse_config({"runtime": {"mode": "inline"}}, "test")) as session:
        yield session
    torch.set_num_threads(threads)


class Reference(Protocol):
    def __call__(self, settings: dict[str, Any], assignment: Assignment, drains: tuple[int, ...] = ()) -> Run: ...


@pytest.fixture(scope="module")
def reference(here: Session, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Runs in this process, by the same batches as the assignment's. Each is computed once: many plans share one."""
    known: dict[str, Run] = {}

    def of(settings: dict[str, Any], assignment: Assignment, drains: tuple[int, ...] = ()) -> Run:
        plan = inline(assignment)
        key = f"{settings} {plan} {drains}"
        if key not in known:
            known[key] = run(settings, here, plan, tmp_path_factory.mktemp("reference"), drains)
        return known[key]

    return of


def assert_equal(found: Run, expected: Run, tolerance: float = 0.0) -> None:
    """The same episodes, trajectories and parameters: to the last bit, or within the tolerance of every number."""
    assert found.episodes == expected.episodes
    assert found.returns == (pytest.approx(expected.returns, abs=tolerance) if tolerance else expected.returns)
    assert len(found.gathered) == len(expected.gathered)
    for part, (tensors, others) in enumerate(zip(found.gathered, expected.gathered, strict=True)):
        assert tensors.keys() == others.keys()
        for name, tensor in others.items():
            assert_near(tensors[name], tensor, tolerance, f"part {part}: {name}")
    for name, tensor in expected.parameters.items():
        assert_near(found.parameters[name], tensor, tolerance, name)


def assert_near(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    assert found.shape == expected.shape, name
    if tolerance and expected.is_floating_point():
        worst = float((found - expected).abs().max())
        assert worst <= tolerance, f"{name} differs by {worst:.1e}"
    else:
        assert torch.equal(found, expected), name


def assert_was_a_test(run: Run) -> None:
    """Episodes ended, some of them solved, and something was learned in every iteration."""
    assert len(run.iterations) == ITERATIONS <= len(run.gathered)
    assert run.returns
    assert all(one.learned["learner/steps"] > 0 and one.learned["learner/grad_norm"] > 0 for one in run.iterations)
    assert not any(one.learned["learner/skipped_steps"] for one in run.iterations)
    assert all(not torch.equal(run.gathered[0]["log_prob"], later["log_prob"]) for later in run.gathered[1:])


# --- the same batches: bit for bit


@pytest.mark.parametrize("name", PLANS)
def test_every_plan_computes_what_one_process_computes(
    name: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(STATES, ray, PLANS[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert {episode.start for one in found.iterations for episode in one.summary.episodes} <= set(range(6))
    assert 1 <= found.iterations[-1].summary.curriculum["curriculum/effective_starts"] < 6, "all were drawn evenly"
    assert_equal(found, reference(STATES, PLANS[name]))


@pytest.mark.parametrize("name", DRAWING)
def test_who_draws_does_not_change_what_is_computed(
    name: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(IMAGES, ray, DRAWING[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert found.gathered[0]["frames.front"].float().std() > 1, "the pictures are empty"
    assert_equal(found, reference(IMAGES, DRAWING[name]))
    assert_renderers_left(found, DRAWING[name].unload)


def assert_renderers_left(run: Run, unload: bool, task: str = "tabletop/reach") -> None:
    """Before each update, and back before each rollout but the first; with what an OpenGL context takes."""
    freed = [
        [span.args["bytes"] for span in one.spans if span.args.get("worker") == f"renderers of {task}"]
        for one in run.iterations
    ]
    assert [len(found) for found in freed] == ([1, 2, 2] if unload else [0, 0, 0])
    assert all(found > 5e6 for each in freed for found in each), freed


SWITCHES = ["context switches", "context switches of two processes"]


@pytest.mark.parametrize("name", ["collocated", "disaggregated, 3 splits", *SWITCHES])
def test_episodes_in_groups_too(name: str, ray: Session, reference: Reference, tmp_path: Path) -> None:
    found = run(GROUPS, ray, PLANS[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(GROUPS, PLANS[name]))
    taught = [one.learned["learner/teaching_groups"] for one in found.iterations]
    assert taught == [4.0] * ITERATIONS, "all four episode groups differ in their returns"


# --- other batches: within rounding


def shapes() -> dict[str, Assignment]:
    """Every number of groups and of physics workers, all drawn by the physics workers or by a render worker."""
    return {
        f"{groups} groups, {workers} workers": assigned(groups=groups, physics=(0,) * workers)
        for groups in (1, 2)
        for workers in (1, 2)
    }


@pytest.mark.parametrize("settings", [STATES, IMAGES, GROUPS], ids=["states", "images", "groups"])
def test_groups_and_workers_change_no_more_than_the_rounding(settings: dict[str, Any], reference: Reference) -> None:
    runs = {name: reference(settings, plan) for name, plan in shapes().items()}
    expected = runs["1 groups, 1 workers"]
    assert_was_a_test(expected)
    assert_equal(runs["1 groups, 2 workers"], expected)
    for name in ("2 groups, 1 workers", "2 groups, 2 workers"):
        assert_equal(runs[name], expected, TOLERANCE)


def test_one_process_or_several_and_one_renderer_or_none_change_nothing(
    here: Session, reference: Reference, tmp_path: Path
) -> None:
    free = inline(assigned())
    expected = reference(IMAGES, free)
    assert_equal(run(IMAGES, here, replace(free, hosts=(0,)), tmp_path / "together"), expected)
    apart = replace(free, farms=(replace(free.farms[0], render=(None,)),))
    assert_equal(reference(IMAGES, apart), expected)


@pytest.mark.parametrize("settings", [STATES, IMAGES], ids=["states", "images"])
def test_a_policy_begins_with_the_same_weights_whatever_the_process_has_threads(settings: dict[str, Any]) -> None:
    """An orthogonal matrix is the result of a decomposition, which rounds by the number of threads."""
    config = parse_config(settings, "test")
    spec = PolicySpec(action_dim=3, chunk=2, state_dim=16, proprio_dim=10, cameras=("front",), image_size=32)
    found = []
    for threads in (1, 2, 3):
        with Affinity(threads=threads).applied():
            found.append(make_policy(config, spec).state_dict())
    for state in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(state[name], tensor), name


# --- one step ahead


AHEAD = assigned("disaggregated", 2, (0,), (), (1,), (0,), one_process=False, ahead=1)


@pytest.mark.parametrize("settings", [STATES, GROUPS], ids=["decisions", "episodes"])
def test_a_rollout_that_is_ahead_is_one_update_behind_and_the_same_everywhere(
    settings: dict[str, Any], ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(settings, ray, AHEAD, tmp_path / "ray")
    expected = reference(settings, AHEAD)
    assert lags(expected) == lags(found) == [0, 1, 1]
    assert_was_a_test(found)
    assert_equal(found, expected)
    punctual = reference(settings, replace(AHEAD, ahead=0))
    assert lags(punctual) == [0, 0, 0]
    assert torch.equal(expected.gathered[0]["log_prob"], punctual.gathered[0]["log_prob"])
    assert not torch.equal(expected.gathered[-1]["log_prob"], punctual.gathered[-1]["log_prob"])
    assert not torch.equal(expected.parameters["log_std"], punctual.parameters["log_std"])


def lags(run: Run) -> list[int]:
    """Updates that the acting policy had missed, iteration by iteration; every part of one is equally old."""
    parts = len(run.gathered) // ITERATIONS
    found = [number // parts - int(part["version"]) for number, part in enumerate(run.gathered)]
    assert found == [i - one.summary.version for i, one in enumerate(run.iterations) for _ in range(parts)]
    return found[::parts]


@pytest.mark.parametrize("settings", [STATES, GROUPS], ids=["decisions", "episodes"])
def test_after_a_drain_nothing_is_ahead(
    settings: dict[str, Any], ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(settings, ray, AHEAD, tmp_path / "ray", drains=(0,))
    assert lags(found) == [0, 0, 1]
    assert_equal(found, reference(settings, AHEAD, drains=(0,)))
    always = reference(settings, AHEAD, drains=(0, 1, 2))
    assert lags(always) == [0, 0, 0]
    assert_equal(always, reference(settings, replace(AHEAD, ahead=0)))


def test_environments_are_told_as_they_were_before_the_rollout_that_is_ahead(reference: Reference) -> None:
    """What a checkpoint would hold belongs to the iterations that are finished."""
    ahead = reference(STATES, AHEAD)
    punctual = reference(STATES, replace(AHEAD, ahead=0))
    for name, expected in punctual.iterations[0].environments.items():
        assert ahead.iterations[0].environments[name].tobytes() == expected.tobytes(), name


def test_a_rollout_that_is_ahead_needs_a_policy_of_its_own() -> None:
    with pytest.raises(ValueError, match="ahead of the update needs a policy of its own"):
        assigned(one_process=True, ahead=1)


def gathered(settings: dict[str, Any], session: Session, folder: Path) -> tuple[Config, Trajectories]:
    """A rollout, or an episode of every environment, of a new policy; learned from in one step over all rows."""
    optim = {**settings["optim"], "epochs": 1, "minibatch": 0, "max_grad_norm": 1e9}
    (folder / "gathered").mkdir(parents=True)
    config = kept_in(folder / "gathered", parse_config({**settings, "optim": optim}, "test"))
    with executor(config, folder, session, inline(assigned())) as workers:
        workers.begin(None, 0)
        if settings is GROUPS:
            workers.decider.call(Decider.rollout_episodes, EpisodePart(0, 4), 1, 60.0)
        else:
            workers.decider.call(Decider.rollout, config.rollout.decisions, 60.0)
        return config, held(workers.decider.call(Decider.trajectories))


def moved_learner(config: Config, folder: Path, by: float) -> Learner:
    """The learner of a policy whose actor is not quite that which acted."""
    policy = make_policy(config, PolicySpec(action_dim=3, chunk=2, state_dim=16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in policy.actor_parameters():
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return Learner(policy, config, folder)


@pytest.mark.parametrize("settings", [STATES, GROUPS], ids=["decisions", "episodes"])
def test_a_rollout_of_an_older_policy_is_learned_from_by_the_decoupled_objective(
    settings: dict[str, Any], here: Session, tmp_path: Path
) -> None:
    """The first step's gradient is that of the mean of -A w ratio, ratios to the policy as it is, and w how much
    likelier it makes what was done than the policy that acted did, at most 2 (Hilton et al. 2022)."""
    config, batch = gathered(settings, here, tmp_path)
    learner = moved_learner(config, tmp_path, 0.1)
    with pytest.raises(OffPolicy):  # by a policy of the same version
        moved_learner(config, tmp_path, 0.1).update(batch, 0)
    learner.update(batch, 1)
    policy = moved_learner(config, tmp_path, 0.1).policy
    alive = torch.arange(2) < batch.executed.flatten()[:, None]
    new = (policy.evaluate(batch.inputs, batch.trace).log_prob * alive[..., None]).sum((1, 2))
    old = (batch.log_prob.flatten(0, 1) * alive[..., None]).sum((1, 2))
    weight = (new - old).exp().detach()
    assert weight.max() > 2 and weight.min() < 0.8, "the policies hardly differ"
    estimate = (group_relative if settings is GROUPS else gae)(batch, config)
    mask = (batch.mask & estimate.keep).flatten()
    ratio = (new - new.detach()).exp()
    loss = -(estimate.advantage.flatten() * weight.clamp(max=2) * ratio)[mask].mean()
    loss.backward()
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            found = dict(learner.policy.named_parameters())[name].grad
            torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_rollout_of_an_older_policy_is_judged_by_the_present_critic(
    normalised: bool, here: Session, tmp_path: Path
) -> None:
    """Of the decisions; final observations keep the value that the older critic gave them."""
    config, batch = gathered(STATES, here, tmp_path)
    settings = config.advantage.model_copy(update={"normalise_returns": normalised})
    config = config.model_copy(update={"advantage": settings})

    def learner() -> Learner:
        found = moved_learner(config, tmp_path, 0.0)
        with torch.no_grad():
            for parameter in found.policy.value_head.parameters():
                parameter.mul_(1.3)
        return found

    def gradient(trajectories: Trajectories) -> Tensor:
        """Of the critic, in an update of the iteration 1."""
        teacher = learner()
        teacher.update(trajectories, 1)
        head = teacher.policy.value_head
        return torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])

    now = learner().policy.value(batch.inputs).reshape(batch.value.shape)
    holes = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    torch.testing.assert_close(learner()._work.values(replace(batch, mask=holes)), now * holes)
    judged = gradient(replace(batch, version=0))
    torch.testing.assert_close(judged, gradient(replace(batch, version=1, value=now)), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(judged, gradient(replace(batch, version=1)), rtol=1e-2)


@pytest.mark.parametrize("settings", [STATES, GROUPS], ids=["decisions", "episodes"])
def test_where_nothing_lies_between_them_it_is_the_plain_objective(
    settings: dict[str, Any], here: Session, tmp_path: Path
) -> None:
    config, batch = gathered(settings, here, tmp_path)
    plain, decoupled = (moved_learner(config, tmp_path, 0.0) for _ in range(2))
    plain.update(batch, 0)
    decoupled.update(batch, 1)
    for name, tensor in plain.policy.named_parameters():
        if tensor.grad is not None:
            other = dict(decoupled.policy.named_parameters())[name].grad
            torch.testing.assert_close(other, tensor.grad, rtol=1e-4, atol=1e-6, msg=name)


# --- other simulators


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_computes_the_same_on_maniskill(
    name: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(MANISKILL, ray, PLANS[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(MANISKILL, PLANS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused, context switches", "split, context switches"])
def test_renderers_of_maniskill_may_leave(name: str, ray: Session, reference: Reference, tmp_path: Path) -> None:
    """SAPIEN compiles its shaders anew at each return."""
    drawn = {**IMAGES["env"], "task": "maniskill/PushCube-v1", "max_episode_steps": 9}
    settings = {**IMAGES, "env": drawn, "rollout": {"decisions": 5}}
    found = run(settings, ray, DRAWING[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_renderers_left(found, True, "maniskill/PushCube-v1")
    assert_equal(found, reference(settings, DRAWING[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "split", "split in 4, 2 groups", "hybrid", "split, context switches"])
def test_every_plan_computes_the_same_on_libero(name: str, ray: Session, reference: Reference, tmp_path: Path) -> None:
    libero_assets.require()
    plan = {**PLANS, **DRAWING}[name]
    found = run(LIBERO, ray, plan, tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(LIBERO, plan))
