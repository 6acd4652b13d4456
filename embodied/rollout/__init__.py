"""Rollouts: policy workers act for groups of environments, rollout workers gather trajectories."""
