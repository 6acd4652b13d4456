"""A causal language model of transformers: read from its directory, asked for hidden states, written again.

Layers, head and buffers are computed by the family's own classes; rows, masks and the cache of keys and values are this
project's. `embodied_language.comparison` compares both once for each model that is loaded. B rows, T tokens, K keys, D
the width, V the vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied_language.comparison import ADVICE, check_alike
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
from policies.quantised import dequantised_state, weight_dtype
from policies.random_weights import RANDOM_WEIGHTS, check_weights, drawn_on
from policies.torchvision_operators import import_torchvision

TYPES = ("float32", "bfloat16", "float16")
FULL, SLIDING = "full_attention", "sliding_attention"
"""transformers' names of layers that see every earlier token, and of those that see the last `sliding_window`."""


class _Given(nn.Module):
    """Stands where the decoder is, and returns the states that it is given."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        return BaseModelOutputWithPast(last_hidden_state=inputs_embeds)  # type: ignore[arg-type]


class CausalModel(AdaptedModel):
    """The network under the checkpoint's names, which follow `network.`."""

    def __init__(self, raw: dict[str, Any], source: Path) -> None:
        """Raises `PolicyError` for layers that attend in a way of their own, and for a model that reads more than
        text."""
        super().__init__()
        import_torchvision()
        from transformers import AutoConfig, AutoModelForCausalLM

        kind = {name: value for name, value in raw.items() if name != RANDOM_WEIGHTS}
        config: Any = AutoConfig.for_model(kind.pop("model_type"), **kind)
        # The family's own choice of SDPA or eager attention: SDPA lacks what some need, such as capped scores.
        self.network: Any = AutoModelForCausalLM.from_config(config, attn_implementation=None)
        self._check_parts()
        self.raw, self.source = raw, source
        self.known = self.vocabulary
        """V': ids that a tokenizer knows, which alone are ever said: an embedding may have rows to spare."""
        self.shards: Shards | None = None
        """Source of the tensors; None where they were drawn."""
        self._digested = self._first_last_and_norm()

    @property
    def decoder(self) -> Any:
        """The network without its head."""
        return self.network.base_model

    @property
    def layers(self) -> nn.ModuleList:
        return next(module for module in self.decoder.children() if isinstance(module, nn.ModuleList))

    def _check_parts(self) -> None:
        """Raise `PolicyError` for a network without the parts that are used."""
        config = self.network.config
        if config.get_text_config() is not config or self.decoder is self.network:
            raise PolicyError(
                "its language model is a part of it: save that part alone, as a causal language model of transformers"
            )
        if not any(isinstance(module, nn.ModuleList) for module in self.decoder.children()):
            raise PolicyError(f"{type(self.decoder).__name__} has no list of layers. {ADVICE}")
        if config._attn_implementation not in ("sdpa", "eager"):
            raise PolicyError(f"its attention is {config._attn_implementation}, and supported are sdpa and eager")
        self.windows()

    @property
    def width(self) -> int:
        return self.network.config.hidden_size

    @property
    def vocabulary(self) -> int:
        """V: rows of the embedding, of which a tokenizer may use fewer."""
        return self.network.config.vocab_size

    @property
    def context(self) -> int:
        """Tokens of the longest sequence. Where longer sequences have other rotary frequencies (longrope), those of the
        short ones alone: keys in the cache would be of other frequencies than the learner's."""
        config = self.network.config
        rotary = getattr(config, "rope_parameters", None) or {}
        if rotary.get("rope_type") == "longrope":
            return min(config.max_position_embeddings, rotary["original_max_position_embeddings"])
        return config.max_position_embeddings

    @property
    def dtype(self) -> torch.dtype:
        return weight_dtype(self.network.get_input_embeddings())

    def windows(self) -> dict[str, int | None]:
        """Last tokens that layers see, by the type of the layers; None: all. One entry where all layers are alike.

        A window of at least the context's length is none. Raises `PolicyError` for a type of another kind."""
        config = self.network.config
        sliding = getattr(config, "sliding_window", None)
        if sliding is not None and sliding >= self.context:
            sliding = None
        types = dict.fromkeys(getattr(config, "layer_types", None) or [FULL if sliding is None else SLIDING])
        if strange := [name for name in types if name not in (FULL, SLIDING)]:
            raise PolicyError(f"it has layers of the type {strange[0]}, and supported are {FULL} and {SLIDING}")
        found = {name: sliding if name == SLIDING else None for name in types}
        return found if len(set(found.values())) > 1 else {FULL: next(iter(found.values()))}

    def states(self, tokens: Tensor, valid: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """[B, T, D]: the last layer's states after the final norm.

        `tokens` int64 [B, T], `valid` bool [B, T, K] the keys that each token may see, `positions` int64 [B, T]. The K
        keys are the tokens' own, or with a `cache` those that it holds, whose positions are their columns.
        """
        keys = positions if cache is None else torch.arange(valid.shape[-1], device=valid.device)[None]
        masks = {
            name: self._mask(valid if window is None else valid & (positions[:, :, None] - keys[:, None] < window))
            for name, window in self.windows().items()
        }
        found = self.decoder(
            input_ids=tokens,
            # Families whose layers differ take a mask for each type of layers, the others one.
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            position_ids=positions,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return found.last_hidden_state

    def _mask(self, seen: Tensor) -> Tensor:
        """[B, 1, T, K]: the mask that attention takes: SDPA bool, eager attention a summand."""
        if self.network.config._attn_implementation == "sdpa":
            return seen[:, None]
        hidden = torch.finfo(self.dtype).min
        return torch.zeros(seen.shape, dtype=self.dtype, device=seen.device).masked_fill(~seen, hidden)[:, None]

    def logits(self, states: Tensor) -> Tensor:
        """[.., V'], float32 or wider: the logits of the next token, among those that the tokenizer knows.

        The class's own forward computes them, with the states in place of its decoder: some scale or cap them."""
        head = copy.copy(self.network)  # which shares its modules
        head._modules = {**self.network._modules, self.network.base_model_prefix: _Given()}
        found = head.forward(inputs_embeds=states.reshape(1, -1, states.shape[-1])).logits
        found = found.view(*states.shape[:-1], -1)[..., : self.known]
        return found.to(torch.promote_types(found.dtype, torch.float32))

    # --- files

    @property
    def tied(self) -> Mapping[str, str]:
        """Tensors that are others under a second name, such as a head that is the embedding, and the others' names:
        those alone are in a file."""
        return self.network.all_tied_weights_keys

    @property
    def digested(self) -> tuple[str, ...]:
        return self._digested

    def _first_last_and_norm(self) -> tuple[str, ...]:
        """The first matrix of the layers, the last one, and the last tensor after them, which is the final norm's."""
        names = {id(tensor): name for name, tensor in self.network.named_parameters()}
        of_layers = {id(tensor) for tensor in self.layers.parameters()}
        matrices = [names[id(tensor)] for tensor in self.layers.parameters() if tensor.dim() > 1]
        after = [names[id(tensor)] for tensor in self.decoder.parameters() if id(tensor) not in of_layers]
        return (after[-1], matrices[0], matrices[-1])

    @property
    def linear_layers(self) -> str:
        """Pattern of the linear layers of attention and MLP, all of which new adapters hang on."""
        found = {name.rpartition(".")[2]: None for name, m in self.layers.named_modules() if isinstance(m, nn.Linear)}
        return rf".*\.({'|'.join(found)})"

    @property
    def base_folder(self) -> Path | None:
        return None if self.shards is None else self.shards.folder

    def checkpoint_name(self, name: str) -> str:
        return name.removeprefix("network.")

    def checkpoint_state(self) -> dict[str, Tensor]:
        state = {self.checkpoint_name(name): tensor for name, tensor in dequantised_state(self).items()}
        return {name: tensor for name, tensor in state.items() if name not in self.tied}


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a language model's directory. Raises `PolicyError`."""
    raw = read_json(folder / CONFIG)
    if not isinstance(raw.get("model_type"), str):
        raise PolicyError(f"{folder / CONFIG} names no model_type: it is no language model of transformers")
    return raw


def load_model(folder: Path, dtype: str = "float32") -> CausalModel:
    """The network of a directory, on the CPU. Raises `PolicyError`, also where it is computed differently from
    transformers' own class.

    `dtype` is float32, bfloat16 or checkpoint (as stored). No remote code is run and no pickle read. A directory
    without weights whose config.json has a seed (`random_weights`) gives a new network, as transformers initialises it.
    """
    if dtype not in (*TYPES, "checkpoint"):
        raise PolicyError(f"dtype is {', '.join(TYPES)} or checkpoint, got {dtype!r}")
    raw = read_config(folder)
    seed = raw.get(RANDOM_WEIGHTS)
    drawn = seed is not None and not any((folder / name).exists() for name in (INDEX, SINGLE))
    try:
        with torch.random.fork_rng(devices=[]), drawn_on() if drawn else torch.device("meta"):
            if drawn:
                torch.default_generator.manual_seed(int(seed))
            model = CausalModel(raw, folder)
    except Exception as error:  # transformers raises anything for what it has not thought of
        what = str(error)[:SHOWN_ERROR] or type(error).__name__
        raise PolicyError(f"{folder / CONFIG} does not describe a language model that can be built: {what}") from error
    check_weights(folder / CONFIG, model)
    if not drawn:
        _read_weights(model, folder)
    # Buffers keep their precision: rounded frequencies would be of other positions.
    for parameter in model.parameters() if dtype != "checkpoint" else ():
        parameter.data = parameter.data.to(getattr(torch, dtype))
    model.eval()
    if not next(model.parameters()).is_meta:
        check_alike(model)
    return model


def _read_weights(model: CausalModel, folder: Path) -> None:
    """Fill the network with the directory's tensors, and with buffers that are in no file. Raises `PolicyError`."""
    model.shards = shards = Shards.find(folder)
    expected, state = model.checkpoint_state(), model.network.state_dict()
    twice = {name: first for name, first in model.tied.items() if name in shards.files}  # as some programs write it
    try:
        tensors = shards.read(expected | {name: state[name] for name in twice})
    except PolicyError as error:
        other_names = set(shards.files) != expected.keys() | twice.keys()
        hint = _of_joined(model.network) or (_of_other_names(model.network) if other_names else "")
        raise PolicyError(f"{error}{hint}") from error
    for name, first in twice.items():
        if not torch.equal(tensors[name], tensors[first]):
            raise PolicyError(
                f"{folder / CONFIG} has tie_word_embeddings, and {name} in {folder / shards.files[name]} is not "
                f"{first}: set tie_word_embeddings to false, or leave the tensor out of the file"
            )
    # Copied: a matrix product may round by where in a mapped file its operands begin.
    model.load_state_dict({f"network.{name}": t.clone() for name, t in tensors.items()}, assign=True, strict=False)
    model.network.tie_weights()
    _fill_buffers(model.network)
    left = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if left:
        raise PolicyError(f"{folder} holds no {left[0].removeprefix('network.')}, and transformers does not compute it")


def _of_joined(network: Any) -> str:
    """The end of a message about tensors that are not a family's, if transformers joins them as it reads them."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    if not any(isinstance(each, WeightConverter) for each in get_model_conversion_mapping(network)):
        return ""
    return (
        f". {type(network).__name__} computes with other tensors than its files hold, as mixtures of experts do: these "
        "are not supported; choose a dense model"
    )


def _of_other_names(network: Any) -> str:
    """The end of a message about tensors that are missing or not expected."""
    return (
        f". If the files are whole, {type(network).__name__} is of a family whose files name tensors otherwise than it "
        f"does, which is not supported. {ADVICE}"
    )


def _fill_buffers(network: Any) -> None:
    """Compute the buffers that are in no file (rotary frequencies, the embedding's scale) as transformers does where it
    loads a model, in float32."""
    for parameter in network.parameters():
        parameter._is_hf_initialized = True  # else it would be drawn anew
    for name, buffer in network.named_non_persistent_buffers():
        module, _, own = name.rpartition(".")
        precision = torch.float32 if buffer.is_floating_point() else buffer.dtype
        network.get_submodule(module).register_buffer(
            own, torch.empty_like(buffer, device="cpu", dtype=precision), persistent=False
        )
    network.initialize_weights()


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
    precision = "dtype" if "dtype" in raw else "torch_dtype"  # transformers' newer name, which goes before
    write_json(folder / CONFIG, raw | {precision: str(model.dtype).removeprefix("torch.")})
