"""Policies of LeRobot's networks that read pictures and the robot's state (`network_folders`): read, and joined to the
task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from policies.contract import PolicySpec
from policies.lerobot.features import ordered_cameras
from policies.lerobot.network_folders import Layout, Source, find_source, find_units
from policies.robot_policy import RobotPolicy
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS, StoredUnits


class NetworkPolicy(RobotPolicy):
    """A policy of one of LeRobot's directories. A subclass adds the network."""

    source: Source
    config: Any
    """The kind's entries of config.json; those of a new network are completed by the task."""
    pictures: Tensor
    """[cameras, 2, 3] float64: centre and scale of the pictures' units, of numbers in 0..1."""

    def __init__(
        self,
        spec: PolicySpec,
        options: Any,
        layout: Layout,
        for_task: Callable[[Path, Mapping[str, Any], PolicySpec], dict[str, Any]],
    ) -> None:
        """`for_task` completes the config.json of a new network.

        Raises `PolicyError` where the checkpoint, the task and the options do not fit together.
        """
        super().__init__()
        self.source = source = find_source(layout, options.checkpoint, options.weights)
        asset = DEMONSTRATIONS if source.is_new else options.asset
        checkpoint = str(Path(options.checkpoint).resolve()) if options.checkpoint else ""
        self.options = replace(options, checkpoint=checkpoint, asset=asset)
        self.transforms = Transforms(options.transforms)
        if asset == DEMONSTRATIONS:
            self.transforms.check_demonstrated_units()
        seen = self.transforms.spec(spec)
        raw = for_task(source.folder, source.config, seen) if source.is_new else source.config
        self.config = layout.check(source.folder, raw)
        self.check_spec(seen)
        self.cameras = spec.cameras if source.is_new else ordered_cameras(source, spec.cameras)
        robot, pictures = find_units(source, self.config, learned=asset == DEMONSTRATIONS)
        self.units = StoredUnits(robot)
        self.register_buffer("pictures", pictures)

    def check_spec(self, spec: PolicySpec) -> None:
        """Raise `PolicyError` where the network cannot see or do what the task, after the transforms, has."""
        raise NotImplementedError
