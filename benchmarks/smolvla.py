"""SmolVLA of full size beside LeRobot's own: `python benchmarks/smolvla.py --json FILE`.

One process holds LeRobot's policy and this project's, both read from the same exported folder (random weights, two
pictures of 256 pixels, float32), and takes turns. A decision of LeRobot's is `predict_action_chunk` after its own
preprocessor; one of this project's is `act`, which reads raw pictures too. A training step of LeRobot's is
`forward`, backward and AdamW; an update here is `precompute`, `evaluate`, backward and AdamW on the same parameters.
LeRobot is installed into a temporary folder. Nothing else should run on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro

import policies
from embodied_bench.settings import show_and_write
from policies import Inputs, Policy, PolicySpec
from policies.conformance import laws
from policies.smolvla.backbone import PUBLISHED
from policies.smolvla.sizes import write_random

ROOT = Path(__file__).resolve().parents[1]
WANTED = {"decision": 1.5, "update": 1.0}
"""Times as fast as LeRobot's that a decision and an update should be."""
TASK = "pick up the black bowl"
CAMERAS = ("image", "image2")
SPEC = PolicySpec(action_dim=7, chunk=10, proprio_dim=8, cameras=CAMERAS, image_size=256)


@dataclass(frozen=True)
class Beside:
    """SmolVLA beside LeRobot's."""

    rounds: int = 3
    """Measurements of each, in turn; medians count."""
    decision_rows: tuple[int, ...] = (1, 8)
    update_rows: int = 4
    model: str = "smolvla"
    """A size of `policies.smolvla.sizes`."""
    folder: Path | None = None
    """The folder that both read. None: it is made, and this program runs again with LeRobot installed."""
    json: Path | None = None
    """Write the figures to this file."""


def main(settings: Beside) -> None:
    if settings.folder is not None:
        print(json.dumps(compare(settings, settings.folder)))
        return
    sys.path.insert(0, str(ROOT))
    from tests.policies.smolvla import beside

    with tempfile.TemporaryDirectory() as name:
        lerobot, checkpoint = beside.install(Path(name) / "lerobot"), Path(name) / "checkpoint"
        random = write_random(Path(name) / "random", settings.model)
        policies.export(policies.build("smolvla", SPEC, 0, checkpoint=str(random), asset="demonstrations"), checkpoint)
        for file in ("config.json", "policy_preprocessor.json"):  # LeRobot would ask the hub for the backbone
            text = (checkpoint / file).read_text()
            (checkpoint / file).write_text(text.replace(PUBLISHED, str(checkpoint / "vlm")))
        # `tests` is a package of LeRobot's dependencies too: what the tests run with LeRobot is imported by its folder.
        path = os.pathsep.join(map(str, (ROOT, ROOT / "extensions", ROOT / "tests/policies/smolvla", lerobot)))
        given = ["--folder", str(checkpoint), *(word for word in sys.argv[1:])]
        environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, "-W", "ignore", __file__, *given]
        found = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    show_and_write(json.loads(found.splitlines()[-1]), settings.json)


def compare(settings: Beside, folder: Path) -> dict[str, Any]:
    """Seconds and ratios. Raises `AssertionError` where the two decide differently."""
    theirs, prepare = _lerobots(folder)
    ours = policies.build("smolvla", SPEC, 0, checkpoint=str(folder))
    ours.train(False)
    figures: dict[str, Any] = {
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in ours.parameters()),
    }
    for rows in settings.decision_rows:
        inputs = _inputs(rows)
        noise = torch.zeros(rows, theirs.config.chunk_size, theirs.config.max_action_dim)
        calls: dict[str, Callable[[], Any]] = {
            "lerobot": lambda inputs=inputs, noise=noise: theirs.predict_action_chunk(prepare(inputs), noise=noise),
            "here": lambda inputs=inputs: ours.act(inputs, None),
        }
        chunk, action = calls["lerobot"]()[:, : SPEC.chunk], calls["here"]().chunk
        apart = float((chunk - action).abs().max() / chunk.abs().max())
        assert apart < 1e-4, f"decisions are {apart:.1e} of the largest action apart"
        figures |= {f"decision_{rows}_apart": apart, **_ratio(f"decision_{rows}", _in_turn(calls, settings.rounds))}
    figures |= _ratio("update", _in_turn(_steps(theirs, prepare, ours, settings.update_rows), settings.rounds))
    return {**figures, "wanted_ratios": WANTED}


def _lerobots(folder: Path) -> tuple[Any, Callable[[Inputs], dict[str, Any]]]:
    """LeRobot's policy, and what turns raw inputs into its batch."""
    import with_lerobot  # pyrefly: ignore[missing-import]

    policy = with_lerobot.SmolVLAPolicy.from_pretrained(folder)
    policy.eval()
    before, _ = with_lerobot.make_pre_post_processors(policy.config, pretrained_path=str(folder))

    def prepare(inputs: Inputs, actions: torch.Tensor | None = None) -> dict[str, Any]:
        batch: dict[str, Any] = {
            f"observation.images.{n}": f.permute(0, 3, 1, 2) / 255 for n, f in inputs.frames.items()
        }
        batch |= {"observation.state": inputs.proprio, "task": list(inputs.instruction)}
        return before(batch if actions is None else {**batch, "action": actions})

    return policy, prepare


def _inputs(rows: int) -> Inputs:
    return replace(laws.random_inputs(SPEC, rows, 1), instruction=(TASK,) * rows)


def _steps(
    theirs: Any, prepare: Callable[..., dict[str, Any]], ours: Policy, rows: int
) -> dict[str, Callable[[], Any]]:
    """A training step of LeRobot's, and an update here, of as many rows."""
    inputs, actions = _inputs(rows), torch.zeros(rows, theirs.config.chunk_size, SPEC.action_dim)
    decided = ours.act(inputs, laws.random_noise(ours, rows, 1))
    trained = {"lerobot": theirs.parameters(), "here": ours.parameters()}
    optimizers = {name: torch.optim.AdamW([p for p in ps if p.requires_grad]) for name, ps in trained.items()}

    def step(name: str, loss: torch.Tensor) -> None:
        loss.backward()
        optimizers[name].step()
        optimizers[name].zero_grad()

    def train() -> None:
        theirs.train()
        step("lerobot", theirs.forward(prepare(inputs, actions))[0])

    def update() -> None:
        known = {**decided.trace, **ours.precompute(inputs)}
        scored = ours.evaluate(inputs, known)
        step("here", scored.value.mean() - (scored.log_prob.sum((1, 2)) - decided.log_prob.sum((1, 2))).exp().mean())

    return {"lerobot": train, "here": update}


def _in_turn(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median seconds of each call; the first of each warms up."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:
                taken[name].append(time.perf_counter() - begin)
    return {name: median(seconds) for name, seconds in taken.items()}


def _ratio(name: str, seconds: dict[str, float]) -> dict[str, float]:
    found = {f"{name}_{who}_s": value for who, value in seconds.items()}
    return {**found, f"{name}_ratio": seconds["lerobot"] / seconds["here"]}


if __name__ == "__main__":
    main(tyro.cli(Beside))
