"""The policy `remote`: observations go to a policy server, action chunks come back.

The server speaks openpi's protocol (`policies.remote.messages`). One of this project (`embodied serve`) says so in its
metadata, under `EXTENSION`: then rows that are decided together travel together and are one batch there too, pictures
travel as they are, and the noise that keys a decision travels with it, so that the decision is the same as in this
process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.capabilities import LeftOver
from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.errors import shown
from policies.policy_kind import PolicyFormat, PolicyKind
from policies.remote.connections import Connections, check_address, metadata_of, question_of
from policies.remote.keys import CAMERA, keys_of
from policies.resampling import fit_square

EXTENSION = "embodied"
"""Entry of a server's metadata with what openpi's protocol does not have: a server of this project has one."""
NOISE = "embodied/noise"
"""Key of the noise float32 [Z] or [B, Z] of a decision; None: its mode. Without the key the server decides which."""
LEFT_OVER, THERE, DELAY, JACOBIAN = (
    f"{EXTENSION}/{name}" for name in ("left_over", "left_over_there", "delay", "jacobian")
)
"""Keys of a request for all that a decision predicts, in agreement with what is left of the last chunk (`LeftOver`):
float32 [L, A] or [B, L, A], where L may be 0; bool [B], without the key all true; env steps; bool, true without it."""
CONVENTIONS = ("orientation", "gripper", "control_mode")
"""Environment settings that a server of this project states in its metadata."""
RESIZED = 224
"""Side in pixels of the pictures that openpi's clients send."""


@dataclass(frozen=True, kw_only=True)
class RemoteOptions:
    """Options of remote: the server's address, its keys, and the time limits. Raises `PolicyError`."""

    address: str = ""
    """ws://HOST:PORT."""
    keys: Mapping[str, str] | None = None
    """The server's keys by the names used here, where they are not openpi's (`policies.remote.keys`)."""
    image_size: int | None = None
    """Side in pixels to which pictures are resized, with black at the sides; 0: they are sent as they are. None: 224 as
    openpi's clients send, and as they are to a server of this project."""
    connections: int = 4
    """Most requests that are under way together."""
    timeout_s: float = 60.0
    """Longest wait for a connection and for a decision; keep it below half of runtime.deadline_s."""
    first_timeout_s: float = 240.0
    """Longest wait for the first decision, for which a server may have to compile its network."""

    def __post_init__(self) -> None:
        if self.connections < 1 or not self.timeout_s > 0 or not self.first_timeout_s > 0:
            raise PolicyError(
                "a remote policy has at least 1 of connections and waits longer than 0 s; got connections "
                f"{self.connections}, timeout_s {self.timeout_s:g}, first_timeout_s {self.first_timeout_s:g}"
            )
        if not (self.image_size is None or (type(self.image_size) is int and 0 <= self.image_size <= 4096)):
            raise PolicyError(f"a remote policy's image_size is of 0 to 4096 pixels, got {shown(self.image_size)}")
        if not (self.keys is None or isinstance(self.keys, Mapping)):
            raise PolicyError(f"a remote policy's keys is a map of names to keys, got {shown(self.keys)}")


