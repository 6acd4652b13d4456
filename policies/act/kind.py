"""The kind `act`: its options and files, and its policies on disk in LeRobot's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.act.config import LAYOUT, ActConfig, checked_config, coefficient_of
from policies.act.policy import Act, ActOptions
from policies.files import CONFIG, checked
from policies.lerobot.network_format import NetworkFormat
from policies.policy_kind import PolicyKind


class ActFormat(NetworkFormat):
    """LeRobot's layout, and units and deviations beside it."""

    layout, beside = LAYOUT, ("pictures", "log_std")

    def chunk_notes(self, architecture: Mapping[str, Any], chunk: int, tasks: Sequence[str]) -> Sequence[str]:
        source = self.source(architecture)
        found = [*super().chunk_notes(architecture, chunk, tasks)]
        coefficient, given = self.ensemble(architecture, chunk), architecture.get("temporal_ensemble")
        if coefficient is not None and given is None:
            found.append(
                f"{source.folder}: evaluations average the predictions of each env step (temporal_ensemble_coeff "
                f"{coefficient:g}): set policy.options.temporal_ensemble to false to evaluate without"
            )
        if source.is_new:
            return found
        config = checked_config(source.folder, source.config)
        if config.temporal_ensemble_coeff is not None and chunk > 1 and given is not False:
            found.append(
                f"{source.folder}: LeRobot averages the predictions of each env step (temporal_ensemble_coeff), and "
                f"policy.chunk is {chunk}: set it to 1 to evaluate so"
            )
        return found

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        source = self.source(architecture)
        known = checked(source.folder / CONFIG, ActConfig, source.config).chunk_size
        return known if not source.is_new or "chunk_size" in source.config else None

    def ensemble(self, architecture: Mapping[str, Any], chunk: int) -> float | None:
        source = self.source(architecture)
        config = checked(source.folder / CONFIG, ActConfig, source.config)
        return coefficient_of(config, architecture.get("temporal_ensemble"), chunk)


ACT = PolicyKind(
    Act,
    ActOptions,
    ActFormat(),
    incidental=frozenset(
        {"checkpoint", "temporal_ensemble", "initial_log_std", "critic_trains_network", "spec.chunk", "spec.horizon"}
    ),
    pretrained=True,
    predicts_more=True,
)
