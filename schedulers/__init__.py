"""Planning of embodied RL workflows: profiles, cost model and search. Pure Python and NumPy.

    best = schedulers.plan(workflow, profile, cluster)
    print("\\n".join(best.why))
    schedulers.save(best, "plan.json")

Nouns, each with a JSON form (`files`): `Workflow` (components, edges, rollout loops), `Profile` (measured times and
memory), `Cluster` (nodes and links), `Plan` (placements in phases, see `plan`). `cost` predicts the makespan of a plan,
by formulas and by event simulation; `search` finds the best plan; `explain` and `scaling` say why it is the best, and
what limits it.
"""

from schedulers.cluster import Cluster, Node, Pool
from schedulers.cost.prediction import predict, predict_sequential
from schedulers.cost.simulation import Event, Simulation, chrome_trace, expected_seconds, simulate
from schedulers.errors import PlanError
from schedulers.json_files import from_data, load, save, text_of, to_data
from schedulers.plan import MODES, DeviceRange, Mode, Phase, Placement, Plan, Prediction
from schedulers.profile import ComponentProfile, Exchange, Point, Profile, Together, check_profile
from schedulers.scaling import Scaling, one_accelerator, scaling
from schedulers.search.planner import SearchOptions, alternatives, plan
from schedulers.validation import validate
from schedulers.workflow import Component, Edge, Loop, Workflow

__all__ = [
    "MODES",
    "Cluster",
    "Component",
    "ComponentProfile",
    "DeviceRange",
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
    "SearchOptions",
    "Simulation",
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
