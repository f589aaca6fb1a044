"""Load on a running server, its `/metrics` scraped meanwhile, and the main panels of `examples/grafana.json` drawn.

    .venv/bin/python benchmarks/dashboard.py --url http://127.0.0.1:8000 --png dashboard.png

Phases of other concurrency follow each other, so that the figures move. The last page goes beside the picture.
"""

import argparse
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import httpx
from http_load import LoadClient
from prometheus_client.parser import text_string_to_metric_families

SCRAPE_EVERY_S = 1.0
CONCURRENCIES = (1, 4, 12, 2)
PROMPTS = ("class Stack:\n    def __init__(self):\n        ", "def main(", "import os\n\n", "for name in ")


class Scrape(NamedTuple):
    """One page."""

    at_s: float
    values: dict[str, dict[tuple[tuple[str, str], ...], float]]
    """By name and labels."""

    def total(self, name: str, by: str | None = None) -> dict[str, float]:
        """Sums over all labels but one."""
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.values.get(name, {}).items():
            sums["" if by is None else dict(labels).get(by, "")] += value
        return sums


Line = Callable[[Scrape, Scrape], dict[str, float]]
"""From two scrapes in a row to the values of a panel's lines."""


def rate(name: str, by: str | None = None) -> Line:
    """What a sum gains per second."""

    def line(before: Scrape, after: Scrape) -> dict[str, float]:
        # What is not on both pages is of an engine that did not answer for one of them.
        old, new, seconds = before.total(name, by), after.total(name, by), after.at_s - before.at_s
        return {key or name: (new[key] - old[key]) / seconds for key in new.keys() & old.keys()}

    return line


def ratio(over: str, under: str, by: str | None = None, plus: float = 0.0) -> Line:
    """What a sum gains over what another one gains."""

    def line(before: Scrape, after: Scrape) -> dict[str, float]:
        gains, other = rate(over, by)(before, after), sum(rate(under)(before, after).values())
        return {key: plus + gain / other for key, gain in gains.items()} if other else {}

    return line


def gauge(name: str) -> Line:
    """A value as it is."""
    return lambda before, after: {name: sum(after.total(name).values())}


def mean(name: str) -> Line:
    """Of a histogram."""
    return ratio(f"{name}_sum", f"{name}_count")


SPEC = "vllm:spec_decode_num_"
PANELS: tuple[tuple[str, tuple[Line, ...]], ...] = (
    ("requests", (gauge("vllm:num_requests_running"), gauge("vllm:num_requests_waiting"))),
    ("tokens per second", (rate("vllm:generation_tokens_total"), rate("vllm:prompt_tokens_total"))),
    ("mean seconds", (mean("vllm:time_to_first_token_seconds"), mean("vllm:request_queue_time_seconds"))),
    ("acceptance length", (ratio(f"{SPEC}accepted_tokens_total", f"{SPEC}drafts_total", plus=1.0),)),
    (
        "acceptance by position",
        (ratio(f"{SPEC}accepted_tokens_per_pos_total", f"{SPEC}drafts_total", by="position"),),
    ),
    ("nodes per tree", (mean("wingbeat_tree_nodes"),)),
    ("plain rounds per second, by reason", (rate("wingbeat_plain_rounds_total", by="reason"),)),
    ("host seconds per second, by phase", (rate("wingbeat_round_phase_seconds_total", by="phase"),)),
    ("KV in use", (gauge("vllm:kv_cache_usage_perc"),)),
)


class Scraper(threading.Thread):
    """Scrapes a server until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.scrapes: list[Scrape] = []
        self.page = ""
        self._url = f"{url}/metrics"
        self._stopped = threading.Event()

    def run(self) -> None:
        """Once a second."""
        with httpx.Client(timeout=30, trust_env=False) as client:
            while not self._stopped.wait(SCRAPE_EVERY_S):
                self.page = client.get(self._url).raise_for_status().text
                self.scrapes.append(Scrape(time.monotonic(), _values(self.page)))

    def stop(self) -> None:
        """Return after the scrape that is under way."""
        self._stopped.set()
        self.join()


def _values(page: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found


def draw(scrapes: list[Scrape], png: Path) -> None:
    """All panels over time, from at least two scrapes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(3, 3, figsize=(15, 9), layout="constrained")
    for (title, lines), axis in zip(PANELS, axes.flat, strict=True):
        series: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for before, after in pairwise(scrapes):
            for line in lines:
                for name, value in line(before, after).items():
                    series[name].append((after.at_s - scrapes[0].at_s, value))
        for name, points in sorted(series.items()):
            axis.plot(*zip(*points, strict=True), label=name.removeprefix("vllm:").removesuffix("_total"))
        axis.set(title=title, xlabel="s", ylim=(0, None))
        if series:
            axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    figure.savefig(png, dpi=80)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=24, help="per phase")
    parser.add_argument("--png", type=Path, default=Path("dashboard.png"))
    options = parser.parse_args()
    scraper = Scraper(options.url)
    scraper.start()
    with LoadClient() as client:
        model = client.model_name(options.url)
        for phase, concurrency in enumerate(CONCURRENCIES):
            bodies = [
                {
                    "model": model,
                    "prompt": PROMPTS[index % len(PROMPTS)],
                    "max_tokens": 96,
                    "temperature": 0.0 if index % 2 else 0.7,
                    "seed": 100 * phase + index,
                    "ignore_eos": True,
                    "stream_options": {"include_usage": True},
                }
                for index in range(options.requests)
            ]
            block = client.run_block(options.url, bodies, concurrency)
            print(f"{concurrency} at once: {block.tokens_per_s:.0f} tokens/s")
    scraper.stop()
    options.png.with_suffix(".prom").write_text(scraper.page)
    draw(scraper.scrapes, options.png)
    print(f"{len(scraper.scrapes)} scrapes: {options.png}")


if __name__ == "__main__":
    main()
