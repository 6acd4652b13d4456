"""Diffusion Policy as a policy: actions are denoised, and reinforcement learning scores the denoising's steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from policies.contract import Action, Evaluation, Inputs, PolicyError, PolicySpec
from policies.diffusion.config import LAYOUT, DiffusionConfig, Sampler, for_task
from policies.diffusion.denoising import Denoising, Exploration
from policies.diffusion.network import DiffusionNetwork
from policies.files import CONFIG, shown
from policies.layers import checked_noise, checked_widths, counted_mean, gaussian_log_prob, mlp
from policies.lerobot.network_config import check_task
from policies.lerobot.network_folders import load_network
from policies.lerobot.network_policy import NetworkPolicy
from policies.lerobot.pictures import normalised_frames
from policies.lerobot.processors import ACTION, STATE
from policies.small.encoders import vector
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS, Mode, Units

LARGEST_STD = 10.0
REALS = ("min_sampling_denoising_std", "min_logprob_denoising_std", "gamma_denoising")
"""Options that a configuration may give as whole numbers."""


@dataclass(frozen=True, kw_only=True)
class DiffusionOptions:
    """Options of the policy diffusion. Raises `PolicyError` for a value that an option does not take."""

    checkpoint: str = ""
    """Directory of LeRobot's, or of a new network."""
    weights: str = ""
    """Folder of a saved policy, which takes the place of the checkpoint; `policies.load` sets it."""
    asset: str = ""
    """`demonstrations`: the statistics of states and actions are those of the rows learned from, as they are for a new
    network; "": the checkpoint's."""
    transforms: Sequence[Mapping[str, Any]] = ()
    """Entries of `policies.transforms`."""
    noise_scheduler_type: str = ""
    """`DDPM` or `DDIM`; "": the checkpoint's."""
    num_inference_steps: int = 0
    """Number of denoising steps of a decision; 0: the checkpoint's, which may be all of the training's."""
    trained_steps: int = 0
    """Number of the last denoising steps that reinforcement learning scores; 0: all."""
    min_sampling_denoising_std: float = 0.1
    """Smallest deviation of a step's result when actions are drawn, in the network's units."""
    min_logprob_denoising_std: float = 0.1
    """Smallest deviation of a step's result in log-probs."""
    gamma_denoising: float = 0.99
    """Discount of the advantage from each denoising step to the one before."""
    critic_trains_network: bool = False
    """True: the value loss's gradient reaches the network's encoders."""
    value_widths: Sequence[int] = (512, 128)
    """Widths of the value head's hidden layers."""

    def __post_init__(self) -> None:
        if self.asset not in ("", DEMONSTRATIONS):
            raise PolicyError(f"diffusion's asset is {DEMONSTRATIONS} or empty, got {shown(self.asset)}")
        if self.noise_scheduler_type not in ("", *get_args(Sampler)):
            raise PolicyError(
                f"diffusion's noise_scheduler_type is {' or '.join(get_args(Sampler))} or empty, got "
                f"{shown(self.noise_scheduler_type)}"
            )
        for name in ("num_inference_steps", "trained_steps"):
            if not 0 <= getattr(self, name) <= 10_000:
                raise PolicyError(f"diffusion's {name} is of 0 to 10000, got {shown(getattr(self, name))}")
        if not 0 <= self.min_sampling_denoising_std <= LARGEST_STD:
            raise PolicyError(
                f"diffusion's min_sampling_denoising_std is of 0 to {LARGEST_STD:g}, got "
                f"{shown(self.min_sampling_denoising_std)}"
            )
        if not 1e-4 <= self.min_logprob_denoising_std <= LARGEST_STD:
            raise PolicyError(
                f"diffusion's min_logprob_denoising_std is of 0.0001 to {LARGEST_STD:g}, got "
                f"{shown(self.min_logprob_denoising_std)}"
            )
        if not 0 < self.gamma_denoising <= 1:
            raise PolicyError(
                f"diffusion's gamma_denoising is above 0 and at most 1, got {shown(self.gamma_denoising)}"
            )

    @property
    def exploration(self) -> Exploration:
        return Exploration(
            trained_steps=self.trained_steps,
            least_sampled_std=self.min_sampling_denoising_std,
            least_scored_std=self.min_logprob_denoising_std,
            discount=self.gamma_denoising,
        )

    def as_data(self) -> dict[str, Any]:
        """All but `weights`, as JSON has them."""
        data = {name: value for name, value in asdict(self).items() if name != "weights"}
        reals = {name: float(value) for name, value in data.items() if name in REALS}
        lists = {"transforms": Transforms(self.transforms).as_data(), "value_widths": list(self.value_widths)}
        return data | lists | reals


