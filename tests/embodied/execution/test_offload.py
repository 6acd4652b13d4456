"""Context switches: what leaves a device's memory comes back equal to the last bit, and training does not notice."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor, nn

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.iteration import Iteration, OnPolicy, start_run
from embodied.execution.session import Session, open_session
from embodied.learning.learner import Learner
from embodied.learning.offload import Offload
from embodied.run import checkpoint
from embodied.workflows.run_spec import RunSpec

ITERATIONS = 3
CONFIG = parse_config(
    {
        "seed": 5,
        "iterations": ITERATIONS,
        "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9},
        "policy": {"chunk": 2, "options": {"widths": [16]}},
        "rollout": {"decisions": 8},
        "optim": {"epochs": 2, "minibatch": 8, "policy_lr": 3e-3},
        "runtime": {"mode": "inline"},
    },
    "test",
)


PICTURES = parse_config(
    {
        **CONFIG.model_dump(mode="json", include={"seed", "iterations", "optim", "runtime"}),
        "env": {**CONFIG.env.model_dump(mode="json"), "cameras": 1, "image_size": 32},
        "policy": {
            "kind": "flow",
            "reads": ["images"],
            "chunk": 2,
            "options": {"encoder": "cnn", "features": 8, "widths": [8], "critic_widths": [8], "steps": 2},
        },
        "rollout": {"decisions": 4},
    },
    "test",
)


class Mixed(nn.Module):
    """Parameters and buffers of several types, one of them a number, one frozen, one not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 5)
        self.narrow = nn.Parameter(torch.randn(3, 4).to(torch.bfloat16))
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.frozen = nn.Parameter(torch.randn(2, 2), requires_grad=False)
        self.register_buffer("mean", torch.randn(5, dtype=torch.float64))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("unsaved", torch.randn(3), persistent=False)

    def forward(self) -> Tensor:
        return self.linear.weight.square().sum() + self.narrow.float().sum() * self.scale + self.turned.pow(2).sum()


def made(seed: int = 0) -> tuple[Mixed, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    module = Mixed()
    return module, torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=0.1)


