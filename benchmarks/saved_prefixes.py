"""What a saved prefix is worth: time to the first token behind a system prompt, cold, warm, and from disk again.

    .venv/bin/python benchmarks/saved_prefixes.py [--tokens N] [--repeats N] [--quick]

In process, one thread, greedy, chains of fixed length. Each repeat has new engines over the same weights: a restart is
one of everything but the process, without keys and values, and without a context of the drafter. Cases take turns;
figures are medians. All texts must be equal.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from local_engine import Pair, add_model_options, chosen_pair, greedy, quiet
from report import Report, Table, machine_facts, model_facts

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.drafters.base import Drafter
from wingbeat.runtime.drafters.registry import load_drafter
from wingbeat.runtime.engine.engine import Engine
from wingbeat.runtime.heads.target import TargetDescription
from wingbeat.runtime.llm import build_engine
from wingbeat.runtime.prefixes.identity import identity_of, tokenizer_digest
from wingbeat.runtime.prefixes.prefix_keeper import PrefixKeeper
from wingbeat.runtime.prefixes.prefix_store import PrefixStore
from wingbeat.runtime.prefixes.saved_prefix import SavedPrefix
from wingbeat.runtime.scheduling.request import Request, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel
from wingbeat.runtime.verifier.loading.loader import load_model

MAX_MODEL_LEN = 2048
QUESTION_TOKENS = 24
COLD, WARM, FIRST, SECOND = "cold", "warm", "restarted, first request", "restarted, second request"
CASES = (COLD, WARM, FIRST, SECOND)


class Answer(NamedTuple):
    """One request, run alone."""

    ttft_s: float
    total_s: float
    token_ids: list[int]
    num_cached: int


class Setup(NamedTuple):
    """What engines are made of."""

    loaded: LoadedModel
    new_drafter: Callable[[], Drafter | None]
    new_store: Callable[[Path], PrefixStore]
    config: EngineConfig


def main() -> None:
    """Measure, print and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_model_options(parser)
    parser.add_argument("--tokens", type=int, default=1500, help="of the prefix")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    if args.quick:
        args.repeats, args.max_tokens, args.tokens = 1, 8, 300
    quiet()
    torch.set_num_threads(1)
    pair = chosen_pair(args)
    tokens = corpus_tokens(Tokenizer.load(pair.model), args.corpus, args.tokens + QUESTION_TOKENS)
    prefix, params = SavedPrefix("system", 1, tuple(tokens[: args.tokens])), greedy(args.max_tokens)
    loaded = load_model(pair.model, torch.float32, torch.device("cpu"))
    rows, figures = [], {}
    for name in ("plain", "speculating"):
        setup = setup_of(pair, loaded, drafts=name == "speculating")
        measured = [one_repeat(setup, prefix, tokens, params) for _ in range(args.repeats + 1)][1:]
        figures[name] = {key: [one[key] for one in measured] for key in measured[0]}
        rows += [row(name, case, figures[name]) for case in CASES]
    texts = {tuple(text) for name in figures for texts in figures[name].pop("texts") for text in texts}
    figures["num_texts"] = len(texts)
    columns = ("", "first token, ms", f"/ {COLD}", f"{args.max_tokens} tokens, ms", "tokens cached", "replayed")
    note = f"{len(texts)} text in all. " + " ".join(
        f"{name.capitalize()}, the files have {statistics.median(figures[name]['file_bytes']) / 2**20:.1f} MiB, read "
        f"and checked in {1e3 * statistics.median(figures[name]['read_s']):.0f} ms when the engine starts."
        for name in ("plain", "speculating")
    )
    title = f"A prefix of {args.tokens} tokens before a question of {QUESTION_TOKENS}, one request at a time"
    workload = {"workload": f"{args.repeats} repeats, source text of Python's library"}
    report = Report("Saved prefixes", machine_facts() | model_facts(*pair) | workload, [], figures)
    report = Report(report.name, report.facts, [Table(title, columns, rows, note)], figures)
    report.finish(args, "saved_prefixes")


def corpus_tokens(tokenizer: Tokenizer, corpus: Path, count: int) -> list[int]:
    """The beginning of a corpus."""
    tokens: list[int] = []
    for path in sorted(corpus.rglob("*.py")):
        tokens += tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")[: 8 * count])
        if len(tokens) >= count:
            return tokens[:count]
    raise SystemExit(f"{corpus} has less than {count} tokens in its Python files")


