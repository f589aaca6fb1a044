"""A chat model on 80 questions that its draft head was not trained on: tokens per round and tokens per second.

    .venv/bin/python benchmarks/real_model.py --model smollm2 --drafter HEAD [--at-once 1 4 16] [--temperatures 0 1]

Suffix drafts, the head, and the head with `suffix_beside` take turns on each group of questions, in one process, each
next to plain decoding in the same engine, so that no ratio depends on a drift of the machine or on where in memory an
engine's weights lie. Ratios are medians over the groups. The texts are compared.
"""

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from local_engine import quiet
from report import Report, Table, machine_facts, spread

from wingbeat.cluster.channels.channel import InProcessChannel
from wingbeat.runtime.config import EngineConfig, SpeculationConfig
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.scheduling.request import SamplingParams

QUESTIONS = Path(__file__).parents[1] / "deployments" / "bench" / "data" / "spec_bench_held_out.jsonl"
DRAFTED = ("suffix", "head", "both")
"""Modes with drafts."""


class Question(NamedTuple):
    """A prompt with its category."""

    category: str
    token_ids: list[int]


@dataclass
class Mode:
    """A way of decoding, with its results."""

    llm: LLM
    rates: list[float] = field(default_factory=list)
    """Tokens per second, by group."""
    plain_rates: list[float] = field(default_factory=list)
    """Tokens per second of plain decoding in the same engine, by group."""
    by_category: dict[str, SpeculationMetrics] = field(default_factory=dict)
    num_equal: int = 0
    """Number of answers equal to plain decoding's."""

    def answer(self, group: list[Question], first: int, temperature: float, max_tokens: int, plain_first: bool) -> None:
        """Answers a group of questions concurrently, with drafts and without."""
        texts = {}
        for speculates in (False, True) if plain_first else (True, False):
            params = [
                SamplingParams(
                    max_tokens=max_tokens, temperature=temperature, seed=first + index, speculation=speculates
                )
                for index in range(len(group))
            ]
            began = time.perf_counter()
            results = self.llm.generate([question.token_ids for question in group], params)
            seconds = time.perf_counter() - began
            rates = self.rates if speculates else self.plain_rates
            rates.append(sum(len(result.token_ids) for result in results) / seconds)
            texts[speculates] = [result.token_ids for result in results]
            for question, result in zip(group, results, strict=True):
                if speculates:
                    self.by_category.setdefault(question.category, SpeculationMetrics()).add(result.metrics)
        self.num_equal += sum(one == other for one, other in zip(texts[True], texts[False], strict=True))

    def tokens_a_round(self, category: str | None = None) -> float:
        """Tokens per verified draft: accepted tokens and the verifier's own."""
        chosen = [one for name, one in self.by_category.items() if category in (None, name)]
        drafts = sum(one.num_drafts for one in chosen)
        return 1 + sum(one.num_accepted_tokens for one in chosen) / max(1, drafts)


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder, GGUF file or name")
    parser.add_argument("--drafter", required=True, help="folder of the model's EAGLE head")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--activations", default="exact", help="value of --cpu-activations")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=128, help="maximum tokens of an answer")
    parser.add_argument("--questions", type=int, default=80, help="number of questions, spread over all categories")
    parser.add_argument("--chain", type=int, help="always draft chains of this length, instead of adaptively")
    parser.add_argument("--quick", action="store_true", help="write no file")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    quiet()
    tables, figures = [], {}
    for temperature in args.temperatures:
        speeds, last = [], {}
        for at_once in args.at_once:
            # Opened anew for each load: suffix drafts would copy answers to the same questions.
            llms = {drafter: opened(args, drafter) for drafter in ("suffix", args.drafter)}
            both = opened(args, args.drafter, suffix_beside=True)
            questions = read_questions(llms["suffix"], args.questions)
            modes = {"suffix": Mode(llms["suffix"]), "head": Mode(llms[args.drafter]), "both": Mode(both)}
            run(modes, questions, at_once, temperature, args.tokens)
            speeds.append(speed_row(modes, at_once, len(questions)))
            figures[f"T={temperature:g}, {at_once} at once"] = {name: figures_of(mode) for name, mode in modes.items()}
            last = modes
        tables += [speed_table(temperature, speeds), acceptance_table(temperature, last)]
    facts = machine_facts() | {"model": Path(args.model).name, "answers": f"at most {args.tokens} tokens"}
    facts["activations"] = args.activations
    Report("real_model", facts, tables, figures).finish(args, "real_model")


