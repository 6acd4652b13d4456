"""The kinds `openvla` and `openvla_oft`: their options and files, and their policies on disk in OpenVLA's layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from policies import lora
from policies.errors import PolicyError
from policies.files import ADAPTER, ADAPTER_CONFIG, CONFIG, Shards, check_tensors, read_json, read_state
from policies.kinds import check_folders
from policies.openvla import adapters
from policies.openvla.film import film_state, read_film
from policies.openvla.heads import write_side_file
from policies.openvla.model import save_model, to_checkpoint
from policies.openvla.normalisation import DEMONSTRATIONS, read_datasets, with_adapters, write_statistics
from policies.openvla.normalisation import read_state as read_statistics
from policies.openvla.oft import OpenVLAOFT
from policies.openvla.options import OFTOptions, TokenOptions
from policies.openvla.policy import OpenVLA, TokenPolicy
from policies.openvla.side_files import ACTION_HEAD, FILM, PROPRIO, choose_side_files, find_side_files, step_of
from policies.policy_kind import RECOMPUTED, LoadedBy, PolicyFormat, PolicyKind
from policies.random_weights import RANDOM_WEIGHTS
from policies.transforms import Transforms

P = TypeVar("P", bound=TokenPolicy)
TRANSFORMERS_CODE = "auto_map"
"""Entry of config.json: the classes of a network that is no part of transformers, and where their code lies."""
LINES = """
from transformers import AutoModelForVision2Seq, AutoProcessor

processor = AutoProcessor.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForVision2Seq.from_pretrained(folder, trust_remote_code=True)
""".strip()
NOTE = (
    "These lines run the Python code that auto_map in config.json names, and were not run here. That code is for "
    "transformers 4.40.1 and timm 0.9.16. Side files of OpenVLA-OFT are loaded by OpenVLA-OFT's own code."
)
ADAPTER_LINES = """
from policies.openvla.model import load_model

network = load_model(base)  # before PEFT is imported: it mends a torchvision without operators

from peft import PeftModel

