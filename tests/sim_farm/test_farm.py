"""The farm's client: what it computes depends on seeds and actions, never on workers, groups or order."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from sim_farm.backends.tabletop import TabletopPhysics, TabletopRenderer
from sim_farm.client.farm import RENDERER_START_S, Farm, GroupError, WorkerFailed, WorkerTimeout
from sim_farm.client.observations import StaleFrame, UnwrittenFrame
from sim_farm.contract import Backend, EpisodeSpec, FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes, ListedEpisodes, evaluation_episodes
from sim_farm.registry import BACKENDS, make_physics, make_renderer
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.memory import MAGIC
from sim_farm.shared_memory.slot_layout import FarmSpec, WorkerMemory
from sim_farm.workers.hosts import InProcess, WorkerHandle
from sim_farm.workers.worker import WorkerSetup
from tests.sim_farm.driving import Row, Trace, actions_for, append, assert_same, drive, mixed_policy, run
from tests.variants import often

REACH = TaskSpec("tabletop/reach", cameras=2, image_size=24, max_episode_steps=7)
CHUNKS = 7
SPEC = FarmSpec(REACH, EndlessEpisodes(run_seed=5), num_envs=8, chunk=3, final_frames="truncated")


def expected(spec: FarmSpec, env: int) -> Iterator[Row]:
    """The farm's law, written down once more: a new environment for every episode, and no farm."""
    renderer = make_renderer(spec.task)
    episode, step = 0, 0
    physics = make_physics(spec.task)
    result = physics.reset(spec.episodes.spec(env, 0))  # type: ignore[arg-type]
    row: Row = {"steps": 0, "reward": np.zeros(3, np.float32), "terminated": False, "truncated": False}
    for number in range(CHUNKS + 1):
        pictures = {name: frames[0] for name, frames in renderer.render([result.scene], renderer.info.cameras).items()}
        here = {"state": result.state, "proprio": result.proprio, "episode": episode, "episode_step": step}
        yield row | here | pictures
        result = physics.step(mixed_policy(env, number, result.state))
        reward = np.zeros(3, np.float32)
        reward[: result.steps] = result.reward
        row = {"steps": result.steps, "reward": reward, "terminated": bool(result.terminated[-1])}
        row["truncated"] = bool(result.truncated[-1])
        step += result.steps
        if result.ended:
            row |= {"final state": result.state, "final proprio": result.proprio, "final drawn": row["truncated"]}
            if row["truncated"]:
                drawn = renderer.render([result.scene], renderer.info.cameras).items()
                row |= {f"final {name}": frames[0] for name, frames in drawn}
            episode, step = episode + 1, 0
            physics.close()
            physics = make_physics(spec.task)
            result = physics.reset(spec.episodes.spec(env, episode))  # type: ignore[arg-type]
    physics.close()
    renderer.close()


@pytest.fixture(scope="module")
def plain() -> Trace:
    """The simplest farm: one worker that draws its own frames, one group."""
    return run(SPEC)


def test_an_ended_episodes_environment_begins_the_next_at_once(plain: Trace) -> None:
    """Rows, episodes, final observations and frames equal those of a new environment for every episode."""
    for env in (0, 1, 6, 7):
        for moment, want in enumerate(expected(SPEC, env)):
            for name, value in want.items():
                seen = plain[env][moment][name]
                assert np.array_equal(seen, value), f"environment {env}, moment {moment}: {name} is {seen}, not {value}"
    rows = [row for trace in plain.values() for row in trace]
    assert any(row["terminated"] for row in rows), "no compared episode was solved"
    assert any(row["truncated"] for row in rows), "no compared episode reached its limit"


SHAPES: dict[str, dict[str, Any]] = {
    "two groups": {"groups": 2},
    "2 physics": {"physics_workers": 2},
    "4 physics": {"physics_workers": 4},
    "1 render": {"render_workers": 1},
    "2 physics, 2 render": {"physics_workers": 2, "render_workers": 2},
    "two groups, 4 physics, 1 render": {"groups": 2, "physics_workers": 4, "render_workers": 1},
    "four groups, 2 physics, 3 render": {"groups": 4, "physics_workers": 2, "render_workers": 3},
}


