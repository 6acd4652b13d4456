"""Protocols, evaluations by them, and films of evaluated episodes."""
