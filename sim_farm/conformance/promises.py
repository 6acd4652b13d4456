"""Promises of the farm for a simulator that keeps the laws, and the promises that fail where a law is broken."""

from __future__ import annotations

from sim_farm.conformance.checks import Law
from sim_farm.conformance.perturbation_laws import (
    perturbations_are_a_function_of_seed_and_actions,
    perturbed_pictures_are_the_same_in_another_process,
)
from sim_farm.conformance.physics_laws import (
    actions_are_clipped,
    batch_equals_single_environments,
    chunk_equals_single_steps,
    chunk_stops_at_episode_end,
    episodes_with_other_seeds_differ,
    ignored_terminations_run_to_the_limit,
    impossible_actions_are_refused,
    impossible_episodes_are_refused,
    impossible_tasks_are_refused,
    info_matches_results,
    physics_is_a_function_of_seed_and_actions,
    recorded_state_begins_an_episode,
    reset_of_reused_equals_new,
    results_are_owned,
    reward_kind_changes_nothing_else,
    rewards_are_normalised,
    settling_ends_nothing,
    settling_without_a_rest_action_is_refused,
    stepping_past_the_end_is_refused,
    truncation_at_the_limit,
    wrong_control_mode_is_refused,
)
from sim_farm.conformance.process_laws import (
    episode_is_the_same_in_another_process,
    picture_is_the_same_in_another_process,
)
from sim_farm.conformance.render_laws import (
    RENDER_LAWS,
    different_scenes_give_different_pictures,
    frames_are_drawn_where_they_are_asked_for,
    frames_are_owned,
    frames_match_info,
    impossible_scenes_are_refused,
    observing_changes_no_physics,
    renderers_share_nothing,
    scene_determines_picture,
    wrong_camera_is_refused,
)
from sim_farm.conformance.reporting import NotApplicable, Promise
from sim_farm.contract import TaskSpec
from sim_farm.registry import resolve

EXACT_REPLAY = Promise(
    "exact replay: equal specs and actions give equal episodes",
    (
        physics_is_a_function_of_seed_and_actions,
        reset_of_reused_equals_new,
        recorded_state_begins_an_episode,
        episode_is_the_same_in_another_process,
    ),
    "a worker that is lost costs its episodes: they end as broken ones, and the next begin; a resumed run begins new "
    "episodes; there are no films and no recordings, which replay; results depend on the number of workers. Declare "
    "it: Backend(..., exact_replay=False)",
)
EXACT_SPLIT = Promise(
    "exact split: the scene determines the picture in every process",
    (scene_determines_picture, picture_is_the_same_in_another_process, renderers_share_nothing),
    "render workers of their own are not possible: farm.render_workers stays 0, and a picture may still depend on "
    "what was drawn before it. Declare it: Backend(..., exact_split=False)",
)
PROMISES = (
    Promise(
        "results: arrays as the task describes them",
        (info_matches_results, results_are_owned),
        "the workers end with an error at the first result of another size, or a rollout holds later steps' numbers",
    ),
    EXACT_REPLAY,
    Promise(
        "seeds: each begins an episode of its own",
        (episodes_with_other_seeds_differ,),
        "an evaluation measures one episode as often as it has episodes, and training sees no other",
    ),
    Promise(
        "chunks and ends: an action is one env step, and an episode ends once",
        (
            chunk_equals_single_steps,
            chunk_stops_at_episode_end,
            truncation_at_the_limit,
            ignored_terminations_run_to_the_limit,
            stepping_past_the_end_is_refused,
            actions_are_clipped,
            batch_equals_single_environments,
        ),
        "returns, advantages and success rates are of other steps than the policy's: policy.chunk and "
        "env.max_episode_steps change what is learned and measured",
    ),
    Promise(
        "rewards: at most 1 per env step, of the kind that was asked for",
        (rewards_are_normalised, reward_kind_changes_nothing_else),
        "the settings of the shipped configurations do not fit, and env.reward changes more than the reward",
    ),
    Promise(
        "settling: rest actions before the first observation",
        (settling_ends_nothing, settling_without_a_rest_action_is_refused),
        "env.settle_steps stays 0",
    ),
    EXACT_SPLIT,
    Promise(
        "pictures: frames as the task describes them",
        (
            frames_match_info,
            different_scenes_give_different_pictures,
            frames_are_owned,
            frames_are_drawn_where_they_are_asked_for,
            observing_changes_no_physics,
        ),
        "a policy sees other pictures than those of the state that it acts in; env.cameras stays 0",
    ),
    Promise(
        "perturbations: an episode that is otherwise is as determined as any",
        (perturbations_are_a_function_of_seed_and_actions, perturbed_pictures_are_the_same_in_another_process),
        "no evaluation under perturbations and no env.randomise: eval.axes stays empty",
    ),
    Promise(
        "mistakes: what cannot be is refused, and the episode under way goes on",
        (
            wrong_control_mode_is_refused,
            impossible_actions_are_refused,
            impossible_episodes_are_refused,
            impossible_tasks_are_refused,
            wrong_camera_is_refused,
            impossible_scenes_are_refused,
        ),
        "a mistyped setting is not said in one message before a run: it ends the workers, or changes what is simulated",
    ),
)
PICTURES = {
    *RENDER_LAWS,
    picture_is_the_same_in_another_process,
    perturbed_pictures_are_the_same_in_another_process,
}
COMPARED = {
    *EXACT_REPLAY.laws,
    chunk_equals_single_steps,
    chunk_stops_at_episode_end,
    batch_equals_single_environments,
    actions_are_clipped,
    reward_kind_changes_nothing_else,
    settling_ends_nothing,
    observing_changes_no_physics,
    impossible_actions_are_refused,
    impossible_episodes_are_refused,
    perturbations_are_a_function_of_seed_and_actions,
}
"""Laws that compare two episodes of the same spec and actions."""


def declared(law: Law, spec: TaskSpec) -> bool:
    """True if the simulator itself says that it does not keep the law."""
    backend = resolve(spec.name)[0]
    return (law in EXACT_REPLAY.laws and not backend.exact_replay) or (
        law in EXACT_SPLIT.laws and not backend.exact_split
    )


def require_applicable(law: Law, spec: TaskSpec) -> None:
    """Raise `NotApplicable` where the law says nothing about the task."""
    backend = resolve(spec.name)[0]
    if law in PICTURES and not spec.cameras:
        raise NotApplicable("the task has no camera")
    splits = law in EXACT_SPLIT.laws or law is perturbed_pictures_are_the_same_in_another_process
    if splits and not backend.exact_split:
        raise NotApplicable("the simulator declares exact_split=False")
    if law in COMPARED and not backend.exact_replay:
        raise NotApplicable("it compares two episodes, and the simulator declares exact_replay=False")
