"""MuJoCo without OpenGL until the first picture, and the surface on which pictures are drawn.

`import mujoco` binds an OpenGL platform for the life of the process: the one that MUJOCO_GL names, or the
window system's. Physics wants none, a machine without a display needs another, and a process that has started one
cannot be forked. So the modules of this backend take `mujoco` from here: imported with no platform. A user's
`mujoco.Renderer` starts the one that MUJOCO_GL names when it is made. The first canvas chooses: the one that MUJOCO_GL
names, else EGL if a device answers, else OSMesa (software). Where the process has a requested device
(`render_devices`), the canvas is there or raises.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import importlib
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from sim_farm import render_devices
from sim_farm.backends.camera_poses import MUJOCO, orbited
from sim_farm.contract import CameraChange, FarmError, UInt8
from sim_farm.perturbations import CameraPose
from sim_farm.render_devices import EglDevice

EXTENSIONS, CUDA_DEVICE, PLATFORM_DEVICE = 0x3055, 0x323A, 0x313F
"""EGL_EXTENSIONS, EGL_CUDA_DEVICE_NV, EGL_PLATFORM_DEVICE_EXT."""
MOST_DEVICES = 64

_Pointer, _Integer = ctypes.c_void_p, ctypes.c_int


class _Egl:
    """The library with the entry points that enumerate devices. Raises `OSError` where it has none of them."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL("libEGL.so.1")
        self.library.eglGetProcAddress.restype = _Pointer
        self.library.eglInitialize.argtypes = (_Pointer, _Pointer, _Pointer)
        self._query = self._entry(b"eglQueryDevicesEXT", _Integer, _Integer, _Pointer, _Pointer)
        self.display = self._entry(b"eglGetPlatformDisplayEXT", _Pointer, _Integer, _Pointer, _Pointer)

    def _entry(self, name: bytes, *types: Any) -> Any:
        address = self.library.eglGetProcAddress(name)
        if not address:
            raise OSError(f"EGL has no {name.decode()}")
        return ctypes.CFUNCTYPE(*types)(address)

    def handles(self) -> list[int | None]:
        """In EGL's order, by which MUJOCO_EGL_DEVICE_ID counts."""
        found, count = (_Pointer * MOST_DEVICES)(), _Integer()
        self._query(MOST_DEVICES, found, ctypes.byref(count))
        return list(found[: count.value])

    def describe(self, handle: int | None) -> EglDevice:
        string = self._entry(b"eglQueryDeviceStringEXT", ctypes.c_char_p, _Pointer, _Integer)
        attribute = self._entry(b"eglQueryDeviceAttribEXT", _Integer, _Pointer, _Integer, _Pointer)
        extensions = (string(handle, EXTENSIONS) or b"").decode().split()
        number = ctypes.c_ssize_t(-1)
        if "EGL_NV_device_cuda" in extensions and not attribute(handle, CUDA_DEVICE, ctypes.byref(number)):
            number.value = -1
        return EglDevice(number.value if number.value >= 0 else None, "EGL_MESA_device_software" in extensions)


def devices() -> tuple[EglDevice, ...]:
    """Devices that EGL offers, in its own order; empty without an EGL that enumerates devices."""
    try:
        egl = _Egl()
        return tuple(map(egl.describe, egl.handles()))
    except OSError:
        return ()


def answers() -> bool:
    """True if EGL finds a device, a GPU or a software one, that starts without a display."""
    try:
        egl = _Egl()
    except OSError:
        return False
    displays: Iterator[Any] = (egl.display(PLATFORM_DEVICE, handle, None) for handle in egl.handles())
    return any(egl.library.eglInitialize(display, None, None) for display in displays if display)


if __name__ == "__main__":
    for index, device in enumerate(devices()):
        print(f"EGL device {index}: {device}")


# --- the platform and the canvas

# MuJoCo fills its name space from compiled modules, which pyright cannot see.
# pyright: reportAttributeAccessIssue=false


PLATFORMS = ("egl", "osmesa", "glfw")

_named = os.environ.get("MUJOCO_GL")
if _named is not None and _named.lower() not in PLATFORMS:
    import mujoco  # which refuses it
else:
    os.environ["MUJOCO_GL"] = "disable"
    try:
        import mujoco
    finally:
        if _named is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = _named


def _context(width: int, height: int) -> Any:
    """`mujoco.GLContext` as the user has named it."""
    assert _named is not None
    return importlib.import_module(f"mujoco.{_named.lower()}").GLContext(width, height)


if _named is not None and _named.lower() in PLATFORMS:
    mujoco.GLContext = sys.modules[mujoco.Renderer.__module__].gl_context.GLContext = _context

REMEDY = f"`embodied doctor` says what is missing; MUJOCO_GL={'|'.join(PLATFORMS)} selects how to draw"
UUID_BYTES = 16


