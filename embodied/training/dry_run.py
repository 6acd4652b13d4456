"""`--dry-run` of `train` and `sft`: shapes, memory and placement of a run, without a worker and without an update."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from rich import get_console

from embodied.config.schema import Config
from embodied.devices import decide
from embodied.errors import UserError
from embodied.execution.assignment import (
    HERE,
    Assignment,
    configured,
    frame_rows,
    history_of,
    imitation_places,
    memory_rounds,
)
from embodied.learning.optimizer import make_optimizer
from embodied.learning.sharding import rank_bytes
from embodied.planning.memory import CARDS, RESERVE, CardMemory, Passes, card_memory, changes, smallest_change
from embodied.rollout.policy_worker import blank_inputs
from embodied.training.checks import Checked, check_described, check_start, require_rows
from embodied.training.imitator import ADAM_EPS
from embodied.training.sft import read_demonstrations
from embodied.trajectories.memory import MemoryLayout, MemoryShape
from embodied.workflows.context import make_policy, policy_spec
from embodied.workflows.run_spec import RunSpec, task_spec
from embodied.workflows.sizes import holds_shards
from policies.contract import Policy, PolicySpec
from policies.lora import AdaptedPolicy
from policies.quantised import count_weights
from sim_farm.contract import TaskInfo
from sim_farm.shared_memory.frame_memory import nbytes_of
from sim_farm.workers.hosts import InProcess


def dry_run(config: Config, card: float | None = None) -> dict[str, Any]:
    """Check the run, ask one environment of each task for its sizes, build the policy, and predict its memory on a card
    of so many GB (None: that of this machine, if any). Returns the figures that it prints; raises as `check_start` and
    `check_described` do."""
    checked = Checked(command="train", config=config)
    check_start(checked)
    run = checked.run
    infos = [InProcess().describe(task.spec) for task in run.tasks]
    if not checked.is_quick:
        check_described(checked, infos)
    spec = policy_spec(config, infos[0])
    policy = make_policy(config, spec)

    def predict(changed: Config, policy: Policy) -> CardMemory:
        return card_memory(changed, policy, _passes(RunSpec.of(changed), policy, infos))

    memory = predict(config, policy)
    return _shown(
        {
            "tasks": [_task(info) for info in infos],
            "policy": _policy(config, policy, infos[0]),
            "iteration": _iteration(run, infos),
            "bytes": _parts(memory) | _bytes(run, policy, infos),
            "placement": _placement(run),
            **_card(config, policy, spec, memory, predict, card),
        }
    )


def sft_dry_run(config: Config, card: float | None = None) -> dict[str, Any]:
    """Check a training from demonstrations, ask an environment for its sizes, build the policy, open the data where it
    is named, and predict the memory on a card as `dry_run` does. Returns the figures that it prints."""
    checked = Checked(command="sft", config=config)
    check_start(checked)
    info = InProcess().describe(task_spec(config))
    if not checked.is_quick:
        check_described(checked, [info])
    spec = policy_spec(config, info)
    policy = make_policy(config, spec, device="cpu")
    data: dict[str, Any] = {}
    rows = None
    if config.sft.data:
        demonstrations = read_demonstrations(config, info)
        rows = len(demonstrations.train)
        require_rows(config, rows)
        data = {"episodes": demonstrations.episodes, "rows": rows, "held_out_rows": len(demonstrations.held_out)}
    batch = min(config.sft.batch, rows or config.sft.batch)
    places = imitation_places(config, tuple(sorted(os.sched_getaffinity(0))), ())
    ranks = 1 if config.runtime.mode == "inline" else len(places)
    share = math.ceil(batch / ranks)
    micro_batch = min(config.optim.micro_batch or batch, share)
    make_optimizer(policy, config.optim, policy_lr=config.sft.lr, value_lr=None, eps=ADAM_EPS)  # raises for no decay
    trained, whole = (_count(policy, trained=trained) for trained in (True, False))
    sharded = ranks > 1 and holds_shards(config, trained, whole, "cuda" in (places[0].device or ""))

    def predict(changed: Config, policy: Policy) -> CardMemory:
        rows = min(changed.optim.micro_batch or batch, share)
        inputs = blank_inputs(policy, info, changed.policy.reads)
        passes = Passes(inputs, rows, rows, of_a_step=math.ceil(share / rows), imitates=True)
        return card_memory(changed, policy, passes)

    memory = predict(config, policy)
    found = {
        "task": _task(info),
        "policy": _policy(config, policy, info),
        "data": data or {"named": "none (--data)"},
        "steps": {
            "steps": config.sft.steps,
            "minibatch": batch,
            "rows_of_a_rank": share,
            "micro_batch": micro_batch,
            "passes_of_a_step": math.ceil(share / micro_batch),
        },
        "bytes": rank_bytes(policy, ranks, sharded, config.optim.ema is not None)
        | {"update": memory.update or 0, "at_most_at_once": memory.total},
        "placement": {
            "ranks": ranks,
            "each_has": "a shard of the policy" if sharded else "the whole policy",
            "on": ", ".join(dict.fromkeys(place.device or "cpu" for place in places[:ranks])),
        },
        **_card(config, policy, spec, memory, predict, card),
    }
    return _shown(found)


def _shown(found: dict[str, Any]) -> dict[str, Any]:
    for title, lines in found.items():
        for line in lines if isinstance(lines, list) else [lines]:
            text = ", ".join(f"{name.replace('_', ' ')} {_said(title, value)}" for name, value in line.items())
            get_console().print(f"{title}: {text}", markup=False, highlight=False, soft_wrap=True)
    return found


def _said(title: str, value: Any) -> str:
    if title == "bytes":
        return f"{value / 1e6:,.1f} MB"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _task(info: TaskInfo) -> dict[str, Any]:
    return {
        "name": info.spec.name,
        "action": info.action_dim,
        "state": info.state_dim,
        "proprio": info.proprio_dim,
        "cameras": " and ".join(info.cameras) or "none",
        "at_most_env_steps": info.max_episode_steps,
    }


def _policy(config: Config, policy: Policy, info: TaskInfo) -> dict[str, Any]:
    inputs = blank_inputs(policy, info, config.policy.reads)
    parts = {"state": inputs.state, "proprio": inputs.proprio, **inputs.frames}
    shapes = [f"{name} {['B', *tensor.shape[1:]]}" for name, tensor in parts.items() if tensor is not None]
    shapes += ["instruction [B texts]"] if inputs.instruction else []
    return {
        "kind": config.policy.kind,
        "reads": " and ".join(shapes).replace("'", ""),
        "action_chunk": f"[B, {policy.spec.chunk}, {policy.spec.action_dim}]",
        "parameters": _count(policy),
        "trained": _count(policy, trained=True),
        "device": config.policy.device,
    }


def _count(policy: Policy, trained: bool = False) -> int:
    return sum(p.numel() for p in policy.parameters() if p.requires_grad) if trained else count_weights(policy)


def _iteration(run: RunSpec, infos: list[TaskInfo]) -> dict[str, Any]:
    """Numbers of an iteration; of whole episodes the most that there can be."""
    optim = run.config.optim
    samples = run.environments * run.rounds(infos)
    minibatch = min(optim.minibatch or samples, samples)
    return {
        "environments": run.environments,
        "samples_at_most" if run.by_episodes else "samples": samples,
        "epochs": optim.epochs,
        "minibatch": minibatch,
        "micro_batch": min(optim.micro_batch or minibatch, minibatch),
        "optimiser_steps": optim.epochs * math.ceil(samples / minibatch),
    }


def _parts(memory: CardMemory) -> dict[str, int]:
    """Memory of the policy by part. Parts that this run does not have are left out."""
    optional = ("average", "reference")
    parts = {name: size for name, size in asdict(memory).items() if size is not None and (size or name not in optional)}
    return {"weights": memory.frozen + memory.trained, **parts, "at_most_at_once": memory.total}


def _bytes(run: RunSpec, policy: Policy, infos: list[TaskInfo]) -> dict[str, int]:
    """Memory of trajectories and frames, which is the host's."""
    inputs = blank_inputs(policy, infos[0], run.config.policy.reads)
    rounds = memory_rounds(run, 0, infos)
    shape = MemoryShape.of(rounds, run.environments, policy.spec.cameras, infos, history_of(run.config))
    with torch.no_grad():
        layout = MemoryLayout.of(shape, inputs, decide(policy, inputs, torch.zeros(1, policy.noise_dim)))
    frames = nbytes_of(frame_rows(run, 0, infos), len(policy.spec.cameras), policy.spec.image_size)
    return {
        "trajectories": sum(field.nbytes for field in layout.fields.values()),
        "frames": frames if policy.spec.cameras else 0,
    }


