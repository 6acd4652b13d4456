"""`embodied bench`: measure a building block against its peers and its limit."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from embodied_bench.settings import BenchFarm, BenchLearner, BenchPolicy, BenchTransport

Arguments = (
    Annotated[BenchFarm, tyro.conf.subcommand("farm")]
    | Annotated[BenchTransport, tyro.conf.subcommand("transport")]
    | Annotated[BenchPolicy, tyro.conf.subcommand("policy")]
    | Annotated[BenchLearner, tyro.conf.subcommand("learner")]
)
EXAMPLES = (
    ("embodied bench farm --task maniskill/PushCube-v1 --cameras 1 --chunk 8", "env steps/s beside peers and limits"),
    ("embodied bench transport", "frames through slots, pipe, queue and Ray's store, beside memcpy"),
    ("embodied bench policy --model openvla-7b --random-weights", "actions/s, latency, memory, beside the limit"),
    ("embodied bench learner --model pi0 --random-weights", "samples/s of an update"),
)


def run(args: BenchFarm | BenchTransport | BenchPolicy | BenchLearner) -> dict[str, Any]:
    """Measure it. Only what is measured is imported: each needs other packages."""
    if isinstance(args, BenchFarm):
        from embodied_bench.farm import bench_farm

        return bench_farm(args)
    if isinstance(args, BenchTransport):
        from embodied_bench.transport import bench_transport

        return bench_transport(args)
    if isinstance(args, BenchPolicy):
        from embodied_bench.policy import bench_policy

        return bench_policy(args)
    from embodied_bench.learner import bench_learner

    return bench_learner(args)
