"""Perturbations: applied by physics, renderer and picture functions, the same in any process and under any plan."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from sim_farm.client.farm import Farm
from sim_farm.conformance.checks import ARRAYS, Law, assert_equal, name_of, random_actions
from sim_farm.conformance.perturbation_laws import PERTURBATION_LAWS
from sim_farm.conformance.promises import require_applicable
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec, UInt8
from sim_farm.episodes import EndlessEpisodes, GroupedEpisodes, ListedEpisodes, Starts
from sim_farm.graded_axes import AXES, graded
from sim_farm.perturbations import (
    MARK,
    CameraOrbit,
    CameraPose,
    ObjectOffset,
    Perturbation,
    PictureChange,
    RobotOffset,
    generator,
)
from sim_farm.pictures import PICTURES
from sim_farm.registry import make_physics, make_renderer
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.variants import often

START, OBJECTS, CAMERA, NOISE, WORDS = range(5)
TABLE = (
    Perturbation("start", 3, scene=(RobotOffset(0.05),)),
    Perturbation("objects", 3, scene=(ObjectOffset(0.03),)),
    Perturbation("camera", 3, cameras=(CameraOrbit(azimuth=30.0, either_side=True),)),
    Perturbation("noise", 3, picture=(PictureChange("gaussian_noise", (25.0,)),)),
    Perturbation("words", 3, words="please {}"),
)
PUSH = TaskSpec("tabletop/push", cameras=("front", "wrist"), image_size=48, perturbations=TABLE)
SEED = 7


def frames_of(spec: TaskSpec, scenes: list[UInt8]) -> dict[str, UInt8]:
    with closing(make_renderer(spec)) as renderer:
        return dict(renderer.render(scenes, renderer.info.cameras))


def test_an_unperturbed_episode_equals_that_of_a_task_without_perturbations() -> None:
    """Bit for bit, its pictures too; its scene has the mark behind it."""
    bare = replace(PUSH, perturbations=())
    with closing(make_physics(PUSH)) as marked, closing(make_physics(bare)) as plain:
        actions = random_actions(plain.info, 4)
        one, two = marked.reset(EpisodeSpec(SEED)), plain.reset(EpisodeSpec(SEED))
        scenes: list[tuple[UInt8, UInt8]] = [(one.scene, two.scene)]
        for action in actions:
            one, two = marked.step(action[None]), plain.step(action[None])
            assert_equal(one, two, "an unperturbed episode", tuple(set(ARRAYS) - {"scene"}))
            scenes.append((one.scene, two.scene))
    assert all(np.array_equal(one[: -MARK.itemsize], two) for one, two in scenes)
    mine, theirs = frames_of(PUSH, [one for one, _ in scenes]), frames_of(bare, [two for _, two in scenes])
    for name, frames in mine.items():
        assert np.array_equal(frames, theirs[name]), name


@pytest.mark.parametrize("index", [START, OBJECTS])
def test_a_displaced_start_is_displaced_by_its_size_in_the_seed_s_direction(index: int) -> None:
    with closing(make_physics(PUSH)) as physics:
        plain = physics.reset(EpisodeSpec(SEED))
        moved = physics.reset(EpisodeSpec(SEED, perturbation=index))
        other = physics.reset(EpisodeSpec(SEED + 1, perturbation=index))
        bare = physics.reset(EpisodeSpec(SEED + 1))
    away, elsewhere = moved.state - plain.state, other.state - bare.state
    place, size = (slice(0, 3), 0.05) if index == START else (slice(5, 7), 0.03)
    assert np.linalg.norm(away[place]) == pytest.approx(size, abs=1e-6)
    assert not np.allclose(away[place], elsewhere[place]), "two seeds displace into one direction"
    untouched = slice(5, 12) if index == START else slice(0, 5)
    assert not away[untouched].any()


def test_a_moved_camera_sees_the_same_scene_from_elsewhere() -> None:
    """The world's cameras move, the wrist's does not; by nothing, nothing changes; two seeds go to two sides."""
    orbit, still = TABLE[CAMERA], Perturbation("camera", 0, cameras=(CameraOrbit(),))
    spec = replace(PUSH, perturbations=(orbit, still))
    with closing(make_physics(spec)) as physics:
        scenes = [physics.reset(EpisodeSpec(SEED, perturbation=index)).scene for index in (None, 0, 1)]
    frames = frames_of(spec, scenes)
    assert (frames["front"][0] != frames["front"][1]).mean() > 0.1
    assert np.array_equal(frames["front"][0], frames["front"][2])
    assert np.array_equal(frames["wrist"][0], frames["wrist"][1])
    sides = {int(generator(102, seed).integers(2)) for seed in range(20)}
    assert sides == {0, 1}


def test_an_orbit_goes_on_looking_at_the_same_point() -> None:
    """What is in the picture's middle, on the table, stays there from every side, height and distance."""
    views = (CameraOrbit(), CameraOrbit(azimuth=20), CameraOrbit(elevation=10), CameraOrbit(distance=1.2))
    turns = (CameraOrbit(pan=20), CameraOrbit(tilt=10))
    table = tuple(Perturbation("camera", 1, cameras=(view,)) for view in (*views, *turns))
    spec = TaskSpec("tabletop/reach", cameras=("front",), image_size=96, perturbations=table)
    bare = replace(spec, perturbations=())
    with closing(make_physics(spec)) as physics:
        scenes = [physics.reset(EpisodeSpec(SEED, perturbation=i)).scene for i in range(len(table))]
        there = scenes[0]
    frames = frames_of(spec, scenes)["front"]
    assert np.array_equal(frames[0], frames_of(bare, [there[: -MARK.itemsize]])["front"][0])
    middle = frames[:, 46:50, 46:50].astype(int).mean(axis=(1, 2))
    assert np.abs(middle[1:4] - middle[0]).max() < 12
    assert all(not np.array_equal(frames[0], frame) for frame in frames[1:])


