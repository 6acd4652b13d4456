"""Machines whose kernels round differently are found, and named in one warning."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from embodied.runtime import rounding
from embodied.runtime.api import InlineRuntime
from tests.embodied.learning.test_learner_ranks import STATES
from tests.embodied.rollout.test_policies_elsewhere import learned_alike_apart
from tests.embodied.runtime.test_runtime import config_of, train
from tests.embodied.support.ray_nodes import started
from tests.variants import often

OTHER = {
    "NumPy's matrix products": {"OPENBLAS_CORETYPE": "Nehalem"},
    "NumPy's functions": {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4"},
    "PyTorch's matrix products": {"MKL_CBWR": "COMPATIBLE"},
    "PyTorch's functions": {"ATEN_CPU_CAPABILITY": "default"},
    "PyTorch's convolutions": {"ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""Settings under which a processor with AVX2 uses other kernels, by the kind that changes."""
NUMPY = tuple(name for name in OTHER if name.startswith("NumPy"))


def kernels_under(settings: dict[str, str], *imports: str) -> dict[str, str]:
    """The kernels of a new process with these environment variables."""
    code = f"import json, {', '.join(('embodied.runtime.rounding as rounding', *imports))}; "
    code += "print(json.dumps(rounding.kernels()))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **settings}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("kind", often(["NumPy's matrix products"], OTHER))
def test_each_kind_of_kernel_shows_by_itself(kind: str) -> None:
    imports = () if kind in NUMPY else ("torch",)
    plain, other = kernels_under({}, *imports), kernels_under(OTHER[kind], *imports)
    assert set(plain) == set(other) == set(NUMPY if kind in NUMPY else OTHER)
    assert rounding.differences(plain, other) == [kind]


@pytest.mark.slow
@pytest.mark.parametrize("threads", ["1", "2", "4"])
def test_the_number_of_threads_changes_no_kernel(threads: str) -> None:
    here = {**rounding.kernels(), **kernels_under({"OMP_NUM_THREADS": "1"}, "torch")}
    assert rounding.differences(here, kernels_under({"OMP_NUM_THREADS": threads}, "torch")) == []


def test_the_warning_names_machines_kernels_and_what_to_set() -> None:
    text = rounding.warning({"cpu-1": ["NumPy's functions"], "cpu-2": ["NumPy's functions", "PyTorch's functions"]})
    assert "(cpu-1: NumPy's functions; cpu-2: NumPy's functions, PyTorch's functions)" in text
    assert "set NPY_DISABLE_CPU_FEATURES=X86_V4 ATEN_CPU_CAPABILITY=avx2 on every machine" in text
    assert "\n" not in text


@pytest.mark.slow
def test_a_cluster_whose_machines_round_differently_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two machines beside this one under other settings: physics on both is one warning that names both; a replica and
    a rank there add what a process with PyTorch shows, and their decisions do differ in the last bits."""
    settings = {**OTHER["NumPy's matrix products"], **OTHER["PyTorch's functions"]}
    with started("near", "far", "further", patient=True, settings=settings) as machines:
        machines.place_physics(monkeypatch, "far", "further")
        with caplog.at_level(logging.WARNING):
            train(config_of(iterations=1), tmp_path / "physics", machines.runtime)
        [first] = [record.getMessage() for record in caplog.records if "round differently" in record.getMessage()]
        assert all(f"{machines.node(name)}: NumPy's matrix products" in first for name in ("far", "further"))
        assert "set OPENBLAS_CORETYPE=Haswell on every machine" in first
        monkeypatch.undo()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            with pytest.raises(AssertionError, match="^log_prob"):
                learned_alike_apart(STATES, machines, tmp_path)
            train(config_of(iterations=1), tmp_path / "again", machines.runtime)
        [second] = [record.getMessage() for record in caplog.records if "round differently" in record.getMessage()]
        assert f"({machines.node('far')}: PyTorch's functions)" in second


@pytest.mark.slow
def test_machines_that_round_alike_are_not_mentioned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with started("near", "far") as machines:
        machines.place_physics(monkeypatch, "far")
        config = config_of(iterations=1)
        with caplog.at_level(logging.WARNING):
            found = train(config, tmp_path / "ray", machines.runtime)
    assert found == train(config, tmp_path / "inline", InlineRuntime(60.0))
    assert "round" not in caplog.text
