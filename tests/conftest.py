"""One Ray cluster for every test that needs one, whichever folder it is in."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

# Without a GPU, Triton kernels run in Triton's interpreter. Triton reads this when it is first imported, and some test
# module of any folder may be what imports it.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

TESTS = str(Path(__file__).parent)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of tiny models stay out of the user's cache, and no test finds those of another run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINGBEAT_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The base URL of Serve's proxy on a local Ray, whose workers can import the fakes."""
    import ray
    from ray import serve

    port = _free_port()
    ray.init(
        num_cpus=8,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=200 * 2**20,
        log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": TESTS}},
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
