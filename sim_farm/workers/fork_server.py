"""Worker processes are forks of one process, which has imported the simulator.

An import is paid once for any number of workers and their successors, and its memory is shared. The server has one
thread and no device of a GPU open, because a fork lacks its parent's threads and cannot use what a driver has opened
for its parent. A simulator whose import starts threads or opens a GPU is imported in each fork.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import IO

import numpy as np

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
"""A worker is one thread on one core; the last variable is for software rendering (llvmpipe)."""
ENDS_S = 10.0
"""Longest time in which the number of a process that was forked, or the status of one that has ended, gets here."""
GPUS = ("/dev/nvidia", "/dev/dri/", "/dev/kfd", "/dev/dxg")
"""Beginnings of the names of the files that drivers of GPUs open."""
NUMBER_BYTES = 16


class ForkServer:
    """The server, for its owner. It is a new Python (`python -c`): `multiprocessing`'s fork server imports the caller's
    script, which would need `if __name__ == "__main__"`. It ends with its owner, however the owner ended."""

    def __init__(self, program: str, *arguments: str, output: IO[bytes] | None) -> None:
        """`program` calls `forks` with the file descriptor that is its first argument, before `arguments`. What all
        processes write goes to `output`, or to the terminal."""
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self._own = {**ONE_THREAD, "PYTHONPATH": path}
        self._began_with = os.environ | self._own
        self._requests, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._popen = subprocess.Popen(
            [sys.executable, "-P", "-c", program, str(far.fileno()), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=self._began_with,
            pass_fds=[far.fileno()],
            start_new_session=True,  # the terminal sends Ctrl-C to a whole session; the caller's process decides
        )
        far.close()

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def fork(self, connection: Connection) -> Fork:
        """A process that has this end of a connection. It begins once the server has imported the simulator."""
        channel, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with far, suppress(OSError):  # a server that has ended: so has the process
            socket.send_fds(self._requests, [b"fork"], [connection.fileno(), far.fileno()])
        return Fork(self, channel)

    def changed(self) -> dict[str, str | None]:
        """The owner's environment variables that have changed since the server began; None: no longer set."""
        now = os.environ | self._own
        names = {name for name, _ in now.items() ^ self._began_with.items()}
        return {name: now.get(name) for name in names}

    def end(self) -> int:
        """End it at once, with the processes that have not begun; the others go on. Its status."""
        self._popen.kill()
        self._requests.close()
        return self._popen.wait()

    def wait(self) -> int:
        """Its status, once it has closed its end of everything."""
        try:
            return self._popen.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            return self.end()


class Fork:
    """A process of a fork server, for its owner."""

    def __init__(self, server: ForkServer, channel: socket.socket) -> None:
        self._server, self._channel = server, channel
        self.pid = 0
        """0 until `begun`."""
        self._handle = -1
        """A file descriptor that stands for the process: its number may be another's once it has ended."""
        self._ended: str | None = None

    def begun(self, timeout_s: float = 0.0) -> bool:
        """True if the process has begun, after at most `timeout_s`."""
        if not self.pid and self._ended is None and wait([self._channel], timeout_s):
            number, handles, *_ = socket.recv_fds(self._channel, NUMBER_BYTES, 1)
            if number:
                self.pid, (self._handle,) = int(number), handles
            else:
                self._ended = _in_words(self._server.wait())
        return bool(self.pid)

    def ended(self, timeout_s: float = 0.0) -> str | None:
        """The end of the process, as the end of a sentence; None while it lives, after at most `timeout_s`."""
        if self.begun() and self._ended is None and wait([self._handle], timeout_s):
            # The server reports the status when the process is gone for good, zombie and all.
            status = self._channel.recv(NUMBER_BYTES) if wait([self._channel], ENDS_S) else b""
            self._ended = _in_words(int(status)) if status else "ended, and its fork server does not say how"
        return self._ended

    def end(self) -> str | None:
        """End it at once; how it had ended before. A server that has not forked it yet is stuck, and ends with it."""
        ended = self.ended()
        if ended is None and self.pid:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            self.ended(ENDS_S)
        elif ended is None:
            self._server.end()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._channel.close()
        self._ended = self._ended or "was ended"
        return ended


def _in_words(status: int) -> str:
    return f"died (signal {-status})" if status < 0 else f"ended (status {status})"


# --- in the server


def may_fork() -> bool:
    """True if a fork of this process is whole: one thread, and no GPU."""
    files = (os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd"))
    return len(os.listdir("/proc/self/task")) == 1 and not any(name.startswith(GPUS) for name in files)


def forks(descriptor: int) -> Connection | None:
    """Fork whenever the owner asks for it. Returns its connection in a fork, and None in the server when the owner has
    ended."""
    requests = socket.socket(fileno=descriptor)
    processes: dict[int, tuple[int, socket.socket]] = {}
    """Those that live: number and channel by handle."""
    while True:
        for ready in wait([requests, *processes]):
            if isinstance(ready, int):
                pid, channel = processes.pop(ready)
                os.close(ready)
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with channel, suppress(OSError):
                    channel.send(str(status).encode())
                continue
            message, descriptors, *_ = socket.recv_fds(requests, NUMBER_BYTES, 2)
            if not message:
                return None
            connection, channel = Connection(descriptors[0]), socket.socket(fileno=descriptors[1])
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if not pid:
                for each in (requests, channel, *(other for _, other in processes.values())):
                    each.close()
                for handle in processes:
                    os.close(handle)
                os.setsid()
                np.random.seed()  # noqa: NPY002 - else what a simulator draws without a seed is equal in all
                return connection
            connection.close()
            handle = os.pidfd_open(pid)
            processes[handle] = pid, channel
            with suppress(OSError):  # the owner has ended it already: the process finds its connection closed
                socket.send_fds(channel, [str(pid).encode()], [handle])