def test_a_camera_can_be_put_anywhere() -> None:
    pose = Perturbation("camera", 1, cameras=(CameraPose("front", (0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0)),))
    spec = replace(PUSH, perturbations=(pose,))
    with closing(make_physics(spec)) as physics:
        frames = frames_of(spec, [physics.reset(EpisodeSpec(SEED, perturbation=i)).scene for i in (None, 0)])
    assert (frames["front"][0] != frames["front"][1]).any()
    unknown = Perturbation("camera", 1, cameras=(CameraPose("back", (0.0, 0.0, 1.0), (1.0, 0.0, 0.0, 0.0)),))
    wrong = replace(PUSH, perturbations=(unknown,))
    with closing(make_physics(wrong)) as physics, pytest.raises(FarmError, match="back.*front"):
        frames_of(wrong, [physics.reset(EpisodeSpec(SEED, perturbation=0)).scene])


def test_noise_is_keyed_by_seed_step_and_camera_and_by_nothing_else() -> None:
    """Orientation turns the noise with the picture; every env step has noise of its own."""
    with closing(make_physics(PUSH)) as physics:
        begin = physics.reset(EpisodeSpec(SEED, perturbation=NOISE)).scene
        later = physics.step(np.zeros((1, physics.info.action_dim), np.float32)).scene
        plain = physics.reset(EpisodeSpec(SEED)).scene
    frames = frames_of(PUSH, [begin, later, plain])
    alone = frames_of(PUSH, [later])
    turned = frames_of(replace(PUSH, orientation="rotated"), [begin])
    noise = {name: frames[name][0].astype(int) - frames[name][2] for name in frames}
    assert 15 < np.std(noise["front"]) < 30
    assert not np.array_equal(noise["front"], noise["wrist"])
    for name in frames:
        assert np.array_equal(alone[name][0], frames[name][1])
        assert not np.array_equal(frames[name][0], frames[name][1])
        assert np.array_equal(turned[name][0][::-1, ::-1], frames[name][0])


@pytest.mark.parametrize("name", PICTURES)
def test_picture_functions_are_pure(name: str) -> None:
    function, count = PICTURES[name]
    frame = np.random.default_rng(0).integers(0, 256, (16, 16, 3)).astype(np.uint8)
    values = [0.5 + i for i in range(count)]
    one, two = (function(frame.copy(), values, generator(103, 1)) for _ in range(2))
    assert one.dtype == np.uint8 and one.shape == frame.shape and np.array_equal(one, two)


def test_words_stand_in_for_the_instruction() -> None:
    with closing(make_physics(PUSH)) as physics:
        assert physics.reset(EpisodeSpec(SEED, perturbation=WORDS)).instruction == (
            f"please {physics.reset(EpisodeSpec(SEED)).instruction}"
        )


