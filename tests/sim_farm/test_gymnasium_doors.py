"""Environments of other people at the door: pictures, texts, success, seeds, bounds, and what goes wrong in them."""

from __future__ import annotations

import copy
import random
import re
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from embodied.commands.evaluate import evaluate_run
from embodied.config.schema import Config
from embodied.errors import UserError
from sim_farm.client.vector_env import vector_env
from sim_farm.contract import EpisodeSpec, FarmError, PhysicsResult, TaskInfo, TaskSpec
from sim_farm.registry import make_physics, make_renderer
from tests.sim_farm.test_gymnasium import register

STATE = spaces.Box(-1.0, 1.0, (4,), np.float32)


def pixels(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


class Samples(gymnasium.Env[Any, Any]):
    """Shows samples of its space, which its seed determines; `info` is what each step's info is made of."""

    def __init__(self, space: spaces.Space[Any] = STATE, action_space: Any = None, info: Any = None) -> None:
        self.observation_space = copy.deepcopy(space)  # each draws its own samples
        self.action_space = action_space or spaces.Discrete(2)
        self._info = info or (lambda step: {})

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self._steps, self._began = 0, seed
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, Any, Any, bool, dict[str, Any]]:
        assert self.action_space.contains(action), f"{action!r} is outside {self.action_space}"
        self._steps += 1
        return self.observation_space.sample(), 1.0, np.bool_(self._steps == 4), False, self._info(self._steps)


class Global(Samples):
    """Draws from NumPy's own generator."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.random.uniform(-1, 1, 4).astype(np.float32), {}


class SeedsGlobal(Global):
    """Seeds it, which is enough for one environment in a process, and not for two."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        np.random.seed(seed)
        return super().reset(seed=seed)

    def step(self, action: Any) -> tuple[Any, Any, Any, bool, dict[str, Any]]:
        return np.random.uniform(-1, 1, 4).astype(np.float32), *super().step(action)[1:]


class NotAtAll(Samples):
    """`how` it goes wrong."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self._how = how

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        shown = super().reset(seed=seed)
        if self._how == "reset" and seed == 7:
            raise KeyError("the table of seven")
        if self._how == "nan":
            return np.full(4, np.nan, np.float32), {}
        if self._how == "size":
            return np.zeros(3, np.float32), {}
        return shown[0] if self._how == "old reset" else shown

    def step(self, action: Any) -> Any:
        seen = super().step(action)
        if self._how == "step" and self._steps == 3 and self._began == 7:
            return 1 // 0
        if self._how == "old step":
            return seen[0], 1.0, False, {}
        return (seen[0], np.zeros(2), *seen[2:]) if self._how == "rewards" else seen


class Gives(Samples):
    """Says the space, and gives what `seen` makes of the generator and the step; `answer` replaces parts of step's."""

    def __init__(self, seen: Any = None, answer: Any = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._seen, self._answer = seen, answer or {}

    def _shown(self, sample: Any, step: int) -> Any:
        return sample if self._seen is None else self._seen(self.np_random, step)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Any]:
        sample, info = super().reset(seed=seed)
        return self._shown(sample, 0), self._answer.get("reset", info)

    def step(self, action: Any) -> Any:
        sample, reward, terminated, truncated, info = super().step(action)
        answer = {"reward": reward, "terminated": terminated, "truncated": truncated, "info": info, **self._answer}
        answer.pop("reset", None)
        return self._shown(sample, self._steps), *answer.values()


