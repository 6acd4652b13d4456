"""A run on disk: its folder, checkpoints and trace."""

from __future__ import annotations

from pathlib import Path

RUNS = Path("runs")
"""Default of --runs-dir: the folder of all runs."""
