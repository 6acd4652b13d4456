"""States of robosuite's recordings of LIBERO's tasks, which LIBERO's demonstrations and robomimic's datasets hold.

    state               [1 + nq + nv] time, positions and velocities, as MuJoCo's `states` in the file
    body_pos/NAME       [3] a body's place in its parent, of the recording's model
    body_quat/NAME      [4] its orientation
    grip                [1] the gripper's action before the recording begins

LIBERO moves fixtures by changing the model, so that the state alone does not say where they are. How far the gripper
was told to close is in neither: robosuite moves that by a hundredth per simulation step, from the middle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.libero.control import PERIOD, SIMULATION_STEPS
from sim_farm.contract import FarmError, SimulatorState

STATE, POSITION, QUATERNION, GRIP = "state", "body_pos/", "body_quat/", "grip"
SAME_M = 1e-3
"""Bodies that nothing moves lie within this distance of where the task has them, in a recording of the task."""


def place_fixtures(env: Any, start: SimulatorState) -> None:
    """Put the fixtures where the recording's model has them. Raises `FarmError` where the model is another one."""
    model = env.sim.model._model
    if start[STATE].shape != (1 + model.nq + model.nv,):
        raise FarmError(
            f"the recorded states have {start[STATE].size} numbers, the task's {1 + model.nq + model.nv}: it is a "
            "recording of another task or robot"
        )
    fixtures = {env.obj_body_id[name] for name in env.fixtures_dict}
    recorded = {name.removeprefix(POSITION) for name in start if name.startswith(POSITION)}
    if not recorded:
        return
    own = {model.body(i).name: i for i in range(1, model.nbody)}
    if recorded != set(own):
        more, less = sorted(recorded - set(own)), sorted(set(own) - recorded)
        raise FarmError(
            f"the recorded scene is another one: it has the bodies {', '.join(more[:5]) or 'of the task'}, and lacks "
            f"{', '.join(less[:5]) or 'none'}"
        )
    for name, body in own.items():
        position, quaternion = start[POSITION + name], start[QUATERNION + name]
        if body in fixtures:
            model.body_pos[body], model.body_quat[body] = position, quaternion
        elif not _free(model, body):
            distance = float(np.abs(model.body_pos[body] - position).max())
            turned = 1 - abs(float(model.body_quat[body] @ quaternion))
            if not (distance < SAME_M and turned < SAME_M):
                raise FarmError(
                    f"the recorded scene is another one: {name} lies {distance:.3g} m from where the task has it"
                )


def take_grip(env: Any, start: SimulatorState) -> None:
    """Move the gripper's target as far as it has come at the recording's time, if its action was always `grip`."""
    gripper = env.robots[0].gripper
    gripper.current_action = np.zeros(len(gripper.actuators))
    if GRIP not in start:
        return
    steps = round(float(start[STATE][0]) / PERIOD) * SIMULATION_STEPS
    for _ in range(min(max(steps, 0), int(1 / gripper.speed))):
        gripper.format_action(start[GRIP])


def state_deviation(data: Any, recorded: SimulatorState) -> float:
    """See `sim_farm.contract.RecordedPhysics.deviation`."""
    state: npt.NDArray[Any] = recorded[STATE]
    if state.shape != (1 + len(data.qpos) + len(data.qvel),):
        return float("inf")
    positions, velocities = np.split(state[1:], [len(data.qpos)])
    furthest = float(np.abs(positions - data.qpos).max())
    return furthest if np.array_equal(velocities, data.qvel) else max(furthest, np.finfo(np.float64).tiny)


def _free(model: Any, body: int) -> bool:
    """Whether the body floats: its place in the model says nothing then."""
    return bool(model.body_jntnum[body] == 1 and model.jnt_type[model.body_jntadr[body]] == 0)
