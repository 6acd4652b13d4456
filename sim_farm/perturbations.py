"""Perturbations as data: changes of an episode against its task, to see whether a policy generalises.

A perturbation is a row of its task's static table (`TaskSpec.perturbations`); an episode names it by its index
(`EpisodeSpec.perturbation`). Its parts are applied where the thing that they change is made:

    scene     physics, after the reset: where the robot starts, where objects lie
    cameras   the renderer: the pose of a camera
    picture   a pure function of the drawn frame (`sim_farm.pictures`)
    words     physics, which gives the instruction

All of them hold from the env step `from_step` on. From 0 they are the episode's conditions; later they are an event,
and until then the episode equals the one without.

Sizes are data; directions are drawn, from the episode's seed by a counter-based generator. Neither the process nor the
order of drawing changes them, and the levels of one axis move the same thing into the same direction.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from dataclasses import asdict, dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

UInt8 = npt.NDArray[np.uint8]

SCENE, CAMERA, PICTURE = 101, 102, 103
"""Last word of the generator's counter: what is drawn."""


@dataclass(frozen=True)
class RobotOffset:
    """The arm's joints start so far from where the task has them, in a direction that is drawn."""

    axis: ClassVar[str] = "start"
    norm: float
    """Norm of the vector of displacements, in rad (m where joints slide). What leaves a joint's range is clipped."""
    kind: Literal["robot_offset"] = "robot_offset"


@dataclass(frozen=True)
class ObjectOffset:
    """The movable objects lie so far from where the task has them, all moved alike along the table, in a direction that
    is drawn."""

    axis: ClassVar[str] = "objects"
    distance: float
    """In m."""
    kind: Literal["object_offset"] = "object_offset"


@dataclass(frozen=True)
class HomePosture:
    """The joints to which the simulator resets the arm, and which its controller holds. A recorded initial state that
    is restored after the reset sets the joints again."""

    axis: ClassVar[str] = "posture"
    joints: tuple[float, ...]
    """In rad."""
    kind: Literal["home_posture"] = "home_posture"


@dataclass(frozen=True)
class TaskFile:
    """The same objects, where another task file of the simulator and the initial states recorded with it have them."""

    axis: ClassVar[str] = "task file"
    package: str
    """Package whose files they are."""
    task: str
    """Path of the task file in the package."""
    states: str
    """Path of the initial states in the package. An episode's `init_state` is a row of them; of one row alone, that."""
    sha256: str
    """SHA-256 of the two files, concatenated."""
    kind: Literal["task_file"] = "task_file"


SceneChange = RobotOffset | ObjectOffset | HomePosture | TaskFile


@dataclass(frozen=True)
class CameraOrbit:
    """The cameras that stand in the world, moved about the point that each looks at, and then turned in place."""

    axis: ClassVar[str] = "camera"
    azimuth: float = 0.0
    """Degrees about the vertical."""
    elevation: float = 0.0
    """Degrees upwards about the camera's horizontal axis."""
    distance: float = 1.0
    """Factor of the distance to the point that it looks at."""
    pan: float = 0.0
    """Degrees about its own vertical axis, to the left."""
    tilt: float = 0.0
    """Degrees about its own horizontal axis, upwards."""
    either_side: bool = False
    """True: the episode's seed draws whether azimuth and pan go to the one side or to the other."""
    camera: str | None = None
    """Name of the only camera that moves; None: all that stand in the world."""
    kind: Literal["camera_orbit"] = "camera_orbit"


@dataclass(frozen=True)
class CameraPose:
    """One camera at another pose in the frame that it is mounted in, by the simulator's own convention of cameras."""

    axis: ClassVar[str] = "camera"
    camera: str
    position: tuple[float, float, float]
    """In m."""
    quaternion: tuple[float, float, float, float]
    """(w, x, y, z)"""
    kind: Literal["camera_pose"] = "camera_pose"


CameraChange = CameraOrbit | CameraPose


@dataclass(frozen=True)
class PictureChange:
    """A function of `sim_farm.pictures` that is applied to drawn frames."""

    function: str
    values: tuple[float, ...] = ()
    """Its parameters."""
    cameras: tuple[str, ...] | None = None
    """Cameras whose frames it changes; None: all."""


@dataclass(frozen=True)
class Perturbation:
    """Changes of an episode against its task."""

    axis: str
    """Kind of the perturbation, by which results are told apart: `camera`, `start`, `objects`, `noise`, `words`, ..."""
    level: int
    """Grade within the axis."""
    scene: tuple[SceneChange, ...] = ()
    cameras: tuple[CameraChange, ...] = ()
    picture: tuple[PictureChange, ...] = ()
    words: str | None = None
    """Instruction; `{}` in it stands for the task's own. None: the task's own."""
    from_step: int = 0
    """Env steps of the episode before the change. The observation after these steps is the first that shows it."""
    source: str | None = None
    """Name of the suite that the perturbation belongs to, and its index in the suite. None: it belongs to no suite."""

    @property
    def digest(self) -> str:
        """sha256 of the perturbation as JSON with sorted keys and without white space."""
        known = {key: value for key, value in asdict(self).items() if value is not None or key != "source"}
        text = json.dumps(known, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def told(self, instruction: str) -> str:
        """The instruction in place of the task's own."""
        return instruction if self.words is None else self.words.replace("{}", instruction)


def generator(purpose: int, seed: int, step: int = 0, name: str = "") -> np.random.Generator:
    """The generator of an episode's draws for a purpose (`SCENE`, ...), at an env step, for the camera `name`."""
    bits = np.random.Philox(
        key=np.array([seed, zlib.crc32(name.encode())], np.uint64), counter=np.array([0, step, 0, purpose], np.uint64)
    )
    return np.random.Generator(bits)


def direction(draw: np.random.Generator, dimensions: int) -> npt.NDArray[np.float64]:
    """A random unit vector, uniform over all directions."""
    vector = draw.standard_normal(dimensions)
    return vector / np.linalg.norm(vector)


# --- what the renderer has to know, at the end of a scene

MARK = np.dtype([("index", "<i4"), ("seed", "<i4"), ("step", "<i8")])
"""Index of the episode's perturbation (-1: none), the episode's seed, and the env steps that were executed."""


def marked(scene: UInt8, index: int | None, seed: int, step: int) -> UInt8:
    """The scene's bytes with the mark behind them, so that every process draws the same."""
    mark = np.array([(-1 if index is None else index, seed, step)], MARK)
    return np.concatenate((scene, mark.view(np.uint8)))


def unmarked(scene: UInt8) -> tuple[UInt8, int, int, int]:
    """The simulator's scene, and index, seed and step of its mark."""
    index, seed, step = np.frombuffer(scene[-MARK.itemsize :].tobytes(), MARK)[0].tolist()
    return scene[: -MARK.itemsize], index, seed, step
