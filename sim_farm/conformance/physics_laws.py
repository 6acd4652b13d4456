"""The laws of a simulator's physics, as functions that take a task and assert.

Each law is a sentence, its docstring; its message says what was broken. A law asks for a few dozen env steps at most,
so that a simulator whose step takes a millisecond is through all of them in seconds.
"""

from __future__ import annotations

from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from sim_farm.conformance.checks import (
    AFTER_LAST,
    ARRAYS,
    ONE,
    OTHER,
    PER_STEP,
    Law,
    NotApplicable,
    assert_equal,
    check_result,
    physics_of,
    random_actions,
    refusal,
    rewards_of,
)
from sim_farm.contract import EpisodeOver, EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_batch, make_physics, make_renderer, resolve

LIMIT = 5
"""Env steps of the episodes that laws about the end run into."""


def info_matches_results(spec: TaskSpec) -> None:
    """Every array has the shape and dtype that `info` and the contract promise; a reset executes nothing."""
    with physics_of(spec) as physics:
        info = physics.info
        assert info.spec.name == spec.name, "info.spec is not the task that was asked for"
        assert info.spec.control_mode is not None, "info.spec.control_mode is not resolved"
        assert info.spec.cameras == info.cameras, "info.spec.cameras are not the names in info.cameras"
        assert info.spec.max_episode_steps == info.max_episode_steps, "info.spec and info differ on the limit"
        assert len(info.action_low) == len(info.action_high) == info.action_dim, "bounds are not one per dim"
        assert np.less(info.action_low, info.action_high).all(), "the bounds of an action are empty"
        assert info.control_hz > 0, "control_hz is not a rate"
        result = physics.reset(ONE)
        check_result(result, info, steps=0)
        for steps in (1, 3):
            later = physics.step(random_actions(info, steps))
            check_result(later, info, steps if not later.ended else later.steps)
            assert later.instruction == result.instruction, "the instruction changed during an episode"
            if later.ended:
                break
    with closing(make_physics(info.spec)) as again:
        assert again.info == info, "the task made from info.spec has another info"


def physics_is_a_function_of_seed_and_actions(spec: TaskSpec) -> None:
    """Two environments stepped in turns, with the same episode and actions, agree bit for bit."""
    with physics_of(spec) as one, physics_of(spec) as two:
        assert_equal(one.reset(ONE), two.reset(ONE), "two resets to the same episode differ")
        for t, action in enumerate(random_actions(one.info, 12)):
            message = f"same seed and actions, but step {t} differs (global random state? shared scene?)"
            result = one.step(action[None])
            assert_equal(result, two.step(action[None]), message)
            if result.ended:
                break


def reset_of_reused_equals_new(spec: TaskSpec) -> None:
    """After other episodes, one left midway and one ended, an episode runs as in a new environment."""
    spec = replace(spec, max_episode_steps=20)
    with physics_of(spec) as used, closing(make_physics(spec)) as new:
        for steps in (7, 20):
            used.reset(OTHER)
            used.step(random_actions(used.info, steps, seed=steps))
        assert_equal(used.reset(ONE), new.reset(ONE), "a used environment's reset differs from a new one's")
        for t, action in enumerate(random_actions(used.info, 12)):
            message = f"step {t} after the reset of a used environment differs: something survived the reset"
            result = used.step(action[None])
            assert_equal(result, new.step(action[None]), message)
            if result.ended:
                break


def episodes_with_other_seeds_differ(spec: TaskSpec) -> None:
    """The seed matters: two seeds give two initial states, or two instructions."""
    with physics_of(spec) as physics:
        one, other = physics.reset(ONE), physics.reset(OTHER)
        told = one.instruction != other.instruction
        seen = physics.info.state_dim == 0 and physics.info.cameras  # all that there is is a picture
        assert told or seen or not np.array_equal(one.state, other.state), "two seeds give the same initial state"
        drawn = physics.info.scene_bytes > 0  # a simulator may leave the scene out where nobody draws it
        assert not drawn or not np.array_equal(one.scene, other.scene), "two seeds give the same initial scene"


