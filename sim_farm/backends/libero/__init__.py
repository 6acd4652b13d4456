"""`libero/<suite>/<index>`: the 130 tasks of LIBERO (Liu et al. 2023, arXiv:2306.03310), in real robosuite and MuJoCo.

Tasks of one's own are those of a benchmark class that a module registers with LIBERO's `register_benchmark`:
`my_package.my_tasks:libero/<suite>/<index>`.

    package.py      makes LIBERO and robosuite importable: its settings, its assets, no question on standard input
    tasks.py        the suites, a task's files, its recorded initial states
    environment.py  builds robosuite's environment of a task, without a renderer, around a shared model; its scene
                    as bytes
    control.py      one control step: the same arithmetic as robosuite's, without what does not change the result
    compiled.py     its simulation steps without the interpreter
    physics.py      resets and steps an environment
    reward.py       how much of the goal is done: the dense reward
    renderer.py     draws scenes
    plus.py         LIBERO-Plus: variants of LIBERO's tasks as perturbations
    pro.py          LIBERO-PRO: the same
    data_wheels.py  the files of LIBERO-Plus and LIBERO-PRO, taken out of their wheels
    recordings.py   episodes that robosuite recorded

The stock environments keep random state between episodes and see another one at each rebuild. Here an episode is
what a new stock environment shows: `env.seed(seed); env.reset()`, then `env.set_init_state(...)` if one is named.
"""

from sim_farm.backends.libero import plus, pro
from sim_farm.backends.libero.environment import load
from sim_farm.backends.libero.package import prepare
from sim_farm.backends.libero.physics import LiberoPhysics
from sim_farm.backends.libero.renderer import LiberoRenderer
from sim_farm.backends.libero.tasks import task_files, task_names
from sim_farm.backends.mujoco_gl import drawn_by
from sim_farm.contract import Backend

BACKEND = Backend(
    "libero",
    LiberoPhysics,
    LiberoRenderer,
    tasks=task_names,
    rewards=("sparse", "dense"),
    files=task_files,
    drawn_by=drawn_by,
    axes={"camera": 10.0, "start": 0.1, "objects": 0.01, "posture": 0.0, "task file": 0.0},
    suites={"libero-plus": plus.SUITE, "libero-pro": pro.SUITE},
    prepare=prepare,
    load=load,
)
