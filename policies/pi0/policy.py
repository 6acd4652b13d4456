"""pi0 and pi0.5 as a policy: a chunk is the result of an integration; some of its steps are sampled and scored.

Flow-noise, the learned deviation of a drawn step, is a small separate network.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from policies.capabilities import Normalised
from policies.contract import Action, Contrast, Evaluation, Inputs, PolicyError, PolicySpec
from policies.cuda_graphs import replayed, replaying
from policies.denoising import Denoising, Draws, Field, stacked
from policies.files import CONFIG, shown
from policies.layers import checked_noise, counted_mean, mlp, only_counted
from policies.lora import AdaptedModel, AdaptedPolicy
from policies.pi0.adapters import attach, attach_saved
from policies.pi0.checkpoint import (
    Sources,
    check_numbers,
    find_sources,
    load_network,
    ordered_cameras,
)
from policies.pi0.config import with_horizon
from policies.pi0.inputs import BLACK, OF_LEROBOT_04, Prompts, pixel_values
from policies.pi0.mixture import Cache
from policies.pi0.network import Observation, Prefix
from policies.pi0.normalisation import (
    DEMONSTRATIONS,
    StoredUnits,
    demonstrated,
    first_of,
    identity,
    normalisations,
    openpi_default,
    openpi_statistics,
    read_lerobot,
    read_openpi,
)
from policies.pi0.options import AUTO, Pi0Options
from policies.pi0.processors import ACTION, PRE, STATE
from policies.small.encoders import vector
from policies.transforms import Differences, Transforms


class NoiseNet(nn.Module):
    """log s = (1 - u) / 2 log s_min + (1 + u) / 2 log s_max with u = tanh(MLP(h)), of the expert's outputs h.

    The bounds are the standard deviations that are possible (RLinf's explore_noise_net.py, ReinFlow's ppoflow.py).
    """

    def __init__(self, width: int, numbers: int, bounds: Sequence[float], widths: Sequence[int]) -> None:
        super().__init__()
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
            raise PolicyError(f"noise_bounds must be two standard deviations, 0 < least <= most, got {list(bounds)}")
        self.low, self.high = (math.log(bound) for bound in bounds)
        self.net = mlp(width, widths, numbers, last_gain=0.01)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., w] to log-standard deviations [.., A]: in the middle of the bounds at first."""
        u = torch.tanh(self.net(hidden.float()))
        return self.low + (self.high - self.low) * (u + 1) / 2


# --- the policy

SLOTS = 3
"""Images that every checkpoint was trained with. Those of absent cameras nothing sees: they are not computed."""
NOISE_WIDTHS = (128, 64)
BFLOAT16_TOLERANCE = 2e-2
OF_THE_VLM = ("vision.", "projector.", "embedding.", "mixture.vlm.")
"""Beginnings of the names of its tensors."""


@dataclass(frozen=True)
class LearnedTimes:
    """Imitation's times are offset + scale Beta(alpha, 1): a uniform number to the power 1 / alpha is such a Beta.
    openpi's numbers are the defaults; LeRobot's config.json may have others."""

    alpha: float = 1.5
    scale: float = 0.999
    offset: float = 0.001

    @classmethod
    def read(cls, source: Sources) -> LearnedTimes:
        """Distribution of times in a checkpoint's description.

        Raises `PolicyError` for numbers outside 0 to 1, or another Beta.
        """
        if source.layout == "openpi":
            return cls()
        named = {f"time_sampling_{name}": name for name in ("scale", "offset")} | {"time_sampling_beta_alpha": "alpha"}
        found = {own: source.config[name] for name, own in named.items() if name in source.config}
        beta, path = source.config.get("time_sampling_beta_beta", 1.0), source.described / CONFIG
        if beta != 1 or not all(type(value) in (int, float) and 0 <= value <= 100 for value in found.values()):
            raise PolicyError(
                f"{path}: times are drawn from Beta(alpha, 1) here, with time_sampling_beta_alpha, _scale and _offset "
                f"of 0 to 100; got {shown(found)} and time_sampling_beta_beta {shown(beta)}"
            )
        times = cls(**found)
        if not times.alpha > 0 or times.offset + times.scale > 1.001:
            raise PolicyError(f"{path}: time_sampling_* say times beyond 0..1: {times}")
        return times

    def of(self, uniform: Tensor) -> Tensor:
        """[B] to [B]."""
        return self.offset + self.scale * uniform ** (1 / self.alpha)


