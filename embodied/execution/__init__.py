"""Iterations of a run, its workers, their assignment to devices, and the session that they run in."""
