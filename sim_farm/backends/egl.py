"""EGL's devices, asked of the library itself: PyOpenGL could not be turned to OSMesa any more once it had tried EGL.

python -m sim_farm.backends.egl      # lists them
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

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
    """What EGL offers, in its own order; nothing where there is no EGL that enumerates devices."""
    try:
        egl = _Egl()
        return tuple(map(egl.describe, egl.handles()))
    except OSError:
        return ()


def answers() -> bool:
    """Whether EGL finds a device, a GPU or a software one, that starts without a display."""
    try:
        egl = _Egl()
    except OSError:
        return False
    displays: Iterator[Any] = (egl.display(PLATFORM_DEVICE, handle, None) for handle in egl.handles())
    return any(egl.library.eglInitialize(display, None, None) for display in displays if display)


if __name__ == "__main__":
    for index, device in enumerate(devices()):
        print(f"EGL device {index}: {device}")
