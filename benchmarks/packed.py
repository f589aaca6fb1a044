"""Plain decoding with weights held in several forms: tokens per second, and memory of the weights.

    .venv/bin/python benchmarks/packed.py MODEL[:DTYPE] [MODEL[:DTYPE] ..] [--at-once 1 4 16] [--output FILE]

A MODEL is a folder or a GGUF file; DTYPE is one of `--dtype`, float32 unless given. Blocks of the models alternate, so
that a drift of the machine meets all alike; figures are medians over the repeats, with the least and the most.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

from local_engine import Pair, generate, greedy, open_llm, quiet
from report import Report, Table, machine_facts, spread
from workload import describe, held_out_prompts

from wingbeat.runtime.hub import checkpoint_folder
from wingbeat.runtime.llm import LLM
from wingbeat.runtime.standard_library import stdlib_root
from wingbeat.runtime.tokenizer import Tokenizer


class Held(NamedTuple):
    """A model in one form."""

    name: str
    llm: LLM
    rates: dict[int, list[float]]
    """Tokens per second of each block, by requests at once."""


def opened(given: str, most: int) -> Held:
    """Load a model; plain decoding needs no drafter."""
    path, _, dtype = given.partition(":")
    llm = open_llm(Pair(Path(path), "none"), max_num_seqs=most, dtype=dtype or "float32")
    return Held(f"{Path(path).name}{f' as {dtype}' if dtype else ''}", llm, {})


def main() -> None:
    """Measure what the arguments ask for, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL[:DTYPE]")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="keep no file of the figures")
    parser.add_argument("--output", type=Path, help="JSON file for the figures; markdown goes beside it")
    args = parser.parse_args()
    quiet()
    models = [opened(given, max(args.at_once)) for given in args.models]
    tokenizer = Tokenizer.load(checkpoint_folder(args.models[0].partition(":")[0]))
    prompts = held_out_prompts(tokenizer, stdlib_root(), max(args.at_once))
    for repeat in range(1 + args.repeats):
        for at_once in args.at_once:
            for model in models:
                ids = [one.token_ids for one in prompts[:at_once]]
                generated = generate(model.llm, ids, greedy(args.tokens, speculation=False))
                if repeat:  # the first one warms up
                    model.rates.setdefault(at_once, []).append(generated.tokens_per_s)
    columns = ("weights", "MB", *(f"{count} at once" for count in args.at_once))
    rows = [
        (
            model.name,
            f"{model.llm.engine.loaded.weights_bytes / 1e6:.0f}",
            *(spread(model.rates[count]) for count in args.at_once),
        )
        for model in models
    ]
    facts = machine_facts() | {"prompts": describe(prompts), "answers": f"{args.tokens} tokens"}
    figures = {model.name: {str(count): rates for count, rates in model.rates.items()} for model in models}
    report = Report("packed", facts, [Table("Tokens per second, plain decoding", columns, rows)], figures)
    report.finish(args, "packed")


if __name__ == "__main__":
    main()
