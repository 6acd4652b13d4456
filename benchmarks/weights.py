"""What do weights cost on their way to several policy replicas? `python benchmarks/weights.py --json FILE`.

An executor's workers on this machine's cores: a learner, and one policy worker or several replicas. Measured is how
long it takes until all of them act with the next version: the learner is asked, writes its weights into shared memory
once, and whoever acts maps them (one policy worker copies them into tensors of its own). Nothing else should run on the
machine.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.execution.assignment import configured
from embodied.execution.iteration import start_run
from embodied.execution.roles import LearnerRole
from embodied.execution.session import Session, open_session
from embodied.workflows.run_spec import RunSpec
from embodied_bench.settings import show_and_write

WANTED = 1.3
"""Weights to several replicas may cost so many times those to one."""


@dataclass(frozen=True)
class Weights:
    """One policy worker against several replicas."""

    replicas: int = 4
    width: int = 2048
    """Of the policy's four hidden layers, actor and critic each."""
    versions: int = 15
    """Versions that are handed over; the first two warm up."""
    json: Path | None = None
    """Write the figures to this file."""


def main(settings: Weights) -> None:
    alone, several = (_config(settings, replicas) for replicas in (1, settings.replicas))
    with open_session(alone) as session, tempfile.TemporaryDirectory() as folder:
        one_s, one_way, nbytes = _publish(alone, session, Path(folder), settings.versions)
        several_s, several_way, _ = _publish(several, session, Path(folder), settings.versions)
    figures: dict[str, Any] = {
        "weights_bytes": nbytes,
        "replicas": settings.replicas,
        "way_to_one": one_way,
        "way_to_several": several_way,
        "to_one_s": one_s,
        "to_several_s": several_s,
        "ratio": several_s / one_s,
        "wanted_ratio": WANTED,
    }
    show_and_write(figures, settings.json)


def _publish(config: Config, session: Session, folder: Path, versions: int) -> tuple[float, str, int]:
    """Median seconds of handing a version over, the way that it took, and its bytes."""
    with start_run(RunSpec.of(config), folder, session, configured(RunSpec.of(config), session.cores)) as workers:
        workers.begin(None, 0)
        seconds = []
        for version in range(1, versions + 1):
            begin = time.perf_counter()
            workers.publish(version)
            seconds.append(time.perf_counter() - begin)
        state = workers.learner.call(LearnerRole.weights)
        return median(seconds[2:]), workers.weight_sync.path, sum(tensor.nbytes for tensor in state.values())


def _config(settings: Weights, replicas: int) -> Config:
    data = load_config("reach").model_dump(mode="json")
    data["env"] |= {"num_envs": 2 * settings.replicas}
    data["farm"] |= {"physics_workers": 1, "groups": settings.replicas}
    data["policy"] |= {"replicas": replicas, "options": {"widths": [settings.width] * 4}}
    return parse_config(data, "benchmarks/weights.py")


if __name__ == "__main__":
    main(tyro.cli(Weights, description=__doc__))
