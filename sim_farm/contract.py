"""The contract of simulators: the two halves every backend provides, and the data they exchange.

A backend is one module with a `Physics` class (steps one environment; never draws a picture), a
`Renderer` class (draws pictures of scenes; never steps), and a `BACKEND` by which tasks name it. The two
may live in different processes: all that travels from one to the other is `PhysicsResult.scene`.
The conformance suite `sim_farm.conformance` states the laws a backend must keep, and says what the farm cannot promise
where it does not.

Symbols in shapes: C actions of a chunk, A action dimensions, P proprioception, S state, n executed
steps (n <= C), H x W pixels, N scenes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from sim_farm.perturbations import CameraChange, Perturbation, SceneChange

Float32 = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]

Orientation = Literal["upright", "stock", "rotated"]
Gripper = Literal["simulator", "binary", "inverted"]

INSTRUCTION_BYTES = 512
"""Longest instruction in UTF-8 bytes where a task says nothing else: it travels in a slot of fixed size."""


@dataclass(frozen=True)
class TaskSpec:
    """A task, and how it is simulated and observed."""

    name: str
    """`<backend>/<task>`, for example `tabletop/reach`; a backend of one's own is `package.module:NAME`."""
    control_mode: str | None = None
    """One of the task's control modes; None is the backend's default."""
    reward: Literal["dense", "sparse"] | None = None
    """`dense`: shaped and normalised to at most 1 per env step (Gymnasium's: as the environment has it); `sparse`: 1
    where the task is solved. None: the backend's first."""
    max_episode_steps: int | None = None
    """Env steps after which an episode is truncated; None is the task's own limit."""
    cameras: int | tuple[str, ...] = 0
    """Names of the cameras to observe, or how many of the task's cameras, in the task's order."""
    image_size: int = 128
    """Height and width of every frame in pixels."""
    settle_steps: int = 0
    """Env steps with the task's rest action at an episode's beginning, before the first observation; not counted."""
    orientation: Orientation = "upright"
    """`upright`; `stock`: as the simulator's own environment returns it; `rotated`: that, turned by 180 degrees."""
    gripper: Gripper = "simulator"
    """Meaning of the last action element. `simulator`: the simulator's own; `binary`: its sign alone;
    `inverted`: in [0, 1], 1 opens, binarised at 0.5 (OpenVLA's family, in simulators whose +1 closes)."""
    ignore_terminations: bool = False
    """Episodes run to the step limit: neither success nor failure ends them. ManiSkill's name for it."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Options of the simulator's own, of those in `Backend.options`: plain values by name."""
    perturbations: tuple[Perturbation, ...] = ()
    """Perturbations of the task; an episode names one by its index (`EpisodeSpec.perturbation`), or none."""


@dataclass(frozen=True)
class TaskInfo:
    """The backend's description of a task: the sizes of everything that is exchanged, fixed for the task's lifetime."""

    spec: TaskSpec
    """The request with every None and count resolved."""
    action_dim: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    proprio_dim: int
    state_dim: int
    scene_bytes: int
    cameras: tuple[str, ...]
    max_episode_steps: int
    control_hz: float
    rest_action: tuple[float, ...] = ()
    """The action that leaves the robot where it is; empty where there is none. Physics that has one can settle."""
    init_states: int = 0
    """Number of the task's recorded initial states; 0: episodes begin from their seed alone."""
    stock_upside_down: bool = False
    """True if row 0 of the simulator's own frames is the lowest."""
    stream: bool = False
    """True if a seed's random stream can run on over resets: episodes may have `resets` and `unseeded_resets`."""
    discrete_actions: int = 0
    """Number of choices of an action that is one: `action_dim` is then 1, and an action the choice's number from 0, as
    float32. 0: actions are real numbers."""
    instruction_bytes: int = INSTRUCTION_BYTES
    """Longest instruction in UTF-8 bytes."""
    first_choice: int = 0
    """Number that the simulator itself gives the first choice."""
    turns: int = 1
    """Most turns of an episode: a chunk ends with a turn, whose end has to be seen before the next is decided."""
    has_success: bool = True
    """False if the task knows no success, and is measured by its return: `success` is then False throughout."""
    digest: str | None = None
    """sha256 over the task's instruction and the files that define it; None in simulators that read none."""
    inexact: str = ""
    """Reason why equal episodes and actions may give other results (`Backend.exact_replay`); empty: they do not."""


