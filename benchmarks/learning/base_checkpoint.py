"""The beginning of a small OpenVLA, pi0 or SmolVLA: a vision-language model of one scene that knows nothing of actions.

python benchmarks/learning/base_checkpoint.py --model pi0 --out assets/pi0_small
python benchmarks/learning/base_checkpoint.py --model smolvla --speaking-steps 3000 --out assets/smolvla_small
python benchmarks/learning/base_checkpoint.py --axes robot --out assets/openvla_small
python benchmarks/learning/base_checkpoint.py --axes robot --world cubes --out assets/openvla_small_cubes
python benchmarks/learning/base_checkpoint.py --axes robot --world cubes --model pi0 --out assets/pi0_small_cubes
python benchmarks/learning/base_checkpoint.py --axes robot --world cubes --model smolvla --speaking-steps 3000 \
  --out assets/smolvla_small_cubes

A vision-language-action model is made of a vision-language model that has seen pictures and can say where things are.
This one learns that from pictures of a task (`benchmarks/learning/worlds.py`) at random places of gripper and objects:

1. Towers and projector learn the places: one linear layer, which is discarded, reads them from the mean of the patches.
2. All weights learn to point at the gripper or an object, and from the gripper to an object: three numbers, as tokens
   or as the end of an integration. They are column, row and depth in the picture.

What the robot's actions do is left to demonstrations and reinforcement. Evaluate a new base untouched (`embodied eval
CONFIG`): a base that solves its task proves nothing about what is learned from it. With `--axes robot` the answers are
metres along the robot's axes, and the way from the gripper to an object is then nearly an action: a pi0 of the table
world with such answers solved its task untouched (96%).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional

from embodied.reporting.live import steps
from policies import Inputs, Policy
from policies.contract import actor_parameters

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.learning.students import STUDENTS, Student  # noqa: E402
from benchmarks.learning.worlds import WORLDS, World  # noqa: E402

FAR = {"picture": 0.3, "robot": 0.1}
"""Ways from the gripper are cut to this length along each axis: in half pictures, or metres."""
SEEING_LR, SPEAKING_LR, LAST_SHARE, WARM_UP = 3e-3, 1.5e-3, 0.05, 100
COMPARED = 100
"""Rows that are decided for together where it is seen what was learned."""


@dataclass(frozen=True)
class Arguments:
    """Write a small policy's checkpoint whose vision-language model has seen the simulator."""

    out: Path = tyro.MISSING
    """Folder of the checkpoint."""
    model: Literal["openvla", "pi0", "pi05", "smolvla"] = "openvla"
    world: Literal["table", "cubes"] = "table"
    axes: Literal["picture", "robot"] = "picture"
    """Axes of the answers."""
    pictures: int = 20_000
    seeing_steps: int = 2_500
    seeing_batch: int = 128
    speaking_steps: int = 4_000
    speaking_batch: int = 64
    seed: int = 0


def learn(title: str, parameters: list[nn.Parameter], lr: float, count: int, loss_of: Callable[[], Tensor]) -> None:
    """Minimise a loss that draws its own minibatch."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=0.01, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, lr, count, pct_start=WARM_UP / count, final_div_factor=1 / LAST_SHARE / 25
    )
    with steps(title, count) as bar:
        for _ in range(count):
            optimizer.zero_grad(set_to_none=True)
            loss = loss_of()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            bar.advance(1, f"loss {float(loss.detach()):.4f}")


def learn_to_see(student: Student, frames: Tensor, places: Tensor, args: Arguments) -> None:
    """Train towers and projector on what is seen where. Objects lie on the table: their height is not asked for."""
    held_out = len(frames) // 20
    wanted = torch.cat([places[:, 0], places[:, 1:, :2].flatten(1)], 1)
    centre, scale = wanted.mean(0), wanted.std(0)
    head = nn.Linear(student.width, wanted.shape[1])
    generator = torch.Generator().manual_seed(args.seed)

    def predicted(index: Tensor) -> Tensor:
        return head(student.see(frames[index]).mean(1))

    def loss() -> Tensor:
        index = held_out + torch.randint(len(frames) - held_out, (args.seeing_batch,), generator=generator)
        return functional.smooth_l1_loss(predicted(index), (wanted[index] - centre) / scale, beta=0.1)

    parameters = [p for part in (*student.eyes, head) for p in part.parameters()]
    learn("Learning to see where things are", parameters, SEEING_LR, args.seeing_steps, loss)
    with torch.no_grad():
        error = (predicted(torch.arange(held_out)) * scale + centre - wanted[:held_out]).abs().mean()
    print(f"mean error of a coordinate on pictures that were not learned from: {1000 * float(error):.1f} mm")


def learn_to_speak(policy: Policy, world: World, frames: Tensor, places: Tensor, args: Arguments) -> None:
    """Train all weights to answer the world's questions, each answer three numbers in -1..1, in every action of a
    chunk."""
    seen = world.eye.points(places) if args.axes == "picture" else places
    low, high = torch.tensor((world.low, world.high), dtype=torch.float32)
    at = seen.clamp(-1, 1) if args.axes == "picture" else 2 * (places - low) / (high - low) - 1
    way = ((seen[:, 1:] - seen[:, :1]) / FAR[args.axes]).clamp(-1, 1)
    answers = torch.cat([at, way], 1)
    chunk, nothing = policy.spec.chunk, torch.zeros(len(frames), policy.spec.proprio_dim)
    policy.adopt_units(torch.tensor([[-1.0] * 3, [1.0] * 3]), nothing)
    held_out, generator = len(frames) // 20, torch.Generator().manual_seed(args.seed + 1)

    def questions_about(index: Tensor) -> tuple[Inputs, Tensor]:
        which = torch.randint(len(world.questions), (len(index),), generator=generator)
        inputs = Inputs(
            frames={world.camera: frames[index]},
            instruction=tuple(world.questions[i] for i in which.tolist()),
            proprio=nothing[index] if policy.spec.proprio_dim else None,
        )
        return inputs, answers[index, which][:, None].expand(-1, chunk, -1)

    def loss() -> Tensor:
        index = held_out + torch.randint(len(frames) - held_out, (args.speaking_batch,), generator=generator)
        inputs, answer = questions_about(index)
        noise = torch.randn(len(index), policy.noise_dim, generator=generator)
        return policy.imitate(inputs, answer, torch.ones(len(index), chunk, dtype=torch.bool), noise).mean()

    learn("Learning to say where things are", list(actor_parameters(policy)), SPEAKING_LR, args.speaking_steps, loss)
    inputs, answer = questions_about(torch.arange(held_out))
    predicted = torch.cat(
        [policy.act(inputs.rows(rows), None).chunk for rows in torch.arange(held_out).split(COMPARED)]
    )
    print(f"mean error of an answer: {float((predicted - answer).abs().mean()):.3f} of a range from -1 to 1")


def main(args: Arguments) -> None:
    torch.manual_seed(args.seed)
    world = WORLDS[args.world]
    student = STUDENTS[args.model](args.model, world, args.out, args.seed)
    frames, places = world.draw(world.task, args.pictures, world.image_size, args.seed)
    learn_to_see(student, frames, places, args)
    learn_to_speak(student.policy, world, frames, places, args)
    student.save()
    print(f"{args.out}: {sum(p.numel() for p in actor_parameters(student.policy)):,} parameters")


if __name__ == "__main__":
    main(tyro.cli(Arguments))
