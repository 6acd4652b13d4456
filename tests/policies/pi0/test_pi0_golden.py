"""pi0 and pi0.5 against what openpi and LeRobot compute with the same tiny checkpoints (tests/golden/pi0, pi05)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from policies import denoising
from policies.contract import PolicyError
from policies.flow_vla.network import Observation, Prefix, positions_of
from policies.layers import gaussian_log_prob, time_embedding
from policies.lerobot.statistics import read_lerobot
from policies.pi0.checkpoint import load_network, save_network
from policies.pi0.inputs import Prompts, pixel_values
from policies.pi0.network import UNUSED, Pi0Network, own_name, stored_name
from policies.pi0.normalisation import read_openpi
from tests.policies.pi0.cases import sample, velocity

GOLDEN = Path(__file__).parents[2] / "golden"
CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb")
TIMES = ("1.0", "0.7", "0.4", "0.1", "0.003")
LAYOUTS = ("checkpoint", "checkpoint_lerobot")
FAMILIES = ("pi0", "pi05")


class Case:
    """A family's golden tensors, and its network."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.folder = GOLDEN / family
        self.tensors = load_file(self.folder / "golden.safetensors")
        self.meta = json.loads((self.folder / "meta.json").read_text())
        self.network = load_network(self.folder / "checkpoint")
        self.seen = Observation(
            torch.stack([self[f"pixel_values.{name}"] for name in CAMERAS], 1),
            torch.stack([self[f"raw.image_mask.{name}"] for name in CAMERAS], 1),
            self["tokenized_prompt"],
            self["tokenized_prompt_mask"],
            self["state"],
        )
        with torch.no_grad():
            self.prefix: Prefix = self.network.prefix(self.seen)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def __repr__(self) -> str:
        return self.family

    @property
    def norm(self) -> str:
        return "zscore" if self.family == "pi0" else "quantile"

    def velocity(self, x: Tensor, t: Tensor) -> Tensor:
        with torch.no_grad():
            return velocity(self.network, self.prefix, self.seen.state, x, t)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(request.param)


