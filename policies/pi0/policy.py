"""pi0 and pi0.5 as a policy: a chunk is the end of an integration, of which steps are drawn and scored.

B rows, H actions that the network predicts, C of them that are executed, A numbers of the network's action, D of the
robot's, N denoising steps, P tokens of the prefix, W the vision-language model's width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from policies.contract import Action, Contrast, Evaluation, Inputs, PolicyError, PolicySpec
from policies.denoising import PICKING, Denoising, Field, stacked
from policies.encoders import vector
from policies.files import CONFIG, Shards, read_json
from policies.imitation import counted_mean, only_counted
from policies.layers import checked_noise, checked_widths, mlp
from policies.lora import AdaptedModel, AdaptedPolicy
from policies.pi0 import saving
from policies.pi0.adapters import attach
from policies.pi0.config import with_horizon
from policies.pi0.files import DTYPES, is_random, load_network
from policies.pi0.images import pixel_values
from policies.pi0.mixture import Cache
from policies.pi0.network import Observation, Prefix
from policies.pi0.noise import NoiseNet
from policies.pi0.prompts import Prompts
from policies.pi0.units import (
    DEMONSTRATIONS,
    StoredUnits,
    demonstrated,
    first_of,
    identity,
    read_lerobot,
    read_openpi,
)
from policies.transforms import Transforms

SLOTS = 3
"""Images that every checkpoint was trained with. Those of absent cameras nothing sees: they are not computed."""
RESIZES, PROMPTS, TRAINED = ("pillow", "interpolate"), ("openpi", "lerobot", "lerobot-0.4"), ("expert", "all")
CRITICS = ("prefix", "suffix")
NOISE_WIDTHS = (128, 64)
BFLOAT16_TOLERANCE = 2e-2
TIME_POWER, TIME_LOW = 1 / 1.5, 0.001
"""Imitation's times are 0.001 + 0.999 Beta(1.5, 1) (openpi): a uniform number to the power 1 / 1.5 is such a Beta."""


