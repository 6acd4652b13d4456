"""Low-rank adapters, in PEFT's layout on disk, and the base that an adapter belongs to.

An adapter of a layer is A [r, in], B [out, r] and a scaling s; merged into its base W [out, in] it is W + s B A.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn

from policies.contract import Policy, PolicyError, actor_parameters
from policies.cuda_graphs import one_by_one
from policies.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    SHOWN_ERROR,
    Shards,
    check_shapes,
    checked,
    read_json,
    read_tensors,
    shown,
    write_json,
    write_tensors,
)
from policies.quantised import HANG_ONE, no_adapter, quantise
from policies.torchvision_operators import import_torchvision

WAY = "set policy.options.any_base to true to use it nevertheless"
MOST_NUMBERS = 3 * 10**8
"""Numbers of base matrices that are looked at: a dozen layers of a network of 7 billion."""
CERTAIN = 6.0
"""Standard errors that a share must be away from 0, or from 1, to be no coincidence."""
HUB = re.compile(r"models--(.+?)--(.+)")
"""Folder of a model in Hugging Face's cache: organisation and name."""


def check_named_base(adapter: Path, named: str, base: Path, state: Mapping[str, Tensor]) -> None:
    """Raise `PolicyError` if an adapter names another base than the one in the folder `base`, which has these tensors.

    An existing folder is compared tensor by tensor. For a missing folder, and a name on the Hub, the last part of the
    name is compared with the folder's name, with its name in the Hub's cache, and with config.json's `_name_or_path`,
    unless the folder's name is the base's name and more, as with fine-tunes.
    """
    there = Path(named).expanduser()
    try:
        if there.is_dir() and (there / CONFIG).exists():
            if there.resolve() == base.resolve() or _same_tensors(there, state) is not False:
                return
            raise PolicyError(f"{adapter} is an adapter of another base: {named} has other weights than {base}; {WAY}")
    except OSError:  # a name that is too long for a path
        pass
    organisation, name = _parts(named)
    own_organisation, own = _parts(str(base.resolve()))
    if own_organisation and organisation and "/" in named and not named.startswith((".", "/", "~")):
        if (own_organisation, own) == (organisation, name):
            return
    elif own == name:
        return
    elif not own.startswith(name):
        said = read_json(base / CONFIG).get("_name_or_path") if (base / CONFIG).exists() else None
        if isinstance(said, str) and said and _parts(said)[1] == name:
            return
    raise PolicyError(
        f"{adapter} is an adapter of another base: it names {shown(named, 300)}, and the checkpoint is {base}. Set "
        f"policy.options.checkpoint to that base; if this is it under another name, {WAY}"
    )


def is_merged(state: Mapping[str, Tensor], adapter: Mapping[str, Tensor], config: Mapping[str, Any]) -> bool | None:
    """True if an adapter is in the base's tensors already; None where they cannot tell.

    With the singular vectors u, v and values d of s B A, u' W v has d in it once the adapter is merged. The share of d
    is estimated over all directions; the noise is what u' W v is for vectors that do not belong together.
    """
    total, weight, numbers = 0.0, 0.0, 0
    shares: list[tuple[float, float]] = []
    for layer in sorted({name.rsplit(".lora_", 1)[0] for name in adapter}, key=_spread):
        w, a, b = (
            tensors.get(name)
            for tensors, name in (
                (state, f"{layer}.weight"), (adapter, f"{layer}.lora_A.weight"), (adapter, f"{layer}.lora_B.weight"),
            )
        )  # fmt: skip
        if w is None or a is None or b is None or not w.dim() == a.dim() == b.dim() == 2:
            continue
        if w.shape != (len(b), a.shape[1]) or len(a) != b.shape[1]:
            continue
        numbers += w.numel()
        if numbers > MOST_NUMBERS and shares:
            break
        u, d, v = _directions(a.float().cpu(), b.float().cpu(), scaling(config, layer, len(a)))
        found = u.T @ w.float().cpu() @ v
        off = found[~torch.eye(len(found), dtype=torch.bool)]
        # Of a low rank there are few numbers off the diagonal, which may all be small: no less than the matrix's own.
        spread = torch.stack([each.float().cpu().pow(2).mean() for each in (off, w) if each.numel()]).max()
        if not spread > 0 or not d.any():
            continue
        here = float((d * d).sum() / spread)
        total, weight = total + float((d * found.diagonal()).sum() / spread), weight + here
        shares.append((float((d * found.diagonal()).sum() / spread) / here, here**-0.5))
    if not weight > 0:
        return None
    share, error = total / weight, weight**-0.5
    if error * CERTAIN > 1:
        return None
    near = sum(abs(one - 1) <= 4 * spread + 0.05 for one, spread in shares)
    if abs(share - 1) <= 4 * error + 0.05 and near >= 0.9 * len(shares):
        return True
    return False if share < 0.5 else None


