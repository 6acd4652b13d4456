"""A Ray cluster that includes this machine: its machines, its actors, and waits for their results.

Ray starts, places, watches and ends processes. On one machine it takes no part in an env step: farm and workers
ring each other through shared memory, and Ray carries one call per iteration. A physics worker on another machine
has a relay here, a thread of this process, and costs one call per action chunk and group.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from typing import Any, TypeVar

import psutil  # type: ignore[import-untyped]
import ray
from ray._private import ray_constants
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from embodied.errors import UserError
from embodied.runtime.api import NodeInfo, RuntimeLost
from embodied.runtime.deadlines import Deadline, Wait
from embodied.runtime.ray.local_ray import RayProcesses, RaySession, only_needed
from embodied.runtime.rounding import differences, kernels, warning
from sim_farm.client.farm import WorkerFailed, WorkerTimeout
from sim_farm.workers import faults

T = TypeVar("T")

_log = logging.getLogger(__name__)

HERE = ""
"""The client's node, as a node id in a placement."""
LOOPBACK = "127.0.0.1"
JOIN_S = 10.0
"""Longest wait for the first sign of life of a cluster."""
LOOK_S = 0.5
"""Interval of checks of the other workers during a wait."""
STARTS = 4
"""Attempts to start Ray."""
TOO_SLOW = "timed out during startup"
"""Part of Ray's message where its own processes were not up in time."""
WAITING = {"GOMP_SPINCOUNT": "1000"}
"""PyTorch's threads wait for each other by spinning, for milliseconds. Where a simulator shares their cores, the
awaited thread cannot run then: an iteration of 0.2 s was seen to take 6 s. So they sleep after microseconds."""
PRELOADED = {"RAY_preload_python_modules": "embodied.runtime.ray.preload"}
"""Ray's setting for modules that a worker process imports when it begins."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Room for one iteration's trajectories between rollout worker and learner, and for weights between machines."""


