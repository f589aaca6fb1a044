"""Conversations over several engines, routed by cached prefixes and by load alone: hit rate and time to first token.

    .venv/bin/python benchmarks/prefix_routing.py [--engines 3] [--conversations 18] [--turns 5] [--repeats 2]

Real engines in processes of their own, one router, no HTTP. Each conversation begins with one of a few shared
beginnings, as system prompts are, and each of its turns goes on from all that was said before. The two ways of routing
take turns, each on empty caches. An engine's KV pool holds its share of the conversations, so that what goes to the
wrong engine also drives something out. All answers must be the same.
"""

import argparse
import asyncio
import random
import time
from typing import Any, NamedTuple

from local_engine import add_model_options, chosen_pair, greedy, quiet
from process_engine import EngineClient
from process_fleet import ProcessFleet, process_engines, router
from report import RESULTS, Report, Table, machine_facts, middle, model_facts
from workload import held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.fleet.engine_pool import EnginePool
from wingbeat.deployments.fleet.interface import ModelInfo
from wingbeat.runtime.scheduling.request import Request
from wingbeat.runtime.tokenizer import Tokenizer

NUM_BEGINNINGS = 3
ANSWER_TOKENS = 24
THINK_S = 0.3
WAYS = {"by prefix": True, "by load alone": False}


class Conversation(NamedTuple):
    """What its user says; the answers come between."""

    beginning: list[int]
    turns: list[list[int]]


class Turn(NamedTuple):
    """One request, as its user saw it."""

    first_token_s: float
    num_prompt_tokens: int
    answer: tuple[int, ...]