class Long(Samples):
    """Its episodes have 40 env steps; draws from the module's generator when `late` begins."""

    def __init__(self, late: int, success: int = 0, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._late, self._success = late, success

    def step(self, action: Any) -> Any:
        seen, _, _, truncated, _ = super().step(action)
        drawn = random.random() if self._steps >= self._late else 1.0
        info = {"is_success": True} if self._success and self._steps == self._success else {}
        return seen, drawn, self._steps == max(40, self._success), truncated, info


class NanUnseen(Samples):
    """Its rewards are not finite in episodes of seeds that no trial has."""

    def step(self, action: Any) -> Any:
        seen, reward, *rest = super().step(action)
        return seen, reward if self._began in (0, 1) else float("nan"), *rest


class Seedless(Samples):
    """Its reset is of no parameters."""

    def reset(self) -> Any:  # pyrefly: ignore[bad-override]
        return super().reset()


class Leaves(Samples):
    """Ends the process in its third step."""

    def step(self, action: Any) -> Any:
        seen = super().step(action)
        return sys.exit() if self._steps == 3 else seen


PICTURES: dict[str, tuple[spaces.Space[Any], dict[str, Any], int]] = {
    # The space; by camera, the picture in an observation, grey as [H, W]; the size of the state.
    "rgb": (pixels(12, 10, 3), {"observation": lambda seen: seen}, 0),
    "first": (pixels(3, 12, 10), {"observation": lambda seen: seen.transpose(1, 2, 0)}, 0),
    "grey": (pixels(12, 10), {"observation": lambda seen: seen}, 0),
    "grey1": (pixels(12, 10, 1), {"observation": lambda seen: seen[..., 0]}, 0),
    "stack": (pixels(4, 12, 10), {f"observation_{i}": lambda seen, i=i: seen[i] for i in range(4)}, 0),
    "stacked-last": (pixels(12, 10, 2), {f"observation_{i}": lambda seen, i=i: seen[..., i] for i in range(2)}, 0),
    "stack-rgb": (pixels(2, 12, 10, 3), {f"observation_{i}": lambda seen, i=i: seen[i] for i in range(2)}, 0),
    "floats": (
        spaces.Box(0.0, 1.0, (12, 10, 3), np.float32),
        {"observation": lambda seen: np.rint(seen * 255).astype(np.uint8)},
        0,
    ),
    "beside": (spaces.Dict(front=pixels(12, 10, 3), joints=STATE), {"front": lambda seen: seen["front"]}, 4),
    "nested": (
        spaces.Dict(eyes=spaces.Dict(left=pixels(9, 9, 3), right=pixels(9, 9, 3)), at=STATE, mode=spaces.Discrete(3)),
        {f"eyes_{side}": lambda seen, side=side: seen["eyes"][side] for side in ("left", "right")},
        7,
    ),
    "tuple": (spaces.Tuple((pixels(9, 9, 3), STATE)), {"observation_0": lambda seen: seen[0]}, 4),
    "cells": (pixels(7, 7, 3), {}, 147),
    "float-stack": (
        spaces.Box(0.0, 1.0, (2, 32, 32), np.float32),
        {f"observation_{i}": lambda seen, i=i: np.rint(seen[i] * 255).astype(np.uint8) for i in range(2)},
        0,
    ),
    "float-grey": (
        spaces.Box(0.0, 1.0, (32, 32), np.float32),
        {"observation": lambda seen: np.rint(seen * 255).astype(np.uint8)},
        0,
    ),
    "centred": (
        spaces.Box(-1.0, 1.0, (32, 32, 3), np.float32),
        {"observation": lambda seen: np.rint((seen + 1) * 127.5).astype(np.uint8)},
        0,
    ),
    "heights": (spaces.Box(0.0, 1.0, (12, 10), np.float32), {}, 120),
    "signed": (spaces.Box(-1.0, 1.0, (12, 10, 3), np.float32), {}, 360),
}
for kind, (space, _, _) in PICTURES.items():
    register(f"Seen-{kind}-v0", Samples, space=space)
register("Told-v0", Samples, space=spaces.Dict(mission=spaces.Text(1000, min_length=3), at=STATE))
register("TwiceTold-v0", Samples, space=spaces.Dict(one=spaces.Text(9), two=spaces.Text(9)))
register("Graph-v0", Samples, space=spaces.Dict(body=spaces.Graph(STATE, None), at=STATE))
for kind, info in {
    "AtTheEnd": lambda step: {"is_success": True} if step == 4 else {},
    "InFinal": lambda step: {"final_info": {"success": np.array([1.0])}} if step == 4 else {},
    "Middle": lambda step: {"is_success": step == 2},
    "Never": lambda step: {"success": None},
    "Nan": lambda step: {"is_success": float("nan")},
    "Odds": lambda step: {"success": 0.3},
}.items():
    register(f"{kind}-v0", Samples, info=info)
register("Global-v0", Global)
register("SeedsGlobal-v0", SeedsGlobal)
register("Declared-v0", Samples)
gymnasium.registry["farm-tests/Declared-v0"].nondeterministic = True
for how in ("reset", "step", "nan", "size", "old reset", "old step", "rewards"):
    register(f"Wrong-{how.replace(' ', '-')}-v0", NotAtAll, how=how)
GREY, UNIT = pixels(12, 10, 3), spaces.Box(0.0, 1.0, (12, 10, 3), np.float32)
GIVEN: dict[str, tuple[dict[str, Any], str]] = {
    "bright": (
        {"space": UNIT, "seen": lambda rng, step: np.full(UNIT.shape, 200 if step == 2 else 1, np.float32)},
        "picture observation has the number 200, and its space is from 0 to 1.*at step 2 after reset",
    ),
    "bit-bright": (
        {"space": UNIT, "seen": lambda rng, step: np.full(UNIT.shape, 1.02, np.float32)},
        "has the number 1.02, and its space is from 0 to 1",
    ),
    "nan-picture": (
        {"space": UNIT, "seen": lambda rng, step: np.full(UNIT.shape, np.nan, np.float32)},
        "has the number nan, and its space is from 0 to 1",
    ),
    "float-bytes": (
        {"space": GREY, "seen": lambda rng, step: np.full(GREY.shape, 0.7, np.float32)},
        "has numbers of float32, and those of its space are whole",
    ),
    "unbounded": ({"space": spaces.Box(-np.inf, np.inf, (32, 32, 3))}, "3072 numbers in .*no picture by its bounds"),
    "nan-later": (
        {"seen": lambda rng, step: np.full(4, np.nan if step == 3 else 0, np.float32)},
        r"gives the state\[0\] as nan at step 3 after reset\(seed=0\)",
    ),
    "nan-reward": ({"answer": {"reward": float("nan")}}, r"the reward\[0\] as nan at step 1"),
    "large-reward": ({"answer": {"reward": 1e39}}, r"the reward\[0\] as inf at step 1"),
    "no-reward": ({"answer": {"reward": None}}, r"a reward that is None at step 1 after .* it is one number"),
    "text-reward": ({"answer": {"reward": "1.5"}}, "a reward that is '1.5' at step 1"),
    "ends": (
        {"answer": {"terminated": np.array([False, True])}},
        r"terminated of shape \[2\] at step 1.*True or False",
    ),
    "no-info": ({"answer": {"info": None}}, "the info that step returns is None, and an info is a dictionary"),
    "no-first-info": ({"answer": {"reset": None}}, "the info that reset returns is None, and an info is a dictionary"),
    "below": (
        {"space": spaces.Discrete(4, start=1), "seen": lambda rng, step: 0 if step == 2 else 1},
        r"the observation is 0, and the choices of its space Discrete\(4, start=1\) are .* 1 to 4.*at step 2",
    ),
    "beyond": ({"space": spaces.Discrete(4), "seen": lambda rng, step: 4}, "the observation is 4, .* from 0 to 3"),
    "beyond-two": (
        {"space": spaces.MultiDiscrete([2, 3]), "seen": lambda rng, step: np.array([2, 0])},
        r"the observation is \[2 0\], .* from \[0, 0\] to \[1, 2\]",
    ),
}
for kind, (arguments, _) in GIVEN.items():
    register(f"Gives-{kind}-v0", Gives, **arguments)
register("Gives-rounded-v0", Gives, space=UNIT, seen=lambda rng, step: np.full(UNIT.shape, 1.004, np.float32))
CODES = spaces.Dict(grid=pixels(9, 9, 3), at=STATE)
register(
    "Gives-codes-v0",
    Gives,
    space=CODES,
    seen=lambda rng, step: {"grid": rng.integers(0, 11, (9, 9, 3)).astype(np.uint8), "at": np.zeros(4, np.float32)},
)
register("Seedless-v0", Seedless)
register("Leaves-v0", Leaves)
register("NanUnseen-v0", NanUnseen, action_space=spaces.Box(-1.0, 1.0, (2,), np.float32))
register("DrawsLate-v0", Long, late=30)
register("LateSuccess-v0", Long, limit=200, late=999, success=150, space=GREY)
BOUNDS = np.array([0.1, 0.7])
register("Double-v0", Samples, action_space=spaces.Box(-BOUNDS, BOUNDS, dtype=np.float64))
register("Whole-v0", Samples, action_space=spaces.Box(0, 3, (2,), np.int64))
register("Bits-v0", Samples, action_space=spaces.MultiBinary(3))
register("Fixed-v0", Samples, action_space=spaces.Box(np.array([0.0, 1.0], np.float32), np.ones(2, np.float32)))
register("Vast-v0", Samples, action_space=spaces.Box(-3e38, 3e38, (2,), np.float32))
register("FromMinus2-v0", Samples, action_space=spaces.Discrete(3, start=-2))


def task(name: str, **options: Any) -> TaskSpec:
    return TaskSpec(f"gymnasium/farm-tests/{name}-v0", **options)


def info_of(name: str) -> TaskInfo:
    with closing(make_physics(task(name))) as physics:
        return physics.info


@pytest.mark.parametrize("kind", PICTURES)
def test_pictures_in_an_observation_are_cameras(kind: str) -> None:
    """Their pixels are the observation's where the size is; what is none stays the state."""
    space, cameras, size = PICTURES[kind]
    spec = task(f"Seen-{kind}", cameras=tuple(cameras), image_size=12)
    bare = gymnasium.make(f"farm-tests/Seen-{kind}-v0")
    with closing(make_physics(spec)) as physics, closing(make_renderer(spec)) as renderer:
        assert physics.info.cameras == tuple(cameras) and physics.info.state_dim == size
        shown = physics.reset(EpisodeSpec(5))
        seen, _ = bare.reset(seed=5)
        assert len(shown.state) == size
        for camera, frame in renderer.render([shown.scene], physics.info.cameras).items():
            picture = cameras[camera](seen)
            picture = picture if picture.ndim == 3 else np.repeat(picture[..., None], 3, -1)
            assert np.array_equal(
                frame[0], np.array(Image.fromarray(picture).resize((12, 12), Image.Resampling.BILINEAR))
            )
    if not cameras:
        flat: Any = spaces.flatten(space, seen)
        assert np.array_equal(shown.state, np.ravel(flat).astype(np.float32))
        with pytest.raises(FarmError, match="draws no frames"):
            make_physics(replace(spec, cameras=1))


def test_a_picture_of_the_asked_size_is_the_observation_itself() -> None:
    spec = TaskSpec("gymnasium/farm-tests/Seen-tuple-v0", cameras=1, image_size=9)
    with closing(make_physics(spec)) as physics:
        seen, _ = gymnasium.make("farm-tests/Seen-tuple-v0").reset(seed=5)
        assert np.array_equal(physics.reset(EpisodeSpec(5)).scene, seen[0].ravel())


def test_rounding_beyond_white_is_white() -> None:
    with closing(make_physics(task("Gives-rounded", cameras=1, image_size=9))) as physics:
        assert set(physics.reset(EpisodeSpec(5)).scene.tolist()) == {255}


def test_a_grid_of_codes_is_state() -> None:
    """Codes of a space that could be a picture's are not blended to another size."""
    with closing(make_physics(task("Gives-codes"))) as physics:
        seen, _ = gymnasium.make("farm-tests/Gives-codes-v0").reset(seed=5)
        assert physics.info.state_dim == 4 + 9 * 9 * 3
        flat: Any = spaces.flatten(CODES, seen)
        assert np.array_equal(physics.reset(EpisodeSpec(5)).state, flat.astype(np.float32))
    with pytest.raises(FarmError, match="no 1 cameras: its part grid is a grid of codes, whole numbers up to 15"):
        make_physics(task("Gives-codes", cameras=1))


def test_a_text_is_the_instruction() -> None:
    with closing(make_physics(task("Told"))) as physics:
        assert physics.info.state_dim == 4 and physics.info.instruction_bytes == 4000
        seen, _ = gymnasium.make("farm-tests/Told-v0").reset(seed=5)
        assert physics.reset(EpisodeSpec(5)).instruction == seen["mission"]


def outcome(name: str) -> tuple[TaskInfo, PhysicsResult]:
    with closing(make_physics(task(name))) as physics:
        physics.reset(EpisodeSpec(0))
        return physics.info, physics.step(np.zeros((9, 1), np.float32))


@pytest.mark.parametrize(
    ("name", "reports", "solved"),
    [
        ("AtTheEnd", True, [0, 0, 0, 1]),
        ("InFinal", True, [0, 0, 0, 1]),
        ("Middle", True, [0, 1, 0, 0]),
        ("Never", False, [0] * 4),
        ("LateSuccess", True, [0] * 9),
    ],
)
def test_success_is_seen_wherever_an_episode_reports_it(name: str, reports: bool, solved: list[int]) -> None:
    info, result = outcome(name)
    assert info.has_success is reports and result.success.tolist() == solved


def test_success_that_the_trial_did_not_show_ends_no_run() -> None:
    """As in an environment that says so once it is solved, and was never solved by chance."""
    register("Rare-v0", Samples, info=lambda step: {"is_success": True} if Rare.now else {})
    with closing(make_physics(task("Rare"))) as physics:
        physics.reset(EpisodeSpec(0))
        Rare.now = True
        with pytest.warns(UserWarning, match="reports success now, and did not in the episodes by which") as said:
            result = physics.step(np.zeros((3, 1), np.float32))
        assert len(said) == 1 and not physics.info.has_success and not result.success.any()


class Rare:
    now = False


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("AtTheEnd", ""),
        ("Global", r"reset twice with seed 0, it gives the state\[0\] as .* at once"),
        ("SeedsGlobal", r"made again and reset with seed 0, .* after \d equal actions"),
        ("DrawsLate", r"reset twice with seed 0, it gives the reward\[0\] as .* after 30 equal actions"),
        ("Declared", "nondeterministic=True"),
    ],
)
def test_seeds_are_tried_before_anything_rests_on_them(name: str, reason: str) -> None:
    assert re.search(reason, info_of(name).inexact) and bool(reason) == bool(info_of(name).inexact)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Nan", "reports is_success as nan, which is neither success nor failure"),
        ("Odds", "reports success as 0.3, which is neither"),
        ("TwiceTold", "2 texts, part one and part two"),
        ("Graph", "whose part body has no fixed length"),
        ("Wrong-nan", r"gives the state\[0\] as nan after reset\(seed=0\)"),
        ("Wrong-size", "the observation has 3 numbers, and its space .* 4"),
        ("Wrong-old-reset", r"reset\(seed=0\): ValueError|reset returns float32 \[4\]"),
        ("Wrong-old-step", "not enough values|step returns a tuple of 4"),
        ("Wrong-rewards", r"a reward of shape \[2\]"),
        ("Seedless", r"reset of .*Seedless takes no seed: write reset\(self, \*, seed=None, options=None\)"),
        ("Leaves", r"failed in step 3 after reset\(seed=0\): SystemExit.* \(.*test_gymnasium_doors.py, line"),
        *((f"Gives-{kind}", message) for kind, (_, message) in GIVEN.items()),
        ("Whole", r"actions of Box\(0, 3, \(2,\), int64\).*one Discrete choice or one Box of floating-point"),
        ("Bits", r"actions of MultiBinary\(3\)"),
        ("Fixed", "an element, leaves no choice"),
        ("Vast", "without bounds"),
    ],
)
def test_what_cannot_be_understood_is_refused(name: str, message: str) -> None:
    with pytest.raises(FarmError, match=message):
        make_physics(task(name))