def chunk_equals_single_steps(spec: TaskSpec) -> None:
    """A chunk of C actions is C env steps: same rewards and flags, same result after the last."""
    with physics_of(spec) as chunked, physics_of(spec) as single:
        actions = random_actions(chunked.info, 8)
        chunked.reset(ONE)
        single.reset(ONE)
        whole = chunked.step(actions)
        parts = [single.step(action[None]) for action in actions[: whole.steps]]
        assert_equal(whole, parts[-1], "the result of a chunk is not that of its last step", AFTER_LAST)
        for name in PER_STEP:
            joined = np.concatenate([getattr(part, name) for part in parts])
            assert np.array_equal(getattr(whole, name), joined), f"{name} of a chunk is not that of its steps"


def batch_equals_single_environments(spec: TaskSpec) -> None:
    """Environments that a worker steps at once, all or some of them, give what each gives by itself."""
    if resolve(spec.name)[0].make_batch is None:
        raise NotApplicable("the simulator steps environments one by one (Backend.make_batch is None)")
    spec = replace(spec, max_episode_steps=24)
    with physics_of(spec) as alone, ExitStack() as stack:
        together = [stack.enter_context(closing(make_physics(spec))) for _ in range(3)]
        batch, seeds = make_batch(spec, together), iter(range(40, 80))
        seen: list[list[tuple[EpisodeSpec, list[Any], list[Any]]]] = [[] for _ in together]

        def begin(env: int) -> None:
            episode = EpisodeSpec(next(seeds))
            seen[env].append((episode, [together[env].reset(episode)], []))

        for env in range(3):
            begin(env)
        for turn, chunk in enumerate(random_actions(alone.info, 3 * 2 * 24).reshape(24, 3, 2, -1)):
            which = [env for env in range(3) if turn % 4 < 3 or env != turn % 3]
            for env, result in zip(which, batch.step(which, chunk[which]), strict=True):
                _, results, actions = seen[env][-1]
                results.append(result)
                actions.append(chunk[env])
                if result.ended or turn == 9 + env:
                    begin(env)
        for env, episodes in enumerate(seen):
            for episode, results, actions in episodes:
                what = f"environment {env} of a batch, seed {episode.seed}"
                assert_equal(alone.reset(episode), results[0], f"{what}: the reset differs from a single environment's")
                for t, (action, result) in enumerate(zip(actions, results[1:], strict=True)):
                    message = f"{what}: chunk {t} differs from a single environment's"
                    assert_equal(alone.step(action), result, message)


def chunk_stops_at_episode_end(spec: TaskSpec) -> None:
    """A chunk that outlasts its episode executes the steps up to the end and no more."""
    with physics_of(replace(spec, max_episode_steps=LIMIT)) as short, physics_of(spec) as long:
        actions = random_actions(short.info, LIMIT + 3)
        short.reset(ONE)
        long.reset(ONE)
        result = short.step(actions)
        assert result.steps <= LIMIT, f"a chunk executed {result.steps} steps of an episode that has {LIMIT}"
        assert result.ended, "an episode reached its limit within a chunk, and the result does not say so"
        ends = result.terminated | result.truncated
        assert not ends[:-1].any(), "the episode's end is flagged before the last executed step"
        message = "the result of a cut chunk is not that after the last executed step"
        assert_equal(result, long.step(actions[: result.steps]), message, names=AFTER_LAST)


