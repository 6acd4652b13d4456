"""`embodied bench`: measure a building block against its peers and its limit."""

from __future__ import annotations

from typing import Annotated, Any

import tyro

from embodied.bench.settings import BenchFarm, BenchLearner, BenchPolicy, BenchTransport

Arguments = (
    Annotated[BenchFarm, tyro.conf.subcommand("farm")]
    | Annotated[BenchTransport, tyro.conf.subcommand("transport")]
    | Annotated[BenchPolicy, tyro.conf.subcommand("policy")]
    | Annotated[BenchLearner, tyro.conf.subcommand("learner")]
)


def run(args: BenchFarm | BenchTransport | BenchPolicy | BenchLearner) -> dict[str, Any]:
    """Measure it. Only what is measured is imported: each needs other packages."""
    if isinstance(args, BenchFarm):
        from embodied.bench.farm import bench_farm

        return bench_farm(args)
    if isinstance(args, BenchTransport):
        from embodied.bench.transport import bench_transport

        return bench_transport(args)
    if isinstance(args, BenchPolicy):
        from embodied.bench.policy import bench_policy

        return bench_policy(args)
    from embodied.bench.learner import bench_learner

    return bench_learner(args)
