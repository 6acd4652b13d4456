"""The kind `language`: its options and files, and its policies on disk as transformers and PEFT write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from embodied_language.lengths import check_prompts
from embodied_language.model import save_model
from embodied_language.policy import EngineWrittenPolicy, LanguageOptions, LanguagePolicy, check_files
from policies import lora
from policies.contract import Policy
from policies.files import ADAPTER_CONFIG, Shards
from policies.policy_kind import RECOMPUTED, LoadedBy, PolicyFormat, PolicyKind

LINES = """
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
""".strip()
ADAPTER_LINES = """
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(base)
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder)
""".strip()


class LanguageFormat(PolicyFormat):
    """A directory of a causal language model, or a PEFT adapter of one."""

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        check_files(architecture)

    def check_instructions(
        self, architecture: Mapping[str, Any], instructions: Sequence[str], actions: int, source: str
    ) -> None:
        check_prompts(architecture, instructions, actions, source)

    def slots(self, architecture: Mapping[str, Any]) -> int:
        return int(architecture.get("rows", LanguageOptions.rows))

    def reads(self, config: Mapping[str, Any]) -> bool:
        names = config.get("architectures")
        return isinstance(names, list) and any(str(name).endswith("ForCausalLM") for name in names)

    def write(self, policy: LanguagePolicy, folder: Path) -> None:
        """A PEFT directory where an adapter is trained, else the whole model, with its tokenizer."""
        if policy.adapted:
            lora.save_adapter(policy.model, folder)
        else:
            (folder / ADAPTER_CONFIG).unlink(missing_ok=True)  # the folder would be taken for an adapter
            save_model(policy.model, folder)

    def read(self, policy: LanguagePolicy, folder: Path) -> dict[str, Tensor]:
        if policy.adapted:
            tensors = lora.read_adapter(policy.model, folder)
            lora.check_scaling(policy.model, folder)
            return {f"model.{name}": tensor for name, tensor in tensors.items()}
        found = Shards.find(folder).read(policy.model.checkpoint_state())
        return {f"model.network.{name}": tensor for name, tensor in found.items()}

    def restore_arguments(self, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}

    def export(self, policy: LanguagePolicy, folder: Path) -> None:
        """Write a directory as transformers loads it, with the adapter, if there is one, merged into the weights."""
        save_model(policy.model, folder, lora.merged_state(policy.model))

    def loaded_by(self, folder: Path) -> LoadedBy:
        if (folder / ADAPTER_CONFIG).exists():
            return LoadedBy(f"PEFT {version('peft')}", "peft", ADAPTER_LINES)
        return LoadedBy(f"transformers {version('transformers')}", "transformers", LINES)


@dataclass(frozen=True)
class LanguageKind(PolicyKind):
    def policy_for(self, architecture: Mapping[str, Any]) -> type[Policy]:
        return EngineWrittenPolicy if architecture.get("engine") else self.policy


LANGUAGE = LanguageKind(
    LanguagePolicy,
    LanguageOptions,
    LanguageFormat(),
    incidental=frozenset(
        {
            "checkpoint",
            "adapter",
            "temperature",
            "top_p",
            "rows",
            "engine",
            "engine_timeout_s",
            "value_per_action",  # the head is the same
            "spec.chunk",
            "spec.horizon",
        }
    ),
    former=RECOMPUTED,
    pretrained=True,
    chooses=True,
    blank_instruction="",  # as of an environment that rests: it is answered by one token
)
