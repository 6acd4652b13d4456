"""Decisions on several observations: a farm shows what single env steps show, and draws each picture once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim_farm.backends.tabletop import TabletopRenderer
from sim_farm.client.farm import Farm, GroupError
from sim_farm.client.task_farm import count_own_rows
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.observation_history import FrameRows, ObservationHistory
from sim_farm.registry import make_physics, make_renderer
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import Row, Trace, append
from tests.sim_farm.test_workers import MortalProcesses

REACH = TaskSpec("tabletop/reach", cameras=2, image_size=24, max_episode_steps=11)
CHUNKS = 9
SHAPES = [(2, 1, 1), (2, 1, 4), (3, 2, 1), (3, 2, 3), (4, 1, 2), (2, 5, 2), (3, 3, 4), (1, 1, 3)]
"""K, d and C."""


def spec_of(observations: int, distance: int, chunk: int, task: TaskSpec = REACH, **more: Any) -> FarmSpec:
    shape: dict[str, Any] = {"num_envs": 4, "final_frames": "ended", **more}
    return FarmSpec(
        task, EndlessEpisodes(run_seed=5), chunk=chunk, observations=observations, distance=distance, **shape
    )


def actions(env: int, number: int, spec: FarmSpec, dims: int, state: np.ndarray) -> np.ndarray:
    """Environments with odd numbers reach for the goal, which ends episodes; the others wander until the limit."""
    if env % 2 and spec.task == REACH:
        return np.repeat(state[None, 13:16] / 0.09, spec.chunk, axis=0).astype(np.float32)
    return np.random.default_rng((env, number)).uniform(-1, 1, (spec.chunk, dims)).astype(np.float32)


def expected(spec: FarmSpec, env: int) -> Iterator[Row]:
    """The law, written down once more: single env steps, all of whose observations are remembered."""
    renderer, physics = make_renderer(spec.task), make_physics(spec.task)

    def shown(name: str) -> Row:
        """The K observations up to the last one, of the episode so far."""
        at = [max(0, len(seen) - 1 - k * spec.distance) for k in range(spec.observations - 1, -1, -1)]
        row: Row = {f"{name}state": np.stack([seen[i].state for i in at])}
        row |= {f"{name}proprio": np.stack([seen[i].proprio for i in at])}
        drawn = [renderer.render([seen[i].scene], renderer.info.cameras) for i in at]
        return row | {f"{name}{camera}": np.stack([one[camera][0] for one in drawn]) for camera in drawn[0]}

    episode, ended, steps = 0, dict[str, Any](), 0
    seen = [physics.reset(spec.episodes.spec(env, episode))]  # type: ignore[arg-type]
    for number in range(CHUNKS + 1):
        row = {"episode": episode, "episode_step": len(seen) - 1, "steps": steps} | shown("") | ended
        yield {
            key: value[0] if spec.observations == 1 and isinstance(value, np.ndarray) else value
            for key, value in row.items()
        }
        ended = {}
        for steps, action in enumerate(actions(env, number, spec, physics.info.action_dim, seen[-1].state), start=1):  # noqa: B007
            seen.append(physics.step(action[None]))
            if seen[-1].ended:
                ended = shown("final ")
                episode += 1
                seen = [physics.reset(spec.episodes.spec(env, episode))]  # type: ignore[arg-type]
                break
    physics.close()
    renderer.close()


def drive(farm: Farm, begin: int = 0, end: int = CHUNKS, kill: Any = None) -> Trace:
    trace: Trace = {env: [] for env in range(farm.specs[0].num_envs)}
    groups, spec, dims = range(farm.groups), farm.specs[0], farm.infos[0].action_dim
    if begin == 0:
        for group in groups:
            farm.reset(group)
        for group in groups:
            append(trace, farm.collect(group))
    for number in range(begin, end):
        for group in groups:
            state = farm.tasks[0].slots["state"]
            envs = farm.envs_of(group).tolist()
            farm.submit(group, np.stack([actions(env, number, spec, dims, state[env]) for env in envs]))
        if kill is not None:
            kill(number)
        for group in groups:
            append(trace, farm.collect(group))
    return trace


def check(spec: FarmSpec, trace: Trace) -> None:
    for env, rows in trace.items():
        for number, (wanted, found) in enumerate(zip(expected(spec, env), rows, strict=True)):
            for name, value in wanted.items():
                assert np.array_equal(value, found[name]), f"environment {env}, chunk {number}: {name}"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("plan", [{}, {"groups": 2, "physics_workers": 2, "render_workers": 1}])
def test_decisions_see_what_single_env_steps_show(shape: tuple[int, int, int], plan: dict[str, Any]) -> None:
    spec = spec_of(*shape, **plan)
    with closing(Farm.create(spec, InProcess())) as farm:
        check(spec, drive(farm))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["maniskill/PushCube-v1", "libero/libero_spatial/0", "gymnasium/Pendulum-v1"])
@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 2, 3)])
def test_other_simulators_too(name: str, shape: tuple[int, int, int]) -> None:
    task = TaskSpec(name, cameras=1, image_size=64, max_episode_steps=7)
    with closing(Farm.create(spec_of(*shape, task=task, num_envs=2), InProcess())) as farm:
        check(farm.specs[0], drive(farm))


@pytest.mark.parametrize("shape", SHAPES)
def test_each_picture_is_drawn_once_and_no_other(shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, render = list[bytes](), TabletopRenderer.render

    def counting(self: Any, scenes: Any, *rest: Any) -> Any:
        drawn.extend(scene.tobytes() for scene in scenes)
        return render(self, scenes, *rest)

    monkeypatch.setattr(TabletopRenderer, "render", counting)
    spec = spec_of(*shape, num_envs=1, final_frames="never")
    looked = set[tuple[int, int]]()
    with closing(Farm.create(spec, InProcess())) as farm:
        for row in drive(farm)[0]:
            back = [k * spec.distance for k in range(spec.observations)]
            looked |= {(row["episode"], max(0, row["episode_step"] - each)) for each in back}
    assert len(set(drawn)) == len(drawn) >= len(looked)
    if spec.distance == 1 or spec.chunk == 1:  # else some are drawn for a decision that the episode's end prevents
        assert len(drawn) == len(looked)


def test_a_lost_worker_leaves_no_trace() -> None:
    spec = spec_of(3, 2, 3, physics_workers=2, render_workers=1)
    with closing(MortalProcesses()) as host, closing(Farm.create(spec, host)) as farm:

        def kill(number: int) -> None:
            if number in (2, 5, 6):
                host.replace_worker(number % 3)

        check(spec, drive(farm, kill=kill))


@pytest.mark.parametrize("shape", [(2, 1, 1), (3, 2, 1), (3, 2, 3), (4, 1, 2)])
def test_a_restored_farm_continues_bit_for_bit(shape: tuple[int, int, int]) -> None:
    spec = spec_of(*shape)
    with closing(Farm.create(spec, InProcess())) as farm:
        whole = drive(farm)
    with closing(Farm.create(spec, InProcess())) as farm:
        drive(farm, end=4)
        snapshot = farm.snapshot()
    with closing(Farm.create(spec, InProcess())) as farm:
        farm.restore(snapshot)
        trace: Trace = {env: [] for env in range(spec.num_envs)}
        farm.reset(0)
        append(trace, farm.collect(0, 60))
        for env, rows in drive(farm, begin=4).items():
            trace[env] += rows
    for env, rows in trace.items():
        for before, after in zip(whole[env][4:], rows, strict=True):
            assert_same_shown(before, after)


def assert_same_shown(before: Row, after: Row) -> None:
    for name in ("episode", "episode_step", "state", "proprio", *REACH_CAMERAS):
        assert np.array_equal(before[name], after[name]), name


REACH_CAMERAS = ("front", "wrist")


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_that_a_later_decision_refers_to_are_not_drawn_over(shape: tuple[int, int, int]) -> None:
    """A ring of as many rounds as `rounds` and one holds all that a decision looks at."""
    history = ObservationHistory(*shape)
    rows = FrameRows(history, history.rounds + 1, columns=3, first=7)
    columns = np.arange(3)
    shown = dict[int, int]()
    now = rows.at_reset(0, columns)
    shown |= {row: -back for row, back in zip(now[0].tolist(), (0, *history.kept), strict=True)}
    assert len({*rows.at_reset(0, columns).ravel().tolist()}) == now.size and now.max() < 7 + rows.count
    for turn in range(1, 40):
        drawn = rows.at(turn % rows.rounds, columns)
        step = turn * history.chunk
        shown |= {
            row: step - back for row, back in zip(drawn[0].tolist(), (0, *history.kept[: history.new]), strict=True)
        }
        now = history.next_rows(now, drawn)
        seen = history.rows_of(now)
        assert [shown[row] for row in seen[0].tolist()] == [step - back for back in (*history.back, 0)]
        assert seen.max() < 7 + rows.count and seen.min() >= 7


def test_a_history_costs_rows_for_what_is_new() -> None:
    plain = spec_of(1, 1, 1)
    assert count_own_rows(plain) == 2 * plain.num_envs
    assert ObservationHistory(2, 1, 1).new == 0 and ObservationHistory(2, 1, 8).new == 1
    one, two = (FrameRows(ObservationHistory(k, 1, 1), 64, 8).count for k in (1, 2))
    assert two <= 1.1 * one


def test_histories_that_cannot_be_are_refused() -> None:
    cases: list[dict[str, Any]] = [{"observations": 0}, {"distance": 0}]
    for wrong in cases:
        with pytest.raises(FarmError, match=f"a farm's {next(iter(wrong))} is at least 1, got 0"):
            Farm.create(replace(spec_of(2, 1, 1), **wrong), InProcess())
    with closing(Farm.create(spec_of(2, 1, 1), InProcess())) as farm:
        with pytest.raises(GroupError, match="one observation"):
            farm.begin(0, np.ones(4, np.bool_), np.arange(4))
