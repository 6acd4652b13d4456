"""The laws of a simulator's rendering, as functions that take a task with at least one camera, and assert.

A law asks for a few frames, so that a simulator whose frame takes forty milliseconds is through all of them in seconds.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sim_farm.conformance.checks import (
    ARRAYS,
    ONE,
    Law,
    assert_equal,
    physics_of,
    random_actions,
    refusal,
    renderer_of,
    some_scenes,
)
from sim_farm.contract import TaskSpec
from sim_farm.registry import make_physics, make_renderer


def frames_match_info(spec: TaskSpec) -> None:
    """Frames are uint8 [N, H, W, 3] for each camera asked for, of the size asked for; also when N is 0."""
    with renderer_of(spec) as renderer, physics_of(spec) as physics:
        assert renderer.info == physics.info, "the two halves of a task disagree on its info"
        cameras, size = renderer.info.cameras, renderer.info.spec.image_size
        for count in (0, 1, 2):
            frames = renderer.render([physics.reset(ONE).scene] * count, cameras)
            assert set(frames) == set(cameras), f"asked for {cameras}, got frames of {tuple(frames)}"
            for name, frame in frames.items():
                shape = (count, size, size, 3)
                assert frame.shape == shape, f"frames of {name} have shape {frame.shape}, not {shape}"
                assert frame.dtype == np.uint8, f"frames of {name} are {frame.dtype}, not uint8"
        for name, frame in frames.items():
            assert frame.std() > 1, f"the picture of {name} is empty"


def scene_determines_picture(spec: TaskSpec) -> None:
    """A scene gives the same bytes from a new renderer and a used one, in any order, in a batch or alone."""
    scenes = some_scenes(spec)
    with closing(make_renderer(spec)) as new, renderer_of(spec) as used:
        cameras = new.info.cameras
        used.render(scenes[::2], cameras)
        expected = new.render(scenes, cameras)
        backwards = used.render(scenes[::-1], cameras)
        for i, scene in enumerate(scenes):
            moved = np.frombuffer(scene.tobytes(), np.uint8)
            for name in cameras:
                alone = used.render([moved], (name,))[name][0]
                message = f"scene {i}, camera {name}: the picture depends on more than the scene:"
                assert np.array_equal(expected[name][i], backwards[name][-1 - i]), f"{message} order, history"
                assert np.array_equal(expected[name][i], alone), f"{message} batch, memory"


def different_scenes_give_different_pictures(spec: TaskSpec) -> None:
    """Scenes of other episodes and of later steps look different to at least one camera."""
    scenes = some_scenes(spec)
    with renderer_of(spec) as renderer:
        frames = renderer.render(scenes, renderer.info.cameras)
    for i in range(len(scenes)):
        for j in range(i):
            seen = any(not np.array_equal(frame[i], frame[j]) for frame in frames.values())
            assert seen, f"scenes {j} and {i} differ, but no camera shows a difference"


def frames_are_owned(spec: TaskSpec) -> None:
    """Frames stay as they were returned when the renderer draws the next ones."""
    first, second, *_ = some_scenes(spec)
    with renderer_of(spec) as renderer:
        frames = renderer.render([first], renderer.info.cameras)
        copies = {name: frame.copy() for name, frame in frames.items()}
        renderer.render([second], renderer.info.cameras)
        for name, frame in frames.items():
            assert np.array_equal(frame, copies[name]), f"a later call overwrote the frames of {name}"


def frames_are_drawn_where_they_are_asked_for(spec: TaskSpec) -> None:
    """Given arrays to draw into, of any strides, a renderer leaves the same frames in them, or returns its own."""
    scenes = some_scenes(spec)[:2]
    with renderer_of(spec) as renderer:
        cameras, size = renderer.info.cameras, renderer.info.spec.image_size
        expected = renderer.render(scenes, cameras)
        memory = np.zeros((2, len(cameras), 2 * size, size, 3), np.uint8)  # one memory, and rows that do not touch
        out = {name: memory[:, i, ::-2] for i, name in enumerate(cameras)}
        drawn = renderer.render(scenes, cameras, out)
        for name in cameras:
            assert np.array_equal(drawn[name], expected[name]), f"the place in memory changes the picture of {name}"
        if all(drawn[name] is out[name] for name in cameras):
            assert not memory[:, :, ::2].any(), "a renderer has drawn beside the arrays that it was given"


def renderers_share_nothing(spec: TaskSpec) -> None:
    """Closing one renderer leaves the pictures of another as they were."""
    scene = some_scenes(spec)[0]
    with renderer_of(spec) as stays:
        with closing(make_renderer(spec)) as goes:
            goes.render([scene], goes.info.cameras)
            before = stays.render([scene], stays.info.cameras)
        after = stays.render([scene], stays.info.cameras)
    for name, frame in before.items():
        assert np.array_equal(frame, after[name]), f"closing another renderer changed the picture of {name}"


def observing_changes_no_physics(spec: TaskSpec) -> None:
    """Physics is the same with and without cameras, but that the scene may be left out: nobody draws it."""
    with physics_of(spec) as seen, physics_of(replace(spec, cameras=0)) as unseen:
        actions = random_actions(seen.info, 6)
        names = tuple(name for name in ARRAYS if name != "scene" or unseen.info.scene_bytes)
        assert_equal(seen.reset(ONE), unseen.reset(ONE), "cameras change how an episode begins", names)
        assert_equal(seen.step(actions), unseen.step(actions), "cameras change how an episode goes on", names)


def wrong_camera_is_refused(spec: TaskSpec) -> None:
    """An unknown camera, or more cameras than there are, raises a `FarmError` that names a valid one."""
    with physics_of(spec) as physics:
        valid = physics.info.cameras[0]
    for cameras in (("no_such_camera",), (valid, "no_such_camera"), 99):
        wrong = replace(spec, cameras=cameras)
        for make in (make_physics, make_renderer):
            what = f"{make.__name__} with cameras={cameras!r}"
            message = refusal(partial(make, wrong), what)
            assert valid in message, f"the refusal of {what} does not name the valid {valid!r}: {message}"


def impossible_scenes_are_refused(spec: TaskSpec) -> None:
    """A scene of another size or kind, or a camera that was not asked for, is refused."""
    scene = some_scenes(spec)[0]
    with renderer_of(spec) as renderer:
        cameras = renderer.info.cameras
        wrong: list[Any] = [scene[:-1], np.append(scene, scene[:1]), scene[None], scene.view(np.int8), scene[:0]]
        for given in wrong:
            refusal(partial(renderer.render, [scene, given], cameras), f"a scene of shape {given.shape}")
        message = refusal(partial(renderer.render, [scene], ("no_such_camera",)), "a camera that was not asked for")
        assert cameras[0] in message, f"the refusal of a camera names none that there is: {message}"


RENDER_LAWS: list[Law] = [
    frames_match_info,
    scene_determines_picture,
    different_scenes_give_different_pictures,
    frames_are_owned,
    frames_are_drawn_where_they_are_asked_for,
    renderers_share_nothing,
    observing_changes_no_physics,
    wrong_camera_is_refused,
    impossible_scenes_are_refused,
]
