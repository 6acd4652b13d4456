"""The device on which ManiSkill's environments of this process draw.

ManiSkill's render backend "cpu" draws on the device that SAPIEN likes best, which is a GPU where one draws, and reads
pictures back without CUDA. Its backend "cuda:1" reads them back as CUDA tensors, for which every renderer would load
CUDA and hold a context of hundreds of megabytes. So the backend stays "cpu", and the device is put in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import gymnasium as gym
import sapien
from mani_skill.envs import sapien_env

from sim_farm import render_devices
from sim_farm.render_devices import RenderDevice

SOFTWARE_ALIAS = "pci:0000:00:00.0"
"""SAPIEN's name of the software renderer, which is on no bus. What SAPIEN calls `cpu` is no device in particular."""


def make_on_device(task: str, **settings: Any) -> Any:
    """`gym.make(task, **settings)`, unwrapped, that draws on what this process was asked to.

    Raises `FarmError` where the device is not there, or is not what was asked for.
    """
    wanted = render_devices.asked()
    if wanted is None:
        return gym.make(task, **settings).unwrapped
    device = vulkan_device(wanted)
    # SAPIEN has one renderer per process. Held while the environment is built, it is there for all materials, which
    # would otherwise make one on the device that SAPIEN likes best.
    held = sapien.render.RenderSystem(device)
    render_devices.drawing()
    with _instead_of_cpu(device):
        env = gym.make(task, **settings).unwrapped
    del held
    return env


def vulkan_device(wanted: RenderDevice) -> Any:
    """SAPIEN's device. CUDA's numbers are those of this process: SAPIEN compares what CUDA lists with Vulkan's."""
    alias = SOFTWARE_ALIAS if wanted == "cpu" else f"cuda:{wanted}"
    try:
        device = sapien.Device(alias)
    except RuntimeError as error:
        raise render_devices.refused(wanted, f"SAPIEN finds no such Vulkan device ({error})") from error
    if not device.can_render():
        raise render_devices.refused(wanted, f"SAPIEN says that {device.name} does not draw by Vulkan")
    render_devices.check_drawn(wanted, device.name, f"Vulkan ({alias})")
    return device


def device_here() -> Any | None:
    """Device that this process draws on. Without a request it is SAPIEN's first: a CUDA device that draws, else the
    software renderer; None where that is something else."""
    wanted = render_devices.asked()
    if wanted is not None:
        return vulkan_device(wanted)
    for alias in ("cuda", SOFTWARE_ALIAS):
        try:
            device = sapien.Device(alias)
        except RuntimeError:
            continue
        if device.can_render():
            return device
    return None


def drawn_by() -> tuple[str, str | None]:
    """Name and PCI address of the device that SAPIEN draws on in this process, as far as it can be asked."""
    device = device_here()
    return ("SAPIEN's choice", None) if device is None else (device.name, device.pci_string)


@contextmanager
def _instead_of_cpu(device: Any) -> Iterator[None]:
    """ManiSkill's environments that are made meanwhile with a renderer have it on the device."""
    parse = sapien_env.parse_sim_and_render_backend

    def chosen(sim_backend: str, render_backend: str) -> Any:
        found = parse(sim_backend, render_backend)
        return replace(found, render_device=device) if found.render_device is not None else found

    sapien_env.parse_sim_and_render_backend = chosen
    try:
        yield
    finally:
        sapien_env.parse_sim_and_render_backend = parse
