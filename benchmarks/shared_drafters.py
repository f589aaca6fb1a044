"""Verifiers on one drafter that they share, against as many drafters as verifiers: tokens/s and acceptance.

    .venv/bin/python benchmarks/shared_drafters.py [--verifiers 3] [--concurrency 1 4] [--out FILE]

All processes are there throughout: before each block every verifier leaves its drafter for the one of the other
arrangement, so that both meet the same machine. Full chains are drafted. Texts must be those of plain decoding. With
--channel remote, rounds go over TCP, as between nodes.
"""

import argparse
import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from local_engine import MAX_MODEL_LEN, Pair, add_model_options, chosen_pair, greedy, quiet
from process_engine import PlainDrafter, generate
from report import Report, Table, machine_facts, middle, model_facts, spread
from workload import Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.deployments.replica.engine.engine_messages import EngineStart
from wingbeat.deployments.replica.engine_life import EngineLife
from wingbeat.runtime.tokenizer import Tokenizer

PLAIN, OWN, SHARED = "plain", "own", "shared"


class Block(NamedTuple):
    """Requests of all verifiers that ran at once."""

    arrangement: str
    concurrency: int
    """By verifier."""
    elapsed_s: float
    num_tokens: int
    num_drafts: int
    num_accepted: int

    @property
    def tokens_per_s(self) -> float:
        """Of all verifiers together."""
        return self.num_tokens / self.elapsed_s

    @property
    def acceptance(self) -> float:
        """Tokens by draft, the bonus token among them."""
        return 1 + self.num_accepted / max(1, self.num_drafts)


class Place:
    """The `DrafterHandle` of a verifier here: a place in whichever drafter is its next one."""

    terms: bytes | None = None

    def __init__(self, choose: Callable[[], PlainDrafter]) -> None:
        self._choose = choose

    async def needs(self, terms: bytes) -> None:
        """See `PoolDrafter.needs`."""
        Place.terms = terms

    async def attach(self, channel_name: str, next_incarnation: Callable[[], int]) -> int:
        """Attach to the drafter that is chosen now."""
        placed = await self._choose().call("attach_shared", channel_name, next_incarnation(), self.terms)
        if placed.refusal is not None:
            raise RuntimeError(placed.refusal)
        return placed.pid

    async def renew(self) -> bool:
        """See `PoolDrafter.renew`."""
        return False

    def kill(self) -> None:
        """The drafter stays."""


class World:
    """Verifiers and the drafters of both arrangements."""

    def __init__(self, config: AppConfig, num_verifiers: int) -> None:
        self.config, self.num_verifiers = config, num_verifiers
        self.drafters = [PlainDrafter(config, None) for _ in range(num_verifiers + 1)]
        self.chosen = [self.drafters[-1]] * num_verifiers
        self.lives: list[EngineLife] = []

    async def start(self) -> None:
        """Load everything; all verifiers share a drafter then."""
        address = "127.0.0.1" if self.config.channel == "remote" else None
        for number in range(self.num_verifiers):

            def launch(_: bytes | None, number: int = number) -> Place:
                return Place(lambda: self.chosen[number])

            self.lives.append(EngineLife(EngineStart(self.config, f"shared-{number}", None, (), address), launch))
        await asyncio.gather(*(life.start() for life in self.lives))

    async def arrange(self, arrangement: str) -> None:
        """Attach every verifier to its drafter of an arrangement; as to a drafter in the place of a dead one."""
        shared = arrangement == SHARED
        wanted = [self.drafters[-1]] * self.num_verifiers if shared else self.drafters[: self.num_verifiers]
        if arrangement == PLAIN or wanted == self.chosen:
            return
        before, self.chosen = self.chosen, list(wanted)
        incarnations = [life.supervisor.incarnation for life in self.lives]
        for drafter in dict.fromkeys(before):
            for _ in self.lives:
                await drafter.call("release_newest")
        while not all([await self._moved(*each) for each in zip(self.lives, incarnations, strict=True)]):
            await asyncio.sleep(0.05)

    async def run(self, arrangement: str, prompts: list[list[Prompt]], max_tokens: int) -> tuple[Block, list]:
        """One block, and its tokens."""
        before = [await self._drafted(life) for life in self.lives]
        params = greedy(max_tokens, arrangement != PLAIN)
        started = time.perf_counter()
        work = [
            generate(life.client, [prompt.token_ids for prompt in own], params)
            for life, own in zip(self.lives, prompts, strict=True)
        ]
        tokens = await asyncio.gather(*work)
        elapsed_s = time.perf_counter() - started
        after = [await self._drafted(life) for life in self.lives]
        drafts, accepted = (sum(a[i] - b[i] for a, b in zip(after, before, strict=True)) for i in (0, 1))
        total = sum(len(one) for own in tokens for one in own)
        return Block(arrangement, len(prompts[0]), elapsed_s, total, drafts, accepted), tokens

    async def end(self) -> None:
        """Leave no process behind."""
        for life in self.lives:
            await life.end()
        for drafter in self.drafters:
            drafter.kill()

    @staticmethod
    async def _moved(life: EngineLife, incarnation: int) -> bool:
        figures = await life.client.call("figures")
        return life.supervisor.incarnation > incarnation and figures.drafter_state == "attached"

    @staticmethod
    async def _drafted(life: EngineLife) -> tuple[int, int]:
        speculation = (await life.client.call("figures")).stats["speculation"]
        return speculation["num_drafts"], speculation["num_accepted_tokens"]


