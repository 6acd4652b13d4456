"""The small OpenVLA's beginning: random weights, but for vision towers that have seen the simulator.

python benchmarks/learning/base_checkpoint.py --out assets/openvla_small

A vision-language-action model is made of a vision model that has seen pictures. This one's towers and projector learn
where things are on the built-in table: pictures of `tabletop/reach_red` at random places of gripper and balls, and from
the mean of the projected patches, by one linear layer, those places. That layer is thrown away. The language model and
the action tokens know nothing: what is to be done with what is seen is left to demonstrations and reinforcement.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import tyro
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

import sim_farm
from embodied.reporting.live import steps
from policies.openvla import sizes
from policies.openvla.config import CONFIG
from policies.openvla.files import SINGLE, read_json, write_json
from policies.openvla.images import read_preprocessing
from policies.openvla.model import OpenVLAModel, build_empty, load_model
from sim_farm import EpisodeSpec

TASK = "tabletop/reach_red"
POSE_NUMBERS = 5
"""The scene is qpos, of which the first three numbers are the gripper's place, and then each ball's place."""
WORKSPACE = ((-0.22, -0.27, 0.014), (0.22, 0.27, 0.25))
NEAR_M = 0.05
"""Every second gripper is about so far from a ball: there it matters most where they are."""
PEAK_LR, LAST_LR, WARM_UP = 3e-3, 1.5e-4, 100


@dataclass(frozen=True)
class Arguments:
    """Write the small OpenVLA's checkpoint with towers that have seen the simulator."""

    out: Path = tyro.MISSING
    """Folder of the checkpoint."""
    pictures: int = 20_000
    steps: int = 4_000
    batch: int = 128
    seed: int = 0


def draw_pictures(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """uint8 [N, S, S, 3] pictures, and float32 [N, 7]: gripper x, y, z and each ball's x, y, in metres."""
    physics, renderer = sim_farm.make(TASK, cameras=1, size=size)
    random = np.random.default_rng(seed)
    frames, places = [], []
    for episode in range(count):
        scene = physics.reset(EpisodeSpec(seed * count + episode)).scene.view(np.float64).copy()
        balls = scene[POSE_NUMBERS:].reshape(2, 3)
        near = balls[random.integers(2)] + random.normal(0, NEAR_M, 3)
        scene[:3] = np.clip(near, *WORKSPACE) if random.random() < 0.5 else random.uniform(*WORKSPACE)
        (frame,) = renderer.render([scene.view(np.uint8)], ("front",)).values()
        frames.append(frame[0])
        places.append(np.concatenate((scene[:3], balls[:, :2].ravel())))
    renderer.close()
    return torch.from_numpy(np.array(frames)), torch.from_numpy(np.array(places, np.float32))


def learn_places(model: OpenVLAModel, folder: Path, args: Arguments) -> float:
    """Train towers and projector; the mean error on pictures that were not learned from, in metres."""
    frames, places = draw_pictures(args.pictures, model.config.image_size, args.seed)
    pixels = read_preprocessing(folder)
    held = args.pictures // 20
    centre, scale = places.mean(0), places.std(0)
    head = nn.Linear(model.width, places.shape[1])
    parameters = [p for part in (model.vision_backbone, model.projector, head) for p in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, weight_decay=0.01, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, PEAK_LR, args.steps, pct_start=WARM_UP / args.steps, final_div_factor=PEAK_LR / LAST_LR / 25
    )

    def told(index: Tensor) -> Tensor:
        return head(model.embed_images(pixels(frames[index])[:, None]).mean(1))

    generator = torch.Generator().manual_seed(args.seed)
    with steps("Learning where things are", args.steps) as bar:
        for _ in range(args.steps):
            index = held + torch.randint(len(frames) - held, (args.batch,), generator=generator)
            loss = functional.smooth_l1_loss(told(index), (places[index] - centre) / scale, beta=0.1)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            bar.advance(1, f"loss {float(loss):.4f}")
    with torch.no_grad():
        return float((told(torch.arange(held)) * scale + centre - places[:held]).abs().mean())


def main(args: Arguments) -> None:
    torch.manual_seed(args.seed)
    folder = sizes.write_random(args.out, "openvla-small", args.seed)
    model = load_model(folder, "float32")
    error = learn_places(model, folder, args)
    print(f"mean error of a coordinate on pictures that were not learned from: {1000 * error:.1f} mm")
    generator = torch.Generator().manual_seed(args.seed)
    unused = {name: torch.empty(t.shape) for name, t in build_empty(model.config).unused.items()}
    for name, tensor in unused.items():
        sizes.draw(name, tensor, generator)
    tensors = {name: t.detach().bfloat16().contiguous() for name, t in (model.checkpoint_state() | unused).items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    config = {name: value for name, value in read_json(folder / CONFIG).items() if name != sizes.RANDOM_WEIGHTS}
    write_json(folder / CONFIG, config)
    print(json.dumps({"checkpoint": str(folder), "parameters": sum(p.numel() for p in model.parameters())}))


if __name__ == "__main__":
    main(tyro.cli(Arguments))
