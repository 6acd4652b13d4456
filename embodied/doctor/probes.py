"""Tries a library that may crash or hang, in this process: the doctor runs it in one of its own.

    python -P embodied/doctor/probes.py vulkan|egl|osmesa|maniskill     exit 0 if it works

Prints what the library says of itself, or on standard error what stands in the way. Only the standard library is
imported at the top.
"""

from __future__ import annotations

import argparse  # not tyro, as elsewhere: it is not imported into a process that a driver may end
import ctypes
import ctypes.util
import os
import sys
from pathlib import Path


class ProbeError(Exception):
    """Why a library cannot be used, in words for the doctor's table."""


def _maniskill_description() -> str:
    import mani_skill.envs  # noqa: F401 # registers the tasks
    from mani_skill.utils.registration import REGISTERED_ENVS

    return f"{len(REGISTERED_ENVS)} tasks"


def _opengl_description(backend: str) -> str:
    library = {"egl": "EGL", "osmesa": "OSMesa"}[backend]
    if ctypes.util.find_library(library) is None:
        raise ProbeError(f"no lib{library}")
    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = backend
    import mujoco
    from OpenGL import GL

    renderer = mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 16, 16)
    try:
        return GL.glGetString(GL.GL_RENDERER).decode() + ", " + GL.glGetString(GL.GL_VERSION).decode()
    finally:
        renderer.close()


def _vulkan_description() -> str:
    if Path("/dev/nvidia0").exists():
        _let_sapien_find_the_driver()
    try:
        vulkan = ctypes.CDLL("libvulkan.1.dylib" if sys.platform == "darwin" else "libvulkan.so.1")
    except OSError as error:
        raise ProbeError("no Vulkan loader (libvulkan.so.1)") from error
    refused = []
    from embodied.doctor import vulkan as probe

    try:
        devices = probe.devices(vulkan)
    except probe.VulkanError as error:
        raise ProbeError(str(error)) from error
    for device in devices:
        name, accepted = probe.describe(vulkan, device)
        if accepted:
            return name
        refused.append(name)
    if refused:
        raise ProbeError(f"too old for SAPIEN (no descriptorBindingPartiallyBound): {'; '.join(refused)}")
    raise ProbeError("no Vulkan device")


def _let_sapien_find_the_driver() -> None:
    """Where a container lacks the file that names NVIDIA's driver, importing SAPIEN puts its own in place."""
    try:
        import sapien  # noqa: F401
    except ImportError:
        pass


PROBES = {
    "vulkan": _vulkan_description,
    "egl": lambda: _opengl_description("egl"),
    "osmesa": lambda: _opengl_description("osmesa"),
    "maniskill": _maniskill_description,
}
"""Each loads a library into this process and returns its description; raises if it does not work."""


def main() -> int:
    """Try what the command line names."""
    parser = argparse.ArgumentParser(description="try a library in this process")
    parser.add_argument("what", choices=PROBES)
    what = parser.parse_args().what
    try:
        print(PROBES[what]())
        return 0
    except ProbeError as error:
        print(error, file=sys.stderr)
    except Exception as error:
        # A driver's bindings raise anything at all; the last line is what the table shows.
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
