"""Imports of a worker process of Ray before its first worker: Ray's setting `preload_python_modules` names them."""

import gc
import importlib

from embodied.imports import uncollected

with uncollected():
    importlib.import_module("embodied.runtime.ray.actors")
    importlib.import_module("embodied.rollout.policy_worker")
    gc.freeze()  # a later collection need not look at what stays