model = PeftModel.from_pretrained(network, folder)
""".strip()
ADAPTER_NOTE = "For the published 7B checkpoint, whatever loads it with transformers does in place of `load_model`."


@dataclass(frozen=True)
class OpenVLAFormat(PolicyFormat, Generic[P]):
    """OpenVLA's Hugging Face directory, or a PEFT adapter of one, and the statistics of the datasets."""

    policy: type[P]

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("model_type") == "openvla"

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        Transforms(architecture.get("transforms", ()))
        checkpoint = architecture.get("checkpoint")
        if not checkpoint:
            raise PolicyError(f"{self.policy.kind} needs a checkpoint: set policy.options.checkpoint to its directory")
        check_folders(architecture)
        for name, file in (("checkpoint", CONFIG), ("adapter", ADAPTER_CONFIG)):
            folder = architecture.get(name)
            if folder and not (Path(folder) / file).is_file():
                raise PolicyError(f"policy.options.{name}: incomplete, {Path(folder) / file} is missing")
        self.policy.side_files(architecture)
        if RANDOM_WEIGHTS not in read_json(Path(checkpoint) / CONFIG):
            adapters.check_other_files(Shards.find(Path(checkpoint)), [architecture.get("adapter")])

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        return 1

    def converts(self, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        return Transforms(architecture.get("transforms", ())).conventions()

    def statistics_name(self, architecture: Mapping[str, Any]) -> str | None:
        key = str(architecture.get("unnorm_key", ""))
        if not key:
            folder, adapter = (str(architecture.get(name, "")) for name in ("checkpoint", "adapter"))
            datasets = read_datasets(Path(folder), read_json(Path(folder) / CONFIG))
            datasets = with_adapters(datasets, Path(adapter)) if adapter else datasets
            key = next(iter(datasets)) if len(datasets) == 1 else ""
        return None if key in ("", DEMONSTRATIONS) else key

    def restore_arguments(self, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}

    def write(self, policy: P, folder: Path) -> None:
        """An adapter in PEFT's layout where one is trained, else the whole Hugging Face directory; the statistics."""
        if policy.adapted:
            lora.save_adapter(policy.model, folder)
        else:
            for name in (ADAPTER_CONFIG, ADAPTER):  # of what was there before: the folder would be taken for an adapter
                (folder / name).unlink(missing_ok=True)
            save_model(policy.model, folder)
        write_statistics(folder, policy.datasets, policy.statistics)

    def read(self, policy: P, folder: Path) -> dict[str, Tensor]:
        if policy.adapted:
            tensors = lora.read_adapter(policy.model, folder)
            lora.check_scaling(policy.model, folder)
        else:
            found = Shards.find(folder).read(policy.model.checkpoint_state())
            named = {name: to_checkpoint(name) for name in policy.model.state_dict()}
            tensors = {name: found[stored] for name, stored in named.items() if stored in found}
        statistics = read_statistics(folder, policy.statistics)
        return {f"model.{name}": tensor for name, tensor in tensors.items()} | {
            f"statistics.{name}": tensor for name, tensor in statistics.items()
        }

    def export(self, policy: P, folder: Path) -> None:
        """Write a Hugging Face directory with the adapter, if there is one, merged into the weights."""
        save_model(policy.model, folder, lora.merged_state(policy.model))
        write_statistics(folder, policy.datasets, policy.statistics)

    def loaded_by(self, folder: Path) -> LoadedBy:
        if (folder / ADAPTER_CONFIG).exists():
            return LoadedBy(f"PEFT {version('peft')}", "peft", ADAPTER_LINES, ADAPTER_NOTE)
        config = read_json(folder / CONFIG)
        if TRANSFORMERS_CODE not in config:
            return LoadedBy(
                note=f"config.json names no Python code of the network ({TRANSFORMERS_CODE}), which transformers needs"
            )
        if "timm_model_kwargs" in config:
            return LoadedBy(note="timm has no vision towers of these sizes, and the published code asks it for them")
        return LoadedBy("transformers 4.40.1", "transformers", LINES, NOTE)


class OFTFormat(OpenVLAFormat[OpenVLAOFT]):
    """The same, with the files of OpenVLA-OFT's components beside the weights."""

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        return None

    def write(self, policy: OpenVLAOFT, folder: Path) -> None:
        super().write(policy, folder)
        # A frozen backbone is the base's, unless its file lies with an adapter, which may go.
        film = policy.film is not None and (not policy.adapted or policy.files[FILM].parent != policy.source)
        _write_side(policy, folder, ".safetensors", lora.plain_state(policy.model) if film else None)

    def read(self, policy: OpenVLAOFT, folder: Path) -> dict[str, Tensor]:
        tensors = super().read(policy, folder)
        found = find_side_files(folder)
        modules = _modules_with_files(policy)
        film = policy.film is not None and (not policy.adapted or FILM in found)
        for name, path in choose_side_files([folder], {**dict.fromkeys(modules, True), FILM: film}).items():
            if name == FILM:
                backbone, _ = read_film(policy.model, path)
                tensors |= {f"model.{key}": tensor for key, tensor in backbone.items()}
            else:
                state = read_state(path)
                check_tensors(path, state, modules[name].state_dict())
                tensors |= {f"{name}.{key}": tensor for key, tensor in state.items()}
        return tensors

    def export(self, policy: OpenVLAOFT, folder: Path) -> None:
        super().export(policy, folder)
        _write_side(policy, folder, ".pt", lora.merged_state(policy.model))


def _write_side(policy: OpenVLAOFT, folder: Path, suffix: str, directory: Mapping[str, Tensor] | None) -> None:
    """Write the side files that are used; the backbone's from the `directory`'s tensors, if they are given."""
    states = {name: module.state_dict() for name, module in _modules_with_files(policy).items()}
    # As data-parallel training leaves them, which the reference expects.
    states = {name: {f"module.{key}": t for key, t in state.items()} for name, state in states.items()}
    if policy.film is not None and directory is not None:
        states[FILM] = film_state(policy.model, policy.film, directory)
    for name, state in states.items():
        write_side_file(state, folder / f"{name}--{step_of(policy.files[name])}_checkpoint{suffix}")


def _modules_with_files(policy: OpenVLAOFT) -> dict[str, nn.Module]:
    """Modules of the policy that have a separate file, by its component, which is the attribute's name too."""
    every = {PROPRIO: policy.proprio_projector, ACTION_HEAD: policy.action_head}
    return {name: module for name, module in every.items() if module is not None}


INCIDENTAL = frozenset({"checkpoint", "adapter", "any_base", "image_backend", "temperature"})
OPENVLA = PolicyKind(OpenVLA, TokenOptions, OpenVLAFormat(OpenVLA), INCIDENTAL, RECOMPUTED, pretrained=True)
OPENVLA_OFT = PolicyKind(OpenVLAOFT, OFTOptions, OFTFormat(OpenVLAOFT), INCIDENTAL, RECOMPUTED, pretrained=True)
