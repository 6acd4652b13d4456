"""`embodied serve`: a policy for other programs and robots, in openpi's websocket protocol and vla-eval's."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path
from typing import Any

import torch
from rich import get_console

import policies
from embodied.commands.arguments import ServeArguments as Arguments
from embodied.devices import find_device, settle
from embodied.evaluation.provenance import outside_files
from embodied.rollout.loaded_policy import LoadedPolicy
from embodied.rollout.policy_server import PolicyServer, bind
from embodied.run import checkpoint
from embodied.run.folder import whole_checkpoint, with_init
from embodied.run.saved_settings import find_run
from embodied.training.checks import Checked, check_described, check_start
from embodied.workflows.context import make_policy, policy_spec
from embodied.workflows.run_spec import task_spec
from sim_farm.workers.hosts import InProcess


def run(args: Arguments) -> dict[str, Any]:
    config = with_init(args.settings, args.runs_dir, required=False)
    checked = Checked(command="serve", config=config, checkpoint=_checkpoint(args.run, args.checkpoint, args.runs_dir))
    check_start(checked)
    torch.set_num_threads(args.threads)
    with bind(args.host, args.port) as bound:  # before the weights are read, which may take minutes
        loaded = _loaded(checked)
        server = PolicyServer(
            loaded,
            keys=args.keys,
            rows=args.batch,
            sample=args.sample,
            seed=config.seed,
            origin=_origin(loaded),
        )
        asyncio.run(_until_ended(server, bound, loaded))
    found = server.latencies
    text = f"{found['requests']} requests answered, {found['refused']} refused"
    if found["requests"]:
        median, most, worst = (1e3 * found[f"latency_{which}_s"] for which in ("p50", "p95", "p99"))
        text += f"; latency {median:.1f} ms (median), {most:.1f} ms (95%), {worst:.1f} ms (99%)"
    _say(text)
    return found


async def _until_ended(server: PolicyServer, bound: socket.socket, loaded: LoadedPolicy) -> None:
    """Serve until Ctrl-C or `kill`."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host, port = bound.getsockname()[:2]
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    weights = f" of {loaded.checkpoint}" if loaded.checkpoint else ""
    begun = f"{loaded.policy.kind}{weights} is served at ws://{where}; Ctrl-C ends{_conventions(loaded)}"
    await server.run(bound, stop, lambda: _say(begun))


def _conventions(loaded: LoadedPolicy) -> str:
    """A line on what clients must show and on the actions that they must execute."""
    env, spec = loaded.config.env, loaded.spec
    cameras, apart = spec.cameras, f"{spec.distance} env step{'s' if spec.distance > 1 else ''} apart"
    history = f"send {spec.observations} observations, {apart}, the oldest first" if spec.observations > 1 else ""
    shows = f"show pictures {env.orientation}" if cameras else ""
    takes = f"take the gripper as {env.gripper}" if cameras or env.gripper != "simulator" else ""
    duties = [duty for duty in (history, shows, takes) if duty]
    if not duties:
        return ""
    line = f"\nIts clients have to {' and to '.join(duties)} (docs/serving.md)"
    as_openpi = env.gripper != "inverted" and (not cameras or env.orientation == "rotated")
    if env.task.startswith("libero/") and not as_openpi:
        line += "; those of vla-eval's LIBERO are converted; openpi's own show them rotated, take it as simulator"
    return line


def _checkpoint(run: str, named: Path | None, runs_dir: Path) -> Path | None:
    """The checkpoint `named`, or that of the run; None: the configuration builds the policy. Raises `UserError`."""
    if named is None and (Path(run) / checkpoint.MANIFEST).is_file():
        named = Path(run)
    return whole_checkpoint(find_run(run, runs_dir), named)


def _loaded(checked: Checked) -> LoadedPolicy:
    """The policy of the checkpoint, or as the configuration builds it. Raises `UserError`."""
    config, folder = checked.config, checked.checkpoint
    if folder is not None:
        # The kind of the configuration was allowed with it.
        policy = policies.load(folder, code=[config.policy.kind])
        return LoadedPolicy(settle(policy, find_device(config.policy.device)), config, folder)
    # Only the task knows the sizes of a policy that no run has trained.
    info = InProcess().describe(task_spec(config))
    check_described(checked, [info])
    return LoadedPolicy(make_policy(config, policy_spec(config, info)), config, config.policy.init)


def _origin(loaded: LoadedPolicy) -> dict[str, Any]:
    """Digests of what the policy is made of."""
    files = {} if loaded.checkpoint is not None else outside_files(loaded.config.policy)
    return {
        "checkpoint_sha256": None if loaded.checkpoint is None else checkpoint.digest(loaded.checkpoint),
        "files": {option: found["sha256"] for option, found in files.items()},
    }


def _say(text: str) -> None:
    get_console().print(text, markup=False, highlight=False, soft_wrap=True)
