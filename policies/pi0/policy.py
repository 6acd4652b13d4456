"""pi0 and pi0.5 as a policy: a chunk is the end of an integration, of which one step is drawn and scored (flow-SDE).

B rows, H actions that the network predicts, C of them that are executed, A numbers of the network's action, D of the
robot's, N denoising steps, P tokens of the prefix, W the vision-language model's width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from policies import flow_sde
from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.density import gaussian_log_prob
from policies.encoders import vector
from policies.files import CONFIG, Shards, check_tensors, read_json, read_tensors, write_tensors
from policies.imitation import counted_mean, only_counted
from policies.layers import checked_noise, checked_widths, mlp
from policies.pi0.files import DTYPES, is_random, load_network, read_weights, save_directory
from policies.pi0.images import pixel_values
from policies.pi0.mixture import Cache
from policies.pi0.network import Observation, Prefix
from policies.pi0.prompts import Prompts
from policies.pi0.units import (
    DEMONSTRATIONS,
    RobotUnits,
    StoredUnits,
    demonstrated,
    first_of,
    identity,
    read_lerobot,
    read_openpi,
    write_lerobot,
    write_openpi,
)

SLOTS = 3
"""Images that every checkpoint was trained with. Those of absent cameras nothing sees: they are not computed."""
RESIZES, PROMPTS, TRAINED = ("pillow", "interpolate"), ("openpi", "lerobot", "lerobot-0.4"), ("expert", "all")
UNITS = "units.safetensors"
"""The units of a policy that was saved, beside its weights."""
BFLOAT16_TOLERANCE = 2e-2
TIME_POWER, TIME_LOW = 1 / 1.5, 0.001
"""Imitation's times are 0.001 + 0.999 Beta(1.5, 1) (openpi): a uniform number to the power 1 / 1.5 is such a Beta."""


