"""The laws that every policy obeys. A new policy passes when each function in `LAWS` returns.

A law takes a policy and a batch of at least four rows; it may change the policy. Its message says what broke.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

import policies
from policies import Action, Evaluation, Inputs, Policy, PolicySpec
from policies.action_range import ActionRange
from policies.capabilities import (
    GathersInGroups,
    Imitates,
    LeftOver,
    Observes,
    Precomputes,
    Predicts,
    RealTimeChunks,
    earlier_actions,
)
from policies.conformance.reporting import NotApplicable
from policies.contract import actor_parameters
from policies.registry import policy_kind

ROWS_TOLERANCE = 1e-5
"""A row computed in another batch: other blocks of a matrix product, other rounding."""


def random_inputs(spec: PolicySpec, rows: int, seed: int) -> Inputs:
    """Inputs that a policy of this spec may see: states off centre, noise as frames."""
    g = torch.Generator().manual_seed(seed)
    size, seen = spec.image_size, (rows, spec.observations) if spec.observations > 1 else (rows,)
    frames = {
        name: torch.randint(0, 256, (*seen, size, size, 3), generator=g, dtype=torch.uint8) for name in spec.cameras
    }
    return Inputs(
        state=3 + 2 * torch.randn(*seen, spec.state_dim, generator=g) if spec.state_dim else None,
        proprio=0.1 * torch.randn(*seen, spec.proprio_dim, generator=g) if spec.proprio_dim else None,
        frames=frames,
    )


def random_noise(policy: Policy, rows: int, seed: int) -> Tensor:
    return torch.randn(rows, policy.noise_dim, generator=torch.Generator().manual_seed(seed))


def perturb(policy: Policy, scale: float, seed: int) -> None:
    """Move every parameter that is trained: an untrained policy's small last layer hides mistakes."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.parameters():
            if not parameter.requires_grad:
                continue
            parameter.add_(scale * torch.randn(parameter.shape, generator=g))


def law_shapes_and_dtypes(policy: Policy, inputs: Inputs) -> None:
    """Results of `act`, `evaluate` and `value` have the shapes and dtypes of the contract, and is finite."""
    rows, spec = _rows(inputs), policy.spec
    chunk = (rows, spec.chunk, spec.action_dim)
    action = policy.act(inputs, random_noise(policy, rows, 1))
    evaluation = policy.evaluate(inputs, action.trace)
    expected = {
        "act's chunk": (action.chunk, chunk),
        "act's log_prob": (action.log_prob, chunk),
        "act's value": (action.value, (rows,)),
        "evaluate's log_prob": (evaluation.log_prob, chunk),
        "evaluate's entropy": (evaluation.entropy, chunk),
        "evaluate's value": (evaluation.value, (rows,)),
        "value": (policy.value(inputs), (rows,)),
    }
    for name, (tensor, shape) in expected.items():
        assert tensor.shape == shape, f"{name} is {list(tensor.shape)}, must be {list(shape)}"
        assert tensor.dtype == torch.float32, f"{name} is {tensor.dtype}, must be float32"
        assert tensor.isfinite().all(), f"{name} is not finite"
    for name, tensor in action.trace.items():
        assert len(tensor) == rows, f"trace[{name!r}] has {len(tensor)} rows for {rows} decisions"


def law_noise_decides(policy: Policy, inputs: Inputs) -> None:
    """The same noise gives the same decision; another noise gives every row another one."""
    rows = _rows(inputs)
    first, again = (policy.act(inputs, random_noise(policy, rows, 1)) for _ in range(2))
    other = policy.act(inputs, random_noise(policy, rows, 2))
    _assert_same(_tensors(first), _tensors(again), 0.0, "act twice with the same noise")
    differs = (first.chunk != other.chunk).flatten(1).any(1)
    assert differs.all(), "another noise gave a row the same chunk"


def law_mode_is_deterministic(policy: Policy, inputs: Inputs) -> None:
    """Without noise the decision is the same each time, and `evaluate` scores it as `act` did."""
    first, again = policy.act(inputs, None), policy.act(inputs, None)
    _assert_same(_tensors(first), _tensors(again), 0.0, "the mode taken twice")
    _assert_scored_alike(policy, inputs, first)


