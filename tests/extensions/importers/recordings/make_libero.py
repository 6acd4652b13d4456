"""Writes `libero_spatial.hdf5.gz` beside this file with LIBERO's own scripts, on robosuite 1.4.0.

    git clone https://github.com/Lifelong-Robot-Learning/LIBERO /tmp/LIBERO
    python tests/extensions/importers/recordings/make_libero.py /tmp/LIBERO/scripts /tmp/libero-recorded

The episode is one of `make_robomimic.py`, written by LIBERO's collect_demonstration.py, and then by create_dataset.py,
of which one line is taken out: it adds a list to a string, and its result is not used. The file is made small: one
demonstration without pictures (`obs`) and `robot_states`; folders of the machine become `/data`; numbers are stored
with gzip. No number is changed. The bowl's inertia comes from its mesh, so the assets must be LIBERO's own.
"""

from __future__ import annotations

import gzip
import os
import shutil
import sys
from pathlib import Path

import h5py
import yaml

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[3]))

from sim_farm.backends.libero.assets import assets  # noqa: E402
from sim_farm.backends.libero.package import SETTINGS, SETTINGS_VARIABLE, prepare, settings_file  # noqa: E402
from tests.extensions.importers.recordings.make_robomimic import moved, record  # noqa: E402
from tests.sim_farm.libero_stock import _lend_opengl  # noqa: E402

WRONG = '"/".join(bddl_file_dir.split("bddl_files/")[:-1] + "bddl_files")'


def create_dataset(scripts: Path, demonstrations: Path) -> None:
    """LIBERO's script, with pictures: without them it opens a window."""
    script = scripts / "create_dataset.py"
    text = script.read_text()
    assert WRONG in text
    sys.argv = [str(script), "--demo-file", str(demonstrations), "--use-camera-obs"]
    exec(compile(text.replace(WRONG, "None"), script, "exec"), {"__name__": "__main__"})


def shrink(source: Path, target: Path, demo: str) -> None:
    small = target.with_suffix("")
    with h5py.File(source) as old, h5py.File(small, "w") as new:
        data, group = new.create_group("data"), new.create_group("data/demo_0")
        for name, value in old["data"].attrs.items():
            data.attrs[name] = moved(value, "/data/")
        data.attrs["num_demos"] = 1
        for name, value in old["data"][demo].attrs.items():
            group.attrs[name] = moved(value, "/data/")
        for name in ("actions", "dones", "rewards", "states"):
            group.create_dataset(name, data=old["data"][demo][name][()], compression="gzip")
    target.write_bytes(gzip.compress(small.read_bytes(), 9, mtime=0))
    small.unlink()


def main() -> None:
    scripts, out = Path(sys.argv[1]), Path(sys.argv[2])
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    prepare()
    settings = yaml.safe_load(settings_file().read_text())
    (out / SETTINGS).write_text(yaml.safe_dump({**settings, "datasets": str(out / "datasets")}))
    os.environ[SETTINGS_VARIABLE] = str(out)
    assets()
    _lend_opengl()
    record(scripts, out, [0])
    create_dataset(scripts, out / "demo.hdf5")
    (written,) = (out / "datasets").iterdir()  # `libero_spatial`, by its suite
    shrink(written, HERE / "libero_spatial.hdf5.gz", "demo_0")


if __name__ == "__main__":
    main()
