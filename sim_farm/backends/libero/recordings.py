"""Episodes of LIBERO's tasks as robosuite recorded them: LIBERO's demonstrations, robomimic's datasets.

    state   [1 + nq + nv] time, positions and velocities, as MuJoCo's `states` in the file
    grip    [1] the gripper's action before the recording begins
    model   [bytes] the recording's model in MuJoCo's XML (`model_file`), UTF-8; may be missing

The model decides as much as the state does. LIBERO moves fixtures by changing it, and robosuite's recorder reloads it
from XML before the first action, with all numbers rounded to six digits: on a model that is not rounded, objects fall
differently within some steps. How far the gripper was told to close is in neither: robosuite moves that by a hundredth
per simulation step, from the middle.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
import numpy.typing as npt

from sim_farm.backends.libero.control import PERIOD, SIMULATION_STEPS
from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.contract import FarmError, SimulatorState

STATE, GRIP, MODEL = "state", "grip", "model"
DEFAULTS = {"pos": "0 0 0", "quat": "1 0 0 0"}
"""A body's place and orientation where MuJoCo's XML does not name them."""
SAME = 1e-3
"""Bodies that nothing moves lie within this distance (m) of where the task has them, in a recording of the task."""


class RecordedModel:
    """The model of one environment, which can be given the numbers of a recording's, and its own again."""

    def __init__(self, env: Any) -> None:
        self._env = env
        self._model: mujoco.MjModel = env.sim.model._model
        self._own: mujoco.MjModel | None = None
        """Copy of the model as it was before a recording's numbers were put into it."""
        self._xml: Element | None = None

    def restore(self) -> None:
        if self._own is not None:
            _copy_numbers(self._own, self._model)
            self._own = None

    def take(self, start: SimulatorState) -> None:
        """Put the recording's numbers into the model. Raises `FarmError` where it is a model of another scene."""
        if start[STATE].shape != (1 + self._model.nq + self._model.nv,):
            raise FarmError(
                f"the recorded states have {start[STATE].size} numbers, the task's "
                f"{1 + self._model.nq + self._model.nv}: it is a recording of another task or robot"
            )
        if MODEL not in start:
            return
        recorded = _parsed(start[MODEL].tobytes())
        self._own = copy.copy(self._model)
        self._place_fixtures(dict(_poses(recorded)))
        whole = copy.deepcopy(self._saved())
        if _fill(whole, recorded):
            try:
                compiled = mujoco.MjModel.from_xml_string(ElementTree.tostring(whole, encoding="unicode"))
            except ValueError as error:
                raise FarmError(f"the recorded model cannot be compiled ({error})") from error
            _copy_numbers(compiled, self._model)

    def _saved(self) -> Element:
        """The task's own model as MuJoCo saves it, as robosuite's recorder did."""
        if self._xml is None:
            model = mujoco.MjModel.from_xml_string(self._env.model.get_xml())
            with TemporaryDirectory() as folder:
                path = Path(folder) / "model.xml"
                mujoco.mj_saveLastXML(str(path), model)
                self._xml = _parsed(path.read_bytes())
        return self._xml

    def _place_fixtures(self, poses: dict[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]) -> None:
        model = self._model
        fixtures = {self._env.obj_body_id[name] for name in self._env.fixtures_dict}
        own = {model.body(i).name: i for i in range(1, model.nbody)}
        if set(poses) != set(own):
            more, less = sorted(set(poses) - set(own)), sorted(set(own) - set(poses))
            raise FarmError(
                f"the recorded scene is another one: it also has the bodies {', '.join(more[:5]) or '(none)'}, and "
                f"lacks {', '.join(less[:5]) or '(none)'}"
            )
        for name, (position, quaternion) in poses.items():
            body = own[name]
            if body in fixtures:
                model.body_pos[body], model.body_quat[body] = position, quaternion
            elif not _floats(model, body):
                distance = float(np.abs(model.body_pos[body] - position).max())
                turned = 1 - abs(float(model.body_quat[body] @ quaternion))
                if not (distance < SAME and turned < SAME):
                    raise FarmError(
                        f"the recorded scene is another one: {name} lies {distance:.3g} m from where the task has it"
                    )