def law_scores_agree(policy: Policy, inputs: Inputs) -> None:
    """With unchanged weights `evaluate` gives `act`'s log-probs and value, and `value` the same value."""
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    _assert_scored_alike(policy, inputs, action)
    _assert_same({"value": action.value}, {"value": policy.value(inputs)}, ROWS_TOLERANCE, "value after act")


def law_velocities_have_not_changed_since_they_acted(policy: Policy, inputs: Inputs) -> None:
    """A policy that says how its velocities change says so of every decision."""
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    contrast = policy.evaluate(inputs, action.trace).contrast
    assert (contrast is not None) == policy_kind(policy.kind).format.contrasts(policy.architecture())
    if contrast is None:
        raise NotApplicable("the policy does not say how its velocities change (PolicyFormat.contrasts)")
    chunk = action.chunk.shape
    assert contrast.drift.shape == chunk and contrast.pull.shape == chunk
    assert contrast.drift.abs().max() < 1e-4, "the velocity that acted is not what is evaluated"
    other = copy.deepcopy(policy)
    perturb(other, 0.05, seed=2)
    moved = other.evaluate(inputs, action.trace).contrast
    assert moved is not None and (moved.drift != 0).any() and (moved.pull != 0).any()


def law_rows_are_independent(policy: Policy, inputs: Inputs) -> None:
    """A row's decision and scores do not depend on the other rows of its batch."""
    rows = _rows(inputs)
    noise = random_noise(policy, rows, 1)
    action = policy.act(inputs, noise)
    acted, evaluated = _tensors(action), _tensors(policy.evaluate(inputs, action.trace))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1))
    for index, what in [(torch.tensor([2]), "a row alone"), (order, "permuted rows")]:
        part, trace = inputs.rows(index), _rows_of(action.trace, index)
        alone = _tensors(policy.act(part, noise[index]))
        _assert_same(_rows_of(acted, index), alone, ROWS_TOLERANCE, f"act on {what}")
        alone = _tensors(policy.evaluate(part, trace))
        _assert_same(_rows_of(evaluated, index), alone, ROWS_TOLERANCE, f"evaluate on {what}")


def law_gradients_reach_every_parameter(policy: Policy, inputs: Inputs, without: Collection[str] = ()) -> None:
    """Every parameter gets a gradient from the scores; `without` names those that are known to get none."""
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    evaluation = policy.evaluate(inputs, action.trace)
    policy.zero_grad()
    parts = (evaluation.log_prob, evaluation.entropy, evaluation.value, evaluation.auxiliary)
    torch.stack([part.mean() for part in parts if part is not None]).sum().backward()
    idle = {name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()}
    assert idle == set(without), f"parameters without gradient: {sorted(idle)}, expected {sorted(without)}"


def law_act_leaves_no_graph(policy: Policy, inputs: Inputs) -> None:
    """`act` and `value` return tensors without a graph, which a graph can hold."""
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    tensors = [action.chunk, action.log_prob, action.value, *action.trace.values(), policy.value(inputs)]
    assert not any(t.requires_grad for t in tensors), "act or value returned a tensor with a graph"
    assert not any(t.is_inference() for t in tensors), "act or value returned a tensor that no graph can hold"


def law_global_generators_are_untouched(policy: Policy, inputs: Inputs) -> None:
    """No method draws from torch's global generator."""
    before = torch.random.get_rng_state()
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    policy.act(inputs, None)
    policy.evaluate(inputs, action.trace)
    policy.value(inputs)
    if isinstance(policy, Observes):
        policy.observe(inputs)
    assert torch.equal(before, torch.random.get_rng_state()), "the policy drew from torch's global generator"


def law_observe_changes_buffers_only(policy: Policy, inputs: Inputs) -> None:
    """`observe` changes no parameter, and the policy acts on after it."""
    if not isinstance(policy, Observes):
        raise NotApplicable("the policy has no observe")
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.observe(inputs)
    for name, parameter in policy.named_parameters():
        assert torch.equal(before[name], parameter), f"observe changed the parameter {name}"
    assert policy.act(inputs, None).chunk.isfinite().all(), "after observe the mode is not finite"