def scaling(config: Mapping[str, Any], layer: str, rank: int) -> float:
    """PEFT's factor of an adapter of this rank."""
    from peft.utils.other import get_pattern_key

    patterns = config.get("alpha_pattern") or {}
    alpha = patterns.get(get_pattern_key(list(patterns), layer), config.get("lora_alpha", 8))
    return float(alpha) / (rank**0.5 if config.get("use_rslora") else rank)


def _directions(a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    """u [out, r], d [r], v [in, r] of s B A."""
    left, up = torch.linalg.qr(b)
    right, down = torch.linalg.qr(a.T)
    u, d, v = torch.linalg.svd(factor * up @ down.T)
    return left @ u[:, : len(d)], d, right @ v[: len(d)].T


def _same_tensors(folder: Path, state: Mapping[str, Tensor]) -> bool | None:
    """True if the matrices of a directory are these; None where it has none by these names."""
    shards = Shards.find(folder)
    numbers, equal = 0, None
    for name in sorted(set(shards.files) & state.keys(), key=_spread):
        if state[name].dim() < 2:
            continue
        numbers += state[name].numel()
        if numbers > MOST_NUMBERS and equal:
            break
        stored = shards.tensor(name)
        # Rounded: the same base may have been read in float32 and in bfloat16.
        if stored.shape != state[name].shape or not torch.equal(stored.bfloat16(), state[name].cpu().bfloat16()):
            return False
        equal = True
    return equal


def _parts(name: str) -> tuple[str, str]:
    """Organisation, where one is said, and name of a model: of a name on the Hub, or a path."""
    parts = [part for part in name.replace("\\", "/").split("/") if part]
    for part in parts:
        cached = HUB.fullmatch(part)
        if cached:
            return cached[1].lower(), cached[2].lower()
    hub = len(parts) == 2 and not name.startswith((".", "/", "~"))
    return parts[0].lower() if hub else "", parts[-1].lower() if parts else ""


def _spread(name: str) -> tuple[int, str]:
    """A key that sorts names so that the first few are of all parts of a network."""
    digits = re.findall(r"\d+", name)
    return (sum(map(int, digits)) * 7919 + len(name) * 104729) % 1009, name


# --- reading, adding, writing adapters

PREFIX = "base_model.model."
NAME = "default"
"""PEFT's name of the only adapter."""
HONOURED = (
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "bias", "base_model_name_or_path", "peft_type",
)  # fmt: skip
"""Entries that are done as they say, or checked."""
HARMLESS = (
    "task_type", "auto_mapping", "peft_version", "revision", "inference_mode", "lora_dropout", "fan_in_fan_out",
    "loftq_config", "megatron_core", "qalora_group_size", "runtime_config",
)  # fmt: skip
"""Entries that change nothing in an adapter of linear layers that is trained: dropout is of the training, PEFT itself
switches `fan_in_fan_out` off there, and some belong to others, which are refused. Any other that is set is refused too:
`modules_to_save`, `use_dora`, `target_parameters`, `megatron_config` (with which PEFT imports a module that the file
names), and what newer versions of PEFT will have."""
SCALING = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")
"""Entries that an adapter's matrices are multiplied by."""
INITIALISATIONS = (True, False, "gaussian")
"""Initialisations that leave the base as it is: the others (pissa, olora, ...) move part of it into the adapter."""
BASE = "base_digest"
"""Entry of adapter_config.json that identifies the adapter's base. PEFT's own reader ignores it."""


OUTPUT_LAYERS = ("lm_head",)
"""Linear layers that PEFT's `all-linear` leaves out."""
LONGEST_MATCH_S = 1.0
"""Limit of a search for module names, in seconds: PEFT reads the names as regular expressions, which may not end."""
PATTERN = r"[\w.^$\\-]+"
"""Allowed characters of module names in an adapter_config.json."""
Rank = Annotated[int, Field(strict=True, ge=0, le=2**16)]
Alpha = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]


class _Said(BaseModel, extra="allow"):
    """The entries of adapter_config.json that this project checks; PEFT checks the others."""

    r: Rank = 8
    lora_alpha: Alpha = 8
    use_rslora: bool | None = False
    rank_pattern: dict[str, Rank] = {}
    alpha_pattern: dict[str, Alpha] = {}
    exclude_modules: list[str] | str | None = None
    layers_pattern: list[str] | str | None = None


