"""Cost of a JSON schema, its benefit for drafts, and the prefix cache's hit rate with drafts and without.

    .venv/bin/python benchmarks/structured.py [--model DIR --drafter DIR] [--repeats N]

In process, one thread, temperature 1 for the schemas and greedy for the conversations. Modes take turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from local_engine import MAX_MODEL_LEN, Generation, Pair, add_model_options, chosen_pair, generate, open_llm, quiet
from report import Report, Table, machine_facts, model_facts, spread

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.masks.allowed_tokens import TokenMasks
from wingbeat.runtime.scheduling.request import GrammarSpec, SamplingParams

PLAIN, DRAFTED, CERTAIN, TOLD, BOTH = "plain", "drafted", "with certain tokens", "drafter told the mask", "both"
CHAIN, TREE = SpeculationConfig(7, 1, 8), SpeculationConfig(5, 4, 16)
DRAFTED_MODES = (PLAIN, DRAFTED, CERTAIN, TOLD, BOTH)
RUNS = (
    ("chain of 7", CHAIN, 1, DRAFTED_MODES),
    ("chain of 7", CHAIN, 4, DRAFTED_MODES),
    ("tree of 16", TREE, 1, DRAFTED_MODES),
    ("no drafter", CHAIN, 1, (PLAIN, CERTAIN)),
    ("no drafter", CHAIN, 4, (PLAIN, CERTAIN)),
)
"""Name and shape of drafts, batch size, modes."""
WORD = {"type": "string", "pattern": "^[a-z]{2,8}$"}
SCHEMAS = [
    {
        "type": "object",
        "properties": {
            "name": WORD,
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "is_active": {"type": "boolean"},
        },
        "required": ["name", "age", "is_active"],
    },
    {
        "type": "object",
        "properties": {
            "function": {"enum": ["get_current_weather", "search_documents", "send_message"]},
            "arguments": {
                "type": "object",
                "properties": {"location": WORD, "unit": {"enum": ["celsius", "fahrenheit"]}},
                "required": ["location", "unit"],
            },
        },
        "required": ["function", "arguments"],
    },
    {
        "type": "object",
        "properties": {
            "repository": WORD,
            "default_branch": {"const": "main"},
            "labels": {"type": "array", "items": {"enum": ["bug", "feature", "question"]}, "maxItems": 3},
            "priority": {"enum": ["low", "normal", "high"]},
        },
        "required": ["repository", "default_branch", "labels", "priority"],
    },
    {
        "type": "object",
        "properties": {
            "coordinates": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "latitude": {"type": "integer", "minimum": -90, "maximum": 90},
                        "longitude": {"type": "integer", "minimum": -180, "maximum": 180},
                    },
                    "required": ["latitude", "longitude"],
                },
                "minItems": 2,
                "maxItems": 3,
            }
        },
        "required": ["coordinates"],
    },
]
PROMPT = "import json\n\nrecord = json.loads('''"
MAX_TOKENS = 128
NUM_CHATS, NUM_TURNS, TURN_TOKENS = 6, 4, 24


class MaskClock:
    """Measures the seconds of filling one round's masks."""

    def __init__(self, masks: TokenMasks) -> None:
        self.fill_s: list[float] = []
        fill = masks._fill

        def timed(*args: object) -> list[int]:
            started = time.perf_counter()
            late = fill(*args)
            self.fill_s.append(time.perf_counter() - started)
            return late

        # The masks are filled on a thread of their own, whose time no public figure contains.
        masks._fill = timed


@contextmanager
def grammars_tell(mode: str) -> Iterator[None]:
    """Selects the grammar information used by drafts: certain tokens, and the root's mask for the drafter."""
    forced, ahead = GrammarMasker.forced, GrammarMasker.ahead
    if mode not in (CERTAIN, BOTH):
        GrammarMasker.forced = lambda self, most: []
    if mode not in (TOLD, BOTH):
        GrammarMasker.ahead = lambda self, token_ids, mask: False
    try:
        yield
    finally:
        GrammarMasker.forced, GrammarMasker.ahead = forced, ahead