def opened(args: argparse.Namespace, drafter: str, suffix_beside: bool = False) -> LLM:
    """Opens the model with a drafter."""
    shape = SpeculationConfig.default("cpu")
    if args.chain is not None:
        shape = SpeculationConfig(args.chain, 1, args.chain + 1)
    config = EngineConfig(
        max_num_seqs=max(args.at_once),
        max_model_len=1536,
        enable_prefix_caching=False,
        speculation=shape,
        cpu_activations=args.activations,
        suffix_beside=suffix_beside,
    )
    given = {"dtype": args.dtype, "device": "cpu", "threads": args.threads, "allow_bad_drafter": True}
    return LLM(args.model, drafter, config, InProcessChannel, **given)


def read_questions(llm: LLM, most: int) -> list[Question]:
    """Questions of all categories, evenly spread over the file."""
    entries = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    chosen = [entries[index * len(entries) // most] for index in range(min(most, len(entries)))]
    return [
        Question(entry["category"], llm.tokenizer.encode_chat([{"role": "user", "content": entry["prompt"]}]))
        for entry in chosen
    ]


def run(modes: dict[str, Mode], questions: list[Question], at_once: int, temperature: float, max_tokens: int) -> None:
    """Has every mode answer every group; the order of modes rotates, and plain decoding is first or last in turn."""
    names = list(modes)
    for number, first in enumerate(range(0, len(questions), at_once)):
        group = questions[first : first + at_once]
        for name in names[number % len(names) :] + names[: number % len(names)]:
            modes[name].answer(group, first, temperature, max_tokens, plain_first=bool(number // len(names) % 2))


def speed_row(modes: dict[str, Mode], at_once: int, num_questions: int) -> tuple[str, ...]:
    """Table row with medians over the groups, and ratios within the same group."""
    cells = [spread(modes["both"].plain_rates)]
    for name in DRAFTED:
        ratios = [rate / plain for rate, plain in zip(modes[name].rates, modes[name].plain_rates, strict=True)]
        cells += [f"{statistics.median(ratios):.2f}", f"{modes[name].num_equal}/{num_questions}"]
    return (str(at_once), *cells)


def speed_table(temperature: float, rows: list[tuple[str, ...]]) -> Table:
    """Table with one row per number of concurrent requests."""
    columns = ("at once", "plain tok/s", *(part for name in DRAFTED for part in (f"{name} x plain", "texts equal")))
    return Table(f"Speed at temperature {temperature:g}", columns, rows)


def acceptance_table(temperature: float, modes: dict[str, Mode]) -> Table:
    """Table with one row per category of questions."""
    categories = sorted(modes["head"].by_category)
    rows = [(name, *(f"{modes[mode].tokens_a_round(name):.2f}" for mode in DRAFTED)) for name in categories]
    rows.append(("all", *(f"{modes[mode].tokens_a_round():.2f}" for mode in DRAFTED)))
    return Table(f"Tokens a round with drafts, temperature {temperature:g}", ("questions", *DRAFTED), rows)


def figures_of(mode: Mode) -> dict[str, Any]:
    """Measurements for the JSON file."""
    return {
        "tokens_per_s": mode.rates,
        "plain_tokens_per_s": mode.plain_rates,
        "tokens_a_round": mode.tokens_a_round(),
        "by_category": {name: mode.tokens_a_round(name) for name in mode.by_category},
        "equal_texts": mode.num_equal,
    }


if __name__ == "__main__":
    main()
