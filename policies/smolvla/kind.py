"""The kind `smolvla`: its options and files, and its policies on disk in LeRobot's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from policies.files import ADAPTER_CONFIG, CONFIG, read_json
from policies.flow_vla.format import ADAPTER_NOTE, INCIDENTAL, FlowVLAFormat
from policies.flow_vla.options import executed, predicted
from policies.lerobot.config import autocast_notes
from policies.lerobot.loading import loaded_by_lerobot
from policies.lerobot.statistics import trained_on
from policies.policy_kind import LoadedBy, PolicyKind
from policies.smolvla.backbone import BACKBONE, PUBLISHED
from policies.smolvla.checkpoint import (
    Sources,
    find_sources,
    read_weights,
    save_description,
    save_directory,
    write_units,
)
from policies.smolvla.config import trained_parts
from policies.smolvla.options import SmolVLAOptions
from policies.smolvla.policy import SmolVLA
from policies.smolvla.sizes import is_published
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS, RobotUnits


class SmolVLAFormat(FlowVLAFormat):
    """LeRobot's layout; an adapter alone in PEFT's; the units beside either."""

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        Transforms(architecture.get("transforms", ()))
        _sources(architecture)

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        source = _sources(architecture)
        path, config = source.described / CONFIG, source.config
        found = autocast_notes(path, config)
        if config.get("load_vlm_weights") and architecture.get("dtype", "float32") == "float32":
            found.append(
                f"{path}: load_vlm_weights is true, so LeRobot computes the vision-language model and the action "
                "expert in bfloat16. Both are computed in float32 here, and actions differ by rounding; "
                "policy.options.dtype: bfloat16 is LeRobot's for the vision-language model"
            )
        adapted = source.adapter is not None or architecture.get("lora_rank")
        trained = trained_parts(config)
        if not adapted and "train" not in architecture and set(trained) != set(SmolVLAOptions.train):
            found.append(
                f"{path}: LeRobot trained {', '.join(trained)} (train_expert_only, freeze_vision_encoder), and "
                f"{', '.join(SmolVLAOptions.train)} are trained here: set policy.options.train to the parts to train"
            )
        if not adapted and config.get("train_state_proj") is False:
            found.append(
                f"{path}: train_state_proj is false, so LeRobot did not train the projection of the state; here it is "
                "one of the projections, which policy.options.train names"
            )
        return found

    def executed(self, architecture: Mapping[str, Any]) -> int | None:
        source = _sources(architecture)
        return executed(source.described, source.config)

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        return predicted(_sources(architecture).config)

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("type") == "smolvla"

    def statistics_name(self, architecture: Mapping[str, Any]) -> str | None:
        if architecture.get("asset") == DEMONSTRATIONS:
            return None
        return trained_on(Path(architecture.get("checkpoint", "")))

    def read_network(self, policy: SmolVLA, folder: Path) -> dict[str, Tensor]:
        return read_weights(folder, policy.network)

    def export(self, policy: SmolVLA, folder: Path) -> None:
        """Write a folder that LeRobot loads, adapter added, with the checkpoint's processors, or new ones of the
        demonstrations' statistics. The backbone's configuration and tokenizer are in `vlm`."""
        save_directory(policy.network, policy.source, folder, policy.description())
        _write_units(policy, folder)

    def loaded_by(self, folder: Path) -> LoadedBy:
        if (folder / ADAPTER_CONFIG).exists():
            return LoadedBy(note=ADAPTER_NOTE)
        named = read_json(folder / CONFIG).get("vlm_model_name", PUBLISHED)
        if not is_published(folder / BACKBONE):
            return LoadedBy(
                note=f"LeRobot builds the vision-language model {named}, and that of this policy (vlm/) has other sizes"
            )
        return loaded_by_lerobot("smolvla", f"LeRobot fetches the description of {named} from the hub.")

    def describe(self, policy: SmolVLA, folder: Path) -> None:
        save_description(policy.source, folder, policy.description())
        _write_units(policy, folder)

    def write_whole(self, policy: SmolVLA, folder: Path) -> None:
        self.export(policy, folder)


def _sources(architecture: Mapping[str, Any]) -> Sources:
    return find_sources(*(architecture.get(name, "") for name in ("checkpoint", "adapter", "backbone")))


def _write_units(policy: SmolVLA, folder: Path) -> None:
    """Processors of the policy's units, where the checkpoint's are none or of others."""
    if policy.source.processors is None or policy.options.asset == DEMONSTRATIONS:
        write_units(folder, RobotUnits(policy.units.state, policy.units.action), policy.sizes.prompt_len)


SMOLVLA = PolicyKind(
    SmolVLA,
    SmolVLAOptions,
    SmolVLAFormat(),
    incidental=INCIDENTAL | {"backbone"},
    pretrained=True,
    predicts_more=True,
)