def setup_of(pair: Pair, loaded: LoadedModel, drafts: bool) -> Setup:
    """Engines with a drafter or without."""
    shape = SpeculationConfig.default("cpu", adaptive=False)
    per_seq = EngineConfig(max_model_len=MAX_MODEL_LEN, speculation=shape).max_blocks_per_seq
    config = EngineConfig(
        max_num_seqs=4,
        max_model_len=MAX_MODEL_LEN,
        num_kv_blocks=1 + 3 * per_seq,
        max_pinned_tokens=MAX_MODEL_LEN,
        speculation=shape,
    )
    target = TargetDescription.from_checkpoint(pair.model)
    identity, tokenizer = identity_of(pair.model, loaded, config.block_size), tokenizer_digest(pair.model)
    return Setup(
        loaded,
        lambda: load_drafter(str(pair.drafter), target, shape) if drafts else None,
        lambda folder: PrefixStore(folder, identity, tokenizer),
        config,
    )


def one_repeat(setup: Setup, prefix: SavedPrefix, prompt: list[int], params: SamplingParams) -> dict:
    """Every case once."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with engine_of(setup, folder) as (engine, keeper):
            cold = ask(engine, prompt, params)
            engine.reset_prefix_cache()
            done = keeper.save(prefix)
            run(engine, keeper)
            assert done.result(0) is None
            keeper.keep([(prefix.name, prefix.version, prefix)]).result()
            warm = ask(engine, prompt, params)
        with engine_of(setup, folder) as (engine, keeper):
            started = time.perf_counter()
            keeper.open()
            read_s = time.perf_counter() - started
            first = ask(engine, prompt, params)
            replayed = engine.stats().num_replayed_tokens
            second = ask(engine, prompt, params)
        size = sum(path.stat().st_size for path in folder.iterdir())
    answers = {COLD: cold, WARM: warm, FIRST: first, SECOND: second}
    return {case: answer[:2] for case, answer in answers.items()} | {
        "cached": {case: answer.num_cached for case, answer in answers.items()},
        "texts": [answer.token_ids for answer in answers.values()],
        "replayed": replayed,
        "read_s": read_s,
        "file_bytes": size,
    }


@contextmanager
def engine_of(setup: Setup, folder: Path) -> Iterator[tuple[Engine, PrefixKeeper]]:
    """A new engine with a new drafter; the weights are free for the next one behind it."""
    engine = build_engine(setup.loaded, setup.config, setup.new_drafter(), InProcessChannel)
    keeper = PrefixKeeper(engine, setup.new_store(folder))
    try:
        yield engine, keeper
    finally:
        keeper.close()
        engine.model.remove_taps()


def ask(engine: Engine, prompt: list[int], params: SamplingParams) -> Answer:
    """One request."""
    started, first_s, token_ids, num_cached = time.perf_counter(), 0.0, [], 0
    engine.add_request(Request("r", tuple(prompt), params))
    while engine.has_unfinished_requests():
        for output in engine.step():
            first_s = first_s or time.perf_counter() - started
            token_ids += output.token_ids
            num_cached = max(num_cached, output.num_cached_tokens)
    return Answer(first_s, time.perf_counter() - started, token_ids, num_cached)


def run(engine: Engine, keeper: PrefixKeeper) -> None:
    """What the keeper has asked for."""
    while engine.has_unfinished_requests():
        for output in engine.step():
            keeper.take(output)


def row(name: str, case: str, figures: dict) -> tuple[str, ...]:
    """Of the table."""
    ttft, total = (statistics.median(one[index] for one in figures[case]) for index in range(2))
    ratio = statistics.median(one[0] / cold[0] for one, cold in zip(figures[case], figures[COLD], strict=True))
    replayed = str(figures["replayed"][0]) if case == FIRST else ""
    cached = str(figures["cached"][0][case])
    return f"{name}, {case}", f"{1e3 * ttft:.1f}", f"{ratio:.2f}", f"{1e3 * total:.0f}", cached, replayed


if __name__ == "__main__":
    main()
