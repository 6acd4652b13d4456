"""What a process of a Ray that was started here imports before it is given workers (`preload_python_modules`)."""

import gc
import importlib

from embodied.imports import uncollected

with uncollected():
    importlib.import_module("embodied.runtime.ray.actors")
    importlib.import_module("embodied.rollout.policy_worker")
    gc.freeze()  # a later collection need not look at what stays
