"""OpenVLA's network: images and a prompt in, hidden states and logits of action tokens out.

Two vision transformers and a projector into the language model's space. B images, N patches of each, E the towers'
widths together, D the language model's width.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.contract import PolicyError
from policies.cuda_graphs import replayed
from policies.files import CONFIG, INDEX, SINGLE, Shards, copy_other_files, shown, write_json
from policies.lora import AdaptedModel
from policies.openvla.config import TOWERS, ModelConfig, read_config
from policies.quantised import dequantised_state
from policies.random_weights import RANDOM_WEIGHTS, draw, drawn_on, empty_network, generator_on
from policies.torchvision_operators import import_torchvision


def build_tower(name: str, sizes: Any, image_size: int) -> Any:
    """timm's vision transformer, whole, without pretrained weights: these are read or drawn later."""
    import_torchvision()
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if sizes is not None:
        return VisionTransformer(**sizes, img_size=image_size, num_classes=0, weight_init="skip")
    try:
        return timm.create_model(name, pretrained=False, num_classes=0, img_size=image_size, weight_init="skip")
    except RuntimeError as error:
        raise PolicyError(f"timm has no vision tower {name!r}: {error}") from error


class VisionBackbone(nn.Module):
    """DINOv2 and SigLIP side by side: their patch features, concatenated.

    Features are the output of the second to last block, without the final norm, and without class and register
    tokens (prismatic/extern/hf/modeling_prismatic.py). What comes after that block is in the checkpoint but never
    computed: it is not part of this module, so no optimiser and no adapter sees it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.tower_sizes or (None, None)
        self.unused: dict[str, Tensor] = {}
        """Tensors of the checkpoint that no output depends on, by name, on the meta device."""
        for tower, name, size in zip(TOWERS, config.towers, sizes, strict=True):
            with torch.device("meta"):
                whole = build_tower(name, size, config.image_size)
            before = whole.state_dict()
            whole.prune_intermediate_layers([len(whole.blocks) - 2], prune_norm=True, prune_head=True)
            kept = whole.state_dict().keys()
            # In the tower's order: a set's would be another in each process.
            self.unused |= {f"{tower}.{key}": tensor for key, tensor in before.items() if key not in kept}
            self.add_module(tower, whole)
        self.width = sum(int(getattr(self, tower).embed_dim) for tower in TOWERS)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, 6, S, S], three channels for each tower, to [B, N, E].

        `language` [B, D] is what modulates towers whose blocks are FiLM's (`policies.openvla.film`)."""
        return torch.cat(self.features(pixels, language), -1)

    def features(self, pixels: Tensor, language: Tensor | None = None) -> list[Tensor]:
        """[B, N, width] of each tower."""
        see = _see if language is None else partial(_see_filmed, language=language)
        return [see(getattr(self, tower), part) for tower, part in zip(TOWERS, pixels.split(3, 1), strict=True)]


def _see(tower: Any, pixels: Tensor) -> Tensor:
    """[B, 3, S, S] to [B, N, width]."""
    seen: Tensor = tower.forward_intermediates(
        pixels, indices=1, norm=False, stop_early=True, output_fmt="NLC", intermediates_only=True
    )[0]
    return seen


def _see_filmed(tower: Any, pixels: Tensor, language: Tensor) -> Tensor:
    """A tower's output, block by block: timm's own loop gives a block nothing but its input."""
    x: Tensor = tower.norm_pre(tower.patch_drop(tower._pos_embed(tower.patch_embed(pixels))))
    for block in tower.blocks:
        x = block(x, language)
    return x[:, tower.num_prefix_tokens :]


