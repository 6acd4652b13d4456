"""Trajectories that outlive the memory they were written into."""

from __future__ import annotations

from dataclasses import replace

from embodied.trajectories.batch import TensorDecisions, Trajectories


def copied_out(batch: Trajectories) -> Trajectories:
    """The same trajectories, their observations and traces copied out of the trajectory memory."""
    return replace(batch, decisions=TensorDecisions(batch.inputs, batch.trace))
