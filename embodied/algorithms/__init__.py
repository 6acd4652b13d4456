"""Advantages, losses and statistics of episode groups: pure functions."""
