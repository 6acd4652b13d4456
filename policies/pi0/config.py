"""What a checkpoint's config.json says of the network's sizes, in openpi's layout and LeRobot's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from policies.contract import PolicyError
from policies.files import read_json, shown
from policies.pi0.mixture import StackSizes

Layout = Literal["openpi", "lerobot"]
CONFIG = "config.json"
ARCHITECTURE, OWN_SIZES = "architecture", "sizes"
"""Object of config.json that has sizes where they are not the published ones, and its name in this project's own
checkpoints, whose architecture is that of a policy."""
VARIANTS = {
    "gemma_2b": StackSizes(2048, 18, 16384, 8, 1, 256),
    "gemma_300m": StackSizes(1024, 18, 4096, 8, 1, 256),
}
"""openpi's names (openpi/models/gemma.py)."""
LARGEST, MOST_LAYERS = 2**20, 512
"""Of sizes: config.json is somebody's text."""


@dataclass(frozen=True)
class VisionSizes:
    """SigLIP's; the defaults are So400m/14 at 224 pixels."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    image_size: int = 224
    patch_size: int = 14


@dataclass(frozen=True)
class Pi0Sizes:
    """Of a whole network."""

    vlm: StackSizes
    expert: StackSizes
    vision: VisionSizes
    vocab_size: int
    action_dim: int
    """Numbers of an action and of a state, with the zeros that fill them up."""
    horizon: int
    """Actions that are predicted."""
    prompt_len: int
    """Tokens of a prompt, with those that fill it up."""
    adaptive: bool
    """pi0.5: time enters by adaptive norms, and there is no state token."""

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return (self.vision.image_size // self.vision.patch_size) ** 2


def read_sizes(folder: Path, adaptive: bool) -> tuple[Pi0Sizes, Layout]:
    """Sizes, and whose layout the folder has. `adaptive` is known from the weights: openpi's config does not say it.

    Raises `PolicyError` for a config.json that is of neither, or that contradicts the weights.
    """
    raw = read_json(folder / CONFIG)
    kind = raw.get("type")
    if kind is None and "action_horizon" in raw:
        layout: Layout = "openpi"
        action_dim, horizon = raw.get("action_dim"), raw.get("action_horizon")
    elif kind in ("pi0", "pi05"):
        layout = "lerobot"
        action_dim, horizon = raw.get("max_action_dim"), raw.get("chunk_size")
        if adaptive != (kind == "pi05"):
            has = "has" if adaptive else "has no"
            raise PolicyError(f"{folder / CONFIG} says {kind}, and the checkpoint {has} time_mlp_in, as pi05 has")
    else:
        raise PolicyError(f"{folder / CONFIG} is of no pi0: neither openpi's (action_horizon) nor LeRobot's (type pi0)")
    own = own_sizes(raw) or {}
    if not isinstance(own, dict):
        raise PolicyError(f"{folder / CONFIG}: {ARCHITECTURE} is {shown(own)}, and is an object with sizes")
    prompt_len = own.get("max_token_len") or raw.get("tokenizer_max_length") or (200 if adaptive else 48)
    vocab_size = own.get("vocab_size", 257_152)
    said: dict[str, Any] = {
        "action dimensions": action_dim,
        "horizon": horizon,
        "prompt": prompt_len,
        "vocabulary": vocab_size,
    }
    if not all(_is_size(value) for value in said.values()):
        raise PolicyError(f"{folder / CONFIG}: one of these is no size of 1 to {LARGEST}: {shown(said, 200)}")
    dims, predicted, words, rows = said.values()
    return Pi0Sizes(
        _stack(folder, raw, own, "vlm", "paligemma_variant"),
        _stack(folder, raw, own, "expert", "action_expert_variant"),
        VisionSizes(**_known(folder, own.get("vision", {}), VisionSizes)),
        rows,
        dims,
        predicted,
        words,
        adaptive,
    ), layout


def with_horizon(raw: Mapping[str, Any], horizon: int) -> dict[str, Any]:
    """The config.json of the same network that predicts so many actions: no weight depends on their number."""
    if "action_horizon" in raw:
        return {**raw, "action_horizon": horizon}
    executed = min(raw.get("n_action_steps", horizon), horizon)  # LeRobot refuses to execute more than it predicts
    return {**raw, "chunk_size": horizon, "n_action_steps": executed}


def own_sizes(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Sizes that are not the published ones; None where there are none. In this project's checkpoints, which say their
    policy's kind, `architecture` is something else."""
    return raw.get(OWN_SIZES if "kind" in raw else ARCHITECTURE)


def _stack(folder: Path, raw: Mapping[str, Any], own: Mapping[str, Any], name: str, variant: str) -> StackSizes:
    if name in own:
        return StackSizes(**_known(folder, own[name], StackSizes))
    if raw.get(variant) not in (*VARIANTS,):
        raise PolicyError(
            f"{folder / CONFIG}: {variant} is {shown(raw.get(variant))}; known are {', '.join(VARIANTS)}, others need "
            f"their sizes in {ARCHITECTURE}.{name}"
        )
    return VARIANTS[raw[variant]]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= LARGEST


def _known(folder: Path, found: Any, cls: type) -> dict[str, int]:
    """Sizes by the names of the class's fields. Raises `PolicyError` for others, and where one without a default is
    missing."""
    if not isinstance(found, dict):
        raise PolicyError(f"{folder / CONFIG}: {ARCHITECTURE} has {shown(found)} in place of sizes")
    names = {f.name: f.default is MISSING for f in fields(cls)}
    wrong = sorted(set(found) - set(names))
    missing = sorted(name for name, needed in names.items() if needed and name not in found)
    if wrong or missing or not all(_is_size(value) for value in found.values()):
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise PolicyError(
            f"{folder / CONFIG}: {ARCHITECTURE} has {shown(wrong or found, 300)}{lacks}; sizes of 1 to {LARGEST} are "
            f"{sorted(names)}"
        )
    if max(found.get("depth", 1), found.get("num_hidden_layers", 1)) > MOST_LAYERS:
        raise PolicyError(f"{folder / CONFIG}: {ARCHITECTURE} has {found}; at most {MOST_LAYERS} layers can be")
    return found
