"""Where a round's time goes: its phases, the hop to the drafter, and the cost of actors and channel around it."""

import multiprocessing
import os
import time
from contextlib import closing
from typing import Any, NamedTuple

from http_load import LoadClient
from local_engine import greedy
from report import Table, middle, spread
from servers import App
from workload import Prompt

from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.protocol.messages import ChannelSpec

DRAFT = "draft_wait_s"
MODEL_PHASES = frozenset({DRAFT, "verify_s", "forward_s"})
"""Phases dominated by a model's arithmetic; the hop to the drafter and back is subtracted."""
LABELS = {
    DRAFT: "draft, as far as the verifier waits",
    "verify_s": "verify and accept",
    "forward_s": "verify",
    "accept_s": "accept",
    "publish_s": "publish",
    "schedule_s": "host: schedule",
    "update_s": "host: update",
}


class RoundTimes(NamedTuple):
    """Milliseconds per round."""

    num_rounds: int
    phases_ms: dict[str, float]
    """Milliseconds by the engine's phase names; the hop is subtracted from the wait for the drafter."""
    hop_ms: float
    outside_ms: float
    """Time between rounds: delivery, new requests, and other delays before the engine's next round."""

    @property
    def round_ms(self) -> float:
        """Milliseconds of a round, without the time between rounds."""
        return sum(self.phases_ms.values()) + self.hop_ms

    @property
    def share_not_model(self) -> float:
        """Share of the round that is not drafting or verifying."""
        model = sum(ms for name, ms in self.phases_ms.items() if name in MODEL_PHASES)
        return 1.0 - model / self.round_ms if self.round_ms else 0.0


def between(before: dict[str, Any], after: dict[str, Any], elapsed_s: float, hop_s: float) -> RoundTimes:
    """Times of the rounds between two snapshots of an engine's `phases`.

    Args:
        elapsed_s: time between the snapshots, during which the engine always had work.
        hop_s: duration of an empty round trip to the drafter.
    """
    num_rounds = after["num_rounds"] - before["num_rounds"]
    names = [name for name in after if name.endswith("_s")]
    per_round = {name: (after[name] - before[name]) / max(1, num_rounds) for name in names}
    inside_s = sum(per_round.values())
    hop_s = min(hop_s, per_round.get(DRAFT, 0.0))
    if DRAFT in per_round:
        per_round[DRAFT] -= hop_s
    outside_s = max(0.0, elapsed_s / max(1, num_rounds) - inside_s)
    return RoundTimes(num_rounds, {name: 1e3 * s for name, s in per_round.items()}, 1e3 * hop_s, 1e3 * outside_s)


def round_table(columns: dict[str, RoundTimes], title: str) -> Table:
    """Table with one column per measurement and one row per phase."""
    times = list(columns.values())
    rows = [("rounds", *(str(one.num_rounds) for one in times))]
    for name in times[0].phases_ms:
        label = LABELS.get(name, name.removesuffix("_s"))
        if name == "verify_s" and "accept_s" in times[0].phases_ms:
            label = LABELS["forward_s"]
        rows.append((label, *(f"{one.phases_ms[name]:.3f}" for one in times)))
    rows.append(("hop to the drafter and back", *(f"{one.hop_ms:.3f}" for one in times)))
    rows.append(("a round", *(f"{one.round_ms:.3f}" for one in times)))
    rows.append(("between rounds", *(f"{one.outside_ms:.3f}" for one in times)))
    rows.append(("share of a round that is not model work", *(f"{one.share_not_model:.1%}" for one in times)))
    return Table(title, ("ms per round", *columns), rows)


SPEC = ChannelSpec(
    num_slots=16,
    num_nodes=32,
    max_path=8,
    max_prefill_tokens=256,
    taps_size=768,
    max_model_len=2048,
    max_blocks_per_seq=128,
    block_size=16,
    num_blocks=2048,
)
HOP_ROUNDS, WARM_UP = 200, 20
THINK_S = 5e-3
"""Seconds between two rounds, about those of a forward pass: the drafter waits as long as in real rounds."""


def measure_hop_s() -> float:
    """Median seconds of an empty round trip through shared memory to a second process, which answers immediately.

    Raises:
        RuntimeError: the drafter's process does not answer.
    """
    name = f"hop-{os.getpid()}"
    verifier = ShmChannel.create(name, SPEC).verifier_end
    drafter = multiprocessing.get_context("spawn").Process(target=_answer_rounds, args=(name,))
    drafter.start()
    while not verifier.peer_alive():
        if not drafter.is_alive():
            raise RuntimeError(f"the drafter's process ended with status {drafter.exitcode}")
        time.sleep(0.01)
    times = []
    for _ in range(HOP_ROUNDS):
        until = time.perf_counter() + THINK_S
        while time.perf_counter() < until:
            time.sleep(0)
        verifier.acquire_outcome(1.0)
        started = time.perf_counter()
        if verifier.wait_reply(verifier.publish_outcome(), 1.0) is None:
            raise RuntimeError("the drafter did not answer within a second")
        times.append(time.perf_counter() - started)
    verifier.close()
    drafter.join()
    return middle(times[WARM_UP:])


def _answer_rounds(name: str) -> None:
    end = ShmChannel.attach(name, incarnation=1)
    while not end.closed:
        if end.wait_outcome(0.1) is not None:
            end.publish_reply()


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
