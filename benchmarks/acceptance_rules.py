"""Acceptance length under requests' own rules of sampling, with the drafter told of them and without.

    .venv/bin/python benchmarks/acceptance_rules.py [--heads NAME ..] [--model DIR --drafter DIR] [--prompts N]

Prompts from held-out Python files, JSON of four schemas for the grammar, in process, batches of 16. A drafter that is
told and one that is not must return the same tokens: that is checked as well.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

from local_engine import Pair, add_model_options, add_other_drafters, chosen_drafters, chosen_pair, open_llm, quiet
from report import Report, Table, machine_facts, model_facts
from structured import PROMPT, SCHEMAS
from workload import Prompt, describe, held_out_prompts

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.grammar.grammar_masker import GrammarMasker
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.round.told_rules import ToldRules
from wingbeat.runtime.scheduling.request import GrammarSpec, SamplingParams
from wingbeat.runtime.tokenizer import Tokenizer

BATCH = 16
SHAPES = {"chain of 5": SpeculationConfig(5, 1, 6), "default tree": SpeculationConfig()}
RULES = {
    "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9},
    "temperature 1": {},
    "temperature 1, top-k 20": {"top_k": 20},
    "temperature 1, min-p 0.05": {"min_p": 0.05},
    "greedy, presence 1, frequency 0.5": {"temperature": 0.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    "greedy, repetition 1.2": {"temperature": 0.0, "repetition_penalty": 1.2},
    "temperature 0.7, top-p 0.9, repetition 1.2": {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
}
BANNED = ("\n", " ", "self", "    ", ".")
"""Whose first tokens are banned in a row of its own."""


class Case(NamedTuple):
    """Requests under one rule."""

    name: str
    prompts: list[list[int]]
    params: list[SamplingParams]


class Acceptance(NamedTuple):
    """Of one case with one head and shape."""

    untold: float
    told: float
    same_tokens: bool


@contextmanager
def drafters_told(told: bool) -> Iterator[None]:
    """Whether drafters hear of rules, and of what grammars allow; everything else is the same."""
    if told:
        yield
        return
    with patch.object(ToldRules, "any_of", _never), patch.object(GrammarMasker, "ahead", _never):
        yield


def _never(*args: object) -> bool:
    return False


def cases(tokenizer: Tokenizer, prompts: list[Prompt], max_tokens: int) -> list[Case]:
    """Every rule over the prompts, and a JSON grammar over the schemas."""
    token_ids = [prompt.token_ids for prompt in prompts]
    banned = tuple((tokenizer.encode(text)[0],) for text in BANNED)
    rules = RULES | {"greedy, 5 frequent tokens banned": {"temperature": 0.0, "bad_words": banned}}
    found = [
        Case(name, token_ids, [SamplingParams(max_tokens, seed=0, ignore_eos=True, **rule)] * len(prompts))
        for name, rule in rules.items()
    ]
    grammars = [GrammarSpec("json", json.dumps(schema)) for schema in SCHEMAS]
    seeds = range(-(-len(prompts) // len(grammars)))
    params = [SamplingParams(max_tokens, 1.0, seed=seed, grammar=grammar) for seed in seeds for grammar in grammars]
    return [*found, Case("temperature 1, JSON grammar", [tokenizer.encode(PROMPT)] * len(params), params)]


def generated(llm: LLM, case: Case) -> tuple[float, list[list[int]]]:
    """Acceptance length and tokens."""
    metrics, tokens = SpeculationMetrics(), []
    for begin in range(0, len(case.prompts), BATCH):
        some = slice(begin, begin + BATCH)
        for result in llm.generate(case.prompts[some], case.params[some]):
            tokens.append(result.token_ids)
            metrics.add(result.metrics)
    return metrics.acceptance_length, tokens


def measure(llm: LLM, case: Case) -> Acceptance:
    """One case, told and not."""
    with drafters_told(False):
        untold, before = generated(llm, case)
    with drafters_told(True):
        told, after = generated(llm, case)
    return Acceptance(untold, told, before == after)


def run(args: argparse.Namespace, say: Callable[[str], None]) -> Report:
    """Measure every head, shape and case."""
    pair = chosen_pair(args)
    tokenizer = Tokenizer.load(pair.model)
    num_prompts, max_tokens = (2, 12) if args.quick else (args.prompts, args.max_tokens)
    prompts = held_out_prompts(tokenizer, args.corpus, num_prompts)
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = f"{describe(prompts)}; {max_tokens} tokens each, batches of {BATCH}"
    rows, figures = [], []
    heads = chosen_drafters(args, pair)
    for head in args.heads or heads:
        source = heads[head]
        for shape, speculation in SHAPES.items():
            llm = open_llm(Pair(pair.model, source), max_num_seqs=BATCH, speculation=speculation)
            for case in cases(tokenizer, prompts, max_tokens):
                found = measure(llm, case)
                if not found.same_tokens:
                    raise SystemExit(f"{head}, {shape}, {case.name}: what drafters are told changed tokens")
                ratio = found.told / found.untold
                rows.append((f"{head}, {shape}", case.name, f"{found.untold:.2f}", f"{found.told:.2f}", f"{ratio:.2f}"))
                figures.append({"head": head, "shape": shape, "rules": case.name, **found._asdict()})
                say(" | ".join(rows[-1]))
    columns = ("head, draft", "rules", "not told", "told", "ratio")
    note = "Every case returned the same tokens either way."
    return Report("Acceptance under rules", facts, [Table("Acceptance length", columns, rows, note)], {"runs": figures})


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    add_other_drafters(parser)
    parser.add_argument("--heads", nargs="+", metavar="NAME", help="of these drafters alone")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    quiet()
    report = run(args, lambda line: print(line, flush=True))
    report.finish(args, "acceptance_rules")


if __name__ == "__main__":
    main()