def truncation_at_the_limit(spec: TaskSpec) -> None:
    """An unsolved episode is truncated, not terminated, at exactly `max_episode_steps`, and each one anew."""
    unsolved = 0
    with physics_of(replace(spec, max_episode_steps=LIMIT)) as physics:
        assert physics.info.max_episode_steps == LIMIT, "the limit that was asked for is not the task's"
        for seed in range(4):
            physics.reset(EpisodeSpec(seed))
            for t, action in enumerate(random_actions(physics.info, LIMIT, seed), start=1):
                result = physics.step(action[None])
                if result.terminated[0]:
                    assert not result.truncated[0], "a step both terminates and truncates"
                    break
                assert result.truncated[0] == (t == LIMIT), f"truncated: {t != LIMIT} at step {t} of {LIMIT}"
            else:
                unsolved += 1
    assert unsolved, "none of four episodes with random actions lasted to its limit"


def ignored_terminations_run_to_the_limit(spec: TaskSpec) -> None:
    """Where terminations are ignored, an episode is truncated at its limit and ends by nothing else."""
    with ExitStack() as stack:
        try:
            physics = stack.enter_context(physics_of(replace(spec, max_episode_steps=LIMIT, ignore_terminations=True)))
        except FarmError as error:
            raise NotApplicable(f"terminations cannot be ignored: {error}") from error
        assert physics.info.spec.ignore_terminations, "info.spec is not the task that was asked for"
        for seed in range(4):
            physics.reset(EpisodeSpec(seed))
            result = physics.step(random_actions(physics.info, LIMIT + 1, seed))
            assert result.steps == LIMIT, f"an episode of {LIMIT} env steps ended after {result.steps}"
            assert not result.terminated.any() and result.truncated[-1], "it was not truncated at its limit"


def stepping_past_the_end_is_refused(spec: TaskSpec) -> None:
    """After the end `step` raises `EpisodeOver`, every time, until it is reset."""
    with physics_of(replace(spec, max_episode_steps=LIMIT)) as physics:
        physics.reset(ONE)
        actions = random_actions(physics.info, LIMIT)
        assert physics.step(actions).ended, "the episode goes on after its limit"
        for _ in range(2):
            refusal(lambda: physics.step(actions[:1]), "a step after the episode's end", EpisodeOver)
        physics.reset(ONE)
        assert physics.step(actions[:1]).steps == 1, "no step is possible after the reset of an ended episode"


def actions_are_clipped(spec: TaskSpec) -> None:
    """An action beyond the bounds does what the one at the bounds does; the caller's array is left alone."""
    with physics_of(spec) as wild, physics_of(spec) as tame:
        low, high = np.array(wild.info.action_low), np.array(wild.info.action_high)
        actions = (3 * random_actions(wild.info, 6) - (low + high)).astype(np.float32)
        before = actions.copy()
        wild.reset(ONE)
        tame.reset(ONE)
        clipped = np.clip(actions, low, high).astype(np.float32)
        assert_equal(wild.step(actions), tame.step(clipped), "actions are not clipped to their bounds")
        assert np.array_equal(actions, before), "step wrote into the caller's actions"


def results_are_owned(spec: TaskSpec) -> None:
    """Arrays of a result stay as they were returned, whatever the environment does next."""
    with physics_of(spec) as physics:
        first = physics.reset(ONE)
        second = physics.step(random_actions(physics.info, 3))
        copies = [replace(r, **{name: getattr(r, name).copy() for name in ARRAYS}) for r in (first, second)]
        if not second.ended:
            physics.step(random_actions(physics.info, 3, seed=1))
        physics.reset(OTHER)
        for result, copy in zip((first, second), copies, strict=True):
            assert_equal(result, copy, "a later step or reset overwrote the arrays of an earlier result")
        for name in ARRAYS:
            assert getattr(second, name).flags.writeable, f"{name} is read-only, but the caller's to keep"


def rewards_are_normalised(spec: TaskSpec) -> None:
    """Dense reward is finite and at most 1 per env step; sparse reward is 1 if the task is solved and else 0."""
    for kind in rewards_of(spec):
        with physics_of(replace(spec, reward=kind)) as physics:
            for seed in range(3):
                physics.reset(EpisodeSpec(seed))
                result = physics.step(random_actions(physics.info, 10, seed))
                assert np.isfinite(result.reward).all(), f"a {kind} reward is not finite"
                assert result.reward.max() <= 1 + 1e-6, f"a {kind} reward of {result.reward.max()} exceeds 1"
                if kind == "sparse":
                    assert np.array_equal(result.reward, result.success), "sparse reward is not success"


