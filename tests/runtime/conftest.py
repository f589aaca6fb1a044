"""One torch thread for every test of this folder, and the way to the shared builders beside the tests."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def single_thread():
    """Tiny models lose time to a second thread, and one thread sums in one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