def step(module: Mixed, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    module().backward()
    optimizer.step()


def all_tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Everything that is to come back."""
    states = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return [*module.parameters(), *module.buffers(), *states]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b) for a, b in pairs)


@dataclass
class Sides:
    """One that leaves and comes back, and one that stays."""

    module: Mixed
    optimizer: torch.optim.Optimizer
    other: Mixed
    other_optimizer: torch.optim.Optimizer

    def step(self) -> None:
        step(self.module, self.optimizer)
        step(self.other, self.other_optimizer)

    @property
    def equal(self) -> bool:
        return same(all_tensors(self.module, self.optimizer), all_tensors(self.other, self.other_optimizer))


@pytest.fixture
def sides() -> Sides:
    found = Sides(*made(), *made())
    found.step()
    found.step()
    assert found.equal and len(found.optimizer.state) > 3
    return found


def test_everything_comes_back_equal_and_training_goes_on(sides: Sides, tmp_path: Path) -> None:
    tensors = all_tensors(sides.module, sides.optimizer)
    size = sum(t.numel() * t.element_size() for t in tensors)
    for number in range(3):
        spill = tmp_path / "deep" / f"spill-{number}.safetensors"
        offload = Offload(spill, sides.module, sides.optimizer)
        left = offload.unload()
        assert offload.away and left.bytes == size and left.seconds > 0
        assert not any(t.numel() for t in tensors), "memory is still held"
        assert spill.stat().st_size >= size
        back = offload.load()
        assert not offload.away and back.bytes == size and back.seconds > 0
        assert not spill.exists(), "what was spilled is left behind"
        assert sides.equal
        assert all(
            now is before for now, before in zip(all_tensors(sides.module, sides.optimizer), tensors, strict=True)
        )
        sides.step()
        assert sides.equal, "a step after the return is another one"


def test_weights_or_the_optimiser_may_leave_alone(sides: Sides, tmp_path: Path) -> None:
    weights, states = Offload(tmp_path / "w", sides.module, None), Offload(tmp_path / "o", None, sides.optimizer)
    weights.unload()
    assert not any(p.numel() for p in sides.module.parameters()) and not any(b.numel() for b in sides.module.buffers())
    assert all(s["exp_avg"].numel() for s in sides.optimizer.state.values())
    weights.load()
    states.unload()
    assert all(p.numel() for p in sides.module.parameters())
    assert not any(s["exp_avg"].numel() for s in sides.optimizer.state.values())
    states.load()
    assert sides.equal


def test_an_optimiser_that_has_not_stepped_has_nothing_to_leave(tmp_path: Path) -> None:
    module, optimizer = made()
    assert Offload(tmp_path / "o", None, optimizer).unload().bytes == 0
    offload = Offload(tmp_path / "both", module, optimizer)
    offload.unload()
    offload.load()
    other, other_optimizer = made()
    step(module, optimizer)
    step(other, other_optimizer)
    assert same(all_tensors(module, optimizer), all_tensors(other, other_optimizer))


def test_what_never_left_need_not_come_back(sides: Sides, tmp_path: Path) -> None:
    offload = Offload(tmp_path / "o", sides.module, sides.optimizer)
    assert offload.load().bytes == 0 and not offload.away and sides.equal


def test_leaving_twice_loses_nothing(sides: Sides, tmp_path: Path) -> None:
    offload = Offload(tmp_path / "o", sides.module, sides.optimizer)
    offload.unload()
    assert offload.unload().bytes == 0
    offload.load()
    assert sides.equal


# --- in a run


def placed(unload: bool, one_process: bool) -> Assignment:
    core = min(os.sched_getaffinity(0))
    farm = FarmAssignment(groups=2, physics=(core,), physics_nodes=(HERE,))
    components = {"policy": (Affinity(),), "learner": (Affinity(),)}
    return Assignment("collocated", (farm,), components, (0,) if one_process else (), unload=unload)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with open_session(CONFIG) as opened:
        yield opened


@dataclass(frozen=True)
class Run:
    iterations: list[Iteration]
    tensors: dict[str, bytes]
    """Of the checkpoint at the end."""


def state_of(number: int) -> checkpoint.RunState:
    return checkpoint.RunState(number, 0, 0.0, ())


def save(workers: OnPolicy, folder: Path, number: int, environments: Any) -> Path:
    workers.save(folder / "checkpoints", state_of(number), environments)
    workers.saved()
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None and found.name == f"{number:06d}"
    checkpoint.verify(found)
    return found


def tensors_of(folder: Path) -> dict[str, bytes]:
    files = sorted(folder.rglob("*.safetensors"))
    assert {path.name for path in files} >= {"optimizer.safetensors", "environments.safetensors"}
    return {f"{path.name}: {key}": a.tobytes() for path in files for key, a in load_file(path).items()}


def run(session: Session, assignment: Assignment, folder: Path, config: Config = CONFIG) -> Run:
    with start_run(RunSpec.of(config), folder, session, assignment) as workers:
        workers.begin(None, 0)
        iterations = [workers.iterate(number) for number in range(ITERATIONS)]
        kept = save(workers, folder, ITERATIONS, iterations[-1].environments)
        return Run(iterations, tensors_of(kept))


@pytest.fixture(scope="module")
def stayed(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(session, placed(unload=False, one_process=False), tmp_path_factory.mktemp("stayed"))


@pytest.mark.parametrize("one_process", [True, False], ids=["one process", "two processes"])
def test_training_with_switches_is_training_without(
    one_process: bool, session: Session, stayed: Run, tmp_path: Path
) -> None:
    found = run(session, placed(unload=True, one_process=one_process), tmp_path)
    assert found.tensors.keys() == stayed.tensors.keys() and len(found.tensors) > 20
    assert [key for key, data in found.tensors.items() if data != stayed.tensors[key]] == []
    for mine, other in zip(found.iterations, stayed.iterations, strict=True):
        assert [vars(e) for e in mine.summary.episodes] == [vars(e) for e in other.summary.episodes]
        assert mine.learned["learner/policy_loss"] == other.learned["learner/policy_loss"]
    assert any(one.summary.episodes for one in stayed.iterations)


@pytest.mark.parametrize("one_process", [True, False], ids=["one process", "two processes"])
def test_switches_are_timed(one_process: bool, session: Session, stayed: Run, tmp_path: Path) -> None:
    found = run(session, placed(unload=True, one_process=one_process), tmp_path)
    for number, one in enumerate(found.iterations):
        switches = [span for span in one.spans if span.name == "switch"]
        workers = [(span.args or {})["worker"] for span in switches]
        assert sorted(workers) == sorted(["learner"] * 2 + ([] if one_process else ["policy"] * 2)), number
        assert one.learned["time/switch_s"] == pytest.approx(sum(s.end_ns - s.start_ns for s in switches) / 1e9)
        assert one.learned["time/switch_s"] > 0
    assert all((span.args or {})["bytes"] > 0 for span in found.iterations[-1].spans if span.name == "switch")
    assert all(one.learned["time/switch_s"] == 0 for one in stayed.iterations)


@pytest.mark.slow
@pytest.mark.parametrize("one_process", [True, False], ids=["one process", "two processes"])
def test_renderers_leave_before_the_learner_returns_and_are_back_for_the_next_rollout(
    one_process: bool, session: Session, tmp_path: Path
) -> None:
    expected = run(session, placed(unload=False, one_process=one_process), tmp_path / "stayed", PICTURES)
    found = run(session, placed(unload=True, one_process=one_process), tmp_path / "left", PICTURES)
    assert found.tensors == expected.tensors
    policy = [] if one_process else ["policy"]
    renderers = "renderers of tabletop/reach"
    for number, one in enumerate(found.iterations):
        switches = sorted((s for s in one.spans if s.name == "switch"), key=lambda span: span.start_ns)
        workers = [*policy, renderers, "learner", *policy, "learner"]
        assert [span.args["worker"] for span in switches] == [renderers] * (number > 0) + workers
        assert one.learned["time/switch_s"] == pytest.approx(sum(s.end_ns - s.start_ns for s in switches) / 1e9)
        rollout = next(span for span in one.spans if span.name == "rollout")
        assert (switches[0].end_ns <= rollout.start_ns) == (number > 0), "the return is a part of the rollout"


def test_renderers_are_away_while_a_checkpoint_is_written(session: Session, tmp_path: Path) -> None:
    """The learner is here then, and needs the room."""
    with start_run(RunSpec.of(PICTURES), tmp_path, session, placed(unload=True, one_process=True)) as workers:
        workers.begin(None, 0)
        first = workers.iterate(0)
        assert workers.farm.tasks[0].slots["left"].all()
        save(workers, tmp_path, 1, first.environments)
        assert workers.farm.tasks[0].slots["left"].all()
        workers.iterate(1)


@pytest.mark.parametrize("one_process", [True, False], ids=["one process", "two processes"])
def test_a_checkpoint_written_while_away_is_complete_and_can_be_gone_on_from(
    one_process: bool, session: Session, stayed: Run, tmp_path: Path
) -> None:
    assignment = placed(unload=True, one_process=one_process)
    with start_run(RunSpec.of(CONFIG), tmp_path, session, assignment) as workers:
        workers.begin(None, 0)
        first = workers.iterate(0, drain=True)
        assert not any(p.numel() for p in moments(workers)), "the optimiser's state is here: this tests nothing"
        kept = save(workers, tmp_path, 1, first.environments)
        assert not any(p.numel() for p in moments(workers)), "saving brought it back for good"
    with start_run(RunSpec.of(CONFIG), tmp_path, session, assignment) as workers:
        workers.load(kept)
        workers.begin(checkpoint.read_environments(kept), 1)
        last = [workers.iterate(number) for number in range(1, ITERATIONS)][-1]
        assert tensors_of(save(workers, tmp_path, ITERATIONS, last.environments)) == stayed.tensors


def moments(workers: OnPolicy) -> list[Tensor]:
    """The optimiser's first moments; the learner is in this process."""
    learner: Learner = vars(workers.learner.handles[0])["worker"]
    found = [state["exp_avg"] for state in learner.optimizer.state.values()]
    assert found
    return found