class Pi0(Policy):
    """Reads frames, the instruction and proprioception. Which of the two it is its weights say.

    Of a row's N steps one, k, is stochastic (`policies.flow_sde`), drawn for each row by its noise: x^(0) [H * A], the
    step's numbers [H * A], and one whose normal distribution function picks k. The log-prob is that of step k, of the
    actions that are executed and the robot's numbers. The mode is the ODE from x^(0) = 0, scored as if its first step
    had been drawn. Entropy is constant, hence 0.

    `trace`: `x` [B, H, A] before step k, `x_next` [B, C, D] after it, `step` int64 [B]. Where the vision-language model
    is frozen, `precompute` finds its keys and values, and an update runs the expert alone: 2 * layers * heads * P * d
    numbers a row, which `cache_prefix` False spares.

    The value head reads the mean over the prefix's present tokens, and the normalised state. Its gradient stays there.
    """

    kind = "pi0"
    incidental: ClassVar[frozenset[str]] = frozenset(
        {"checkpoint", "steps", "noise_level", "train", "cache_prefix", "spec.chunk"}
    )
    pretrained = True
    transitions: Tensor
    """[N, 3]: of each stochastic step the mean's weights of x and of v, and the standard deviation."""
    ode: Tensor
    """[3]: the same of an ODE step."""
    times: Tensor
    """[N]: at which each step begins. The embedding of time tells 1e-7 apart: whoever scores reads the same numbers."""

    @classmethod
    def check_files(cls, architecture: Mapping[str, Any]) -> None:
        folder = architecture.get("checkpoint")
        if not folder:
            raise PolicyError("pi0 needs a checkpoint: set policy.options.checkpoint to its directory")
        if not Path(folder).is_dir():
            raise PolicyError(
                f"policy.options.checkpoint: {folder} is not a folder here; name one of openpi's or LeRobot's"
            )
        if not is_random(Path(folder)):
            Shards.find(Path(folder))

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
        rotate_images: bool = False,
        delta_dims: int = 0,
        steps: int = 10,
        noise_level: float = 0.5,
        train: str = "expert",
        cache_prefix: bool = True,
        dtype: str = "float32",
        value_widths: Sequence[int] = (512, 128),
    ) -> None:
        """`checkpoint` is a directory of openpi's or LeRobot's; `weights` is what such a policy was saved as, which
        takes its place (`policies.load` sets it). `asset` names openpi's statistics, where there are several;
        `demonstrations`: those that are learned from (`adopt_units`). `prompt` is the project whose prompts these are,
        "" that of the checkpoint's layout; `state_in_prompt` is for pi0.5. With `delta_dims` K the network says the
        first K numbers as differences to the state's (6 for openpi's pi0_libero). `train`: `expert` freezes the
        vision-language model, `all` trains every weight.
        """
        super().__init__()
        self.check_files({"checkpoint": weights or checkpoint})
        for name, given, valid in (("resize", resize, RESIZES), ("train", train, TRAINED), ("dtype", dtype, DTYPES)):
            if given not in valid:
                raise PolicyError(f"pi0's {name} must be one of {', '.join(valid)}, got {given!r}")
        if prompt and prompt not in PROMPTS:
            raise PolicyError(f"pi0's prompt must be one of {', '.join(PROMPTS)}, got {prompt!r}")
        most = min(spec.action_dim, spec.proprio_dim)
        if steps < 1 or noise_level <= 0 or not 0 <= delta_dims <= most:
            raise PolicyError(
                f"pi0 needs steps >= 1, noise_level > 0 and delta_dims of 0 to {most}, which state and actions both "
                f"have; got {steps}, {noise_level}, {delta_dims}"
            )
        if delta_dims and asset == DEMONSTRATIONS:
            raise PolicyError(
                "units of demonstrations are of actions, not of differences to the state: set delta_dims to 0, or name "
                "the checkpoint's statistics by asset"
            )
        source = Path(weights or checkpoint).resolve()
        self.source, self.spec, self.steps = source, spec, steps
        self._architecture: dict[str, Any] = dict(
            checkpoint=str(Path(checkpoint).resolve()), asset=asset, prompt=prompt,
            state_in_prompt=state_in_prompt, resize=resize, rotate_images=rotate_images,
            delta_dims=delta_dims, steps=steps, noise_level=float(noise_level),
            train=train, cache_prefix=cache_prefix, dtype=dtype,
            value_widths=list(checked_widths("value_widths", value_widths)),
        )  # fmt: skip
        self.network, self._config = load_network(source, dtype), read_json(source / CONFIG)
        self.sizes, self.layout = self.network.sizes, self.network.layout
        self._check_spec(state_in_prompt)
        convention: Any = prompt or self.layout
        if self.sizes.adaptive and not state_in_prompt and convention != "openpi":
            raise PolicyError(
                f"a pi0.5 with prompts of {convention} has the state in them: set state_in_prompt to true, or prompt "
                "to openpi"
            )
        self.prompts = Prompts(source, self.sizes.prompt_len, convention, self.sizes.action_dim)
        self.units = self._read_units(asset)
        self.resize: Any = resize
        self.rotate_images, self.delta_dims, self.state_in_prompt = rotate_images, delta_dims, state_in_prompt
        self.trains_all, self.cache_prefix = train == "all", cache_prefix
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(
                self.trains_all or not name.startswith(("vision.", "projector.", "embedding.", "mixture.vlm."))
            )
        if dtype != "float32":
            self.ratio_tolerance = BFLOAT16_TOLERANCE
        self.numbers = self.sizes.horizon * self.sizes.action_dim
        self.noise_dim = 2 * self.numbers + 1
        self.value_head = mlp(self.sizes.vlm.width + self.sizes.action_dim, value_widths, 1, last_gain=1.0)
        table = [*flow_sde.mean_weights(steps, noise_level), flow_sde.stds(steps, noise_level)]
        self.register_buffer("transitions", torch.stack(table, -1).float(), persistent=False)
        self.register_buffer("times", flow_sde.timesteps(steps)[:-1].float(), persistent=False)
        self.register_buffer("ode", torch.tensor([1.0, -1.0 / steps, 0.0]), persistent=False)

    # --- the contract

    @torch.no_grad()  # not inference_mode: what it returns may enter `evaluate`'s graph
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        seen = self._observation(inputs)
        prefix = self.network.prefix(seen)
        rows, shape = len(seen.state), (-1, self.sizes.horizon, self.sizes.action_dim)
        x, z, scored = self._draws(noise, rows, seen.state.device)
        drawn = noise is not None
        x, z = x.view(shape), z.view(shape)
        before, after, velocities = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
        for step in range(self.steps):
            v = self.network.velocity(prefix, seen.state, x, self.times[step].expand(rows))
            mine = (scored == step)[:, None, None]
            w_x, w_v, std = torch.where(mine & drawn, self.transitions[step], self.ode).split(1, -1)
            following = w_x * x + w_v * v + std * z
            before, velocities = torch.where(mine, x, before), torch.where(mine, v, velocities)
            after = torch.where(mine, following, after)
            x = following
        trace = {"x": before, "x_next": self._executed(after), "step": scored}
        value = self._value_of(self._summary(prefix), seen.state)
        return Action(self._actions(x, inputs), self._log_prob(trace, velocities), value, trace)

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        state = self._state(inputs)
        prefix, summary = self._known(trace) or self._read(inputs)
        v = self.network.velocity(prefix, state, trace["x"], self.times[trace["step"]])
        log_prob = self._log_prob(trace, v)
        return Evaluation(log_prob, torch.zeros_like(log_prob), self._value_of(summary, state))

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        seen = self._observation(inputs)
        return self._value_of(self._summary(self.network.prefix(seen)), seen.state)

    @torch.no_grad()
    def precompute(self, inputs: Inputs) -> dict[str, Tensor]:
        """Keys and values [B, layers, heads, P, d] of the prefix, `present` bool [B, P] and `summary` [B, W]; nothing
        where the vision-language model is trained, or `cache_prefix` is False."""
        if self.trains_all or not self.cache_prefix:
            return {}
        prefix = self.network.prefix(self._observation(inputs))
        keys, values = (torch.stack(part, 1) for part in (prefix.cache.keys, prefix.cache.values))
        return {"keys": keys, "values": values, "present": prefix.present, "summary": self._summary(prefix)}

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """Flow matching at a time of each row's own, drawn by the noise's last number; its first are x^(0)."""
        if self.spec.chunk != self.sizes.horizon:
            raise PolicyError(
                f"pi0 learns all {self.sizes.horizon} actions that it predicts, and demonstrations are read in chunks "
                f"of {self.spec.chunk}: set policy.chunk to {self.sizes.horizon} to learn from them"
            )
        noise = checked_noise(noise, self.noise_dim)
        seen = self._observation(inputs)
        # After it was normalised: what fills an episode's end up is the mean action, not one of raw zeros.
        wanted = only_counted(self._normalised(actions, inputs), counted)
        x1 = noise[:, : self.numbers].view_as(wanted)
        uniform = torch.special.ndtr(noise[:, -1].double())
        t = (TIME_LOW + (1 - TIME_LOW) * uniform**TIME_POWER).float()
        v = self.network.joint_velocity(seen, t[:, None, None] * x1 + (1 - t[:, None, None]) * wanted, t)
        return counted_mean(self._executed((v - (x1 - wanted)).square()), counted)

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        if self._architecture["asset"] == DEMONSTRATIONS:
            nothing = torch.zeros(1, 0)  # proprioception may be recorded that the policy does not read
            state = proprio if proprio is not None and self.spec.proprio_dim else nothing
            self.units.fill(demonstrated(state, actions))

    def actor_parameters(self) -> Iterator[nn.Parameter]:
        return (p for p in super().actor_parameters() if p.requires_grad)

    def architecture(self) -> dict[str, Any]:
        return dict(self._architecture)

    def export(self, folder: Path) -> None:
        """Write a directory in the layout of the checkpoint's, with its configuration and tokenizer, and its statistics
        or those of the demonstrations."""
        folder = Path(folder)
        save_directory(self.network, self.source, folder, self._config, ours=False)
        if self._architecture["asset"] == DEMONSTRATIONS:
            # Whoever reads the files wants statistics of a state, also where the policy reads none.
            state = self.units.state if self.spec.proprio_dim else identity(self.sizes.action_dim, 0).state
            units = RobotUnits(state, self.units.action)
            (write_lerobot if self.layout == "lerobot" else write_openpi)(folder, units)

    def write_actor(self, folder: Path) -> bool:
        """Such a directory too, with the units to the last bit."""
        save_directory(self.network, self.source, folder, self._config, ours=True)
        write_tensors(folder / UNITS, self.units.state_dict())
        return True

    def read_actor(self, folder: Path) -> dict[str, Tensor]:
        weights, units = read_weights(folder, self.network), read_tensors(folder / UNITS)
        check_tensors(folder / UNITS, units, self.units.state_dict())
        parts = {"network": weights, "units": units}
        return {f"{part}.{name}": tensor for part, found in parts.items() for name, tensor in found.items()}

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
        said = state[:, : self.spec.proprio_dim].cpu() if self.state_in_prompt else None
        tokens, counted = self.prompts.batch(inputs.instruction, said)
        device, dtype = state.device, self.network.projector.weight.dtype
        present = torch.ones(rows, len(pixels), dtype=torch.bool, device=device)
        return Observation(torch.stack(pixels, 1).to(dtype), present, tokens.to(device), counted.to(device), state)

    def pixels(self, frames: Tensor) -> Tensor:
        """A camera's uint8 [B, H, W, 3] to float32 [B, 3, S, S] in -1..1."""
        turned = frames.flip(1, 2) if self.rotate_images else frames
        return pixel_values(turned, self.sizes.vision.image_size, self.resize)

    def _state(self, inputs: Inputs) -> Tensor:
        """[B, A]: proprioception, normalised and filled up."""
        size, dtype = self.spec.proprio_dim, self.network.projector.weight.dtype
        if not size:  # pi0.5 without a state
            some = next(iter(inputs.frames.values()))
            return torch.zeros(len(some), self.sizes.action_dim, dtype=dtype, device=some.device)
        known = self.units.state.normalise(vector(inputs, "proprio", size))
        return nn.functional.pad(known, (0, self.sizes.action_dim - size)).to(dtype)

    def _normalised(self, actions: Tensor, inputs: Inputs) -> Tensor:
        """[B, C, D] in the environment's units to [B, C, A]."""
        known = self.units.action.normalise(actions.double() - self._offset(inputs, actions))
        return nn.functional.pad(known, (0, self.sizes.action_dim - self.spec.action_dim)).float()

    def _actions(self, x: Tensor, inputs: Inputs) -> Tensor:
        """The chunk [B, C, D] that is executed, in the environment's units, of x [B, H, A]."""
        actions = self.units.action.unnormalise(self._executed(x))
        return (actions + self._offset(inputs, actions)).float()

    def _offset(self, inputs: Inputs, like: Tensor) -> Tensor:
        """[B, 1, D]: of the state, what actions are differences to."""
        offset = torch.zeros(len(like), 1, self.spec.action_dim, dtype=torch.float64, device=like.device)
        if self.delta_dims:
            proprio = vector(inputs, "proprio", self.spec.proprio_dim)
            offset[:, 0, : self.delta_dims] = proprio[:, : self.delta_dims].double()
        return offset

    def _executed(self, x: Tensor) -> Tensor:
        """[B, C, D] of [B, H, A]."""
        return x[:, : self.spec.chunk, : self.spec.action_dim]

    # --- the integration

    def _draws(self, noise: Tensor | None, rows: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """x^(0) [B, H * A], the stochastic step's numbers [B, H * A], and the scored steps int64 [B]."""
        if noise is None:
            zeros = torch.zeros(rows, self.numbers, device=device)
            return zeros, zeros, torch.zeros(rows, dtype=torch.long, device=device)
        noise = checked_noise(noise, self.noise_dim)
        uniform = torch.special.ndtr(noise[:, -1].double())
        step = (uniform * self.steps).long().clamp_(max=self.steps - 1)
        return noise[:, : self.numbers], noise[:, self.numbers : -1], step

    def _log_prob(self, trace: Mapping[str, Tensor], v: Tensor) -> Tensor:
        """[B, C, D]: of the scored steps under velocities v [B, H, A]."""
        w_x, w_v, std = self.transitions[trace["step"]][:, None].split(1, -1)
        mean = self._executed(w_x * trace["x"] + w_v * v)
        return gaussian_log_prob(trace["x_next"], mean, std.log())

    # --- prefix and critic

    def _read(self, inputs: Inputs) -> tuple[Prefix, Tensor]:
        """The prefix and its summary, with gradients where the vision-language model is trained."""
        with torch.set_grad_enabled(self.trains_all and torch.is_grad_enabled()):
            prefix = self.network.prefix(self._observation(inputs))
        return prefix, self._summary(prefix)

    def _known(self, trace: Mapping[str, Tensor]) -> tuple[Prefix, Tensor] | None:
        """What `precompute` found."""
        if "keys" not in trace:
            return None
        cache = Cache(trace["keys"].unbind(1), trace["values"].unbind(1))
        return Prefix(cache, trace["present"], torch.empty(0)), trace["summary"]

    def _summary(self, prefix: Prefix) -> Tensor:
        """[B, W] float32: the mean output of the tokens that are present."""
        counted = prefix.present[..., None]
        return (prefix.hidden.detach().float() * counted).sum(1) / counted.sum(1)

    def _value_of(self, summary: Tensor, state: Tensor) -> Tensor:
        return self.value_head(torch.cat([summary, state.float()], 1)).squeeze(-1)

    # --- what is built

    def _check_spec(self, state_in_prompt: bool) -> None:
        spec, sizes = self.spec, self.sizes
        if not 1 <= len(spec.cameras) <= SLOTS:
            raise PolicyError(f"pi0 takes one to {SLOTS} cameras, the task gives {len(spec.cameras)}: set env.cameras")
        if spec.chunk > sizes.horizon:
            raise PolicyError(
                f"the checkpoint predicts {sizes.horizon} actions: policy.chunk is at most that, got {spec.chunk}"
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
        spec = self.spec
        if asset == DEMONSTRATIONS:
            return StoredUnits(identity(spec.proprio_dim, spec.action_dim))
        if self.layout == "lerobot":
            units = read_lerobot(self.source)
        else:
            units = read_openpi(self.source, asset, quantile=self.sizes.adaptive)
        return StoredUnits(first_of(units, spec.proprio_dim, spec.action_dim))