@dataclass(frozen=True)
class EpisodeSpec:
    """Everything that determines an episode, but for the actions. Equal specs give equal episodes."""

    seed: int
    """In [0, 2**31): every random draw of the episode, its geometry included, comes from it."""
    init_state: int | None = None
    """Index of a recorded initial state, in tasks that have them; None draws one from the seed."""
    resets: int = 0
    """Resets between the simulator's seeding and the episode's own, which draw from the seed's stream before it does:
    some published evaluations seed once and let the stream run on over their trials."""
    unseeded_resets: int = 0
    """Resets of the simulator before it was seeded. They draw nothing from the seed's stream, and can leave traces."""
    perturbation: int | None = None
    """Index of the episode's perturbation in `TaskSpec.perturbations`; None: the episode is as the task has it."""


@dataclass(frozen=True)
class PhysicsResult:
    """Result of executing a chunk (or of a reset, with n = 0). Arrays are the caller's to keep."""

    reward: Float32
    """[n] reward of each executed step."""
    success: Bool
    """[n] whether the task was solved after each executed step."""
    terminated: Bool
    """[n] the task's own end (solved, or failed beyond repair). Only the last can be true."""
    truncated: Bool
    """[n] the step limit was reached and the step did not terminate. Only the last can be true."""
    proprio: Float32
    """[P] what the robot feels, after the last executed step."""
    state: Float32
    """[S] the simulator's full (privileged) observation, after the last executed step."""
    scene: UInt8
    """[scene_bytes] raw bytes that, with the task, determine the picture exactly."""
    instruction: str
    """Instruction of the robot; constant during an episode, unless its perturbation changes it in the middle."""
    fault: str = ""
    """Cause of a number that is not finite, for the user: what failed, and where. Empty: unknown."""

    @property
    def steps(self) -> int:
        """Number of executed env steps; smaller than C when the episode, or a turn of it, ended within the chunk."""
        return len(self.reward)

    @property
    def ended(self) -> bool:
        return self.steps > 0 and bool(self.terminated[-1] or self.truncated[-1])


@runtime_checkable
class Physics(Protocol):
    """One environment without pictures."""

    info: TaskInfo

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        """Begin the episode. Its result equals, bit for bit, that of a new instance on the same machine."""
        ...

    def step(self, actions: Float32) -> PhysicsResult:
        """Execute `actions` [C, A] open loop, one env step each, and stop at the step that ends the episode or a turn.

        Actions outside the bounds are clipped to them. Raises `EpisodeOver` if the episode has ended.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class SettlingPhysics(Physics, Protocol):
    """Physics of a task that has a rest action."""

    def settle(self, steps: int) -> PhysicsResult:
        """Execute `steps` env steps of the rest action, right after a reset. They end nothing, are not counted, and are
        rewarded by nothing: the result has n = 0."""
        ...


@runtime_checkable
class PerturbedPhysics(Physics, Protocol):
    """Physics that can change its scene (`Backend.axes`)."""

    def perturb(self, change: SceneChange, draw: np.random.Generator) -> PhysicsResult:
        """Apply the change, right after a reset or between two env steps of an episode. What is drawn comes from `draw`
        alone. No step is executed: the result has n = 0. Raises `FarmError` where the task has nothing to change."""
        ...


class PhysicsBatch(Protocol):
    """Environments of one task that a worker steps at once (`Backend.make_batch`). What they were made of may still be
    reset, and stepped one by one."""

    @property
    def alone(self) -> str:
        """Reason why the environments are stepped one by one all the same, which may be found late; empty: they are
        not."""
        ...

    def step(self, which: Sequence[int], actions: Float32) -> Sequence[PhysicsResult]:
        """Results of the chunks `actions` [M, C, A] in the environments of `which` [M], all different: equal, bit for
        bit, to those of each one's `Physics.step`. Raises as that."""
        ...


