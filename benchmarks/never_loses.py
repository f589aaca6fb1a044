"""Speculation against plain decoding where it may lose: weak heads, a busy machine, long contexts, many requests.

    .venv/bin/python benchmarks/never_loses.py [--short] [--case NAME ..] [--smollm2 DIR]

One application per case, over HTTP, its drafter in a process of its own. Plain requests disable drafts in the same
application. Blocks of both take turns, in one order and then in the other, and a ratio is between two neighbouring
blocks, so that a drift of the machine affects both alike; a row has the median and the range. Exits with 1 if a median
is below its required minimum. The whole table takes about an hour, `--short` ten minutes, and about as long again for
SmolLM2's longest context.
"""

import argparse
import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from http_load import LoadClient
from local_engine import quiet
from report import Report, Table, machine_facts, middle, spread
from servers import App, wingbeat_apps
from serving import request_body, summed
from workload import PROMPT_TOKENS, Prompt, describe, held_out_prompts

from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import BENCHMARK_VARIABLE
from wingbeat.runtime.demo import demo_pair
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer

LEAST, QUIET_LEAST = 0.97, {1: 1.6, 4: 1.05, 8: 1.05, 16: 1.05}
"""Required ratios to plain decoding: in general, and for the demo pair alone on the machine, by concurrent requests."""
LOADS = (1, 2, 4, 8, 16)
BLOCK_TOKENS, MAX_TOKENS, MOST_AT_ONCE = 2048, 96, 16
"""Tokens of a block and of each of its requests, unless a case differs."""
TURNS, SHORT_TURNS = 5, 3
DEMO, SMOLLM2 = "demo pair", "SmolLM2"


class Case(NamedTuple):
    """Application to measure, and processes that run beside it."""

    name: str
    model: str
    loads: tuple[int, ...] = LOADS
    short_loads: tuple[int, ...] = ()
    accepted: float | None = None
    """Probability with which each level is accepted (forced acceptance); None keeps the drafter's own acceptance."""
    context: int = 0
    """Tokens of each prompt, served from the prefix cache; 0 means prompts of 64 to 256 tokens, computed anew each
    time."""
    bystanders: int = 0
    """Number of processes that only keep a core busy."""
    block_tokens: int = BLOCK_TOKENS
    max_tokens: int = MAX_TOKENS


CASES = (
    Case("demo", DEMO, short_loads=(1, 4, 8, 16)),
    Case("demo, 1.2 tokens a round", DEMO, accepted=0.17),
    Case("demo, 1.5 tokens a round", DEMO, accepted=0.34, short_loads=(1, 8)),
    Case("demo, 2.1 tokens a round", DEMO, accepted=0.55),
    Case("demo, a busy core", DEMO, bystanders=1, short_loads=(1, 4)),
    Case("demo, context of 1k", DEMO, context=1024),
    Case("SmolLM2, suffix drafts", SMOLLM2, block_tokens=768),
    Case("SmolLM2, context of 1k", SMOLLM2, context=1024, block_tokens=768),
    Case("SmolLM2, context of 4k", SMOLLM2, (1, 2, 4), (1, 4), context=4096, block_tokens=256, max_tokens=32),
)


class Row(NamedTuple):
    """Result of a case at one load: tokens per second of its blocks, turn by turn."""

    case: Case
    load: int
    plain: list[float]
    speculating: list[float]
    acceptance_length: float
    decisions: dict[str, int]
    """Rounds at this load, by the policy's reason."""

    @property
    def ratios(self) -> list[float]:
        return [ours / plain for ours, plain in zip(self.speculating, self.plain, strict=True)]

    @property
    def asked(self) -> float:
        """Required minimum of the median ratio."""
        return QUIET_LEAST.get(self.load, LEAST) if self.case == CASES[0] else LEAST


@contextlib.contextmanager
def busy(number: int) -> Iterator[None]:
    """Runs processes that only keep cores busy, until the block ends."""
    own = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in own:
            process.kill()
            process.wait()


def settings_of(case: Case, smollm2: Path | None) -> AppConfig:
    """Configuration of a case's application; otherwise the defaults."""
    pair = demo_pair()
    model, drafter = (pair.verifier, str(pair.drafter)) if case.model == DEMO else (smollm2, "suffix")
    given: dict[str, Any] = {"model": model, "drafter": drafter, "served_model_name": "benchmark"}
    given |= {"max_num_seqs": MOST_AT_ONCE, "max_model_len": max(512, case.context + 512)}
    given |= {"enable_prefix_caching": bool(case.context)}
    if case.accepted is not None:
        given["forced_acceptance"] = (case.accepted,)
    return AppConfig(**given)


