"""The laws that every policy obeys. A new policy passes when each function in `LAWS` returns.

A law takes a policy and a batch of at least four rows; it may change the policy. Its message says what broke.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

import policies
from policies import Action, Evaluation, Inputs, Policy, PolicySpec

ROWS_TOLERANCE = 1e-5
"""A row computed in another batch: other blocks of a matrix product, other rounding."""


def random_inputs(spec: PolicySpec, rows: int, seed: int) -> Inputs:
    """What a policy of this spec may see: states off centre, noise as frames."""
    g = torch.Generator().manual_seed(seed)
    size = spec.image_size
    frames = {
        name: torch.randint(0, 256, (rows, size, size, 3), generator=g, dtype=torch.uint8) for name in spec.cameras
    }
    return Inputs(
        state=3 + 2 * torch.randn(rows, spec.state_dim, generator=g) if spec.state_dim else None,
        proprio=0.1 * torch.randn(rows, spec.proprio_dim, generator=g) if spec.proprio_dim else None,
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
    rows = _rows(inputs)
    first, again = (policy.act(inputs, random_noise(policy, rows, 1)) for _ in range(2))
    other = policy.act(inputs, random_noise(policy, rows, 2))
    _assert_same(_tensors(first), _tensors(again), 0.0, "act twice with the same noise")
    differs = (first.chunk != other.chunk).flatten(1).any(1)
    assert differs.all(), "another noise gave a row the same chunk"


def law_mode_is_deterministic(policy: Policy, inputs: Inputs) -> None:
    first, again = policy.act(inputs, None), policy.act(inputs, None)
    _assert_same(_tensors(first), _tensors(again), 0.0, "the mode taken twice")
    _assert_scored_alike(policy, inputs, first)


def law_scores_agree(policy: Policy, inputs: Inputs) -> None:
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    _assert_scored_alike(policy, inputs, action)
    _assert_same({"value": action.value}, {"value": policy.value(inputs)}, ROWS_TOLERANCE, "value after act")


def law_rows_are_independent(policy: Policy, inputs: Inputs) -> None:
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
    """`without` names the parameters that are known to get none."""
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    evaluation = policy.evaluate(inputs, action.trace)
    policy.zero_grad()
    (evaluation.log_prob.mean() + evaluation.entropy.mean() + evaluation.value.mean()).backward()
    idle = {name for name, p in policy.named_parameters() if p.grad is None or not p.grad.any()}
    assert idle == set(without), f"parameters without gradient: {sorted(idle)}, expected {sorted(without)}"


def law_act_leaves_no_graph(policy: Policy, inputs: Inputs) -> None:
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    tensors = [action.chunk, action.log_prob, action.value, *action.trace.values(), policy.value(inputs)]
    assert not any(t.requires_grad for t in tensors), "act or value returned a tensor with a graph"
    assert not any(t.is_inference() for t in tensors), "act or value returned a tensor that no graph can hold"


def law_global_generators_are_untouched(policy: Policy, inputs: Inputs) -> None:
    before = torch.random.get_rng_state()
    action = policy.act(inputs, random_noise(policy, _rows(inputs), 1))
    policy.act(inputs, None)
    policy.evaluate(inputs, action.trace)
    policy.value(inputs)
    policy.observe(inputs)
    assert torch.equal(before, torch.random.get_rng_state()), "the policy drew from torch's global generator"


def law_observe_changes_buffers_only(policy: Policy, inputs: Inputs) -> None:
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    policy.observe(inputs)
    for name, parameter in policy.named_parameters():
        assert torch.equal(before[name], parameter), f"observe changed the parameter {name}"
    assert policy.act(inputs, None).chunk.isfinite().all(), "after observe the mode is not finite"


def law_saved_policy_is_the_policy(policy: Policy, inputs: Inputs) -> None:
    noise = random_noise(policy, _rows(inputs), 1)
    other = policies.build(policy.kind, policy.spec, seed=99, **policy.architecture())
    with tempfile.TemporaryDirectory() as folder:
        policies.save(policy, folder)
        policies.load_into(other, folder)
        acted = _tensors(policy.act(inputs, noise))
        for copied in (policies.load(folder), other):
            assert copied.spec == policy.spec and copied.architecture() == policy.architecture()
            for name, tensor in policy.state_dict().items():
                assert torch.equal(tensor, copied.state_dict()[name]), f"{name} changed in saving and loading"
            _assert_same(acted, _tensors(copied.act(inputs, noise)), 0.0, "act after loading")


def law_log_prob_is_the_density_that_act_samples(policy: Policy, inputs: Inputs) -> None:
    """E[p'(a) / p(a)] = 1 for decisions a that `act` draws under p, and p' of any other weights.

    This holds only if `log_prob` is a normalised density and `act` draws from it: a wrong mean, a wrong
    standard deviation, a forgotten factor all break it. One row, many draws; the mean lies within 4.5
    standard errors, and the ratios vary enough for that to mean something.
    """
    draws = 4000
    many = inputs.rows(torch.zeros(draws, dtype=torch.int64))
    action = policy.act(many, random_noise(policy, draws, 3))
    log_p = action.log_prob.double().sum((1, 2))
    scale = 0.1
    while True:
        other = copy.deepcopy(policy)
        perturb(other, scale, seed=4)
        with torch.no_grad():
            log_ratio = other.evaluate(many, action.trace).log_prob.double().sum((1, 2)) - log_p
        if log_ratio.std() < 0.6:
            break
        scale *= 0.8
    assert log_ratio.std() > 0.2, "the density hardly depends on the weights"
    ratio = log_ratio.exp()
    error, allowed = abs(float(ratio.mean()) - 1), 4.5 * float(ratio.std()) / draws**0.5
    assert error < allowed, f"not act's density: mean ratio off by {error:.3f}, chance allows {allowed:.3f}"


LAWS: list[Callable[[Policy, Inputs], None]] = [
    law_shapes_and_dtypes,
    law_noise_decides,
    law_mode_is_deterministic,
    law_scores_agree,
    law_rows_are_independent,
    law_gradients_reach_every_parameter,
    law_act_leaves_no_graph,
    law_global_generators_are_untouched,
    law_observe_changes_buffers_only,
    law_saved_policy_is_the_policy,
    law_log_prob_is_the_density_that_act_samples,
]


def _rows(inputs: Inputs) -> int:
    tensors = [inputs.state, inputs.proprio, *inputs.frames.values()]
    return next((len(t) for t in tensors if t is not None), len(inputs.instruction))


def _tensors(result: Action | Evaluation) -> dict[str, Tensor]:
    """Everything in the result, the trace's tensors included; each has B rows."""
    found = dict(vars(result))
    trace = found.pop("trace", {})
    return found | {f"trace[{name!r}]": tensor for name, tensor in trace.items()}


def _rows_of(tensors: Mapping[str, Tensor], index: Tensor) -> dict[str, Tensor]:
    return {name: tensor[index] for name, tensor in tensors.items()}


def _assert_same(expected: dict[str, Tensor], got: dict[str, Tensor], tolerance: float, what: str) -> None:
    assert expected.keys() == got.keys()
    for name, tensor in expected.items():
        error = float((tensor.detach().double() - got[name].detach().double()).abs().max())
        assert error <= tolerance, f"{what}: {name} differs by {error:.2g}, allowed {tolerance:.2g}"


def _assert_scored_alike(policy: Policy, inputs: Inputs, action: Action) -> None:
    evaluation = policy.evaluate(inputs, action.trace)
    difference = (evaluation.log_prob.detach() - action.log_prob).sum((1, 2))
    error = float(difference.exp().sub(1).abs().mean())
    assert error < policy.ratio_tolerance, f"mean |ratio - 1| of unchanged weights is {error:.2g}"
    error = float((evaluation.value.detach() - action.value).abs().max())
    assert error < ROWS_TOLERANCE * max(1.0, float(action.value.abs().max())), f"value differs by {error:.2g}"