class Projector(nn.Module):
    """[.., E] to [.., D]: three linear layers with exact GELU between them."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features)
        self.fc2 = nn.Linear(4 * features, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(x)))))


LAYER_SCALES = (".ls1.", ".ls2.")
"""Modules whose parameter timm calls gamma and the checkpoint scale_factor: Hugging Face's loader used to rename
everything called gamma."""
FILM_LAYER = re.compile(r"vision_backbone\.\w+\.blocks\.\d+\.(scale|shift)\.(weight|bias)")
"""Names of FiLM's own layers (`policies.openvla.film`)."""
FILMED = re.compile(r"^(vision_backbone\.\w+\.blocks\.\d+\.)block\.")
"""Prefix of a block inside its FiLM wrapper, which the checkpoint's names do not have."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Sequence:
    """Embedded tokens of a batch."""

    embeddings: Tensor
    """[B, T, D]."""
    valid: Tensor
    """bool [B, T]: not padding."""
    positions: Tensor
    """int64 [B, T]: position ids; those of padding mean nothing."""
    end: Tensor
    """int64 [B]: the column of the prompt's last token, whose state predicts the first action token."""

    @property
    def columns(self) -> int:
        return self.embeddings.shape[1]

    def extended(self, embeddings: Tensor) -> Sequence:
        """With K more tokens, [B, K, D], in each row's next positions."""
        count = embeddings.shape[1]
        positions = self.valid.sum(1, keepdim=True) + torch.arange(count, device=embeddings.device)
        return replace(
            self,
            embeddings=torch.cat([self.embeddings, embeddings], 1),
            valid=functional.pad(self.valid, (0, count), value=True),
            positions=torch.cat([self.positions, positions], 1),
        )

    def mask(self, columns: int, *, full: bool = False) -> Tensor:
        """bool, broadcastable to [B, 1, T, columns]: which key each query attends to; columns beyond T: none.

        Causal, or with `full` every valid key. A padding query attends to itself too: with no key at all its
        softmax would be NaN, and NaN times zero is NaN in the next layer.
        """
        keys = functional.pad(self.valid, (0, columns - self.columns), value=False)[:, None]
        if full:
            return keys[:, None]
        query = torch.arange(self.columns, device=keys.device)[:, None]
        key = torch.arange(columns, device=keys.device)
        return (((key <= query) & keys) | (key == query))[:, None]


class KeyValueCache:
    """Keys and values of a sequence's columns, layer by layer; transformers' layers call `update`.

    Places are Python's numbers: transformers' `StaticCache` counts on the device, which a CUDA graph's recording
    could not set to zero.
    """

    is_compileable = False
    """transformers asks: False keeps it from compiling the pass."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        """Columns that there is memory for."""
        self._held: list[tuple[Tensor, Tensor]] = []
        self._filled: list[int] = []

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Put the keys and values [B, heads, T, d] of the next T columns down; those of all columns, zeros at first."""
        if layer == len(self._held):
            shape = (*keys.shape[:2], self.columns, keys.shape[3])
            self._held.append((keys.new_zeros(shape), values.new_zeros(shape)))
            self._filled.append(0)
        place = slice(self._filled[layer], self._filled[layer] + keys.shape[2])
        for held, new in zip(self._held[layer], (keys, values), strict=True):
            held[:, :, place] = new
        self._filled[layer] = place.stop
        return self._held[layer]

    def get_seq_length(self, layer: int = 0) -> int:
        """Zero: positions and masks are given."""
        return 0


