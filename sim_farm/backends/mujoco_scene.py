"""Scenes and pictures for any simulator on MuJoCo whose picture is what MuJoCo draws of one model.

MuJoCo draws geoms, sites, cameras and lights where `MjData` says that they are. A simulator may move them after the
physics has placed them (the mark of a goal), or draw in the middle of a control step: the joint positions then do not
say what is seen. So a scene is these poses themselves, as they are when the picture is due; a replica that is given
them draws the same picture to the last bit. It is a few KB, and nothing need be known of the simulator.
"""

# MuJoCo fills its name space from compiled modules, which type checkers cannot see.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sim_farm.backends.mujoco_gl import Canvas, mujoco
from sim_farm.contract import FarmError, TaskInfo, TaskSpec, UInt8, new_frames

POSES = (
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
    "cam_xpos",
    "cam_xmat",
    "light_xpos",
    "light_xdir",
)
"""Arrays of `MjData` from which a model without skins, flexes and spatial tendons is drawn."""
MAX_GEOMS = 1000


def scene_of(data: mujoco.MjData) -> UInt8:
    """The current scene of `data` as bytes, uint8 [scene_bytes(model)]: the float64 fields in `POSES`, concatenated."""
    return np.concatenate([getattr(data, name).ravel() for name in POSES]).view(np.uint8)


def scene_bytes(model: mujoco.MjModel) -> int:
    """Size of a scene. Raises `FarmError` where the model has parts that are drawn from more than poses."""
    if model.nskin or model.nflex or np.isin(model.wrap_type, _SPATIAL).any():
        raise FarmError("a scene of poses does not describe skins, flexes and spatial tendons, which this model has")
    return 8 * (12 * (model.ngeom + model.nsite + model.ncam) + 6 * model.nlight)


def camera_names(spec: TaskSpec, model: mujoco.MjModel, first: Sequence[str] = ()) -> tuple[str, ...]:
    """The cameras that the spec asks for, by name or by number: those of `first`, which need not be the model's, then
    the model's others. Raises `FarmError` for one that there is not."""
    every = [model.camera(index).name for index in range(model.ncam)]
    valid = [*first, *(name for name in every if name not in first)]
    if isinstance(spec.cameras, int):
        if spec.cameras > len(valid):
            raise FarmError(f"{spec.name} has {len(valid)} cameras ({', '.join(valid)}), got cameras={spec.cameras}")
        return tuple(valid[: spec.cameras])
    for name in spec.cameras:
        if name not in valid:
            raise FarmError(f"{spec.name} has no camera {name!r}; valid: {', '.join(valid)}")
    return spec.cameras


class SceneRenderer:
    """Draws the scenes of one task from one replica of its model; geoms of `hidden_groups` are left out.

    `views` are cameras that are in no model, by their names. The OpenGL context is made by the first `render`, and
    belongs to the thread that called it: later calls, and `close`, come from the same one.
    """

    def __init__(
        self,
        info: TaskInfo,
        model: mujoco.MjModel,
        *,
        hidden_groups: tuple[int, ...] = (),
        views: Mapping[str, mujoco.MjvCamera] | None = None,
    ) -> None:
        self.info = info
        self._model, self._data = model, mujoco.MjData(model)
        self._hidden_groups, self._views = hidden_groups, views or {}
        self._canvas: Canvas | None = None

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        size = self.info.spec.image_size
        if self._canvas is None:
            self._canvas = Canvas(self._model, size, MAX_GEOMS, self._hidden_groups)
        frames = new_frames(len(scenes), cameras, size) if out is None else out
        self._canvas.make_current()
        for index, scene in enumerate(scenes):
            self._pose(scene)
            for name in cameras:
                camera = self._views[name] if name in self._views else self._model.camera(name).id
                self._canvas.draw(self._data, camera, frames[name][index])
        return frames

    def close(self) -> None:
        if self._canvas is not None:
            self._canvas.close()
            self._canvas = None

    def _pose(self, scene: UInt8) -> None:
        numbers, at = np.frombuffer(scene.tobytes(), np.float64), 0
        for name in POSES:
            array = getattr(self._data, name)
            array.flat[:] = numbers[at : at + array.size]
            at += array.size


_SPATIAL = [mujoco.mjtWrap.mjWRAP_SITE, mujoco.mjtWrap.mjWRAP_SPHERE, mujoco.mjtWrap.mjWRAP_CYLINDER]
