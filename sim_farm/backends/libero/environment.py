"""robosuite's own environment of a LIBERO task, without a renderer, around a model that its process shares.

Compiling a task takes hundreds of milliseconds and its model tens of megabytes, so a process compiles each
task once and all its environments step the same `MjModel`. What differs between them (the pose of fixtures,
which sites are visible) is swapped in by the environment that steps.

A scene is all that a picture depends on, as bytes: joint positions, and the model's fields that change. The rest of
MuJoCo's data follows from them by `mj_kinematics`, `mj_comPos` and `mj_camlight`, the functions that `mj_step` itself
calls, so a replica that is given these numbers draws the same picture to the last bit. robosuite draws within the
control step, from what `mj_step` computed before it integrated: the positions are those of that moment.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import io
import itertools
import mmap
import types
import weakref
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.libero.assets import assets
from sim_farm.backends.libero.control import COMPILED
from sim_farm.backends.libero.package import prepare
from sim_farm.backends.libero.tasks import LiberoTask, find_task
from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.contract import FarmError, UInt8

CACHED_STREAMS = 256
"""Streams that a process keeps: of training's seeds each has one position of 2.5 kB."""


@dataclass(frozen=True)
class Position:
    """State of a random stream before a reset."""

    generator: Any
    """NumPy's state (`np.random.get_state`)."""
    loads: int
    """Number of times the model was loaded. LIBERO draws the articulated fixtures' positions once for each load."""


@functools.lru_cache(maxsize=CACHED_STREAMS)
def stream_of(task: LiberoTask, seed: int, unseeded_resets: int) -> list[Position]:
    """Known positions of the stream, by the number of resets before them. A replay beyond the last appends the next."""
    # A stock environment loads its model when it is built, and at each reset.
    return [Position(np.random.RandomState(seed).get_state(), loads=1 + unseeded_resets)]


@contextmanager
def callers_generator() -> Iterator[None]:
    """Within the block NumPy's global generator may be drawn from; afterwards it is where it was."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)


# --- the environment

# MuJoCo fills its name space from compiled modules, which type checkers cannot see.


FIELDS = ("body_pos", "body_quat", "site_rgba", "site_pos", "site_size")
"""All fields of a model that a reset or a task's logic changes (tests/sim_farm/test_libero.py looks at every one), and
those in which two task files of the same objects differ."""
CAMERAS = ("agentview", "robot0_eye_in_hand", "frontview", "galleryview", "sideview", "birdview", "paperview")
CACHED_MODELS = 2
"""Compiled tasks that a process keeps while they are not used: with its textures one takes up to 400 MB."""
NOTHING = "<mujoco/>"


class SharedModel:
    """A compiled task. Exactly one user's `FIELDS` are in it at a time."""

    def __init__(self, model: mujoco.MjModel, pristine: dict[str, np.ndarray], names: bytes, parts_dim: int) -> None:
        self.model = model
        self.pristine = pristine
        """`FIELDS` of the model as compiled."""
        self.names = names
        """Names of its bodies, joints, sites, ... without those of meshes, textures and materials (`bare`)."""
        self.parts_dim = parts_dim
        """Numbers of the state that belong to objects and fixtures."""
        # Users hold the model: that it held one would keep hundreds of megabytes until the garbage collector runs.
        self._user: Callable[[], ModelUser | None] = lambda: None

    def hand_to(self, user: ModelUser) -> None:
        """Put the user's fields into the model, after keeping those of its last user."""
        last = self._user()
        if last is user:
            return
        if last is not None:
            for name, kept in last.fields.items():
                kept[...] = getattr(self.model, name)
        for name, kept in user.fields.items():
            getattr(self.model, name)[...] = kept
        self._user = weakref.ref(user)


class ModelUser:
    """One environment's values of the fields of a shared model."""

    def __init__(self, shared: SharedModel, compiled: Mapping[str, np.ndarray] | None = None) -> None:
        """`compiled` are the fields of another task file (`build_variant`); None: the model's own."""
        self.shared = shared
        self._compiled = shared.pristine if compiled is None else compiled
        self.fields = {name: array.copy() for name, array in self._compiled.items()}

    def take(self) -> None:
        """Have the model; before anything that reads or writes it."""
        self.shared.hand_to(self)

    def restore(self) -> None:
        """Have the model as it was compiled."""
        self.take()
        for name, array in self._compiled.items():
            getattr(self.shared.model, name)[...] = array


_used: weakref.WeakValueDictionary[LiberoTask, SharedModel] = weakref.WeakValueDictionary()
"""Shared models that this process uses, kept or not."""


@functools.lru_cache(maxsize=CACHED_MODELS)
def shared_model(task: LiberoTask) -> SharedModel:
    """The task's model, compiled at the first call."""
    found = _used.get(task)
    if found is None:
        found = _used[task] = _compiled(task)
    return found


