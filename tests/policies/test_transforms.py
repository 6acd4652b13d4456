"""What converts between a task's conventions and a checkpoint's: order, inverses, data that is saved, messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from policies import PolicyError, PolicySpec
from policies.transforms import Gripper, Transforms

GOLDEN = Path(__file__).parents[1] / "golden"
ROWS, CHUNK, DIMS = 5, 3, 7
SPEC = PolicySpec(DIMS, CHUNK, proprio_dim=9, cameras=("base",))
TURN, DELTA = {"kind": "turn_images"}, {"kind": "delta_actions", "dims": 3}
STATE = {"kind": "state", "take": [8, 0, 5, 2]}
LIBERO, MANISKILL = ({"kind": "gripper", "convention": name} for name in ("libero", "maniskill"))
EVERY = st.sampled_from([TURN, DELTA, STATE | {"take": [4, 3, 2, 1, 0, 5, 6, 7, 8]}])
"""One of each kind whose inverse is exact."""


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None, max_examples=50)
@given(entries=st.lists(EVERY, unique_by=str), seed=st.integers(0, 99))
def test_what_is_demonstrated_is_executed(entries: list[dict[str, Any]], seed: int) -> None:
    transforms = Transforms(entries)
    actions, state = random(ROWS, CHUNK, DIMS, seed=seed), random(ROWS, 9, seed=seed + 1)
    again = transforms.executed(transforms.demonstrated(actions, state), state)
    assert (again - actions).abs().max() < 1e-12


@pytest.mark.parametrize("gripper", [LIBERO, MANISKILL])
def test_the_last_entry_converts_what_the_network_says_first(gripper: dict[str, str]) -> None:
    """Nearer to the network: the gripper's 0 and 1 are not what a difference was added to."""
    actions, state = torch.zeros(ROWS, CHUNK, DIMS), 5 * torch.ones(ROWS, DIMS)
    nearer, farther = Transforms([DELTA | {"dims": 7}, gripper]), Transforms([gripper, DELTA | {"dims": 7}])
    closed = 1.0 if gripper is LIBERO else -1.0
    assert nearer.executed(actions, state)[..., -1].unique().tolist() == [5 + closed]
    assert farther.executed(actions, state)[..., -1].unique().tolist() == [-closed]


def test_an_entry_reads_the_state_as_those_before_have_left_it() -> None:
    actions, state = random(ROWS, CHUNK, DIMS), random(ROWS, 9, seed=1)
    for entries, seen in (([STATE, DELTA], state[:, [8, 0, 5]]), ([DELTA, STATE], state[:, :3])):
        moved = Transforms(entries).executed(actions, state) - actions
        assert torch.allclose(moved[..., :3], seen[:, None].expand(-1, CHUNK, -1), atol=1e-12)
        assert not moved[..., 3:].any()
        assert torch.equal(Transforms(entries).state(state), state[:, [8, 0, 5, 2]])
        assert Transforms(entries).spec(SPEC).proprio_dim == 4


def test_pictures_are_turned_by_180_degrees() -> None:
    frames = torch.randint(0, 256, (2, 4, 6, 3), dtype=torch.uint8)
    assert torch.equal(Transforms([TURN]).frames(frames), torch.rot90(frames, 2, (1, 2)))
    assert torch.equal(Transforms([STATE, DELTA]).frames(frames), frames)


@pytest.mark.parametrize("twice", [[TURN, DELTA, TURN], [LIBERO, MANISKILL], [STATE, STATE]])
def test_a_convention_is_converted_once(twice: list[dict[str, Any]]) -> None:
    with pytest.raises(PolicyError, match=f"has {twice[0]['kind']} 2 times"):
        Transforms(twice)


def test_gripper_conventions_are_the_references() -> None:
    golden = load_file(GOLDEN / "libero_images" / "golden.safetensors")
    actions, expected = golden["gripper.in"], golden["gripper.env"]
    assert torch.equal(Gripper(convention="libero").executed(actions, actions), expected)
    simpler = Gripper(convention="maniskill").executed(actions, actions)
    assert torch.equal(simpler[:, :-1], actions[:, :-1])
    assert torch.equal(simpler[:, -1], torch.where(actions[:, -1] > 0.5, 1.0, -1.0).double())


@pytest.mark.parametrize("entries", [LIBERO, MANISKILL])
def test_gripper_commands_are_read_as_they_are_given(entries: dict[str, str]) -> None:
    """A command between the two ends is the end that it leans to."""
    transforms, network = Transforms([entries]), torch.tensor([[[0.3, 0.0], [0.3, 1.0]]])
    assert torch.equal(transforms.demonstrated(transforms.executed(network, None), None), network)
    between = torch.tensor([[[-0.2], [0.2]]])
    assert transforms.demonstrated(between, None).flatten().tolist() == ([1, 0] if entries is LIBERO else [0, 1])


def test_they_are_data() -> None:
    entries: list[dict[str, Any]] = [TURN, STATE, DELTA, LIBERO]
    assert Transforms(Transforms(entries).as_data()).entries == Transforms(entries).entries
    assert Transforms(entries).as_data() == entries
    assert Transforms(entries).conventions() == {
        "orientation": ("transforms has turn_images", "stock"),
        "gripper": ("transforms has gripper", "simulator"),
    }


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"kind": "mirror"}, "entry 1: .*'turn_images', 'state', 'delta_actions', 'gripper'"),
        ({"dims": 3}, "entry 1: Unable to extract tag"),
        ("turn_images", "entry 1: .*got 'turn_images'"),
        (DELTA | {"dims": 0}, "entry 1: delta_actions.dims: .*greater than or equal to 1"),
        (DELTA | {"dim": 3}, "entry 1: delta_actions.dim: Unexpected"),
        (STATE | {"take": [-1]}, r"entry 1: state.take.0: .*greater than or equal to 0"),
        ({"kind": "gripper"}, "entry 1: gripper.convention: "),
    ],
)
def test_what_is_no_entry_is_named_with_its_place(entry: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=f"policy.options.transforms, {message}"):
        Transforms([TURN, entry])


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (STATE | {"take": [9]}, r"takes some of the numbers 0 to 8 of proprioception .*, got \[9\]"),
        (STATE | {"take": []}, r"got \[\]"),
        (DELTA | {"dims": 8}, "dims of 1 to 7, .*got 8"),
    ],
)
def test_what_does_not_fit_the_task_is_refused(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        Transforms([entry]).spec(SPEC)
    with pytest.raises(PolicyError, match="dims of 1 to 4"):
        Transforms([STATE, DELTA | {"dims": 5}]).spec(SPEC)
