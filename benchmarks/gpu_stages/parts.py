"""What there is to measure: stages, and the parts that they have for the models that are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """Some measurements that belong together."""

    name: str
    module: str
    """In this package; its `run(Work)` returns the figures."""
    about: str
    variants: tuple[str, ...]
    """Of each a part is made. `MODELS` stands for each model that is asked for, `""` for the stage as a whole."""
    usual_s: float
    """Seconds that a part is believed to need on a GPU: it is not begun with less."""
    limit_s: float
    """Seconds after which a part is ended."""


MODELS = "each model"
STAGES = (
    Stage("doctor", "doctor", "what the machine is and what draws on it", ("",), 45, 180),
    Stage("paths", "paths", "tiny runs on the GPU are those on the CPU, inline and on Ray", ("",), 90, 300),
    Stage("act", "speed", "decisions per second by batch size", (MODELS,), 90, 300),
    Stage("learn", "speed", "samples per second of a LoRA update, utilisation, memory", (MODELS,), 120, 360),
    Stage("offload", "offload", "a policy leaves the GPU and comes back, beside the bandwidth", ("",), 60, 240),
    Stage("draw", "draw", "frames drawn on the GPU and in software", ("maniskill", "libero", "tabletop"), 60, 240),
    Stage("weights", "weights", "from learner to policy worker", ("reference", "adapter", "full", "by_host"), 90, 360),
    Stage(
        "graph", "graph", "decisions replayed as a CUDA graph, beside kernels launched one by one", (MODELS,), 40, 240
    ),
    Stage(
        "language", "language", "a language model's answers, updates and modes", ("generate", "learn", "modes"), 90, 360
    ),
    Stage("modes", "modes", "every mode measured beside predicted", ("ray", "inline"), 240, 540),
)
QUICK_S = 5.0
"""A tiny part on a CPU is begun with this much time left."""


@dataclass(frozen=True)
class Part:
    """One process's measurements."""

    stage: Stage
    variant: str
    model: str
    usual_s: float

    @property
    def name(self) -> str:
        return f"{self.stage.name}/{self.variant}" if self.variant else self.stage.name


def parts_of(models: Sequence[str], device: str) -> list[Part]:
    """All parts, in their order. What is no speed of a model is measured with the first one."""
    found = []
    for stage in STAGES:
        usual = stage.usual_s if device == "cuda" else QUICK_S
        for variant in models if stage.variants == (MODELS,) else stage.variants:
            found.append(Part(stage, variant, variant if stage.variants == (MODELS,) else models[0], usual))
    return found


def select(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """The parts of these names or stages, in the order in which parts are run; all where nothing is named.

    Raises `ValueError` for a name that is none.
    """
    known = {name for part in parts for name in (part.name, part.stage.name)}
    unknown = [name for name in only if name not in known]
    if unknown:
        raise ValueError(f"there is no stage {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return [part for part in parts if not only or part.name in only or part.stage.name in only]
