"""A causal language model of transformers: read from its directory, asked for hidden states, written again.

Any family that `AutoModelForCausalLM` builds from a config.json and that has `model`, `lm_head` and rotary positions:
Llama, Qwen2, Qwen3. B rows, T tokens, D the width, V the vocabulary.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.contract import PolicyError
from policies.files import (
    CONFIG,
    INDEX,
    SHOWN_ERROR,
    SINGLE,
    Shards,
    copy_other_files,
    read_json,
    write_json,
    write_tensors,
)
from policies.lora import AdaptedModel
from policies.random_weights import RANDOM_WEIGHTS, check_weights
from policies.torchvision_operators import import_torchvision

HEAD = "lm_head.weight"
TYPES = ("float32", "bfloat16", "float16")
ADAPTED = r".*\.(q_proj|k_proj|v_proj|o_proj|gate_proj|up_proj|down_proj)"
"""Layers that new adapters hang on: every linear one of attention and MLP."""


class CausalModel(AdaptedModel):
    """The network under the checkpoint's names, which follow `network.`."""

    def __init__(self, raw: dict[str, Any], source: Path) -> None:
        super().__init__()
        import_torchvision()
        from transformers import AutoConfig, AutoModelForCausalLM

        kind = {name: value for name, value in raw.items() if name != RANDOM_WEIGHTS}
        config: Any = AutoConfig.for_model(kind.pop("model_type"), **kind)
        # SDPA takes the mask that it is given; other implementations would need it in other forms.
        self.network: Any = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
        self.raw, self.source = raw, source
        self.known = self.vocabulary
        """V': ids that a tokenizer knows, which alone are ever said: an embedding may have rows to spare."""
        self.shards: Shards | None = None
        """Source of the tensors; None where they were drawn."""

    @property
    def width(self) -> int:
        return self.network.config.hidden_size

    @property
    def vocabulary(self) -> int:
        """V: rows of the embedding, of which a tokenizer may use fewer."""
        return self.network.config.vocab_size

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return self.network.config.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        return self.network.model.embed_tokens.weight.dtype

    def states(self, tokens: Tensor, valid: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """[B, T, D]: the last layer's states after the final norm.

        `tokens` int64 [B, T], `valid` bool [B, T, K] the keys that each token sees, `positions` int64 [B, T]. The K
        keys are the tokens' own, or with a `cache` those that it holds.
        """
        found = self.network.model(
            input_ids=tokens,
            attention_mask=valid[:, None],
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return found.last_hidden_state

    def logits(self, states: Tensor) -> Tensor:
        """[.., V'], float32 or wider: the logits of the next token, among those that the tokenizer knows."""
        found = self.network.lm_head(states)[..., : self.known]
        return found.to(torch.promote_types(found.dtype, torch.float32))

    # --- files

    @property
    def tied(self) -> bool:
        """True if the head is the embedding, whose tensor is then the only one in a file."""
        return bool(self.network.config.tie_word_embeddings)

    @property
    def digested(self) -> tuple[str, ...]:
        layers = self.network.config.num_hidden_layers
        return (
            "model.norm.weight",
            "model.layers.0.self_attn.q_proj.weight",
            f"model.layers.{layers - 1}.mlp.down_proj.weight",
        )

    @property
    def base_folder(self) -> Path | None:
        return None if self.shards is None else self.shards.folder

    def checkpoint_name(self, name: str) -> str:
        return name.removeprefix("network.")

    def checkpoint_state(self) -> dict[str, Tensor]:
        state = {self.checkpoint_name(name): tensor for name, tensor in self.state_dict().items()}
        if self.tied:
            state.pop(HEAD, None)
        return state


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a language model's directory. Raises `PolicyError`."""
    raw = read_json(folder / CONFIG)
    if not isinstance(raw.get("model_type"), str):
        raise PolicyError(f"{folder / CONFIG} names no model_type: it is no language model of transformers")
    return raw


def load_model(folder: Path, dtype: str = "float32") -> CausalModel:
    """The network of a directory, on the CPU. Raises `PolicyError`.

    `dtype` is float32, bfloat16 or checkpoint (as stored). No remote code is run and no pickle read. A directory
    without weights whose config.json has a seed (`random_weights`) gives a new network, as transformers initialises it.
    """
    if dtype not in (*TYPES, "checkpoint"):
        raise PolicyError(f"dtype is {', '.join(TYPES)} or checkpoint, got {dtype!r}")
    raw = read_config(folder)
    seed = raw.get(RANDOM_WEIGHTS)
    drawn = seed is not None and not any((folder / name).exists() for name in (INDEX, SINGLE))
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu" if drawn else "meta"):
            if drawn:
                torch.default_generator.manual_seed(int(seed))
            model = CausalModel(raw, folder)
    except Exception as error:  # transformers raises anything for what it has not thought of
        what = str(error)[:SHOWN_ERROR] or type(error).__name__
        raise PolicyError(f"{folder / CONFIG} does not describe a language model that can be built: {what}") from error
    check_weights(folder / CONFIG, model)
    if not drawn:
        model.shards = shards = Shards.find(folder)
        expected = model.checkpoint_state()
        if model.tied and HEAD in shards.files:  # some programs write it nevertheless
            expected[HEAD] = model.network.lm_head.weight
        # Copied: a matrix product may round by where in a mapped file its operands begin.
        tensors = {f"network.{name}": tensor.clone() for name, tensor in shards.read(expected).items()}
        model.load_state_dict(tensors, assign=True, strict=False)
        model.network.tie_weights()
        _fill_rotary(model)
    return (model if dtype == "checkpoint" else model.to(getattr(torch, dtype))).eval()


def save_model(model: CausalModel, folder: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a directory as transformers loads it, with the tokenizer and whatever else lay in the source's.

    `tensors` replaces the model's own (a merged adapter).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = model.checkpoint_state() if tensors is None else tensors
    if model.shards is None:
        write_tensors(folder / SINGLE, {name: t.detach().cpu().contiguous() for name, t in tensors.items()})
    else:
        model.shards.write(folder, tensors)
    if model.source.is_dir() and model.source.resolve() != folder.resolve():
        copy_other_files(model.source, folder)
    raw = {name: value for name, value in model.raw.items() if name != RANDOM_WEIGHTS}
    write_json(folder / CONFIG, raw | {"torch_dtype": str(model.dtype).removeprefix("torch.")})


def _fill_rotary(model: CausalModel) -> None:
    """The rotary embedding's frequencies are in no file: they are computed where it is built."""
    rotary = model.network.model.rotary_emb
    model.network.model.rotary_emb = type(rotary)(config=model.network.config)