class AdaptedModel(nn.Module):
    """A network on which adapters may hang. Names of modules and tensors differ between it and its checkpoint."""

    @property
    def digested(self) -> tuple[str, ...]:
        """Tensors of the checkpoint that identify it: any fine-tuning changes at least one of them."""
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.adapter_config: dict[str, Any] = {}
        """PEFT's, if adapters hang on the model."""
        self.quantised_digest: str | None = None
        """Digest of the base before its matrices were quantised; None: they are not."""
        self.unused_adapter: dict[str, Tensor] = {}
        """Adapters of tensors that no output depends on, on the CPU, to be saved again."""

    @property
    def base_folder(self) -> Path | None:
        """Source of the base's tensors."""
        raise NotImplementedError

    def checkpoint_name(self, name: str) -> str:
        """The checkpoint's name of a tensor, or of an adapter's."""
        raise NotImplementedError

    def adapter_name(self, name: str) -> str:
        """The checkpoint's name of an adapter's tensor, which other programs may call something else."""
        return name

    def checkpoint_state(self) -> dict[str, Tensor]:
        """The tensors by the checkpoint's names, quantised ones dequantised."""
        raise NotImplementedError


class AdaptedPolicy(Policy):
    """A policy on whose network adapters may hang."""

    @property
    def adaptable(self) -> AdaptedModel:
        """The network."""
        raise NotImplementedError

    @property
    def adapted(self) -> bool:
        """True if an adapter is trained, and the network frozen."""
        return bool(self.adaptable.adapter_config)

    @property
    def has_new_adapter(self) -> bool:
        adapter = set(adapter_parameters(self.adaptable))
        return self.adapted and adapter.issuperset(actor_parameters(self)) and is_neutral(self.adaptable)

    def quantise_base(self, base: str) -> None:
        if not self.adapted:
            raise PolicyError(f"{no_adapter(self.kind, base)}: {HANG_ONE}")
        digest = base_digest(self.adaptable)  # adapters still belong to the base as it was
        quantise(self.adaptable, base)
        self.adaptable.quantised_digest = digest

    def without_adapter(self) -> AbstractContextManager[None]:
        if not self.adapted:
            raise PolicyError(f"the policy {self.kind} has no adapter that could be left out")
        return switched_off(self.adaptable)


def load_adapter(model: AdaptedModel, folder: Path, *, any_base: bool = False) -> None:
    """Replace the adapter's tensors by the directory's. Raises `PolicyError` unless they fit."""
    state = read_adapter(model, folder, any_base=any_base)
    model.load_state_dict(state, strict=False)


def read_adapter(model: AdaptedModel, folder: Path, *, any_base: bool = False) -> dict[str, Tensor]:
    """The adapter's tensors under the names of the model's state dict, checked against it, which stays as it is.

    `any_base` takes an adapter of another base."""
    if not any_base:
        check_base(model, folder, read_adapter_config(folder))
    stored = {model.adapter_name(name): tensor for name, tensor in read_adapter_file(folder).items()}
    found = {name: tensor for name, tensor in stored.items() if name not in model.unused_adapter}
    own = {_plain(model, name): name for name in adapter_names(model)}
    state = model.state_dict()
    if found.keys() != own.keys():
        name = min(found.keys() ^ own.keys())
        raise PolicyError(f"{folder} is another adapter than this model's: they differ in {name!r}")
    check_shapes(folder, found, {name: state[full] for name, full in own.items()})
    return {own[name]: tensor.to(state[own[name]].dtype) for name, tensor in found.items()}


def adapter_names(model: AdaptedModel) -> list[str]:
    """Names of the adapter's tensors in the state dict."""
    return [name for name in model.state_dict() if f".{NAME}.weight" in name and ".lora_" in name]


def adapter_parameters(model: AdaptedModel) -> list[nn.Parameter]:
    """The adapter's matrices."""
    return [p for name, p in model.named_parameters() if f".{NAME}.weight" in name and ".lora_" in name]


def is_neutral(model: AdaptedModel) -> bool:
    """True if the adapter adds nothing to the model: B is zero everywhere, as in a new one."""
    return not any(bool(p.any()) for name, p in model.named_parameters() if f".lora_B.{NAME}." in name)


