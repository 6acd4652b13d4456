"""Drawing of ManiSkill's environments: the device of this process, and the shader.

**Device.** ManiSkill's render backend "cpu" draws on the device that SAPIEN likes best, which is a GPU where one draws,
and reads pictures back without CUDA. Its backend "cuda:1" reads them back as CUDA tensors, for which every renderer
would load CUDA and hold a context of hundreds of megabytes. So the backend stays "cpu", and the device is put in its
place.

**Shader.** Pictures with fewer vectors per vertex: the same pixels, drawn in software in less time. A Panda has 400,000
vertices, and in software a draw's time goes by how many vectors each hands to its triangles. SAPIEN's shader `minimal`
hands on seven: position, texture coordinates, segmentation, the object's own coordinates, tangent, bitangent, normal.
Four are enough. The texture's two coordinates fill up those of tangent and bitangent, the segmentation is one for a
whole object, and nothing reads the object's own coordinates. The shader is SAPIEN's own, read where it is installed,
with that rewritten; where its text is not the one that is known here, SAPIEN's is used.
`tests/sim_farm/test_maniskill.py` compares pictures bit for bit with stock ManiSkill's.
"""

from __future__ import annotations

import functools
import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import sapien
from mani_skill.envs import sapien_env

from sim_farm import render_devices
from sim_farm.cache_folder import cache
from sim_farm.render_devices import RenderDevice

SOFTWARE_ALIAS = "pci:0000:00:00.0"
"""SAPIEN's name of the software renderer, which is on no bus. What SAPIEN calls `cpu` is no device in particular."""


def make_on_device(task: str, **settings: Any) -> Any:
    """`gym.make(task, **settings)`, unwrapped, that draws on what this process was asked to.

    Raises `FarmError` where the device is not there, or is not what was asked for.
    """
    wanted = render_devices.requested()
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
    wanted = render_devices.requested()
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


def draws_in_software() -> bool:
    """True if no GPU draws in this process."""
    device = device_here()
    return device is not None and f"pci:{device.pci_string}" == SOFTWARE_ALIAS


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


# --- the shader

STOCK = "minimal"

REPLACED: Mapping[str, Mapping[str, str]] = {
    "gbuffer.vert": {
        "layout(location = 1) out vec2 outUV;\n": "",
        "layout(location = 2) out flat uvec4 outSegmentation;\n": "",
        "layout(location = 3) out vec3 objectCoord;\n": "",
        "layout(location = 4) out mat3 outTbn;": (
            "layout(location = 1) out vec4 tangentU;\n"
            "layout(location = 2) out vec4 bitangentV;\n"
            "layout(location = 3) out vec3 outNormal;"
        ),
        "  outSegmentation = objectDataBuffer.segmentation;\n": "",
        "  objectCoord = position;\n": "",
        "  outUV = uv;\n": "",
        "  vec3 outNormal = ": "  outNormal = ",
        "  outTbn = mat3(outTangent, outBitangent, outNormal);\n": (
            "  tangentU = vec4(outTangent, uv.x);\n  bitangentV = vec4(outBitangent, uv.y);\n"
        ),
    },
    "gbuffer.frag": {
        "layout(location = 1) in vec2 inUV;\n": "",
        "layout(location = 2) in flat uvec4 inSegmentation;\n": "",
        "layout(location = 3) in vec3 objectCoord;\n": "",
        "layout(location = 4) in mat3 inTbn;": (
            "layout(location = 1) in vec4 tangentU;\n"
            "layout(location = 2) in vec4 bitangentV;\n"
            "layout(location = 3) in vec3 inNormal;"
        ),
        "void main() {\n": (
            "void main() {\n"
            "  vec2 inUV = vec2(tangentU.w, bitangentV.w);\n"
            "  mat3 inTbn = mat3(tangentU.xyz, bitangentV.xyz, inNormal);\n"
        ),
        "inSegmentation[1]": "objectDataBuffer.segmentation[1]",
    },
}
"""Replacements in each file of the shader."""


@contextmanager
def light_cameras() -> Iterator[None]:
    """Cameras that are made within the block draw with fewer vectors.

    ManiSkill names a shader before it makes a camera, and SAPIEN remembers it for all cameras that come.
    """
    choose, before = sapien.render.set_camera_shader_dir, sapien.render.get_camera_shader_dir()
    sapien.render.set_camera_shader_dir = lambda name: choose(_light() if name == STOCK else name)
    try:
        yield
    finally:
        sapien.render.set_camera_shader_dir = choose
        choose(before)


@functools.cache
def _light() -> str:
    """The folder of the rewritten shader, in the project's cache: worker processes that are killed leave nothing
    behind. `minimal` if SAPIEN's text is unknown, or the folder cannot be written."""
    stock = Path(sapien.__file__).parent / "vulkan_shader"
    texts = {}
    for name, replaced in REPLACED.items():
        text = _rewritten((stock / STOCK / name).read_text(), replaced)
        if text is None:
            return STOCK
        texts[name] = text
    digest = hashlib.sha256("".join([sapien.__version__, *texts.values()]).encode()).hexdigest()[:12]
    try:
        folder = cache() / f"sapien-shader-{digest}"
        if not folder.is_dir():
            _write(folder, stock, texts)
    except OSError:
        return STOCK
    return str(folder / STOCK)


def _write(folder: Path, stock: Path, texts: Mapping[str, str]) -> None:
    """Complete or not at all, also when several workers write. Raises `OSError`."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as begun:
        part = Path(begun) / "whole"
        for name in ("common", STOCK):  # the one includes files of the other
            shutil.copytree(stock / name, part / name)
        for name, text in texts.items():
            (part / STOCK / name).write_text(text)
        try:
            part.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another worker was faster
                raise


def _rewritten(text: str, replaced: Mapping[str, str]) -> str | None:
    """None where a part that is to be replaced is missing, or is there twice."""
    for old, new in replaced.items():
        if text.count(old) != 1:
            return None
        text = text.replace(old, new)
    return text
