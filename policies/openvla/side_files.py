"""Files that OpenVLA-OFT leaves beside the weights: which are there, and which of them the options use.

FOLDER/action_head--STEP_checkpoint.pt          head: l1
FOLDER/proprio_projector--STEP_checkpoint.pt    proprio: true
FOLDER/vision_backbone--STEP_checkpoint.pt      film: true
FOLDER/noisy_action_projector--STEP_checkpoint.pt    of a diffusion head, which is refused

STEP is a number or `latest`. A policy that is saved here writes the same names with the suffix .safetensors: a pickle
is read once.

Source: vla-scripts/finetune.py and experiments/robot/openvla_utils.py of moojink/openvla-oft.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import ADAPTER_CONFIG

ACTION_HEAD, PROPRIO, FILM, NOISY = "action_head", "proprio_projector", "vision_backbone", "noisy_action_projector"
USES = {
    ACTION_HEAD: "set policy.options.head to l1 to act with it, or to tokens to act without it",
    PROPRIO: "set policy.options.proprio to true to read proprioception with it, or to false to act without it",
    FILM: "set policy.options.film to true to see through it (FiLM), or to false to see without it",
}
"""Advice for a file that no option names."""
OPTIONS = {ACTION_HEAD: "head: l1", PROPRIO: "proprio: true", FILM: "film: true"}
LORA_ADAPTER = "lora_adapter"
"""Folder beside them in which OpenVLA-OFT saves an adapter, whose merged weights it saves too, if it is asked to."""
NAME = re.compile(rf"({'|'.join((*USES, NOISY))})--(.+)_checkpoint\.(pt|safetensors)")


def find_side_files(folder: Path) -> dict[str, list[Path]]:
    """Files of each component in the folder; a component without any is left out."""
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        match = NAME.fullmatch(path.name)
        if match:
            found.setdefault(match[1], []).append(path)
    return found


def names_of(folder: Path) -> list[str]:
    """Names of all side files in the folder."""
    return [path.name for files in find_side_files(folder).values() for path in files]


def side_folders(architecture: Mapping[str, Any]) -> list[Path]:
    """Folders where the side files of a policy with these arguments may lie, in order of precedence.

    What was trained with an adapter goes with it, whatever the base has. A policy that is saved as a whole has all.
    """
    names = ("weights", "adapter", "checkpoint")
    saved, adapter, checkpoint = (Path(given) if (given := architecture.get(name)) else None for name in names)
    if saved is not None and not (saved / ADAPTER_CONFIG).exists():
        return [saved]
    home = None if adapter is None else adapter_home(adapter)
    return [folder.resolve() for folder in (saved, home, checkpoint) if folder is not None]


def adapter_home(adapter: Path) -> Path:
    """Folder of the files that were saved with an adapter: OpenVLA-OFT keeps the adapter in a subfolder of it."""
    return adapter.parent if adapter.name == LORA_ADAPTER else adapter


def step_of(path: Path) -> str:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return match[2]


def choose_side_files(
    folders: Sequence[Path], wanted: Mapping[str, bool | None], step: int | str | None = None
) -> dict[str, Path]:
    """The file of each wanted component, from the first folder that has one.

    `wanted` is True for a component that is used, and False for one that is not. If it is None, the component must have
    no file. `step` chooses among several files; without it there must be a single file of each component, and all must
    be saved at the same step. Raises `PolicyError`.
    """
    found: dict[str, list[Path]] = {}
    for folder in folders:
        found = find_side_files(folder) | found
    if NOISY in found:
        raise PolicyError(
            f"{found[NOISY][0]} belongs to a diffusion head, which is not supported: only checkpoints with an L1 head "
            "or action tokens are. Move the file out of the folder if the weights were not trained with it"
        )
    silent = [
        f"{path} is there and not used: {USES[name]}"
        for name, paths in found.items()
        for path in paths[:1]
        if wanted.get(name) is None
    ]
    if silent:
        raise PolicyError("; ".join(silent))
    chosen = {
        name: _one(folders, found.get(name, []), name, "" if step is None else str(step))
        for name, used in wanted.items()
        if used
    }
    for folder in folders:
        here = [path for path in chosen.values() if path.parent == folder]
        if len({step_of(path) for path in here}) > 1:
            names = ", ".join(path.name for path in here)
            raise PolicyError(
                f"{folder}: {names} were saved at different steps, and do not belong together: set policy.options.step "
                "to one that all of them have, or give them one step's name if they do"
            )
    return chosen


def _one(folders: Sequence[Path], paths: Sequence[Path], name: str, step: str) -> Path:
    there = [path for path in paths if not step or step_of(path) == step]
    if len(there) == 1:
        return there[0]
    where = paths[0].parent if paths else folders[0]
    listed = ", ".join(path.name for path in paths) or "none"
    steps = sorted({step_of(path) for path in paths})
    if len(there) > 1 and len({step_of(path) for path in there}) > 1:
        way = f"set policy.options.step to one of {', '.join(steps)}"
    elif len(there) > 1:
        way = "one of a step is enough: move the other away"
    elif steps:
        way = f"policy.options.step is {step}: take one of {', '.join(steps)}"
    else:
        way = f"policy.options.{OPTIONS[name]} needs it: leave that option out, or copy the file there"
    raise PolicyError(f"{where} must hold one file {name}--{step or '*'}_checkpoint.pt, found: {listed}; {way}")


def refuse_side_files(folder: Path, kind: str) -> None:
    """Raise `PolicyError`, which names them, if side files lie in the folder of a policy that has no use for any."""
    names = names_of(folder)
    if names:
        raise PolicyError(
            f"{folder} is OpenVLA-OFT's: it holds {', '.join(names)}, and {kind} uses none of them; set policy.kind to "
            "openvla_oft"
        )