def law_saved_policy_is_the_policy(policy: Policy, inputs: Inputs) -> None:
    """A policy that was saved and loaded is the same, to the last bit."""
    noise = random_noise(policy, _rows(inputs), 1)
    other = policies.build(policy.kind, policy.spec, 99, policy.base, **policy.architecture())
    with tempfile.TemporaryDirectory() as folder:
        policies.save(policy, folder)
        policies.load_into(other, folder)
        acted = _tensors(policy.act(inputs, noise))
        for copied in (policies.load(folder, [policy.kind]), other):
            assert copied.spec == policy.spec and copied.architecture() == policy.architecture()
            for name, tensor in policy.state_dict().items():
                assert torch.equal(tensor, copied.state_dict()[name]), f"{name} changed in saving and loading"
            _assert_same(acted, _tensors(copied.act(inputs, noise)), 0.0, "act after loading")


def law_weights_that_are_not_finite_are_refused(policy: Policy, inputs: Inputs) -> None:
    """Saved weights and statistics, of which one number is spoiled: refused, and what was loaded into is as before."""
    named = dict(policy.named_parameters())
    own = [n for n, p in named.items() if p.requires_grad and not n.startswith("value_head.")]
    critics = [n for n in named if n.startswith("value_head.")]
    # Those of a community's layout are JSON, of which the policy's own tests are.
    statistics = [n for n in policy.state_dict() if n.startswith("normalizer.")]
    other = policies.build(policy.kind, policy.spec, 99, policy.base, **policy.architecture())
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    for name in (*own[-1:], *critics[-1:], *statistics):
        flat = policy.state_dict()[name].view(-1)
        for value in (float("nan"), float("inf"), float("-inf")):
            kept = flat[-1].clone()
            with tempfile.TemporaryDirectory() as folder, torch.no_grad():
                flat[-1] = value
                policies.save(policy, folder)
                flat[-1] = kept
                for load in (
                    lambda: policies.load(folder, code=[policy.kind]),
                    lambda: policies.load_into(other, folder),
                ):  # noqa: B023
                    try:
                        load()
                    except policies.PolicyError as error:
                        assert "not finite" in str(error) and name.rpartition(".")[2] in str(error), str(error)
                    else:
                        raise AssertionError(f"a policy whose {name} is {value} was loaded")
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name]), f"{name} changed in a loading that was refused"


def law_log_prob_is_the_density_that_act_samples(policy: Policy, inputs: Inputs) -> None:
    """`log_prob` is the density from which `act` draws.

    E[p'(a) / p(a)] = 1 for decisions a that `act` draws under p, and p' of any other weights. This holds only if
    `log_prob` is a normalised density and `act` draws from it: a wrong mean, a wrong standard deviation, a forgotten
    factor all break it. One row, many draws; the mean lies within 4.5 standard errors, and the ratios vary enough for
    that to mean something.
    """
    draws, tried = 4000, 400
    many = inputs.rows(torch.zeros(draws, dtype=torch.int64))
    action = policy.act(many, random_noise(policy, draws, 3))

    def log_ratio_of(other: Policy, rows: int) -> Tensor:
        trace = {name: tensor[:rows] for name, tensor in action.trace.items()}
        with torch.no_grad():
            found = other.evaluate(many.rows(torch.arange(rows)), trace).log_prob
        return (found.double() - action.log_prob[:rows].double()).sum((1, 2))

    scale = 0.1
    while True:  # other weights, but not so far away that a few rows count for all
        other = copy.deepcopy(policy)
        perturb(other, scale, seed=4)
        if log_ratio_of(other, tried).std() < 0.6:
            break
        scale *= 0.8
    log_ratio = log_ratio_of(other, draws)
    assert log_ratio.std() > 0.2, "the density hardly depends on the weights"
    ratio = log_ratio.exp()
    error, allowed = abs(float(ratio.mean()) - 1), 4.5 * float(ratio.std()) / draws**0.5
    assert error < allowed, f"not act's density: mean ratio off by {error:.3f}, chance allows {allowed:.3f}"