def load(task: str) -> None:
    """Import what environments are made of, and compile the task's model."""
    shared_model(find_task(task))
    importlib.import_module(COMPILED)


def _compiled(task: LiberoTask) -> SharedModel:
    compiled: list[tuple[mujoco.MjModel, dict[str, np.ndarray], bytes]] = []

    def compile_model(xml: str) -> mujoco.MjModel:
        if not compiled:
            model = mujoco.MjModel.from_xml_string(xml)
            # Copied at once: an environment moves fixtures as soon as it is built.
            compiled.append((model, _fields(model), bare(xml).names))
            forget_assets()
        return compiled[0][0]

    env = _build(task, compile_model)
    model, pristine, names = compiled[0]
    shared = SharedModel(model, pristine, names, sum(7 + len(joints) for _, joints in parts(env)))
    free(env)
    compiled.clear()  # its closure is among those objects
    return shared


def forget_assets() -> None:
    """Give back what MuJoCo keeps of a model that it has compiled: the model as parsed, until it parses another, and
    meshes and textures as read from files, here 400 MB, of which another task's compilation is hardly faster."""
    mujoco.MjModel.from_xml_string(NOTHING)
    library = ctypes.CDLL(importlib.import_module("mujoco._functions").__file__)
    library.mj_getCache.restype, library.mj_clearCache.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
    library.mj_clearCache(library.mj_getCache())
    with contextlib.suppress(AttributeError):  # glibc's, which keeps freed memory for the process otherwise
        ctypes.CDLL(None).malloc_trim(0)


def free(env: Any) -> None:
    """Free MuJoCo's data and model of a robosuite environment now: its objects refer to each other, and the garbage
    collector, which would free them some time, does not see how much memory hangs on them."""
    env.robots[0].controller.__dict__.clear()
    env.sim.data._data = None
    env.__dict__.clear()