def reward_kind_changes_nothing_else(spec: TaskSpec) -> None:
    """Dense or sparse, the episode is the same: only the rewards differ."""
    others = rewards_of(spec)[1:]
    if not others:
        raise NotApplicable("the task has one kind of reward")
    for kind in others:
        with physics_of(spec) as own, physics_of(replace(spec, reward=kind)) as other:
            actions, names = random_actions(own.info, 6), ARRAYS[1:]
            assert_equal(own.reset(ONE), other.reset(ONE), "the kind of reward changes how episodes begin")
            message = "the kind of reward changes more than the rewards"
            assert_equal(own.step(actions), other.step(actions), message, names)


def wrong_control_mode_is_refused(spec: TaskSpec) -> None:
    """An unknown control mode raises a `FarmError` that names the one given and a valid one."""
    with physics_of(spec) as physics:
        valid = physics.info.spec.control_mode
    wrong = replace(spec, control_mode="no_such_mode")
    message = refusal(partial(make_physics, wrong), "an unknown control mode")
    for name in ("no_such_mode", str(valid)):
        assert name in message, f"the refusal of a control mode does not name {name}: {message}"


def impossible_actions_are_refused(spec: TaskSpec) -> None:
    """Actions of another shape or kind, or not finite, are refused, not broadcast; the episode continues."""
    with physics_of(spec) as physics, physics_of(spec) as other:
        size, actions = physics.info.action_dim, random_actions(physics.info, 6)
        physics.reset(ONE)
        other.reset(ONE)
        shapes = ((size,), (2, size + 1), (2, size - 1), *(((2, 1),) if size > 1 else ()))
        wrong: list[Any] = [np.zeros(shape, np.float32) for shape in shapes]
        wrong += [np.zeros(shape, np.float32) for shape in ((1, 2, size), (0, size), ())]
        wrong += [np.zeros((2, size), np.int64), np.zeros((2, size), np.bool_), [[0.0] * size], None]
        for given in wrong:
            message = refusal(partial(physics.step, given), f"actions {given!r}")
            assert f"[C, {size}]" in message, f"the refusal does not name the shape: {message}"
        for bad in (np.nan, np.inf, -np.inf):
            spoiled: Any = actions.astype(np.float64)
            spoiled[4, size - 1] = bad
            message = refusal(partial(physics.step, spoiled), f"an action of {bad}")
            assert f"actions[4, {size - 1}]" in message, f"the refusal of {bad} does not name its index: {message}"
        spoiled = np.full((1, size), 1e300)
        refusal(partial(physics.step, spoiled), "an action that is infinite as float32")
        assert_equal(physics.step(actions), other.step(actions), "refused actions changed the episode")


def impossible_episodes_are_refused(spec: TaskSpec) -> None:
    """A seed, an initial state or a number of resets that the task has not is refused, and the reset is not begun."""
    with physics_of(spec) as physics, physics_of(spec) as other:
        actions, states = random_actions(physics.info, 3), physics.info.init_states
        physics.reset(ONE)
        other.reset(ONE)
        seeds: tuple[Any, ...] = (-1, 2**31, 2**64, 1.0, True, None, "1")
        indices: tuple[Any, ...] = (-1, states, 0.0, False, "0")
        wrong = [EpisodeSpec(seed) for seed in seeds] + [EpisodeSpec(0, index) for index in indices]
        counts: tuple[Any, ...] = (-1, 1.0, *(() if physics.info.stream else (1,)))
        wrong += [EpisodeSpec(0, resets=n) for n in counts] + [EpisodeSpec(0, unseeded_resets=n) for n in counts]
        for episode in wrong:
            refusal(partial(physics.reset, episode), f"{episode}")
        assert_equal(physics.step(actions), other.step(actions), "a refused episode ended the one under way")


