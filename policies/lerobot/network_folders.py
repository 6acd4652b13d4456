"""LeRobot's directories of networks that read pictures and the robot's state (`network_config`): read, and written
again.

    config.json              which network it is
    model.safetensors        the network; before LeRobot 0.4 the statistics, too
    policy_*processor.json   steps and, in files beside them, statistics; from LeRobot 0.4 on

A directory without weights whose config.json has `random_weights`, a seed, is that of a new network: it reads what the
task gives. A policy that is saved here adds `units.safetensors`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from policies.checkpoint_folders import Folders, check_all_is_read, is_random
from policies.contract import PolicyError
from policies.files import CONFIG, INDEX, SINGLE, Shards, shown, write_json, write_tensors
from policies.kinds import check_folders
from policies.lerobot.buffers import BUFFERS, buffer_units
from policies.lerobot.default_steps import default_units, read_default, write_default
from policies.lerobot.network_config import SAVED, NetworkConfig
from policies.lerobot.processors import ACTION, POST, PRE, STATE, Processors
from policies.random_weights import RANDOM_WEIGHTS, empty_network, seed_of
from policies.units import RobotUnits, Units, identity

MOST_DRAWN = 10**9
"""Largest number of weights of a new network."""
IMAGENET = Units(
    torch.tensor([0.485, 0.456, 0.406], dtype=torch.float64), torch.tensor([0.229, 0.224, 0.225], dtype=torch.float64)
)
"""Units of pictures in 0..1 by ImageNet's statistics: those of LeRobot's trainings, and of new networks."""
PIXELS = Units(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
"""Units of pictures in 0..1 that stay as they are."""


class Network(nn.Module):
    """A network whose weights can be drawn."""

    def draw(self) -> None:
        """Draw new weights with torch's default generator, after the constructor has drawn the others."""
        raise NotImplementedError


N = TypeVar("N", bound=Network)


@dataclass(frozen=True)
class Layout:
    """Layout of a kind's directories: names of its tensors, and the functions that read and check config.json."""

    kind: str
    prefix: str
    """Beginning of the names of the network's tensors."""
    read: Callable[[Path, bool], dict[str, Any]]
    """config.json of a folder, saved by this project or not; raises `PolicyError`."""
    check: Callable[[Path, Mapping[str, Any]], NetworkConfig]
    """Its entries; raises `PolicyError`."""


@dataclass(frozen=True)
class Source:
    """One directory."""

    layout: Layout
    folder: Path
    config: Mapping[str, Any]
    """Its config.json."""
    processors: Processors | None
    """None: of LeRobot before 0.4, or a new network's."""

    @property
    def described(self) -> Path:
        """Folder of config.json and processors."""
        return self.folder

    @property
    def is_new(self) -> bool:
        """True if the network's weights are drawn."""
        return RANDOM_WEIGHTS in self.config

    @property
    def rename_map(self) -> dict[str, str]:
        """New names of observations."""
        return {} if self.processors is None else dict(self.processors.rename_map)


def find_source(layout: Layout, checkpoint: str, saved: str = "") -> Source:
    """The directory that the option `checkpoint` names, or the `saved` folder in its place. Reads no tensor.

    Raises `PolicyError` if it is missing or lacks something, and for weights that nothing reads.
    """
    named = saved or checkpoint
    if not named:
        raise PolicyError(f"{layout.kind} needs a checkpoint: set policy.options.checkpoint to its directory")
    check_folders({"checkpoint": named})
    folder = Path(named).resolve()
    raw = layout.read(folder, bool(saved))
    if is_random(folder):
        return Source(layout, folder, raw, None)
    if RANDOM_WEIGHTS in raw:
        raise PolicyError(
            f"{folder / CONFIG}: {RANDOM_WEIGHTS} is {shown(raw[RANDOM_WEIGHTS])}, the seed of a network without "
            "weights, and weights are there: take out the entry, or move the weights away"
        )
    layout.check(folder, raw)
    shards = Shards.find(folder)
    has_processors = (folder / PRE).exists() or (folder / POST).exists()
    older = not has_processors and any(map(BUFFERS.match, shards.files))
    processors = None if older else read_default(folder, raw)
    check_all_is_read(Folders(folder, None, folder), processors, saved=bool(saved))
    return Source(layout, folder, raw, processors)


