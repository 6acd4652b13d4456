"""`gymnasium/<id>`: any environment that is registered with Gymnasium, as it is.

Pictures in its observation are cameras, as is its own `rgb_array` picture; a text in it is the instruction; all else in
it is the state, flattened. Actions, rewards, ends and time limits are its own. Success is what its info calls
`is_success` or `success`; where it reports neither, the task has none and is measured by its return.
"""

import gymnasium

from sim_farm.backends.gymnasium.physics import GymnasiumPhysics
from sim_farm.backends.gymnasium.renderer import GymnasiumRenderer
from sim_farm.contract import Backend

BACKEND = Backend(
    "gymnasium",
    GymnasiumPhysics,
    GymnasiumRenderer,
    tasks=lambda: list(gymnasium.registry),
    rewards=("dense",),
    success_ends=False,
    ignores_terminations=False,
)