def prompts_of(case: Case, tokenizer: Tokenizer, count: int) -> list[Prompt]:
    """Prompts of a case, cut to its context length."""
    if not case.context:
        return held_out_prompts(tokenizer, stdlib_root(), count)
    pieces = held_out_prompts(tokenizer, stdlib_root(), count * case.context // min(PROMPT_TOKENS) // 2)
    found = []
    for number in range(count):
        joined = "".join(piece.text for piece in pieces[number::count])
        found.append(Prompt(str(number), tokenizer.decode(tokenizer.encode(joined)[: case.context]), []))
    return found


def run_case(case: Case, args: argparse.Namespace) -> Iterator[Row]:
    """Measures every load of a case."""
    config = settings_of(case, args.smollm2)
    prompts = prompts_of(case, Tokenizer.load(config.model_dir()), max(case.loads) if case.context else 64)
    turns = SHORT_TURNS if args.short else TURNS
    with wingbeat_apps({"app": config}) as apps, LoadClient() as client, busy(case.bystanders):
        for load in case.short_loads if args.short else case.loads:
            yield run_load(case, apps["app"], client, prompts, load, turns)


def run_load(case: Case, app: App, client: LoadClient, prompts: list[Prompt], load: int, turns: int) -> Row:
    """Runs blocks of both ways in turns; the first block of each is a warm-up and not counted."""
    num_requests = max(case.block_tokens // case.max_tokens, 2 * load)
    model, rates, drafted = client.model_name(app.url), {True: [], False: []}, []
    source, before = itertools.cycle(prompts), app.stats()["policy"]["decisions"]
    for turn in range(turns + 1):
        chosen = list(itertools.islice(source, num_requests))
        for speculates in (True, False) if turn % 2 else (False, True):
            # The first requests have staggered lengths, or all would read their prompts at once.
            lengths = [
                MAX_TOKENS * (place + 1) // load if place < load else MAX_TOKENS for place in range(num_requests)
            ]
            pairs = zip(chosen, lengths, strict=True)
            bodies = [request_body(model, prompt, length, speculates) for prompt, length in pairs]
            block = client.run_block(app.url, bodies, load)
            if turn:
                rates[speculates].append(block.tokens_per_s)
                drafted += block.traces if speculates else []
    now = app.stats()["policy"]["decisions"]
    new = {reason: count - before.get(reason, 0) for reason, count in now.items() if count > before.get(reason, 0)}
    return Row(case, load, rates[False], rates[True], summed(drafted).acceptance_length, new)


def table(rows: list[Row]) -> Table:
    """Table with one row per case and load."""
    lines = [
        (
            row.case.name,
            str(row.load),
            spread(row.plain, 0),
            spread(row.speculating, 0),
            f"{row.acceptance_length:.2f}",
            spread(row.ratios, 2),
            f"{row.asked}",
            ", ".join(f"{reason} {count}" for reason, count in sorted(row.decisions.items()) if reason != "idle"),
        )
        for row in rows
    ]
    columns = ("case", "at once", "plain tok/s", "speculating tok/s", "tokens a draft", "ratio", "asked", "decisions")
    return Table("Speculating over plain decoding: median (range)", columns, lines)


def main() -> None:
    """Measures, prints and writes the report; exits with 1 if a median ratio is below its minimum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="run a part of the cases, in about ten minutes")
    parser.add_argument("--case", nargs="+", choices=[case.name for case in CASES], help="run these cases only")
    parser.add_argument(
        "--smollm2", type=Path, help="folder of SmolLM2-135M-Instruct; without it, its cases are skipped"
    )
    parser.add_argument("--quick", action="store_true", help="as --short, and write no file")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    args.short |= args.quick
    os.environ[BENCHMARK_VARIABLE] = "1"
    quiet()
    facts, rows = machine_facts(), []
    facts["workload"] = describe(held_out_prompts(Tokenizer.load(demo_pair().verifier), stdlib_root(), 64))
    for case in CASES:
        wanted = case.name in args.case if args.case else not args.short or case.short_loads
        if wanted and (case.model == DEMO or args.smollm2 is not None):
            for row in run_case(case, args):
                rows.append(row)
                print(f"{case.name}, {row.load} at once: {spread(row.ratios, 2)}", flush=True)
    series = [row._asdict() | {"case": row.case.name, "ratios": row.ratios} for row in rows]
    Report("Never loses", facts, [table(rows)], {"rows": series}).finish(args, "never_loses")
    sys.exit(any(middle(row.ratios) < row.asked for row in rows))


if __name__ == "__main__":
    main()
