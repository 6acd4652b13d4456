"""Contents of a checkpoint directory: kind, sizes, statistics, processor steps, files beside the weights.

Directories of OpenVLA, OpenVLA-OFT, pi0 and pi0.5 (openpi's layout and LeRobot's), SmolVLA, PEFT's adapters, and this
project's own. Only headers of tensors and small files are read; nothing is built.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import ADAPTER, ADAPTER_CONFIG, CONFIG, INDEX, SINGLE, layouts, read_json, read_tensors, shown
from policies.openvla.normalisation import STATISTICS, read_datasets
from policies.registry import check, kinds_that_read, policy_kind

PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
OPENPI_STATISTICS = "norm_stats.json"
USED = (
    CONFIG, INDEX, SINGLE, ADAPTER, ADAPTER_CONFIG, STATISTICS, OPENPI_STATISTICS, *PROCESSORS, "model-*.safetensors",
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "preprocessor_config.json", "processor_config.json",
    "generation_config.json", "policy_*processor_step_*.safetensors", "README.md", ".git*", "train_config.json",
)  # fmt: skip
"""Files that belong to a layout; others are named."""
NOISE = 1e-5
"""Width over the largest value, below which a dimension is nearly constant."""
MOST_SHOWN = 24


@dataclass(frozen=True)
class Range:
    """The statistics of one vector of one dataset: for each dimension what normalises it."""

    dataset: str
    vector: str
    """`action`, `proprio` or `state`."""
    low: tuple[float, ...]
    high: tuple[float, ...]
    ends: str
    """Meaning of low and high: `q01 to q99`, `min to max` or `mean - std to mean + std`."""

    @property
    def narrow(self) -> tuple[int, ...]:
        """Dimensions so narrow that a normalised value explodes."""
        pairs = enumerate(zip(self.low, self.high, strict=True))
        return tuple(i for i, (low, high) in pairs if high - low <= NOISE * max(abs(low), abs(high), 1e-12))


@dataclass(frozen=True)
class Checkpoint:
    """Findings in a directory."""

    folder: str
    kind: str
    """The policy in words, and whose layout it is."""
    sizes: Mapping[str, Any]
    """Entries of the configuration that say sizes: pictures, actions, states, prompt."""
    tensors: int
    parameters: int
    dtypes: Mapping[str, int]
    """Number of tensors of each type."""
    statistics: tuple[Range, ...]
    steps: tuple[str, ...]
    """Processor steps, in order."""
    adapter: Mapping[str, Any]
    """Base, rank and modules of a PEFT adapter; empty for other directories."""
    beside: tuple[str, ...]
    """Files that no part of the layout is: trained parts, code, others."""
    loads_as: tuple[str, ...]
    """Kinds of policy (`policy.kind`) that take the directory without a further option."""
    warnings: tuple[str, ...]


def looks_like_checkpoint(folder: Path) -> bool:
    """True if the directory has the files of a policy."""
    names = (CONFIG, ADAPTER_CONFIG, "policy/" + CONFIG, "policy/" + ADAPTER_CONFIG)
    return any((folder / name).is_file() for name in names)


def inspect_checkpoint(folder: Path) -> Checkpoint:
    """Contents of the directory. Raises `PolicyError` if it is not a policy's, or a file is damaged."""
    if not looks_like_checkpoint(folder):
        raise PolicyError(
            f"{folder} is no checkpoint that is known here: neither {CONFIG} nor {ADAPTER_CONFIG} is in it or in its "
            "policy/"
        )
    actor = folder / "policy" if (folder / "policy").is_dir() else folder
    raw = read_json(actor / CONFIG) if (actor / CONFIG).exists() else {}
    adapter = _adapter(actor)
    found = Counter[str]()
    parameters = 0
    for path in sorted(actor.glob("*.safetensors")):
        if any(fnmatch.fnmatch(path.name, pattern) for pattern in (SINGLE, ADAPTER, "model-*.safetensors")):
            for said in layouts(path).values():
                dtype, _, shape = said.partition(" ")
                found[dtype] += 1
                parameters += math.prod(int(n) for n in shape.strip("[]").split(",") if n.strip())
    statistics = tuple(_statistics(actor, raw))
    beside = tuple(sorted(_beside(actor)))
    warnings = [
        f"{r.dataset}: {r.vector} is nearly constant in dimensions {', '.join(map(str, r.narrow))} ({r.ends}): a "
        "normalised value explodes there"
        for r in statistics
        if r.narrow
    ]
    loads_as, assumed = _loaded(actor, raw)
    warnings += assumed
    if not found:
        warnings.append("there are no weights in safetensors here")
    if adapter and not (actor / CONFIG).exists() and not adapter["base"]:
        warnings.append(f"{ADAPTER_CONFIG} names no base: nothing tells which weights it belongs to")
    return Checkpoint(
        str(folder), _kind(raw, adapter), _sizes(raw), sum(found.values()), parameters, dict(found), statistics,
        tuple(_steps(actor)), adapter, beside, loads_as, tuple(warnings),
    )  # fmt: skip


