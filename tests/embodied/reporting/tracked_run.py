"""A run of six rows that goes back to its second, in a process of its own: `tracked_run.py LIBRARY FOLDER`.

Its last line is what the library has then: points of each metric, a setting, files.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from embodied.config.files import parse_config
from embodied.reporting.metrics import MetricsWriter
from embodied.reporting.trackers import FILE, PROJECT, tracked

SUCCESS = ("env/success_once", "env/success_once/tabletop/reach")
"""One is the beginning of the other, as the name of a file and of a folder cannot be."""


def main(name: str, run_dir: Path) -> None:
    run_dir.mkdir()
    (run_dir / "report.html").write_text("<p>done")
    for iterations, success in ((range(1, 5), 0.5), (range(3, 7), 0.75)):
        with tracked(parse_config({"track": name}, "test"), run_dir) as tracking:
            with MetricsWriter(run_dir, tracking) as writer:
                writer.truncate(iterations.start - 1)
                for i in iterations:
                    row = {"wall_s": 2.0 * i, "nothing": float("nan"), **dict.fromkeys(SUCCESS, success)}
                    writer.write(i, 100 * i, row)
            tracking.evaluation({"final/return": 3.0}, 100 * iterations[-1])
            tracking.file(run_dir / "report.html")
    known = json.loads((run_dir / FILE).read_text())[name]
    print(json.dumps({"mlflow": of_mlflow, "trackio": of_trackio}[name](run_dir, known)))


def of_mlflow(run_dir: Path, known: str) -> dict[str, Any]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run_dir}/mlruns/mlflow.db")
    run = client.get_run(known)
    points = {key: [(one.step, one.value) for one in client.get_metric_history(known, key)] for key in run.data.metrics}
    files = [file.path for file in client.list_artifacts(known)]
    return {"points": points, "task": run.data.params["env.task"], "files": files}


def of_trackio(run_dir: Path, known: str) -> dict[str, Any]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs(PROJECT)
    points: dict[str, list[tuple[int, float]]] = {}
    for row in SQLiteStorage.get_logs(PROJECT, known):
        for key, value in row.items():
            if key not in ("timestamp", "step"):
                points.setdefault(key, []).append((row["step"], value))
    files = [one["name"].replace(f"{known}-report", "report.html") for one in SQLiteStorage.list_artifacts(PROJECT)]
    return {"points": points, "task": run.config["env"]["task"], "files": files}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
