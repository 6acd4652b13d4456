"""Times on accelerators where none were measured: a policy's counted work, on a card of published rates.

A profile that was measured on a CPU says nothing about a GPU. For a cluster whose nodes name their `card`, policy and
learner get times from the card's roofline (`schedulers.cards`). Counted are one decision and one update: of large
networks by `policies.work`, of others as torch executes them for one row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.utils.flop_counter import FlopCounterMode

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.learning.sharding import rank_bytes
from embodied.planning.clusters import roles_of
from embodied.rollout.policy_worker import blank_inputs
from embodied.workflows.context import make_policy, policy_spec
from embodied.workflows.run_spec import task_spec
from policies.capabilities import CountsWork
from policies.contract import Inputs, Policy
from policies.work import Costs, Work, batched, nbytes
from schedulers import Cluster, ComponentProfile, Point, Profile, Workflow
from schedulers.cards import EFFICIENCY, UPDATE_EFFICIENCY, Card, find_card
from sim_farm.workers.hosts import InProcess


class ExecutedCosts:
    """Counts of any policy: what torch's counter sees of one row, its matrix products and convolutions."""

    def __init__(self, policy: Policy, inputs: Inputs) -> None:
        """`inputs`: of one row."""
        noise = torch.zeros(1, policy.noise_dim)
        with FlopCounterMode(display=False) as acting:
            action = policy.act(inputs, noise)
        with FlopCounterMode(display=False) as learning:
            terms = policy.evaluate(inputs, action.trace)
            (terms.log_prob.sum() + terms.entropy.sum() + terms.value.sum()).backward()  # type: ignore[no-untyped-call]
        policy.zero_grad(set_to_none=True)
        size = nbytes(policy)
        self._decision = Work(float(acting.get_total_flops()), weight_bytes=size)
        self._update = Work(float(learning.get_total_flops()), weight_bytes=2 * size)

    def decision(self, rows: int) -> list[Work]:
        """All of it as one pass."""
        return [batched(self._decision, rows)]

    def update(self, rows: int, cached: bool) -> Work:
        """`cached` makes no difference: what was executed is counted."""
        return batched(self._update, rows)


def card_of(cluster: Cluster) -> Card | None:
    """The card of the cluster's accelerators, of several kinds the slowest; None where no node names one.

    Raises `PlanError` for one that is not known, `UserError` where some nodes with accelerators name none.
    """
    nodes = [node for node in cluster.nodes if node.accelerators]
    named = [find_card(node.card) for node in nodes if node.card is not None]
    if not named:
        return None
    if len(named) < len(nodes):
        without = next(node.name for node in nodes if node.card is None)
        raise UserError(
            f"node {without!r} of the cluster has accelerators, but no card; name the card of all or of none"
        )
    return min(named, key=lambda card: (card.flops_per_s, card.bytes_per_s))


def with_estimates(profile: Profile, config: Config, workflow: Workflow, cluster: Cluster) -> Profile:
    """The profile with policy and learner on accelerators by estimated times, where both were measured on cores alone
    and the cluster names its card. Else the profile itself: measured times are never replaced on their pool."""
    roles = roles_of(workflow)
    names = (roles.policy, roles.learner)
    measured = [profile.components[name] for name in names]
    if any("accelerators" in (one.pool, one.other_pool and one.other_pool.pool) for one in measured):
        return profile
    card = card_of(cluster)
    if card is None:
        return profile
    info = InProcess().describe(task_spec(config))
    policy = make_policy(config, policy_spec(config, info), device="cpu")
    inputs = blank_inputs(policy, info, config.policy.reads)
    instruction = inputs.instruction[0] if inputs.instruction else ""
    costs: Costs = policy.costs(instruction) if isinstance(policy, CountsWork) else ExecutedCosts(policy, inputs)
    acting, learning = measured
    rows = max(workflow.environments(i) for i in range(len(workflow.loops)))
    decisions = {n: decision_seconds(costs, n, card) for n in _halves(rows)}
    updates = {n: update_seconds(costs, config, workflow, n, card) for n in _halves(workflow.items)}
    size, held = nbytes(policy), sum(rank_bytes(policy, 1, False, config.optim.ema is not None).values())
    estimated = {
        roles.policy: replace(_on(acting, decisions, card, EFFICIENCY), resident_bytes=float(size)),
        roles.learner: replace(_on(learning, updates, card, UPDATE_EFFICIENCY), resident_bytes=float(held)),
    }
    return replace(profile, components={**profile.components, **estimated})


def decision_seconds(costs: Costs, rows: int, card: Card) -> float:
    """Seconds of one decision for `rows` environments."""
    return sum(card.seconds(work.flops, work.nbytes) for work in costs.decision(rows))


def update_seconds(costs: Costs, config: Config, workflow: Workflow, items: int, card: Card) -> float:
    """Seconds of all epochs' forward and backward passes over the decisions of `items`."""
    rounds = sum((loop.items or workflow.items) * loop.steps for loop in workflow.loops) / workflow.items
    optim, samples = config.optim, max(1, round(items * rounds))
    minibatch = min(optim.minibatch or samples, samples)
    micro_batch = min(optim.micro_batch or minibatch, minibatch)
    work = costs.update(micro_batch, False)
    return optim.epochs * math.ceil(samples / micro_batch) * card.seconds(work.flops, work.nbytes, UPDATE_EFFICIENCY)


def _on(component: ComponentProfile, seconds: dict[int, float], card: Card, efficiency: float) -> ComponentProfile:
    points = tuple(Point(batch, 1, value, value, value) for batch, value in seconds.items())
    words = f"roofline of the {card.name} at {efficiency:.0%} of its rate"
    return replace(
        component,
        pool="accelerators",
        points=points,
        contention=1.0,
        bytes_per_item=0.0,
        estimated=f"{words}; measure with `embodied profile` on it",
    )


def _halves(most: int) -> Sequence[int]:
    """1, ..., most / 4, most / 2, most: where the roofline bends, a straight line between two is not far off."""
    counts = [most]
    while counts[-1] > 1:
        counts.append(counts[-1] // 2)
    return counts[::-1]
