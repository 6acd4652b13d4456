"""Policies without training: controllers that follow a script, replayed actions, random actions."""
