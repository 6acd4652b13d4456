"""The kind `pi0`: its options and files, and its policies on disk in openpi's and LeRobot's layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from policies.checkpoint_folders import is_random
from policies.files import ADAPTER_CONFIG, CONFIG, read_json
from policies.flow_vla.format import ADAPTER_NOTE, INCIDENTAL, FlowVLAFormat
from policies.flow_vla.options import executed, predicted
from policies.lerobot.config import autocast_notes
from policies.lerobot.loading import loaded_by_lerobot
from policies.lerobot.statistics import write_lerobot
from policies.pi0.checkpoint import find_sources, is_adaptive, read_weights, save_description, save_directory
from policies.pi0.config import ARCHITECTURE
from policies.pi0.normalisation import dataset_of, normalisations, openpi_default, openpi_statistics, write_openpi
from policies.pi0.options import AUTO, Pi0Options
from policies.pi0.policy import Pi0
from policies.policy_kind import LoadedBy, PolicyKind
from policies.transforms import Differences, Transforms
from policies.units import DEMONSTRATIONS, RobotUnits, identity

OPENPI = "15a9616"
"""The commit whose PyTorch network computed what the tests compare with."""
OPENPI_LINES = """
from openpi.policies.policy_config import create_trained_policy
from openpi.training.config import get_config

policy = create_trained_policy(get_config(name), folder)
""".strip()
OPENPI_NOTE = (
    "`name` is openpi's configuration whose transforms and asset_id are those below. The network's outputs were "
    "compared with openpi's; these lines were not run."
)


class Pi0Format(FlowVLAFormat):
    """The layout of the checkpoint's, openpi's or LeRobot's; an adapter alone in PEFT's; the units beside either."""

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        Transforms(architecture.get("transforms", ()))
        find_sources(architecture.get("checkpoint", ""), architecture.get("adapter", ""))

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        source = find_sources(architecture.get("checkpoint", ""), architecture.get("adapter", ""))
        if is_random(source.weights):
            return ()
        adaptive = is_adaptive(source.weights)
        learned = architecture.get("asset") == DEMONSTRATIONS
        transforms = Transforms(architecture.get("transforms", ()))
        found = autocast_notes(source.described / CONFIG, source.config)
        if source.layout == "openpi" and not learned:
            path, statistics = openpi_statistics(source.described, architecture.get("asset", ""))
            if architecture.get("normalisation", AUTO) == AUTO and len(normalisations(statistics)) > 1:
                taken, other = openpi_default(adaptive), openpi_default(not adaptive)
                found.append(
                    f"{path} has statistics for z-scores and for quantiles, and no file says which the training used: "
                    f"{taken} is taken, openpi's default for {'pi0.5' if adaptive else 'pi0'}; "
                    f"policy.options.normalisation: {other} is the other"
                )
            if not any(isinstance(entry, Differences) for entry in transforms.entries):
                found.append(
                    f"no file of {source.weights} says whether its actions are differences to the state: they are "
                    "taken as they are. openpi's pi0_libero, and its configurations of ALOHA, say differences: set "
                    "policy.options.transforms to [{kind: delta_actions, dims: 6}] for them"
                )
        unmatched = () if source.processors is None else source.processors.unmatched_joints
        if unmatched:
            found.append(
                f"{source.described}: the step of relative actions excludes {', '.join(unmatched)}, "
                "which is in none of its action_names: these numbers are taken as relative too, as LeRobot does. Name "
                "the actions in both processors' files if the policy was trained otherwise"
            )
        newer = source.config.keys() & {"use_relative_actions", "pretrained_revision"}
        if source.layout == "lerobot" and not newer and not architecture.get("prompt"):
            found.append(
                f"{source.described / CONFIG} does not say which LeRobot trained it, and 0.5 or later is taken. 0.4 "
                "had other sides of pictures that are not square, and filled up the state in prompts of pi0.5: set "
                "policy.options.prompt to lerobot-0.4 for it"
            )
        return found

    def executed(self, architecture: Mapping[str, Any]) -> int | None:
        source = find_sources(architecture.get("checkpoint", ""), architecture.get("adapter", ""))
        return executed(source.described, source.config) if source.layout == "lerobot" else None

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        return predicted(find_sources(architecture.get("checkpoint", ""), architecture.get("adapter", "")).config)

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("type") in ("pi0", "pi05") or ("type" not in config and "action_horizon" in config)

    def statistics_name(self, architecture: Mapping[str, Any]) -> str | None:
        name = architecture.get("asset") or dataset_of(Path(architecture.get("checkpoint", "")))
        return None if name == DEMONSTRATIONS else name

    def read_network(self, policy: Pi0, folder: Path) -> dict[str, Tensor]:
        return read_weights(folder, policy.network)

    def export(self, policy: Pi0, folder: Path) -> None:
        """Write a directory in the layout of the checkpoint's, adapter added, with its configuration and tokenizer, and
        its statistics or those of the demonstrations."""
        save_directory(policy.network, policy.source, folder, policy.description(), ours=False)
        if policy.options.asset == DEMONSTRATIONS:
            # Readers of the files want statistics of a state, also where the policy reads none.
            state = policy.units.state if policy.spec.proprio_dim else identity(policy.sizes.action_dim, 0).state
            (write_lerobot if policy.layout == "lerobot" else write_openpi)(
                folder, RobotUnits(state, policy.units.action)
            )

    def loaded_by(self, folder: Path) -> LoadedBy:
        if (folder / ADAPTER_CONFIG).exists():
            return LoadedBy(note=ADAPTER_NOTE)
        config = read_json(folder / CONFIG)
        if ARCHITECTURE in config:
            return LoadedBy(note="openpi and LeRobot know the published sizes alone, and this network has others")
        if "type" in config:
            return loaded_by_lerobot(config["type"], "LeRobot fetches PaliGemma's tokenizer from the hub.")
        return LoadedBy(f"openpi (commit {OPENPI})", "openpi", OPENPI_LINES, OPENPI_NOTE)

    def describe(self, policy: Pi0, folder: Path) -> None:
        if policy.source.described == policy.source.adapter:  # it is not the base that says what the numbers are
            save_description(policy.source, folder, policy.description(), ours=True)

    def write_whole(self, policy: Pi0, folder: Path) -> None:
        save_directory(policy.network, policy.source, folder, policy.description(), ours=True)


PI0 = PolicyKind(
    Pi0,
    Pi0Options,
    Pi0Format(),
    incidental=INCIDENTAL | {"normalisation"},
    pretrained=True,
    predicts_more=True,
)