def close(found: Tensor, expected: Tensor, atol: float = 2e-5, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(found.to(expected.dtype), expected, atol=atol, rtol=rtol)


# --- preprocessing


@pytest.mark.parametrize("camera", CAMERAS)
def test_pixels(case: Case, camera: str) -> None:
    raw = case[f"raw.image.{camera}"]
    found = pixel_values(raw, 28, "pillow")
    assert torch.equal(found, case[f"pixel_values.{camera}"])
    other = pixel_values(raw, 28, "interpolate").permute(0, 2, 3, 1)
    close(other, case[f"resized.torch.{camera}"], atol=2e-6, rtol=0)
    assert (found - other.permute(0, 3, 1, 2)).abs().max() > 0.1, "the two ways are one: nothing is shown"


@pytest.mark.parametrize("norm", ["zscore", "quantile"])
def test_units_of_openpi(case: Case, norm: str) -> None:
    units = read_openpi(case.folder / "checkpoint", "", quantile=norm == "quantile")
    state, actions = case["raw.state"], case["raw.actions"]
    torch.testing.assert_close(units.state.normalise(state), case[f"norm.{norm}.state"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(units.action.normalise(actions), case[f"norm.{norm}.actions"], rtol=1e-9, atol=1e-12)
    normalised, expected = case[f"unnorm.{norm}.in"][..., :7], case[f"unnorm.{norm}.out"][..., :7]
    torch.testing.assert_close(units.action.unnormalise(normalised), expected, rtol=1e-9, atol=1e-12)


def test_units_of_lerobot(case: Case) -> None:
    theirs = load_file(case.folder / "golden_lerobot.safetensors")
    units = read_lerobot(case.folder / "checkpoint_lerobot")
    close(units.state.normalise(case["raw.state"]), theirs["lerobot.norm.state"], 1e-6, 1e-6)
    close(units.action.normalise(case["raw.actions"]), theirs["lerobot.norm.actions"], 1e-6, 1e-6)
    close(units.action.unnormalise(theirs["lerobot.unnorm.in"]), theirs["lerobot.unnorm.out"], 1e-6, 1e-6)


def test_tokens_of_openpi(case: Case) -> None:
    sizes = case.network.sizes
    prompts = Prompts(case.folder / "checkpoint", sizes.prompt_len, "openpi")
    wordings = tuple(case.meta["prompts"])
    state = case[f"norm.{case.norm}.state"] if sizes.adaptive else None
    tokens, counted = prompts.batch(wordings, state)
    assert torch.equal(tokens, case["tokenized_prompt"]) and torch.equal(counted, case["tokenized_prompt_mask"])
    if sizes.adaptive:  # pi05_libero has no state in its prompt
        tokens, counted = prompts.batch(wordings, None)
        for row in range(2):
            assert torch.equal(tokens[row], case[f"tokens.stateless.{row}"])
            assert torch.equal(counted[row], case[f"tokens.stateless_mask.{row}"])


def test_texts_of_lerobot(case: Case) -> None:
    meta = json.loads((case.folder / "meta_lerobot.json").read_text())
    sizes, folder = case.network.sizes, case.folder / "checkpoint_lerobot"
    older = Prompts(folder, sizes.prompt_len, "lerobot-0.4", sizes.action_dim)
    state = [*case[f"norm.{case.norm}.state"]] if sizes.adaptive else [None, None]
    wordings = case.meta["prompts"]
    assert [older.text(a, s) for a, s in zip(wordings, state, strict=True)] == meta["prompt_text_lerobot_0_4_4"]
    if sizes.adaptive:  # later ones do not fill states up, as openpi
        newer = Prompts(folder, sizes.prompt_len, "lerobot")
        assert [newer.text(a, s) for a, s in zip(wordings, state, strict=True)] == meta["prompt_text_openpi"]


def test_a_prompt_that_does_not_fit_is_refused(case: Case, tmp_path: Path) -> None:
    prompts = Prompts(case.folder / "checkpoint", 3, "openpi")
    with pytest.raises(PolicyError, match=r"the prompt 'open the drawer' has \d+ tokens, the checkpoint 3"):
        prompts.batch(("open the drawer",), None)
    with pytest.raises(PolicyError, match=r"tokenizer\.model is missing, PaliGemma's SentencePiece model"):
        Prompts(tmp_path, 6, "openpi")


# --- the network


def test_prefix(case: Case) -> None:
    network, seen, prefix = case.network, case.seen, case.prefix
    with torch.no_grad():
        x, present = network.embed_prefix(seen)
    close(x[:, : network.sizes.patches], case["image_embedding.base_0_rgb"])
    close(x, case["prefix.embs"])
    assert torch.equal(present, case["prefix.pad_masks"])
    assert torch.equal(positions_of(present), case["prefix.position_ids"])
    close(prefix.hidden[present], case["prefix.last_hidden"][present])
    for mine, name in ((prefix.cache.keys, "prefix.keys"), (prefix.cache.values, "prefix.values")):
        for layer, expected in zip(mine, case[name], strict=True):
            close(layer.transpose(1, 2)[present], expected.transpose(1, 2)[present])


@pytest.mark.parametrize("t", ["1.0", "0.4"])
def test_suffix(case: Case, t: str) -> None:
    time = torch.full((2,), float(t))
    with torch.no_grad():
        tokens, condition = case.network.embed_suffix(case.seen.state, case[f"x_t.t{t}"], time)
    close(tokens, case[f"suffix.embs.t{t}"])
    embedded = time_embedding(time, case.network.sizes.expert.width)
    torch.testing.assert_close(embedded, case[f"time_embedding.t{t}"], rtol=1e-9, atol=1e-9)
    assert (condition is None) == (case.family == "pi0")
    if condition is not None:
        close(condition, case[f"suffix.adarms_cond.t{t}"])


@pytest.mark.parametrize("t", TIMES)
def test_velocity(case: Case, t: str) -> None:
    close(case.velocity(case[f"x_t.t{t}"], torch.full((2,), float(t))), case[f"v_t.t{t}"], 1e-4)


def test_velocity_where_each_row_has_its_own_time(case: Case) -> None:
    x, t = case["mixed.x_t"], case["mixed.time"]
    close(case.velocity(x, t), case["mixed.v_t"], 1e-4)
    with torch.no_grad():
        close(case.network.suffix(case.prefix, case.seen.state, x, t), case["mixed.suffix_out"])


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_sampled_chunks(case: Case, steps: int) -> None:
    with torch.no_grad():
        found = sample(case.network, case.prefix, case.seen.state, case["noise"], steps)
    close(found, case[f"sample.N{steps}"], 3e-4, 0)
    if steps == 10:
        units = read_openpi(case.folder / "checkpoint", "", quantile=case.family == "pi05")
        close(units.action.unnormalise(found[..., :7]), case["sample.N10.actions"], 5e-4, 0)


def test_loss_and_gradients_in_one_pass(case: Case) -> None:
    noise, t, actions = case["loss.noise"], case["loss.time"], case["actions"]
    x = t[:, None, None] * noise + (1 - t[:, None, None]) * actions
    network = load_network(case.folder / "checkpoint")
    loss = (noise - actions - network.joint_velocity(case.seen, x, t)).square()
    close(loss.detach(), case["loss.elementwise"], 5e-4, 1e-3)
    close(loss[..., :7].mean().detach(), case["loss.mean_real_dims"], 0, 1e-3)
    loss.mean().backward()
    norms = {own_name(n.removeprefix("loss.grad_norm.")): v for n, v in case.tensors.items() if "grad_norm" in n}
    parameters = dict(network.named_parameters())
    assert len(norms) == 8
    for name, norm in norms.items():
        gradient = parameters[name].grad
        assert gradient is not None, name
        close(gradient.norm(), norm, 1e-6, 1e-3)
    still = {own_name(name) for name in case.meta["params_without_gradient"]} - {UNUSED}
    assert {name for name, p in parameters.items() if p.grad is None or not p.grad.any()} == still


@pytest.mark.parametrize("k", range(4))
def test_flow_sde(case: Case, k: int) -> None:
    """Chains of which step k is stochastic: the scored step's mean, deviation and log-probability."""
    steps, level = 4, 0.5
    weight_x, weight_v = denoising.mean_weights(steps, level)
    std = denoising.stds(steps, level)
    close(denoising.timesteps(steps), case["sde.timesteps"], 1e-7)
    chain = case[f"sde.k{k}.chain"]
    x, after = chain[:, k], chain[:, k + 1]
    velocity = case.velocity(x, torch.full((2,), 1 - k / steps))
    close(velocity, case[f"sde.k{k}.v"], 1e-4)
    mean = weight_x[k].float() * x + weight_v[k].float() * velocity
    close(mean, case[f"sde.k{k}.mean"], 3e-5)
    close(std[k].float(), case[f"sde.k{k}.std"], 1e-6)
    close(gaussian_log_prob(after, mean, std[k].log().float()), case[f"sde.k{k}.logp"], 1e-3)
    for step in range(steps):
        if step != k:
            ode = chain[:, step] - case.velocity(chain[:, step], torch.full((2,), 1 - step / steps)) / steps
            close(ode, chain[:, step + 1], 3e-4, 0)


# --- what holds whatever the weights


def test_the_joint_pass_is_the_cached_one(case: Case) -> None:
    x, t = case["mixed.x_t"], case["mixed.time"]
    with torch.no_grad():
        close(case.network.joint_velocity(case.seen, x, t), case.velocity(x, t), 1e-5)


def test_pixels_of_an_absent_camera_do_not_matter(case: Case) -> None:
    absent = ~case.seen.present
    assert absent.any(), "every camera is present: nothing is shown"
    pixels = torch.where(absent[..., None, None, None], torch.zeros(()), case.seen.pixels)
    blank = Observation(pixels, case.seen.present, case.seen.tokens, case.seen.counted, case.seen.state)
    x, t = case["mixed.x_t"], case["mixed.time"]
    with torch.no_grad():
        found = velocity(case.network, case.network.prefix(blank), blank.state, x, t)
    assert torch.equal(found, case.velocity(x, t))


def test_the_integration_leaves_the_cache_as_it_is(case: Case) -> None:
    before = [t.clone() for t in (*case.prefix.cache.keys, *case.prefix.cache.values)]
    with torch.no_grad():
        sample(case.network, case.prefix, case.seen.state, case["noise"], 3)
    after = (*case.prefix.cache.keys, *case.prefix.cache.values)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_rows_do_not_meet(case: Case) -> None:
    seen = case.seen
    alone = Observation(*(getattr(seen, name)[1:] for name in ("pixels", "present", "tokens", "counted", "state")))
    x, t = case["mixed.x_t"], case["mixed.time"]
    with torch.no_grad():
        found = velocity(case.network, case.network.prefix(alone), alone.state, x[1:], t[1:])
    close(found, case.velocity(x, t)[1:], 1e-5)


# --- checkpoints


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_layouts_are_the_same_network_and_are_written_again(case: Case, layout: str, tmp_path: Path) -> None:
    network = load_network(case.folder / layout)
    for name, tensor in case.network.state_dict().items():
        assert torch.equal(network.state_dict()[name], tensor)
    assert torch.equal(network.unused, case.network.unused)
    save_network(network, tmp_path, "openpi" if layout == "checkpoint" else "lerobot")
    written, expected = (load_file(folder / "model.safetensors") for folder in (tmp_path, case.folder / layout))
    assert written.keys() == expected.keys() and all(torch.equal(written[n], expected[n]) for n in expected)


@pytest.mark.parametrize("project", ["openpi", "lerobot", "lerobot_2025_mid", "no_vision_model_level"])
def test_names_met_in_the_wild(case: Case, project: str) -> None:
    variants = json.loads((case.folder / "key_variants.json").read_text())
    names = set(case.network.state_dict()) | {UNUSED}
    assert {own_name(each[project]) for each in variants.values()} == names
    for stored, each in variants.items():
        assert own_name(each[project]) == own_name(stored)
        if project in ("openpi", "lerobot"):
            assert stored_name(own_name(stored), project) == each[project]


def test_openpi_reads_what_is_written(case: Case, tmp_path: Path) -> None:
    """Its loader resolves the embedding's second name by the file's metadata."""
    save_network(case.network, tmp_path, "openpi")
    found = []
    for folder in (tmp_path, case.folder / "checkpoint"):
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            found.append({k: v for k, v in (file.metadata() or {}).items() if k != "format"})
    assert found[0] == found[1] and found[0]


def broken(case: Case, target: Path, **config: object) -> Path:
    """The checkpoint with other entries of config.json."""
    target.mkdir()
    for name in ("model.safetensors", "tokenizer.model"):
        (target / name).write_bytes((case.folder / "checkpoint" / name).read_bytes())
    raw = json.loads((case.folder / "checkpoint" / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**raw, **config}))
    return target


def test_what_does_not_fit_is_refused(case: Case, tmp_path: Path) -> None:
    other = "pi0" if case.family == "pi05" else "pi05"
    with pytest.raises(PolicyError, match=rf"config\.json says {other}, and the checkpoint has"):
        load_network(broken(case, tmp_path / "kind", type=other, max_action_dim=8, chunk_size=6))
    with pytest.raises(PolicyError, match=r"paligemma_variant is 'toy'; known are gemma_2b, gemma_300m"):
        load_network(broken(case, tmp_path / "variant", architecture={}))
    with pytest.raises(PolicyError, match="the tensors are of another model than config.json says"):
        load_network(broken(case, tmp_path / "sizes", action_dim=7))
    with pytest.raises(PolicyError, match=r"one of these is no size .*'horizon': None"):
        load_network(broken(case, tmp_path / "horizon", action_horizon=None))
    with pytest.raises(PolicyError, match="dtype must be one of"):
        load_network(case.folder / "checkpoint", "int8")
    with pytest.raises(PolicyError, match=r"norm_stats.json of nowhere is wanted, found: none"):
        read_openpi(case.folder / "checkpoint", "nowhere", quantile=True)
    assert isinstance(case.network, Pi0Network)
