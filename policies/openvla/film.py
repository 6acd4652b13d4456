"""FiLM: the instruction modulates what the vision towers see (OpenVLA-OFT, arXiv 2502.19645).

Within each block, after attention and before the MLP, every patch x becomes x (1 + gamma) + beta; gamma and beta are
linear in the mean of the embeddings of the language tokens.

FOLDER/vision_backbone--STEP_checkpoint.pt holds the whole backbone as it was trained: the towers' own tensors, which
replace the directory's, those of FiLM, and, where LoRA trained it, each adapted matrix apart from its adapter. The
adapters are merged when the file is read; one that is written has adapters of the same shapes that add nothing, for
the reference looks for them.

Source: prismatic/models/film_vit_wrapper.py of moojink/openvla-oft. B images, N patches and further tokens of each, E a
tower's width, D the language model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.files import ADAPTER_CONFIG, check_finite, check_tensors, read_json, read_state, shown
from policies.openvla.config import TOWERS
from policies.openvla.model import FILM_LAYER, OpenVLAModel, from_checkpoint
from policies.openvla.side_files import LORA_ADAPTER

LARGEST_ALPHA = 16
"""The reference trains adapters with an alpha of their rank, at most this."""
_ADAPTER = re.compile(r"(.+)\.lora_([AB])\.[^.]+\.weight")


class FilmedBlock(nn.Module):
    """A block of a vision transformer [B, N, E] that the instruction [B, D] modulates."""

    def __init__(self, block: nn.Module, language: int, width: int) -> None:
        super().__init__()
        self.block = block
        self.scale = nn.Linear(language, width)
        self.shift = nn.Linear(language, width)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        block: Any = self.block
        x = x + block.drop_path1(block.ls1(block.attn(block.norm1(x))))
        x = x * (1 + self.scale(language)[:, None]) + self.shift(language)[:, None]
        return x + block.drop_path2(block.ls2(block.mlp(block.norm2(x))))


@dataclass(frozen=True)
class FilmFile:
    """Tensors of a file that the model does not compute with; on the CPU, to be written again."""

    unused: Mapping[str, Tensor]
    """Tensors that no output depends on, by the file's names: the last blocks, with FiLM's layers, and what follows."""
    adapters: Mapping[str, tuple[Tensor, Tensor]]
    """A, and zeros as B, of each adapted layer."""


def load_film(model: OpenVLAModel, path: Path) -> FilmFile:
    """Modulate the model's towers by what the file says. Raises `PolicyError`, and leaves the model as it was, if the
    file does not fit."""
    _wrap(model)
    tensors, file = read_film(model, path)
    model.load_state_dict({name: tensor.to(model.dtype) for name, tensor in tensors.items()}, strict=False, assign=True)
    return file


def read_film(model: OpenVLAModel, path: Path) -> tuple[dict[str, Tensor], FilmFile]:
    """The file's tensors, adapters merged in float32, by the names of the state dict of a model that is modulated
    already; and the rest. The model stays as it is."""
    state, adapters = _merged(path)
    own = {name: name.replace(".base_layer", "") for name in _tower_names(model)}
    used = {from_checkpoint(name): tensor for name, tensor in state.items()}
    unused = {_filmed(name): tensor for name, tensor in model.unused.items()}
    widths = {tower: _width(model, tower) for tower in TOWERS}
    last = {
        f"vision_backbone.{tower}.blocks.{len(getattr(model.vision_backbone, tower).blocks)}.{part}.{kind}": shape
        for tower, width in widths.items()
        for part in ("scale", "shift")
        for kind, shape in (("weight", (width, model.width)), ("bias", (width,)))
    }
    current = model.state_dict()
    expected = {plain: current[name] for name, plain in own.items()}
    unused |= {name: torch.empty(shape, device="meta") for name, shape in last.items()}
    check_tensors(path, used, expected | {from_checkpoint(name): tensor for name, tensor in unused.items()})
    file = FilmFile({name: used[from_checkpoint(name)] for name in unused}, adapters)
    return {name: used[plain] for name, plain in own.items()}, file


def film_state(model: OpenVLAModel, file: FilmFile, directory: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The file's tensors by its names; `directory` are those of the towers, with adapters of ours merged."""
    own = {name: tensor for name, tensor in model.state_dict().items() if FILM_LAYER.fullmatch(name)}
    towers = {_filmed(name): tensor for name, tensor in directory.items() if name.startswith("vision_backbone.")}
    state = towers | own | {name: tensor.to(model.dtype) for name, tensor in file.unused.items()}
    for layer, sides in file.adapters.items():
        for part in ("weight", "bias"):
            if f"{layer}.{part}" in state:
                state[f"{layer}.base_layer.{part}"] = state.pop(f"{layer}.{part}")
        for side, tensor in zip("AB", sides, strict=True):
            state[f"{layer}.lora_{side}.default.weight"] = tensor.to(model.dtype)
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def _wrap(model: OpenVLAModel) -> None:
    for tower in TOWERS:
        vit = getattr(model.vision_backbone, tower)
        with torch.device("meta"):
            blocks = [FilmedBlock(block, model.width, vit.embed_dim) for block in vit.blocks]
        vit.blocks = nn.ModuleList(blocks)


