"""A minute of a real Prometheus over a server under load: which queries of `examples/grafana.json` have no series.

    .venv/bin/python benchmarks/dashboard_queries.py --url http://127.0.0.1:8000

Needs Debian's package `prometheus`. The server is started with `--lora-update-dir`, so that figures of adapters are
there. Ends with 1 where a query is empty that has a series on this kind of machine.
"""

import argparse
import sys
import threading
import time
from urllib.parse import urlsplit

from http_load import LoadClient
from prometheus import ON_GPUS_ALONE, Prometheus, dashboard_queries
from servers import free_port

CONCURRENCY = 4
REQUESTS = 8
"""Per turn of the load."""


def load(url: str, model: str, ended: threading.Event) -> None:
    """Turns of requests, until the event is set."""
    turn = 0
    with LoadClient() as client:
        while not ended.is_set():
            turn += 1
            bodies = [
                {
                    "model": model,
                    "prompt": f"# {turn}\nclass Stack{index % 3}:\n    def __init__(self):\n        ",
                    "max_tokens": 64,
                    "temperature": 0.0 if index % 2 else 0.7,
                    "seed": 100 * turn + index,
                    "stream_options": {"include_usage": True},
                }
                for index in range(REQUESTS)
            ]
            client.run_block(url, bodies, CONCURRENCY)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, under which Prometheus scrapes")
    options = parser.parse_args()
    queries, ended = dashboard_queries(), threading.Event()
    with LoadClient() as client:
        model = client.model_name(options.url)
    with Prometheus(urlsplit(options.url).netloc, free_port()) as prometheus:
        thread = threading.Thread(target=load, args=(options.url, model, ended), daemon=True)
        thread.start()
        time.sleep(options.seconds)
        empty, names, error = prometheus.empty(queries), prometheus.names(), prometheus.last_error()
        ended.set()
        thread.join()
    on_gpus = [query for query in empty if any(name in query for name in ON_GPUS_ALONE)]
    num_own = sum(name.startswith("vllm:") for name in names)
    print(f"{len(names)} names stored, {num_own} of them vLLM's; last scrape: {error or 'without an error'}")
    print(f"{len(queries)} queries: {len(empty)} empty, {len(on_gpus)} of them of GPUs alone")
    for query in empty:
        print(f"  {'GPUs alone' if query in on_gpus else 'EMPTY'}: {query}")
    sys.exit(bool(error) or len(empty) > len(on_gpus))


if __name__ == "__main__":
    main()