@pytest.mark.parametrize("index", range(len(TABLE)))
def test_an_event_changes_nothing_before_it_and_holds_after_it(index: int) -> None:
    """In whatever chunks the episode is stepped; the observation after `from_step` steps is the first to show it."""
    at = 5
    spec = replace(PUSH, perturbations=tuple(replace(one, from_step=at) for one in TABLE))
    with (
        closing(make_physics(spec)) as event,
        closing(make_physics(spec)) as plain,
        closing(make_physics(spec)) as whole,
    ):
        actions = random_actions(plain.info, 8)
        told = [(event.reset(EpisodeSpec(SEED, perturbation=index)), plain.reset(EpisodeSpec(SEED)))]
        told += [(event.step(action[None]), plain.step(action[None])) for action in actions]
        whole.reset(EpisodeSpec(SEED, perturbation=index))
        chunk = whole.step(actions)
        whole.reset(EpisodeSpec(SEED, perturbation=index))
        parts = whole.step(actions[:at]), whole.step(actions[at:])
    assert_equal(chunk, told[-1][0], "a chunk over the event", ("proprio", "state", "scene"))
    assert_equal(parts[0], told[at][0], "a chunk up to the event", ("proprio", "state", "scene"))
    assert chunk.steps == 8 and np.array_equal(chunk.reward, np.concatenate([one.reward for one, _ in told[1:]]))
    scenes = [side.scene for pair in told for side in pair]
    drawn = frames_of(spec, scenes)["front"].reshape(len(told), 2, *frames_of(spec, scenes[:1])["front"].shape[1:])
    for step, (mine, other) in enumerate(told):
        before = step < at
        same_state = np.array_equal(mine.state, other.state)
        assert same_state == (before or index > OBJECTS)
        assert (mine.instruction == other.instruction) == (before or index != WORDS)
        assert np.array_equal(*drawn[step]) == (before or index == WORDS), step