class RayCluster:
    """Starts Ray on this machine (`local`), or joins the cluster at `address`, when it is first needed (`start_ray`).

    `start_ray` raises `UserError` when no cluster answers at the address, or this machine is not one of its nodes, and
    when Ray's own processes do not start.
    """

    def __init__(self, address: str, deadline_s: float) -> None:
        self.deadline = Deadline(deadline_s)
        self.watchers: list[Callable[[], None]] = []
        """Called by `watch`; each checks some workers, and raises the error that ends the run."""
        self._actors: list[Any] = []
        self._kernels: list[tuple[str, Any]] = []
        """Other machines' ids, each with the reference to the kernels of a worker there (`rounding.kernels`)."""
        self._differing: set[tuple[str, str]] = set()
        """Pairs of machine id and kind of kernel that were already warned about."""
        self._checked_s = 0.0
        self.ray_processes = RayProcesses()
        self._address = address
        self._session: RaySession | None = None
        self._options: dict[str, Any] = {}
        """Options of `ray.init`; none before Ray is started."""
        self.here = ""
        """Id of the client's node."""

    @property
    def started(self) -> bool:
        """True once Ray runs."""
        return bool(self._options)

    def start_ray(self) -> None:
        """Start Ray, or join the cluster, unless that is done. The first actor and the first list of nodes call this.

        Raises what the class says.
        """
        if self.started:
            return
        address = self._address
        self._session = RaySession() if address == "local" else None
        options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
        if self._session is not None:
            # One logical CPU: our actors ask for none, and Ray would start an idle worker for each.
            options |= {
                "include_dashboard": False,
                "num_cpus": 1,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": LOOPBACK,
                "_temp_dir": str(self._session.folder),
            }
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Else Ray starts a worker for a task that never comes: ours are actors, in environments of their own.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        # A history of all calls, which nothing reads: it grew Ray's gcs_server by 0.7 MB per thousand episodes.
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # Ray's default lets every other process of the machine go before its workers (nice 15).
        os.environ.setdefault("RAY_worker_niceness", "0")
        if address == "local" or address.startswith(f"{LOOPBACK}:"):
            # Ray replaces a loopback address by one that other machines reach, except where it knows that there
            # are none (as on macOS). With this flag all its servers listen on the loopback interface alone.
            ray_constants.ENABLE_RAY_CLUSTER = False
        terminated, before = signal.getsignal(signal.SIGTERM), _family()
        try:
            _require_listener(address)
            with self.ray_processes.noted():
                _start(options)
        except BaseException as error:
            self._leave()
            if not isinstance(error, OSError):
                raise
            raise UserError(
                f"no Ray cluster with this machine as a node answers at {address!r}: start it with `ray start --head`, "
                "join it here with `ray start --address HOST:PORT`, and name that HOST:PORT; if it was started with "
                "RAY_AUTH_MODE=token, set that here too"
            ) from error
        if self._session is not None:
            self._session.watch(process.pid for process in _family() - before)
        # Ray installs a handler of its own, which would leave our shared memory and its own helpers behind.
        signal.signal(signal.SIGTERM, terminated)
        self._options = options
        self.here = ray.get_runtime_context().get_node_id()

    def require_ray(self) -> None:
        """Raise `RuntimeLost` if Ray's own processes have died: then all others end too, or cannot be reached."""
        if (lost := self.ray_processes.lost()) is not None:
            raise RuntimeLost(f"{lost}, and with it Ray and all workers")

    def start_ray_again(self) -> None:
        """End the rest of Ray and of every process that it has started, and start it again. Raises `UserError`."""
        self._actors.clear()
        self.ray_processes.end()
        terminated = signal.getsignal(signal.SIGTERM)
        ray.shutdown()
        before = _family()
        with self.ray_processes.noted():
            _start(self._options)
        if self._session is not None:
            self._session.watch(process.pid for process in _family() - before)
        signal.signal(signal.SIGTERM, terminated)
        self.here = ray.get_runtime_context().get_node_id()

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The cluster's living machines, this one first; where several have one name, with their ids in it.

        Raises what `start_ray` does, and `RuntimeLost` if Ray's own processes have died: they would never answer.
        """
        self.start_ray()
        found = [NodeInfo.of(entry, self.here) for entry in self._answered(ray.nodes) if entry["Alive"]]
        names = [node.name for node in found]
        found = [n if names.count(n.name) < 2 else replace(n, name=f"{n.name}-{n.id[:8]}") for n in found]
        return tuple(sorted(found, key=lambda node: (not node.is_here, node.address, node.name, node.id)))

    def actor(
        self, cls: Any, env: dict[str, str], node: str = HERE, args: tuple[Any, ...] = (), threads: int = 0
    ) -> Any:
        """A new actor, on this machine or the node with that id, which `close` ends. At most `threads` of its calls run
        concurrently. `env` are environment variables with which its process begins; in a Ray that this process has
        started it begins with `WAITING`, and sets others itself."""
        self.start_ray()
        place = NodeAffinitySchedulingStrategy(node or self.here, soft=False)
        options: dict[str, Any] = {"scheduling_strategy": place}
        if self._session is None:
            options["runtime_env"] = {"env_vars": env | self.environment(node)}
        if threads:
            options["max_concurrency"] = threads
        actor = cls.options(**options).remote(*args)
        self._actors.append(actor)
        return actor

    def environment(self, node: str = HERE) -> dict[str, str]:
        """Environment variables of an actor on that node as they are now: the faults to be injected, and on this
        machine what this process can import, which a script or a notebook may have made possible."""
        env = {name: os.environ[name] for name in (faults.VARIABLE,) if name in os.environ}
        return env | (_importable() if node in (HERE, self.here) else {})

    def _answered(self, request: Callable[[], T]) -> T:
        """The answer of Ray's own processes. Raises `RuntimeLost` once they have died."""
        answer: Future[T] = Future()

        def find() -> None:
            try:
                answer.set_result(request())
            except Exception as error:  # raised by the wait for the answer
                answer.set_exception(error)

        threading.Thread(target=find, daemon=True).start()  # not of a pool: the end of the process would wait for it
        while not wait_for([answer], timeout=LOOK_S).done:
            self.require_ray()
        return answer.result()

    def kill(self, actor: Any) -> None:
        """End an actor's process."""
        self._actors.remove(actor)
        if self.ray_processes.lost(stopped_s=0) is None:  # else Ray would not answer
            ray.kill(actor)

    def watch(self) -> None:
        """Check Ray's own processes, and the workers that no call waits for at the moment."""
        self._checked_s = time.monotonic()
        self.require_ray()
        self._compare_kernels()
        for check in self.watchers:
            check()

    def compare_kernels(self, node: str, reference: Any) -> None:
        """Warn, once the worker on that node has answered the reference, if its kernels round differently from those of
        this process."""
        self._kernels.append((node, reference))

    def _compare_kernels(self) -> None:
        """Compare the answers once all are there, so that one warning names every machine."""
        asked = list(self._kernels)
        references = [reference for _, reference in asked]
        if not asked or len(ray.wait(references, num_returns=len(references), timeout=0)[0]) < len(asked):
            return
        self._kernels = self._kernels[len(asked) :]
        new = set()
        for node, reference in asked:
            try:
                new |= {(node, kind) for kind in differences(kernels(), ray.get(reference))}
            except RayError:  # it has died: a wait for its work raises that
                continue
        new -= self._differing
        if new:
            self._differing |= new
            names = {node.id: str(node) for node in self.nodes()}
            nodes = sorted({node for node, _ in new}, key=lambda node: names.get(node, node))
            found = {names.get(node, node): sorted(kind for other, kind in new if other == node) for node in nodes}
            _log.warning("%s", warning(found))

    def poll(self, reference: Any, wait: Wait, name: str, what: str, timeout_s: float = LOOK_S) -> bool:
        """Wait at most `timeout_s`; True if the reference has a value or an error.

        Checks the other workers meanwhile. Raises `WorkerTimeout` naming worker and work once the wait is late.
        """
        done, _ = ray.wait([reference], timeout=timeout_s)
        if not done or time.monotonic() - self._checked_s > LOOK_S:  # also where every answer arrives soon
            self.watch()
        if done:
            return True
        if wait.late():
            raise WorkerTimeout(
                f"{name} did not finish {what!r}: no progress for {wait.silent_s():.1f} s, with a deadline of "
                f"{wait.deadline.seconds:g} s"
            )
        return False

    def wait(self, reference: Any, name: str, what: str) -> Any:
        """The reference's value, or the worker's own exception, within the deadline of a call."""
        wait = Wait(self.deadline)
        while not self.poll(reference, wait, name, what):
            pass
        return self.value(reference, name, what)

    def value(self, reference: Any, name: str, what: str) -> Any:
        """The value, which has arrived, or the worker's own exception without Ray's wrapping."""
        deadline_s = self.deadline.inner().seconds  # the wait for the worker came before
        try:
            return value_within(deadline_s, reference, name, what)
        except WorkerFailed:
            self.require_ray()  # whose loss is the reason
            raise
        except GetTimeoutError as error:
            raise WorkerTimeout(
                f"the result of {name}'s {what!r} is there and could not be fetched within {deadline_s:g} s"
            ) from error

    def close(self) -> None:
        """End every process, and Ray too if this process started it."""
        if self.ray_processes.lost(stopped_s=0) is not None:
            self.ray_processes.end()
        else:
            for actor in self._actors:
                ray.kill(actor)
        self._actors.clear()
        ray.shutdown()
        self._leave()

    def _leave(self) -> None:
        """Remove the files of the Ray that this process started; its logs stay if something has failed."""
        if self._session is not None:
            self._session.close(keep=isinstance(sys.exception(), Exception))
            self._session = None