class Run(NamedTuple):
    """All conversations, routed one way."""

    way: str
    turns: list[list[Turn]]
    elapsed_s: float
    query_tokens: int
    hit_tokens: int

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that engines had cached."""
        return self.hit_tokens / self.query_tokens


def conversations(tokenizer: Tokenizer, args: argparse.Namespace) -> list[Conversation]:
    """The same ones on every call."""
    pieces = [prompt.token_ids for prompt in held_out_prompts(tokenizer, args.corpus, args.conversations * args.turns)]
    tokens = [token_id for piece in pieces for token_id in piece]
    size = args.beginning_tokens
    beginnings = [tokens[number * size : (number + 1) * size] for number in range(NUM_BEGINNINGS)]
    return [
        Conversation(
            beginnings[number % NUM_BEGINNINGS],
            [pieces[number * args.turns + turn][: args.turn_tokens] for turn in range(args.turns)],
        )
        for number in range(args.conversations)
    ]


async def hold(pool: EnginePool, number: int, conversation: Conversation, start_s: float) -> list[Turn]:
    """One conversation, turn after turn."""
    rng, said, turns = random.Random(number), list(conversation.beginning), []
    await asyncio.sleep(start_s)
    for text in conversation.turns:
        said += text
        started, first, answer = time.perf_counter(), None, []
        async for output in pool.generate(Request(f"{number}", tuple(said), greedy(ANSWER_TOKENS))):
            first = time.perf_counter() if first is None else first
            answer += output.token_ids
        turns.append(Turn(first - started, len(said), tuple(answer)))
        said += answer
        await asyncio.sleep(rng.expovariate(1 / THINK_S))
    return turns


async def measure(
    clients: dict[str, EngineClient],
    way: str,
    config: AppConfig,
    info: ModelInfo,
    talks: list[Conversation],
    gap_s: float,
) -> Run:
    """All conversations on empty caches."""
    for client in clients.values():
        await client.call("operate", "reset_prefix_cache", ())
    before = await cache_figures(clients)
    async with router(ProcessFleet(clients, info, WAYS[way]), config, len(clients)) as pool:
        started = time.perf_counter()
        turns = await asyncio.gather(*(hold(pool, n, talk, n * gap_s) for n, talk in enumerate(talks)))
        elapsed_s = time.perf_counter() - started
    after = await cache_figures(clients)
    return Run(way, list(turns), elapsed_s, *(now - then for now, then in zip(after, before, strict=True)))


async def cache_figures(clients: dict[str, EngineClient]) -> list[int]:
    """Tokens that were looked up and found in the prefix caches so far."""
    stats = [(await client.call("figures")).stats for client in clients.values()]
    return [sum(one[name] for one in stats) for name in ("prefix_query_tokens", "prefix_hit_tokens")]


async def run_all(config: AppConfig, info: ModelInfo, talks: list[Conversation], args: argparse.Namespace) -> list[Run]:
    """Both ways, in turns; the first pair of them warms the engines up and does not count."""
    async with process_engines(config, args.engines) as clients:
        await measure(clients, "by prefix", config, info, talks[: args.engines], 0.0)
        runs = []
        for repeat in range(args.repeats):
            for way in list(WAYS) if repeat % 2 == 0 else list(WAYS)[::-1]:
                runs.append(await measure(clients, way, config, info, talks, args.gap_s))
        return runs


def figures_of(run: Run) -> dict[str, Any]:
    """Without the texts."""
    turns = [[(turn.first_token_s, turn.num_prompt_tokens) for turn in talk] for talk in run.turns]
    return run._asdict() | {"turns": turns, "hit_rate": run.hit_rate}


def table(runs: list[Run]) -> Table:
    """A row per way."""
    rows = []
    for way in WAYS:
        mine = [run for run in runs if run.way == way]
        later = [1e3 * turn.first_token_s for run in mine for talk in run.turns for turn in talk[1:]]
        first = [1e3 * talk[0].first_token_s for run in mine for talk in run.turns]
        p95 = sorted(later)[int(0.95 * len(later))]
        hit_rate = middle([run.hit_rate for run in mine])
        elapsed_s = middle([run.elapsed_s for run in mine])
        cells = f"{hit_rate:.1%}", f"{middle(first):.0f}", f"{middle(later):.0f}", f"{p95:.0f}", f"{elapsed_s:.1f}"
        rows.append((way, *cells))
    columns = ("routing", "prefix hit rate", "TTFT ms, first turn", "TTFT ms, later turns", "p95", "whole trace s")
    return Table("Conversations over several engines", columns, rows, "Medians over all turns and repeats.")


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=18)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--beginning-tokens", type=int, default=256)
    parser.add_argument("--turn-tokens", type=int, default=64)
    parser.add_argument("--gap-s", type=float, default=0.4, help="between the starts of two conversations")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    if args.quick:
        args.conversations, args.turns, args.repeats = 4, 2, 1
    quiet()
    pair = chosen_pair(args)
    tokenizer = Tokenizer.load(pair.model)
    talks = conversations(tokenizer, args)
    longest = args.beginning_tokens + args.turns * (args.turn_tokens + ANSWER_TOKENS)
    num_blocks = max(longest // 16 + 8, args.conversations * longest // 16 // args.engines)
    config = AppConfig(
        model=pair.model, drafter="none", max_model_len=longest, max_num_seqs=8, num_kv_blocks=num_blocks
    )
    info = ModelInfo("demo", longest, 2**31, block_size=config.block_size)
    runs = asyncio.run(run_all(config, info, talks, args))
    answers = {tuple(turn.answer for talk in run.turns for turn in talk) for run in runs}
    workload = (
        f"{len(talks)} conversations of {args.turns} turns, at most {args.turn_tokens} tokens said and {ANSWER_TOKENS} "
        f"answered in each, behind {NUM_BEGINNINGS} shared beginnings of {args.beginning_tokens}; one begins every "
        f"{args.gap_s} s; {args.engines} engines of {num_blocks} blocks"
    )
    facts = {**machine_facts(), **model_facts(pair.model, "none"), "workload": workload}
    facts["texts"] = "equal in all runs" if len(answers) == 1 else "DIFFERENT"
    figures = {"runs": [figures_of(run) for run in runs]}
    report = Report("Routing by prefix", facts, [table(runs)], figures)
    report.show()
    report.save(args.output or RESULTS / "prefix_routing.json")


if __name__ == "__main__":
    main()