OFTEN = ("two groups, 4 physics, 1 render", "four groups, 2 physics, 3 render")


@pytest.mark.parametrize("name", often(OFTEN, SHAPES))
def test_a_plan_changes_when_and_where_never_what(plain: Trace, name: str) -> None:
    assert_same(plain, run(replace(SPEC, **SHAPES[name])), f"{name} changes results")


def test_the_order_of_stages_changes_nothing(plain: Trace) -> None:
    """One group may run ahead of the other by any number of chunks."""
    trace: Trace = {env: [] for env in range(SPEC.num_envs)}
    with closing(Farm.create(replace(SPEC, groups=2), InProcess())) as farm:
        numbers = [-1, -1]
        for group in (0, 0, 1, 0, 0, 0, 1, 1, 1, 1, 0, 1, 0, 1, 0, 1):
            if numbers[group] < 0:
                farm.reset(group)
            else:
                farm.submit(group, actions_for(farm, group, numbers[group]))
            numbers[group] += 1
            append(trace, farm.collect(group))
    assert_same(plain, trace, "the order of groups changes results")


# --- listed episodes


def controller(env: int, number: int, state: np.ndarray) -> np.ndarray:
    """Depends on the state alone, so that an episode does not depend on where and when it is run."""
    return np.repeat(state[None, 13:16] / 0.12, 3, axis=0).astype(np.float32)


