"""A pair across two nodes of a local Ray cluster, as a script: prints what it found as JSON.

Clusters of several raylets need a process of their own: a process has one Ray.
"""

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.conftest import ROOT, App, _free_port, running

NUM_STREAMS = 6
NUM_TOKENS = 220
RESOURCE = "drafters"
NODE = {"num_cpus": 0, "resources": {RESOURCE: 1}, "object_store_memory": 80 * 2**20}
"""Where drafters may run, and no verifier."""
WAIT_S = 120.0


def fields(index: int) -> dict[str, Any]:
    """Of a stream: half of them sample, all have lengths of their own."""
    return {"max_tokens": NUM_TOKENS + 8 * index, "temperature": 0.7 * (index % 2), "seed": index, "timeout": 300}


def read_all(app: App, disturb: Callable[[], object] = lambda: None, **extra: Any) -> list[str]:
    """Texts of streams at once; `disturb` is called when all of them have begun."""
    begun = [threading.Event() for _ in range(NUM_STREAMS)]

    def read(index: int) -> str:
        text = ""
        stream = app.complete(f"def function_{index}(self, name):\n    ", stream=True, extra=extra, **fields(index))
        for chunk in stream:
            text += chunk.choices[0].text
            begun[index].set()
        return text

    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        texts = [threads.submit(read, index) for index in range(NUM_STREAMS)]
        for event in begun:
            event.wait(WAIT_S)
        disturb()
        return [text.result() for text in texts]


def num_drafts(app: App) -> int:
    """Of one request."""
    return app.complete("def main(argv):\n    ").metrics["speculative_decoding"]["num_drafts"]


def seconds_until(condition: Callable[[], bool]) -> float | None:
    """That pass until the condition holds; None where it does not in time."""
    began = time.monotonic()
    while time.monotonic() < began + WAIT_S:
        if condition():
            return round(time.monotonic() - began, 1)
        time.sleep(0.25)
    return None


def scenario(cluster: Cluster, url: str) -> dict[str, Any]:
    """A drafter's node that leaves under load, and another one that comes."""
    found: dict[str, Any] = {}
    node = cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    settings = {"drafter_resources": {RESOURCE: 1}, "num_cpus_per_drafter": 0}
    settings |= {"adaptive": False, "drafter_timeout_s": 2.0}
    with running("pair", url, **settings) as app:
        report = serve.get_deployment_handle("Verifier", "pair").report.remote().result(timeout_s=60)
        found["channel"] = report["channel"]
        plain = read_all(app, speculation={"enabled": False})
        found["speculated"] = read_all(app) == plain
        found["num_drafts"] = num_drafts(app)
        found["node_left"] = read_all(app, lambda: cluster.remove_node(node, allow_graceful=False)) == plain
        found["lost_after_s"] = seconds_until(lambda: app.engine()["drafter_state"] == "lost")
        found["without_a_drafter"] = read_all(app) == plain
        cluster.add_node(**NODE)
        found["back_after_s"] = seconds_until(lambda: app.engine()["drafter_state"] == "attached")
        found["speculated_again"] = read_all(app) == plain
        found["num_drafts_again"] = num_drafts(app)
        found["same_engine"] = app.engine()["num_engine_restarts"] == 0
        app.check_integrity()
    return found


def main() -> None:
    """Print the findings as one line."""
    cluster = Cluster()
    try:
        cluster.add_node(num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": ROOT}})
        port = _free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        print(json.dumps(scenario(cluster, f"http://127.0.0.1:{port}")))
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