def test_terminations_cannot_be_ignored() -> None:
    with pytest.raises(FarmError, match="set eval.ignore_terminations to False"):
        make_physics(task("AtTheEnd", ignore_terminations=True))


def test_bounds_of_double_precision_are_not_left_by_rounding() -> None:
    """float32 has no 0.1: its nearest number is outside."""
    with closing(make_physics(task("Double"))) as physics:
        physics.reset(EpisodeSpec(0))
        assert physics.step(np.array([[0.1, 0.7], [-9, 9]], np.float32)).steps == 2


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "reset",
            r"reset\(seed=7\): KeyError: 'the table of seven' \(.*test_gymnasium_doors.py, line \d+, in reset\)$",
        ),
        ("step", r"step 3 after reset\(seed=7\): ZeroDivisionError: .*test_gymnasium_doors.py, line \d+, in step\)$"),
    ],
)
def test_an_exception_of_the_environment_is_a_sentence_with_its_place(how: str, message: str) -> None:
    with closing(make_physics(task(f"Wrong-{how}"))) as physics, pytest.raises(FarmError, match=message):
        physics.reset(EpisodeSpec(7))
        physics.step(np.zeros((4, 1), np.float32))


def test_choices_of_a_vector_environment_are_the_environments_own() -> None:
    with closing(vector_env(f"{__name__}:gymnasium/farm-tests/FromMinus2-v0", 2, workers=1)) as envs:
        assert envs.single_action_space == spaces.Discrete(3, start=-2)
        envs.reset(seed=0)
        assert envs.step(np.array([-2, 0]))[1].tolist() == [1, 1]  # whose environment asserts that it is in its space
        for wrong in ([-3, 0], [0, 1], [0.5, 0]):
            with pytest.raises(FarmError, match="choices of Discrete"):
                envs.step(np.array(wrong))


def test_a_vector_environment_without_a_state_says_what_to_ask_for() -> None:
    with pytest.raises(FarmError, match="has no state: give observations='frames' and cameras=1"):
        vector_env(f"{__name__}:gymnasium/farm-tests/Seen-rgb-v0", 1, workers=1)


def test_an_evaluation_of_broken_episodes_alone_has_no_return(tmp_path: Path) -> None:
    settings = {
        "env": {"task": "gymnasium/farm-tests/NanUnseen-v0", "num_envs": 2},
        "farm": {"groups": 1, "physics_workers": 1},
        "runtime": {"mode": "inline"},
        "policy": {"kind": "random"},
        "eval": {"videos": 0, "episodes": 3},
    }
    with pytest.raises(UserError, match="all 3 episodes are broken.*no return to tell"):
        evaluate_run("nan", Config.model_validate(settings), None, tmp_path, into=tmp_path / "e")
