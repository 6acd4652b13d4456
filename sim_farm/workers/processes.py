"""A host whose workers are processes of this machine, started without Ray.

Each is a new Python (`python -c`, not a fork, and not `multiprocessing`'s spawn: the caller's script is not imported
again and needs no `if __name__ == "__main__"`). It gets its task and setup through a pipe, and ends when that pipe
does, however the caller's process ended.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from sim_farm.client.health import done_by, restarted
from sim_farm.contract import FarmError, TaskInfo, TaskSpec
from sim_farm.registry import BACKENDS
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.memory import Block
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.hosts import InProcess, WorkerHandle, make_worker
from sim_farm.workers.worker import WorkerSetup

_log = logging.getLogger(__name__)

ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
"""A worker is one thread on one core; the last variable is for software rendering (llvmpipe)."""
MOST_LOSSES = 3
"""A worker that is lost more often without having done anything in between is given up."""
_PROGRAM = "import sys; from sim_farm.workers.processes import main; main(int(sys.argv[1]))"


class LostWorker(FarmError):
    """A worker's process has ended, and another in its place would too."""


class Processes:
    """See the module's docstring. A farm's workers are `count` processes.

    Call `watch` while you wait for the farm: it replaces workers whose process has ended. The successor finds what it
    needs in the slots, and replays the episodes.
    """

    shared = True

    def __init__(self, count: int) -> None:
        """Starts nothing yet."""
        self._count = count
        self._processes: list[_Process] = []
        self._serving: dict[int, _Serving] = {}

    def describe(self, task: TaskSpec) -> TaskInfo:
        """Start the processes, and have them import the simulator at the same time. Raises `FarmError`."""
        self._processes = [_Process() for _ in range(self._count)]
        for process in self._processes:
            process.send(task)
        return [process.described() for process in self._processes][0]

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        self._processes[setup.index].send(setup)
        self._serving[setup.index] = _Serving(setup, memory.slots)
        return _Handle(self, setup.index)

    def watch(self) -> None:
        """Replace workers whose process has ended. Raises `LostWorker` where that does not help."""
        for index, serving in self._serving.items():
            status = self._processes[index].popen.poll()
            slots = serving.slots.arrays
            if status is None or not slots or slots["phase"][index] == slot_layout.FAILED:
                continue  # of one that failed, the farm raises the message
            why = f"signal {-status}" if status < 0 else f"status {status}"
            serving.note_loss(done_by(slots, index))
            name = serving.setup.name
            if serving.losses > MOST_LOSSES:
                raise LostWorker(
                    f"the process of {name} of {serving.setup.spec.task.name} ended {serving.losses} times in a row, "
                    f"at last by {why}: see what it has written above, the system's log, and whether memory is short "
                    "(use fewer workers or environments)"
                )
            _log.warning("%s", f"the process of {name} has ended ({why}) and is replaced")
            self._processes[index].close(0.0)
            restarted(slots, index)
            self._processes[index] = _Process()
            self._processes[index].send(serving.setup)

    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [process.popen.pid for process in self._processes]

    def end(self, index: int, deadline_s: float) -> None:
        """Wait for the end of a worker that was told to stop, at most `deadline_s`, then end it."""
        self._processes[index].close(deadline_s)

    def close(self) -> None:
        """End the processes at once."""
        for process in self._processes:
            process.close(0.0)


class _Serving:
    """A worker that serves, and how often its process was lost."""

    def __init__(self, setup: WorkerSetup, slots: Block) -> None:
        self.setup, self.slots = setup, slots
        self.losses = 0
        """Since it last did something."""
        self._done = 0

    def note_loss(self, done: int) -> None:
        """`done` is the worker's work up to now."""
        self.losses = 1 if done > self._done else self.losses + 1
        self._done = done


class _Process:
    """A process that describes the tasks that it is sent, and serves once it is sent a worker's setup."""

    def __init__(self) -> None:
        self._connection, far = Pipe()
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        self.popen = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, str(far.fileno())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
            pass_fds=[far.fileno()],
        )
        far.close()
        self.send(dict(BACKENDS))  # which may have entries of the caller's own

    def send(self, message: dict[str, str] | TaskSpec | WorkerSetup) -> None:
        try:
            self._connection.send(message)
        except OSError:  # it has ended: `described` or `watch` says so
            pass

    def described(self) -> TaskInfo:
        """The task's sizes. Raises `FarmError` with the message of what went wrong in the process."""
        try:
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise FarmError(
                f"a worker's process ended with status {self.popen.wait()} while it started: see what it has written "
                "above"
            ) from None
        if isinstance(answer, str):
            raise FarmError(answer)
        assert isinstance(answer, TaskInfo)
        return answer

    def close(self, deadline_s: float) -> None:
        if deadline_s:
            try:
                self.popen.wait(deadline_s)
            except subprocess.TimeoutExpired:  # stopped, or stuck in a simulator
                pass
        self.popen.kill()
        self.popen.wait()
        self._connection.close()


@dataclass(frozen=True)
class _Handle:
    host: Processes
    index: int

    def ring(self) -> None:
        """Nothing to do: the farm rings in shared memory."""

    def close(self, deadline_s: float) -> None:
        self.host.end(self.index, deadline_s)


# --- in the process


def main(descriptor: int) -> None:
    """The other end of `_Process`; `descriptor` is that of the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to all; the caller's process decides
    connection = Connection(descriptor)
    try:
        BACKENDS.update(connection.recv())
        while isinstance(message := connection.recv(), TaskSpec):
            connection.send(_description(message))
    except (EOFError, OSError):  # the caller has ended
        return
    threading.Thread(target=_end_with, args=(connection,), daemon=True).start()
    make_worker(message).serve()


def _description(task: TaskSpec) -> TaskInfo | str:
    """The task's sizes, or the message of what went wrong: a traceback is added unless it is a user's mistake."""
    try:
        return InProcess().describe(task)
    except FarmError as error:
        return str(error)
    except Exception:  # whatever a simulator raises is the caller's to say
        return traceback.format_exc()


def _end_with(connection: Connection) -> None:
    """End this process when the caller's does: nothing else closes the pipe."""
    try:
        connection.recv()
    except (EOFError, OSError):
        pass
    os._exit(1)
