"""The suite, as pytest collects it: each law over the policy that `--policy` names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from policies import Inputs, Policy
from policies.conformance.laws import Law
from policies.conformance.promises import PROMISES, require_applicable


@pytest.mark.parametrize("law", [law for promise in PROMISES for law in promise.laws], ids=lambda law: law.__name__)
def test_law(law: Law, policy: Policy, inputs: Inputs, record_property: Callable[[str, object], None]) -> None:
    record_property("law", law.__name__)
    require_applicable(law, policy)
    law(policy, inputs)