def value_within(timeout_s: float, reference: Any, name: str, what: str) -> Any:
    """The reference's value, or the worker's own exception without Ray's wrapping. Raises `GetTimeoutError`."""
    try:
        return ray.get(reference, timeout=timeout_s)
    except (RayTaskError, RayActorError, ActorUnschedulableError) as error:
        raised_itself = isinstance(error, RayTaskError) and not isinstance(error.cause, RayActorError)
        raise unwrapped(error, name, what) from (None if raised_itself else error)


def unwrapped(error: Exception, name: str, what: str) -> Exception:
    """The exception that the worker `name` raised in its call `what`, without Ray's wrapping; `WorkerFailed` where its
    process is gone."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, RayActorError):  # an argument was the result of another worker, which is gone
            return WorkerFailed(f"a worker died before {name} had its result for {what!r}")
        return error.cause if isinstance(error.cause, Exception) else error
    if isinstance(error, RayActorError):
        if error.actor_init_failed:
            return cannot_start(name, error)
        return WorkerFailed(f"{name} died during {what!r}: {str(error).splitlines()[0]}")
    if isinstance(error, ActorUnschedulableError):
        return WorkerFailed(f"{name} cannot start: its machine has left the cluster")
    return error


def cannot_start(name: str, error: RayActorError) -> WorkerFailed:
    """The error of a process that never began its work; another attempt would end the same way."""
    return WorkerFailed(
        f"{name} cannot start: {str(error).splitlines()[-1]}; `embodied doctor` on its machine says what is missing"
    )


def _family() -> set[psutil.Process]:
    """All processes that descend from this one."""
    return set(psutil.Process().children(recursive=True))


def _importable() -> dict[str, str]:
    """The environment variable by which another process imports what this one can."""
    return {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}


def _start(options: dict[str, Any]) -> None:
    """Call `ray.init`, and once more if Ray's own processes were not up within the 30 s that it gives them, as on a
    busy machine."""
    before = set(psutil.Process().children())
    for _ in range(STARTS):
        try:
            with only_needed({**_importable(), **WAITING, **PRELOADED}):
                ray.init(**options)
            return
        except Exception as error:  # Ray raises no class of its own here
            if TOO_SLOW not in str(error):
                raise
        # Ray itself ends them only with this process.
        left = set(psutil.Process().children()) - before
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=10)
    folder = options.get("_temp_dir", "/tmp/ray")  # noqa: S108 - Ray's own, where another has started the cluster
    raise UserError(
        f"Ray's own processes were not up within 30 s, {STARTS} times: wait until the machine is less busy, or do "
        f"without them, with --runtime.mode inline; the reason is in Ray's logs, {folder}/session_latest/logs"
    )


def _require_listener(address: str) -> None:
    """Raise `OSError` soon if nothing listens at HOST:PORT: Ray would try for five minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S).close()