class Remote(Policy):
    """Asks a server for every decision. It has no weights here: log-probs and values are zero, nothing is trained."""

    kind = "remote"

    def __init__(self, spec: PolicySpec, options: RemoteOptions) -> None:
        """Asks for one decision about a black picture. A server that cannot give one, or gives another shape, is so
        found before the first env step: raises `PolicyError`."""
        super().__init__()
        self.spec, self.options = spec, options
        self.value_head = nn.Identity()
        self._keys = keys_of(spec.cameras, options.keys)
        self._connections = Connections(options.address, options.connections, options.timeout_s)
        self._ours = _extension(self._connections.metadata)
        self.noise_dim = 0 if self._ours is None else int(self._ours["noise_dim"])
        size = options.image_size
        self._image_size = (RESIZED if self._ours is None else 0) if size is None else size
        if self._ours is not None:
            self._check_cameras(self._ours.get("keys"))
        self._threads = ThreadPoolExecutor(options.connections, "remote policy")
        self._decide(_blank(spec), None, options.first_timeout_s)

    def _check_cameras(self, theirs: Any) -> None:
        """Raise `PolicyError` where the server takes the picture of a camera for that of another."""
        for camera in self.spec.cameras:
            name = f"{CAMERA}{camera}"
            key = theirs.get(name) if isinstance(theirs, Mapping) else None
            if key is not None and key != self._keys[name]:
                raise PolicyError(
                    f"the policy server at {self.options.address} reads the camera {camera} as {shown(key)}, and it is "
                    f"sent as {self._keys[name]!r}: name env.cameras in the order of the served policy, or set "
                    f"policy.options.keys to {{{name}: {key}}}"
                )

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        chunk = self._decide(inputs, noise, self.options.timeout_s)
        return Action(chunk, torch.zeros_like(chunk), torch.zeros(len(chunk)), {"action": chunk})

    def predict(self, inputs: Inputs, noise: Tensor | None) -> Tensor:
        """[B, H, A]: all actions that the server answers."""
        rows = _rows(inputs)
        nothing = torch.zeros(rows, 0, self.spec.action_dim)
        return self._predicted(inputs, noise, LeftOver(nothing, torch.zeros(rows, dtype=torch.bool), delay=0))

    def continue_chunk(self, inputs: Inputs, noise: Tensor | None, left: LeftOver) -> Tensor:
        """[B, H, A]. Raises `PolicyError` for a served policy that cannot."""
        if self._ours is None or not self._ours.get("continues"):
            raise PolicyError(
                f"the policy server at {self.options.address} continues no chunk: only flow policies (pi0, smolvla) "
                "that `embodied serve` serves do; set eval.delay_method to naive or ensemble"
            )
        return self._predicted(inputs, noise, left)

    @torch.no_grad()
    def _predicted(self, inputs: Inputs, noise: Tensor | None, left: LeftOver) -> Tensor:
        asked: dict[str, Any] = {}
        if self._ours is not None:
            asked = {LEFT_OVER: left.actions.numpy(), THERE: left.there.numpy()}
            asked |= {DELAY: left.delay, JACOBIAN: left.jacobian}
        return self._decide(inputs, noise, self.options.timeout_s, asked)

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, self.value(inputs))

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros(_rows(inputs))

    def architecture(self) -> dict[str, Any]:
        keys = self.options.keys
        return asdict(self.options) | {"keys": None if keys is None else dict(keys)}

    def close(self) -> None:
        """Close the connections."""
        self._threads.shutdown()
        self._connections.close()

    def _decide(
        self, inputs: Inputs, noise: Tensor | None, timeout_s: float, predicted: Mapping[str, Any] | None = None
    ) -> Tensor:
        """[B, C, A]; all actions of the answers with `predicted`, which is sent to a server of this project."""
        rows, observation, whole = _rows(inputs), self._observation(inputs), predicted is not None
        if self._ours is not None:
            observation |= {NOISE: None if noise is None else noise.numpy()} | dict(predicted or {})
            return self._checked(self._connections.ask(question_of(observation), timeout_s), (rows,), whole)
        questions = [question_of({key: part[row] for key, part in observation.items()}) for row in range(rows)]
        answers = self._threads.map(lambda question: self._connections.ask(question, timeout_s), questions)
        return torch.stack([self._checked(answer, (), whole) for answer in answers])

    def _observation(self, inputs: Inputs) -> dict[str, Any]:
        """The parts that are read, of all rows, under the server's keys."""
        keys, found = self._keys, dict[str, Any]()
        for camera, frames in inputs.frames.items():
            found[keys[f"{CAMERA}{camera}"]] = self._resized(frames).numpy()
        for name, vector in (("proprio", inputs.proprio), ("state", inputs.state)):
            if vector is not None:
                found[keys[name]] = vector.numpy()
        if inputs.instruction:
            found[keys["instruction"]] = list(inputs.instruction)
        return found

    def _resized(self, frames: Tensor) -> Tensor:
        """uint8 [..., H, W, 3] in the size that the server is sent."""
        size = self._image_size
        if not size:
            return frames
        return fit_square(frames.flatten(0, -4), size, "bilinear").view(*frames.shape[:-3], size, size, 3)

    def _checked(self, actions: np.ndarray, rows: tuple[int, ...], whole: bool) -> Tensor:
        """The first C of each chunk, or all of it. Raises `PolicyError` for another shape."""
        horizon, numbers = actions.shape[-2:]
        spec, address = self.spec, self.options.address
        if actions.shape[:-2] != rows or numbers != spec.action_dim:
            raise PolicyError(
                f"the policy server at {address} answers actions of the shape {list(actions.shape)}, and the task "
                f"takes {[*rows, 'H', spec.action_dim]}: it serves a policy of another robot or control mode"
            )
        if horizon < spec.chunk:
            raise PolicyError(
                f"the policy server at {address} answers chunks of {horizon} actions, and policy.chunk, the number "
                f"that is executed before the next decision, is {spec.chunk}: set policy.chunk to at most {horizon}"
            )
        return torch.from_numpy(np.ascontiguousarray(actions[..., : None if whole else spec.chunk, :]))


