"""What several tests of this package pretend to have."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor

from sim_farm.shared_memory.memory import FOLDER
from tests.embodied.support.pretend_device import GPU_BYTES, PretendDevice

ZOMBIE = psutil.STATUS_ZOMBIE
PROPERTIES = SimpleNamespace(total_memory=GPU_BYTES, uuid="pretence")


def is_rays(process: psutil.Process) -> bool:
    """True for Ray's own processes and those of its actors."""
    try:
        return process.name().startswith(("ray::", "raylet", "gcs_server"))
    except psutil.NoSuchProcess:
        return False


class SharedRay:
    """One Ray for the test modules that need no cluster of their own: to start one and its workers takes seconds.

    Whoever else starts a Ray in this process may do so: this one is closed first, and the next who asks begins anew.
    """

    def __init__(self) -> None:
        self._runtime: Any = None
        self._patch = pytest.MonkeyPatch()

    def open(self) -> Any:
        """A `RayRuntime`, with processes that earlier modules have left for the next workers and farms."""
        from embodied.runtime.ray import runtime
        from embodied.runtime.ray.cluster import RayCluster

        if self._runtime is None:
            self._runtime = runtime.RayRuntime("local", 240.0)
            self._patch.setattr(runtime, "SPARE", 8)  # as many as most tests need at once: to start one takes long
            start = RayCluster.__init__

            def start_alone(cluster: RayCluster, *arguments: Any) -> None:
                self.close()
                start(cluster, *arguments)

            self._patch.setattr(RayCluster, "__init__", start_alone)
        return self._runtime

    def close(self) -> None:
        """Raises `AssertionError` where shared memory or a process of Ray is left behind."""
        self._patch.undo()
        if self._runtime is not None:
            memories = [FOLDER / process._memory.name for process in self._runtime._processes]
            self._runtime, runtime = None, self._runtime
            assert all(memory.exists() for memory in memories)
            rays = [process for process in psutil.Process().children(recursive=True) if is_rays(process)]
            assert rays, "no process of Ray was found"
            runtime.close()
            assert not any(memory.exists() for memory in memories), "shared memory is left behind"
            left = [process for process in psutil.wait_procs(rays, timeout=240)[1] if process.status() != ZOMBIE]
            assert not left, "processes are left behind"


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[SharedRay]:
    shared = SharedRay()
    yield shared
    shared.close()


@pytest.fixture(scope="module")
def ray_runtime(shared_ray: SharedRay) -> Any:
    """The Ray that modules share; see `SharedRay`."""
    return shared_ray.open()


def _on(tensor: Tensor, device: Any) -> Tensor:
    """A tensor that is asked for without a device is wherever the context has put it."""
    return tensor if device is None else tensor.to(device)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    """A GPU for the length of a test."""

    class Stream:
        def synchronize(self) -> None:
            device.waits.append("synchronize")

    grouped = torch._C._group_tensors_by_device_and_dtype
    # The optimiser and the clipping group tensors by device in C++, which sees where they really are.
    monkeypatch.setattr(
        torch._C,
        "_group_tensors_by_device_and_dtype",
        lambda lists, *options: {(place_of(g[0]), k[1]): g for k, g in grouped(lists, *options).items()},
    )
    made = torch.tensor  # it alone is made behind the back of what watches operations
    monkeypatch.setattr(torch, "tensor", lambda data, device=None, **options: _on(made(data, **options), device))
    # The rest is what torch asks of a driver, and there is none.
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    # As if recording already: decisions are not replayed as graphs, which such a device cannot record.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: PROPERTIES)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretence")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    # Else `Module.to` would fill a plain parameter with what is not one.
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with PretendDevice() as device:
            yield device
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def place_of(group: Any) -> torch.device:
    """Of a group of tensors that C++ believes on the CPU."""
    return next(tensor.device for tensor in group[0] if tensor is not None)


@pytest.fixture(scope="module")
def here() -> Iterator[Any]:
    """A `Session` in this process, with as many threads as a worker begins with."""
    from embodied.config.files import parse_config
    from embodied.execution.session import open_session

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with open_session(parse_config({"runtime": {"mode": "inline"}}, "test")) as session:
        yield session
    torch.set_num_threads(threads)