def _passes(run: RunSpec, policy: Policy, infos: list[TaskInfo]) -> Passes:
    """The passes of a run whose card holds all of the policy, which decides for a group of environments at once."""
    config, optim = run.config, run.config.optim
    acting = max(math.ceil(task.env.num_envs / config.farm.groups) for task in run.tasks)
    samples = run.environments * run.rounds(infos)
    minibatch = min(optim.minibatch or samples, samples)
    rows = min(optim.micro_batch or minibatch, minibatch)
    inputs = blank_inputs(policy, infos[0], config.policy.reads)
    of_a_step = math.ceil(minibatch / rows)
    return Passes(inputs, acting, rows, of_a_step=of_a_step, critic=run.recipe.critic)


def _card_found() -> float | None:
    """GB of this machine's first GPU."""
    return torch.cuda.get_device_properties(0).total_memory / 1e9 if torch.cuda.is_available() else None


def _card(
    config: Config,
    policy: Policy,
    spec: PolicySpec,
    memory: CardMemory,
    predict: Callable[[Config, Policy], CardMemory],
    card: float | None,
) -> dict[str, Any]:
    """The verdict: the run fits on the card, or fits with a change of settings, or does not. Empty without a card.
    Raises `UserError` for a card that would not even hold what the driver needs."""
    card = card or _card_found()
    if card is None:
        return {}
    if card * 1e9 <= RESERVE:
        raise UserError(
            f"--card {card:g} is too small for anything: {RESERVE / 1e9:g} GB of a card are left free for its driver "
            f"and libraries; usual cards have {', '.join(map(str, CARDS))} GB"
        )
    found: dict[str, Any] = {"gb": f"{card:g}", "needs_gb": f"{(memory.total + RESERVE) / 1e9:.2f}"}
    if memory.update is None:
        found["note"] = "activations are not predicted for this policy"
    if memory.fits(card):
        fits = "the run fits" if memory.update is not None else "weights, gradients and moments fit"
        return {"card": {**found, "verdict": fits}}

    built = {config.policy.base: policy}

    def rebuilt(changed: Config) -> CardMemory:
        base = changed.policy.base
        if base not in built:
            built.clear()  # a large policy is there once
            built[base] = make_policy(changed, spec, device="cpu")
        return predict(changed, built[base])

    adapted = isinstance(policy, AdaptedPolicy) and policy.adapted
    changed = smallest_change(config, rebuilt, card, adapted)
    if changed is None:
        wider = next((size for size in CARDS if memory.fits(size)), None)
        other = f"a card of {wider} GB has room for it" if wider else f"it needs more than {CARDS[-1]} GB"
        hint = (
            ""
            if adapted or not isinstance(policy, AdaptedPolicy)
            else "; an adapter (policy.options.lora_rank) needs less"
        )
        return {"card": {**found, "verdict": f"no change of settings makes it fit; as it is, {other}{hint}"}}
    needs = (rebuilt(changed).total + RESERVE) / 1e9
    return {
        "card": {
            **found,
            "verdict": f"it does not fit; with {changes(config, changed)} it needs {needs:.2f} GB",
        }
    }


def _placement(run: RunSpec) -> dict[str, Any]:
    config = run.config
    if config.plan.mode != "configured":
        return {"plan": config.plan.file or f"searched for when the run begins ({config.plan.mode}): `embodied plan`"}
    found: Assignment = configured(run, tuple(sorted(os.sched_getaffinity(0))), dict.fromkeys(config.farm.nodes, HERE))
    if run.inline:
        return {"all": "in this process, in order (runtime.mode inline)"}
    workers: dict[str, Any] = {
        "physics_workers": sum(len(farm.physics) for farm in found.farms),
        "render_workers": sum(len(farm.render) for farm in found.farms) or "none (physics workers draw)",
    }
    return workers | {name: f"{len(places)} x {places[0].threads} threads" for name, places in found.components.items()}
