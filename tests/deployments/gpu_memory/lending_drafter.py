"""A drafter's process for tests: the memory that its verifier lends is on a fake GPU, and it computes on the CPU."""

from functools import partial
from multiprocessing.connection import Connection

from tests.cluster.channels.cuda.fake_cuda import FakeCuda
from wingbeat.deployments.gpu_memory import lent_weights
from wingbeat.deployments.replica.drafters import drafter_calls


def serve(connection: Connection) -> None:
    """As `drafter_calls.serve`."""
    lent_weights.may_lend = lambda config: True
    lent_weights.BorrowedWeights = partial(lent_weights.BorrowedWeights, runtime=FakeCuda())
    drafter_calls.serve(connection)
