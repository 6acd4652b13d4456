"""Search for the best plan.

`planner` is the entrance; `phases` finds the sequence of phases, and tries every partition of a phase into placements;
`allocation` finds the number of devices of each placement; `several_tasks` does both for runs of several tasks.
"""