def law_all_is_computed_on_the_policys_device(policy: Policy, inputs: Inputs) -> None:
    """Everything is computed on the device that the policy is on.

    Pretended tensors on a pretended device: torch refuses an operation on tensors of two devices, and whatever
    needs to know a number on the host. A copy's parameters and buffers are where `policy.to(device)` puts them; its
    other tensors stay behind. The device is torch's "meta", since torch without CUDA cannot pretend more than a part.
    """
    rows, device = _rows(inputs), torch.device("meta")
    own = [*policy.parameters(), *policy.buffers()]
    if not own:
        raise NotApplicable("the policy has no tensors: it computes on the host")
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def there(tensor: Tensor | None) -> Any:
        with mode:
            return None if tensor is None else mode.from_tensor(tensor.detach()).to(device)

    policy = copy.deepcopy(policy, {id(t): there(t).requires_grad_(t.requires_grad) for t in own})
    with mode, _nothing_on_the_host():
        frames = {name: there(frame) for name, frame in inputs.frames.items()}
        inputs = replace(inputs, state=there(inputs.state), proprio=there(inputs.proprio), frames=frames)
        noise = there(random_noise(policy, rows, 1))
        action = policy.act(inputs, noise)
        found = _tensors(action) | {"mode": policy.act(inputs, None).chunk, "value alone": policy.value(inputs)}
        features = policy.precompute(inputs) if isinstance(policy, Precomputes) else {}
        found |= _tensors(policy.evaluate(inputs, {**action.trace, **features})) | features
        if isinstance(policy, Imitates):
            actions, counted = map(there, demonstrations(policy, rows))
            found["imitation"] = policy.imitate(inputs, actions, counted, noise)
    for name, tensor in found.items():
        assert tensor.device == device, f"{name} is on {tensor.device}, the policy is on another device"


def law_what_shards_names_is_used_by_being_called(policy: Policy, inputs: Inputs) -> None:
    """What `shards` names is used by being called alone: weights are there only while their module is called."""
    groups = policy.shards() if isinstance(policy, GathersInGroups) else ()
    if not groups:
        raise NotApplicable("the policy names no shards")
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    modules = [module for group in groups for module in group]
    weights = {p: p.data for module in modules for p in module.parameters()}
    called = set()

    def gather(module: nn.Module, *_: Any) -> None:
        called.add(module)
        for p in module.parameters():
            p.data = weights[p]

    def free(module: nn.Module, *_: Any) -> None:
        for p in module.parameters():
            p.data = torch.full_like(weights[p], torch.nan)

    with torch.no_grad():
        expected = _tensors(policy.evaluate(inputs, action.trace))
        hooks = [h for m in modules for h in (m.register_forward_pre_hook(gather), m.register_forward_hook(free))]
        for module in modules:
            free(module)
        found = _tensors(policy.evaluate(inputs, action.trace))
        _assert_same(expected, found, 0.0, "weights are read while nobody calls their module")
    for hook in hooks:
        hook.remove()
    for p, data in weights.items():
        p.data = data
    assert called == set(modules), "some of what is named is never called"


def law_imitation_is_a_loss_for_each_row(policy: Policy, inputs: Inputs) -> None:
    """`imitate` gives a finite loss for each row, which reaches the actor and not the critic."""
    before = torch.random.get_rng_state()
    loss = _imitation(policy, inputs)
    assert torch.equal(before, torch.random.get_rng_state()), "imitate drew from torch's global generator"
    assert loss.shape == (_rows(inputs),), f"the loss is {list(loss.shape)}, must be {[_rows(inputs)]}"
    assert loss.dtype == torch.float32 and loss.isfinite().all(), f"the loss is {loss}"
    policy.zero_grad()
    loss.mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in actor_parameters(policy)), "no gradient reaches the actor"
    assert all(p.grad is None or not p.grad.any() for p in policy.value_head.parameters()), "the critic imitates"
    _assert_same({"loss": loss}, {"loss": _imitation(policy, inputs)}, 0.0, "imitate twice with the same noise")


def law_uncounted_actions_do_not_matter(policy: Policy, inputs: Inputs) -> None:
    """Actions that are not counted change neither the loss nor the gradient."""
    rows = _rows(inputs)
    actions, _ = demonstrations(policy, rows)
    counted = torch.arange(actions.shape[1]) < torch.arange(rows)[:, None]  # row i: its first i actions
    other = torch.where(counted[..., None], actions, torch.nan)
    noise = random_noise(policy, rows, 1)
    first, second = (_imitate(policy, inputs, demonstrated, counted, noise) for demonstrated in (actions, other))
    _assert_same({"loss": first}, {"loss": second}, 0.0, "imitate with other actions beyond the episode's end")
    assert first[0] == 0, f"the loss of a row without actions is {float(first[0])}"
    policy.zero_grad()
    second.sum().backward()
    grads = [p.grad for p in actor_parameters(policy) if p.grad is not None]
    assert all(grad.isfinite().all() for grad in grads), "an action beyond the episode's end reached the gradient"


