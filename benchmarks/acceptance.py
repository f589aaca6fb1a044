"""Acceptance length and acceptance per position of every head of a verifier, for chains and for the default tree.

    .venv/bin/python benchmarks/acceptance.py [--model DIR --drafter DIR] [--other NAME=DIR] [--json FILE]

Runs in process, in batches of 16: 64 prompts from held-out Python files, 128 tokens each, greedy and sampled at
temperature 1 with one seed. The report counts the prompts for which all heads and shapes return the same tokens; they
must all agree.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from local_engine import (
    Generation,
    Pair,
    add_model_options,
    add_other_drafters,
    chosen_drafters,
    chosen_pair,
    generate,
    open_llm,
    quiet,
    sampled,
)
from report import Report, Table, machine_facts, model_facts
from workload import Prompt, describe, held_out_prompts

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.metrics import SpeculationMetrics
from wingbeat.runtime.tokenizer import Tokenizer

TEMPERATURES = (0.0, 1.0)
BATCH = 16


class Shape(NamedTuple):
    """Draft shape, with its name in the tables."""

    name: str
    speculation: SpeculationConfig


SHAPES = (
    Shape("chain of 5", SpeculationConfig(5, 1, 6)),
    Shape("chain of 7", SpeculationConfig(7, 1, 8)),
    Shape("default tree", SpeculationConfig()),
)


class Run(NamedTuple):
    """Generation by one head with one draft shape at one temperature."""

    head: str
    shape: Shape
    temperature: float
    done: Generation

    def figures(self) -> dict[str, Any]:
        """Measurements for the JSON file."""
        shape = self.shape.speculation
        return {
            "draft_steps": shape.draft_steps,
            "draft_top_k": shape.draft_top_k,
            "verify_tree_size": shape.verify_tree_size,
            **self.done.metrics.as_dict(),
        }


def measure(pair: Pair, heads: dict[str, str | Path], prompts: list[Prompt], max_tokens: int) -> list[Run]:
    """Generates from every prompt with every head, shape and temperature."""
    token_ids = [prompt.token_ids for prompt in prompts]
    runs = []
    for name, head in heads.items():
        for shape in SHAPES:
            llm = open_llm(Pair(pair.model, head), max_num_seqs=BATCH, speculation=shape.speculation)
            for temperature in TEMPERATURES:
                done = generate(llm, token_ids, sampled(max_tokens, temperature))
                runs.append(Run(name, shape, temperature, done))
    return runs


def table(runs: list[Run], title: str) -> Table:
    """Table with one row per head and shape; its columns cover the positions of the deepest draft."""
    rates = [run.done.metrics.acceptance_rate_per_pos() for run in runs]
    depth = max(map(len, rates))
    columns = ("head, draft", "nodes per round", "acceptance length", *(f"position {at + 1}" for at in range(depth)))
    rows = [
        (
            f"{run.head}, {run.shape.name}",
            f"{_nodes(run.done.metrics):.1f}",
            f"{run.done.metrics.acceptance_length:.2f}",
            *(f"{rate:.3f}" for rate in found),
            *["-"] * (depth - len(found)),
        )
        for run, found in zip(runs, rates, strict=True)
    ]
    note = "Position p: share of drafts whose node at depth p was accepted, of those whose node at depth p - 1 was."
    return Table(title, columns, rows, note)


def _nodes(metrics: SpeculationMetrics) -> float:
    return metrics.num_draft_tokens / metrics.num_drafts if metrics.num_drafts else 0.0


def run(args: argparse.Namespace) -> Report:
    """Measures all heads and shapes."""
    pair = chosen_pair(args)
    heads = chosen_drafters(args, pair)
    num_prompts, max_tokens = (4, 16) if args.quick else (args.prompts, args.max_tokens)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, num_prompts)
    facts = {**machine_facts(), **model_facts(*pair)}
    facts |= {f"head {name}": model_facts(pair.model, head)["drafter"] for name, head in heads.items()}
    facts["workload"] = f"{describe(prompts)}; {max_tokens} tokens each, batches of {BATCH}"
    runs = measure(pair, heads, prompts, max_tokens)
    figures: dict[str, Any] = {"num_prompts": num_prompts, "max_tokens": max_tokens, "temperatures": {}}
    tables = []
    for temperature in TEMPERATURES:
        of_it = [run for run in runs if run.temperature == temperature]
        same = sum(len({tuple(run.done.token_ids[index]) for run in of_it}) == 1 for index in range(num_prompts))
        facts[f"same tokens by all at temperature {temperature:g}"] = f"{same} of {num_prompts} prompts"
        by_head = {name: {r.shape.name: r.figures() for r in of_it if r.head == name} for name in heads}
        figures["temperatures"][f"{temperature:g}"] = {"num_prompts_with_same_tokens": same, "heads": by_head}
        tables.append(table(of_it, f"Acceptance on held-out text at temperature {temperature:g}"))
    return Report("Acceptance", facts, tables, figures)


def main() -> None:
    """Measures, prints and writes the report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    add_other_drafters(parser)
    parser.add_argument("--json", type=Path, dest="output", help="the same as --output")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    quiet()
    report = run(args)
    report.finish(args, "acceptance")


if __name__ == "__main__":
    main()