class Pi0(AdaptedPolicy):
    """Reads frames, the instruction and proprioception. Which of the two it is its weights say.

    `policies.denoising` draws and scores the steps, with x of H * A numbers; the log-prob is that of the C * D executed
    ones. The trace is that of `Denoising.run`.

    Where the vision-language model is frozen, `precompute` finds its keys and values, and an update runs the expert
    alone: 2 * layers * heads * P * d numbers a row, which `cache_prefix` False spares.

    The value head reads the normalised state, and the mean over the prefix's present tokens, or over the expert's
    outputs for the actions at x = 0, t = 1: the same in rollout and update, whatever step is scored.
    """

    kind = "pi0"

    def __init__(self, spec: PolicySpec, options: Pi0Options) -> None:
        """Raises `PolicyError` where the checkpoint, the task and the options do not fit together."""
        super().__init__()
        self.source = source = find_sources(options.checkpoint, options.adapter, options.weights)
        self.options = options = options.with_checkpoint(source)
        self.layout = source.layout
        self.transforms = _with_relative(source, Transforms(options.transforms), spec.action_dim)
        if options.asset == DEMONSTRATIONS:
            self.transforms.check_demonstrated_units()
        self.spec, self.shown = spec, self.transforms.spec(spec)  # shown: to the network
        self.network = load_network(source.weights, options.dtype, source.described)
        self.config = dict(source.config)
        if spec.horizon:  # no weight depends on it
            self.network.sizes = replace(self.network.sizes, horizon=spec.horizon)
            self.config = with_horizon(self.config, spec.horizon)
        self.sizes = self.network.sizes
        self._check_spec(options.state_in_prompt)
        self.cameras = spec.cameras
        if self.layout == "lerobot":
            self.cameras = ordered_cameras(source, spec.cameras)
            if options.asset != DEMONSTRATIONS:
                check_numbers(source, self.shown.action_dim, self.shown.proprio_dim)
        self.spec = spec = replace(spec, horizon=self.sizes.horizon)
        convention: Any = options.prompt or self.layout
        if self.sizes.adaptive and not options.state_in_prompt and convention != "openpi":
            raise PolicyError(
                f"a pi0.5 with prompts of {convention} has the state in them: set state_in_prompt to true, or prompt "
                "to openpi"
            )
        filled = source.config.get("max_state_dim", self.sizes.action_dim)
        length = self.sizes.prompt_len if source.processors is None else source.processors.prompt_length
        self.prompts = Prompts(source.tokenizer, length, convention, filled)
        self.units = self._read_units()
        self.times = LearnedTimes.read(source)
        self.resize: Any = options.resize
        self.sides = OF_LEROBOT_04 if convention == "lerobot-0.4" else BLACK
        self.trains_all = self._choose_trained()
        if options.dtype != "float32":
            self.ratio_tolerance = BFLOAT16_TOLERANCE
        inner, numbers = self.sizes.expert.width, self.sizes.horizon * self.sizes.action_dim
        executed = self._executed(torch.arange(numbers).view(1, self.sizes.horizon, -1)).flatten().tolist()
        assert options.steps is not None, "the checkpoint says it"
        self.denoising = Denoising(
            numbers,
            options.steps,
            options.noise_level,
            scored=options.scored,
            reduction=options.step_reduction,
            executed=executed,
            start_noise=options.start_noise,
        )
        self.noise_dim = self.denoising.noise_dim
        learned = options.scored == "learned"
        self.noise_net = NoiseNet(inner, self.sizes.action_dim, options.noise_bounds, NOISE_WIDTHS) if learned else None
        self.reads_suffix = options.critic == "suffix"
        read = inner if self.reads_suffix else self.sizes.vlm.width
        self.value_head = mlp(read + self.sizes.action_dim, options.value_widths, 1, last_gain=1.0)

    # --- the contract

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    @replaying()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        seen = self._observation(inputs)
        x, log_prob, value, trace = self._decided(seen, self.denoising.draws(noise, len(seen.state)))
        return Action(self._actions(x, inputs), self._shaped(log_prob), value, trace)

    @replayed
    def _decided(self, seen: Observation, draws: Draws) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """The chunk [B, H * A], log-probs [B, E], values [B] and the trace."""
        prefix = self.network.prefix(seen)
        times = self.denoising.times.expand(len(seen.state), -1)
        x, trace, field = self.denoising.run(draws, lambda x, i: self._field(prefix, seen.state, x, times[:, i]))
        value = self._value_of(self._summary(prefix, seen.state), seen.state)
        return x, self.denoising.log_prob(trace, field), value, trace

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
        if self.trains_all or not self.options.cache_prefix:
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
        t = self.times.of(uniform[:, 0]).float()
        v = self.network.joint_velocity(seen, t[:, None, None] * x1 + (1 - t[:, None, None]) * wanted, t)
        return counted_mean((v - (x1 - wanted)).square()[..., : self.spec.action_dim], counted)

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        if self.options.asset == DEMONSTRATIONS:
            nothing = torch.zeros(1, 0)  # proprioception may be recorded that the policy does not read
            state = self.transforms.state(proprio) if proprio is not None and self.spec.proprio_dim else nothing
            said = self.transforms.demonstrated(actions[:, None], proprio)[:, 0]
            self.units.fill(demonstrated(state, said))

    own_units = f"asset {DEMONSTRATIONS}"

    def normalised_numbers(self, inputs: Inputs, actions: Tensor) -> Sequence[Normalised]:
        given = self._given(inputs)
        said = self.transforms.demonstrated(actions[:, None].double(), given)[:, 0]
        found = [("action", said, self.units.action)]
        if given is not None:
            found.append(("proprio", self.transforms.state(given), self.units.state))
        return [
            Normalised(name, values, *(torch.broadcast_to(end, values.shape[1:]) for end in units.ends))
            for name, values, units in found
        ]

    def architecture(self) -> dict[str, Any]:
        return self.options.as_data()

    @property
    def network_image_size(self) -> int:
        return self.sizes.vision.image_size

    @property
    def normalised_by(self) -> str:
        asset = self.options.asset
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

    # --- what the network reads

    def _observation(self, inputs: Inputs) -> Observation:
        pixels = []
        for name in self.cameras:
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
        said = state[:, : self.shown.proprio_dim].cpu() if self.options.state_in_prompt else None
        tokens, counted = self.prompts.batch(inputs.instruction, said)
        device = state.device
        present = torch.ones(rows, len(pixels), dtype=torch.bool, device=device)
        return Observation(torch.stack(pixels, 1), present, tokens.to(device), counted.to(device), state)

    def pixels(self, frames: Tensor) -> Tensor:
        """A camera's uint8 [B, H, W, 3] to float32 [B, 3, S, S] in -1..1."""
        return pixel_values(self.transforms.frames(frames), self.sizes.vision.image_size, self.resize, self.sides)

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
        """Result of `precompute`."""
        if "keys" not in trace:
            return None
        cache = Cache(trace["keys"].unbind(1), trace["values"].unbind(1))
        prefix = Prefix(cache, trace["present"], torch.empty(0))
        return prefix, self._summary(prefix, state) if self.reads_suffix else trace["summary"]

    def _summary(self, prefix: Prefix, state: Tensor) -> Tensor:
        """[B, W] float32: what the critic reads beside the state."""
        with torch.set_grad_enabled(self.options.critic_trains_network and torch.is_grad_enabled()):
            if not self.reads_suffix:
                return _mean_of(prefix)
            rows = len(state)
            x = torch.zeros(rows, self.sizes.horizon, self.sizes.action_dim, device=state.device)
            return self.network.suffix(prefix, state, x, torch.ones(rows, device=state.device)).float().mean(1)

    def _value_of(self, summary: Tensor, state: Tensor) -> Tensor:
        return self.value_head(torch.cat([summary, state.float()], 1)).squeeze(-1)

    # --- what is built

    def _check_spec(self, state_in_prompt: bool) -> None:
        spec, sizes, where = self.shown, self.sizes, self.source.described
        if not 1 <= len(spec.cameras) <= SLOTS:
            raise PolicyError(f"pi0 takes one to {SLOTS} cameras, the task gives {len(spec.cameras)}: set env.cameras")
        if spec.chunk > sizes.horizon:
            raise PolicyError(
                f"{where}: the checkpoint predicts {sizes.horizon} actions, and policy.chunk is {spec.chunk}: at most "
                "that, or set policy.horizon for a policy that learns from demonstrations to predict so many"
            )
        if max(spec.action_dim, spec.proprio_dim) > sizes.action_dim:
            raise PolicyError(
                f"{where}: the checkpoint has {sizes.action_dim} numbers for actions and states, the task has "
                f"{spec.action_dim} and {spec.proprio_dim}: set env.control_mode to one of fewer, choose numbers of "
                "the state with policy.options.transforms, or leave proprio out of policy.reads"
            )
        reads_state = state_in_prompt or not sizes.adaptive
        if state_in_prompt and not sizes.adaptive:
            raise PolicyError(
                f"{where}: the checkpoint is a pi0, which has the state beside the prompt: set state_in_prompt to false"
            )
        said = self.config.get("discrete_state_input")
        if sizes.adaptive and said is not None and said != state_in_prompt:
            config = where / CONFIG
            raise PolicyError(f"{config}: discrete_state_input is {shown(said)}: set state_in_prompt to the same")
        if reads_state and not spec.proprio_dim:
            raise PolicyError("the policy reads the robot's state: add 'proprio' to policy.reads")

    def _choose_trained(self) -> bool:
        """Hang adapters on the network or freeze what is not trained; True if the vision-language model is trained."""
        options, network = self.options, self.network
        if self.source.adapter is not None:
            attach_saved(network, self.source.adapter, any_base=options.any_base)
            trained = (name for name, parameter in network.named_parameters() if parameter.requires_grad)
            return any(name.startswith(OF_THE_VLM) for name in trained)
        if options.lora_rank:
            attach(network, options.lora_rank, float(options.lora_alpha) or options.lora_rank, options.lora_parts)
            return bool({"vlm", "vision"} & set(options.lora_parts))
        for name, parameter in network.named_parameters():
            parameter.requires_grad_(options.train == "all" or not name.startswith(OF_THE_VLM))
        return options.train == "all"

    def _read_units(self) -> StoredUnits:
        """The units of the checkpoint's statistics. Where `normalisation` is auto, the options say afterwards which."""
        spec, source, asset, normalisation = self.shown, self.source, self.options.asset, self.options.normalisation
        if self.layout == "lerobot" and (normalisation != AUTO or asset not in ("", DEMONSTRATIONS)):
            raise PolicyError(
                f"normalisation and asset are of openpi's checkpoints, and the processors of {source.described} say "
                f"both: leave them out; got {normalisation!r} and {asset!r}"
            )
        if asset == DEMONSTRATIONS:
            return StoredUnits(identity(spec.proprio_dim, spec.action_dim))
        if self.layout == "lerobot":
            units = read_lerobot(source.described)
            for key, of, size in ((STATE, units.state, spec.proprio_dim), (ACTION, units.action, spec.action_dim)):
                if of.centre.dim() and size and len(of.centre) != size:
                    raise PolicyError(
                        f"{source.described}: the processors' statistics of {key} are of {len(of.centre)} numbers, the "
                        f"task's has {size}: take a checkpoint of this robot, choose numbers with "
                        f"policy.options.transforms, or set policy.options.asset to {DEMONSTRATIONS}"
                    )
            return StoredUnits(first_of(units, source.described, spec.proprio_dim, spec.action_dim))
        if normalisation == AUTO:
            possible = normalisations(openpi_statistics(source.described, asset)[1])
            normalisation = possible[0] if len(possible) == 1 else openpi_default(self.sizes.adaptive)
        self.options = replace(self.options, normalisation=normalisation)
        units = read_openpi(source.described, asset, quantile=normalisation == "quantile")
        return StoredUnits(first_of(units, source.described, spec.proprio_dim, spec.action_dim))


def _with_relative(source: Sources, said: Transforms, action_dim: int) -> Transforms:
    """With what the checkpoint's processors do to actions, next to the network. Raises `PolicyError` where it is said
    twice."""
    numbers = source.processors.relative_dims(action_dim) if source.processors is not None else ()
    if not numbers:
        return said
    for entry in said.entries:
        if isinstance(entry, Differences):
            raise PolicyError(
                f"{source.described / PRE} says already that actions are relative to the state: leave {entry.kind} out "
                "of policy.options.transforms"
            )
    return Transforms([*said.as_data(), {"kind": "relative_actions", "numbers": list(numbers)}])


def _mean_of(prefix: Prefix) -> Tensor:
    """[B, W] float32: the mean output of the tokens that are present."""
    counted = prefix.present[..., None]
    return (prefix.hidden.float() * counted).sum(1) / counted.sum(1)