def law_each_counted_action_matters(policy: Policy, inputs: Inputs) -> None:
    """A row's loss is the mean over its counted actions, each of which moves it."""
    rows = _rows(inputs)
    actions, counted = demonstrations(policy, rows)
    loss = _imitation(policy, inputs)
    for c in range(actions.shape[1]):
        moved, choices = actions.clone(), policy.spec.discrete_actions
        moved[:, c] = (moved[:, c] + 1) % choices if choices else -moved[:, c]
        other = _imitate(policy, inputs, moved, counted, random_noise(policy, rows, 1))
        assert (other != loss).all(), f"action {c} of the chunk does not matter"


def law_rows_of_imitation_are_independent(policy: Policy, inputs: Inputs) -> None:
    """A row's loss does not depend on the other rows of its batch."""
    rows = _rows(inputs)
    noise, (actions, counted) = random_noise(policy, rows, 1), demonstrations(policy, rows)
    loss, index = _imitate(policy, inputs, actions, counted, noise), torch.tensor([2, 0])
    part = _imitate(policy, inputs.rows(index), actions[index], counted[index], noise[index])
    _assert_same({"loss": loss[index]}, {"loss": part}, ROWS_TOLERANCE, "imitate on two rows alone")


def law_imitation_brings_the_mode_to_the_demonstrations(
    policy: Policy, inputs: Inputs, steps: int = 300, lr: float = 3e-3, tolerance: float = 0.1
) -> None:
    """Training on a few demonstrations makes the mode what was demonstrated; `tolerance` is in half ranges."""
    few = inputs.rows(torch.arange(4))
    actions, counted = demonstrations(policy, 4)
    executed = actions[:, earlier_actions(policy) :][:, : policy.spec.chunk]
    scaled = ActionRange(policy.spec).to_network

    def distance() -> float:
        return float((scaled(policy.act(few, None).chunk) - scaled(executed)).abs().mean())

    before = distance()
    optimizer = torch.optim.Adam(actor_parameters(policy), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        _imitate(policy, few, actions, counted, random_noise(policy, 4, step)).mean().backward()
        optimizer.step()
    after = distance()
    assert after < tolerance, f"the mode was {before:.3f} from the demonstrations, after {steps} steps {after:.3f}"


def law_predictions_begin_with_the_chunk(policy: Policy, inputs: Inputs) -> None:
    """`predict` returns all actions of the decision of `act`, those of the chunk first."""
    if not isinstance(policy, Predicts):
        raise NotApplicable("the policy predicts no more than it executes")
    rows, spec = _rows(inputs), policy.spec
    for noise in (None, random_noise(policy, rows, 1)):
        found = policy.predict(inputs, noise)
        shape = (rows, spec.predicted, spec.action_dim)
        assert found.shape == shape, f"predict gives {list(found.shape)}, must be {list(shape)}"
        assert found.dtype == torch.float32 and not found.requires_grad
        chunk = policy.act(inputs, noise).chunk
        _assert_same({"chunk": chunk}, {"chunk": found[:, : spec.chunk]}, ROWS_TOLERANCE, "the beginning of predict")


def law_a_chunk_continues_what_is_left(policy: Policy, inputs: Inputs) -> None:
    """`continue_chunk` comes nearer to the left-over of the rows that have one, and decides for others as `act` does.
    Parameters have no gradient afterwards."""
    if not isinstance(policy, RealTimeChunks):
        raise NotApplicable("the policy continues no chunk")
    rows, chunk = _rows(inputs), policy.spec.chunk
    noise = random_noise(policy, rows, 1)
    plain = policy.act(inputs, noise).chunk
    there = torch.arange(rows) % 2 == 0
    left = plain.roll(1, 0)
    for jacobian in (True, False):
        found = policy.continue_chunk(inputs, noise, LeftOver(left, there, chunk, jacobian))[:, :chunk]
        assert found.dtype == torch.float32 and not found.requires_grad
        _assert_same({"chunk": plain[~there]}, {"chunk": found[~there]}, ROWS_TOLERANCE, "rows without a left-over")
        before, after = ((x - left)[there].square().mean() for x in (plain, found))
        assert after < before, f"the left-over is missed by {float(after):.3g}, without guidance by {float(before):.3g}"
    assert all(p.grad is None for p in policy.parameters()), "a gradient was left in a parameter"


Law = Callable[[Policy, Inputs], None]
LAWS: list[Law] = [
    law_shapes_and_dtypes,
    law_noise_decides,
    law_mode_is_deterministic,
    law_scores_agree,
    law_velocities_have_not_changed_since_they_acted,
    law_rows_are_independent,
    law_gradients_reach_every_parameter,
    law_act_leaves_no_graph,
    law_global_generators_are_untouched,
    law_observe_changes_buffers_only,
    law_saved_policy_is_the_policy,
    law_weights_that_are_not_finite_are_refused,
    law_log_prob_is_the_density_that_act_samples,
    law_all_is_computed_on_the_policys_device,
    law_what_shards_names_is_used_by_being_called,
    law_predictions_begin_with_the_chunk,
    law_a_chunk_continues_what_is_left,
]
IMITATION_LAWS: list[Callable[..., None]] = [
    law_imitation_is_a_loss_for_each_row,
    law_uncounted_actions_do_not_matter,
    law_each_counted_action_matters,
    law_rows_of_imitation_are_independent,
    law_imitation_brings_the_mode_to_the_demonstrations,
]
"""Laws of policies that can learn from demonstrations."""


def demonstrations(policy: Policy, rows: int) -> tuple[Tensor, Tensor]:
    """Actions [rows, E + P, A] that every policy can take, and that all of them count."""
    spec = policy.spec
    shape, choices = (rows, earlier_actions(policy) + spec.predicted, spec.action_dim), spec.discrete_actions
    actions = torch.rand(shape, generator=torch.Generator().manual_seed(8))
    actions = (choices * actions).floor() if choices else ActionRange(spec).to_environment(actions * 0.9 - 0.45)
    return actions, torch.ones(shape[:2], dtype=torch.bool)


@contextmanager
def _nothing_on_the_host() -> Iterator[None]:
    """Breaks the law where a number of a pretended tensor is asked for."""
    try:
        yield
    except DataDependentOutputException as error:
        raise AssertionError(
            f"the host asks for a number that is on the device ({error}), and waits for it: by .item(), by `if` of a "
            "tensor, or by torch.distributions without validate_args=False"
        ) from error


def _imitate(policy: Policy, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
    assert isinstance(policy, Imitates), "the policy has no imitate"
    return policy.imitate(inputs, actions, counted, noise)


def _imitation(policy: Policy, inputs: Inputs) -> Tensor:
    rows = _rows(inputs)
    return _imitate(policy, inputs, *demonstrations(policy, rows), random_noise(policy, rows, 1))


def _rows(inputs: Inputs) -> int:
    tensors = [inputs.state, inputs.proprio, *inputs.frames.values()]
    return next((len(t) for t in tensors if t is not None), len(inputs.instruction))


def _tensors(result: Action | Evaluation) -> dict[str, Tensor]:
    """Everything in the result, the tensors of trace and contrast included; each has B rows."""
    found = {name: part for name, part in vars(result).items() if part is not None}
    trace, contrast = found.pop("trace", {}), found.pop("contrast", None)
    parts = {f"trace[{name!r}]": tensor for name, tensor in trace.items()}
    return found | parts | ({} if contrast is None else {f"contrast.{n}": t for n, t in vars(contrast).items()})


def _rows_of(tensors: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {name: tensor[index] for name, tensor in tensors.items()}


def _assert_same(expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float, what: str) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        error = float((tensor.detach().double() - got[name].detach().double()).abs().max())
        allowed = tolerance * max(1.0, float(tensor.detach().double().abs().max()))
        assert error <= allowed, f"{what}: {name} differs by {error:.2g}, allowed {allowed:.2g}"


def _assert_scored_alike(policy: Policy, inputs: Inputs, action: Action) -> None:
    evaluation = policy.evaluate(inputs, action.trace)
    difference = (evaluation.log_prob.detach() - action.log_prob).sum((1, 2))
    error = float(difference.exp().sub(1).abs().mean())
    assert error < policy.ratio_tolerance, f"mean |ratio - 1| of unchanged weights is {error:.2g}"
    error = float((evaluation.value.detach() - action.value).abs().max())
    assert error < ROWS_TOLERANCE * max(1.0, float(action.value.abs().max())), f"value differs by {error:.2g}"
