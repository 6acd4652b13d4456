"""ACT as a policy: a chunk of actions, around which reinforcement learning explores with a learned deviation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from policies.act.config import LAYOUT, MOST_ENSEMBLE, ActConfig, coefficient_of, for_task
from policies.act.network import ActNetwork, Encoded, Observation
from policies.contract import Action, Evaluation, Inputs, PolicyError, PolicySpec
from policies.files import CONFIG, shown
from policies.layers import (
    checked_noise,
    checked_widths,
    counted_mean,
    gaussian_entropy,
    gaussian_log_prob,
    mlp,
    only_counted,
)
from policies.lerobot.network_config import check_task
from policies.lerobot.network_folders import load_network
from policies.lerobot.network_policy import NetworkPolicy
from policies.lerobot.pictures import normalised_frames
from policies.lerobot.processors import ACTION, STATE
from policies.transforms import Gripper, Transforms
from policies.units import DEMONSTRATIONS, Units


@dataclass(frozen=True, kw_only=True)
class ActOptions:
    """Options of the policy act. Raises `PolicyError` for a value that an option does not take."""

    checkpoint: str = ""
    """Directory of LeRobot's, or of a new network."""
    weights: str = ""
    """Folder of a saved policy, which takes the place of the checkpoint; `policies.load` sets it."""
    asset: str = ""
    """`demonstrations`: the statistics of states and actions are those of the rows learned from, as they are for a new
    network; "": the checkpoint's."""
    transforms: Sequence[Mapping[str, Any]] = ()
    """Entries of `policies.transforms`."""
    temporal_ensemble: float | Literal[False] | None = None
    """Coefficient of temporal ensembling in evaluations, with `policy.chunk` 1; `false`: without it. None: the
    checkpoint's (`temporal_ensemble_coeff`), if it has one."""
    initial_log_std: float = -2.0
    """Logarithm of the deviation of actions, in the network's units, with which reinforcement learning begins."""
    critic_trains_network: bool = False
    """True: the value loss's gradient reaches the network."""
    value_widths: Sequence[int] = (512, 128)
    """Widths of the value head's hidden layers."""

    def __post_init__(self) -> None:
        if self.asset not in ("", DEMONSTRATIONS):
            raise PolicyError(f"act's asset is {DEMONSTRATIONS} or empty, got {shown(self.asset)}")
        given = None if self.temporal_ensemble is False else self.temporal_ensemble
        if given is not None and (type(given) not in (int, float) or not abs(given) <= MOST_ENSEMBLE):
            raise PolicyError(
                f"act's temporal_ensemble is a number of -{MOST_ENSEMBLE:g} to {MOST_ENSEMBLE:g}, or false, got "
                f"{shown(given)}"
            )
        if not -20 <= self.initial_log_std <= 2:
            raise PolicyError(f"act's initial_log_std is of -20 to 2, got {shown(self.initial_log_std)}")

    def as_data(self) -> dict[str, Any]:
        """All but `weights`, as JSON has them."""
        data = {name: value for name, value in asdict(self).items() if name != "weights"}
        lists = {"transforms": Transforms(self.transforms).as_data(), "value_widths": list(self.value_widths)}
        return data | lists | {"initial_log_std": float(self.initial_log_std)}


