"""Acceptance length and acceptance per position of a drafter, for a chain and for the default tree.

    .venv/bin/python benchmarks/acceptance.py [--model DIR --drafter DIR] [--json FILE]

Greedy, 64 prompts from held-out Python files, 128 tokens each, in process, batches of 16. Both shapes must return the
same tokens: that is checked as well.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from local_engine import Generation, Pair, add_model_options, chosen_pair, generate, greedy, open_llm, quiet
from report import RESULTS, Report, Table, machine_facts, model_facts
from workload import Prompt, describe, held_out_prompts

from wingbeat.runtime.config import SpeculationConfig
from wingbeat.runtime.scheduling.speculation_metrics import SpeculationMetrics
from wingbeat.runtime.tokenizer import Tokenizer

CHAIN_STEPS = 5
BATCH = 16


class Shape(NamedTuple):
    """A shape of draft."""

    name: str
    speculation: SpeculationConfig


SHAPES = (
    Shape(f"chain of {CHAIN_STEPS}", SpeculationConfig(CHAIN_STEPS, 1, CHAIN_STEPS + 1)),
    Shape("default tree", SpeculationConfig()),
)


def measure(pair: Pair, shape: Shape, prompts: list[Prompt], max_tokens: int) -> Generation:
    """Continue every prompt with one shape of draft."""
    llm = open_llm(pair, max_num_seqs=BATCH, speculation=shape.speculation)
    return generate(llm, [prompt.token_ids for prompt in prompts], greedy(max_tokens))


def table(results: dict[str, SpeculationMetrics], title: str) -> Table:
    """One row per shape; columns for as many positions as the deepest draft has."""
    depth = max(len(metrics.acceptance_rate_per_pos()) for metrics in results.values())
    columns = ("draft", "nodes per round", "acceptance length", *(f"position {index + 1}" for index in range(depth)))
    rows = []
    for name, metrics in results.items():
        rates = [f"{rate:.3f}" for rate in metrics.acceptance_rate_per_pos()]
        nodes = metrics.num_draft_tokens / metrics.num_drafts if metrics.num_drafts else 0.0
        row = (name, f"{nodes:.1f}", f"{metrics.acceptance_length:.2f}", *rates)
        rows.append((*row, *["-"] * (len(columns) - len(row))))
    note = "Position p: share of drafts whose node at depth p was accepted, of those whose node at depth p - 1 was."
    return Table(title, columns, rows, note)


def run(args: argparse.Namespace) -> Report:
    """Measure both shapes."""
    pair = chosen_pair(args)
    num_prompts, max_tokens = (4, 16) if args.quick else (args.prompts, args.max_tokens)
    prompts = held_out_prompts(Tokenizer.load(pair.model), args.corpus, num_prompts)
    facts = {**machine_facts(), **model_facts(*pair)}
    facts["workload"] = f"{describe(prompts)}; greedy, {max_tokens} tokens each, batches of {BATCH}"
    done = {shape.name: measure(pair, shape, prompts, max_tokens) for shape in SHAPES}
    first, *others = (generation.token_ids for generation in done.values())
    same = sum(all(token_ids[index] == first[index] for token_ids in others) for index in range(num_prompts))
    facts["same tokens by both shapes"] = f"{same} of {num_prompts} prompts"
    metrics = {name: generation.metrics for name, generation in done.items()}
    figures = {"num_prompts": num_prompts, "max_tokens": max_tokens, "num_prompts_with_same_tokens": same}
    figures["shapes"] = {
        shape.name: {
            "draft_steps": shape.speculation.draft_steps,
            "draft_top_k": shape.speculation.draft_top_k,
            "verify_tree_size": shape.speculation.verify_tree_size,
            **metrics[shape.name].as_dict(),
        }
        for shape in SHAPES
    }
    return Report("Acceptance", facts, [table(metrics, "Acceptance on held-out text")], figures)


def main() -> None:
    """Measure, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--json", type=Path, dest="output", help="the same as --output")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    args = parser.parse_args()
    quiet()
    report = run(args)
    report.show()
    output = args.output or (None if args.quick else RESULTS / "acceptance.json")
    if output is not None:
        report.save(output)


if __name__ == "__main__":
    main()
