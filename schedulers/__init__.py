"""Profiles, cost model and planner: when and where a workflow runs. Pure Python and NumPy; still to come."""
