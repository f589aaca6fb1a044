"""A drafter's process for tests: what its verifier lends is memory of a fake GPU, and it computes on the CPU."""

from functools import partial
from multiprocessing.connection import Connection

from tests.cluster.fake_cuda import FakeCuda
from wingbeat.deployments.replica.drafters import drafter_calls, drafter_thread


def serve(connection: Connection) -> None:
    """As `drafter_calls.serve`."""
    drafter_thread.may_lend = lambda config: True
    drafter_thread.BorrowedWeights = partial(drafter_thread.BorrowedWeights, runtime=FakeCuda())
    drafter_calls.serve(connection)
