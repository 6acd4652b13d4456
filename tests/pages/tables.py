"""What the pages' commands are run with, and which of them are not run, with the reason of each.

What is shortened is the amount (iterations, episodes, optimiser steps), never the command. Keys of commands and blocks
are a page and how the command, or the block's first line, begins.
"""

from __future__ import annotations

SHORT = {
    "train": "--iterations 2 --eval.episodes 2 --eval.videos 0",
    "sft": "--sft.steps 2 --sft.batch 8 --eval.episodes 2 --eval.videos 0",
    "eval": "--eval.episodes 2 --eval.videos 0",
    "record": "--episodes 4",
    "reward": "--steps 2",
    "bench": "--seconds 0.2 --num-envs 2",
    "compare": "--repeats 1",
}
"""Options after those of the page, by verb."""
INLINE = ("train", "sft", "eval", "record")
"""Verbs that have `--runtime.mode inline` after them too: it starts fastest and its numbers are the same."""
WITH_WORKERS = ("--plan.", "EMBODIED_FAULTS")
"""Words of commands that need worker processes."""
SMALL = "--env.num-envs 4 --farm.groups 2"
ONE_GROUP = "--env.num-envs 8 --rollout.episodes-per-env 1 --env.max-episode-steps 8"
SHORTER = {
    ("README.md", "embodied train pushcube"): "--iterations 1",
    ("docs/demonstrations.md", "embodied record"): "--episodes 12",
    ("docs/generalisation.md", "embodied eval"): "--eval.episodes 1",
    ("docs/latency.md", "embodied eval"): "--eval.episodes 1",
    ("docs/learning.md", "embodied train openvla_small"): SMALL,
    ("docs/learning.md", "embodied train openvla_oft_two_cubes"): SMALL,
    ("docs/learning.md", "embodied record two_cubes"): "--episodes 1",
    ("docs/lerobot.md", "embodied train act_small"): SMALL,
    ("docs/lerobot.md", "embodied train act_small_grpo"): ONE_GROUP,
    ("docs/lerobot.md", "embodied train diffusion_small"): SMALL,
    ("docs/lerobot.md", "embodied record two_cubes"): "--episodes 1",
    ("docs/lerobot.md", "embodied train smolvla_small"): SMALL,
    ("docs/lerobot.md", "embodied train smolvla_two_cubes"): ONE_GROUP,
    ("docs/lerobot.md", "embodied record libero"): "--episodes 1",
    ("docs/lerobot.md", "embodied train smolvla_goal"): ONE_GROUP,
    ("docs/lora.md", "embodied train"): SMALL,
    ("docs/operating.md", "EMBODIED_FAULTS"): "--iterations 6",
    ("docs/pi0.md", "embodied record two_cubes"): "--episodes 1",
    ("docs/pi0.md", "embodied record libero"): "--episodes 1",
    ("docs/pi0.md", "embodied train pi0_small"): SMALL,
    ("docs/pi0.md", "embodied train pi0_two_cubes"): SMALL,
    ("docs/pi0.md", "embodied train pi0_goal"): ONE_GROUP,
    ("docs/planning.md", "embodied profile"): "--env.num-envs 4 --rollout.decisions 8",
    ("docs/planning.md", "embodied compare"): "--env.num-envs 4 --rollout.decisions 8",
    ("docs/planning.md", "embodied plan"): "--env.num-envs 4 --rollout.decisions 8",
    ("docs/planning.md", "embodied train"): "--env.num-envs 4 --rollout.decisions 8",
    ("docs/reasoning.md", "embodied train"): "--env.num-envs 16",
    ("docs/scripted-policies.md", "embodied eval"): "--eval.episodes 1",
    ("docs/size-your-farm.md", "embodied bench farm"): "--num-envs 4",
    ("docs/size-your-farm.md", "embodied train"): "--env.num-envs 2 --farm.groups 1 --rollout.decisions 4",
    ("docs/start.md", "embodied train reach --name first"): "--runtime.mode ray",
    ("docs/start.md", "embodied train pushcube_rgb"): "--rollout.decisions 4 --env.max-episode-steps 8",
    ("docs/workflows.md", "embodied record"): "--episodes 40",
    ("docs/workflows.md", "embodied train reach --name expert"): "--iterations 12",
}
"""Further options of single commands. The last of equal options counts."""
PREPARED = {
    "docs/evaluating.md": (
        "embodied train reach --name first",
        "embodied train reach --name second --seed 2",
    ),
    "docs/generalisation.md": (
        "embodied train openvla_tiny --name first",
        "embodied train openvla_tiny --name second --seed 2",
    ),
    "docs/handing-over.md": (
        "embodied record tabletop_scripted --env.task tabletop/reach_red --env.cameras 1 --env.image-size 32 --out red",
        "embodied sft smolvla_tiny --data red --name warm",
    ),
    "docs/latency.md": ("embodied train smolvla_tiny --name first --policy.chunk 4 --policy.horizon 12",),
}
"""Commands before a page's own, which make the runs that it takes to be there."""
FILES = {
    "docs/adding-a-policy.md": ("examples/own_policy.py",),
    "docs/adding-a-simulator.md": ("examples/own_simulator.py",),
}
"""Files of the project that a page's commands name as the reader's own."""
NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "docs/adding-a-policy.md": (("my_package.my_policy:MyPolicy", "own_policy:Linear"), ('"chunk": 4', '"chunk": 1')),
    "docs/adding-a-simulator.md": (("my_package.my_sim:BACKEND/task-a", "own_simulator:BACKEND/reach"),),
    "docs/cluster.md": (("CONFIG", "reach"),),
    "docs/demonstrations.md": (("CONFIG_OR_RUN", "tabletop_scripted --env.task tabletop/reach"), ("CONFIG", "reach")),
    "docs/evaluating.md": (
        ("CONFIG --policy.options.checkpoint FOLDER", "openvla_small --policy.options.checkpoint assets/openvla_small"),
        ("CONFIG", "tabletop_scripted"),
        ("OTHER_RUN", "second"),
        ("RUN", "first"),
        ("HOST:PORT", "127.0.0.1:8000"),
    ),
    "docs/generalisation.md": (("CONFIG", "openvla_tiny"), ("OTHER_RUN", "second"), ("RUN", "first")),
    "docs/latency.md": (("RUN", "first"),),
    "docs/lora.md": (("checkpoints/000022", "checkpoints/000002"),),
    "docs/openvla.md": (("DEMONSTRATIONS", "demos/red"), ("further", "openvla_tiny")),
    "docs/other-libraries.md": (("100_000", "128"), ('PPO("MlpPolicy", ', 'PPO("MlpPolicy", n_steps=8, env=')),
    "docs/planning.md": (("CONFIG", "reach"),),
    "docs/reasoning.md": (("CONFIG", "countdown_grpo"),),
    "docs/scripted-policies.md": (
        ('Path("runs/evals/libero_scripted-20261121-143000")', 'next(Path("runs/evals").glob("libero_scripted-*"))'),
    ),
    "docs/serving.md": (("CONFIG", "openvla_small"), ("RUN", "reach"), ("HOST:PORT", "127.0.0.1:8000")),
}
"""What stands for the reader's own names, by page, in the order in which they are replaced."""
AFTER = {
    "README.md": (
        "python point.py",
        "embodied train reach --env.task point:BACKEND/reach --name pointed",
        "python -c 'import my_policy'",
    ),
    "docs/workflows.md": ("python -c 'from my_package.step_cost import PPO_STEP_COST'",),
}
"""Commands that a page has elsewhere than in a block of commands, run after it."""

