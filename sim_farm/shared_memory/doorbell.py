"""Waking another process through a counter in shared memory: a Linux futex.

A bell is one int32. Ringing writes the time into it and wakes the processes that wait for it; waiting sleeps while it
still has the value that was last seen. A ring between looking and sleeping is never lost, because the kernel compares
the value again before it puts the caller to sleep. A round trip costs some ten microseconds, where a Ray call costs
six hundred.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import time

import numpy as np
import numpy.typing as npt

_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_NUMBERS = {"x86_64": 202, "aarch64": 98}
_SYSCALL = _NUMBERS.get(platform.machine())
_libc = ctypes.CDLL(None, use_errno=True)
_SPINS = 50
"""Looks at the bell before sleeping; about 10 us, which is what being woken would cost anyway."""


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


class Doorbell:
    """One bell: element `index` of the int32 array `bells`, which may lie in shared memory."""

    def __init__(self, bells: npt.NDArray[np.int32], index: int) -> None:
        self._cell = bells[index : index + 1]
        self._address = ctypes.c_void_p(self._cell.ctypes.data)

    def value(self) -> int:
        return int(self._cell[0])

    def ring(self) -> None:
        """Wake all processes that wait. Rings by several processes may coalesce; none is lost."""
        # The time rather than a count: adding one is not atomic between processes, and a ringer that is suspended
        # between reading and writing would set the bell back to a number that a waiter has seen already.
        self._cell[0] = np.int64(time.monotonic_ns()).astype(np.int32)
        if _SYSCALL is not None:
            _libc.syscall(_SYSCALL, self._address, _FUTEX_WAKE, 2**31 - 1, None, None, 0)

    def wait(self, seen: int, timeout_s: float) -> bool:
        """Sleep until the value differs from `seen`; False if `timeout_s` passed first."""
        for _ in range(_SPINS):
            if self._cell[0] != seen:
                return True
        deadline = time.monotonic() + timeout_s
        while self._cell[0] == seen:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if _SYSCALL is None:  # no futex on this system: look every 100 us
                time.sleep(1e-4)
                continue
            wait = _Timespec(int(left), int((left % 1) * 1e9))
            result = _libc.syscall(_SYSCALL, self._address, _FUTEX_WAIT, seen, ctypes.byref(wait), None, 0)
            code = ctypes.get_errno() if result else 0
            if code not in (0, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
                raise OSError(code, os.strerror(code), "futex")
        return True