class AheadClock:
    """Measures the seconds of computing the drafter's mask, for which a round waits."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        ahead = GrammarMasker.ahead

        def timed(masker: GrammarMasker, token_ids: list[int], mask: np.ndarray) -> bool:
            started = time.perf_counter()
            found = ahead(masker, token_ids, mask)
            self.seconds.append(time.perf_counter() - started)
            return found

        self._ahead, GrammarMasker.ahead = ahead, timed

    def stop(self) -> None:
        """Stops measuring."""
        GrammarMasker.ahead = self._ahead


def run_schemas(llm: LLM, mode: str, batch_size: int, num_seeds: int) -> Generation:
    """Generates from every schema with several seeds."""
    prompt, params = llm.tokenizer.encode(PROMPT), []
    for seed in range(num_seeds):
        for schema in SCHEMAS:
            grammar = GrammarSpec("json", json.dumps(schema))
            params.append(SamplingParams(MAX_TOKENS, 1.0, seed=seed, speculation=mode != PLAIN, grammar=grammar))
    tokens, metrics, started = [], None, time.perf_counter()
    for begin in range(0, len(params), batch_size):
        some = params[begin : begin + batch_size]
        for result in llm.generate([prompt] * len(some), some):
            tokens.append(result.token_ids)
            if metrics is None:
                metrics = result.metrics
            else:
                metrics.add(result.metrics)
    return Generation(time.perf_counter() - started, tokens, metrics)


def schemas_table(pair: Pair, names: list[str], repeats: int, num_seeds: int) -> tuple[list[Table], list[dict]]:
    """Measures speed and acceptance under schemas, and the cost of masks."""
    rows, costs, figures = [], [], []
    for name, shape, batch_size, modes in RUNS:
        if name not in names:
            continue
        drafter = "none" if name == "no drafter" else pair.drafter
        llm = open_llm(Pair(pair.model, drafter), max_num_seqs=batch_size, speculation=shape)
        fill, ahead = MaskClock(llm.engine.runner.masks), AheadClock()
        texts: dict[str, list[list[int]]] = {}
        rates: dict[str, list[float]] = {mode: [] for mode in modes}
        acceptance = {}
        for _ in range(repeats):
            for mode, so_far in rates.items():
                with grammars_tell(mode):
                    result = run_schemas(llm, mode, batch_size, num_seeds)
                so_far.append(result.tokens_per_s)
                acceptance[mode], texts[mode] = result.metrics.acceptance_length, result.token_ids
        ahead.stop()
        if any(text != texts[PLAIN] for text in texts.values()):
            raise SystemExit("the modes wrote different tokens")
        where = {"shape": name, "batch": batch_size}
        for mode, rate in rates.items():
            ratios = [mine / plain for mine, plain in zip(rate, rates[PLAIN], strict=True)]
            label = f"{name}, batch {batch_size}: {mode}"
            rows.append((label, spread(rate, 0), spread(ratios, 2), f"{acceptance[mode]:.2f}"))
            figure = where | {"mode": mode, "acceptance_length": acceptance[mode]}
            figures.append(figure | {"tokens_per_s": rate, "ratio_to_plain": ratios})
        for what, seconds in (("all nodes", fill.fill_s), ("for the drafter", ahead.seconds)):
            if not seconds:
                continue
            row, figure = mask_costs(seconds)
            costs.append((f"{name}, batch {batch_size}: {what}", *row))
            figures.append(where | {"masks": what, "ms": figure})
    speeds = Table(
        "JSON of a schema, temperature 1",
        ("", "tokens/s", "of plain", "acceptance length"),
        rows,
        "All modes write the same tokens.",
    )
    note = "All nodes: of a round, on a thread of its own, beside the forward pass. "
    note += "For the drafter: of a sequence, once the round has ended."
    return [speeds, Table("Masks, ms", ("", "mean", "99 %", "worst", "number"), costs, note)], figures


def mask_costs(seconds: list[float]) -> tuple[tuple[str, ...], dict[str, float]]:
    """Table row and figures of mask costs, in ms."""
    ms = sorted(1e3 * value for value in seconds)
    figure = {"mean": statistics.mean(ms), "p99": ms[len(ms) * 99 // 100], "worst": ms[-1]}
    return (*(f"{value:.3f}" for value in figure.values()), str(len(ms))), figure


def hits(pair: Pair, speculation: bool, num_turns: int) -> tuple[float, list[list[int]]]:
    """Share of prompt tokens found in the prefix cache over growing conversations, and the conversations."""
    shape = SpeculationConfig.default("cpu")
    config = EngineConfig(max_num_seqs=4, max_model_len=MAX_MODEL_LEN, num_kv_blocks=400, speculation=shape)
    llm = LLM(*pair, config, InProcessChannel, device="cpu")
    params = SamplingParams(TURN_TOKENS, 0.0, ignore_eos=True, speculation=speculation)
    chats = [llm.tokenizer.encode(f"# chat {number}\n" + PROMPT * (1 + number % 3)) for number in range(NUM_CHATS)]
    for turn in range(num_turns):
        result = generate(llm, chats, params, batch_size=4)
        question = llm.tokenizer.encode(f"\n# turn {turn}\nvalue = ")
        chats = [chat + answer + question for chat, answer in zip(chats, result.token_ids, strict=True)]
    blocks = llm.engine.block_manager
    return blocks.hit_tokens / blocks.query_tokens, chats


def main() -> None:
    """Parses options, measures and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--repeats", type=int, default=5)
    names = list(dict.fromkeys(run[0] for run in RUNS))
    parser.add_argument("--drafts", nargs="+", choices=names, default=names)
    parser.add_argument("--seeds", type=int, default=4, help="answers per schema")
    args = parser.parse_args()
    quiet()
    pair, facts = chosen_pair(args), {}
    facts = machine_facts() | model_facts(*pair)
    repeats, num_seeds, num_turns = (1, 1, 2) if args.quick else (args.repeats, args.seeds, NUM_TURNS)
    tables, figures = schemas_table(pair, args.drafts, repeats, num_seeds)
    (with_drafts, chats), (without, same) = (hits(pair, speculation, num_turns) for speculation in (True, False))
    if chats != same:
        raise SystemExit("the conversations differ with speculation on and off")
    rows = [("speculation on", f"{with_drafts:.4f}"), ("speculation off", f"{without:.4f}")]
    note = f"{NUM_CHATS} conversations of {num_turns} turns."
    tables.append(Table("Prefix cache: share of prompt tokens found", ("", "hit rate"), rows, note))
    figures.append({"prefix_hit_rate": {"speculation on": with_drafts, "speculation off": without}})
    report = Report("Structured output", facts, tables, {"runs": figures})
    report.finish(args, "structured")


if __name__ == "__main__":
    main()
