"""Trajectories and random streams."""
