"""The suite, as pytest collects it: each law over the task that `--backend` names."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sim_farm.conformance.checks import Law, name_of
from sim_farm.conformance.promises import PROMISES, declared, require_applicable
from sim_farm.contract import TaskSpec


@pytest.mark.parametrize("law", [law for promise in PROMISES for law in promise.laws], ids=name_of)
def test_law(law: Law, task: TaskSpec, record_property: Callable[[str, object], None]) -> None:
    record_property("law", law.__name__)
    record_property("declared", declared(law, task))
    require_applicable(law, task)
    law(task)
