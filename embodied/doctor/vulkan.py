"""Asks the Vulkan loader which devices there are, and whether SAPIEN would accept them. Standard library only."""

from __future__ import annotations

import ctypes


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


def devices(vulkan: ctypes.CDLL) -> list[ctypes.c_void_p]:
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
    """The device's name and driver, and whether it has what SAPIEN asks for."""
    driver = _DriverProperties(1000196000)
    properties = _Properties(1000059001, ctypes.addressof(driver))
    vulkan.vkGetPhysicalDeviceProperties2(device, ctypes.byref(properties))
    descriptors = _DescriptorFeatures(1000161001)
    features = _Features(1000059000, ctypes.addressof(descriptors))
    vulkan.vkGetPhysicalDeviceFeatures2(device, ctypes.byref(features))
    name = f"{properties.name.decode()}, {driver.name.decode()} {driver.info.decode()}"
    return name, bool(descriptors.flags[PARTIALLY_BOUND])
