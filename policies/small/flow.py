"""A small flow-matching policy, trainable by reinforcement learning from scratch, on states or on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies import denoising
from policies.action_range import ActionRange
from policies.capabilities import Normalised
from policies.contract import Action, Contrast, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.denoising import Denoising, Field
from policies.layers import checked_noise, checked_widths, counted_mean, mlp, only_counted, orthogonal, time_embedding
from policies.policy_kind import PolicyKind
from policies.small.encoders import CHANNELS, ENCODERS, Encoder, HistoryFormat, Normalizer, present

TIME_DIM = 32
"""Width of the time embedding."""


class VelocityNet(nn.Module):
    """v(x, t, features) with t on the grid of the denoising steps. D numbers per row, H first-layer units.

    The network says a centre c(x, t, features), in units of the action that it denoises, and the velocity is

        v = ((1 - s) x - c) / (s + (1 - s) t),    s = start_std

    For a constant c that is the velocity of the straight path x_t = (s + (1 - s) t) x_1 + (1 - t) c: whatever
    the number of steps, the ODE takes the noise x_1 exactly to c + s x_1. Why so: an untrained network (c is
    about 0) then acts with mean 0 and standard deviation s, which is what learning from scratch needs, and
    what the network says moves the action by as much, from the first update on.

    The two usual choices are its ends. s = 1 is velocity prediction, which would start from actions of
    standard deviation 1. s = 0 is prediction of the action, v = (x - c) / t, whose last step cancels all
    earlier noise: an untrained policy would learn nothing from the other steps, and the weight 1 / t makes
    the last step's gradient dominate. The denominator is never below s, so v is as well conditioned as c.
    """

    embedding: Tensor
    spread: Tensor

    def __init__(self, size: int, features: int, widths: Sequence[int], steps: int, start_std: float) -> None:
        super().__init__()
        t = denoising.timesteps(steps)[:-1]
        self.contraction = 1 - start_std
        # Derived from the architecture, so not saved.
        self.register_buffer("embedding", time_embedding(t, TIME_DIM).float(), persistent=False)
        self.register_buffer("spread", (start_std + (1 - start_std) * t).float(), persistent=False)
        # One linear layer on (x, time, features) as three, so that a decision embeds times and features once
        # and each denoising step only x.
        self.from_x = orthogonal(nn.Linear(size, widths[0]), 1.0)
        self.from_time = orthogonal(nn.Linear(TIME_DIM, widths[0], bias=False), 1.0)
        self.from_features = orthogonal(nn.Linear(features, widths[0], bias=False), 1.0)
        self.rest = mlp(widths[0], widths[1:], size, last_gain=0.01, activation=nn.SiLU)

    def context(self, features: Tensor, step: Tensor) -> Tensor:
        """Features [B, F], steps [B, K] or [K] to [B, K, H]: the part of the first layer that knows no x."""
        return self.from_features(features)[:, None] + self.from_time(self.embedding[step])

    def forward(self, x: Tensor, context: Tensor, step: int | Tensor) -> Tensor:
        """The velocity at x [.., D] in the given step (int64 [..], or one for all), context [.., H] alike."""
        centre = self.rest(functional.silu(self.from_x(x) + context))
        return (self.contraction * x - centre) / self.spread[step][..., None]


class StateCritic(nn.Module):
    """[B] the value of the simulator's present state, with separate statistics and a separate network.

    Earlier states would add nothing: the simulator's next state depends on the present one alone.
    """

    def __init__(self, spec: PolicySpec, widths: Sequence[int]) -> None:
        super().__init__()
        if spec.state_dim < 1:
            raise PolicyError("a critic on states needs the policy to read the state: add it to policy.reads")
        self.state_dim, self.observations = spec.state_dim, spec.observations
        self.normalizer = Normalizer(spec.state_dim)
        self.net = mlp(spec.state_dim, widths, 1, last_gain=1.0)

    def forward(self, inputs: Inputs) -> Tensor:
        return self.net(self.seen(inputs)).squeeze(-1)

    def observe(self, inputs: Inputs) -> None:
        self.normalizer.observe(present(inputs, "state", self.state_dim, self.observations))

    def seen(self, inputs: Inputs) -> Tensor:
        """[B, S] the present state in its deviations, as the network reads it."""
        return self.normalizer(present(inputs, "state", self.state_dim, self.observations))


class FlowPolicy(Policy):
    """Denoises noise x^(0) to a chunk x^(N) in N steps; stochastic ones among them have a density (flow-SDE).

    By default one step k of each row is stochastic, all others follow the ODE, and the log-prob is that of
    step k: a mixed ODE-SDE process that costs one velocity forward to score (pi-RL, arXiv 2510.25889). With
    `joint`, every step is stochastic and the elementwise log-probs of the N steps are summed. In neither is
    x^(0) scored: it is part of what is observed, and its density does not depend on the weights. Entropy is
    constant, hence 0.

    Of the H actions that are denoised the first C are executed and scored. Their -1 and 1 are the bounds of the
    environment's actions; densities are of what is denoised.

    Noise of a row, D = H * A: x^(0) [D], then [D] for step k, then one number whose normal distribution
    function picks k uniformly from 0..N-1; with `joint`, x^(0) [D], then [N, D]. The mode is the ODE from
    x^(0) = 0; it is scored as if its first step (with `joint`: all steps) had been drawn.

    `trace` holds the K scored transitions of each row, K = 1 or, with `joint`, N (`Denoising.run`). The log-probs of
    `act` and of `evaluate` are one function of these and of the velocity.

    The encoder is shared: `value_head` is a small network on its features, and unless `critic_trains_encoder`
    is False the value loss trains the encoder too, with the actor's learning rate, since the encoder belongs
    to the actor's parameters. "state" reads `state` alone, "cnn" reads `frames`, `proprio` and `state`.

    With `critic_reads_state` the critic has its own network on the simulator's state, which it needs in
    training only (asymmetric actor-critic, Pinto et al., arXiv 1710.06542); of several observations it reads the
    present one. The actor never reads it: where
    no state is given, `act` decides as ever and its values are NaN. `state_loss` weighs an auxiliary loss beside it:
    the error e of the normalised state, predicted by one hidden layer from the encoder's features, mean over the
    state's numbers. It is e^2 up to a deviation and 2 |e| - 1 from there on (twice Huber's loss): numbers that hardly
    ever move, such as the tilt of an object, are many deviations away when they do. An encoder of pictures so learns
    where things are from every row, and not from the advantage alone (auxiliary targets from the simulator: Jaderberg
    et al., arXiv 1611.05397).
    """

    kind = "flow"

    def __init__(
        self,
        spec: PolicySpec,
        *,
        encoder: str = "state",
        features: int = 256,
        channels: Sequence[int] = CHANNELS,
        extra_layers: int = 0,
        widths: Sequence[int] = (256, 256),
        critic_widths: Sequence[int] = (256,),
        critic_trains_encoder: bool = True,
        critic_reads_state: bool = False,
        state_loss: float = 0.0,
        steps: int = 4,
        noise_level: float = 0.5,
        start_std: float = 0.3,
        joint: bool = False,
        observations: int = 1,
        distance: int = 1,
    ) -> None:
        """`channels` and `extra_layers` make the CNN wider and deeper; `steps` is N, `noise_level` scales the SDE's
        noise, `start_std` is the untrained ODE's spread. A decision is made on `observations` K, `distance` env steps
        from each to the next."""
        super().__init__()
        if encoder not in ENCODERS:
            raise PolicyError(f"encoder must be one of {', '.join(ENCODERS)}, got {encoder!r}")
        if not 0 < start_std <= 1:
            raise PolicyError(f"a flow policy needs 0 < start_std <= 1, got {start_std}")
        if state_loss < 0 or (state_loss and not critic_reads_state):
            raise PolicyError(
                f"state_loss is a weight of at least 0 and takes critic_reads_state, got {state_loss} with "
                f"critic_reads_state {critic_reads_state}"
            )
        self.spec = spec = replace(spec, observations=observations, distance=distance)
        self.size = spec.predicted * spec.action_dim
        self.range = ActionRange(spec)
        executed = None if spec.predicted == spec.chunk else range(spec.chunk * spec.action_dim)
        self.denoising = Denoising(self.size, steps, noise_level, "all" if joint else "one", executed=executed)
        self.critic_trains_encoder = critic_trains_encoder
        self.critic_reads_state = critic_reads_state
        self.state_loss = state_loss
        self.noise_dim = self.denoising.noise_dim
        (features,) = checked_widths("[features]", [features])
        widths = checked_widths("widths", widths)
        critic_widths = checked_widths("critic_widths", critic_widths)
        if not widths:
            raise PolicyError("a flow policy needs at least one width in widths")
        self._architecture = dict(
            encoder=encoder, features=features, channels=list(channels), extra_layers=extra_layers,
            widths=list(widths), critic_widths=list(critic_widths),
            critic_trains_encoder=critic_trains_encoder, critic_reads_state=critic_reads_state,
            state_loss=float(state_loss), steps=steps, noise_level=noise_level, start_std=start_std, joint=joint,
            observations=observations, distance=distance,
        )  # fmt: skip
        seen = replace(spec, state_dim=0) if critic_reads_state and encoder == "cnn" else spec
        self.encoder: Encoder = ENCODERS[encoder](seen, features, channels, extra_layers)
        self.velocity = VelocityNet(self.size, self.encoder.size, widths, steps, start_std)
        self.value_head = (
            StateCritic(spec, critic_widths)
            if critic_reads_state
            else mlp(self.encoder.size, critic_widths, 1, last_gain=1.0)
        )
        # Last, so that all other weights begin as they do without it.
        self.state_head = mlp(self.encoder.size, [features], spec.state_dim, last_gain=0.1) if state_loss else None

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        features = self.encoder(inputs)
        x, trace, field = self._denoised(features, noise)
        log_prob = self._shaped(self.denoising.log_prob(trace, field))
        chunk = self.range.to_environment(self._shaped(x)[:, : self.spec.chunk])
        if self.critic_reads_state and inputs.state is None:
            return Action(chunk, log_prob, torch.full_like(x[:, 0], torch.nan), trace)
        return Action(chunk, log_prob, self._value(inputs, features), trace)

    @torch.no_grad()
    def predict(self, inputs: Inputs, noise: Tensor | None) -> Tensor:
        x, *_ = self._denoised(self.encoder(inputs), noise)
        return self.range.to_environment(self._shaped(x))

    def _denoised(self, features: Tensor, noise: Tensor | None) -> tuple[Tensor, dict[str, Tensor], Field]:
        """What `Denoising.run` returns, for the encoder's features."""
        context = self.velocity.context(features, torch.arange(self.denoising.steps, device=features.device))
        draws = self.denoising.draws(noise, len(features))
        return self.denoising.run(draws, lambda x, i: Field(self.velocity(x, context[:, i], i)))

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        features = self.encoder(inputs)
        step = trace["step"]
        v = self.velocity(trace["x"], self.velocity.context(features, step), step)
        log_prob = self._shaped(self.denoising.log_prob(trace, Field(v)))
        moved = self.denoising.contrast(trace, Field(v)) if self.denoising.picks else None
        contrast = None if moved is None else Contrast(*map(self._shaped, moved))
        value, missed = self._value(inputs, features), self._state_error(inputs, features)
        return Evaluation(log_prob, torch.zeros_like(log_prob), value, contrast, missed)

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """Conditional flow matching (arXiv 2210.02747) at a time of the policy's own grid, one for each row: on the
        straight path x_t = t x_1 + (1 - t) a from noise to the actions, the velocity should be x_1 - a.

        Of the noise, x_1 is what `act` would begin with, and the last number picks the time as it picks k.
        """
        noise = checked_noise(noise, self.noise_dim)
        a = self.range.to_network(only_counted(actions, counted)).flatten(1)
        x1, step = noise[:, : self.size], self.denoising.step_of(noise)
        t = self.denoising.times[step]
        context = self.velocity.context(self.encoder(inputs), step)
        v = self.velocity((t * x1 + (1 - t) * a)[:, None], context, step).squeeze(1)
        return counted_mean(self._shaped((v - (x1 - a)).square()), counted)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        if isinstance(self.value_head, StateCritic):
            return self.value_head(inputs)
        return self._value(inputs, self.encoder(inputs))

    def observe(self, inputs: Inputs) -> None:
        self.encoder.observe(inputs)
        if isinstance(self.value_head, StateCritic):
            self.value_head.observe(inputs)

    def normalised_numbers(self, inputs: Inputs, actions: Tensor) -> Sequence[Normalised]:
        return self.encoder.normalised_numbers(inputs)

    def architecture(self) -> dict[str, Any]:
        return dict(self._architecture)

    def _shaped(self, x: Tensor) -> Tensor:
        """[B, H or C, A] of [B, H * A or C * A]."""
        return x.view(len(x), -1, self.spec.action_dim)

    def _state_error(self, inputs: Inputs, features: Tensor) -> Tensor | None:
        """[B] by how much the features miss the state, weighted; None where that is not asked for."""
        if self.state_head is None or not isinstance(self.value_head, StateCritic):
            return None
        huber = functional.huber_loss(self.state_head(features), self.value_head.seen(inputs), reduction="none")
        return self.state_loss * 2 * huber.mean(1)

    def _value(self, inputs: Inputs, features: Tensor) -> Tensor:
        if isinstance(self.value_head, StateCritic):
            return self.value_head(inputs)
        if not self.critic_trains_encoder:
            features = features.detach()
        return self.value_head(features).squeeze(-1)


class FlowFormat(HistoryFormat):
    """This project's layout."""

    def contrasts(self, architecture: Mapping[str, Any]) -> bool:
        return not architecture.get("joint", False)


FLOW = PolicyKind(FlowPolicy, format=FlowFormat(), predicts_more=True, scales_to_bounds=True)
