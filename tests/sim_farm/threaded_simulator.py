"""A simulator whose import starts a thread, and that needs it."""

from __future__ import annotations

import threading

import gymnasium

from tests.sim_farm.noted_environment import Noted

THREAD = threading.Thread(target=threading.Event().wait, daemon=True)
THREAD.start()


class Threaded(Noted):
    def __init__(self) -> None:
        super().__init__(thread=THREAD.is_alive())


gymnasium.register("farm-forks/Threaded-v0", entry_point=f"{__name__}:Threaded", max_episode_steps=5)
