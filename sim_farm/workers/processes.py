"""A host whose workers are processes of this machine.

Each simulator has a fork server, which imports it once (docs/decisions/0221). A process gets its tasks and setups
through a pipe, and ends when that pipe does, however the caller's process ended. When a farm is closed its processes
stay, and serve the next farm (docs/decisions/0202).
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import sys
import tempfile
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, groupby
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import TypeVar

import numpy as np

from sim_farm.client.episode_replay import Filmer, FilmRequest
from sim_farm.client.health import done_by, hung, restarted
from sim_farm.contract import FarmError, TaskInfo, TaskSpec, UInt8
from sim_farm.registry import BACKENDS, resolve
from sim_farm.render_devices import RenderDevice
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.fork_server import ENDS_S, ForkServer, forks, may_fork
from sim_farm.workers.hosts import InProcess, make_worker
from sim_farm.workers.supervision import (
    NO_LIMIT,
    Event,
    LimitTooSmall,
    MemoryChecks,
    MemoryLimit,
    Replaced,
    State,
    Supervision,
    WorkerFailed,
)
from sim_farm.workers.worker import WorkerSetup

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOOK_S = 0.1
"""Shortest interval of looks at the workers."""
LAST_WORDS, MOST_OUTPUT = 2000, 2**20
"""Longest end of what processes have written that a message repeats, and that is kept, in bytes."""
_PROGRAM = "import sys; from sim_farm.workers.processes import main; main(*sys.argv[1:])"
IMPORTS_EARLY, IMPORTS_LATE = "early", "late"
"""Last argument of the program: the server imports the simulator, or each fork does."""
_BUILDING = (slot_layout.STARTING, slot_layout.BUILDING)


class Processes:
    """See the module's docstring. One host serves all tasks of any number of farms.

    Call `watch` while you wait for a farm. It replaces a worker whose process has ended, one that has work and has made
    no progress for `silent_s` seconds, and one that uses more memory than `limit`. The successor finds what it needs in
    the slots, and replays the episodes. The rule is `supervision.Supervision`.
    """

    shared = True

    def __init__(
        self, start_s: float, silent_s: float, limit: MemoryLimit = NO_LIMIT, shows_output: bool = True
    ) -> None:
        """Starts nothing yet. A simulator may take `start_s` seconds to describe a task, or to film an episode. What
        processes write is shown in the terminal, or its end only in the message of one that cannot serve."""
        self.start_s, self.silent_s, self.limit = start_s, silent_s, limit
        # Opened for appending: the processes share it, and it is emptied when it is long.
        self._output = None if shows_output else tempfile.TemporaryFile("a+b")  # noqa: SIM115 - for all
        self._servers: dict[str, ForkServer] = {}
        """By simulator."""
        self._idle: list[_Process] = []
        self._workers: list[_Worker] = []
        self._described: dict[TaskSpec, TaskInfo | str] = {}
        """The simulators' answers by task: its sizes, or an error message."""
        self._asked: dict[TaskSpec, _Process] = {}
        self.replaced: list[Replaced] = []
        """Replacements for `take_replaced` to return."""
        self._looked_s = 0.0

    def prepare(self, processes: Sequence[tuple[TaskSpec, RenderDevice | None]]) -> None:
        self._drop_ended()
        # What went wrong for an earlier farm may be mended by now.
        for task in [task for task, found in self._described.items() if isinstance(found, str)]:
            del self._described[task]
            self._asked.pop(task, None)
        unused = list(self._idle)
        for task, device in processes:
            process = next((one for one in unused if one.may_serve(task, device)), None)
            if process is None:
                process = self._start(task)
                self._idle.append(process)
            else:
                unused.remove(process)
            self._ask(task, process)

    def describe(self, task: TaskSpec) -> TaskInfo:
        """The task's sizes, from a simulator in a process, which is asked once. Raises `FarmError` with the message of
        what went wrong there, or where no answer has come within `start_s` seconds."""
        self._drop_ended()
        if task not in self._described and task not in self._asked:
            mine = [process for process in self._idle if process.simulator == _simulator(task)]
            if not mine:
                mine = [self._start(task)]
                self._idle += mine
            self._ask(task, mine[0])
        until = time.monotonic() + self.start_s
        while task not in self._described:
            process = self._asked[task]
            if process.receive(until - time.monotonic()):
                continue
            ended = self._end(process)
            late = f"did not describe its task within {self.start_s:.0f} s" if ended is None else ended
            raise WorkerFailed(f"a process of {task.name} {late}{self.last_words()}")
        self._asked.pop(task, None)
        found = self._described[task]
        if isinstance(found, str):
            del self._described[task]
            raise FarmError(found)
        return found

    def films(self, requests: Sequence[FilmRequest], processes: int) -> Iterator[list[UInt8]]:
        """See `Host`. Processes of earlier farms draw, on the devices that they have drawn on. Raises `WorkerFailed`
        where one ends, or takes longer than `start_s` seconds."""
        for _, own in groupby(requests, lambda request: _simulator(request.task)):
            yield from self._films(list(own), processes)

    def _films(self, requests: Sequence[FilmRequest], processes: int) -> Iterator[list[UInt8]]:
        self._drop_ended()
        simulator, count = _simulator(requests[0].task), min(processes, len(requests))
        filming = [process for process in self._idle if process.simulator == simulator][:count]
        self._idle = [process for process in self._idle if process not in filming]
        filming += [self._start(requests[0].task) for _ in range(count - len(filming))]
        # Ten megabytes each: the pipe would hand them over in pieces of its buffer.
        folder = tempfile.TemporaryDirectory()
        orders = [_Film(request, f"{folder.name}/{number}.npy") for number, request in enumerate(requests)]
        try:
            for order, process in zip(orders, cycle(filming), strict=False):
                process.film(order)
            for order, process in zip(orders, cycle(filming), strict=False):
                request, found = order.request, process.filmed(self.start_s)
                if found is None:
                    late = self._end(process) or f"did not film an episode within {self.start_s:.0f} s"
                    raise WorkerFailed(f"a process of {request.task.name} {late}{self.last_words()}")
                if found:
                    raise FarmError(found)
                frames = list(np.load(order.path))
                os.unlink(order.path)
                yield frames
        finally:
            for process in filming:
                if process.filming:
                    self._end(process)
                else:
                    self._idle.append(process)
            folder.cleanup()

    def _end(self, process: _Process) -> str | None:
        """End a process that does not serve, and expect nothing of it any more; how it had ended before."""
        self._idle = [other for other in self._idle if other is not process]
        self._asked = {task: one for task, one in self._asked.items() if one is not process}
        return process.end()

    def _drop_ended(self) -> None:
        """Forget idle processes that have died since they served, except one that has been given a task: its death is
        reported when it is waited for."""
        asked = set(map(id, self._asked.values()))
        for process in [one for one in self._idle if id(one) not in asked and one.ended() is not None]:
            process.end()
            self._idle.remove(process)

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> _Worker:
        worker = _Worker(self, setup, memory, self.replaced)
        self._workers.append(worker)
        return worker

    def watch(self) -> None:
        """See the class. Raises `WorkerFailed` where a worker is given up, and `LimitTooSmall`."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        if self._output is not None and os.fstat(self._output.fileno()).st_size > MOST_OUTPUT:
            os.ftruncate(self._output.fileno(), 0)
        for worker in self._workers:
            worker.check()

    def take_replaced(self) -> list[Replaced]:
        """Workers that were lost and serve again, since the last call."""
        found = list(self.replaced)
        self.replaced.clear()
        return found

    def close(self) -> None:
        """End the processes at once."""
        for process in (*self._idle, *(worker.process for worker in self._workers)):
            process.end()
        for server in self._servers.values():
            server.end()
        self._servers.clear()
        self._idle.clear()
        self._workers.clear()

    def pids(self) -> list[int]:
        """Process ids of the workers of the present farms."""
        return [worker.process.pid for worker in self._workers]

    def last_words(self) -> str:
        """The end of what processes have written, as the end of a message."""
        if self._output is None:
            return "; see what it has written above"
        size = os.fstat(self._output.fileno()).st_size
        said = os.pread(self._output.fileno(), LAST_WORDS, max(size - LAST_WORDS, 0)).decode(errors="replace").strip()
        return f"; the last that simulators have written is:\n{said}" if said else ""

    def process_of(self, setup: WorkerSetup) -> _Process:
        """A process for the worker, an idle one where there is one that may serve as it."""
        for process in list(self._idle):
            if process.may_serve(setup.spec.task, setup.device):
                self._idle.remove(process)
                if process.ended() is None:
                    return process
                process.end()
        return self._start(setup.spec.task)

    def release(self, worker: _Worker, deadline_s: float) -> None:
        """The worker, which was told to stop, leaves its farm; a process that is stuck is ended."""
        self._workers.remove(worker)
        if worker.process.served(deadline_s):
            self._idle.append(worker.process)
        else:
            worker.process.end()

    def _start(self, task: TaskSpec) -> _Process:
        simulator = _simulator(task)
        server = self._servers.get(simulator)
        if server is None or not server.alive:
            arguments = task.name, json.dumps(BACKENDS), IMPORTS_EARLY  # BACKENDS may have entries of the caller's own
            server = self._servers[simulator] = ForkServer(_PROGRAM, *arguments, output=self._output)
        return _Process(simulator, self._described, server)

    def _ask(self, task: TaskSpec, process: _Process) -> None:
        if task not in self._described and task not in self._asked:
            self._asked[task] = process
            process.send(task)


@dataclass(frozen=True)
class _Film:
    """An episode to film, and the file for its frames, uint8 [n, H, W, 3]."""

    request: FilmRequest
    path: str

    def draw(self, filmer: Filmer) -> str:
        """Write the file. Returns nothing to say."""
        np.save(self.path, np.stack(filmer.film(self.request)))
        return ""


class _Worker:
    """A worker of a farm, and the process that serves as it at the moment."""

    def __init__(self, host: Processes, setup: WorkerSetup, memory: WorkerMemory, replaced: list[Replaced]) -> None:
        self._host, self._setup, self._block = host, setup, memory.slots
        self.supervision = Supervision(setup.name, replaced)
        self.process = host.process_of(setup)
        self.process.serve(setup)

    def ring(self) -> None:
        """Nothing to do: the farm rings in shared memory."""

    def close(self, deadline_s: float) -> None:
        self.supervision.end()
        self._host.release(self, deadline_s)

    def check(self) -> None:
        """Note what the worker does, and replace it if it died, hangs or uses too much memory."""
        slots, index, worker = self._block.arrays, self._setup.index, self.supervision
        if not slots or slots["phase"][index] == slot_layout.FAILED:
            return  # the farm is closing; or it raises the message
        if (ended := self.process.ended()) is not None:
            return self._replace(f"its process {ended}")
        silent_s = self._host.silent_s
        if (doing := hung(slots, index, silent_s)) is not None:
            return self._replace(doing)
        late = hung(slots, index, silent_s / 2)
        if late is not None and worker.state is State.HEALTHY:
            _log.warning("%s", f"{late}; it is replaced after {silent_s:g} s")
        worker.note(Event.LATE if late is not None else Event.PROGRESS)
        phase = slots["phase"][index]
        if worker.state is State.RESTARTING and phase not in _BUILDING:
            worker.note(Event.BUILT)
        if worker.state is State.STALE and phase != slot_layout.REPLAYING:
            worker.serves_again()
        if phase not in (*_BUILDING, slot_layout.REPLAYING):
            error = self._host.limit.exceeded(worker.name, self.process.pid, self.process.memory_checks)
            if isinstance(error, LimitTooSmall):
                raise error
            if error is not None:
                self._replace(str(error))

    def _replace(self, why: str) -> None:
        self.process.end()
        slots, index = self._block.arrays, self._setup.index
        try:
            self.supervision.lost(why, done_by(slots, index))
        except WorkerFailed as error:
            raise WorkerFailed(f"{error}{self._host.last_words()}") from None
        restarted(slots, index)
        self.process = self._host.process_of(self._setup)
        self.process.serve(self._setup)


class _Process:
    """A process that describes the tasks that it is sent, and serves as the workers whose setups it is sent."""

    def __init__(self, simulator: str, described: dict[TaskSpec, TaskInfo | str], server: ForkServer) -> None:
        """The simulator is that of the server. Answers are put into `described`."""
        self.simulator, self._described = simulator, described
        self._serving = False
        self.filming = 0
        """Number of episodes to film whose frames were not taken yet."""
        self._films: deque[str] = deque()
        self.drew = False
        self.device: RenderDevice | None = None
        self.memory_checks = MemoryChecks(settles=1)  # once built it has all that it needs
        self._connection, far = Pipe()
        self._fork = server.fork(far)
        far.close()
        self.send(server.changed())

    @property
    def pid(self) -> int:
        """0 where it does not begin soon."""
        self._fork.begun(ENDS_S)
        return self._fork.pid

    def may_serve(self, task: TaskSpec, device: RenderDevice | None) -> bool:
        """True if it can be a worker of the task that draws on the device: its simulator is the task's, and it has
        drawn on no other device."""
        return self.simulator == _simulator(task) and (not self.drew or self.device == device)

    def send(self, message: dict[str, str | None] | TaskSpec | WorkerSetup | _Film) -> None:
        try:
            self._connection.send(message)
        except OSError:  # it has ended: whoever waits for it finds that
            pass

    def serve(self, setup: WorkerSetup) -> None:
        self._serving = True
        if setup.draws:
            self.drew, self.device = True, setup.device
        self.send(setup)

    def film(self, film: _Film) -> None:
        self.drew = True
        self.filming += 1
        self.send(film)

    def filmed(self, deadline_s: float) -> str | None:
        """Empty once the next film's frames are written, or the message of what went wrong; None where nothing comes in
        time, or the process has ended."""
        until = time.monotonic() + deadline_s
        while not self._films:
            if not self.receive(until - time.monotonic()):
                return None
        self.filming -= 1
        return self._films.popleft()

    def served(self, deadline_s: float) -> bool:
        """True once it has served, waited for at most `deadline_s`; False where it is stuck, or has ended."""
        until = time.monotonic() + deadline_s
        while self._serving:
            if not self.receive(until - time.monotonic()):
                return False
        return True

    def receive(self, timeout_s: float) -> bool:
        """Receive one message; False where none comes in time, or the process has ended."""
        try:
            if not self._connection.poll(max(timeout_s, 0.0)):
                return False
            message = self._connection.recv()
        except (EOFError, OSError):
            self._fork.ended(ENDS_S)
            return False
        if message is None:
            self._serving = False
        elif isinstance(message, str):
            self._films.append(message)
        else:
            self._described.update([message])
        return True

    def ended(self) -> str | None:
        """The end of the process, as the end of a sentence; None while it lives."""
        return self._fork.ended()

    def end(self) -> str | None:
        """End it at once; how it had ended before."""
        self._connection.close()
        return self._fork.end()


def _simulator(task: TaskSpec) -> str:
    """The simulator that a process imports for the task; it serves no other."""
    return task.name.partition("/")[0]


# --- in the process


def main(descriptor: str, task: str, backends: str, imports: str) -> None:
    """The program of a fork server, whose forks are the other ends of `_Process`."""
    environment = dict(os.environ)
    BACKENDS.update(json.loads(backends))
    if imports == IMPORTS_EARLY:
        gc.disable()  # it would take a sixth of the import's time
        _import(task)
        if not may_fork():
            os.execve(sys.executable, [*sys.orig_argv[:-1], IMPORTS_LATE], environment)  # noqa: S606
        gc.collect()
        gc.freeze()  # a collection in a fork would write to what is shared
        gc.enable()
    connection = forks(int(descriptor))
    if connection is not None:
        _work(connection, task)


def _work(connection: Connection, task: str) -> None:
    """Describe tasks, film episodes and serve as workers, one after the other."""
    received: queue.SimpleQueue = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, received), daemon=True).start()
    cores = os.sched_getaffinity(0)
    for name, value in received.get().items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _import(task)
    filmer = Filmer()
    while True:
        message = received.get()
        if isinstance(message, TaskSpec):
            connection.send((message, _answer(partial(InProcess().describe, message))))
            continue
        os.sched_setaffinity(0, cores)  # another farm may have pinned it
        if isinstance(message, _Film):
            connection.send(_answer(partial(message.draw, filmer)))
        else:
            filmer.close()
            make_worker(message).serve()
            connection.send(None)


def _receive(connection: Connection, received: queue.SimpleQueue) -> None:
    """Hand over what the caller's process sends, and end this process when that does: nothing else closes the pipe.
    What cannot be read (an object of the caller's script, which is not imported here) ends it too."""
    try:
        while True:
            received.put(connection.recv())
    except (EOFError, OSError):
        pass
    except Exception:  # unpickling raises anything
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _import(task: str) -> None:
    with suppress(Exception):  # whatever a simulator raises is said where the task is described or built
        resolve(task)[0].load(task)


def _answer(made: Callable[[], T]) -> T | str:
    """What is made, or the message of what went wrong: a traceback is added unless it is a user's mistake."""
    try:
        return made()
    except FarmError as error:
        return str(error)
    except Exception:  # whatever a simulator raises is the caller's to say
        return traceback.format_exc()
