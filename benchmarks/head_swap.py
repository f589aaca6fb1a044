"""What a swap of heads costs, and whether draft KV of the version before is worth computing again.

    .venv/bin/python benchmarks/head_swap.py HEAD [--first FOLDER] [--streams N] [--tokens N]

In process, the demo's verifier, fixed trees. Streams begin with the demo's head, or that in FOLDER, and go on
with HEAD, another version of it (such as `benchmarks/learning.py --keep` leaves): by a swap, which keeps the draft KV;
with a new drafter for which all contexts are computed again; and, to compare with, with HEAD from the beginning. Tokens
per round are those of the second half of each text. All texts must be equal.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

import torch
from report import Report, Table, machine_facts, model_facts

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.deployments.app_config import AppConfig
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.drafters.worker import DraftWorker
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.inner_drafter import attach
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.loading.loader import load_model

PROMPT = (
    "class Server{}:\n    def __init__(self, host):\n        self.host = host\n\n    def handle_{}(self):\n        "
)


class Went(NamedTuple):
    """One way through the streams."""

    texts: list[list[int]]
    length: float
    """Tokens per round of the second halves."""
    replayed: int
    """Tokens whose draft KV was computed again."""
    swap_ms: float
    """Between two rounds."""


class Streams:
    """Texts that are written by one engine."""

    def __init__(self, folder: Path, first: str, count: int, tokens: int, temperature: float) -> None:
        self._target = TargetDescription.from_checkpoint(folder)
        self._loaded = load_model(folder, torch.float32, torch.device("cpu"))
        self._speculation = SpeculationConfig(adaptive=False)
        self._first, self._tokens, self._temperature = first, tokens, temperature
        tokenizer = Tokenizer.load(folder)
        self._prompts = [tokenizer.encode(PROMPT.format(index, index)) for index in range(count)]

    def go(self, then: str, how: str) -> Went:
        """Half with the first head, half with another, or all with that."""
        config = EngineConfig(max_num_seqs=len(self._prompts), speculation=self._speculation, num_kv_blocks=2000)
        drafter = self._drafter(then if how == "from the beginning" else self._first)
        worker, engine = DraftWorker(drafter), Engine(self._loaded, config, drafter.needs)
        channel = attach(engine, worker, InProcessChannel)
        for index, prompt in enumerate(self._prompts):
            params = SamplingParams(max_tokens=self._tokens, temperature=self._temperature, seed=index, ignore_eos=True)
            engine.add_request(Request(str(index), tuple(prompt), params))
        texts: list[list[int]] = [[] for _ in self._prompts]
        swapped, swap_ms, before = False, 0.0, engine.speculation
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[int(output.request_id)] += output.token_ids
            if not swapped and min(map(len, texts)) >= self._tokens // 2:
                swapped, before = True, engine.speculation
                if how == "swap":
                    head = drafter.prepare_head(then)
                    began = time.perf_counter()
                    worker.offer_head(1, head)
                    worker.take_offered_head()
                    swap_ms = 1e3 * (time.perf_counter() - began)
                elif how == "computed again":
                    other = DraftWorker(self._drafter(then))
                    other.attach("local", channel.attach(2))
                    channel.pump = other.run_once
                    engine.attach_drafter(channel.verifier_end)
        after = engine.speculation
        engine.model.remove_taps()
        rounds = after.num_drafts - before.num_drafts
        length = 1 + (after.num_accepted_tokens - before.num_accepted_tokens) / rounds
        return Went(texts, length, engine.stats().num_replayed_tokens, swap_ms)

    def _drafter(self, source: str):
        return load_drafter(source, self._target, self._speculation)


def main() -> None:
    """Measure, show and keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of another version of the demo's head")
    parser.add_argument("--first", type=Path, help="folder of the head that streams begin with; the demo's by default")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--temperature", type=float, default=0.8, help="greedily, texts of the demo repeat themselves")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    parser.add_argument("--quick", action="store_true", help="a few short texts: shows that it runs")
    options = parser.parse_args()
    if options.quick:
        options.streams, options.tokens = 4, 64
    config = AppConfig()
    streams = Streams(
        config.model_dir(),
        str(options.first or config.choice().source),
        options.streams,
        options.tokens,
        options.temperature,
    )
    ways = ("swap", "computed again", "from the beginning")
    found = {how: streams.go(str(options.head), how) for how in ways}
    if len({str(went.texts) for went in found.values()}) != 1:
        raise SystemExit("the text depends on who drafts")
    rows = [(how, f"{went.length:.3f}", str(went.replayed), f"{went.swap_ms:.2f}") for how, went in found.items()]
    columns = ("draft KV of the first half", "tokens per round, second half", "tokens computed again", "swap, ms")
    facts = machine_facts() | model_facts(config.model_dir(), config.choice().source)
    facts["drafter"] = f"{options.first or 'the demo head'}, then {options.head}"
    size = f"{options.streams} texts of {options.tokens} tokens at once"
    facts["workload"] = f"{size}, the second half after the swap; temperature {options.temperature:g}"
    report = Report("A swap of heads", facts, [Table("Draft KV after a swap", columns, rows)], {"rows": rows})
    report.finish(options, "head_swap")


if __name__ == "__main__":
    main()
