"""Stage `paths`: tiny runs on the GPU beside the same on the CPU, inline and on Ray.

The tests use a pretended GPU (`tests/embodied/support/pretend_device.py`). This stage runs the same code on a real one.
Arithmetic rounds differently there, so results are equal within a tolerance:

- the first rollout: values and log-probs within `ROLLOUT_TOLERANCE`, all but `DIFFERENT_DECISIONS` of the decisions
  equal in their rewards (a sampled token may tip over at a tie, and the episode with it);
- after `ITERATIONS` updates: parameters differ by at most `UPDATE_TOLERANCE` of what training has moved them (root mean
  squares; Adam divides by the gradient's size, so single tiny ones may turn round).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.gpu_stages.runs import Runtime, on_one_core
from benchmarks.gpu_stages.work import Figures, Work
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.roles import RolloutRole
from embodied.execution.session import Session, open_session
from embodied.run import checkpoint
from embodied.workflows.run_spec import RunSpec

ITERATIONS = 2
ROLLOUT_TOLERANCE = 1e-3
DIFFERENT_DECISIONS = 0.1
UPDATE_TOLERANCE = 0.1

SMALL: dict[str, Any] = {
    "seed": 5,
    "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9},
    "rollout": {"decisions": 4},
    # The bonus: a language model at random is never right, and would have no gradient.
    "loss": {"value_clip": None, "entropy_coef": 0.01},
    "optim": {"epochs": 2, "minibatch": 8, "policy_lr": 1e-4, "value_lr": 1e-4},
}
IMAGES = {"cameras": 1, "image_size": 56}
TOKENS = {"checkpoint": "assets/openvla_tiny", "unnorm_key": "demonstrations"}
COUNTDOWN = "assets/countdown_lm"
POLICIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "states": ({}, {"chunk": 2, "options": {"widths": [16]}}),
    "flow, images": (
        IMAGES,
        {"kind": "flow", "reads": ["images"], "options": {"encoder": "cnn", "steps": 3, "noise_level": 0.5}},
    ),
    "OpenVLA, adapter": (
        IMAGES,
        {"kind": "openvla", "reads": ["images", "instruction"], "options": {**TOKENS, "lora_rank": 4}},
    ),
    "OpenVLA-OFT, every weight": (
        IMAGES,
        {"kind": "openvla_oft", "reads": ["images", "instruction"], "chunk": 2, "options": TOKENS},
    ),
    "language": (
        {"task": "text/countdown_3", "options": {"tokenizer": COUNTDOWN}, "max_episode_steps": 24},
        {"kind": "language", "reads": ["instruction"], "chunk": 24, "options": {"checkpoint": COUNTDOWN, "rows": 3}},
    ),
}
"""What differs in `env`, and `policy`."""


@dataclass(frozen=True)
class Way:
    """How a run is laid out."""

    runtime: Runtime
    one_process: bool
    unload: bool = False

    @property
    def name(self) -> str:
        return ", ".join(
            [self.runtime, "one process" if self.one_process else "two processes", *["unloaded in turns"] * self.unload]
        )


WAYS = (
    Way("inline", True),
    Way("inline", True, unload=True),
    Way("inline", False),
    Way("ray", True),
    Way("ray", False),
)


@dataclass(frozen=True)
class Ran:
    """What a run came to."""

    rollout: Mapping[str, Tensor]
    """Of the first; empty on Ray, where trajectories stay with their workers."""
    before: Mapping[str, Tensor]
    """Parameters after the first update."""
    after: Mapping[str, Tensor]


def paths(work: Work) -> Figures:
    """Every policy by every way; raises where one differs, or does not run, after all have been tried."""
    reference = {name: _run(work, name, WAYS[0], "cpu") for name in POLICIES}
    found: Figures = {"tolerance": {"rollout": ROLLOUT_TOLERANCE, "update": UPDATE_TOLERANCE}, "cases": []}
    for name, way, ran in _runs(work):
        case = {"policy": name, "way": way.name}
        case |= ran if isinstance(ran, dict) else _compare(ran, reference[name])
        print(case, flush=True)
        found["cases"].append(case)
        work.keep(found)
    bad = [f"{case['policy']} ({case['way']}): {case['wrong']}" for case in found["cases"] if case["wrong"]]
    work.keep({"equal": len(found["cases"]) - len(bad), "tried": len(found["cases"])})
    if bad:
        raise AssertionError("; ".join(bad))
    return found


def _runs(work: Work) -> Iterator[tuple[str, Way, Ran | dict[str, Any]]]:
    """Each run, or why it did not come to an end. One Ray serves all that want it."""
    for runtime in ("inline", "ray"):
        with open_session(_config("states", replace(WAYS[0], runtime=runtime), work.device)) as session:
            for name in POLICIES:
                for way in (way for way in WAYS if way.runtime == runtime):
                    try:
                        yield name, way, _run(work, name, way, work.device, session)
                    except Exception as error:  # one failure must not hide what the other runs would show
                        yield name, way, {"wrong": f"{type(error).__name__}: {error}"[:500]}


def _config(name: str, way: Way, device: str) -> Config:
    env, policy = POLICIES[name]
    sections = {"env": SMALL["env"] | env, "policy": {**policy, "device": device}}
    return parse_config({**SMALL, **sections, "runtime": {"mode": way.runtime}}, name)


def _run(work: Work, name: str, way: Way, device: str, session: Session | None = None) -> Ran:
    config = _config(name, way, device)
    if session is None:
        with open_session(config) as new:
            return _run(work, name, way, device, new)
    folder = Path(tempfile.mkdtemp(dir=work.scratch))
    with start_run(RunSpec.of(config), folder, session, on_one_core(way.one_process, way.unload)) as workers:
        workers.begin(None, 0)
        workers.rollout(0)  # nobody learns from it: trajectories are handed out once
        rollout = _trajectories(workers) if way.runtime == "inline" else {}
        environments = workers.iterate(0).environments
        before = _saved(workers, folder / "first", 1, environments)
        for number in range(1, 1 + ITERATIONS):
            environments = workers.iterate(number).environments
        return Ran(rollout, before, _saved(workers, folder / "last", 1 + ITERATIONS, environments))


def _trajectories(workers: OnPolicy) -> dict[str, Tensor]:
    batch = workers.rollout_worker.call(RolloutRole.trajectories)
    return {name: getattr(batch, name).clone() for name in ("log_prob", "value", "reward", "executed")}


def _saved(workers: OnPolicy, folder: Path, iterations: int, environments: Any) -> dict[str, Tensor]:
    """The parameters, by way of a checkpoint: as the learner's device writes it, and the disk has it."""
    workers.save(folder, checkpoint.RunState(iterations, 0, 0.0, ()), environments)
    workers.saved()
    found = checkpoint.latest(folder)
    assert found is not None
    checkpoint.verify(found)
    files = [*sorted((found / "policy").glob("*.safetensors")), found / "value_head.safetensors"]
    named = {
        f"{path.name}: {name}": t.float() for path in files if path.exists() for name, t in load_file(path).items()
    }
    # Statistics of what was seen move by whole steps; beside them no difference of a parameter would show.
    return {name: tensor for name, tensor in named.items() if not name.partition(": ")[2].startswith("normalizer.")}