@contextmanager
def switched_off(model: AdaptedModel) -> Iterator[None]:
    """Within, the model computes without its adapter. What is trained is the same afterwards as before."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    trained = [(p, p.requires_grad) for p in adapter_parameters(model)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        with one_by_one():  # no tensor shows that the adapter is off
            yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, wanted in trained:  # PEFT lets the gradients of all its layers go, and come back
            parameter.requires_grad_(wanted)


def save_adapter(model: AdaptedModel, folder: Path) -> None:
    """Write a PEFT directory."""
    from peft import LoraConfig

    state = model.state_dict()
    tensors = {_plain(model, name): state[name] for name in adapter_names(model)} | model.unused_adapter
    ready = {PREFIX + name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(folder / ADAPTER, ready)
    config = LoraConfig(**_known(model.adapter_config))
    config.inference_mode = True
    config.base_model_name_or_path = None if model.base_folder is None else str(model.base_folder)
    config.save_pretrained(str(folder))
    write_json(folder / ADAPTER_CONFIG, read_json(folder / ADAPTER_CONFIG) | {BASE: base_digest(model)})


def merged_state(model: AdaptedModel) -> dict[str, Tensor]:
    """The checkpoint's tensors with the adapter added in, under the checkpoint's names. The model stays as it is.

    The sum is rounded once, to the base's dtype. A quantised base is dequantised: the sum is what the policy computes
    with, and differs from the base's files by what quantising changed, also where no adapter hangs.
    """
    state = plain_state(model)
    for name, module in model.named_modules():
        delta: Any = getattr(module, "get_delta_weight", None)
        if delta is not None:
            key = model.checkpoint_name(f"{name}.weight")
            state[key] = (state[key].float() + delta(NAME).float()).to(state[key].dtype)
    return state


def plain_state(model: AdaptedModel) -> dict[str, Tensor]:
    """The checkpoint's tensors without an adapter, under the checkpoint's names."""
    every = {name: tensor for name, tensor in model.checkpoint_state().items() if ".lora_" not in name}
    return {name.replace(".base_layer", ""): tensor for name, tensor in every.items()}


def base_digest(model: AdaptedModel) -> str:
    """Tells one base from another: a hash over a few tensors that any fine-tuning changes at least one of. That of a
    quantised base is of what it was made from."""
    if model.quantised_digest is not None:
        return model.quantised_digest
    state = plain_state(model)
    digest = hashlib.sha256()
    for name in model.digested:
        # Rounded, so that the same base has the same digest in float32 and in bfloat16.
        if not state[name].is_meta:  # as within `random_weights.undrawn`
            digest.update(state[name].detach().cpu().bfloat16().float().numpy().tobytes())
    return digest.hexdigest()


def attach(model: AdaptedModel, config: dict[str, Any], source: Path | None = None) -> None:
    """Freeze the model and hang new adapters on what PEFT's `config` says: A drawn from a normal distribution, B zero,
    both float32. Raises `PolicyError`, which names the `source` of the configuration."""
    import_torchvision()
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    model.requires_grad_(False)
    try:
        # Dropout would make the second look at a decision differ from the first.
        ready = LoraConfig(**({"init_lora_weights": "gaussian"} | _known(config) | {"lora_dropout": 0.0}))
        inject_adapter_in_model(ready, model, adapter_name=NAME)
    except Exception as error:  # an outside configuration: PEFT raises any error for it
        what = str(error)[:SHOWN_ERROR] or type(error).__name__
        where = "" if source is None else f"{source}: "
        raise PolicyError(f"{where}an adapter of r={shown(config.get('r'))} cannot be made: {what}") from error
    # Small steps would be lost in bfloat16's eight bits.
    cast_adapter_dtype(model, NAME, autocast_adapter_dtype=True)
    model.adapter_config = dict(config)


def _known(config: dict[str, Any]) -> dict[str, Any]:
    """The entries that this version of PEFT knows: others come from newer versions, and are switched off."""
    from peft import LoraConfig

    names = {field.name for field in fields(LoraConfig) if field.init}
    return {name: value for name, value in config.items() if name in names}


def read_adapter_config(folder: Path) -> dict[str, Any]:
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    if config.get("peft_type") != "LORA":
        raise PolicyError(f"{path}: only LORA adapters are supported, this one is {config.get('peft_type')!r}")
    for name in sorted(config.keys() - {*HONOURED, *HARMLESS, BASE}):
        if config[name]:
            raise PolicyError(f"{path}: {shown(name).strip(chr(39))} is not supported, and it is {shown(config[name])}")
    said = checked(path, _Said, config)
    given = [said.exclude_modules, said.layers_pattern, list(said.rank_pattern), list(said.alpha_pattern)]
    for pattern in (one for each in given for one in ([each] if isinstance(each, str) else each or [])):
        if not re.fullmatch(PATTERN, pattern):
            raise PolicyError(f"{path}: the pattern {shown(pattern)} is not the name of a module")
    if config.get("init_lora_weights", True) not in INITIALISATIONS:
        raise PolicyError(
            f"{path}: init_lora_weights {shown(config['init_lora_weights'])} changes the base: merge it first"
        )
    if config.get("bias", "none") != "none":
        raise PolicyError(f"{path}: adapters with biases are not supported")
    return config


def read_adapter_file(folder: Path) -> dict[str, Tensor]:
    path = folder / ADAPTER
    if not path.exists() and (folder / "adapter_model.bin").exists():
        raise PolicyError(f"{folder / 'adapter_model.bin'} is a pickle, which is not read: convert it to safetensors")
    tensors = {name.removeprefix(PREFIX): tensor for name, tensor in read_tensors(path).items()}
    for name in tensors:
        if not re.search(r"\.lora_[AB]\.weight$", name):
            raise PolicyError(f"{path} has a tensor that is no low-rank adapter's: {name!r}")
    return tensors


def check_base(model: AdaptedModel, folder: Path, config: dict[str, Any]) -> None:
    """Raise `PolicyError` if the adapter of a PEFT directory says that it belongs to another base than the model."""
    digest, named = config.get(BASE), config.get("base_model_name_or_path")
    if digest is not None:
        if digest != base_digest(model):
            raise PolicyError(
                f"{folder} is an adapter of another base: it was trained on {shown(named, 300).strip(chr(39))}, with "
                f"other weights; set policy.options.checkpoint to that base, or {WAY}"
            )
    elif isinstance(named, str) and named and model.base_folder is not None:
        check_named_base(folder, named, model.base_folder, plain_state(model))


def check_not_merged(model: AdaptedModel, folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Raise `PolicyError` if the tensors tell that the adapter is in the model's weights already."""
    if is_merged(plain_state(model), tensors, config):
        raise PolicyError(
            f"{folder} was merged into the weights of {model.base_folder} already: it would count twice. Leave "
            f"policy.options.adapter out, or set policy.options.checkpoint to the adapter's base; {WAY}"
        )


