import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small matrices are fastest on one thread, and test runs share their cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