def forget_contacts(data: mujoco.MjData) -> None:
    """Give back the pages of MuJoCo's arena that its present contacts do not use. A reset, in which the objects are all
    at one place for a moment, uses 9 MB of it, and a step a hundredth."""
    arena = data.contact.dist.__array_interface__["data"][0]  # contacts are the first that is in it
    page = mmap.PAGESIZE
    begin, end = -(-(arena + data.parena) // page) * page, (arena + data.narena) // page * page
    with contextlib.suppress(AttributeError):  # elsewhere than on Linux they are kept
        ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def _fields(model: mujoco.MjModel) -> dict[str, np.ndarray]:
    return {name: getattr(model, name).copy() for name in FIELDS}


def bare(xml: str) -> mujoco.MjModel:
    """The model with small balls in place of meshes, and without textures and materials: compiled in milliseconds where
    the whole takes half a second. Its `FIELDS` are the whole one's, to the last bit."""
    root = ElementTree.fromstring(xml)  # noqa: S314 # robosuite has just written it
    for listed in root.findall("asset"):
        root.remove(listed)
    for part in root.iter():
        part.attrib.pop("material", None)
        if part.attrib.pop("mesh", None) is not None or part.get("type") == "mesh":
            part.attrib |= {"type": "sphere", "size": "0.01"}
    return mujoco.MjModel.from_xml_string(ElementTree.tostring(root, encoding="unicode"))


def build_environment(task: LiberoTask, user: ModelUser) -> Any:
    """A new environment of the task (robosuite's class, as LIBERO's `ControlEnv` makes it) on the user's model."""
    user.restore()
    return _build(task, lambda xml: user.shared.model)


def build_variant(task: LiberoTask, shared: SharedModel) -> tuple[Any, ModelUser]:
    """A new environment of another task file on the model, whose objects lie elsewhere, and its user of the model.

    Raises `FarmError` where it has other objects.
    """
    users: list[ModelUser] = []

    def lay_out(xml: str) -> mujoco.MjModel:
        if not users:
            found = bare(xml)
            if found.names != shared.names:
                raise FarmError(f"{task.bddl} has other objects than {task.suite} {task.index}")
            users.append(ModelUser(shared, _fields(found)))
        users[0].restore()
        return shared.model

    env = _build(task, lay_out)
    return env, users[0]


def _build(task: LiberoTask, compile_model: Callable[[str], mujoco.MjModel]) -> Any:
    prepare()
    assets()
    suite = importlib.import_module("robosuite")
    binding = importlib.import_module("robosuite.utils.binding_utils")
    importlib.import_module("libero.libero.envs.env_wrapper")
    domain = importlib.import_module("libero.libero.envs.bddl_base_domain")
    problem = importlib.import_module("libero.libero.envs.bddl_utils").get_problem_info(str(task.bddl))["problem_name"]

    def initialise(env: Any, xml_string: str | None = None) -> None:
        env.sim = binding.MjSim(compile_model(xml_string or env.model.get_xml()))
        env.sim.forward()
        env.initialize_time(env.control_freq)

    def build() -> Any:
        env = domain.TASK_MAPPING[problem].__new__(domain.TASK_MAPPING[problem])
        env._initialize_sim = types.MethodType(initialise, env)
        env.__init__(
            str(task.bddl),
            robots=["Panda"],
            controller_configs=suite.load_controller_config(default_controller="OSC_POSE"),
            gripper_types="default",
            initialization_noise=None,
            use_camera_obs=False,
            has_renderer=False,
            has_offscreen_renderer=False,
            control_freq=20,
            horizon=1000,
            ignore_done=True,
            hard_reset=False,
            renderer="mujoco",
        )
        return env

    try:
        with contextlib.redirect_stdout(io.StringIO()), callers_generator():  # it reports every duplicate name
            return _drawn(build)
    except (FileNotFoundError, OSError, ValueError) as error:
        raise FarmError(
            f"{task.suite} {task.index} cannot be built, an asset in {assets()} is missing or damaged: {error}"
        ) from error


def _drawn(build: Callable[[], Any]) -> Any:
    """Environment that `build` makes. Its constructor draws an unused beginning, for which there must be room."""
    no_room = importlib.import_module("robosuite.utils.errors").RandomizationError
    for seed in itertools.count():
        np.random.seed(seed)
        try:
            return build()
        except no_room:
            continue


def camera_names(model: mujoco.MjModel) -> tuple[str, ...]:
    """The task's cameras, the two that policies are trained with first."""
    every = [model.camera(i).name for i in range(model.ncam)]
    known = [name for name in CAMERAS if name in every]
    return tuple(known + [name for name in every if name not in known])


def parts(env: Any) -> list[tuple[str, list[str]]]:
    """Names of the movable objects, then of the fixtures with their joints, in the task's order."""
    return [(name, []) for name in env.objects_dict] + [(n, list(f.joints)) for n, f in env.fixtures_dict.items()]


def visual_states(env: Any) -> list[dict[str, Any]]:
    """For each part the sites that the task's logic shows or hides, as LIBERO keeps them."""
    every = (*env.objects_dict.values(), *env.fixtures_dict.values())
    return [part.object_properties["vis_site_names"] for part in every if hasattr(part, "object_properties")]


def fast_contact_check(env: Any) -> Callable[..., bool]:
    """`env.check_contact` of two models, or lists of geoms, with the same answer, over arrays instead of a Python loop.

    Predicates call it in every env step with two models, each a fixed set of geoms; robosuite's `_check_grasp` calls it
    with the geoms.
    """
    model, data = env.sim.model._model, env.sim.data._data
    masks: dict[str | tuple[str, ...], np.ndarray] = {}

    def mask(part: Any) -> np.ndarray:
        key = tuple(part) if isinstance(part, list) else part.name
        if key not in masks:
            found = np.zeros(model.ngeom, np.bool_)
            names = part if isinstance(part, list) else part.contact_geoms
            found[[env.sim.model.geom_name2id(name) for name in names]] = True
            masks[key] = found
        return masks[key]

    def check_contact(one: Any, two: Any) -> bool:
        pairs = data.contact.geom[: data.ncon]
        first, second = mask(one), mask(two)
        left, right = pairs[:, 0], pairs[:, 1]
        return bool(((first[left] & second[right]) | (second[left] & first[right])).any())

    return check_contact


# --- scenes


class SceneLayout:
    """Layout of the bytes of a task's scenes."""

    def __init__(self, shared: SharedModel) -> None:
        self._shared = shared
        model = shared.model
        self._nq = model.nq
        self._floats = model.nq + 7 * model.nbody
        self.nbytes = 8 * self._floats + 4 * 4 * model.nsite

    def pack(self, qpos: npt.NDArray[np.float64]) -> UInt8:
        """The scene of these positions and the model as it is now."""
        model = self._shared.model
        floats = np.concatenate((qpos, model.body_pos.ravel(), model.body_quat.ravel()))
        return np.concatenate((floats.view(np.uint8), model.site_rgba.ravel().view(np.uint8)))

    def unpack(self, scene: UInt8, user: ModelUser, data: mujoco.MjData) -> None:
        """Put the user's model and `data` into the scene, up to all that a picture needs."""
        model = self._shared.model
        raw = np.ascontiguousarray(scene)
        floats = np.frombuffer(raw[: 8 * self._floats].tobytes(), np.float64)
        user.take()
        poses = floats[self._nq :].reshape(-1)
        model.body_pos[...] = poses[: 3 * model.nbody].reshape(-1, 3)
        model.body_quat[...] = poses[3 * model.nbody :].reshape(-1, 4)
        model.site_rgba[...] = np.frombuffer(raw[8 * self._floats :].tobytes(), np.float32).reshape(-1, 4)
        data.qpos[:] = floats[: self._nq]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
