"""The remote channel over loopback compared with shared memory, and the network delay up to which speculation pays.

    .venv/bin/python benchmarks/remote_channel.py [--delays 0.2,1,2,5] [--output FILE]

1. Hop: time from publishing a round to receiving its trees, from a drafter in a second process that answers
immediately. Rounds are those of 1 and of 16 sequences of the demo pair that have accepted 3 tokens each.
2. Pair: tokens/s of the demo pair, plain and as the policy decides, turn by turn. A proxy in this script delays the
connection to the drafter more from row to row; the engine is not informed.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from delaying_proxy import DelayingProxy
from local_engine import greedy, quiet
from process_engine import generate, process_engine
from report import RESULTS, Report, Table, machine_facts, middle, model_facts
from workload import describe, held_out_prompts

from wingbeat.cluster.channels.channel import VerifierSide
from wingbeat.cluster.channels.header import ChannelName
from wingbeat.cluster.channels.shm import ShmChannel
from wingbeat.cluster.channels.tcp.remote_channel import RemoteChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.engine.outcome_writer import OutcomeWriter
from wingbeat.runtime.protocol.messages import AcceptedPaths, ChannelSpec
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer

SPEC = ChannelSpec(
    num_slots=16,
    num_nodes=16,
    max_path=8,
    max_prefill_tokens=512,
    taps_size=768,
    max_model_len=2048,
    max_blocks_per_seq=129,
    block_size=16,
    num_blocks=2048,
)
NUM_ACCEPTED, CONTEXT = 3, 1024
HOST = "127.0.0.1"


def answer_rounds(connection: Connection) -> None:
    """Entry point of a drafter process: sends full trees immediately."""
    torch.set_num_threads(1)
    name = connection.recv()
    end = ShmChannel.attach(name, 1) if isinstance(name, str) else RemoteChannel.attach(name, 1)
    connection.send(None)
    while not end.closed:
        if end.wait_outcome(0.1) is not None:
            end.reply.num_valid.fill_(SPEC.num_nodes)
            end.publish_reply()
    end.close()


def round_trip_us(verifier: VerifierSide, num_seqs: int, length: int) -> float:
    """Microseconds from publishing a round, filled beforehand, to receiving its trees."""
    outcome = verifier.acquire_outcome(10.0)
    slots, tokens = torch.arange(num_seqs), torch.zeros(num_seqs, SPEC.max_path, dtype=torch.int64)
    lens = torch.full((num_seqs,), NUM_ACCEPTED)
    taps = torch.zeros(num_seqs, NUM_ACCEPTED, SPEC.taps_size)
    writer = OutcomeWriter(outcome)
    writer.decodes(slots.tolist(), AcceptedPaths(slots, lens, tokens, lens, lens, tokens, taps))
    outcome.epochs.fill_(1)
    outcome.committed_lens.fill_(length)
    writer.finish(slots.tolist(), SPEC.max_path - 1)
    began = time.perf_counter()
    if verifier.wait_reply(verifier.publish_outcome(), 10.0) is None:
        raise RuntimeError("the drafter did not answer")
    return 1e6 * (time.perf_counter() - began)


class Hop:
    """Channel to a drafter process that answers immediately."""

    def __init__(self, remote: bool, proxied: bool = False) -> None:
        self.channel = RemoteChannel(HOST, SPEC) if remote else ShmChannel.create(f"hop-{time.time_ns()}", SPEC)
        name, self.proxy = self.channel.name, None
        if proxied:
            self.proxy = DelayingProxy(name.port)
            name = name._replace(port=self.proxy.port)
        connection, other = multiprocessing.get_context("spawn").Pipe()
        self.process = multiprocessing.get_context("spawn").Process(target=answer_rounds, args=(other,), daemon=True)
        self.process.start()
        connection.send(name)
        connection.recv()
        self.length = CONTEXT

    def measure(self, num_seqs: int, rounds: int) -> list[float]:
        """Measures round trips; histories grow as with accepted tokens."""
        times = []
        for _ in range(rounds):
            self.length = CONTEXT if self.length > SPEC.max_model_len - 8 else self.length + NUM_ACCEPTED
            times.append(round_trip_us(self.channel.verifier_end, num_seqs, self.length))
        return times

    def close(self) -> None:
        """Ends the drafter process."""
        self.channel.verifier_end.close()
        self.process.join(10)


def measure_hops(delays_ms: list[float], rounds: int) -> list[dict[str, Any]]:
    """Round trips by kind of channel, in turns, then through the proxy by delay."""
    shm, direct, proxied = Hop(remote=False), Hop(remote=True), Hop(remote=True, proxied=True)
    found = []
    for num_seqs in (1, 16):
        times: dict[str, list[float]] = {}
        for _ in range(6):  # the first turn is a warm-up
            for name, hop in (("shm", shm), ("remote", direct)):
                times.setdefault(name, []).append(statistics.median(hop.measure(num_seqs, rounds)))
        for name, medians in times.items():
            found.append({"channel": name, "sequences": num_seqs, "us": [round(us, 1) for us in medians[1:]]})
        for delay in delays_ms:
            proxied.proxy.delay_s = delay / 1e3
            few = max(10, int(rounds / (1 + 4 * delay)))
            medians = [statistics.median(proxied.measure(num_seqs, few)) for _ in range(3)]
            name = f"remote, {delay:g} ms each way"
            found.append({"channel": name, "sequences": num_seqs, "us": [round(us, 1) for us in medians[1:]]})
    for hop in (shm, direct, proxied):
        hop.close()
    return found


async def turn(client: Any, prompts: list[list[int]], num_tokens: int, speculation: bool) -> tuple[float, dict, list]:
    """Runs prompts one by one; returns tokens per second, the policy's decisions meanwhile, and the tokens."""
    before = (await client.call("figures")).stats
    began, tokens = time.perf_counter(), []
    for prompt in prompts:
        tokens += await generate(client, [prompt], greedy(num_tokens, speculation))
    elapsed = time.perf_counter() - began
    after = (await client.call("figures")).stats
    decided = {
        reason: count - before["policy"]["decisions"].get(reason, 0)
        for reason, count in after["policy"]["decisions"].items()
    }
    wait_s = after["phases"]["draft_wait_s"] - before["phases"]["draft_wait_s"]
    rounds = after["phases"]["num_rounds"] - before["phases"]["num_rounds"]
    figures = {"decisions": decided, "draft_wait_ms": 1e3 * wait_s / rounds, "rounds": rounds}
    return sum(map(len, tokens)) / elapsed, figures | {"levels": after["policy"]["levels"]}, tokens


