import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Small matrices are fastest on one thread, and test runs share their cores. Other packages keep theirs."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