class Pi0(AdaptedPolicy):
    """Reads frames, the instruction and proprioception. Which of the two it is its weights say.

    How steps are drawn and scored is `policies.denoising`'s, with x of H * A numbers, of which the log-prob is of those
    C * D that are executed. The trace is that of `Denoising.run`.

    Where the vision-language model is frozen, `precompute` finds its keys and values, and an update runs the expert
    alone: 2 * layers * heads * P * d numbers a row, which `cache_prefix` False spares.

    The value head reads the normalised state, and the mean over the prefix's present tokens, or over the expert's
    outputs for the actions at x = 0, t = 1: the same in rollout and update, whatever step is scored.
    """

    kind = "pi0"
    incidental: ClassVar[frozenset[str]] = frozenset(
        {"checkpoint", "steps", "noise_level", "start_noise", "scored", "step_reduction", "noise_bounds", "train",
         "critic_trains_network", "cache_prefix", "spec.chunk", "spec.horizon"}
    )  # fmt: skip
    pretrained = predicts_more = True

    @classmethod
    def check_files(cls, architecture: Mapping[str, Any]) -> None:
        Transforms(architecture.get("transforms", ()))
        folder = architecture.get("checkpoint")
        if not folder:
            raise PolicyError("pi0 needs a checkpoint: set policy.options.checkpoint to its directory")
        if not Path(folder).is_dir():
            raise PolicyError(
                f"policy.options.checkpoint: {folder} is not a folder here; name one of openpi's or LeRobot's"
            )
        if not is_random(Path(folder)):
            Shards.find(Path(folder))

    @classmethod
    def reads(cls, config: Mapping[str, Any]) -> bool:
        return config.get("type") in ("pi0", "pi05") or ("type" not in config and "action_horizon" in config)

    @classmethod
    def converts(cls, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        return Transforms(architecture.get("transforms", ())).conventions()

    @classmethod
    def can_contrast(cls, architecture: Mapping[str, Any]) -> bool:
        return architecture.get("scored", "one") in PICKING

    def __init__(
        self,
        spec: PolicySpec,
        *,
        checkpoint: str = "",
        weights: str = "",
        asset: str = "",
        prompt: str = "",
        state_in_prompt: bool = False,
        resize: str = "pillow",
        transforms: Sequence[Mapping[str, Any]] = (),
        steps: int = 10,
        noise_level: float = 0.5,
        start_noise: float = 1.0,
        scored: str = "one",
        step_reduction: str = "sum",
        noise_bounds: Sequence[float] = (0.08, 0.16),
        train: str = "expert",
        cache_prefix: bool = True,
        dtype: str = "float32",
        lora_rank: int = 0,
        lora_alpha: float = 0.0,
        lora_parts: Sequence[str] = ("vlm", "expert"),
        critic: str = "prefix",
        critic_trains_network: bool = False,
        value_widths: Sequence[int] = (512, 128),
    ) -> None:
        """`checkpoint` is a directory of openpi's or LeRobot's; `weights` is what such a policy was saved as, which
        takes its place (`policies.load` sets it). `asset` names openpi's statistics, where there are several;
        `demonstrations`: those that are learned from (`adopt_units`). `prompt` is the project whose prompts these are,
        "" that of the checkpoint's layout; `state_in_prompt` is for pi0.5. `transforms` are
        entries of `policies.transforms` (delta_actions of 6 for openpi's pi0_libero). `train`: `expert` freezes the
        vision-language model, `all` trains every weight. `noise_bounds` are the standard deviations between which
        scored `learned` keeps. With `lora_rank` adapters on `lora_parts` (vlm, expert, vision) are all of the network
        that is trained; `lora_alpha` 0: as the rank. `critic` is what the value head reads, prefix or suffix.
        """
        super().__init__()
        if weights and saving.is_adapter(Path(weights)):
            weights = ""
        self.check_files({"checkpoint": weights or checkpoint})
        choices = ("resize", resize, RESIZES), ("train", train, TRAINED), ("critic", critic, CRITICS)
        for name, given, valid in (*choices, ("dtype", dtype, DTYPES)):
            if given not in valid:
                raise PolicyError(f"pi0's {name} must be one of {', '.join(valid)}, got {given!r}")
        if prompt and prompt not in PROMPTS:
            raise PolicyError(f"pi0's prompt must be one of {', '.join(PROMPTS)}, got {prompt!r}")
        self.transforms = Transforms(transforms)
        if asset == DEMONSTRATIONS:
            self.transforms.check_demonstrated_units()
        source = Path(weights or checkpoint).resolve()
        self.source, self.spec, self.shown = source, spec, self.transforms.spec(spec)  # shown: to the network
        self._architecture: dict[str, Any] = dict(
            checkpoint=str(Path(checkpoint).resolve()), asset=asset, prompt=prompt,
            state_in_prompt=state_in_prompt, resize=resize,
            transforms=self.transforms.as_data(), steps=steps, noise_level=float(noise_level),
            start_noise=float(start_noise), scored=scored,
            step_reduction=step_reduction, noise_bounds=list(noise_bounds), train=train, cache_prefix=cache_prefix,
            dtype=dtype, lora_rank=lora_rank, lora_alpha=float(lora_alpha), lora_parts=list(lora_parts),
            critic=critic, critic_trains_network=critic_trains_network,
            value_widths=list(checked_widths("value_widths", value_widths)),
        )  # fmt: skip
        self.network, self.config = load_network(source, dtype), read_json(source / CONFIG)
        if spec.horizon:  # no weight depends on it
            self.network.sizes = replace(self.network.sizes, horizon=spec.horizon)
            self.config = with_horizon(self.config, spec.horizon)
        self.sizes, self.layout = self.network.sizes, self.network.layout
        self._check_spec(state_in_prompt)
        self.spec = spec = replace(spec, horizon=self.sizes.horizon)
        convention: Any = prompt or self.layout
        if self.sizes.adaptive and not state_in_prompt and convention != "openpi":
            raise PolicyError(
                f"a pi0.5 with prompts of {convention} has the state in them: set state_in_prompt to true, or prompt "
                "to openpi"
            )
        self.prompts = Prompts(source, self.sizes.prompt_len, convention, self.sizes.action_dim)
        self.units = self._read_units(asset)
        self.resize: Any = resize
        self.state_in_prompt = state_in_prompt
        self.trains_all, self.cache_prefix = train == "all", cache_prefix
        if lora_rank:
            attach(self.network, lora_rank, float(lora_alpha) or lora_rank, lora_parts)
            self.trains_all = bool({"vlm", "vision"} & set(lora_parts))
        else:
            for name, parameter in self.network.named_parameters():
                frozen = name.startswith(("vision.", "projector.", "embedding.", "mixture.vlm."))
                parameter.requires_grad_(self.trains_all or not frozen)
        if dtype != "float32":
            self.ratio_tolerance = BFLOAT16_TOLERANCE
        inner, numbers = self.sizes.expert.width, self.sizes.horizon * self.sizes.action_dim
        executed = self._executed(torch.arange(numbers).view(1, self.sizes.horizon, -1)).flatten().tolist()
        self.denoising = Denoising(numbers, steps, noise_level, scored, step_reduction, executed, start_noise)
        self.noise_dim = self.denoising.noise_dim
        learned = scored == "learned"
        self.noise_net = NoiseNet(inner, self.sizes.action_dim, noise_bounds, NOISE_WIDTHS) if learned else None
        self.reads_suffix, self.critic_trains_network = critic == "suffix", critic_trains_network
        read = inner if self.reads_suffix else self.sizes.vlm.width
        self.value_head = mlp(read + self.sizes.action_dim, value_widths, 1, last_gain=1.0)

    # --- the contract

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        seen = self._observation(inputs)
        prefix = self.network.prefix(seen)
        times = self.denoising.times.expand(len(seen.state), -1)
        draws = self.denoising.draws(noise, len(seen.state))
        x, trace, field = self.denoising.run(draws, lambda x, i: self._field(prefix, seen.state, x, times[:, i]))
        log_prob = self._shaped(self.denoising.log_prob(trace, field))
        value = self._value_of(self._summary(prefix, seen.state), seen.state)
        return Action(self._actions(x, inputs), log_prob, value, trace)

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        state, times = self._state(inputs), self.denoising.times[trace["step"]]
        prefix, summary = self._known(trace, state) or self._read(inputs)
        found = [self._field(prefix, state, trace["x"][:, k], times[:, k]) for k in range(times.shape[1])]
        field = stacked(found)
        log_prob = self.denoising.log_prob(trace, field)
        entropy = self._shaped(self.denoising.entropy(field, log_prob))
        moved = self.denoising.contrast(trace, field) if self.denoising.picks else None
        contrast = None if moved is None else Contrast(*map(self._shaped, moved))
        return Evaluation(self._shaped(log_prob), entropy, self._value_of(summary, state), contrast)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        seen = self._observation(inputs)
        return self._value_of(self._summary(self.network.prefix(seen), seen.state), seen.state)

    @torch.no_grad()
    def precompute(self, inputs: Inputs) -> dict[str, Tensor]:
        """Keys and values [B, layers, heads, P, d] of the prefix, `present` bool [B, P], and `summary` [B, W] where the
        critic reads it; nothing where the vision-language model is trained, or `cache_prefix` is False."""
        if self.trains_all or not self.cache_prefix:
            return {}
        prefix = self.network.prefix(self._observation(inputs))
        keys, values = (torch.stack(part, 1) for part in (prefix.cache.keys, prefix.cache.values))
        found = {"keys": keys, "values": values, "present": prefix.present}
        return found if self.reads_suffix else found | {"summary": _mean_of(prefix)}

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """Flow matching at a time of each row's own, drawn by the noise's last number; its first are x^(0)."""
        noise = checked_noise(noise, self.noise_dim)
        uniform = self.denoising.uniform_of(noise)
        seen = self._observation(inputs)
        # After it was normalised: what fills an episode's end up is the mean action, not one of raw zeros.
        wanted = only_counted(self._normalised(actions, inputs), counted)
        x1 = noise[:, : self.denoising.size].view_as(wanted)
        t = (TIME_LOW + (1 - TIME_LOW) * uniform[:, 0] ** TIME_POWER).float()
        v = self.network.joint_velocity(seen, t[:, None, None] * x1 + (1 - t[:, None, None]) * wanted, t)
        return counted_mean((v - (x1 - wanted)).square()[..., : self.spec.action_dim], counted)

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        if self._architecture["asset"] == DEMONSTRATIONS:
            nothing = torch.zeros(1, 0)  # proprioception may be recorded that the policy does not read
            state = self.transforms.state(proprio) if proprio is not None and self.spec.proprio_dim else nothing
            said = self.transforms.demonstrated(actions[:, None], proprio)[:, 0]
            self.units.fill(demonstrated(state, said))

    def architecture(self) -> dict[str, Any]:
        return dict(self._architecture)

    @property
    def network_image_size(self) -> int:
        return self.sizes.vision.image_size

    @property
    def normalised_by(self) -> str:
        asset = self._architecture["asset"]
        if asset == DEMONSTRATIONS:
            return "the rows learned from"
        return "the checkpoint's own" + (f" of {asset!r}" if asset else "")

    @property
    def adaptable(self) -> AdaptedModel:
        return self.network

    def shards(self) -> Sequence[Sequence[nn.Module]]:
        """Each block of SigLIP, the words, and of each layer of either stack what comes before the attention and what
        comes after it. A layer of the vision-language model and the expert's beside it are apart: in `evaluate` they
        belong to two passes, and a pair would stay gathered from one to the other."""
        halves = [half for layer in self.network.mixture.layers for half in layer.halves]
        return [*([block] for block in self.network.vision.encoder.layers), [self.network.embedding], *halves]

    def export(self, folder: Path) -> None:
        """Write a directory in the layout of the checkpoint's, adapter added, with its configuration and tokenizer, and
        its statistics or those of the demonstrations."""
        saving.export(self, Path(folder))

    def write_actor(self, folder: Path) -> bool:
        saving.write(self, folder)
        return True

    def read_actor(self, folder: Path) -> dict[str, Tensor]:
        return saving.read(self, folder)

    @classmethod
    def restore_arguments(cls, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}

    # --- what the network reads

    def _observation(self, inputs: Inputs) -> Observation:
        pixels = []
        for name in self.spec.cameras:
            frame = inputs.frames.get(name)
            if frame is None:
                given = ", ".join(inputs.frames) or "none"
                raise PolicyError(f"the policy reads the camera {name!r}, the inputs have: {given}")
            pixels.append(self.pixels(frame))
        rows, state = len(pixels[0]), self._state(inputs)
        if len(inputs.instruction) != rows:
            raise PolicyError(
                f"pi0 reads an instruction for each row: got {len(inputs.instruction)} for {rows}; add 'instruction' "
                "to policy.reads"
            )
        said = state[:, : self.shown.proprio_dim].cpu() if self.state_in_prompt else None
        tokens, counted = self.prompts.batch(inputs.instruction, said)
        device = state.device
        present = torch.ones(rows, len(pixels), dtype=torch.bool, device=device)
        return Observation(torch.stack(pixels, 1), present, tokens.to(device), counted.to(device), state)

    def pixels(self, frames: Tensor) -> Tensor:
        """A camera's uint8 [B, H, W, 3] to float32 [B, 3, S, S] in -1..1."""
        return pixel_values(self.transforms.frames(frames), self.sizes.vision.image_size, self.resize)

    def _state(self, inputs: Inputs) -> Tensor:
        """[B, A]: proprioception, normalised and filled up."""
        given = self._given(inputs)
        if given is None:  # pi0.5 without a state
            some = next(iter(inputs.frames.values()))
            return torch.zeros(len(some), self.sizes.action_dim, device=some.device)
        known = self.units.state.normalise(self.transforms.state(given))
        return nn.functional.pad(known, (0, self.sizes.action_dim - known.shape[1])).float()

    def _given(self, inputs: Inputs) -> Tensor | None:
        """[B, P] as the environment gives it, where it is read."""
        return vector(inputs, "proprio", self.spec.proprio_dim) if self.spec.proprio_dim else None

    def _normalised(self, actions: Tensor, inputs: Inputs) -> Tensor:
        """[B, H, D] in the environment's units to [B, H, A]."""
        known = self.units.action.normalise(self.transforms.demonstrated(actions.double(), self._given(inputs)))
        return nn.functional.pad(known, (0, self.sizes.action_dim - self.spec.action_dim)).float()

    def _actions(self, x: Tensor, inputs: Inputs) -> Tensor:
        """The chunk [B, C, D] that is executed, in the environment's units, of x [B, H * A]."""
        actions = self.units.action.unnormalise(self._executed(self._latent(x)))
        return self.transforms.executed(actions, self._given(inputs)).float()

    def _executed(self, x: Tensor) -> Tensor:
        """[B, C, D] of [B, H, A]."""
        return x[:, : self.spec.chunk, : self.spec.action_dim]

    def _shaped(self, x: Tensor) -> Tensor:
        """[B, C, D] of [B, C * D]."""
        return x.view(-1, self.spec.chunk, self.spec.action_dim)

    def _latent(self, x: Tensor) -> Tensor:
        """[B, H, A] of [B, H * A]."""
        return x.view(-1, self.sizes.horizon, self.sizes.action_dim)

    # --- suffix, prefix and critic

    def _field(self, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> Field:
        """At x [B, H * A] and times [B]."""
        hidden = self.network.suffix(prefix, state, self._latent(x), t)
        log_std = None if self.noise_net is None else self.noise_net(hidden).flatten(1)
        return Field(self.network.velocity_of(hidden).flatten(1), log_std)

    def _read(self, inputs: Inputs) -> tuple[Prefix, Tensor]:
        """The prefix and the critic's summary, with gradients where the vision-language model is trained."""
        with torch.set_grad_enabled(self.trains_all and torch.is_grad_enabled()):
            seen = self._observation(inputs)
            prefix = self.network.prefix(seen)
        return prefix, self._summary(prefix, seen.state)

    def _known(self, trace: Mapping[str, Tensor], state: Tensor) -> tuple[Prefix, Tensor] | None:
        """What `precompute` found."""
        if "keys" not in trace:
            return None
        cache = Cache(trace["keys"].unbind(1), trace["values"].unbind(1))
        prefix = Prefix(cache, trace["present"], torch.empty(0))
        return prefix, self._summary(prefix, state) if self.reads_suffix else trace["summary"]

    def _summary(self, prefix: Prefix, state: Tensor) -> Tensor:
        """[B, W] float32: what the critic reads beside the state."""
        with torch.set_grad_enabled(self.critic_trains_network and torch.is_grad_enabled()):
            if not self.reads_suffix:
                return _mean_of(prefix)
            rows = len(state)
            x = torch.zeros(rows, self.sizes.horizon, self.sizes.action_dim, device=state.device)
            return self.network.suffix(prefix, state, x, torch.ones(rows, device=state.device)).float().mean(1)

    def _value_of(self, summary: Tensor, state: Tensor) -> Tensor:
        return self.value_head(torch.cat([summary, state.float()], 1)).squeeze(-1)

    # --- what is built

    def _check_spec(self, state_in_prompt: bool) -> None:
        spec, sizes = self.shown, self.sizes
        if not 1 <= len(spec.cameras) <= SLOTS:
            raise PolicyError(f"pi0 takes one to {SLOTS} cameras, the task gives {len(spec.cameras)}: set env.cameras")
        if spec.chunk > sizes.horizon:
            raise PolicyError(
                f"the checkpoint predicts {sizes.horizon} actions, and policy.chunk is {spec.chunk}: at most that, or "
                "set policy.horizon for a policy that learns from demonstrations to predict so many"
            )
        if max(spec.action_dim, spec.proprio_dim) > sizes.action_dim:
            raise PolicyError(
                f"the checkpoint has {sizes.action_dim} numbers for actions and states, the task has {spec.action_dim} "
                f"and {spec.proprio_dim}"
            )
        reads_state = state_in_prompt or not sizes.adaptive
        if state_in_prompt and not sizes.adaptive:
            raise PolicyError(
                "the checkpoint is a pi0, which has the state beside the prompt: set state_in_prompt to false"
            )
        if reads_state and not spec.proprio_dim:
            raise PolicyError("the policy reads the robot's state: add 'proprio' to policy.reads")

    def _read_units(self, asset: str) -> StoredUnits:
        spec = self.shown
        if asset == DEMONSTRATIONS:
            return StoredUnits(identity(spec.proprio_dim, spec.action_dim))
        if self.layout == "lerobot":
            units = read_lerobot(self.source)
        else:
            units = read_openpi(self.source, asset, quantile=self.sizes.adaptive)
        return StoredUnits(first_of(units, spec.proprio_dim, spec.action_dim))


def _mean_of(prefix: Prefix) -> Tensor:
    """[B, W] float32: the mean output of the tokens that are present."""
    counted = prefix.present[..., None]
    return (prefix.hidden.float() * counted).sum(1) / counted.sum(1)