def test_workers_of_any_number_draw_and_tell_the_same() -> None:
    """Fused or with render workers, in any number of groups: frames, states and instructions are equal."""

    def run(groups: int, physics: int, render: int) -> dict[tuple[int, int], tuple[bytes, bytes, str]]:
        specs = tuple(EpisodeSpec(SEED + i // 6, perturbation=(None, *range(5))[i % 6]) for i in range(12))
        episodes = ListedEpisodes(specs, 4)
        task = replace(PUSH, max_episode_steps=4, perturbations=(*TABLE[:4], replace(TABLE[WORDS], from_step=2)))
        spec = FarmSpec(task, episodes, 4, groups=groups, physics_workers=physics, render_workers=render)
        seen = {}
        with closing(Farm.create(spec, InProcess())) as farm:
            for group in range(groups):
                farm.reset(group)
            for group in [number for _ in range(3 * 4 + 1) for number in range(groups)]:
                rows = farm.collect(group, 60.0)
                for row in np.flatnonzero(rows.active).tolist():
                    trial = episodes.trial(int(rows.envs[row]), int(rows.episode[row]))
                    frames = b"".join(frames[row].tobytes() for frames in rows.frames.values())
                    told = frames, rows.state[row].tobytes(), rows.instruction[row]
                    seen[trial, int(rows.episode_step[row])] = told
                farm.submit(group, np.full((len(rows.envs), 1, 3), 0.3, np.float32))
        return seen

    one, other = run(1, 1, 0), run(2, 2, 2)
    assert one == other and len(one) >= 12 * 4
    assert {text.startswith("please") for *_, text in one.values()} == {True, False}


@pytest.mark.parametrize(
    ("task", "change", "said"),
    [
        ("gymnasium/CartPole-v1", TABLE[CAMERA], "camera 3 needs the axis camera, and the simulator has none"),
        ("tabletop/push", Perturbation("noise", 1, picture=(PictureChange("fuzz", (1.0,)),)), "fuzz.*gaussian_noise"),
        ("tabletop/push", Perturbation("noise", 1, picture=(PictureChange("gaussian_noise"),)), "0 values"),
        ("tabletop/push", Perturbation("start", 1, scene=(RobotOffset(float("nan")),)), "not finite"),
        ("tabletop/push", replace(TABLE[0], from_step=-1), "from 0"),
    ],
)
def test_what_cannot_be_applied_is_refused_when_the_task_is_made(task: str, change: Perturbation, said: str) -> None:
    with pytest.raises(FarmError, match=said):
        make_physics(TaskSpec(task, perturbations=(change,)))


def test_an_index_beyond_the_table_is_refused() -> None:
    with closing(make_physics(PUSH)) as physics:
        for index in (-1, len(TABLE)):
            with pytest.raises(FarmError, match="from 0 to 4"):
                physics.reset(EpisodeSpec(SEED, perturbation=index))
    with closing(make_physics(TaskSpec("tabletop/push"))) as bare, pytest.raises(FarmError, match="without"):
        bare.reset(EpisodeSpec(SEED, perturbation=0))


def test_digests_tell_perturbations_apart() -> None:
    assert len({one.digest for one in TABLE}) == len(TABLE)
    assert replace(TABLE[0]).digest == TABLE[0].digest != replace(TABLE[0], from_step=1).digest


# --- the laws, and the graded axes

TABLETOP = [TaskSpec(f"tabletop/{task}", cameras=2, image_size=32) for task in ("reach_red", "push")]
OTHERS = [
    TaskSpec("gymnasium/CartPole-v1", cameras=1, image_size=32),
    TaskSpec("maniskill/PushCube-v1", cameras=1, image_size=64),
    TaskSpec("maniskill/DrawTriangle-v1", cameras=1, image_size=64),
    TaskSpec("maniskill/PegInsertionSide-v1", cameras=2, image_size=64),
    TaskSpec("maniskill/TwoRobotPickCube-v1", cameras=1, image_size=64),
    TaskSpec("libero/libero_spatial/0", cameras=2, image_size=64),
    TaskSpec("libero/libero_10/3", cameras=2, image_size=64),
]


@pytest.mark.parametrize("task", often(TABLETOP[1:], [*TABLETOP, *OTHERS]), ids=name_of)
@pytest.mark.parametrize("law", PERTURBATION_LAWS, ids=name_of)
def test_laws(law: Law, task: TaskSpec) -> None:
    require_applicable(law, task)
    law(task)


def test_pushcube_is_perturbed_on_every_axis() -> None:
    """In ManiSkill's simulator: what is displaced is displaced by its size, and nothing else is."""
    reads = ("state", "images", "instruction")
    table = tuple(graded("maniskill/PushCube-v1", axis, 3, reads) for axis in AXES)
    with closing(make_physics(TaskSpec("maniskill/PushCube-v1", perturbations=table))) as physics:
        plain = physics.reset(EpisodeSpec(SEED))
        seen = [physics.reset(EpisodeSpec(SEED, perturbation=index)) for index in range(len(table))]
        again = physics.reset(EpisodeSpec(SEED))
    assert_equal(plain, again, "perturbed episodes before it change an episode")
    joints = [np.linalg.norm(one.proprio[:7] - plain.proprio[:7]) for one in seen]
    assert joints == [0, pytest.approx(0.3, abs=1e-5), 0, 0, 0, 0]
    moved = [not np.array_equal(one.state[18:], plain.state[18:]) for one in seen]
    assert moved == [False, True, True, False, False, False]
    assert [one.instruction != plain.instruction for one in seen] == [False] * 5 + [True]


@pytest.mark.parametrize(
    ("axis", "level", "said"),
    [
        ("camra", 1, "camra.*camera"),
        ("start", 6, "levels 1 to 5, got 6"),
        ("objects", 0, "levels 1 to 5, got 0"),
        ("noise", 1, "reads images, and this one reads state"),
        ("words", 1, "reads instruction, and this one reads state"),
    ],
)
def test_an_axis_or_level_that_is_not_there_is_refused(axis: str, level: int, said: str) -> None:
    with pytest.raises(FarmError, match=said):
        graded("tabletop/reach", axis, level, ("state",))


def test_axes_that_a_simulator_has_not_are_refused() -> None:
    with pytest.raises(FarmError, match="none of its simulator's; there are noise, brightness, words"):
        graded("gymnasium/CartPole-v1", "camera", 1, ("images", "instruction"))


def test_training_draws_perturbations_from_the_seed() -> None:
    """All of them and none, each as often; those of an episode group are one; starts are left as they were."""
    episodes = EndlessEpisodes(1, Starts(seeds=4, perturbations=3))
    specs = [episodes.spec(env, episode) for env in range(20) for episode in range(20)]
    drawn = [spec.perturbation for spec in specs]
    assert drawn == [episodes.spec(env, episode).perturbation for env in range(20) for episode in range(20)]
    assert {drawn.count(one) > 70 for one in (None, 0, 1, 2)} == {True}
    plain = EndlessEpisodes(1, Starts(seeds=4))
    assert [spec.seed for spec in specs] == [plain.spec(env, ep).seed for env in range(20) for ep in range(20)]
    grouped = GroupedEpisodes(1, 4, Starts(perturbations=3))
    assert len({grouped.spec(env, 0) for env in range(4)}) == 1
