import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Thousands of small operations: with several threads on a busy machine they are up to forty times as slow."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