class Canvas:
    """A square off-screen surface for the scenes of one model. Belongs to the thread that made it.

    Geoms of `hidden_groups` are not drawn.
    """

    def __init__(self, model: mujoco.MjModel, size: int, max_geoms: int = 100, hidden_groups: tuple[int, ...] = ()):
        from sim_farm.backends.mujoco_culling import Culling  # takes `mujoco` from here

        self._context = self._target = None  # First, so that a canvas that could not be made can be closed.
        name = platform()
        model.vis.global_.offwidth = model.vis.global_.offheight = size
        self._model = model
        self._scene = mujoco.MjvScene(model, maxgeom=max_geoms)
        self._option, self._camera = mujoco.MjvOption(), mujoco.MjvCamera()
        for group in hidden_groups:
            self._option.geomgroup[group] = 0
        self._camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        self._rect = mujoco.MjrRect(0, 0, size, size)
        self._pixels = np.empty((size, size, 3), np.uint8)
        try:
            self._context = importlib.import_module(f"mujoco.{name}").GLContext(size, size)
            self._context.make_current()
            _check_drawn(name)
            render_devices.drawing()
            with _no_unused_shadows(model):
                self._target = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_100)
            _share_equal_textures(model, self._target)
        except FarmError:
            raise
        except Exception as error:  # What is missing shows as one of many exceptions of three packages.
            reason = f"OpenGL by {name} failed ({type(error).__name__}: {error})"
            raise FarmError(f"no picture can be drawn{_where()}: {reason}. {REMEDY}") from error
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._target)
        # A GPU draws unseen triangles in less time than is needed to find them.
        software = render_devices.is_software(renderer_name())
        self._culling = Culling(model, self._scene, self._target) if software else None
        # Registered after the platform's own shutdown, hence run before it: contexts cannot be freed after.
        atexit.register(_close, weakref.ref(self))

    def make_current(self) -> None:
        """Direct this thread's OpenGL to this canvas; before the first of a run of `draw`."""
        assert self._context is not None, "the canvas is closed"
        self._context.make_current()

    def draw(self, data: mujoco.MjData, camera: int | mujoco.MjvCamera, out: UInt8) -> None:
        """Fill `out` [size, size, 3] with what the model's camera of that index sees, or one that is in no model;
        `data` holds the kinematics."""
        if isinstance(camera, int):
            self._camera.fixedcamid, camera = camera, self._camera
        if self._culling is None:
            category = mujoco.mjtCatBit.mjCAT_ALL.value
            mujoco.mjv_updateScene(self._model, data, self._option, None, camera, category, self._scene)
        else:
            self._culling.fill(data, self._option, camera)
        mujoco.mjr_render(self._rect, self._scene, self._target)
        mujoco.mjr_readPixels(self._pixels, None, self._rect, self._target)
        out[:] = self._pixels[::-1]  # OpenGL's first row is the lowest.

    def close(self) -> None:
        if self._context is None:
            return
        # Names of OpenGL objects are only unique within a context: freed with another one current, it would
        # be that one which lost its textures.
        self._context.make_current()
        if self._target is not None:
            self._target.free()
        self._context.free()
        self._context = self._target = None

    def __del__(self) -> None:
        self.close()


@contextmanager
def _no_unused_shadows(model: mujoco.MjModel) -> Iterator[None]:
    """Within the block the model asks for no map of shadows, 64 MB of 4096 x 4096 pixels, if none of its lights casts
    any."""
    quality = model.vis.quality
    size = quality.shadowsize
    if not model.light_castshadow.any():
        quality.shadowsize = 0
    try:
        yield
    finally:
        quality.shadowsize = size


def _share_equal_textures(model: mujoco.MjModel, target: mujoco.MjrContext) -> None:
    """Free the textures that equal an earlier one, as those of two objects of a kind do, and use that one instead."""
    gl = importlib.import_module("OpenGL.GL")
    kinds = (model.tex_type, model.tex_colorspace, model.tex_nchannel, model.tex_width, model.tex_height)
    ends = [*model.tex_adr[1:], len(model.tex_data)]
    known: list[tuple[list[int], np.ndarray, int]] = []
    for index, (begin, end) in enumerate(zip(model.tex_adr, ends, strict=True)):
        kind, pixels, own = [int(values[index]) for values in kinds], model.tex_data[begin:end], target.texture[index]
        equal = (name for of, seen, name in known if of == kind and np.array_equal(seen, pixels))
        name = next(equal, own)
        if name == own:
            known.append((kind, pixels, own))
        else:
            gl.glDeleteTextures([int(own)])
            target.texture[index] = name


def _close(canvas: weakref.ref[Canvas]) -> None:
    alive = canvas()
    if alive is not None:
        alive.close()