def continue_control(env: Any, start: SimulatorState) -> None:
    """Bring the controller to where it is at the recording's time, as far as that is known.

    At time 0 it is as a reset leaves it: it aims from where the reset saw the robot. Later it sees the robot where it
    is, and the gripper's target has come as far as it does if its action was always `grip`. The goal of orientation
    stays the reset's: robosuite keeps it until an action turns it.
    """
    robot = env.robots[0]
    gripper = robot.gripper
    gripper.current_action = np.zeros(len(gripper.actuators))
    steps = max(round(float(start[STATE][0]) / PERIOD), 0)
    robot.controller.new_update = steps > 0
    for _ in range(min(steps * SIMULATION_STEPS, int(1 / gripper.speed))):
        gripper.format_action(start[GRIP])


def state_deviation(data: Any, recorded: SimulatorState) -> float:
    """See `sim_farm.contract.RecordedPhysics.deviation`."""
    state: npt.NDArray[Any] = recorded[STATE]
    if state.shape != (1 + len(data.qpos) + len(data.qvel),):
        return math.inf
    positions, velocities = np.split(state[1:], [len(data.qpos)])
    furthest = float(np.abs(positions - data.qpos).max())
    return furthest if np.array_equal(velocities, data.qvel) else max(furthest, np.finfo(np.float64).tiny)


def _parsed(text: bytes) -> Element:
    """The XML; nothing that it names is opened. Raises `FarmError`."""
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise FarmError("the recorded model declares entities, which no MuJoCo model needs")
    try:
        return ElementTree.fromstring(text)  # noqa: S314  without entities it can do no harm
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise FarmError(f"the recorded model is no XML ({error})") from error


def _poses(model: Element) -> Iterator[tuple[str, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]]:
    """Position [3] and unit quaternion [4] of every named body, in its parent."""
    for body in model.iterfind("worldbody//body"):
        name = body.get("name")
        if name is not None:
            position, quaternion = _vector(body, "pos"), _vector(body, "quat")
            length = float(np.linalg.norm(quaternion))
            if not length:
                raise FarmError(f"the recorded model's body {name[:100]!r} has no orientation")
            yield name, (position, quaternion / length)


def _vector(body: Element, attribute: str) -> npt.NDArray[np.float64]:
    values = _numbers(body.get(attribute, DEFAULTS[attribute]))
    if values is None or len(values) != len(DEFAULTS[attribute].split()):
        raise FarmError(f"the recorded model's body {str(body.get('name'))[:100]!r} has no {attribute} of numbers")
    return np.array(values)


def _numbers(text: str) -> list[float] | None:
    """The finite numbers that the text lists; None where it is other text."""
    try:
        values = [float(word) for word in text.split()]
    except ValueError:
        return None
    return values if values and all(map(math.isfinite, values)) else None


def _fill(own: Element, recorded: Element, within: bool = False) -> bool:
    """Put the recorded numbers of all bodies into `own`, the task's model. False, and `own` is of no use, where the two
    differ in more than numbers of bodies and paths of files: another version of MuJoCo saved it."""
    if own.tag != recorded.tag or len(own) != len(recorded):
        return False
    within |= own.tag == "worldbody"
    defaults = DEFAULTS if within and own.tag == "body" else {}
    for key in set(own.attrib) | set(recorded.attrib):
        before, now = (element.get(key, defaults.get(key)) for element in (own, recorded))
        if before is None or now is None:
            return False
        numbers = _numbers(before), _numbers(now)
        if within and numbers[0] and numbers[1] and len(numbers[0]) == len(numbers[1]):
            own.set(key, now)
        elif before != now and key != "file":
            return False
    return all(_fill(one, other, within) for one, other in zip(own, recorded, strict=True))


def _copy_numbers(source: mujoco.MjModel, target: mujoco.MjModel) -> None:
    """Copy every array of one model into the other. Raises `FarmError` if their sizes differ."""
    fields = [name for name in dir(source) if isinstance(getattr(source, name), np.ndarray) and name != "_sizes"]
    for name in fields:
        if getattr(source, name).shape != getattr(target, name).shape:
            raise FarmError(f"the recorded model is of another size than the task's ({name})")
    for name in fields:
        getattr(target, name)[...] = getattr(source, name)


def _floats(model: Any, body: int) -> bool:
    """True if the body floats: its place in the model means nothing then."""
    return bool(model.body_jntnum[body] == 1 and model.jnt_type[model.body_jntadr[body]] == 0)