async def measure(config: AppConfig, prompts: list[Prompt], args: argparse.Namespace) -> list[Block]:
    """Blocks of all arrangements in turn; the first round of them is not counted.

    Raises:
        RuntimeError: a text is not that of plain decoding.
    """
    world, blocks = World(config, args.verifiers), []
    try:
        await world.start()
        for repeat in range(args.repeats + 1):
            for concurrency in args.concurrency:
                own = [prompts[number :: args.verifiers][:concurrency] for number in range(args.verifiers)]
                expected: Any = None
                for arrangement in (PLAIN, OWN, SHARED):
                    await world.arrange(arrangement)
                    block, tokens = await world.run(arrangement, own, args.max_tokens)
                    expected = tokens if arrangement == PLAIN else expected
                    if tokens != expected:
                        raise RuntimeError(f"{arrangement}: other tokens than plain decoding")
                    blocks += [block] if repeat else []
    finally:
        await world.end()
    return blocks


def table(blocks: list[Block], num_verifiers: int) -> Table:
    """One row per load and arrangement."""
    names = {
        PLAIN: "plain decoding",
        OWN: f"{num_verifiers} drafters, one each",
        SHARED: "1 drafter for all",
    }
    rows = []
    for concurrency, arrangement in dict.fromkeys((block.concurrency, block.arrangement) for block in blocks):
        mine = [b for b in blocks if (b.concurrency, b.arrangement) == (concurrency, arrangement)]
        plain = [b for b in blocks if (b.concurrency, b.arrangement) == (concurrency, PLAIN)]
        ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(mine, plain, strict=True)]
        drafted = arrangement != PLAIN
        rows.append(
            (
                f"{concurrency} requests each, {names[arrangement]}",
                spread([block.tokens_per_s for block in mine]),
                f"{middle(ratios):.2f}",
                f"{middle([block.acceptance for block in mine]):.3f}" if drafted else "-",
            )
        )
    note = "Of all verifiers together; ratios are medians of blocks that followed each other."
    columns = ("", "tokens/s (range)", "to plain", "acceptance length")
    return Table(f"{num_verifiers} verifiers, by their drafters", columns, rows, note)


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--out", type=Path, dest="output", help="the same as --output")
    parser.add_argument("--verifiers", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--channel", choices=("shm", "remote"), default="shm")
    args = parser.parse_args()
    if args.quick:
        args.verifiers, args.concurrency, args.max_tokens, args.repeats = 2, [1], 8, 1
    quiet()
    pair: Pair = chosen_pair(args)
    config = AppConfig(
        model=pair.model,
        drafter=str(pair.drafter),
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=600,
        enable_prefix_caching=False,
        adaptive=False,
        drafters={"num": 1},
        channel=args.channel,
        drafter_back_off_s=0.0,
    )
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, args.verifiers * max(args.concurrency))
    blocks = asyncio.run(measure(config, prompts, args))
    facts = {
        **machine_facts(),
        **model_facts(*pair),
        "workload": f"{describe(prompts)}; {args.max_tokens} tokens each; channel {args.channel}",
    }
    figures = {"blocks": [block._asdict() for block in blocks]}
    report = Report("Shared drafters", facts, [table(blocks, args.verifiers)], figures)
    report.show()
    if args.output is not None:
        report.save(args.output)


if __name__ == "__main__":
    main()
