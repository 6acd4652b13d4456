"""Evaluate a run on unseen episodes, and read the episodes one by one.

    python examples/train.py
    python examples/evaluate.py

A result has success with its 95% interval, and the hash of the protocol: results with one hash are of the same
episodes.
"""

from __future__ import annotations

import embodied
from embodied.evaluation.folder import read_folder
from embodied.reporting.results import EvaluationResult


def main(run: str = "runs/example-train") -> EvaluationResult:
    # Keys of `eval` (docs/settings.md): other tasks, a published protocol, sampled instead of greedy actions.
    result = embodied.evaluate(run, episodes=50, greedy=False, videos=0)
    if result.success_interval is not None:  # None: a task that knows no success
        low, high = result.success_interval
        print(f"{result.success_rate:.0%} ({low:.0%} to {high:.0%}), protocol {result.protocol_sha256[:12]}")

    evaluation = read_folder(result.folder)
    failed = [outcome for outcome in evaluation.in_order() if not outcome.success]
    for outcome in failed[:3]:
        actions = evaluation.actions(outcome)  # float32 [T, A]: with the seed, all that the episode is replayed from
        print(f"seed {outcome.spec.seed}: {len(actions)} env steps, return {outcome.total_reward:.2f}")
    return result


if __name__ == "__main__":
    main()
