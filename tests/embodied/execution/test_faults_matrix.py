"""The whole matrix of benchmarks/faults.py: whatever befalls whom, in whatever phase, a run ends as if it had not."""

from __future__ import annotations

import pytest

from benchmarks.faults import Cell, Lab, matrix


def of(workload: str, kind: str) -> list[Cell]:
    return [cell for cell in matrix() if (cell.workload, cell.fault.kind) == (workload, kind)]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", ["kill", "raise", "stop"])
@pytest.mark.parametrize("workload", sorted({cell.workload for cell in matrix()}))
def test_a_fault_changes_nothing(workload: str, kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    cells = of(workload, kind)
    outcomes = list(Lab(tmp_path_factory.mktemp("lab")).run(cells))
    assert len(outcomes) == len(cells)
    assert not [outcome for outcome in outcomes if not outcome.good]