class Act(NetworkPolicy):
    """Reads frames and, where the network has a state, proprioception.

    Of the N actions of a chunk the first C are executed. They are drawn from normal distributions around what the
    network gives, with a deviation `log_std` [N, A] that does not depend on the observation; densities are of the
    network's numbers. The latent is zero. Of the noise, the first C * A numbers draw the actions; the last L draw the
    latent in supervised learning.

    The value head reads the mean over the encoder's tokens, and the normalised state.
    """

    kind = "act"
    config: ActConfig

    def __init__(self, spec: PolicySpec, options: ActOptions) -> None:
        """Raises `PolicyError` where the checkpoint, the task and the options do not fit together."""
        super().__init__(spec, options, LAYOUT, for_task)
        self.spec = spec = replace(spec, horizon=self.config.chunk_size)
        self.network = load_network(self.source, lambda: ActNetwork(self.config.sizes))
        self.executed = spec.chunk * spec.action_dim
        self.noise_dim = self.executed + self.config.latent_dim
        self.log_std = nn.Parameter(torch.full((spec.horizon, spec.action_dim), float(options.initial_log_std)))
        widths = checked_widths("value_widths", options.value_widths)
        self.value_head = mlp(self.config.dim_model + self.config.state_dim, widths, 1, last_gain=1.0)

    @property
    def ensemble(self) -> float | None:
        return coefficient_of(self.config, self.options.temporal_ensemble, self.spec.chunk)

    # --- the contract

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        mean, value = self._decided(inputs)
        log_std, said = self._log_std(), mean
        if noise is not None:
            z = checked_noise(noise, self.noise_dim)[:, : self.executed].view_as(mean)
            said = torch.addcmul(mean, z, log_std.exp())
        log_prob = gaussian_log_prob(said, mean, log_std)
        return Action(self._actions(said, inputs), log_prob, value, {"action": said})

    @torch.no_grad()
    def predict(self, inputs: Inputs, noise: Tensor | None) -> Tensor:
        """[B, N, A]. The noise draws the first C actions, as in `act`; the others are the mode."""
        said = self.network.decode(self._encoded(self._observation(inputs)))
        if noise is not None:
            z = checked_noise(noise, self.noise_dim)[:, : self.executed].view(len(said), self.spec.chunk, -1)
            drawn = torch.addcmul(said[:, : self.spec.chunk], z, self._log_std().exp())
            said = torch.cat([drawn, said[:, self.spec.chunk :]], 1)
        return self._actions(said, inputs)

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        mean, value = self._decided(inputs)
        log_std = self._log_std()
        log_prob = gaussian_log_prob(trace["action"], mean, log_std)
        return Evaluation(log_prob, gaussian_entropy(log_std).expand_as(log_prob), value)

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        seen = self._observation(inputs)
        return self._value_of(self._encoded(seen), seen)

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """The mean distance |a - a'| of a row's counted actions, and `kl_weight` times the divergence of its latent
        from the standard normal distribution."""
        distance, divergence = self.losses(inputs, actions, counted, noise)
        return distance + self.config.kl_weight * divergence

    def losses(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """[B] mean distance, and [B] divergence in nats: 0 without a VAE, and for a row without counted actions.

        KL(N(m, s^2) || N(0, 1)) = -1/2 sum(1 + log s^2 - m^2 - s^2) (arXiv 1312.6114, appendix B).
        """
        seen = self._observation(inputs)
        # After it was normalised: what fills an episode's end up is the mean action, not one of raw zeros.
        wanted = only_counted(self._normalised(actions, inputs), counted)
        latent, divergence = self._latent_of_none(seen), seen.state.new_zeros(len(seen.state))
        if self.config.use_vae:
            z = checked_noise(noise, self.noise_dim)[:, self.executed :]
            mean, log_variance = self.network.posterior(seen.state, wanted, counted)
            latent = mean + (log_variance / 2).exp() * z
            each = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
            divergence = each.sum(1) * counted.any(1)
        found = self.network.decode(self.network.encode(seen, latent))
        return counted_mean((found - wanted).abs(), counted), divergence

    def described(self) -> tuple[dict[str, Any], dict[str, Units]]:
        """Entries of config.json of the policy as it is, and units of pictures, state and action by LeRobot's names.

        What was learned by units of demonstrations is normalised by them, also where the checkpoint left it as it was.
        """
        modes = dict(self.config.normalization_mapping)
        if self.options.asset == DEMONSTRATIONS:
            modes |= {kind: "MEAN_STD" for kind in ("STATE", "ACTION") if modes.get(kind, "IDENTITY") == "IDENTITY"}
        entries = self.config.model_dump(mode="json") | {
            "normalization_mapping": modes,
            "n_action_steps": self.spec.chunk,
            "temporal_ensemble_coeff": self.ensemble,  # LeRobot refuses one where more actions are executed
            "pretrained_backbone_weights": None,  # LeRobot would fetch them before it reads the folder's own
        }
        pictures = {key: Units(*ends) for key, ends in zip(self.config.cameras, self.pictures, strict=True)}
        state = {STATE: self.units.state} if self.config.state_dim else {}
        return {**self.source.config, **entries}, pictures | state | {ACTION: self.units.action}

    # --- what the network reads

    def _decided(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """The executed part of the chunk [B, C, A] in the network's units, and values [B]."""
        seen = self._observation(inputs)
        encoded = self._encoded(seen)
        return self.network.decode(encoded)[:, : self.spec.chunk], self._value_of(encoded, seen)

    def _encoded(self, seen: Observation) -> Encoded:
        return self.network.encode(seen, self._latent_of_none(seen))

    def _latent_of_none(self, seen: Observation) -> Tensor:
        return seen.state.new_zeros(len(seen.state), self.config.latent_dim)

    def _value_of(self, encoded: Encoded, seen: Observation) -> Tensor:
        summary = encoded.tokens.mean(1)
        if not self.options.critic_trains_network:
            summary = summary.detach()
        return self.value_head(torch.cat([summary, seen.state], 1)).squeeze(-1)

    def _log_std(self) -> Tensor:
        """[C, A]."""
        return self.log_std[: self.spec.chunk]

    def _observation(self, inputs: Inputs) -> Observation:
        pixels = normalised_frames(inputs, self.cameras, self.transforms, self.pictures)
        given_state = self._given(inputs)
        if given_state is None:
            state = pixels.new_zeros(len(pixels), 0)
        else:
            state = self.units.state.normalise(self.transforms.state(given_state)).float()
        return Observation(pixels, state)

    # --- what is built

    def check_spec(self, spec: PolicySpec) -> None:
        """Raise `PolicyError` where the network cannot see or do what the task, after the transforms, has."""
        config, path = self.config, self.source.folder / CONFIG
        if spec.chunk > config.chunk_size:
            raise PolicyError(
                f"{path}: the network predicts {config.chunk_size} actions, and policy.chunk is {spec.chunk}: at most "
                "that are executed"
            )
        given = self.options.temporal_ensemble
        if spec.chunk > 1 and given is not None and given is not False:
            raise PolicyError(
                f"temporal_ensemble averages what is decided at every env step, and policy.chunk is {spec.chunk}: set "
                "policy.chunk to 1, or leave temporal_ensemble out"
            )
        coefficient = coefficient_of(config, given, spec.chunk)
        if coefficient is not None and self.transforms.has(Gripper):  # the mean of an opening and a closing is neither
            raise PolicyError(
                f"predictions are averaged (temporal_ensemble {coefficient:g}) as the environment executes them, and "
                "the transform gripper makes commands of them that have no mean: set policy.options.temporal_ensemble "
                "to false, or leave gripper out of transforms"
            )
        if spec.horizon not in (0, config.chunk_size):
            raise PolicyError(
                f"{path}: the network predicts {config.chunk_size} actions (chunk_size), each by weights of its own, "
                f"and policy.horizon is {spec.horizon}: leave it out"
            )
        check_task(path, config, spec)
