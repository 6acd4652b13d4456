"""A kind of policies: what is known of it before a policy is built, and how its policies lie on disk.

`policies.registry` finds a kind by its name. A plain class derived from `Policy` is a kind with these defaults; a kind
that differs from them is a `PolicyKind` beside its class.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from policies.contract import Policy
from policies.errors import PolicyError
from policies.files import SINGLE, layout, layouts, read_tensors, shown

RECOMPUTED = {"gradient_checkpointing": "optim.recompute"}
"""`PolicyKind.former` of policies that once recomputed activations by an option of theirs."""
WHOLE = 50
"""A whole chunk of LeRobot's defaults: executed without a look at what became of its beginning."""


@dataclass(frozen=True)
class LoadedBy:
    """The program of others that loads a folder of a policy, and how."""

    program: str = ""
    """Name and version, with which it was tried unless the note says otherwise; empty: only this project loads it."""
    library: str = ""
    """The program's name on the Hugging Face hub (`library_name`)."""
    lines: str = ""
    """Python that loads it, in which `folder` is the folder's path."""
    note: str = ""
    """Sentences: what else it needs, or why no other program loads it."""


class PolicyFormat:
    """Reads a policy's properties from its options and files, and reads and writes a policy's folder.

    `architecture` are a policy's options by name, before one is built; no method that takes it reads a tensor. The
    methods here are those of this project's own layout: `model.safetensors` with the actor's parameters and all
    buffers. A kind whose community has a layout overrides `read` and `write`.
    """

    def reads(self, config: Mapping[str, Any]) -> bool:
        """True where a checkpoint directory with this config.json is one that this kind is made of."""
        return False

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        """Raise `PolicyError` if files that the options name are missing."""

    def check_instructions(
        self, architecture: Mapping[str, Any], instructions: Sequence[str], actions: int, source: str
    ) -> None:
        """Raise `PolicyError`, which names the rows, if instructions leave no room for the actions. `source` is the
        file of the instructions, a row each; the files that the options name must exist."""

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        """Questions that the named files leave open, where a wrong guess would fail silently: a sentence for each, with
        the assumption and the option that changes it."""
        return ()

    def chunk_notes(self, architecture: Mapping[str, Any], chunk: int, tasks: Sequence[str]) -> Sequence[str]:
        """What a user should know of executing `chunk` actions of each decision in these tasks: a sentence for each."""
        found, own = list[str](), self.executed(architecture)
        if own is not None and own != chunk:
            found.append(
                f"{architecture.get('checkpoint')}: LeRobot executes {own} actions of a chunk (n_action_steps), and "
                f"policy.chunk is {chunk}: results are of {chunk}; policy.chunk 0 is the checkpoint's number"
            )
        if chunk >= WHOLE and any(task.startswith("libero/") for task in tasks):
            found.append(
                f"policy.chunk is {chunk}: a policy that executes that many actions before it looks again fails most "
                f"of LIBERO, where 5 to 10 are usual ({WHOLE} is the default of LeRobot's SmolVLA and pi0): set "
                "policy.chunk to 10"
            )
        return found

    def executed(self, architecture: Mapping[str, Any]) -> int | None:
        """Number of actions of a chunk that the checkpoint's own program executes, where its files have one."""
        return None

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        """Number of actions that a decision predicts (`PolicySpec.predicted`) where `policy.horizon` leaves it to the
        files and they have one."""
        return None

    def ensemble(self, architecture: Mapping[str, Any], chunk: int) -> float | None:
        """Coefficient with which an evaluation that executes `chunk` actions of each decision averages its predictions
        (`Ensembles.ensemble`), whether an option or a file gives it; None: it does not average."""
        return None

    def continues(self, architecture: Mapping[str, Any]) -> bool:
        """True if a decision can agree with what is left of the last one (`RealTimeChunks`)."""
        return False

    def observations(self, architecture: Mapping[str, Any]) -> tuple[int, int]:
        """Number of observations that a decision is made on, and env steps from each to the next
        (`PolicySpec.observations`, `PolicySpec.distance`)."""
        return 1, 1

    def left_out_rows(self, architecture: Mapping[str, Any]) -> int:
        """Rows at the end of each demonstrated episode that are not learned from: what follows them is too short."""
        return 0

    def converts(self, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        """Conventions of the environment (`orientation`, `gripper`) that the policy converts itself: the option that
        does it, and the convention that it converts from. With another one the network would see or do what it was
        never trained with."""
        return {}

    def statistics_name(self, architecture: Mapping[str, Any]) -> str | None:
        """Name of the dataset whose statistics give actions their unit; None where a checkpoint's files give them no
        name, or they are of what the policy itself has learned from."""
        return None

    def contrasts(self, architecture: Mapping[str, Any]) -> bool:
        """True if `evaluate` fills `Evaluation.contrast`."""
        return False

    def slots(self, architecture: Mapping[str, Any]) -> int:
        """Rows that `act` computes together, where it makes a row's actions one after the other, finishes a row with
        the last action that is executed, and begins the next row at once (continuous batching). 0: all rows of a call
        take the same time."""
        return 0

    def served_by(self, architecture: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The metadata of the program that decides, as JSON: part of what identifies an evaluation, in place of the
        `incidental` options. None: this process computes decisions."""
        return None

    def restore_arguments(self, folder: Path) -> dict[str, Any]:
        """Arguments beside the architecture with which a policy is built to be filled from the folder."""
        return {}

    def write(self, policy: Any, folder: Path) -> None:
        """Write everything but the value head into the folder. Where the layout has a config.json, the entries that
        `policies.load` needs are added to it."""
        save_file(on_cpu(actor_state(policy)), folder / SINGLE)

    def read(self, policy: Any, folder: Path) -> dict[str, Tensor]:
        """Tensors that `write` wrote, under the names of `state_dict`; the policy stays as it is.

        Raises `PolicyError` unless they are whole, finite and fit. Tensors that are not trained may be left out.
        """
        check_layouts(folder / SINGLE, actor_state(policy))
        return read_tensors(folder / SINGLE)

    def export(self, policy: Any, folder: Path) -> None:
        """Write the whole policy as its community's own programs load it, adapters merged.

        Raises `PolicyError` for a kind that has no layout but this project's.
        """
        raise PolicyError(
            f"the policy {policy.kind} has no layout but this project's: its checkpoints are all there is"
        )

    def loaded_by(self, folder: Path) -> LoadedBy:
        """The program that loads an exported folder, or an adapter that `write` wrote into it."""
        return LoadedBy()

    @property
    def is_own(self) -> bool:
        """True if policies are in this project's own layout."""
        return type(self).read is PolicyFormat.read


@dataclass(frozen=True)
class PolicyKind:
    """The class of a kind's policies, their options and files, and facts that hold for all of them."""

    policy: type[Policy]
    options: type[Any] | None = None
    """Frozen dataclass of the options, which the constructor then takes as one object after the spec. None: they are
    its keyword arguments."""
    format: PolicyFormat = PolicyFormat()
    incidental: frozenset[str] = frozenset()
    """Options, and `spec.NAME` of the spec, that no saved weight depends on: where things lie, how they are computed,
    and how actions are drawn from what was computed."""
    former: Mapping[str, str] = field(default_factory=dict)
    """Options of earlier versions that no saved weight depends on, and the setting that each of them is now. Saved
    policies may name them. A new policy that names one is refused."""
    trainable: bool = True
    """False if its policies have no weights: they can be evaluated and recorded, not trained."""
    pretrained: bool = False
    """True if a policy that was just built has learned already: it begins with published weights."""
    chooses: bool = False
    """True if its actions are choices (`PolicySpec.discrete_actions`); False: real numbers."""
    predicts_more: bool = False
    """True if a decision may predict more actions than are executed (`PolicySpec.horizon`)."""
    scales_to_bounds: bool = False
    """True if its network's -1 and 1 are the bounds of the environment's actions, which its spec then has
    (`policies.action_range`). False: its units are those that its weights or demonstrations give."""
    waits: bool = False
    """True if `act` waits for another program, and may be called from several threads: an evaluation then has the
    decisions of several groups of environments under way together."""
    blank_instruction: str = "do nothing"
    """Instruction of an observation without content, by which sizes are found before a run."""

    def policy_for(self, architecture: Mapping[str, Any]) -> type[Policy]:
        """The class of a policy with these options."""
        return self.policy


def actor_state(policy: Policy) -> dict[str, Tensor]:
    """Everything that is saved and is not the critic's."""
    return {name: t for name, t in policy.state_dict().items() if not name.startswith("value_head.")}


def on_cpu(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}


def check_layouts(path: Path, expected: Mapping[str, Tensor]) -> None:
    """Raise `PolicyError` unless the file holds exactly those expected, by name, shape and dtype. Reads no tensor."""
    found = layouts(path)
    for name, tensor in expected.items():
        if name not in found:
            raise PolicyError(f"{path} lacks the tensor {name!r}")
        if found[name] != layout(tensor):
            raise PolicyError(f"{path}: {name!r} is {found[name]}, expected {layout(tensor)}")
    for name in found:
        if name not in expected:
            raise PolicyError(f"{path} has a tensor that this policy has not: {shown(name)}")