def _compare(ran: Ran, reference: Ran) -> dict[str, Any]:
    """Differences from the reference; `wrong` says which is too large, and is empty where none is."""
    wrong, found = [], dict[str, Any]()
    if ran.rollout:
        same = (ran.rollout["reward"] - reference.rollout["reward"]).abs() <= ROLLOUT_TOLERANCE
        found["different_decisions"] = 1 - float(same.float().mean())
        for name in ("log_prob", "value"):
            off = (ran.rollout[name] - reference.rollout[name]).abs()
            found[name] = float(off[same].max()) if same.any() else float("inf")
        wrong += [
            f"{name} differs by {found[name]:.1e}" for name in ("log_prob", "value") if found[name] > ROLLOUT_TOLERANCE
        ]
        if found["different_decisions"] > DIFFERENT_DECISIONS:
            wrong.append(f"{found['different_decisions']:.0%} of the decisions differ")
    moved = _rms({name: reference.after[name] - reference.before[name] for name in reference.before})
    off_by = _rms({name: ran.after[name] - reference.after[name] for name in reference.after})
    found |= {"moved": moved, "update_difference": off_by / moved}
    if not found["update_difference"] <= UPDATE_TOLERANCE:
        wrong.append(f"parameters differ by {off_by / moved:.2f} of what training moved them")
    return found | {"wrong": ", ".join(wrong)}


def _rms(tensors: Mapping[str, Tensor]) -> float:
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    return float(flat.square().mean().sqrt())