def _tower_names(model: OpenVLAModel) -> list[str]:
    """Names in the state dict of what the file holds: adapters of ours are not in it."""
    return [name for name in model.state_dict() if name.startswith("vision_backbone.") and ".lora_" not in name]


def _width(model: OpenVLAModel, tower: str) -> int:
    return int(getattr(model.vision_backbone, tower).embed_dim)


def _filmed(name: str) -> str:
    """A directory's name of a tensor as the file has it."""
    return re.sub(r"^(vision_backbone\.\w+\.blocks\.\d+\.)", r"\1block.", name)


def _merged(path: Path) -> tuple[dict[str, Tensor], dict[str, tuple[Tensor, Tensor]]]:
    """The file's tensors with its adapters added in, and those adapters with zeros as B."""
    plain: dict[str, Tensor] = {}
    sides: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_state(path).items():
        adapter = _ADAPTER.fullmatch(name)
        if adapter:
            sides.setdefault(adapter[1], {})[adapter[2]] = tensor
        else:
            plain[name.replace(".base_layer", "")] = tensor
    adapters = {}
    for layer, pair in sides.items():
        a, b, weight = pair.get("A"), pair.get("B"), plain.get(f"{layer}.weight")
        if a is None or b is None or weight is None:
            raise PolicyError(f"{path}: the adapter of {shown(layer)} is not whole: it needs A, B and a base_layer")
        fits = a.dim() == b.dim() == weight.dim() == 2 and a.shape[0] == b.shape[1]
        if not fits or weight.shape != (b.shape[0], a.shape[1]) or not len(a):
            shapes = ", ".join(str(list(t.shape)) for t in (a, b, weight))
            raise PolicyError(f"{path}: the adapter of {shown(layer)} does not fit its matrix: {shapes}")
        if not all(t.is_floating_point() for t in (a, b, weight)):
            raise PolicyError(f"{path}: {shown(layer)} or its adapter is quantised, which is not supported")
        plain[f"{layer}.weight"] = weight.float() + _scaling(path, len(a)) * (b.float() @ a.float())
        adapters[layer] = (a, torch.zeros_like(b))
    check_finite(path, plain)
    return plain, adapters


def _scaling(path: Path, rank: int) -> float:
    """Factor of adapters of this rank: as the adapter's folder says, where it lies beside, else the reference's."""
    config = path.parent / LORA_ADAPTER / ADAPTER_CONFIG
    if not config.exists():
        return min(rank, LARGEST_ALPHA) / rank
    said = read_json(config)
    r, alpha = said.get("r"), said.get("lora_alpha")
    if r != rank or not isinstance(alpha, int | float) or not 0 < alpha <= 1e6:
        raise PolicyError(f"{path} has adapters of rank {rank}, {config} says r {shown(r)}, lora_alpha {shown(alpha)}")
    return float(alpha) / (rank**0.5 if said.get("use_rslora") else rank)
