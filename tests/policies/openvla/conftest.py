from pathlib import Path

import pytest

from tests.policies.openvla.tiny import write_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """A tiny checkpoint directory, to be read only."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "checkpoint", seed=1)
