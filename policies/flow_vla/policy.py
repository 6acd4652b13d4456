"""Flow-matching vision-language-action models as policies: a chunk is the result of an integration, and some of its
steps are sampled and scored.

Flow-noise, the learned deviation of a drawn step, is a small separate network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from policies.capabilities import LeftOver
from policies.contract import Action, Contrast, Evaluation, Inputs, PolicyError, PolicySpec
from policies.cuda_graphs import replayed, replaying
from policies.denoising import Denoising, Draws, Field, stacked
from policies.files import CONFIG, shown
from policies.flow_vla.network import OF_THE_VLM, Cache, Observation, Prefix, mean_of
from policies.flow_vla.options import with_horizon
from policies.flow_vla.real_time import Guide, weights
from policies.layers import checked_noise, counted_mean, mlp, only_counted
from policies.lerobot.features import Described
from policies.lerobot.processors import PRE
from policies.lora import AdaptedModel, AdaptedPolicy
from policies.robot_policy import RobotPolicy
from policies.small.encoders import camera_frames
from policies.transforms import Differences, Transforms
from policies.units import DEMONSTRATIONS

NOISE_WIDTHS = (128, 64)
BFLOAT16_TOLERANCE = 2e-2


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


@dataclass(frozen=True)
class LearnedTimes:
    """Imitation's times are offset + scale Beta(alpha, 1): a uniform number to the power 1 / alpha is such a Beta.
    openpi's numbers are the defaults; LeRobot's config.json may have others."""

    alpha: float = 1.5
    scale: float = 0.999
    offset: float = 0.001

    @classmethod
    def read(cls, folder: Path, config: Mapping[str, Any]) -> LearnedTimes:
        """Distribution of times in the config.json of LeRobot's folder.

        Raises `PolicyError` for numbers outside 0 to 1, or another Beta.
        """
        named = {f"time_sampling_{name}": name for name in ("scale", "offset")} | {"time_sampling_beta_alpha": "alpha"}
        found = {own: config[name] for name, own in named.items() if name in config}
        beta, path = config.get("time_sampling_beta_beta", 1.0), folder / CONFIG
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


class FlowVLA(RobotPolicy, AdaptedPolicy):
    """Reads frames, the instruction and proprioception. A subclass builds its network, its units and its tokenizer.

    `policies.denoising` draws and scores the steps, with x of H * A numbers; the log-prob is that of the C * D executed
    ones. The trace is that of `Denoising.run`.

    Where the vision-language model is frozen, `precompute` finds its keys and values of images and prompt, and an
    update runs what is trained alone: 2 * layers * heads * P * d numbers a row, which `cache_prefix` False spares.

    The value head reads the normalised state, and the mean over the prefix's present tokens, or over the expert's
    outputs for the actions at x = 0, t = 1: the same in rollout and update, whatever step is scored.
    """

    source: Any
    """The checkpoint's folders: `policies.checkpoint_folders.DescribedFolders`, with what the subclass adds."""
    options: Any
    """`FlowVLAOptions`, with those of the subclass."""
    network: Any
    """`FlowNetwork`."""
    sizes: Any
    """Sizes of the network: `horizon` and `action_dim` are those of a chunk."""
    state_width: int
    """S: numbers of a state, with the zeros that fill it up."""
    config: dict[str, Any]
    """The network's config.json."""
    shown: PolicySpec
    """The spec as the network is shown it: after the transforms."""
    times: LearnedTimes
    trains_prefix: bool
    """True if what the prefix is computed by is trained."""
    reads_suffix: bool
    """True if the critic reads the expert's outputs."""

    def __init__(self, spec: PolicySpec, source: Any, options: Any) -> None:
        """Raises `PolicyError` where the checkpoint, the task and the options do not fit together."""
        super().__init__()
        self.source, self.options = source, options.with_checkpoint(source)
        self.transforms = with_relative(source, Transforms(options.transforms), spec.action_dim)
        if options.asset == DEMONSTRATIONS:
            self.transforms.check_demonstrated_units()
        self.spec, self.shown = spec, self.transforms.spec(spec)

    def set_network(self, network: Any) -> None:
        """Have this network, which predicts as many actions as the spec or else the checkpoint says. Raises
        `PolicyError` where more are executed."""
        self.network, self.config = network, dict(self.source.config)
        if self.spec.horizon:  # no weight depends on it
            network.sizes = replace(network.sizes, horizon=self.spec.horizon)
            self.config = with_horizon(self.config, self.spec.horizon)
        self.sizes = network.sizes
        if self.spec.chunk > self.sizes.horizon:
            raise PolicyError(
                f"{self.source.described}: the checkpoint predicts {self.sizes.horizon} actions, and policy.chunk is "
                f"{self.spec.chunk}: at most that, or set policy.horizon for a policy that learns from demonstrations "
                "to predict so many"
            )
        self.spec = replace(self.spec, horizon=self.sizes.horizon)

    def choose_trained(self, adapters: Any, trains: Callable[[str], bool]) -> None:
        """Hang adapters on the network, by the functions `attach` and `attach_saved` of the module `adapters`; or else
        freeze the tensors for whose names `trains` is False."""
        options, network = self.options, self.network
        if self.source.adapter is not None:
            adapters.attach_saved(network, self.source.adapter, any_base=options.any_base)
        elif options.lora_rank:
            alpha = float(options.lora_alpha) or options.lora_rank
            adapters.attach(network, options.lora_rank, alpha, options.lora_parts)
        else:
            for name, parameter in network.named_parameters():
                parameter.requires_grad_(trains(name))
        trained = (name for name, parameter in network.named_parameters() if parameter.requires_grad)
        self.trains_prefix = any(name.startswith(OF_THE_VLM) for name in trained)

    def pixels(self, frames: Tensor) -> Tensor:
        """A camera's uint8 [B, H, W, 3] to the network's float32 [B, 3, height, width] in -1..1."""
        raise NotImplementedError

    def words(self, instructions: tuple[str, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens int64 [B, L] of the prompts, and bool [B, L] which of them are the prompt's; `state` [B, S]."""
        raise NotImplementedError

    def build_sampler(self, width: int, prefix_width: int) -> None:
        """Make the denoising, the network of its deviations and the critic, for an expert and a vision-language model
        of these widths."""
        options, sizes = self.options, self.sizes
        if options.dtype != "float32":
            self.ratio_tolerance = BFLOAT16_TOLERANCE
        numbers = sizes.horizon * sizes.action_dim
        executed = self._executed(torch.arange(numbers).view(1, sizes.horizon, -1)).flatten().tolist()
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
        self.noise_net = NoiseNet(width, sizes.action_dim, options.noise_bounds, NOISE_WIDTHS) if learned else None
        self.reads_suffix = options.critic == "suffix"
        read = width if self.reads_suffix else prefix_width
        self.value_head = mlp(read + self.state_width, options.value_widths, 1, last_gain=1.0)

    # --- the contract

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    @replaying()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        seen = self._observation(inputs)
        x, log_prob, value, trace = self._decided(seen, self.denoising.draws(noise, len(seen.state)))
        return Action(self._actions(self._executed(self._latent(x)), inputs), self._shaped(log_prob), value, trace)

    @replayed
    def _decided(self, seen: Observation, draws: Draws) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """The chunk [B, H * A], log-probs [B, E], values [B] and the trace."""
        prefix = self.network.prefix(seen)
        whole = self.network.with_state(prefix, seen.state)
        times = self.denoising.times.expand(len(seen.state), -1)
        x, trace, field = self.denoising.run(draws, lambda x, i: self._field(whole, seen.state, x, times[:, i]))
        value = self._value_of(self._summary(prefix, whole, seen.state), seen.state)
        return x, self.denoising.log_prob(trace, field), value, trace

    @torch.no_grad()
    def predict(self, inputs: Inputs, noise: Tensor | None) -> Tensor:
        nothing = torch.zeros(len(inputs.instruction), 0, self.spec.action_dim)
        there = torch.zeros(len(nothing), dtype=torch.bool)
        return self.continue_chunk(inputs, noise, LeftOver(nothing, there, delay=0))

    @torch.no_grad()
    def continue_chunk(self, inputs: Inputs, noise: Tensor | None, left: LeftOver) -> Tensor:
        """The denoising is guided to the left-over (`policies.flow_vla.real_time`), with weights that fall to 0 at its
        end."""
        seen = self._observation(inputs)
        prefix = self.network.with_state(self.network.prefix(seen), seen.state)
        times = self.denoising.times.expand(len(seen.state), -1)
        guide, known = self._guide(left, inputs), self.denoising.times.tolist()

        def field(x: Tensor, i: int) -> Field:
            def plain(at: Tensor) -> Field:
                return self._field(prefix, seen.state, at, times[:, i])

            return plain(x) if guide is None else guide.guided(plain, x, known[i])

        x, *_ = self.denoising.run(self.denoising.draws(noise, len(seen.state)), field)
        return self._actions(self._latent(x)[..., : self.spec.action_dim], inputs)

    def _guide(self, left: LeftOver, inputs: Inputs) -> Guide | None:
        """None where no row has a left-over."""
        rows, steps, _ = left.actions.shape
        if not steps or not bool(left.there.any()):
            return None
        horizon, width = self.sizes.horizon, self.sizes.action_dim
        steps = min(steps, horizon)
        target = torch.zeros(rows, horizon, width, device=left.actions.device)
        target[:, :steps] = self._normalised(left.actions[:, :steps], inputs)
        counted = weights(self.options.rtc_schedule, left.delay, steps, horizon).to(target.device)
        counted = counted[:, None].expand(horizon, width) * left.there[:, None, None]
        return Guide(target.flatten(1), counted.flatten(1), self.options.rtc_guidance, left.jacobian)

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
        prefix = self.network.prefix(seen)
        whole = self.network.with_state(prefix, seen.state) if self.reads_suffix else prefix
        return self._value_of(self._summary(prefix, whole, seen.state), seen.state)

    @torch.no_grad()
    def precompute(self, inputs: Inputs) -> dict[str, Tensor]:
        """Keys and values [B, layers, heads, P, d] of the prefix, `present` bool [B, P], and `summary` [B, W] where the
        critic reads it; nothing where the vision-language model is trained, or `cache_prefix` is False."""
        if self.trains_prefix or not self.options.cache_prefix:
            return {}
        prefix = self.network.prefix(self._observation(inputs))
        keys, values = (torch.stack(part, 1) for part in (prefix.cache.keys, prefix.cache.values))
        found = {"keys": keys, "values": values, "present": prefix.present}
        return found if self.reads_suffix else found | {"summary": mean_of(prefix)}

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

    def shards(self) -> Sequence[Sequence[nn.Module]]:
        """Each block of the vision transformer, the words, and of each layer of either stack what comes before the
        attention and what comes after it. A layer of the vision-language model and the expert's beside it are apart: in
        `evaluate` they belong to two passes, and a pair would stay gathered from one to the other."""
        halves = [half for layer in self.network.mixture.layers for half in layer.halves]
        return [*([block] for block in self.network.vision.encoder.layers), [self.network.embedding], *halves]

    @property
    def adaptable(self) -> AdaptedModel:
        return self.network

    # --- what the network reads

    def _observation(self, inputs: Inputs) -> Observation:
        pixels = [self.pixels(camera_frames(inputs, name)) for name in self.cameras]
        rows, state = len(pixels[0]), self._state(inputs)
        if len(inputs.instruction) != rows:
            raise PolicyError(
                f"{self.kind} reads an instruction for each row: got {len(inputs.instruction)} for {rows}; add "
                "'instruction' to policy.reads"
            )
        tokens, counted = self.words(inputs.instruction, state)
        device = state.device
        present = torch.ones(rows, len(pixels), dtype=torch.bool, device=device)
        return Observation(torch.stack(pixels, 1), present, tokens.to(device), counted.to(device), state)

    def _state(self, inputs: Inputs) -> Tensor:
        """[B, S]: proprioception, normalised and filled up."""
        given = self._given(inputs)
        if given is None:  # pi0.5 without a state
            some = next(iter(inputs.frames.values()))
            return torch.zeros(len(some), self.state_width, device=some.device)
        known = self.units.state.normalise(self.transforms.state(given))
        return nn.functional.pad(known, (0, self.state_width - known.shape[1])).float()

    def _normalised(self, actions: Tensor, inputs: Inputs) -> Tensor:
        """[B, H, D] in the environment's units to [B, H, A], filled up with zeros."""
        missing = self.sizes.action_dim - self.spec.action_dim
        return nn.functional.pad(super()._normalised(actions, inputs), (0, missing))

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
        """At x [B, H * A] and times [B]; the prefix is that of `FlowNetwork.with_state`."""
        hidden = self.network.suffix(prefix, state, self._latent(x), t)
        log_std = None if self.noise_net is None else self.noise_net(hidden).flatten(1)
        return Field(self.network.velocity_of(hidden).flatten(1), log_std)

    def _read(self, inputs: Inputs) -> tuple[Prefix, Tensor]:
        """The prefix with the state and the critic's summary, with gradients where they are trained."""
        with torch.set_grad_enabled(self.trains_prefix and torch.is_grad_enabled()):
            seen = self._observation(inputs)
            prefix = self.network.prefix(seen)
        whole = self.network.with_state(prefix, seen.state)
        return whole, self._summary(prefix, whole, seen.state)

    def _known(self, trace: Mapping[str, Tensor], state: Tensor) -> tuple[Prefix, Tensor] | None:
        """The same from the result of `precompute`."""
        if "keys" not in trace:
            return None
        cache = Cache(trace["keys"].unbind(1), trace["values"].unbind(1))
        prefix = Prefix(cache, trace["present"], torch.empty(0))
        whole = self.network.with_state(prefix, state)
        return whole, self._summary(prefix, whole, state) if self.reads_suffix else trace["summary"]

    def _summary(self, prefix: Prefix, whole: Prefix, state: Tensor) -> Tensor:
        """[B, W] float32: what the critic reads beside the state."""
        with torch.set_grad_enabled(self.options.critic_trains_network and torch.is_grad_enabled()):
            if not self.reads_suffix:
                return mean_of(prefix)
            rows = len(state)
            x = torch.zeros(rows, self.sizes.horizon, self.sizes.action_dim, device=state.device)
            return self.network.suffix(whole, state, x, torch.ones(rows, device=state.device)).float().mean(1)

    def _value_of(self, summary: Tensor, state: Tensor) -> Tensor:
        return self.value_head(torch.cat([summary, state.float()], 1)).squeeze(-1)


def with_relative(source: Described, said: Transforms, action_dim: int) -> Transforms:
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
