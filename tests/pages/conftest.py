"""The wheel that the pages' commands run from."""

from tests.test_installed import archive, installed, source, wheel  # noqa: F401 - fixtures
