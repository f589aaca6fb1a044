"""Choice of the default run, and a Ray cluster with the real application for every test that needs them."""

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.covering import meeting, spread
from tests.hostile.contract import KEY
from tests.optional import is_gone, words_gone
from tests.ports import free_port
from wingbeat.kernels.disk_cache import cache_dir

# No test asks the Hugging Face hub; huggingface_hub reads this when it is first imported.
os.environ["HF_HUB_OFFLINE"] = "1"

# Tests share the machine with others of theirs: Serve is not to give up a proxy that is slow to start.
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
# Ray's workers yield to all else on their machine unless they are told otherwise.
os.environ.setdefault("RAY_worker_niceness", "0")

ROOT = str(Path(__file__).parents[1])
MODEL = "wingbeat-demo"
STATS_TIMEOUT_S = 60.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--ptx 90`: execute kernels as compiled for that compute capability, and not in Triton's interpreter."""
    parser.addoption("--ptx", type=int, default=None, metavar="CAPABILITY")
    parser.addoption("--ptx-report", type=Path, default=None, help="where to write what was executed, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Without a GPU, Triton kernels run in Triton's interpreter, or their PTX in that of tests/ptx.

    Triton reads this when it is first imported, and some test module of any folder may be what imports it.
    """
    if config.getoption("--ptx") is None and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Tiny models lose time to a second thread, one thread sums in one order, and each worker has its processor.

    A model that a test loads may have chosen several for the process.
    """
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply `few`: of a parametrized test, so many cases stay in the default run, and of the others those in the slow
    one in which two values meet that have not met before."""
    if words_gone() is not None:
        items[:] = [item for item in items if not (hasattr(item, "callspec") and is_gone(item.callspec.params))]
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("few") and hasattr(item, "callspec"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for table in cases.values():
        (count,) = table[0].get_closest_marker("few").args
        # A value is itself wherever it stands in a table; its index may be that of the whole case.
        rows = [{(name, id(value)) for name, value in item.callspec.params.items()} for item in table]
        by_default, by_pairs = set(spread(rows, count)), set(meeting(rows))
        for index in set(range(len(table))) - by_default:
            table[index].add_marker(pytest.mark.slow)
            if index not in by_pairs:
                table[index].add_marker(pytest.mark.soak)


def pytest_collection_finish() -> None:
    """Freeze the collected tests: later garbage collections, frequent with loads of tiny models, skip their objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Libraries look for leaks of theirs at the end."""
    gc.unfreeze()


class App:
    """A running application: its clients, its engines' figures."""

    def __init__(self, name: str, url: str, api_key: str = "none", own_url: str | None = None) -> None:
        # Each run of any test would wait seconds for these.
        import httpx
        import openai

        self.name = name
        self.own_url = own_url
        """Where its router listens itself, as that of `wingbeat serve` does; its clients go through Serve's proxy."""
        self.client = openai.OpenAI(base_url=f"{url}/{name}/v1", api_key=api_key, max_retries=0, timeout=300)
        self.http = httpx.Client(base_url=f"{url}/{name}", headers={"Authorization": f"Bearer {api_key}"}, timeout=60)

    def complete(self, prompt: Any, client: Any = None, **fields: Any) -> Any:
        """A completion, 48 tokens and greedy unless the fields say otherwise; extensions go in `extra`."""
        extra = {"ignore_eos": True, **fields.pop("extra", {})}
        body = {"model": MODEL, "prompt": prompt, "max_tokens": 48, "temperature": 0, **fields}
        return (client or self.client).completions.create(**body, extra_body=extra)

    def text(self, prompt: Any, **fields: Any) -> str:
        """The text of a completion's first choice."""
        return self.complete(prompt, **fields).choices[0].text

    def engines(self) -> dict[str, dict[str, Any]]:
        """Stats by engine id; asks until each running engine has answered."""
        from ray import serve

        handle = serve.get_deployment_handle("Verifier", self.name)
        states = serve.status().applications[self.name].deployments["Verifier"].replica_states
        found: dict[str, dict[str, Any]] = {}
        for _ in range(200):
            stats = handle.stats.remote().result(timeout_s=STATS_TIMEOUT_S)
            found[stats["engine_id"]] = stats
            if len(found) >= states.get("RUNNING", 0):
                break
        return found

    def engine(self) -> dict[str, Any]:
        """Stats of the only engine."""
        (stats,) = self.engines().values()
        return stats

    def check_integrity(self) -> None:
        """Raises where an engine's KV blocks do not add up."""
        from ray import serve

        serve.get_deployment_handle("Verifier", self.name).check_integrity.remote().result(timeout_s=STATS_TIMEOUT_S)

    def close(self) -> None:
        """Close the clients."""
        self.client.close()
        self.http.close()


@contextmanager
def running(name: str, url: str, door: Any = None, **args: Any) -> Iterator[App]:
    """The application of these arguments, for as long as the block lasts; its router listens at the door as well."""
    from ray import serve

    from wingbeat.deployments.app import build_at
    from wingbeat.deployments.app_config import AppConfig

    key, own_url = (None, None) if door is None else (door.key, f"http://{door.key.host}:{door.port}")
    serve.run(build_at(AppConfig(**args), key), name=name, route_prefix=f"/{name}")
    app = App(name, url, args.get("api_key", "none"), own_url)
    try:
        yield app
    finally:
        app.close()
        serve.delete(name)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Measurements of tiny models stay out of the user's cache, and no test finds those of another run.

    The CPU's kernels are the user's own: they are named by what they were compiled from.
    """
    kernels, own = cache_dir() / "kernels", tmp_path_factory.mktemp("cache")
    kernels.mkdir(parents=True, exist_ok=True)
    (own / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WINGBEAT_CACHE_DIR", str(own))
        yield


@pytest.fixture
def hang() -> Iterator[Callable[..., None]]:
    """A call that does not return before its test is over; it raises then, so that nothing goes on behind other tests.

    Whoever gives a call up leaves its thread: an engine that came back to life there would be running rounds.
    """
    is_over, threads = threading.Event(), []

    def wait(*args: Any) -> None:
        threads.append(threading.current_thread())
        is_over.wait()
        raise RuntimeError("the test is over")

    yield wait
    is_over.set()
    for thread in threads:
        thread.join(60.0)
        assert not thread.is_alive(), f"{thread.name} goes on behind the test"


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The base URL of Serve's proxy on a local Ray, whose workers can import the fakes."""
    import ray
    from ray import serve

    from wingbeat.deployments.ray_cluster import head_for_serving

    port = free_port()
    with head_for_serving():
        ray.init(
            num_cpus=8,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            log_to_driver=False,
            # This checkout, whichever is installed.
            runtime_env={"env_vars": {"PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"}},
        )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


@pytest.fixture(scope="session")
def start_app(ray_cluster: str) -> Callable[..., Any]:
    """Starts another application: `with start_app(name, **args) as app`."""
    return lambda name, **args: running(name, ray_cluster, **args)


@pytest.fixture(scope="session")
def demo_app(ray_cluster: str) -> Iterator[App]:
    """The demo pair with its EAGLE head behind a key; a stuck drafter is noticed sooner than `make serve` does.

    Trees and threads are fixed: on a machine busy with tests the measured costs may well say that speculation does not
    pay, or that a second thread does.
    """
    from wingbeat.deployments.parts import first_result

    settings = {"api_key": KEY, "drafter_timeout_s": 2.0, "adaptive": False, "threads": 1}
    door = first_result("open_door", "127.0.0.1", free_port())
    with door or nullcontext(), running("demo", ray_cluster, door, **settings) as app:
        yield app


@pytest.fixture(scope="session")
def until() -> Callable[..., None]:
    """Waits for a condition: `until(condition, timeout_s)`."""

    def wait(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, "the condition never came true"
            time.sleep(0.1)

    return wait