class OpenVLAModel(AdaptedModel):
    """Vision towers, projector and Llama under the checkpoint's names."""

    digested = (
        "projector.fc3.weight",
        "language_model.model.norm.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "language_model.model.layers.0.mlp.down_proj.weight",
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        import_torchvision()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.config = config
        # SDPA takes the mask that it is given; other implementations would need it in other forms.
        llama = LlamaConfig(**{**config.llama, "attn_implementation": "sdpa"})
        self.vision_backbone = VisionBackbone(config)
        self.projector = Projector(self.vision_backbone.width, llama.hidden_size)
        self.language_model = LlamaForCausalLM(llama)
        self.unused: dict[str, Tensor] = {}
        """The checkpoint's tensors that no output depends on, kept on the CPU to be saved again."""
        self.shards: Shards | None = None
        """Source of the tensors."""

    @property
    def width(self) -> int:
        return self.language_model.config.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self.language_model.model.norm.weight.dtype

    def embed_images(self, pixels: Tensor) -> Tensor:
        """[B, I, 6, S, S], I images a row, to [B, I * patches, D], image after image."""
        return self.projector(self.vision_features(pixels))

    @replayed
    def vision_features(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, I, 6, S, S] to [B, I * patches, E]: what the projector takes; `language` [B, D] modulates the towers."""
        given = None if language is None else language.repeat_interleave(pixels.shape[1], 0)
        features = self.vision_backbone(pixels.flatten(0, 1).to(self.dtype), given)
        return features.view(pixels.shape[0], -1, features.shape[-1])

    def embed_tokens(self, ids: Tensor) -> Tensor:
        """[.., D] of token ids."""
        return self.language_model.model.embed_tokens(ids)

    def sequence(self, images: Tensor, ids: Tensor, lengths: Tensor) -> Sequence:
        """The part before the actions.

        `images` [B, P, D] are embedded patches (and whatever else stands between BOS and prompt), `ids` int64
        [B, L] the prompts from BOS on, padded on the right, `lengths` int64 [B] their lengths.
        """
        text = self.embed_tokens(ids)
        embeddings = torch.cat([text[:, :1], images, text[:, 1:]], 1)
        end = images.shape[1] + lengths - 1
        positions = torch.arange(embeddings.shape[1], device=ids.device).expand(len(ids), -1)
        return Sequence(embeddings, positions <= end[:, None], positions, end)

    def hidden(self, sequence: Sequence, *, full: bool = False, cache: KeyValueCache | None = None) -> Tensor:
        """[B, T, D]: the last layer's states after the final norm. With a cache, its keys and values are filled."""
        columns = sequence.columns if cache is None else cache.columns
        return self.language_model.model(
            inputs_embeds=sequence.embeddings,
            attention_mask=sequence.mask(columns, full=full),
            position_ids=sequence.positions,
            past_key_values=cache,
            use_cache=cache is not None,
        ).last_hidden_state

    def states(
        self,
        sequence: Sequence,
        prompt: Sequence,
        count: int,
        *,
        full: bool = False,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """[B, K, D]: the states that predict the K tokens after `prompt`, with which `sequence` begins.

        As `predicting` takes them out of `hidden`, without what nothing reads: the last layer's MLP, and the final
        norm, at all other columns.
        """
        llama = self.language_model.model
        hidden, last = sequence.embeddings, llama.layers[-1]
        context = dict(
            attention_mask=sequence.mask(hidden.shape[1] if cache is None else cache.columns, full=full),
            position_embeddings=llama.rotary_emb(hidden, position_ids=sequence.positions),
            past_key_values=cache,
        )
        for layer in llama.layers[:-1]:
            hidden = layer(hidden, **context)
        attended, _ = last.self_attn(hidden_states=last.input_layernorm(hidden), **context)
        states = self.predicting(hidden + attended, prompt, count)
        return llama.norm(states + last.mlp(last.post_attention_layernorm(states)))

    def next_hidden(self, sequence: Sequence, cache: KeyValueCache) -> Tensor:
        """[B, D]: the state at the last column; the cache holds the keys and values of those before it."""
        keys = functional.pad(sequence.valid, (0, cache.columns - sequence.columns), value=False)
        return self.language_model.model(
            inputs_embeds=sequence.embeddings[:, -1:],
            attention_mask=keys[:, None, None],
            position_ids=sequence.positions[:, -1:],
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state[:, 0]

    def predicting(self, hidden: Tensor, sequence: Sequence, count: int) -> Tensor:
        """[B, K, D]: the states that predict the K tokens after `sequence`, in which `hidden` may go further.

        That of the first is at the prompt's end, wherever padding has put it; each other is one column before its
        token.
        """
        rows, first = torch.arange(len(hidden), device=hidden.device), sequence.columns
        return torch.cat([hidden[rows, sequence.end][:, None], hidden[:, first : first + count - 1]], 1)

    def action_logits(self, hidden: Tensor) -> Tensor:
        """float32 [.., bins]: the logits of the action tokens, in the order of their ids."""
        head, first, end = self.language_model.lm_head, self.config.first_action_token, self.config.action_vocab
        if type(head) is nn.Linear:
            return functional.linear(hidden, head.weight[first:end]).float()
        return head(hidden)[..., first:end].float()  # an adapter hangs on it

    def negative_log_probs(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """float32 [..]: of the tokens int64 [..] among the whole vocabulary, after the states [.., D]."""
        logits = self.language_model.lm_head(hidden).float()
        return functional.cross_entropy(logits.flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)

    @property
    def base_folder(self) -> Path | None:
        return None if self.shards is None else self.shards.folder

    def checkpoint_name(self, name: str) -> str:
        return to_checkpoint(name)

    def checkpoint_state(self) -> dict[str, Tensor]:
        """All tensors of the checkpoint under its names, those that nothing depends on too; without FiLM's layers,
        which have a separate file."""
        own = dequantised_state(self).items()
        state = {to_checkpoint(name): tensor for name, tensor in own if not FILM_LAYER.fullmatch(name)}
        return state | {name: tensor.to(self.dtype) for name, tensor in self.unused.items()}


def to_checkpoint(name: str) -> str:
    """A parameter's name in the checkpoint."""
    name = FILMED.sub(r"\1", name)
    return name.replace(".gamma", ".scale_factor") if any(scale in name for scale in LAYER_SCALES) else name


def from_checkpoint(name: str) -> str:
    """A checkpoint's name of a parameter as the name in this module; both spellings of layer scales are read."""
    return name.replace(".scale_factor", ".gamma") if any(scale in name for scale in LAYER_SCALES) else name


def build_empty(config: ModelConfig) -> OpenVLAModel:
    """The network on the meta device, with `unused` filled in on it too."""
    with torch.device("meta"):
        model = OpenVLAModel(config)
    model.unused = {to_checkpoint(f"vision_backbone.{name}"): t for name, t in model.vision_backbone.unused.items()}
    return model


def load_model(folder: str | Path, dtype: str = "checkpoint") -> OpenVLAModel:
    """The network of a Hugging Face directory, on the CPU. Raises `PolicyError`.

    `dtype` is float32, bfloat16, float16, or checkpoint: as stored. No remote code is run and no pickle read; every
    tensor of the files is one of the model's or one of those that no output depends on, and the other way round.
    Where there are none and config.json asks for random weights (`sizes`), they are drawn, on torch's default device.
    """
    folder = Path(folder)
    if dtype not in (*DTYPES, "checkpoint"):
        raise PolicyError(f"dtype must be one of checkpoint, {', '.join(DTYPES)}, got {dtype!r}")
    config = read_config(folder)
    model = empty_network(folder / CONFIG, lambda: build_empty(config))
    if RANDOM_WEIGHTS in config.raw and not any((folder / name).exists() for name in (INDEX, SINGLE)):
        return _draw(model, dtype)
    shards = Shards.find(folder)
    # Files written by newer libraries call layer scales gamma, as timm does.
    plain = {from_checkpoint(name): name for name in shards.files}
    expected = {plain.get(name, to_checkpoint(name)): tensor for name, tensor in model.state_dict().items()}
    unused = {plain.get(from_checkpoint(name), name): tensor for name, tensor in model.unused.items()}
    tensors = shards.read(expected | unused)
    if dtype != "checkpoint":
        tensors = {name: tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    model.unused = {to_checkpoint(from_checkpoint(name)): tensors[name] for name in unused}
    model.load_state_dict({from_checkpoint(name): tensors[name] for name in expected}, assign=True)
    model.shards = Shards(folder, {to_checkpoint(from_checkpoint(name)): file for name, file in shards.files.items()})
    _fill_rotary(model)
    return model.eval()


def save_model(model: OpenVLAModel, folder: str | Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Write a Hugging Face directory with the layout of the one that the model came from.

    `tensors` replaces the model's own (a merged adapter). Tensors keep the model's dtype; a model loaded with dtype
    checkpoint is written again equal tensor by tensor, and what is not a tensor is copied.
    """
    folder = Path(folder)
    if model.shards is None:
        raise PolicyError("only a model whose weights were read from a directory can be saved as one")
    tensors = model.checkpoint_state() if tensors is None else tensors
    folder.mkdir(parents=True, exist_ok=True)
    model.shards.write(folder, tensors)
    if model.shards.folder.is_dir() and model.shards.folder.resolve() != folder.resolve():
        copy_other_files(model.shards.folder, folder)
    raw = dict(model.config.raw)
    raw["torch_dtype"] = str(model.dtype).removeprefix("torch.")
    write_json(folder / CONFIG, raw)


def _draw(model: OpenVLAModel, dtype: str) -> OpenVLAModel:
    """The empty network with random weights, made where and as they are wanted: nothing is made twice."""
    named = model.config.raw.get("torch_dtype") if dtype == "checkpoint" else dtype
    seed = model.config.raw[RANDOM_WEIGHTS]
    if not isinstance(named, str) or named not in DTYPES or type(seed) is not int or not 0 <= seed < 2**63:
        raise PolicyError(
            f"{CONFIG}: {RANDOM_WEIGHTS} must be a seed, with a torch_dtype; got {shown(seed)}, {shown(named)}"
        )
    device = drawn_on()
    model = model.to(DTYPES[named]).to_empty(device=device)
    generator = generator_on(device, seed)
    for name, tensor in model.state_dict().items():
        draw(name, tensor, generator)
    model.unused = {}
    _fill_rotary(model)
    return model.eval()


def _fill_rotary(model: OpenVLAModel) -> None:
    """The rotary embedding's frequencies are no part of a checkpoint: they are computed when it is built."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    llama = model.language_model
    llama.model.rotary_emb = LlamaRotaryEmbedding(config=llama.config)