@functools.cache
def platform() -> str:
    """The OpenGL platform of this process, one of `PLATFORMS`; chosen once, as PyOpenGL binds only one. Where the
    process has a requested device, EGL gets the number that it has among EGL's devices.

    Raises `FarmError` where no platform draws on that device.
    """
    named = os.environ.get("MUJOCO_GL") or os.environ.get("PYOPENGL_PLATFORM")
    if named is not None and named.lower() not in PLATFORMS:
        raise FarmError(f"no picture can be drawn with OpenGL set to {named!r} in the environment. {REMEDY}")
    wanted = render_devices.requested()
    chosen = _chosen(named, wanted)
    if wanted is not None and chosen == "egl":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        os.environ["MUJOCO_EGL_DEVICE_ID"] = str(render_devices.egl_index(devices(), wanted, visible))
    return chosen


def _chosen(named: str | None, wanted: render_devices.RenderDevice | None) -> str:
    """The platform that is named, else EGL where it can draw on what is wanted, else OSMesa (software)."""
    if isinstance(wanted, int):
        if named is not None and named.lower() != "egl":
            raise render_devices.refused(wanted, f"OpenGL is set to {named!r} in the environment; GPUs take egl")
        return "egl"
    if named is not None:
        return named.lower()
    if wanted == "cpu":
        return "egl" if any(device.software for device in devices()) else "osmesa"
    return "egl" if answers() else "osmesa"


def renderer_name() -> str:
    """Renderer of OpenGL's current context (GL_RENDERER)."""
    gl = importlib.import_module("OpenGL.GL")
    return str(gl.glGetString(gl.GL_RENDERER).decode())


def drawn_by() -> tuple[str, str | None]:
    """GL_RENDERER of the current context, and the UUID of its device by GL_EXT_memory_object, as CUDA has it."""
    gl = importlib.import_module("OpenGL.GL")
    memory_object = importlib.import_module("OpenGL.raw.GL.EXT.memory_object")
    uuid = (gl.GLubyte * UUID_BYTES)()
    try:
        memory_object.glGetUnsignedBytei_vEXT(memory_object.GL_DEVICE_UUID_EXT, 0, uuid)
    except Exception:  # PyOpenGL raises several kinds where the driver lacks the extension
        return renderer_name(), None
    return renderer_name(), bytes(uuid).hex()


def _check_drawn(name: str) -> None:
    """Raise `FarmError` where the current context does not draw on what was asked for."""
    wanted = render_devices.requested()
    if wanted is not None:
        device = os.environ.get("MUJOCO_EGL_DEVICE_ID")
        by = f"OpenGL by {name}" + (f" (EGL device {device})" if name == "egl" else "")
        render_devices.check_drawn(wanted, renderer_name(), by)


def _where() -> str:
    wanted = render_devices.requested()
    return "" if wanted is None else f" on {render_devices.name_of(wanted)}"


# --- moved cameras


class MovedCameras:
    """The cameras of a model as a perturbation has them. Others may draw with the model, too: they are there only while
    poses are computed."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self._model = model
        self._moved: list[tuple[int, np.ndarray, np.ndarray]] = []
        """Index, position [3] and unit quaternion [4] of each."""

    def aim(self, changes: Sequence[CameraChange], draw: np.random.Generator) -> None:
        """See `sim_farm.contract.AimedRenderer.aim`."""
        self._moved = [moved for change in changes for moved in self._moves(change, draw)]

    @contextmanager
    def there(self) -> Iterator[None]:
        """Within the block the model has its cameras so."""
        model, kept = (
            self._model,
            [(i, self._model.cam_pos[i].copy(), self._model.cam_quat[i].copy()) for i, *_ in self._moved],
        )
        for index, position, quaternion in self._moved:
            model.cam_pos[index], model.cam_quat[index] = position, quaternion
        yield
        for index, position, quaternion in kept:
            model.cam_pos[index], model.cam_quat[index] = position, quaternion

    def _moves(self, change: CameraChange, draw: np.random.Generator) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        model = self._model
        names = [model.camera(i).name for i in range(model.ncam)]
        standing = [name for i, name in enumerate(names) if model.cam_bodyid[i] == 0]
        valid = names if isinstance(change, CameraPose) else standing
        if change.camera is not None and change.camera not in valid:
            raise FarmError(f"no camera {change.camera!r} can be moved so; valid: {', '.join(valid)}")
        if isinstance(change, CameraPose):
            quaternion = np.array(change.quaternion)
            mujoco.mju_normalize4(quaternion)
            yield names.index(change.camera), np.array(change.position), quaternion
            return
        side = draw.bit_generator.state
        for name in standing if change.camera is None else [change.camera]:
            draw.bit_generator.state = side  # all cameras go to the same side
            index, rotation, quaternion = names.index(name), np.empty(9), np.empty(4)
            mujoco.mju_quat2Mat(rotation, model.cam_quat[index])
            position, turned = orbited(model.cam_pos[index].copy(), rotation.reshape(3, 3), MUJOCO, change, draw)
            mujoco.mju_mat2Quat(quaternion, turned.ravel())
            yield index, position, quaternion
