"""What a JSON schema costs, what drafting its certain tokens buys, and the prefix cache's hits with drafts and without.

    python benchmarks/structured.py [--model DIR --drafter DIR] [--repeats N]

In process, one thread, temperature 1 for the schemas and greedy for the conversations. Modes take turns.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from local_engine import MAX_MODEL_LEN, Generation, Pair, add_model_options, chosen_pair, generate, open_llm, quiet
from report import RESULTS, Report, Table, machine_facts, model_facts, spread

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.grammar.maskers import GrammarMasker
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.scheduling.request import GrammarSpec, SamplingParams
from wingbeat.runtime.verifier.token_masks import TokenMasks

PLAIN, DRAFTED, FORCED = "plain", "drafted", "drafted, certain tokens too"
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
    """Seconds of filling one round's masks, and of waiting for them once the forward pass is done."""

    def __init__(self, masks: TokenMasks) -> None:
        self.fill_s: list[float] = []
        fill = masks._fill

        def timed(*args: object) -> list[int]:
            started = time.perf_counter()
            late = fill(*args)
            self.fill_s.append(time.perf_counter() - started)
            return late

        # What is measured is the work of the masks' own thread, which nothing else can see.
        masks._fill = timed


@contextmanager
def without_certain_tokens() -> Iterator[None]:
    """Draft only what the drafter drafts."""
    forced = GrammarMasker.forced
    GrammarMasker.forced = lambda self, most: []
    try:
        yield
    finally:
        GrammarMasker.forced = forced


def run_schemas(llm: LLM, mode: str, batch_size: int, num_seeds: int) -> Generation:
    """Every schema with several seeds."""
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


def schemas_table(pair: Pair, repeats: int, num_seeds: int) -> tuple[list[Table], list[dict]]:
    """Speed and acceptance under schemas, and what masks cost."""
    rows, costs, figures = [], [], []
    for batch_size in (1, 4):
        llm = open_llm(pair, max_num_seqs=batch_size, speculation=SpeculationConfig(5, 4, 16))
        clock = MaskClock(llm.engine.runner.masks)
        rates: dict[str, list[float]] = {mode: [] for mode in (PLAIN, DRAFTED, FORCED)}
        acceptance, texts = {}, {}
        for _ in range(repeats):
            for mode, so_far in rates.items():
                with without_certain_tokens() if mode == DRAFTED else nullcontext():
                    result = run_schemas(llm, mode, batch_size, num_seeds)
                so_far.append(result.tokens_per_s)
                acceptance[mode], texts[mode] = result.metrics.acceptance_length, result.token_ids
        if any(text != texts[PLAIN] for text in texts.values()):
            raise SystemExit("the modes wrote different tokens")
        for mode, rate in rates.items():
            ratios = [mine / plain for mine, plain in zip(rate, rates[PLAIN], strict=True)]
            name = f"{mode}, batch {batch_size}"
            rows.append((name, spread(rate, 0), spread(ratios, 2), f"{acceptance[mode]:.2f}"))
            figure = {"mode": mode, "batch": batch_size, "acceptance_length": acceptance[mode]}
            figures.append(figure | {"tokens_per_s": rate, "ratio_to_plain": ratios})
        fill_ms = sorted(1e3 * value for value in clock.fill_s)
        figures.append({"batch": batch_size, "mask_ms": {"mean": statistics.mean(fill_ms), "worst": fill_ms[-1]}})
        costs.append(
            (
                f"batch {batch_size}",
                f"{statistics.mean(fill_ms):.3f}",
                f"{fill_ms[len(fill_ms) * 99 // 100]:.3f}",
                f"{fill_ms[-1]:.3f}",
                str(len(fill_ms)),
            )
        )
    speeds = Table(
        "JSON of a schema, temperature 1",
        ("", "tokens/s", "of plain", "acceptance length"),
        rows,
        "All modes write the same tokens.",
    )
    note = "On a thread of its own, while the forward pass runs."
    return [speeds, Table("Masks of one round, ms", ("", "mean", "99 %", "worst", "rounds"), costs, note)], figures


def hits(pair: Pair, speculation: bool, num_turns: int) -> tuple[float, list[list[int]]]:
    """Share of prompt tokens that the prefix cache held, over conversations that grow turn by turn; and the answers."""
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
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    quiet()
    pair, facts = chosen_pair(args), {}
    facts = machine_facts() | model_facts(*pair)
    repeats, num_seeds, num_turns = (1, 1, 2) if args.quick else (args.repeats, 4, NUM_TURNS)
    tables, figures = schemas_table(pair, repeats, num_seeds)
    (with_drafts, chats), (without, same) = (hits(pair, speculation, num_turns) for speculation in (True, False))
    if chats != same:
        raise SystemExit("the conversations differ with speculation on and off")
    rows = [("speculation on", f"{with_drafts:.4f}"), ("speculation off", f"{without:.4f}")]
    note = f"{NUM_CHATS} conversations of {num_turns} turns."
    tables.append(Table("Prefix cache: share of prompt tokens found", ("", "hit rate"), rows, note))
    figures.append({"prefix_hit_rate": {"speculation on": with_drafts, "speculation off": without}})
    report = Report("Structured output", facts, tables, {"runs": figures})
    report.show()
    output = args.output or (None if args.quick else RESULTS / "structured.json")
    if output is not None:
        report.save(output)


if __name__ == "__main__":
    main()