def impossible_tasks_are_refused(spec: TaskSpec) -> None:
    """Sizes, limits, cameras and conventions out of their range are refused by name, by both halves."""
    wrong: dict[str, tuple[Any, ...]] = {
        "image_size": (0, -1, 1 << 20, 64.0, True, None),
        "max_episode_steps": (0, -1, 1 << 40, 2.5, True),
        "settle_steps": (-1, 1.0, None),
        "cameras": (-1, 1.0, True, ("camera", "camera"), (1,), None),
        "orientation": ("sideways", None),
        "gripper": ("left", None),
        "reward": ("loud",),
    }
    for name, values in wrong.items():
        for value in values:
            for make in (make_physics, make_renderer):
                message = refusal(partial(make, replace(spec, **{name: value})), f"{name}={value!r}")
                assert name in message, f"the refusal of {name}={value!r} does not name it: {message}"


def recorded_state_begins_an_episode(spec: TaskSpec) -> None:
    """A recorded initial state begins the same episode each time, and another one begins another."""
    with physics_of(spec) as used, closing(make_physics(spec)) as new:
        if not used.info.init_states:
            raise NotApplicable("the task has no recorded initial states (TaskInfo.init_states is 0)")
        one, last = (replace(ONE, init_state=index) for index in (0, used.info.init_states - 1))
        other = used.reset(last)
        assert_equal(used.reset(one), new.reset(one), "a recorded initial state begins two different episodes")
        assert last == one or not np.array_equal(other.state, new.reset(one).state), "two recorded states are the same"


def settling_ends_nothing(spec: TaskSpec) -> None:
    """Settling is so many env steps of the rest action, which are not counted and give no reward."""
    with physics_of(spec) as physics:
        if not physics.info.rest_action:
            raise NotApplicable("the task has no rest action (TaskInfo.rest_action is empty)")
    settling = replace(spec, settle_steps=LIMIT + 2, max_episode_steps=LIMIT)
    with physics_of(settling) as physics, physics_of(spec) as other:
        first = physics.reset(ONE)
        check_result(first, physics.info, steps=0)
        other.reset(ONE)
        rested = other.step(np.array([other.info.rest_action] * (LIMIT + 2), np.float32))
        assert_equal(first, rested, "settling is something else than env steps of the rest action", AFTER_LAST)
        result = physics.step(random_actions(physics.info, LIMIT + 1))
        assert result.steps == LIMIT or result.terminated[-1], f"{result.steps} steps of {LIMIT}: settling was counted"
        assert_equal(physics.reset(ONE), first, "settling twice differs")


def settling_without_a_rest_action_is_refused(spec: TaskSpec) -> None:
    """A task without a rest action does not settle: `settle_steps` is refused."""
    with physics_of(spec) as physics:
        if physics.info.rest_action:
            raise NotApplicable("the task has a rest action")
    refusal(partial(make_physics, replace(spec, settle_steps=LIMIT)), "settling without a rest action")


PHYSICS_LAWS: list[Law] = [
    info_matches_results,
    physics_is_a_function_of_seed_and_actions,
    reset_of_reused_equals_new,
    episodes_with_other_seeds_differ,
    chunk_equals_single_steps,
    batch_equals_single_environments,
    chunk_stops_at_episode_end,
    truncation_at_the_limit,
    ignored_terminations_run_to_the_limit,
    stepping_past_the_end_is_refused,
    actions_are_clipped,
    results_are_owned,
    rewards_are_normalised,
    reward_kind_changes_nothing_else,
    wrong_control_mode_is_refused,
    impossible_actions_are_refused,
    impossible_episodes_are_refused,
    impossible_tasks_are_refused,
    recorded_state_begins_an_episode,
    settling_ends_nothing,
    settling_without_a_rest_action_is_refused,
]