def _loaded(folder: Path, raw: Mapping[str, Any]) -> tuple[tuple[str, ...], list[str]]:
    """Kinds of policy that take a directory of others, and sentences: what they assume, and why the other kinds of its
    layout refuse it."""
    kinds, said = list[str](), list[str]()
    if "kind" in raw:  # this project's own says its kind itself
        return (shown(raw["kind"])[1:-1],), []
    for kind in kinds_that_read(raw):
        try:
            check(kind, {"checkpoint": str(folder)})
            said += policy_kind(kind).format.assumed({"checkpoint": str(folder)})
            kinds.append(kind)
        except PolicyError as error:
            said.append(f"policy.kind {kind} refuses it: {error}")
    return tuple(kinds), said


def _kind(raw: Mapping[str, Any], adapter: Mapping[str, Any]) -> str:
    if raw.get("kind"):
        kind = f"{shown(raw['kind'])[1:-1]}, a checkpoint of this project"
    elif raw.get("type"):
        kind = f"{shown(raw['type'])[1:-1]}, LeRobot's layout"
    elif "action_horizon" in raw:
        kind = "pi0 or pi0.5 (the weights say which), openpi's layout"
    elif raw.get("model_type"):
        kind = f"{shown(raw['model_type'])[1:-1]}, Hugging Face's layout"
    else:
        kind = "unknown" if raw else "an adapter without a configuration of its base"
    return f"an adapter of PEFT's on {kind}" if adapter else kind


SIZES = (
    "action_dim", "max_action_dim", "max_state_dim", "n_obs_steps", "action_horizon", "chunk_size", "horizon",
    "n_action_steps", "image_sizes", "image_resolution", "image_size", "tokenizer_max_length", "n_action_bins",
    "llm_max_length", "paligemma_variant", "action_expert_variant", "arch_specifier", "vision_backbone_id",
    "llm_backbone_id", "torch_dtype", "dtype", "precision", "use_relative_actions", "normalization_mapping",
    "input_features", "output_features", "spec",
)  # fmt: skip


def _sizes(raw: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: raw[name] for name in SIZES if name in raw}
    for name in ("input_features", "output_features"):
        if isinstance(found.get(name), dict):
            found[name] = {k: v.get("shape") if isinstance(v, dict) else v for k, v in found[name].items()}
    return found


def _adapter(folder: Path) -> dict[str, Any]:
    if not (folder / ADAPTER_CONFIG).exists():
        return {}
    raw = read_json(folder / ADAPTER_CONFIG)
    modules = raw.get("target_modules")
    return {
        "base": raw.get("base_model_name_or_path"),
        "rank": raw.get("r"),
        "alpha": raw.get("lora_alpha"),
        "modules": sorted(map(str, modules)) if isinstance(modules, list) else modules,
        "modules_to_save": raw.get("modules_to_save"),
    }


def _steps(folder: Path) -> Iterator[str]:
    for name in PROCESSORS:
        if not (folder / name).exists():
            continue
        steps = read_json(folder / name).get("steps")
        for step in steps if isinstance(steps, list) else ():
            said = step if isinstance(step, dict) else {}
            config = said.get("config")
            settings = {
                k: v for k, v in (config if isinstance(config, dict) else {}).items() if k not in ("features", "eps")
            }
            title = said.get("registry_name") or said.get("class") or "?"
            yield f"{name.removesuffix('.json')}: {title}" + (f" {shown(settings, 200)}" if settings else "")


def _statistics(folder: Path, raw: Mapping[str, Any]) -> Iterator[Range]:
    for name, entry in read_datasets(folder, raw).items():
        yield from _ranges(name, entry)
    for path in sorted(folder.rglob(OPENPI_STATISTICS)):
        entry = read_json(path).get("norm_stats")
        yield from _ranges(str(path.parent.relative_to(folder)), entry)
    for path in sorted(folder.glob("policy_preprocessor_step_*.safetensors")):
        entry = {}
        for key, tensor in read_tensors(path).items():
            vector, _, statistic = key.rpartition(".")
            entry.setdefault(vector, {})[statistic] = tensor.flatten().tolist()
        yield from _ranges(
            "normalizer_processor", {key.removeprefix("observation."): value for key, value in entry.items()}
        )


def _ranges(dataset: str, entry: Any) -> Iterator[Range]:
    for vector in ("action", "actions", "proprio", "state"):
        found = entry.get(vector) if isinstance(entry, dict) else None
        if not isinstance(found, dict):
            continue
        for low, high in (("q01", "q99"), ("min", "max")):
            ends = [found.get(low), found.get(high)]
            if all(_is_vector(end) for end in ends) and len(ends[0]) == len(ends[1]):  # type: ignore[arg-type]
                yield Range(dataset, vector, tuple(map(float, ends[0])), tuple(map(float, ends[1])), f"{low} to {high}")  # type: ignore[arg-type]
                break
        else:
            mean, std = found.get("mean"), found.get("std")
            if _is_vector(mean) and _is_vector(std) and len(mean) == len(std):  # type: ignore[arg-type]
                pairs = list(zip(mean, std, strict=True))  # type: ignore[arg-type]
                yield Range(
                    dataset, vector, tuple(m - s for m, s in pairs), tuple(m + s for m, s in pairs),
                    "mean - std to mean + std",
                )  # fmt: skip


def _is_vector(value: Any) -> bool:
    return (
        isinstance(value, list)
        and 0 < len(value) <= 2**12
        and all(type(v) in (int, float) and abs(v) < 1e300 for v in value)
    )


def _beside(folder: Path) -> Iterator[str]:
    for path in folder.iterdir():
        if path.is_file() and not any(fnmatch.fnmatch(path.name, pattern) for pattern in USED):
            yield path.name
