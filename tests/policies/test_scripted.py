"""Policies without parameters: the scripted controller and the replay obey the laws that concern them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from scipy.spatial.transform import Rotation

import policies
from policies import Inputs, Policy, PolicyError, PolicySpec
from policies.conformance import laws
from policies.scripted.libero import SCRIPTS, Approach, Pose
from policies.scripted.replay import save_recording
from policies.scripted.scene import Scene, rotated, turn_between, turned

LAWS = [
    laws.law_shapes_and_dtypes,
    laws.law_mode_is_deterministic,
    laws.law_scores_agree,
    laws.law_rows_are_independent,
    laws.law_act_leaves_no_graph,
    laws.law_global_generators_are_untouched,
    laws.law_observe_changes_buffers_only,
    laws.law_saved_policy_is_the_policy,
]
"""Those that say nothing of parameters and of noise, which these policies have none of."""

DRAWER, BOWL = "open the middle drawer of the cabinet", "put the bowl on the plate"
STATE = SCRIPTS[DRAWER].layout.size
LIBERO = PolicySpec(action_dim=7, state_dim=STATE)
KEYS: list[tuple[int, int | None]] = [(5, None), (5, 0), (5, 7), (2**31 - 1, 49)]
ROWS = torch.tensor([[5, -1, 0], [5, 0, 3], [5, 7, 8], [2**31 - 1, 49, 9], [5, 7, 30], [0, 0, 0]])
"""Seed, initial state and env step: at the beginning, within, across the end of 9 steps, and beyond it; at rest."""


def scripted() -> Policy:
    return policies.build("scripted", LIBERO, seed=0)


def seen() -> Inputs:
    """Six rows of two tasks that share a layout."""
    inputs = laws.random_inputs(LIBERO, 6, seed=7)
    return replace(inputs, instruction=(DRAWER, BOWL) * 3)


def actions() -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.uniform(-1, 1, (9, 4)).astype(np.float32) for _ in KEYS]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "actions.safetensors"
    save_recording(path, KEYS, actions())
    return path


def replay(recording: Path, chunk: int = 4) -> Policy:
    return policies.build("replay", PolicySpec(action_dim=4, chunk=chunk), seed=0, recording=str(recording))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_scripted_policy_obeys(law):
    law(scripted(), seen())


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_replay_obeys(law, recording):
    law(replay(recording), Inputs(proprio=torch.zeros(6, 1), episode=ROWS))


# --- replay


@pytest.mark.parametrize("chunk", [1, 4, 20])
def test_a_replay_plays_what_was_recorded_and_then_rests(recording, chunk):
    chunks = replay(recording, chunk).act(Inputs(episode=ROWS), None).chunk.numpy()
    for (_, _, step), row, sequence in zip(ROWS.tolist(), chunks, [*actions(), actions()[2]], strict=False):
        resting = np.array([0, 0, 0, sequence[-1, 3]], np.float32)
        expected = np.concatenate([sequence[step : step + chunk], np.tile(resting, (chunk, 1))])[:chunk]
        assert np.array_equal(row, expected)
    assert not chunks[-1].any()


def test_a_saved_replay_is_loaded_from_another_folder(recording, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policies.save(replay(Path(recording.name)), "saved")
    monkeypatch.chdir("/")
    loaded = policies.load(tmp_path / "saved")
    assert torch.equal(loaded.act(Inputs(episode=ROWS[:1]), None).chunk[0], torch.from_numpy(actions()[0][:4]))


def test_an_episode_that_was_not_recorded_is_named(recording):
    with pytest.raises(PolicyError, match="no episode of seed 6 and initial state 7; it has 4 others"):
        replay(recording).act(Inputs(episode=torch.tensor([[6, 7, 0]])), None)
    with pytest.raises(PolicyError, match="no episode of seed 6; it has"):
        replay(recording).act(Inputs(episode=torch.tensor([[6, -1, 0]])), None)
    with pytest.raises(PolicyError, match="add 'episode' to policy.reads"):
        replay(recording).act(Inputs(state=torch.zeros(1, 3)), None)


def test_a_recording_that_cannot_be_played_is_explained(recording, tmp_path):
    with pytest.raises(PolicyError, match="set policy.options.recording"):
        policies.build("replay", PolicySpec(action_dim=4), seed=0)
    with pytest.raises(PolicyError, match="nowhere.safetensors is missing"):
        replay(tmp_path / "nowhere.safetensors")
    with pytest.raises(PolicyError, match="actions of 4 dimensions, the task takes 7"):
        policies.build("replay", PolicySpec(action_dim=7), seed=0, recording=str(recording))
    recording.write_bytes(recording.read_bytes()[:-1])
    with pytest.raises(PolicyError, match="damaged or no safetensors"):
        replay(recording)
    with pytest.raises(PolicyError, match="two episodes have the same seed"):
        save_recording(recording, [(1, None), (1, -1)], actions()[:2])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("actions", torch.zeros(4, 9), "actions must be torch.float32 of 3 dimensions"),
        ("lengths", torch.full((4,), 10), "lengths must be from 1 to 9"),
        ("lengths", torch.full((3,), 9), "different numbers of episodes"),
        ("episodes", torch.zeros(4, 2), "episodes must be torch.int64"),
        ("lengths", None, "lengths must be torch.int64 of 1 dimensions, got nothing"),
    ],
)
def test_a_file_that_is_no_recording_is_refused(recording, name, tensor, message):
    tensors = load_file(recording)
    del tensors[name]
    save_file(tensors if tensor is None else tensors | {name: tensor}, recording)
    with pytest.raises(PolicyError, match=message):
        replay(recording)


# --- scripts


def test_a_row_without_instruction_rests_with_open_hand():
    inputs = replace(seen(), instruction=("", BOWL) * 3, state=torch.full((6, STATE), float("nan")))
    assert scripted().act(inputs, None).chunk[0, 0].tolist() == [0, 0, 0, 0, 0, 0, -1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (replace(seen(), instruction=("put the bowl on the moon",) * 6), "did you mean put the bowl on the"),
        (replace(seen(), instruction=()), "add 'instruction' to policy.reads"),
        (
            replace(seen(), instruction=("pick up the milk and place it in the basket",) * 6),
            "reads a state of 74 numbers, this task has 78",
        ),
    ],
)
def test_a_task_without_script_is_explained(inputs, message):
    with pytest.raises(PolicyError, match=message):
        scripted().act(inputs, None)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(LIBERO, state_dim=0), "add 'state' to policy.reads"),
        (replace(LIBERO, action_dim=5), "got 5 and 1: set env.task"),
        (replace(LIBERO, chunk=8), "got 7 and 8: .* policy.chunk to 1"),
    ],
)
def test_a_spec_that_no_script_fits_is_explained(spec, message):
    with pytest.raises(PolicyError, match=message):
        policies.build("scripted", spec, seed=0)


def test_the_case_of_an_instruction_does_not_matter():
    one, two = (scripted().act(replace(seen(), instruction=(text,) * 6), None) for text in (BOWL, BOWL.title()))
    assert torch.equal(one.chunk, two.chunk)


@pytest.mark.parametrize("instruction", SCRIPTS)
def test_no_scene_makes_an_action_leave_its_bounds(instruction):
    layout = SCRIPTS[instruction].layout
    policy = policies.build("scripted", PolicySpec(7, 1, layout.size), seed=0)
    states = torch.randn(200, layout.size, generator=torch.Generator().manual_seed(1))
    chunk = policy.act(Inputs(state=states, instruction=(instruction,) * 200), None).chunk
    assert chunk.isfinite().all() and chunk.abs().max() <= 1


def test_a_layout_names_every_number_once():
    layout = SCRIPTS[DRAWER].layout
    scene = Scene(np.arange(layout.size, dtype=np.float64), layout)
    numbers: list[float] = list(range(25))
    for entity, joints in (*((name, 0) for name in layout.movables), *layout.fixtures):
        pose = scene.pose(entity)
        numbers += [*pose.position, *pose.quaternion, *(scene.joint(entity, j) for j in range(joints))]
    assert numbers == list(range(layout.size))


quaternions = (
    st.tuples(*[st.floats(-1, 1)] * 4)
    .filter(lambda q: sum(x * x for x in q) > 0.01)
    .map(lambda q: np.array(q) / np.linalg.norm(q))
)


@settings(deadline=None)
@given(quaternions, quaternions, st.floats(-3, 3))
def test_rotations_agree_with_scipy(start, end, angle):
    one, two, vector = Rotation.from_quat(start), Rotation.from_quat(end), np.array([0.3, -0.7, 1.1])
    assert np.allclose(rotated(start, vector), one.apply(vector))
    assert np.allclose(Rotation.from_rotvec(turn_between(start, end)).as_matrix(), (two * one.inv()).as_matrix())
    vertical = Rotation.from_rotvec([0, 0, angle])
    assert np.allclose(Rotation.from_quat(turned(start, angle)).as_matrix(), (vertical * one).as_matrix())


@settings(deadline=None, max_examples=30)
@given(st.tuples(*[st.floats(-0.5, 0.5)] * 3))
def test_a_hand_that_follows_an_approach_arrives_and_only_from_above(offset):
    """A hand that always covers a fifth of its way comes down only where it is near the line."""
    approach, point = Approach(), np.array([0.1, -0.2, 0.9])
    hand = point + np.array(offset) + np.array([0, 0, approach.clearance + 0.5])
    for _ in range(100):
        hand = hand + 0.2 * (approach.towards(Pose(hand, np.array(approach.quaternion)), point) - hand)
        beside, height = float(np.hypot(*(hand - point)[:2])), hand[2] - point[2]
        assert beside <= approach.wide or height > 0.9 * approach.clearance
    assert np.allclose(hand, point, atol=1e-3)


# --- the built-in table


def test_the_way_to_a_ball_is_gone_along_each_axis_and_rests_without_an_instruction() -> None:
    policy = policies.build("scripted", PolicySpec(action_dim=3, state_dim=16), seed=0)
    state = torch.zeros(3, 16)
    state[:, -3:] = torch.tensor([0.2, -0.003, 0.0])
    inputs = Inputs(
        state=state, instruction=("move the gripper to the red ball", "", "Move the gripper to the BLUE ball")
    )
    chunk = policy.act(inputs, None).chunk
    assert torch.allclose(chunk[0, 0], torch.tensor([1.0, -0.25, 0.0])) and torch.equal(chunk[0], chunk[2])
    assert not chunk[1].any()


@pytest.mark.parametrize(
    ("size", "instruction", "says"),
    [
        (16, "move the gripper to the rod ball", "did you mean .*red ball"),
        (35, "move the gripper to the red ball", "35"),
    ],
)
def test_what_the_table_has_no_script_for_is_explained(size: int, instruction: str, says: str) -> None:
    policy = policies.build("scripted", PolicySpec(action_dim=3, state_dim=size), seed=0)
    with pytest.raises(PolicyError, match=says):
        policy.act(Inputs(state=torch.zeros(1, size), instruction=(instruction,)), None)
