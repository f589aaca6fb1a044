"""One Ray cluster for all tests of this folder that ask for it, and the way to the shared fakes."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = str(Path(__file__).parents[1])
sys.path.insert(0, TESTS)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with Serve's proxy on a free port; its workers can import the fakes."""
    import ray
    from ray import serve

    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": TESTS}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": _free_port()})
        yield
    finally:
        serve.shutdown()
        ray.shutdown()


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
