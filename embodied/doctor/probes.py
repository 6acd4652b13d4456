"""Vulkan's devices, as the loader lists them, and whether SAPIEN would accept them. Standard library only."""

from __future__ import annotations

import argparse  # not tyro, as elsewhere: it is not imported into a process that a driver may end
import ctypes
import ctypes.util
import os
import sys
from pathlib import Path


class VulkanError(Exception):
    """The loader finds no driver."""


class _ApplicationInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("application", ctypes.c_char_p),
        ("application_version", ctypes.c_uint32),
        ("engine", ctypes.c_char_p),
        ("engine_version", ctypes.c_uint32),
        ("api_version", ctypes.c_uint32),
    ]


class _InstanceCreateInfo(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("flags", ctypes.c_uint32),
        ("application", ctypes.POINTER(_ApplicationInfo)),
        ("layer_count", ctypes.c_uint32),
        ("layers", ctypes.c_void_p),
        ("extension_count", ctypes.c_uint32),
        ("extensions", ctypes.c_void_p),
    ]


class _Properties(ctypes.Structure):
    """VkPhysicalDeviceProperties2; what follows the name is left as room for the driver to write to."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("numbers", ctypes.c_uint32 * 5),
        ("name", ctypes.c_char * 256),
        ("rest", ctypes.c_uint64 * 128),
    ]


class _DriverProperties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("id", ctypes.c_int),
        ("name", ctypes.c_char * 256),
        ("info", ctypes.c_char * 256),
        ("conformance", ctypes.c_uint8 * 4),
    ]


class _DescriptorFeatures(ctypes.Structure):
    """VkPhysicalDeviceDescriptorIndexingFeatures: 20 flags."""

    _fields_ = [("type", ctypes.c_int), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32 * 20)]


class _Features(ctypes.Structure):
    """VkPhysicalDeviceFeatures2: 55 flags."""

    _fields_ = [("type", ctypes.c_int), ("next", ctypes.c_void_p), ("flags", ctypes.c_uint32 * 55)]


PARTIALLY_BOUND = 17
"""Index of descriptorBindingPartiallyBound among the flags of `_DescriptorFeatures`."""


def physical_devices(vulkan: ctypes.CDLL) -> list[ctypes.c_void_p]:
    """Handles of the machine's devices; the instance lives as long as the process, which is short."""
    api_1_2 = (1 << 22) | (2 << 12)
    application = _ApplicationInfo(0, None, b"embodied", 1, b"embodied", 1, api_1_2)
    request = _InstanceCreateInfo(1, None, 0, ctypes.pointer(application), 0, None, 0, None)
    instance = ctypes.c_void_p()
    code = vulkan.vkCreateInstance(ctypes.byref(request), None, ctypes.byref(instance))
    if code != 0:
        raise VulkanError(f"no Vulkan driver (vkCreateInstance: {code})")
    count = ctypes.c_uint32()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), None)
    handles = (ctypes.c_void_p * count.value)()
    vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(count), handles)
    return [ctypes.c_void_p(handle) for handle in handles]


def describe(vulkan: ctypes.CDLL, device: ctypes.c_void_p) -> tuple[str, bool]:
    """The device's name and driver, and whether it has what SAPIEN needs."""
    driver = _DriverProperties(1000196000)
    properties = _Properties(1000059001, ctypes.addressof(driver))
    vulkan.vkGetPhysicalDeviceProperties2(device, ctypes.byref(properties))
    descriptors = _DescriptorFeatures(1000161001)
    features = _Features(1000059000, ctypes.addressof(descriptors))
    vulkan.vkGetPhysicalDeviceFeatures2(device, ctypes.byref(features))
    name = f"{properties.name.decode()}, {driver.name.decode()} {driver.info.decode()}"
    return name, bool(descriptors.flags[PARTIALLY_BOUND])


# --- Tries a library that may crash or hang, in this process: the doctor runs it in one of its own.


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

    try:
        devices = physical_devices(vulkan)
    except VulkanError as error:
        raise ProbeError(str(error)) from error
    for device in devices:
        name, accepted = describe(vulkan, device)
        if accepted:
            return name
        refused.append(name)
    if refused:
        raise ProbeError(f"too old for SAPIEN (no descriptorBindingPartiallyBound): {'; '.join(refused)}")
    raise ProbeError("no Vulkan device")


def _let_sapien_find_the_driver() -> None:
    """Import SAPIEN, which puts its own file in place where a container lacks the one that names NVIDIA's driver."""
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
