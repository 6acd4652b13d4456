"""LIBERO on the whole farm: real processes, one renderer for several physics workers, training."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from torch import nn

import embodied
from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.iteration import start_run
from embodied.execution.roles import LearnerRole
from embodied.execution.session import Session, open_session
from embodied.workflows.run_spec import RunSpec
from sim_farm.client.observations import Observations
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes, Starts
from sim_farm.shared_memory.slot_layout import FarmSpec

TASK = TaskSpec("libero/libero_spatial/0", cameras=2, image_size=32, max_episode_steps=5)
CHUNKS, CHUNK = 4, 2


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with open_session(Config()) as session:
        yield session


def drive(session: Session, physics_workers: int, render_workers: int) -> list[Observations]:
    """What each environment shows over some chunks, group by group. Stale or missing frames are raised by `collect`."""
    spec = FarmSpec(
        TASK,
        EndlessEpisodes(3, Starts(init_states=range(50))),
        num_envs=4,
        chunk=CHUNK,
        groups=2,
        physics_workers=physics_workers,
        render_workers=render_workers,
        final_frames="truncated",
    )
    actions = np.random.default_rng(0).uniform(-1, 1, (CHUNKS, 4, CHUNK, 7)).astype(np.float32)
    seen = []
    with session.farm(spec) as farm:
        for group in range(2):
            farm.reset(group)
        for turn in range(CHUNKS):
            for group in range(2):
                seen.append(kept(farm.collect(group)))
                farm.submit(group, actions[turn, farm.envs_of(group)])
        seen += [kept(farm.collect(group)) for group in range(2)]
    return seen


def kept(seen: Observations) -> Observations:
    """With frames of its own: those of the farm's memory are drawn over by the next submit."""
    return replace(seen, frames={camera: frames.copy() for camera, frames in seen.frames.items()})


def by_env(seen: list[Observations]) -> dict[tuple[int, int, int], tuple[bytes, ...]]:
    """(environment, episode, env step) to the bytes of what was shown there."""
    shown: dict[tuple[int, int, int], tuple[bytes, ...]] = {}
    for one in seen:
        for row, env in enumerate(one.envs.tolist()):
            key = (env, int(one.episode[row]), int(one.episode_step[row]))
            shown[key] = (one.state[row].tobytes(), *(frame[row].tobytes() for frame in one.frames.values()))
    return shown


@pytest.mark.slow
def test_one_renderer_for_two_physics_workers_shows_what_the_fused_farm_shows(session: Session) -> None:
    fused, split, alone = (by_env(drive(session, *workers)) for workers in ((2, 0), (2, 1), (1, 1)))
    assert len(fused) == 4 * (CHUNKS + 1) and max(episode for _, episode, _ in fused) > 0
    assert fused == split == alone


@pytest.mark.slow
def test_ppo_trains_on_libero_from_pixels(tmp_path: Path) -> None:
    whole = load_config("libero_spatial_ppo").model_dump(mode="json")
    whole["iterations"], whole["name"] = 1, "tiny"
    whole["env"] |= {"num_envs": 2, "image_size": 32, "max_episode_steps": 16, "settle_steps": 2}
    whole["rollout"] |= {"decisions": 3}
    whole["optim"] |= {"minibatch": 3}
    whole["farm"] |= {"groups": 1}
    whole["eval"] |= {"episodes": 2, "videos": 0}
    whole["runtime"] |= {"mode": "inline"}
    result = embodied.train(parse_config(whole, "test"), runs_dir=tmp_path)
    assert result.env_steps == 2 * 3 * 8 and result.evaluation.episodes == 2
    assert (tmp_path / "tiny" / "report.html").is_file()


@pytest.mark.slow
def test_ten_tasks_are_decided_for_by_one_copy_of_the_weights(tmp_path: Path) -> None:
    """OpenVLA at a toy's size on all of LIBERO-Spatial, policy worker and learner in one process."""
    task = {"num_envs": 1, "max_episode_steps": 8}
    data = load_config("openvla_tiny").model_dump(mode="json")
    data["env"] |= {**task, "task": "libero/libero_spatial/0", "gripper": "inverted"}
    data["extra_tasks"] = [{"task": f"libero/libero_spatial/{number}"} for number in range(1, 10)]
    data["rollout"] |= {"decisions": 2}
    data["optim"] |= {"minibatch": 10}
    data["runtime"] |= {"mode": "inline"}
    config = parse_config(data, "test")
    before = {id(parameter) for parameter in living_parameters()}
    farm = FarmAssignment(1, (None,), (HERE,))
    place = Assignment("inline", (farm,) * 10, {"policy": (Affinity(),), "learner": (Affinity(),)}, hosts=(0,))
    with open_session(config) as session, start_run(RunSpec.of(config), tmp_path, session, place) as workers:
        workers.begin(None, 0)
        one = workers.iterate(0)
        own = list(workers.learner.call(LearnerRole.own_policy).parameters())
        alive = [parameter for parameter in living_parameters() if id(parameter) not in before]
    assert one.summary.env_steps == 20 and one.learned["learner/steps"] > 0
    assert {id(parameter) for parameter in alive} == {id(parameter) for parameter in own}


def living_parameters() -> list[nn.Parameter]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), nn.Parameter)]