SimulatorState = Mapping[str, npt.NDArray[np.generic]]
"""The simulator's own state as its own recorders write it, by names that the backend knows."""


@runtime_checkable
class RecordedPhysics(Physics, Protocol):
    """Physics that can follow a recording which the simulator's own recorder made."""

    def go_on(self, episode: EpisodeSpec) -> None:
        """Reset as the simulator's own recorder does between two episodes of one environment: what such a reset leaves
        in the simulator (PhysX's contacts, controllers' targets) is kept. A new environment has nothing to keep.
        """
        ...

    def begin_at(self, start: SimulatorState) -> PhysicsResult:
        """Right after a reset: continue from the recorded state `start`, or where the reset led if it is empty.

        The episode ends where its recording does: until `max_episode_steps` it continues, solved or not. The result has
        n = 0. Raises `FarmError` that names the parts of the state that the task's scene lacks.
        """
        ...

    def place(self, recorded: SimulatorState) -> PhysicsResult:
        """Between two steps: put everything to the recorded state, from which the next action continues; the
        controllers' targets stay. The result has n = 0. Raises as `begin_at`."""
        ...

    def deviation(self, recorded: SimulatorState) -> float:
        """Largest distance of a position (m), joint (rad) or orientation (element of the quaternion) from `recorded`,
        now; 0.0 means that all are equal bit for bit."""
        ...


@runtime_checkable
class Renderer(Protocol):
    """Draws scenes of one task. Holds replicas of scenes, and drops the oldest when there are too many."""

    info: TaskInfo

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        """Frames of N scenes: for each camera uint8 [N, H, W, 3], RGB, row 0 at the top.

        Equal to the last bit to what the simulator's own environment shows for the same episode and actions on the same
        machine: other processors have kernels that round differently. Where `out` is given, it is arrays of these
        shapes, of any strides: the frames are drawn into them and `out` is returned. A renderer that cannot do that
        returns other arrays, which the caller copies.
        """
        ...

    def close(self) -> None:
        """Free the replicas and the resources that draw them. Another renderer may be made in the same process later,
        while its physics continues; it draws the same."""
        ...


@runtime_checkable
class AimedRenderer(Renderer, Protocol):
    """Renderer that can move its cameras (`Backend.axes`)."""

    def aim(self, changes: Sequence[CameraChange], draw: np.random.Generator) -> None:
        """From now on, draw with the cameras moved by `changes`, each relative to the task's own camera; without
        changes, draw with the task's cameras. All random numbers come from `draw`. Raises `FarmError` for an unknown
        camera."""
        ...


def new_frames(count: int, cameras: Sequence[str], size: int) -> dict[str, UInt8]:
    """Arrays uint8 [count, size, size, 3] for each camera, not yet drawn."""
    return {name: np.empty((count, size, size, 3), np.uint8) for name in cameras}


@dataclass(frozen=True)
class TaskFiles:
    """The files that define a task, as they are on this machine."""

    digest: str
    """sha256 over the task's instruction and the content of its files."""
    foreign: tuple[str, ...] = ()
    """Files, and the instruction, that are not as the benchmark's authors published them: a sentence each. Meshes and
    textures are among them, and not in the digest."""
    instructions: tuple[str, ...] = ()
    """All instructions, if episodes differ only in their instruction: the episode of seed s begins with number s modulo
    their number. Else empty."""
    source: str = ""
    """The file that has them, a row each."""


Prompt = Literal["intended", "published"]
"""Instruction that a suite of perturbations gives the policy. `intended`: the task's own instruction, or that of the
variant's task file if words are the axis; `published`: the instruction of the suite's own code."""


