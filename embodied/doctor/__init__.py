"""Checks of a machine: what is missing, and the command that mends it."""
