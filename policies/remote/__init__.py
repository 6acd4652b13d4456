"""Policies in other programs: openpi's websocket protocol, and the policy `remote` that speaks it."""
