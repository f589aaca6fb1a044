"""A process that starts a scenario's cluster and application, and plays the acts that it reads, one a line.

    python -m tests.chaos.stage 'two pairs'

Answers each line with a line of JSON. The stage is the first process of a PID namespace with a /dev/shm of its own
(`tests.chaos.conftest`): all processes that it starts end with it, and it meets no others.
"""

import json
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# Read when Ray is first imported: a proxy's death is to be noticed soon, and a busy machine takes its time to start.
os.environ |= {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5", "RAY_raylet_start_wait_time_s": "180"}

import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.chaos.processes import APP
from tests.chaos.scenarios import SCENARIOS, SMALL
from tests.chaos.world import World, add_node
from tests.conftest import MODEL, ROOT, running
from tests.ports import free_port
from wingbeat.deployments.parts import first_result


def say(answer: Any) -> None:
    """Print an answer as a line of JSON; Ray may print other lines."""
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Play until there is nothing more to read."""
    scenario = SCENARIOS[sys.argv[1]]
    cluster = Cluster()
    cluster.add_node(num_cpus=4, object_store_memory=80 * 2**20, include_dashboard=False)
    env = {"PYTHONPATH": f"{ROOT}/src:{ROOT}"}  # this checkout, whichever is installed
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": env})
    nodes = {name: add_node(cluster, scenario, name) for name, node in scenario.nodes.items() if not node.is_late}
    port = free_port()
    serve.start(proxy_location=scenario.proxies, http_options={"host": "127.0.0.1", "port": port})
    url = f"http://127.0.0.1:{port}"
    settings = SMALL | scenario.settings
    if scenario.save_model is not None:
        folder = Path(tempfile.mkdtemp(dir=os.environ["RAY_TMPDIR"]))
        scenario.save_model(folder)
        settings |= {"model": folder, "served_model_name": MODEL}
    with (
        first_result("open_door", "127.0.0.1", 0) if scenario.router_at_head else nullcontext() as door,
        running(APP, url, door, **settings) as app,
    ):
        nodes |= {name: add_node(cluster, scenario, name) for name, node in scenario.nodes.items() if node.is_late}
        world = World(scenario, app, f"{url}/{APP}", cluster, nodes)
        say({"started": True})
        for line in sys.stdin:
            say(world.play(line.strip()))
        say(world.shut_down())


if __name__ == "__main__":
    main()