CHECKOUT = "of the source tree, which an installed wheel is not"
SERVES = "serves until Ctrl-C"
LARGE = "needs a published checkpoint of 7B"
NETWORK = "installs from a network"
OTHERS = "needs files that others recorded"
HUB = "needs a user of the Hugging Face hub; tests/extensions/hub"
INSTEAD = {
    ("README.md", "make train"): "embodied train pushcube",
    ("docs/start.md", "make train"): "",
    ("docs/start.md", "make learn"): "",
}
"""What is run in the place of a target of the Makefile, as its rule has it; nothing: another page runs the same."""
NOT_RUN = {
    (
        "docs/cluster.md",
        "embodied train CONFIG --policy.replicas",
    ): "needs eight GPUs; rollout/test_replicas.py",
    ("docs/cluster.md", "embodied train CONFIG --plan.mode"): "docs/planning.md runs it",
    (
        "docs/cluster.md",
        "embodied train CONFIG --runtime.address",
    ): "needs two machines; runtime/test_cluster.py",
    ("docs/cluster.md", "export"): "of a cluster; support/ray_nodes.py",
    ("docs/cluster.md", "ray"): "of a cluster; support/ray_nodes.py",
    ("docs/demonstrations.md", "embodied import"): f"{OTHERS}; tests/extensions/importers",
    ("docs/demonstrations.md", "embodied inspect libero"): f"{OTHERS}; tests/embodied/demonstrations",
    ("docs/demonstrations.md", "embodied inspect checkpoints"): LARGE,
    ("docs/evaluating.md", "embodied eval RUN --eval.tasks libero"): "needs a policy for LIBERO",
    (
        "docs/evaluating.md",
        "embodied eval RUN --resume",
    ): "needs an interruption; evaluation/test_evaluation.py",
    (
        "docs/evaluating.md",
        "embodied eval remote",
    ): "needs a server; evaluation/test_remote_evaluation.py",
    ("docs/evaluating.md", "embodied train openvla_oft"): LARGE,
    ("docs/generalisation.md", "make suites"): CHECKOUT,
    ("docs/generalisation.md", "embodied eval RUN --eval.protocol libero"): "needs a policy for LIBERO",
    ("docs/offline.md", "make wheelhouse"): f"{CHECKOUT}; tests/test_wheelhouse.py",
    ("docs/offline.md", "cd wheelhouse"): "needs that folder; tests/test_wheelhouse.py",
    ("docs/offline.md", "export"): "names folders of the reader's",
    ("docs/openvla.md", "embodied"): LARGE,
    ("docs/reasoning.md", "python -m embodied_language"): f"{SERVES}; learning/test_engine_runs.py",
    ("docs/reasoning.md", "embodied train countdown_grpo --policy.options"): "needs that server",
    ("docs/reasoning.md", "python -m sglang"): "needs a GPU",
    ("docs/reasoning.md", "VLLM"): "needs a GPU",
    ("docs/reasoning.md", "embodied train CONFIG"): "needs that server",
    ("docs/serving.md", "embodied serve"): f"{SERVES}; rollout/test_policy_server.py",
    ("docs/serving.md", "embodied eval"): "needs a server; evaluation/test_remote_evaluation.py",
    ("docs/looking.md", "pip install"): NETWORK,
    ("docs/looking.md", "embodied rerun"): "of the reader's runs and data; tests/extensions/rerun",
    ("docs/looking.md", "embodied runs"): "of several people's runs; tests/embodied/reporting/test_results_page.py",
    ("docs/handing-over.md", "hf auth"): HUB,
    ("docs/handing-over.md", "embodied push RUN"): HUB,
    ("docs/handing-over.md", "embodied push warm me/red-reacher --licence"): HUB,
    ("docs/handing-over.md", "embodied push demos"): HUB,
    ("docs/handing-over.md", "embodied pull"): HUB,
    ("docs/lerobot.md", "hf download"): NETWORK,
    ("docs/start.md", "git clone"): NETWORK,
    ("docs/start.md", "make setup"): NETWORK,
    ("docs/start.md", "source"): "of that installation",
    (
        "docs/start.md",
        "embodied doctor",
    ): "ends with 1 where something is missing; doctor/test_doctor.py",
    ("docs/start.md", "python3.11 -m venv"): "of an installation; tests/test_installed.py",
    ("docs/start.md", "pip install"): NETWORK,
    ("docs/start.md", "embodied watch"): f"{SERVES}; commands/test_watch.py",
    ("docs/ten-minutes.md", "git clone"): NETWORK,
    ("docs/ten-minutes.md", "pip install"): NETWORK,
    ("docs/ten-minutes.md", "cd .."): "of that installation",
}
"""Commands that are not run, and why. Those of `embodied` are parsed, so that a wrong option fails."""
SKETCHES = {
    ("docs/looking.md", "import rerun"): "of a recording; tests/extensions/rerun",
    ("docs/adding-a-policy.md", "class MyPolicy"): "signatures alone",
    ("docs/adding-a-simulator.md", "class MyPhysics"): "signatures alone",
    ("docs/adding-a-simulator.md", '@pytest.mark.parametrize("law"'): "tests/sim_farm/test_conformance.py is the whole",
    ("docs/adding-a-simulator.md", "@register_env"): "tests/sim_farm/test_own_tasks.py has such a task whole",
    ("docs/adding-a-simulator.md", "@register_benchmark"): "tests/sim_farm/test_own_tasks.py has such a suite whole",
    ("docs/scripted-policies.md", '"put the bowl'): "an entry of a dictionary",
    ("docs/serving.md", "from openpi_client"): "of another package; rollout/test_policy_server.py",
    ("docs/workflows.md", "PPO = Recipe("): "quoted from embodied/workflows/recipes.py",
    ("docs/workflows.md", "def judge("): "a signature",
}
"""Python that does not run by itself. Its syntax is checked."""
SHOWN = {
    ("README.md", "runs/pushcube"): ("embodied train pushcube",),
    ("docs/start.md", "runs/first: gaussian_mlp"): ("embodied train reach --name first",),
    ("docs/evaluating.md", "| task"): ("embodied eval RUN",),
}
"""Output that a page shows, by the commands that print it. What is compared are lines, numbers aside, to the first
empty line."""
NOT_COMPARED = {
    ("README.md", " physics workers"): "a diagram",
    ("docs/adding-a-policy.md", "======="): "of a policy that breaks laws; tests/policies/test_conformance.py",
    (
        "docs/adding-a-simulator.md",
        "=== the laws",
    ): "of one that breaks laws; tests/sim_farm/test_conformance.py",
    ("docs/architecture.md", "embodied/"): "a tree of folders",
    ("docs/concepts.md", " rollout worker"): "a diagram",
    ("docs/concepts.md", " on-policy"): "a diagram",
    ("docs/demonstrations.md", "FOLDER/"): "a tree of folders",
    ("docs/demonstrations.md", "demos/push:"): "of an import that is not run",
    ("docs/handing-over.md", "       4,279"): "of one policy's sizes; its command is run",
    ("docs/handing-over.md", "https:"): "of a server; tests/extensions/hub",
    ("docs/handing-over.md", "red-reacher: the policy"): "of a server; tests/extensions/hub",
    ("docs/looking.md", "| folder"): "of runs of several people; tests/embodied/reporting/test_results_page.py",
    ("docs/looking.md", "ev: "): "of an evaluation and a dataset; tests/extensions/rerun",
    ("docs/latency.md", "chunk 4, delay 2"): "a diagram",
    ("docs/latency.md", "… action chunks"): "part of a line; tests/embodied/execution/test_training_delay.py",
    ("docs/lerobot.md", "demos/red:"): "of a policy with random weights; its commands are run",
    ("docs/reasoning.md", "Make 29"): "one answer of a policy",
    ("docs/start.md", "runs/first/"): "a tree of folders",
    ("docs/workflows.md", "             ┌"): "a diagram",
}
