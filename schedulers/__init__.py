"""Profiles, cost model and planner: when and where a workflow runs. Pure Python and NumPy.

best = schedulers.plan(workflow, profile, cluster)
print("\\n".join(best.why))
schedulers.save(best, "plan.json")
"""

from schedulers.check import check_profile
from schedulers.cluster import Cluster, Node
from schedulers.data import from_data, load, save, text_of, to_data
from schedulers.errors import PlanError
from schedulers.plan import MODES, DeviceRange, Mode, Phase, Placement, Plan, Prediction
from schedulers.planner import alternatives, plan
from schedulers.prediction import predict, predict_sequential
from schedulers.profile import ComponentProfile, Exchange, Point, Pool, Profile, Together
from schedulers.scaling import Scaling, one_accelerator, scaling
from schedulers.simulation import Event, Simulation, chrome_trace, expected_seconds, simulate
from schedulers.validation import validate
from schedulers.workflow import Component, Edge, Loop, Workflow

__all__ = [
    "MODES",
    "Cluster",
    "Component",
    "ComponentProfile",
    "Edge",
    "Event",
    "Exchange",
    "Loop",
    "Mode",
    "Node",
    "Phase",
    "Placement",
    "Plan",
    "PlanError",
    "Point",
    "Pool",
    "Prediction",
    "Profile",
    "Scaling",
    "Simulation",
    "DeviceRange",
    "Together",
    "Workflow",
    "alternatives",
    "check_profile",
    "chrome_trace",
    "expected_seconds",
    "from_data",
    "load",
    "one_accelerator",
    "plan",
    "predict",
    "predict_sequential",
    "save",
    "scaling",
    "simulate",
    "text_of",
    "to_data",
    "validate",
]
