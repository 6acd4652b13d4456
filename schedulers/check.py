"""Whether a profile may be used: times belong to a workflow and to the hardware they were measured on."""

from __future__ import annotations

from collections.abc import Mapping

from schedulers.errors import PlanError
from schedulers.profile import Profile
from schedulers.times import check_components
from schedulers.workflow import Workflow


def check_profile(
    profile: Profile, workflow: Workflow, fingerprint: Mapping[str, str] | None, any_hardware: bool = False
) -> None:
    """Raises `PlanError` for a profile of another workflow, or of other hardware unless that is wanted.

    `fingerprint`: of the hardware and software here; None: not known, nothing to compare. The message names every
    entry that differs.
    """
    if profile.workflow != workflow.name:
        raise PlanError(f"the profile is of workflow {profile.workflow!r}, not of {workflow.name!r}; measure that one")
    check_components(workflow, profile)
    if any_hardware or fingerprint is None:
        return
    differs = [
        f"{key}: {profile.fingerprint.get(key, 'not recorded')} in the profile, {fingerprint.get(key, 'unknown')} here"
        for key in sorted({*profile.fingerprint, *fingerprint})
        if profile.fingerprint.get(key) != fingerprint.get(key)
    ]
    if differs:
        raise PlanError(
            f"the profile was measured on other hardware ({'; '.join(differs)}); measure again, "
            "or say that any hardware will do"
        )