def trials(num_envs: int, count: int) -> dict[int, tuple[float, int, bytes]]:
    """Each listed episode's return, length and last state."""
    episodes = ListedEpisodes(evaluation_episodes(1, count), num_envs)
    trace = run(replace(SPEC, episodes=episodes, num_envs=num_envs), controller, chunks=3 * (count // num_envs + 1) + 1)
    found: dict[int, tuple[float, int, bytes]] = {}
    for env, rows in trace.items():
        total, steps = 0.0, 0
        for before, row in zip(rows, rows[1:], strict=False):
            total, steps = total + float(row["reward"].sum()), steps + int(row["steps"])
            if row["terminated"] or row["truncated"]:
                trial = episodes.trial(env, int(before["episode"]))
                assert trial not in found, f"episode {trial} was run twice"
                found[trial] = (total, steps, row["final state"].tobytes())
                total, steps = 0.0, 0
        assert not rows[-1]["active"], "an environment goes on after the last listed episode"
        for name in ("state", "proprio", "reward", "steps", "success", "terminated", "truncated"):
            assert not np.any(rows[-1][name]), f"the {name} of a resting environment is not zero"
    return found


@pytest.mark.parametrize("num_envs", often([2], [1, 2, 5, 9]))
def test_listed_episodes_are_each_run_once_whatever_the_number_of_environments(num_envs: int) -> None:
    found = trials(num_envs, count=7)
    assert sorted(found) == list(range(7))
    assert found == trials(3, count=7)


def test_a_resting_environment_shows_zeros() -> None:
    spec = replace(SPEC, episodes=ListedEpisodes((EpisodeSpec(0),), 2), num_envs=2)
    with closing(Farm.create(spec, InProcess())) as farm:
        farm.reset(0)
        seen = farm.collect(0)
    assert seen.active.tolist() == [True, False]
    for name, picture in seen.frames.items():
        assert not picture[1].any(), f"camera {name} of an environment that never ran shows something"


def test_evaluation_never_meets_a_training_seed() -> None:
    training = {EndlessEpisodes(0).spec(env, episode).seed for env in range(50) for episode in range(50)}
    evaluation = {episode.seed for episode in evaluation_episodes(0, 500)}
    assert len(evaluation) == 500 and not training & evaluation


# --- frames that nobody looks at are not drawn

DRAWN = {"frames": 0}


class _CountedRenderer(TabletopRenderer):
    """The tabletop's renderer, which also counts."""

    def render(self, scenes: Any, cameras: Any, out: Any = None) -> Any:
        DRAWN["frames"] += len(scenes) * len(cameras)
        return super().render(scenes, cameras, out)


def _tabletop(spec: TaskSpec) -> TaskSpec:
    return replace(spec, name="tabletop/reach")


BACKEND = Backend(
    "counted",
    make_physics=lambda spec: TabletopPhysics(_tabletop(spec)),
    make_renderer=lambda spec: _CountedRenderer(_tabletop(spec)),
    tasks=lambda: ["reach"],
)


@pytest.mark.parametrize("wanted", ["never", "truncated", "ended"])
@pytest.mark.parametrize("render_workers", often([2], [0, 2]))
def test_frames_are_drawn_only_when_wanted(wanted: str, render_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "counted", __name__)
    task = replace(REACH, name="counted/reach")
    DRAWN["frames"] = 0
    trace = run(replace(SPEC, task=task, final_frames=wanted, render_workers=render_workers))
    rows = [row for trace in trace.values() for row in trace]
    truncated = sum(bool(row["truncated"]) for row in rows)
    ended = sum(bool(row["terminated"]) for row in rows) + truncated
    finals = {"never": 0, "truncated": truncated, "ended": ended}[wanted]
    assert 0 < truncated < ended
    assert sum(bool(row.get("final drawn")) for row in rows) == finals
    assert DRAWN["frames"] == 2 * (len(rows) + finals), "one picture per camera, chunk and wanted final observation"


def test_without_cameras_nothing_is_drawn(monkeypatch: pytest.MonkeyPatch, plain: Trace) -> None:
    monkeypatch.setitem(BACKENDS, "counted", __name__)
    DRAWN["frames"] = 0
    blind = replace(SPEC, task=replace(REACH, name="counted/reach", cameras=0), render_workers=2)
    trace = run(blind)
    assert DRAWN["frames"] == 0
    for env, rows in trace.items():
        for row, seen in zip(rows, plain[env], strict=True):
            assert row["state"].tobytes() == seen["state"].tobytes(), "cameras change what happens"


@pytest.mark.parametrize(
    "missing",
    [np.s_[:], pytest.param(np.s_[0], marks=pytest.mark.slow), np.s_[1]],
    ids=["all", "first camera", "second camera"],
)
@pytest.mark.parametrize("kind", ["frame", "final"])
def test_a_frame_that_was_not_drawn_is_noticed(kind: str, missing: Any) -> None:
    with closing(Farm.create(replace(SPEC, final_frames="ended"), InProcess())) as farm:
        drive(farm, end=2)
        farm.submit(0, actions_for(farm, 0, 2))
        slots = farm.tasks[0].slots
        ended = np.flatnonzero(slots["truncated"])
        assert farm.frames is not None
        farm.frames.frames[slots[f"{kind}_row"][ended[0]]][missing] = MAGIC
        with pytest.raises(UnwrittenFrame, match=f"environment {ended[0]}'s"):
            farm.collect(0)


@pytest.mark.parametrize("column", [0, 1], ids=["episode", "env step"])
def test_a_frame_of_another_moment_is_noticed(column: int) -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=2)
        farm.submit(0, actions_for(farm, 0, 2))
        assert farm.frames is not None
        farm.frames.frames_of[3, column] += 1
        with pytest.raises(StaleFrame, match="environment 3 is at episode"):
            farm.collect(0)


def test_a_renderer_that_hangs_at_its_start_is_named_with_the_way_out() -> None:
    spec = replace(SPEC, render_workers=1)
    with closing(Farm.create(spec, InProcess())) as farm:
        slots = farm.tasks[0].slots
        slots["since_ns"][1] = time.monotonic_ns() - int(1e9 * (RENDERER_START_S - 20))
        slots["phase"][1] = slot_layout.OPENING
        farm.check()
        slots["since_ns"][1] -= int(30e9)
        with pytest.raises(WorkerFailed, match="render 0 has been starting its renderer.*MUJOCO_GL=osmesa"):
            farm.check()


@dataclass
class _WithoutFrameWriters(InProcess):
    """Render workers that are never rung."""

    shared = False
    closed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        return super().launch(setup, memory) if setup.is_physics else _Idle(setup.index, self.closed)


@dataclass(frozen=True)
class _Idle:
    index: int
    closed: list[int]

    def ring(self) -> None:
        return

    def close(self, deadline_s: float) -> None:
        self.closed.append(self.index)


def test_a_late_worker_is_named_with_its_phase_and_the_time() -> None:
    with closing(Farm.create(replace(SPEC, render_workers=2), _WithoutFrameWriters())) as farm:
        farm.reset(0)
        with pytest.raises(WorkerTimeout, match="render 0 .* within 1 s: .*starting.* environment 0 to draw"):
            farm.collect(0, deadline_s=1)


# --- calls out of turn, wrong shapes


def test_calls_out_of_turn_are_refused() -> None:
    with closing(Farm.create(replace(SPEC, groups=2), InProcess())) as farm:
        actions = np.zeros((4, 3, 3), np.float32)
        with pytest.raises(GroupError, match="group 1 is not yet reset"):
            farm.submit(1, actions)
        with pytest.raises(GroupError, match="group 1 is not yet reset"):
            farm.collect(1)
        with pytest.raises(GroupError, match="snapshot"):
            farm.snapshot()
        farm.reset(0)
        with pytest.raises(GroupError, match="group 0 is submitted"):
            farm.reset(0)
        with pytest.raises(GroupError, match="group 0 is submitted"):
            farm.submit(0, actions)
        farm.collect(0)
        with pytest.raises(GroupError, match="group 0 is collected"):
            farm.collect(0)
        farm.submit(0, actions)
        with pytest.raises(GroupError, match="group 0 is submitted"):
            farm.submit(0, actions)


def test_wrong_action_shape_names_the_right_one() -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        farm.reset(0)
        farm.collect(0)
        with pytest.raises(FarmError, match=r"\(8, 3, 3\), got \(8, 3\)"):
            farm.submit(0, np.zeros((8, 3), np.float32))
        farm.submit(0, np.zeros((8, 3, 3), np.float32))


def test_indivisible_environments_name_a_number_that_divides() -> None:
    spec = replace(SPEC, num_envs=6, physics_workers=2, groups=2)
    with pytest.raises(FarmError, match="6 environments .* 2 physics workers x 2 groups; use a multiple of 4"):
        Farm.create(spec, InProcess())


@pytest.mark.parametrize(
    "wrong",
    [{"num_envs": 0}, {"num_envs": -8}, {"chunk": 0}, {"groups": 0}, {"physics_workers": 0}, {"render_workers": -1}]
    + [{"final_frames": "always"}],
    ids=str,
)
def test_an_impossible_shape_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(FarmError):
        Farm.create(replace(SPEC, **wrong), InProcess())


# --- snapshots


def test_a_restored_farm_continues_bit_for_bit(plain: Trace) -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=4)
        snapshot = farm.snapshot()
    other = replace(SPEC, groups=2, physics_workers=2, render_workers=1)
    with closing(Farm.create(other, InProcess())) as farm:
        farm.restore(snapshot)
        resumed = drive(farm, begin=4)
    for env, rows in resumed.items():
        for name in ("state", "proprio", "front", "wrist", "episode", "episode_step", "active", "instruction"):
            assert np.array_equal(rows[0][name], plain[env][4][name]), f"{name} after a restore"
        assert not rows[0]["steps"] and not rows[0]["reward"].any(), "a restore executes steps"
    tails = {env: rows[1:] for env, rows in resumed.items()}
    assert_same(tails, {env: rows[5:] for env, rows in plain.items()}, "a restored farm goes on differently")


def test_a_snapshot_of_another_shape_is_refused() -> None:
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=1)
        snapshot = farm.snapshot()
    with closing(Farm.create(replace(SPEC, num_envs=4), InProcess())) as farm:
        with pytest.raises(FarmError, match="resume with the same environments"):
            farm.restore(snapshot)


def test_a_farm_whose_start_fails_ends_the_workers_that_had_started() -> None:
    host = _FailsAtTheThird()
    with pytest.raises(FarmError, match="the third worker"):
        Farm.create(replace(SPEC, render_workers=2), host)
    assert host.closed == [1], "a started worker was not closed"


class _FailsAtTheThird(_WithoutFrameWriters):
    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        if setup.index == 2:
            raise FarmError("the third worker does not start")
        return super().launch(setup, memory)
