"""Cost model: the makespan of a plan from a profile.

`problem` is one workflow with its profile on one cluster; `times` the time and memory of a placement as a function of
its devices; `communication` what is sent; `phase` how placements work together; `laws` the formulas; `prediction` and
`simulation` evaluate a plan, by formula and event by event.
"""
