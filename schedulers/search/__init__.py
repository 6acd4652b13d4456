"""Search for the best plan.

`planner` is the entrance; `phases` finds the sequence of phases, and tries every partition of a phase into placements;
`allocation` finds the number of devices of each placement; `several_tasks` does both for runs of several tasks.

    prefix      components with all that come before them in the workflow graph; a phase is one prefix less another
    placement   components that share devices in a phase, by pool; a partition divides a phase's components into them
    kind        `shared`: the components of a pool are one placement and take turns; `split`: they are several
    loop        the rollout's components, which a group of environments visits in turn, once a step
    stage       components of a placement outside the loop, which process one micro-batch after the other
    pipeline    stages that stream micro-batches to each other; a barrier ends it
    unit        devices that are allocated together: one, or on a large cluster several
    bound       a time that no plan of that kind can beat: what is above the best found so far is not tried
"""