def check_scaling(model: AdaptedModel, folder: Path) -> None:
    """Raise `PolicyError` if the directory's adapter counts for more or less than the model's."""
    found = read_json(folder / ADAPTER_CONFIG)
    for name in SCALING:
        # PEFT writes what is off as false or as an empty table, others not at all.
        if (found.get(name) or None) != (model.adapter_config.get(name) or None):
            raise PolicyError(
                f"{folder} is another adapter: {name} is {shown(found.get(name))}, expected "
                f"{shown(model.adapter_config.get(name))}"
            )


def check_whole(folder: Path, config: dict[str, Any], modules: Iterable[str], layers: Iterable[str]) -> None:
    """Raise `PolicyError` if target_modules has layers without tensors in the file.

    `modules` are the layers that it has tensors of, `layers` the names of the linear layers that it could be of."""
    missing = sorted(layer for layer in set(layers) - set(modules) if _targeted(folder, config, layer))
    if missing:
        raise PolicyError(
            f"{folder / ADAPTER} is not whole: target_modules in {ADAPTER_CONFIG} names {missing[0]!r}, of which it "
            f"has no tensors ({len(missing)} such layers); save the adapter again"
        )


def _targeted(folder: Path, config: dict[str, Any], layer: str) -> bool:
    """True if PEFT adds an adapter to the linear layer."""
    import regex  # type: ignore[import-untyped]  # with a limit of time: the pattern is a stranger's
    from peft import LoraConfig
    from peft.tuners.tuners_utils import check_target_module_exists

    target = config.get("target_modules")
    if not target:
        return False
    try:
        if isinstance(target, str):
            if target == "all-linear":
                return layer.rsplit(".", 1)[-1] not in OUTPUT_LAYERS
            return regex.fullmatch(target, layer, timeout=LONGEST_MATCH_S) is not None
        return bool(check_target_module_exists(LoraConfig(**_known(config)), layer))
    except Exception as error:  # an outside pattern
        what = str(error)[:SHOWN_ERROR] or type(error).__name__
        path = folder / ADAPTER_CONFIG
        raise PolicyError(f"{path}: target_modules {shown(target)} cannot be used: {what}") from error


def _plain(model: AdaptedModel, name: str) -> str:
    """A name in the state dict as PEFT writes it."""
    return model.checkpoint_name(name.replace(f".{NAME}.weight", ".weight"))