async def measure_row(client: Any, name: str, prompts: list, args: argparse.Namespace) -> dict[str, Any]:
    """Measures plain and decided turns at one delay; the first turns, in which the policy adapts, are not counted."""
    for _ in range(2):
        await turn(client, prompts, args.tokens, speculation=True)
    rates: dict[bool, list[float]] = {False: [], True: []}
    decisions: dict[str, int] = {}
    waits, texts = [], {}
    for _ in range(args.turns):
        for speculation in (False, True):
            rate, figures, texts[speculation] = await turn(client, prompts, args.tokens, speculation)
            rates[speculation].append(round(rate, 1))
            if speculation:
                waits.append(figures["draft_wait_ms"])
                for reason, count in figures["decisions"].items():
                    decisions[reason] = decisions.get(reason, 0) + count
    if texts[False] != texts[True]:
        raise RuntimeError(f"{name}: plain and decided tokens differ")
    decided = sum(decisions.get(reason, 0) for reason in ("plain", "speculate", "probe_plain", "probe_draft"))
    return {
        "channel": name,
        "plain_tokens_per_s": rates[False],
        "tokens_per_s": rates[True],
        "gain": round(middle(rates[True]) / middle(rates[False]), 3),
        "draft_wait_ms_per_round": round(middle(waits), 2),
        "drafted_share": round(decisions.get("speculate", 0) / max(decided, 1), 3),
        "decisions": decisions,
    }


async def measure_pairs(delays_ms: list[float], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures a pair over shared memory, then over TCP, then through the proxy with rising delay."""
    settings = {"max_model_len": 512, "max_num_seqs": 4, "enable_prefix_caching": False}
    config = AppConfig(**settings)
    tokenizer = Tokenizer.load(config.model_dir())
    prompts = [prompt.token_ids for prompt in held_out_prompts(tokenizer, stdlib_root(), args.prompts)]
    rows, proxies = [], []

    def reach(name: ChannelName) -> ChannelName:
        proxies.append(DelayingProxy(name.port))
        return name._replace(port=proxies[-1].port)

    async with process_engine(config, shares_core=False) as client:
        rows.append(await measure_row(client, "shm", prompts, args))
    async with process_engine(config, HOST, shares_core=False) as client:
        rows.append(await measure_row(client, "remote", prompts, args))
    async with process_engine(config, HOST, reach, shares_core=False) as client:
        for delay in delays_ms:
            proxies[-1].delay_s = delay / 1e3
            rows.append(await measure_row(client, f"remote, {delay:g} ms each way", prompts, args))
    return rows


def tables(hops: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> list[Table]:
    """Tables of hops and of pairs."""
    by_kind: dict[str, dict[int, float]] = {}
    for hop in hops:
        by_kind.setdefault(hop["channel"], {})[hop["sequences"]] = middle(hop["us"])
    hop_rows = [(name, f"{found[1]:.0f}", f"{found[16]:.0f}") for name, found in by_kind.items()]
    pair_rows = [
        (
            row["channel"],
            f"{middle(row['plain_tokens_per_s']):.0f}",
            f"{middle(row['tokens_per_s']):.0f}",
            f"{row['gain']:.2f}",
            f"{row['draft_wait_ms_per_round']:.1f}",
            f"{row['drafted_share']:.0%}",
        )
        for row in pairs
    ]
    return [
        Table("A round to the drafter and back, us", ("channel", "1 sequence", "16 sequences"), hop_rows),
        Table(
            "One request at a time",
            ("channel", "plain, tokens/s", "decided, tokens/s", "ratio", "wait per round, ms", "rounds drafted"),
            pair_rows,
        ),
    ]


def main() -> None:
    """Measures, prints and saves."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--delays", default="0.2,1,2,5", help="one-way delays in milliseconds, comma-separated")
    parser.add_argument("--rounds", type=int, default=200, help="rounds per turn of the hop measurement")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--quick", action="store_true", help="checks that the script works, measures nothing")
    parser.add_argument("--output", type=Path, default=RESULTS / "remote_channel.json")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.turns, args.prompts, args.tokens = 20, 1, 2, 24
    quiet()
    torch.set_num_threads(1)
    delays = [float(delay) for delay in args.delays.split(",")]
    demo = demo_pair()
    facts = machine_facts() | model_facts(demo.verifier, demo.drafter)
    tokenizer = Tokenizer.load(demo.verifier)
    facts["prompts"] = describe(held_out_prompts(tokenizer, stdlib_root(), args.prompts))
    facts["delay"] = "of every message, each way, by a proxy in the script; a round has two messages"
    hops = measure_hops(delays, args.rounds)
    pairs = asyncio.run(measure_pairs(delays, args))
    report = Report("remote_channel", facts, tables(hops, pairs), {"hops": hops, "pairs": pairs})
    report.show()
    report.save(args.output)


if __name__ == "__main__":
    main()
