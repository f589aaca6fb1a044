"""Extra time of a round behind actors and channel, compared with the same engine in this process."""

import time
from contextlib import closing
from typing import Any, NamedTuple

from http_load import LoadClient
from local_engine import greedy
from report import Table, middle, spread
from servers import App
from workload import Prompt

from wingbeat.runtime.llm import LLM


class Rounds(NamedTuple):
    """Rounds of one request, from its first token to its last."""

    num_rounds: int
    elapsed_s: float
    engine_s: float
    """Time within the engine's rounds in seconds, including the first round (the prompt's)."""

    @property
    def ms(self) -> float:
        """Milliseconds per round, including all time between two tokens as the client sees them."""
        return 1e3 * self.elapsed_s / max(1, self.num_rounds)

    @property
    def engine_ms(self) -> float:
        """Milliseconds per round from its scheduling to its last update, without the time between rounds."""
        return 1e3 * self.engine_s / (self.num_rounds + 1)


class Overhead(NamedTuple):
    """Measurements of both ways, prompt by prompt."""

    way: str
    local: list[Rounds]
    remote: list[Rounds]

    def extra_ms(self) -> list[float]:
        """Extra milliseconds per round behind actors and channel, by prompt."""
        return [remote.ms - local.ms for local, remote in zip(self.local, self.remote, strict=True)]

    def extra_engine_ms(self) -> list[float]:
        """Part of the extra milliseconds that is spent within rounds: the hop, and contention."""
        return [remote.engine_ms - local.engine_ms for local, remote in zip(self.local, self.remote, strict=True)]

    def row(self) -> tuple[str, ...]:
        """Table row with medians and ranges over the prompts."""
        local, remote = [one.ms for one in self.local], [one.ms for one in self.remote]
        return (self.way, *(spread(times, 2) for times in (local, remote, self.extra_ms(), self.extra_engine_ms())))

    def figures(self) -> dict[str, Any]:
        """Measurements for the JSON file."""
        return {
            "way": self.way,
            "extra_ms_per_round": middle(self.extra_ms()),
            "extra_ms_within_a_round": middle(self.extra_engine_ms()),
            "local": [one._asdict() for one in self.local],
            "remote": [one._asdict() for one in self.remote],
        }


def overhead_table(ways: list[Overhead]) -> Table:
    """Table with one row per way of delivering the answers."""
    columns = ("answers", "in process ms", "behind actors and channel ms", "more ms", "of it within the rounds ms")
    note = "Per round, median (range) over single requests; a request's rounds last from its first token to its last."
    return Table("A round in process and behind actors", columns, [way.row() for way in ways], note)


def measure_overhead(
    way: str, app: App, client: LoadClient, llm: LLM, bodies: list[dict[str, Any]], prompts: list[Prompt]
) -> Overhead:
    """Runs each prompt by itself, in this process and then behind the application.

    The first is run twice as a warm-up.
    """
    local, remote = [], []
    for body, prompt in zip([bodies[0], *bodies], [prompts[0], *prompts], strict=True):
        local.append(_local_rounds(llm, prompt, body["max_tokens"]))
        remote.append(_remote_rounds(app, client, body))
    # If the first token is no whole character yet, two messages become one piece of text and no time is measurable.
    pairs = [(here, there) for here, there in zip(local[1:], remote[1:], strict=True) if there.elapsed_s]
    return Overhead(way, [here for here, _ in pairs], [there for _, there in pairs])


def _local_rounds(llm: LLM, prompt: Prompt, max_tokens: int) -> Rounds:
    before = llm.engine.stats().phases
    first = last = 0.0
    with closing(llm.stream([prompt.token_ids], [greedy(max_tokens)])) as outputs:
        for _ in outputs:
            last = time.perf_counter()
            first = first or last
    after = llm.engine.stats().phases
    return Rounds(after.num_rounds - before.num_rounds - 1, last - first, _sum(vars(after)) - _sum(vars(before)))


def _remote_rounds(app: App, client: LoadClient, body: dict[str, Any]) -> Rounds:
    before = app.stats()["phases"]
    (trace,) = client.run_block(app.url, [body], 1).traces
    after = app.stats()["phases"]
    num_rounds = after["num_rounds"] - before["num_rounds"] - 1
    return Rounds(num_rounds, trace.latency_s - trace.ttft_s, _sum(after) - _sum(before))


def _sum(phases: dict[str, Any]) -> float:
    return sum(value for name, value in phases.items() if name.endswith("_s"))
