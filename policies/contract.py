"""The contract of policies: `act` on inputs and given noise, `evaluate` the same decision again under new weights.

Symbols in shapes: B batch, C actions of a chunk, A action dimensions, S state, P proprioception,
H x W pixels, Z noise numbers, K observations of a decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from policies.errors import PolicyError as PolicyError


@dataclass(frozen=True)
class Inputs:
    """Raw observations of a batch. Preprocessing is the policy's own, batched, on its device.

    For a policy that looks at K > 1 observations (`PolicySpec.observations`) state, proprioception and frames have an
    axis of K behind the batch's, the present observation last: [B, K, S], [B, K, P], [B, K, H, W, 3].
    """

    state: Tensor | None = None
    """[B, S] float32, the simulator's full state."""
    proprio: Tensor | None = None
    """[B, P] float32."""
    frames: Mapping[str, Tensor] = field(default_factory=dict)
    """For each camera uint8 [B, H, W, 3]."""
    instruction: tuple[str, ...] = ()
    """B texts, or none where no policy reads them."""
    episode: Tensor | None = None
    """[B, 3] int64: the episode's seed, its initial state's index (-1: none) and its env steps so far.

    For policies that replay what was recorded; one that learns has no business with it.
    """
    cropped: bool = False
    """True: the pictures are random crops already, for a policy that acts on a centre crop of as much of a picture."""

    def rows(self, index: Tensor) -> Inputs:
        """The inputs of the rows `index` (int64 [K])."""
        return replace(
            self,
            state=None if self.state is None else self.state[index],
            proprio=None if self.proprio is None else self.proprio[index],
            frames={name: frame[index] for name, frame in self.frames.items()},
            instruction=tuple(self.instruction[i] for i in index.tolist()) if self.instruction else (),
            episode=None if self.episode is None else self.episode[index],
        )

    def to(self, device: torch.device | str) -> Inputs:
        """The inputs with all tensors on the device."""
        return replace(
            self,
            state=None if self.state is None else self.state.to(device),
            proprio=None if self.proprio is None else self.proprio.to(device),
            frames={name: frame.to(device) for name, frame in self.frames.items()},
            episode=None if self.episode is None else self.episode.to(device),
        )


@dataclass(frozen=True)
class Action:
    """A decision for each row."""

    chunk: Tensor
    """[B, C, A] float32, in the environment's units; the environment clips to its bounds."""
    log_prob: Tensor
    """[B, C, A] float32, per element; the loss reduces it to its unit."""
    value: Tensor
    """Expected return, float32: [B] from the observation on, or [B, C] from each action of the chunk on."""
    trace: Mapping[str, Tensor]
    """Tensors that `evaluate` needs to score the same decision again; each tensor has B rows."""


@dataclass(frozen=True)
class Contrast:
    """Change of a flow policy's velocity since it drew a step, and its direction relative to the drawn step."""

    drift: Tensor
    """[B, C, A] float32: the velocity now, less that which acted."""
    pull: Tensor
    """[B, C, A] float32: what was drawn less its mean then, times the mean now less that then, over the step's variance
    and 1e-4."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of decisions under the present weights, with gradients."""

    log_prob: Tensor
    """[B, C, A] float32."""
    entropy: Tensor
    """[B, C, A] float32; zero where it is constant in the parameters."""
    value: Tensor
    """[B] float32, or [B, C] where `act`'s are."""
    contrast: Contrast | None = None
    """Set by policies that score one drawn step of a flow (`PolicyFormat.contrasts`)."""
    auxiliary: Tensor | None = None
    """[B] float32: a further loss of each row, of the policy's own, which an update makes smaller too."""


@dataclass(frozen=True)
class PolicySpec:
    """The sizes a policy is built for, and what it reads."""

    action_dim: int
    chunk: int = 1
    """C: actions of a decision that are executed."""
    state_dim: int = 0
    """0: the policy does not read the state."""
    proprio_dim: int = 0
    cameras: tuple[str, ...] = ()
    image_size: int = 128
    horizon: int = 0
    """Actions that a decision predicts; the first C are executed. 0: the number in the policy's checkpoint, else C."""
    discrete_actions: int = 0
    """Choices of an action that is one: `action_dim` is then 1, and an action the number of the choice, from 0. 0:
    actions are real numbers."""
    action_low: tuple[float, ...] = ()
    """[A] lower bounds of actions in the environment's units, for a kind that scales to them
    (`PolicyKind.scales_to_bounds`); empty: all are -1."""
    action_high: tuple[float, ...] = ()
    """[A] upper bounds; empty: all are 1."""
    observations: int = 1
    """K: observations that a decision is made on, the present one among them. The first observation of an episode
    stands for those before it."""
    distance: int = 1
    """Env steps from each of the K observations to the next."""

    @property
    def predicted(self) -> int:
        """Actions that a decision predicts."""
        return self.horizon or self.chunk


class Policy(nn.Module):
    """Base of every policy. Subclasses set `spec`, `noise_dim` and `value_head`, and define the methods.

    `value_head` is a submodule: its parameters, and only they, are trained with the critic's learning rate
    and are saved apart. Everything that is not a parameter but belongs to the policy (normalisation
    statistics) is a buffer.
    """

    kind: str = ""
    """Name of its kind in `policies.registry`, or `package.module:NAME`; `policies.build` sets it."""
    spec: PolicySpec
    noise_dim: int
    """Z: how many standard normal numbers one decision consumes."""
    value_head: nn.Module
    base: str | None = None
    """Type of the frozen matrices under an adapter (`policies.quantised`), where they are quantised; `policies.build`
    sets it."""
    ratio_tolerance: float = 1e-4
    """Largest mean |ratio - 1| at the first minibatch that counts as on-policy (fp32: 1e-4)."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """`nn.Module` declares that any other attribute is a tensor or a module; capabilities are neither."""

    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        """Decide. `noise` is [B, Z] float32 standard normal; None takes the mode (evaluation).

        Deterministic given inputs, noise and weights; no gradient. Row i depends on row i alone.
        """
        raise NotImplementedError

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        """Score decisions that `act` took. With unchanged weights the log-probs equal `act`'s within tolerance."""
        raise NotImplementedError

    def value(self, inputs: Inputs) -> Tensor:
        """The critic alone, [B] float32, or [B, C] where `act`'s are. No gradient."""
        raise NotImplementedError

    def architecture(self) -> dict[str, Any]:
        """JSON-able keyword arguments (beside the spec) from which the same network can be built."""
        raise NotImplementedError


def actor_parameters(policy: Policy) -> Iterator[nn.Parameter]:
    """Parameters that are trained with the actor's learning rate."""
    critic = {id(p) for p in policy.value_head.parameters()}
    return (p for p in policy.parameters() if p.requires_grad and id(p) not in critic)


def spec_to_dict(spec: PolicySpec) -> dict[str, Any]:
    return {f.name: getattr(spec, f.name) for f in fields(spec)}