def load_network(source: Source, make: Callable[[], N]) -> N:
    """The network that `make` constructs, on the CPU. Raises `PolicyError` unless the files have exactly its tensors,
    beside statistics."""
    network = empty_network(source.folder / CONFIG, make)
    if source.is_new:
        return _drawn(source, make, sum(tensor.numel() for tensor in network.state_dict().values()))
    network.load_state_dict(read_weights(source.layout, source.folder, network), assign=True)
    return network.eval()


def read_weights(layout: Layout, folder: Path, network: nn.Module) -> dict[str, Tensor]:
    """Tensors of a directory, by the network's names and of its dtypes. Raises `PolicyError`."""
    own, shards = network.state_dict(), Shards.find(folder)
    stored = {name.replace("._orig_mod.", "."): name for name in shards.files}  # torch.compile puts it into names
    names = {name: stored.get(f"{layout.prefix}{name}", f"{layout.prefix}{name}") for name in own}
    expected = {names[name]: tensor for name, tensor in own.items()}
    found = shards.read({**expected, **shards.empty(name for name in shards.files if BUFFERS.match(name))})
    return {name: found[names[name]].to(tensor.dtype) for name, tensor in own.items()}


def _drawn(source: Source, make: Callable[[], N], count: int) -> N:
    path = source.folder / CONFIG
    seed = seed_of(path, source.config)
    if count > MOST_DRAWN:
        raise PolicyError(f"{path} describes a network of {count} numbers; at most {MOST_DRAWN} are drawn")
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = make()
        network.draw()
    return network.eval()


def find_units(source: Source, config: NetworkConfig, learned: bool) -> tuple[RobotUnits, Tensor]:
    """Units of state and action, and those of pictures [cameras, 2, 3] float64: centre and scale of numbers in 0..1.
    `learned`: state and action stay as they are, until demonstrations give their units.

    Raises `PolicyError` where statistics are missing.
    """
    robot = identity(config.state_dim, config.action_dim)
    found = {key: PIXELS if config.mode_of(key) == "IDENTITY" else IMAGENET for key in config.cameras}
    if not source.is_new:
        found = _read_units(source, config, config.cameras if learned else config.keys)
        robot = robot if learned else RobotUnits(found.get(STATE, robot.state), found[ACTION])
    return robot, torch.stack([torch.stack([found[key].centre, found[key].scale]) for key in config.cameras])


def _read_units(source: Source, config: NetworkConfig, keys: Sequence[str]) -> dict[str, Units]:
    """Units of these pictures, the state and the action. Raises `PolicyError` where statistics are missing."""
    if source.processors is not None:
        found = default_units(source.processors, keys)
    else:
        shards = Shards.find(source.folder)
        found = {key: buffer_units(shards, config.mode_of(key), key) for key in keys}
    sizes = {key: 3 for key in config.cameras} | {STATE: config.state_dim, ACTION: config.action_dim}
    return {key: _of_size(source, key, units, sizes[key]) for key, units in found.items()}


def _of_size(source: Source, key: str, units: Units, size: int) -> Units:
    if units.centre.dim() and len(units.centre) != size:
        raise PolicyError(
            f"{source.folder}: the statistics of {key} are of {len(units.centre)} numbers, and {CONFIG} has {size}: "
            "take both from one training"
        )
    return Units(units.centre.expand(size), units.scale.expand(size))


def save_directory(
    network: nn.Module, source: Source, folder: Path, config: Mapping[str, Any], units: Mapping[str, Units]
) -> None:
    """Write the network, and processors with statistics that give these units."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{source.layout.prefix}{name}": t.detach().cpu().contiguous()
        for name, t in sorted(network.state_dict().items())
    }
    write_tensors(folder / SINGLE, tensors)
    (folder / INDEX).unlink(missing_ok=True)
    left_out = SAVED | {RANDOM_WEIGHTS}
    write_json(folder / CONFIG, {name: value for name, value in config.items() if name not in left_out})
    write_default(folder, config, {name: _on_cpu(each) for name, each in units.items()}, source.rename_map)


def _on_cpu(units: Units) -> Units:
    return Units(units.centre.cpu(), units.scale.cpu())
