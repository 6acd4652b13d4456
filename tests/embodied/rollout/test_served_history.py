"""Policies that decide on several observations, loaded and served: what is shown to them is what `act` is given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from websockets.sync.client import connect

import policies
from embodied.commands.serve import _conventions
from embodied.errors import UserError
from embodied.rollout.loaded_policy import LoadedPolicy
from embodied.rollout.policy_server import EPISODE_START
from policies.conformance.laws import perturb
from policies.contract import Inputs
from policies.remote.policy import NOISE, Remote
from policies.resampling import fit_square
from tests.embodied.rollout.test_policy_server import Client, seen_by_vla_eval, send, told
from tests.embodied.support.served import observations, serving, small_policy
from tests.policies.remote.handmade_server import packed

CASES = [(1, 2, 1), (1, 3, 2), (3, 2, 2)]
"""Chunk, observations and distance."""


def policy_of(chunk: int, count: int, distance: int) -> LoadedPolicy:
    """Trained enough that each observation matters."""
    loaded = small_policy(chunk, observations=count, distance=distance)
    perturb(loaded.policy, 0.05, seed=1)
    return loaded


def shown(sent: list[dict[str, Any]], rows: list[int]) -> dict[str, Any]:
    """The observations of these env steps in one request."""
    keys = ("observation/image", "observation/wrist_image", "observation/state")
    return {key: np.stack([sent[row][key] for row in rows]) for key in keys} | {"prompt": "do something"}


def as_act_takes_it(observation: dict[str, Any]) -> dict[str, Any]:
    pictures = {"base": observation["observation/image"], "wrist": observation["observation/wrist_image"]}
    return {"images": pictures, "proprio": observation["observation/state"]}


def rows_at(step: int, count: int, distance: int, begin: int = 0) -> list[int]:
    return [max(step - distance * k, begin) for k in reversed(range(count))]


def decided(loaded: LoadedPolicy, sent: list[dict[str, Any]], step: int, begin: int = 0) -> np.ndarray:
    """The action chunk of `act` at an env step of an episode that began at `begin`."""
    rows = rows_at(step, loaded.spec.observations, loaded.spec.distance, begin)
    return loaded.act(as_act_takes_it(shown(sent, rows)))


# --- a loaded policy


@pytest.mark.parametrize(("chunk", "count", "distance"), CASES)
def test_an_episode_keeps_what_its_decisions_are_made_on(chunk: int, count: int, distance: int) -> None:
    loaded, sent = policy_of(chunk, count, distance), observations(8)
    for _ in range(2):  # a new episode knows nothing of the one before
        episode = loaded.begin_episode()
        for step, observation in enumerate(sent):
            given = as_act_takes_it(observation)
            episode.observe(given)
            given["proprio"] += 1  # an environment may write its next observation into the same array
            assert np.array_equal(episode.act(), decided(loaded, observations(8), step))
            assert episode.act(seed=step).shape == (chunk, 7)
            given["proprio"] -= 1


def test_each_observation_matters_and_a_batch_is_of_several() -> None:
    loaded, sent = policy_of(1, 2, 1), observations(4)
    first, other = (as_act_takes_it(shown(sent, rows)) for rows in ([0, 1], [2, 1]))
    assert not np.array_equal(loaded.act(first), loaded.act(other))
    both = {
        "images": {name: np.stack([first["images"][name], other["images"][name]]) for name in first["images"]},
        "proprio": np.stack([first["proprio"], other["proprio"]]),
    }
    assert np.allclose(loaded.act(both), [loaded.act(first), loaded.act(other)], atol=1e-5)


def test_observations_that_are_too_few_are_refused_by_name() -> None:
    loaded, sent = policy_of(1, 2, 3), observations(4)
    with pytest.raises(UserError, match=r"the shape \(8,\).*reads \(2, 8\) \(2 observations, 3 env steps apart"):
        loaded.act(as_act_takes_it(sent[0]))
    episode = loaded.begin_episode()
    with pytest.raises(UserError, match="nothing was observed"):
        episode.act()
    with pytest.raises(UserError, match="one env step at a time"):
        episode.observe(as_act_takes_it(shown(sent, [0, 1])))
    with pytest.raises(UserError, match="lacks 'proprio'"):
        episode.observe({"images": as_act_takes_it(sent[0])["images"]})
    assert not episode.begun


def test_an_episode_of_a_policy_of_one_observation_is_act() -> None:
    loaded, sent = small_policy(), observations(3)
    episode = loaded.begin_episode()
    for observation in sent:
        episode.observe(as_act_takes_it(observation))
        assert np.array_equal(episode.act(), loaded.act(as_act_takes_it(observation)))


# --- clients of openpi's protocol


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("chunk", "count", "distance"), CASES)
def test_a_client_sends_all_observations_in_each_array(rows: int, chunk: int, count: int, distance: int) -> None:
    loaded, sent = policy_of(chunk, count, distance), observations(8)
    with serving(loaded, rows=rows) as (address, _), connect(address, compression=None) as socket:
        client = Client(socket)
        said = client.metadata["embodied"]
        assert (said["observations"], said["distance"]) == (count, distance)
        for step in range(8):
            found = client.actions(shown(sent, rows_at(step, count, distance)))
            assert np.allclose(found, decided(loaded, sent, step), rtol=0, atol=0 if rows == 1 else 1e-5)


def test_pictures_of_several_observations_are_fitted_in_and_turned() -> None:
    loaded, sent = policy_of(1, 2, 1), observations(2)
    large = np.random.default_rng(0).integers(0, 256, (2, 48, 64, 3), np.uint8)
    fitted = fit_square(torch.from_numpy(large), 32, "bilinear").numpy()
    request = shown(sent, [0, 1])
    expected = loaded.act(as_act_takes_it(request | {"observation/image": fitted}))
    with serving(loaded) as (address, _), connect(address, compression=None) as socket:
        client = Client(socket)
        for picture in (large, np.moveaxis(large, -1, -3).copy()):
            assert np.array_equal(client.actions(request | {"observation/image": picture}), expected)


@pytest.mark.parametrize(("count", "distance"), [(2, 1), (3, 2)])
def test_a_client_that_asks_at_every_env_step_may_show_one_observation(count: int, distance: int) -> None:
    """Each connection has its own episode, which begins where the client says so."""
    loaded, sent, others = policy_of(1, count, distance), observations(7), observations(8)
    with serving(loaded) as (address, _), connect(address, compression=None) as one:
        with connect(address, compression=None) as other:
            mine, its = Client(one), Client(other)
            for step in range(7):
                begin = 0 if step < 4 else 4
                found = mine.actions(sent[step] | {EPISODE_START: np.bool_(step == begin)})
                assert np.array_equal(found, decided(loaded, sent, step, begin))
                found = its.actions(others[step] | {EPISODE_START: step == 0})
                assert np.array_equal(found, decided(loaded, others, step))


@pytest.mark.parametrize(
    ("chunk", "mark", "message"),
    [
        (1, {}, "reads (2, 8) (2 observations, 1 env step apart, the oldest first), or a batch of such. A client that"),
        (3, {}, "reads (2, 8) (2 observations, 1 env step apart, the oldest first), or a batch of such"),
        (1, {EPISODE_START: False}, "the first observation of a connection begins an episode"),
        (1, {EPISODE_START: 1}, "embodied/episode_start is true for the first observation of an episode, got 1"),
        (3, {EPISODE_START: True}, "answers 3 actions a request, so that requests do not show every env step"),
    ],
)
def test_one_observation_whose_place_is_unknown_is_refused(chunk: int, mark: dict[str, Any], message: str) -> None:
    loaded, sent = policy_of(chunk, 2, 1), observations(2)
    with serving(loaded) as (address, _), connect(address, compression=None) as socket:
        client = Client(socket)
        said = client.answer(packed(sent[0] | mark))
        assert isinstance(said, str) and message in said and ("every env step may" in said) == (chunk == 1 and not mark)
        found = client.actions(shown(sent, [0, 1]))  # the connection goes on
        assert np.array_equal(found, decided(loaded, sent, 1))


def test_a_refused_observation_is_no_part_of_the_episode() -> None:
    loaded, sent = policy_of(1, 2, 1), observations(3)
    with serving(loaded) as (address, _), connect(address, compression=None) as socket:
        client = Client(socket)
        client.actions(sent[0] | {EPISODE_START: True})
        assert isinstance(client.answer(packed(sent[1] | {EPISODE_START: False, "observation/state": None})), str)
        found = client.actions(sent[1] | {EPISODE_START: False})
        assert np.array_equal(found, decided(loaded, sent, 1))


# --- clients of vla-eval


@pytest.mark.parametrize(("chunk", "count", "distance"), CASES)
def test_a_client_of_vla_eval_shows_every_env_step(chunk: int, count: int, distance: int) -> None:
    """Two episodes; a decision looks back at env steps at which none was made."""
    loaded, sent = policy_of(chunk, count, distance), observations(9)
    got, expected = [], []
    with serving(loaded) as (address, _), connect(f"{address}/vla-eval", compression=None) as socket:
        told(socket, "hello", {})
        for begin, end in ((0, 4), (4, 9)):
            send(socket, "episode_start", {})
            for step in range(begin, end):
                answer = told(socket, "observation", seen_by_vla_eval(sent[step]))[1]["actions"]
                got.append(np.frombuffer(answer["data"], np.float32))
                made, place = begin + (step - begin) // chunk * chunk, (step - begin) % chunk
                expected.append(decided(loaded, sent, made, begin)[place])
    assert np.array_equal(np.stack(got), np.stack(expected))


# --- the policy `remote`


@pytest.mark.parametrize("rows", [1, 3])
def test_the_policy_remote_sends_what_the_served_policy_reads(rows: int) -> None:
    """Its spec has the served policy's observations, and its decisions are the served policy's own."""
    loaded = policy_of(2, 3, 2)
    spec = policies.PolicySpec(action_dim=7, chunk=2, proprio_dim=8, cameras=("base", "wrist"), image_size=32)
    random = np.random.default_rng(0)
    frames = {name: torch.from_numpy(random.integers(0, 256, (rows, 3, 32, 32, 3), np.uint8)) for name in spec.cameras}
    proprio = torch.from_numpy(random.standard_normal((rows, 3, 8)).astype(np.float32))
    inputs = Inputs(proprio=proprio, frames=frames)
    noise = torch.from_numpy(random.standard_normal((rows, loaded.policy.noise_dim)).astype(np.float32))
    with serving(loaded) as (address, _):
        remote = policies.build("remote", spec, 0, address=address)
        assert isinstance(remote, Remote)
        assert (remote.spec.observations, remote.spec.distance) == (3, 2)
        for drawn in (noise, None):
            assert torch.equal(remote.act(inputs, drawn).chunk, loaded.policy.act(inputs, drawn).chunk)
        remote.close()


def test_the_policy_remote_resizes_every_observation() -> None:
    loaded = policy_of(1, 2, 1)
    spec = policies.PolicySpec(action_dim=7, proprio_dim=8, cameras=("base", "wrist"), image_size=48)
    frames = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 2, 48, 48, 3), np.uint8))
    proprio = torch.zeros(2, 2, 8)
    small = fit_square(frames.flatten(0, 1), 32, "bilinear").view(2, 2, 32, 32, 3)
    with serving(loaded) as (address, _):
        remote = policies.build("remote", spec, 0, address=address, image_size=32)
        found = remote.act(Inputs(proprio=proprio, frames=dict.fromkeys(spec.cameras, frames)), None).chunk
        remote.close()
    expected = loaded.policy.act(Inputs(proprio=proprio, frames=dict.fromkeys(spec.cameras, small)), None).chunk
    assert torch.equal(found, expected)


def test_noise_travels_with_several_observations() -> None:
    loaded, sent = policy_of(1, 2, 1), observations(2)
    request = shown(sent, [0, 1])
    noise = np.random.default_rng(0).standard_normal(loaded.policy.noise_dim).astype(np.float32)
    inputs, batched = loaded.inputs(as_act_takes_it(request))
    assert not batched
    expected = loaded.policy.act(inputs, torch.from_numpy(noise[None])).chunk[0].numpy()
    with serving(loaded) as (address, _), connect(address, compression=None) as socket:
        assert np.array_equal(Client(socket).actions(request | {NOISE: noise}), expected)


# --- what a user is told


def test_serve_says_what_clients_have_to_send() -> None:
    assert "have to send 3 observations, 2 env steps apart, the oldest first and to show pictures upright" in (
        _conventions(policy_of(1, 3, 2))
    )
    assert "observations" not in _conventions(small_policy())