class PolicyServer(PolicyFormat):
    """A policy without files: the server's metadata describe it."""

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        """A server is there, and sends metadata."""
        options = RemoteOptions(**architecture)
        check_address(options.address)
        _extension(metadata_of(options.address, options.timeout_s))

    def served_by(self, architecture: Mapping[str, Any]) -> Mapping[str, Any]:
        options = RemoteOptions(**architecture)
        return _as_json(metadata_of(options.address, options.timeout_s))

    def observations(self, architecture: Mapping[str, Any]) -> tuple[int, int]:
        """Those of the served policy, as a server of this project reports them; one of others' servers."""
        options = RemoteOptions(**architecture)
        ours = _extension(metadata_of(options.address, options.timeout_s)) or {}
        found = ours.get("observations", 1), ours.get("distance", 1)
        if not all(type(number) is int for number in found):
            raise PolicyError(f"the metadata of the policy server has observations {shown(found)}, no whole numbers")
        return found

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        """That of the served policy, as a server of this project reports it."""
        options = RemoteOptions(**architecture)
        found = (_extension(metadata_of(options.address, options.timeout_s)) or {}).get("predicted")
        if found is not None and (type(found) is not int or found < 1):
            raise PolicyError(f"the metadata of the policy server has predicted {shown(found)}, no number of actions")
        return found

    def continues(self, architecture: Mapping[str, Any]) -> bool:
        options = RemoteOptions(**architecture)
        ours = _extension(metadata_of(options.address, options.timeout_s))
        return ours is not None and bool(ours.get("continues"))

    def converts(self, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        """Conventions that the served policy was trained with, as a server of this project reports them."""
        options = RemoteOptions(**architecture)
        ours = _extension(metadata_of(options.address, options.timeout_s))
        conventions = None if ours is None else ours.get("conventions")
        said = conventions if isinstance(conventions, Mapping) else {}
        by = f"address is of a policy served by {EXTENSION}"
        return {setting: (by, str(said[setting])) for setting in CONVENTIONS if setting in said}

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        options = RemoteOptions(**architecture)
        if _extension(metadata_of(options.address, options.timeout_s)) is not None:
            return ()
        return (
            f"the server at {options.address} draws its own noise, or none: eval.greedy does not reach it, and another "
            "evaluation may decide otherwise. It does not say under which env.orientation, env.gripper and "
            "env.control_mode its policy was trained: those of the environments are taken",
        )


REMOTE = PolicyKind(
    Remote,
    options=RemoteOptions,
    format=PolicyServer(),
    incidental=frozenset({"address", "connections", "timeout_s", "first_timeout_s"}),
    trainable=False,
    pretrained=True,
    waits=True,
)


def _rows(inputs: Inputs) -> int:
    for seen in (inputs.state, inputs.proprio, *inputs.frames.values()):
        if seen is not None:
            return len(seen)
    return len(inputs.instruction)


def _blank(spec: PolicySpec) -> Inputs:
    """One row of nothing to be seen."""
    size, row = spec.image_size, (1, spec.observations) if spec.observations > 1 else (1,)
    return Inputs(
        state=torch.zeros(*row, spec.state_dim) if spec.state_dim else None,
        proprio=torch.zeros(*row, spec.proprio_dim) if spec.proprio_dim else None,
        frames={camera: torch.zeros(*row, size, size, 3, dtype=torch.uint8) for camera in spec.cameras},
        instruction=("do nothing",),
    )


def _extension(metadata: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Metadata of a server of this project beyond openpi's protocol; None for other servers. Raises `PolicyError`."""
    found = metadata.get(EXTENSION)
    if found is None:
        return None
    if not isinstance(found, Mapping) or type(found.get("noise_dim")) is not int:
        raise PolicyError(f"the metadata of the policy server has {shown(found)} for {EXTENSION!r}, and no noise_dim")
    return found


def _as_json(value: Any) -> Any:
    """The metadata as JSON has it: arrays as lists, bytes by their hexadecimal digits."""

    def plain(item: Any) -> Any:
        if isinstance(item, Mapping):
            return {str(name): plain(each) for name, each in item.items()}
        if isinstance(item, (list, tuple)):
            return [plain(each) for each in item]
        if isinstance(item, (np.ndarray, np.generic)):
            return plain(item.tolist())
        if isinstance(item, float) and not math.isfinite(item):
            return str(item)
        return item if isinstance(item, (str, int, float, bool, type(None))) else str(item)

    return json.loads(json.dumps(plain(value)))
