"""Promises of training for a policy that keeps the laws, and the promises that fail where a law is broken."""

from __future__ import annotations

from policies.capabilities import Imitates
from policies.conformance.laws import (
    IMITATION_LAWS,
    Law,
    law_a_chunk_continues_what_is_left,
    law_act_leaves_no_graph,
    law_all_is_computed_on_the_policys_device,
    law_global_generators_are_untouched,
    law_gradients_reach_every_parameter,
    law_log_prob_is_the_density_that_act_samples,
    law_mode_is_deterministic,
    law_noise_decides,
    law_observe_changes_buffers_only,
    law_predictions_begin_with_the_chunk,
    law_rows_are_independent,
    law_saved_policy_is_the_policy,
    law_scores_agree,
    law_shapes_and_dtypes,
    law_velocities_have_not_changed_since_they_acted,
    law_weights_that_are_not_finite_are_refused,
    law_what_shards_names_is_used_by_being_called,
)
from policies.conformance.reporting import NotApplicable, Promise
from policies.contract import Policy

PROMISES = (
    Promise(
        "shapes: what the contract says",
        (law_shapes_and_dtypes, law_act_leaves_no_graph),
        "decisions cannot be stored in the trajectory memory: a run ends at its first rollout",
    ),
    Promise(
        "equal decisions in every process",
        (law_noise_decides, law_mode_is_deterministic, law_rows_are_independent, law_global_generators_are_untouched),
        "a run depends on the number of environments, groups, replicas and processes, cannot be repeated or resumed "
        "exactly, and two evaluations of one checkpoint differ",
    ),
    Promise(
        "scores: evaluate judges the decision that act took",
        (
            law_scores_agree,
            law_log_prob_is_the_density_that_act_samples,
            law_velocities_have_not_changed_since_they_acted,
        ),
        "ratios of new to old log-probs are not the policy's: PPO, GRPO and REINFORCE follow another gradient, or the "
        "learner stops at its first minibatch",
    ),
    Promise(
        "learning: gradients reach the weights, statistics are no weights",
        (law_gradients_reach_every_parameter, law_observe_changes_buffers_only),
        "a part of the policy is not trained, or is changed by what it only sees",
    ),
    Promise(
        "saving: a checkpoint is the policy",
        (law_saved_policy_is_the_policy, law_weights_that_are_not_finite_are_refused),
        "a resumed run, an evaluation and an export are of another policy than the one that was trained",
    ),
    Promise(
        "devices and shards: tensors are where they are needed",
        (law_all_is_computed_on_the_policys_device, law_what_shards_names_is_used_by_being_called),
        "a GPU refuses to compute or waits for the host at every decision, and ranks cannot hold shards: policy.device "
        "stays cpu, optim.sharding none",
    ),
    Promise(
        "more than a chunk: predictions, and what is left of the last one",
        (law_predictions_begin_with_the_chunk, law_a_chunk_continues_what_is_left),
        "evaluations under a delay execute other actions than the policy's, and average other predictions",
    ),
    Promise(
        "imitation: demonstrations are learned",
        tuple(IMITATION_LAWS),
        "`embodied sft` cannot train the policy",
    ),
)


def require_applicable(law: Law, policy: Policy) -> None:
    """Raise `NotApplicable` where the law says nothing about the policy."""
    if law in IMITATION_LAWS and not isinstance(policy, Imitates):
        raise NotApplicable("the policy has no imitate")