@dataclass(frozen=True)
class PerturbationSuite:
    """A published suite of perturbations of a simulator's tasks."""

    axes: tuple[str, ...]
    table: Callable[[str, Prompt, Sequence[str], Sequence[int]], tuple[Perturbation, ...]]
    """`(task, prompt, axes, levels)`: the task's perturbations, in the suite's order. Raises `FarmError` if the suite
    lacks the task, or its files are missing."""
    notes: Callable[[Sequence[str]], Sequence[str]]
    """Notes on the suite's perturbations of these tasks: how many are left out, and why."""


@dataclass(frozen=True)
class Backend:
    """Entry of a backend in the registry."""

    name: str
    make_physics: Any
    """`(TaskSpec) -> Physics`"""
    make_renderer: Any
    """`(TaskSpec) -> Renderer`"""
    tasks: Any
    """`() -> Sequence[str]`: the task names, without the backend's prefix."""
    make_batch: Callable[[Sequence[Any]], PhysicsBatch] | None = None
    """`(physics of a worker) -> PhysicsBatch`, in simulators that step several environments in less time at once."""
    rewards: tuple[Literal["dense", "sparse"], ...] = ("dense", "sparse")
    """The kinds of reward that its tasks may have, the usual one first."""
    files: Callable[[str], TaskFiles | None] | None = None
    """The files of the task `<backend>/<task>`, or None; no function: its tasks are all in the simulator's code."""
    drawn_by: Callable[[], tuple[str, str | None]] = lambda: ("unknown", None)
    """Device of this process's renderers: its name, and its UUID or PCI address if it has one."""
    exact_replay: bool = True
    """Equal episodes and actions give equal results, to the last bit, in any process of one machine. False: a physics
    worker that is lost costs its episodes, a resumed run begins new ones, and nothing is filmed or recorded, which is
    to replay. Where some tasks alone are so, `TaskInfo.inexact` says which."""
    exact_split: bool = True
    """A scene gives the same picture, to the last bit, in any process of one machine. False: the processes that step
    also draw, and there are no render workers."""
    success_ends: bool = True
    """An episode ends once its task is solved (`TaskSpec.ignore_terminations` aside). False: it may continue, and be no
    longer solved at its end."""
    ignores_terminations: bool = True
    """Its episodes can continue after they have terminated (`TaskSpec.ignore_terminations`). False: that is refused."""
    quick: bool = False
    """True if an environment is made in a fraction of a second, in any process: a run is then checked against its sizes
    before anything is started."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions say which simulator it is, as an evaluation records them."""
    distinct_seeds: bool = True
    """Episodes of different seeds are different. False: seeds draw from few problems, and some share one."""
    options: tuple[str, ...] = ()
    """Names of the options that its tasks take (`TaskSpec.options`)."""
    axes: Mapping[str, float] = field(default_factory=dict)
    """Axes of perturbations that its physics and renderer can apply, with the size of one level of a graded one:
    `start` (`RobotOffset`, rad or m), `objects` (`ObjectOffset`, m), `camera` (`CameraOrbit`, degrees). `posture`
    (`HomePosture`) and `task file` (`TaskFile`) are of published suites alone, and of no size. Pictures and words need
    nothing of a simulator."""
    suites: Mapping[str, PerturbationSuite] = field(default_factory=dict)
    """Published suites of perturbations of its tasks, by name."""
    prepare: Callable[[], None] = lambda: None
    """Makes the simulator's packages importable, before a module that registers tasks imports them."""
    load: Callable[[str], None] = lambda task: None
    """`(<backend>/<task>)`: imports what environments need and the backend's module has not imported, and builds what
    those of the task share. Workers are forks of a process that has called it: it draws nothing, and starts no
    thread."""


class FarmError(Exception):
    """A mistake of the user or a failure of the machine, with a message that says what to do next."""


class EpisodeOver(FarmError):
    """`step` was called on an episode that had ended."""
