"""Steps one tabletop environment; never draws, and needs neither a GPU nor an OpenGL library."""

# MuJoCo fills its name space from compiled modules, which pyright cannot see.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.backends.tabletop.tasks import CONTROL_HZ, JOINTS, Marks, Task, describe, load_model
from sim_farm.contract import EpisodeOver, EpisodeSpec, Float32, PhysicsResult, SceneChange, TaskSpec
from sim_farm.perturbations import ObjectOffset, RobotOffset, direction

STEP = 0.03
"""Metres by which an action of 1 moves the tool centre point's set point away from where it is."""
FINGER_TRAVEL = 0.04


class TabletopPhysics:
    """One environment of a tabletop task.

    The goal is the mark that the instruction means. An episode ends unsolved where another mark is reached instead.
    Actions are [dx, dy, dz] or [dx, dy, dz, grip] in [-1, 1]. The state is qpos, qvel, goal, goal - tcp, and
    with a cube also cube - tcp and goal - cube, in metres and seconds (tcp is qpos[0:3]); proprioception is
    qpos and qvel of the robot's five joints. The scene is qpos and the marks' positions in float64.

    Sparse reward is 1 where the task is solved. Dense reward is that 1, and before it the progress made by
    the step: it adds up to at most 1 however long the robot lingers, so that lingering never pays.
    """

    def __init__(self, spec: TaskSpec):
        self._task, self.info = describe(spec)
        self._model = _model(self._task)
        self._data = mujoco.MjData(self._model)
        self._substeps = round(1 / (CONTROL_HZ * self._model.opt.timestep))
        # Views of MuJoCo's own memory: an attribute of MjData costs more than reading the array.
        self._qpos, self._qvel, self._ctrl = self._data.qpos, self._data.qvel, self._data.ctrl
        self._marks: Marks = ((0.0, 0.0, 0.0),) * self._task.marks
        self._goal = self._marks[0]
        self._progress = 0.0
        self._steps_left = 0

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        mujoco.mj_resetData(self._model, self._data)
        start, self._marks = self._task.begin(np.random.default_rng(episode.seed))
        self._goal = self._marks[self._task.goal]
        self._qpos[:] = start
        self._ctrl[:] = start[:5]
        self._data.mocap_pos[:] = self._marks
        self._progress = self._task.progress(start, self._goal)
        self._steps_left = self.info.max_episode_steps
        return self._result(_Executed([], [], False, False))

    def perturb(self, change: SceneChange, draw: np.random.Generator) -> PhysicsResult:
        """The objects are the cube, or else the marks."""
        if isinstance(change, RobotOffset):
            low, high = self._model.jnt_range[:JOINTS].T
            self._qpos[:JOINTS] = np.clip(self._qpos[:JOINTS] + change.norm * direction(draw, JOINTS), low, high)
            self._ctrl[:JOINTS] = self._qpos[:JOINTS]
        else:
            assert isinstance(change, ObjectOffset), "check_perturbations has seen the task"
            x, y = (change.distance * direction(draw, 2)).tolist()
            if self._task.has_cube:
                self._qpos[5:7] += x, y
            else:
                self._marks = tuple((mark[0] + x, mark[1] + y, mark[2]) for mark in self._marks)
                self._goal = self._marks[self._task.goal]
                self._data.mocap_pos[:] = self._marks
        self._progress = self._task.progress(self._qpos.tolist(), self._goal)
        return self._result(_Executed([], [], False, False))

    def step(self, actions: Float32) -> PhysicsResult:
        if self._steps_left == 0:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        rewards: list[float] = []
        successes: list[bool] = []
        over = False
        # Python's floats are faster than arrays of three.
        for action in np.clip(actions, -1.0, 1.0).tolist():
            reward, solved = self._advance(action)
            rewards.append(reward)
            successes.append(solved)
            self._steps_left -= 1
            over = not self.info.spec.ignore_terminations and (solved or self._failed())
            if over or self._steps_left == 0:
                break
        truncated = self._steps_left == 0 and not over
        if over:
            self._steps_left = 0
        return self._result(_Executed(rewards, successes, over, truncated))

    def settle(self, steps: int) -> PhysicsResult:
        for _ in range(steps):
            self._advance(list(self.info.rest_action))
        return self._result(_Executed([], [], False, False))

    def close(self) -> None:
        self._steps_left = 0

    def _advance(self, action: list[float]) -> tuple[float, bool]:
        """One env step: its reward and whether the task is solved after it."""
        x, y, z = self._qpos[:3].tolist()
        # The set point is relative to where the robot is, not to the last set point: no hidden state.
        # MuJoCo keeps it within the workspace (ctrlrange).
        dx, dy, dz = action[:3]
        self._ctrl[:3] = x + STEP * dx, y + STEP * dy, z + STEP * dz
        if len(action) == 4:
            self._ctrl[3:] = 0.5 * FINGER_TRAVEL * (action[3] + 1.0)
        mujoco.mj_step(self._model, self._data, self._substeps)
        q = self._qpos.tolist()
        before, self._progress = self._progress, self._task.progress(q, self._goal)
        if self._task.solved(q, self._goal):
            return 1.0, True
        return (0.0 if self.info.spec.reward == "sparse" else self._progress - before), False

    def _failed(self) -> bool:
        """True if the robot has reached a mark other than the goal."""
        if len(self._marks) == 1:
            return False
        q = self._qpos.tolist()
        return any(self._task.solved(q, mark) for mark in self._marks if mark is not self._goal)

    def _result(self, executed: _Executed) -> PhysicsResult:
        ends = np.zeros((2, len(executed.rewards)), np.bool_)
        if executed.rewards:
            ends[:, -1] = executed.over, executed.truncated
        qpos, qvel, goal = self._qpos, self._qvel, np.array(self._goal)
        tcp, cube = qpos[:3], qpos[5:8]
        differences = (cube - tcp, goal - cube) if self._task.has_cube else ()
        return PhysicsResult(
            reward=np.array(executed.rewards, np.float32),
            success=np.array(executed.successes, np.bool_),
            terminated=ends[0],
            truncated=ends[1],
            proprio=np.concatenate((qpos[:5], qvel[:5]), dtype=np.float32),
            state=np.concatenate((qpos, qvel, goal, goal - tcp, *differences), dtype=np.float32),
            scene=np.concatenate((qpos, *self._marks)).view(np.uint8),
            instruction=self._task.instruction,
        )


@dataclass(frozen=True)
class _Executed:
    """Results of the executed steps of a chunk; `over` and `truncated` hold for the last of them."""

    rewards: list[float]
    successes: list[bool]
    over: bool
    """The task ended the episode, solved or failed."""
    truncated: bool


@functools.cache
def _model(task: Task) -> mujoco.MjModel:
    """The task's compiled scene. Stepping does not write to it, so a process needs only one."""
    return load_model(task)
