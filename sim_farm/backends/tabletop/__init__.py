"""`tabletop/<task>`: a gantry robot on a table, in MuJoCo, with nothing to download.

Real contact physics and three cameras, small enough for the first minute with the project and for fast tests. Tasks:
`reach`, `push`, `pick_and_place`, and `reach_red` and `reach_blue`, which are told apart by the instruction alone. The
scenes are in `assets/tabletop`.
"""

from sim_farm.backends.mujoco_gl import drawn_by
from sim_farm.backends.tabletop.physics import TabletopPhysics
from sim_farm.backends.tabletop.renderer import TabletopRenderer
from sim_farm.backends.tabletop.tasks import TASKS
from sim_farm.contract import Backend

BACKEND = Backend(
    "tabletop",
    TabletopPhysics,
    TabletopRenderer,
    tasks=lambda: list(TASKS),
    drawn_by=drawn_by,
    axes={"camera": 8.0, "start": 0.02, "objects": 0.01},
)