class DiffusionPolicy(NetworkPolicy):
    """Reads frames and proprioception of K observations.

    A decision denoises a horizon of T actions in N steps (`policies.diffusion.denoising`). The horizon begins with the
    first of the K observations: its first K - 1 actions are past, the next C are executed, P = T - K + 1 are predicted.

    In DPPO (arXiv 2409.00588) every denoising step is an action, whose advantage is the decision's, discounted by
    `gamma_denoising` for each step that follows. All N steps are drawn, and one of the `trained_steps` last is scored:
    DPPO's loss is a mean over decisions and steps. Here one step of each decision is sampled, with a probability
    proportional to its discount. Ratios are clipped for each step, as in DPPO, and scoring a decision costs one forward
    pass of the U-Net. Earlier steps are taken by the same network: LeRobot's layout has no room for DPPO's frozen copy.
    Densities are of the executed actions' numbers. The deviation is given, hence the entropy is 0.

    Noise of a row, D = T * A: x_T [D]; [N, D] of the steps; one number that picks the step; two for each camera, which
    place the random crop of supervised learning. The mode starts from x_T = 0 and takes every mean.

    The value head reads the condition: states and the encoders' numbers of all K observations.
    """

    kind = "diffusion"
    config: DiffusionConfig

    def __init__(self, spec: PolicySpec, options: DiffusionOptions) -> None:
        """Raises `PolicyError` where the checkpoint, the task and the options do not fit together."""
        super().__init__(spec, options, LAYOUT, for_task)
        self.spec = spec = replace(spec, horizon=self.config.predicted)
        self.earlier_actions = self.config.past
        self.learned_modes = _learned(self.config.mode_of(STATE)), _learned(self.config.mode_of(ACTION))
        self.network = load_network(self.source, lambda: DiffusionNetwork(self.config.sizes))
        self.denoising = Denoising(self.config, self._sampler, self._steps, options.exploration)
        self.size = self.config.horizon * self.config.action_dim
        self.noise_dim = self.size * (1 + self.denoising.steps) + 1 + 2 * len(self.cameras)
        widths = checked_widths("value_widths", options.value_widths)
        self.value_head = mlp(self.config.sizes.condition, widths, 1, last_gain=1.0)

    # --- the contract

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        condition = self._condition(inputs)
        said, scored, mean = self._denoised(condition, noise)
        log_prob = self._log_prob(scored["x_next"], mean, scored["step"])
        return Action(self._actions(self._executed(said), inputs), log_prob, self._value_of(condition), scored)

    @torch.no_grad()
    def predict(self, inputs: Inputs, noise: Tensor | None) -> Tensor:
        said, *_ = self._denoised(self._condition(inputs), noise)
        return self._actions(said[:, self.earlier_actions :], inputs)

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        condition, step = self._condition(inputs), trace["step"]
        predicted = self.network.unet(trace["x"], self.denoising.times[step], condition)
        mean = self._executed(self.denoising.mean(trace["x"], predicted, step))
        log_prob = self._log_prob(trace["x_next"], mean, step)
        return Evaluation(log_prob, torch.zeros_like(log_prob), self._value_of(condition))

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        return self._value_of(self._condition(inputs))

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """The squared error of what is predicted of noisy actions, at a time drawn for each row. Pictures are cropped
        at random where `crop_is_random` says so.

        Beyond an episode's ends the nearest action stands, as in LeRobot, and has a part in the mean unless
        `do_mask_loss_for_padding` is true.
        """
        noise = checked_noise(noise, self.noise_dim)
        uniform = torch.special.ndtr(noise[:, self.size * (1 + self.denoising.steps) :].double())
        corners = uniform[:, 1:].unflatten(1, (len(self.cameras), 2)) if self.config.crop_is_random else None
        eps = noise[:, : self.size].reshape(len(noise), self.config.horizon, -1)
        return self.losses(inputs, actions, counted, eps, self.denoising.time_of(uniform[:, 0]), corners)

    def losses(
        self,
        inputs: Inputs,
        actions: Tensor,
        counted: Tensor,
        eps: Tensor,
        time: Tensor,
        corners: Tensor | None,
    ) -> Tensor:
        """[B] with this noise [B, T, A], these times [B] and these places of the crop [B, cameras, 2] in 0..1, or a
        crop of the centre."""
        wanted = self._normalised(nearest_counted(actions, counted), inputs)
        predicted = self.network.unet(self.denoising.noisy(wanted, eps, time), time, self._condition(inputs, corners))
        error = (predicted - (eps if self.denoising.predicts_noise else wanted)).square()
        some = counted.any(1, keepdim=True).expand_as(counted)
        return counted_mean(error, counted if self.config.do_mask_loss_for_padding else some)

    def described(self) -> tuple[dict[str, Any], dict[str, Units]]:
        """Entries of config.json of the policy as it is, and units of pictures, state and action by LeRobot's names."""
        modes = dict(self.config.normalization_mapping)
        if self.options.asset == DEMONSTRATIONS:
            modes |= dict(zip(("STATE", "ACTION"), self.learned_modes, strict=True))
        entries = self.config.model_dump(mode="json") | {
            "normalization_mapping": modes,
            "n_action_steps": self.spec.chunk,
            "noise_scheduler_type": self._sampler,
            "num_inference_steps": self._steps,
            "pretrained_backbone_weights": None,  # LeRobot would fetch them before it reads the folder's own
            "compile_model": False,  # it changes the tensors' names
        }
        pictures = {key: Units(*ends) for key, ends in zip(self.config.cameras, self.pictures, strict=True)}
        robot = {STATE: self.units.state, ACTION: self.units.action}
        return {**self.source.config, **entries}, pictures | robot

    # --- what is computed

    def _denoised(self, condition: Tensor, noise: Tensor | None) -> tuple[Tensor, dict[str, Tensor], Tensor]:
        """The horizon [B, T, A]; the trace: of the scored step its beginning `x` [B, T, A], the executed part of its
        result `x_next` [B, C, A] and its number `step` int64 [B]; and the mean of `x_next`."""
        rows, shape = len(condition), (self.config.horizon, self.config.action_dim)
        if noise is None:
            x, z = condition.new_zeros(rows, *shape), None
            step = torch.full((rows,), self.denoising.steps - self.denoising.trained, device=x.device)
        else:
            noise = checked_noise(noise, self.noise_dim)
            drawn = noise[:, : self.size * (1 + self.denoising.steps)].reshape(rows, -1, *shape)
            x, z = drawn[:, 0], drawn[:, 1:]
            step = self.denoising.step_of(torch.special.ndtr(noise[:, self.size * (1 + self.denoising.steps)].double()))
        before, after, mean = x, x, x
        for i in range(self.denoising.steps):
            predicted = self.network.unet(x, self.denoising.times[i].expand(rows), condition)
            expected = self.denoising.mean(x, predicted, i)
            found = expected if z is None else expected + self.denoising.deviations[i] * z[:, i]
            here = (step == i)[:, None, None]
            before, after, mean = (
                torch.where(here, new, old) for new, old in ((x, before), (found, after), (expected, mean))
            )
            x = found
        return x, {"x": before, "x_next": self._executed(after), "step": step}, self._executed(mean)

    def _log_prob(self, x_next: Tensor, mean: Tensor, step: Tensor) -> Tensor:
        """[B, C, A]."""
        return gaussian_log_prob(x_next, mean, self.denoising.log_scored[step][:, None, None])

    def _executed(self, horizon: Tensor) -> Tensor:
        """[B, C, A] of [B, T, A]."""
        return horizon[:, self.earlier_actions : self.earlier_actions + self.spec.chunk]

    def _value_of(self, condition: Tensor) -> Tensor:
        return self.value_head(condition if self.options.critic_trains_network else condition.detach()).squeeze(-1)

    # --- what the network reads

    def _condition(self, inputs: Inputs, corners: Tensor | None = None) -> Tensor:
        """[B, F]; `corners` are those of `losses`."""
        pixels, state = self._observation(inputs)
        return self.network.condition(self._cropped(pixels, corners), state)

    def _observation(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Normalised pictures [B, K, cameras, 3, H, W] and states [B, K, P]."""
        count = self.spec.observations
        pixels = normalised_frames(inputs, self.cameras, self.transforms, self.pictures, count)
        given = vector(inputs, "proprio", self.spec.proprio_dim, count)
        pixels, given = (pixels[:, None], given[:, None]) if count == 1 else (pixels, given)
        seen = self.transforms.state(given.flatten(0, 1)).unflatten(0, given.shape[:2])
        return pixels, self.units.state.normalise(seen).float()

    def _cropped(self, pixels: Tensor, corners: Tensor | None) -> Tensor:
        """[.., H, W] resized and cropped to [.., h, w], in the centre unless there are corners."""
        crop, resized = self.config.crop, self.config.resized
        lead = pixels.shape[:3]
        if self.config.resize_shape is not None:
            flat = pixels.flatten(0, 2)
            flat = functional.interpolate(flat, resized, mode="bilinear", align_corners=False, antialias=True)
            pixels = flat.unflatten(0, lead)
        if crop is None:
            return pixels
        spare = [whole - part for whole, part in zip(resized, crop, strict=True)]
        if corners is None:
            top, left = (round(each / 2) for each in spare)
            return pixels[..., top : top + crop[0], left : left + crop[1]]
        most = torch.tensor(spare, device=pixels.device)
        first = (corners * (most + 1)).long().minimum(most)  # [B, cameras, 2]
        rows, columns = (
            first[:, :, axis, None] + torch.arange(crop[axis], device=pixels.device) for axis in (0, 1)
        )  # [B, cameras, h], [B, cameras, w]
        whole = (*lead, 3)
        pixels = pixels.gather(4, rows[:, None, :, None, :, None].expand(*whole, -1, pixels.shape[-1]))
        return pixels.gather(5, columns[:, None, :, None, None, :].expand(*whole, crop[0], -1))

    # --- what is built

    @property
    def _sampler(self) -> Sampler:
        return self.options.noise_scheduler_type or self.config.noise_scheduler_type  # type: ignore[return-value]

    @property
    def _steps(self) -> int:
        own = self.config.num_inference_steps or self.config.num_train_timesteps
        return self.options.num_inference_steps or own

    def check_spec(self, spec: PolicySpec) -> None:
        """Raise `PolicyError` where the network cannot see or do what the task, after the transforms, has."""
        config, path = self.config, self.source.folder / CONFIG
        if spec.chunk > config.predicted:
            raise PolicyError(
                f"{path}: of a horizon of {config.horizon} that begins with the first of {config.n_obs_steps} "
                f"observations {config.predicted} actions are predicted, and policy.chunk is {spec.chunk}: at most "
                "that are executed"
            )
        if spec.horizon not in (0, config.predicted):
            raise PolicyError(
                f"{path}: the network predicts {config.predicted} actions from the present on (horizon "
                f"{config.horizon}), and policy.horizon is {spec.horizon}: leave it out"
            )
        check_task(path, config, spec)


def _learned(mode: Mode) -> Mode:
    """The mode by which demonstrations are normalised where the checkpoint's is this: ranges, unless it has means and
    deviations. What is denoised is clipped, and a range fits into the clip."""
    return "MEAN_STD" if mode == "MEAN_STD" else "MIN_MAX"


def nearest_counted(actions: Tensor, counted: Tensor) -> Tensor:
    """[B, T, A]: in place of an action that is not counted [B, T] the nearest one before it that is, or else the next
    one after it; zeros in a row without any."""
    place = torch.arange(counted.shape[1], device=counted.device).expand_as(counted)
    before = torch.where(counted, place, -1).cummax(1).values
    first = counted.int().argmax(1, keepdim=True)
    chosen = torch.where(before >= 0, before, first)
    found = actions.gather(1, chosen[..., None].expand_as(actions))
    return torch.where(counted.any(1)[:, None, None], found, torch.zeros_like(found))
